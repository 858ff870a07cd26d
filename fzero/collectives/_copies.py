"""Sums over ranks in a loss that is one value: those that would count its gradient once for each rank are found.

`psum` has a copy of its result on each rank, and its transpose adds up the gradients of the copies. That is right where
ranks go on with copies each in a way of its own. Where they go on alike, to one loss, the gradients of the copies
are one gradient, n times. Types tell the two apart, as in JAX's `shard_map(check_vma=True)`. What depends on a value
that differs by rank differs, and so do copies of a sum of it; a loss that is one value must not. Here the types are
those of the autograd graph of the loss, so the check is one for simulations and processes, and for a trace.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero._torch.levels import is_differentiated
from fzero._torch.recorder import user_line
from fzero.axes import Axis, Noted, OneLoss, one_loss_here
from fzero.collectives._table import LinearMap, row_of

__all__ = ["Exposed", "check_copies", "noted"]

Edge = tuple[Any, int]
"""A node of an autograd graph, and which of its results is meant."""

_ONE = {
    "psum": "fzero.collectives.psum_invariant(x, {axis!r})",
    "pmean": "fzero.collectives.psum_invariant(x / n, {axis!r})",
    "all_gather": "fzero.collectives.all_gather_invariant(x, {axis!r}, dim=)",
    "broadcast": "fzero.collectives.psum_invariant of x on the source, and of zeros elsewhere",
}


def noted(name: str, axes: Sequence[Axis], y: torch.Tensor) -> torch.Tensor:
    """Take down that a collective was called in a loss that is one value along one of its axes; return its result."""
    here = None if torch.compiler.is_dynamo_compiling() else one_loss_here()
    if here is not None and y.is_floating_point():
        own = tuple([part for a in axes for part in a.name.split(",") if part in here.axes])
        if own and is_differentiated(y):
            here.noted.append(Noted(name, own, user_line()))
            node: Any = y.grad_fn
            if row_of(node) is not None:  # on it, and not it in a list, which would keep all that it holds
                node.noted = here.noted[-1]
        here.hidden |= bool(own)
    return y


def check_copies(results: Sequence[torch.Tensor], one_loss: OneLoss, differ: Mapping[str, set[int]]) -> None:
    """Check that what is one value does not depend, as on one value, on copies of what differs by rank.

    Blocks that are rematerialised, whose graph is not there yet, are told what to check when it is.

    Args:
        results: the loss, or results of such a block of which it is a function.
        one_loss: the axes along which the loss is one value, and the collectives over them that it called.
        differ: axis -> the ids of the differentiated tensors that differ by rank along it.

    Raises:
        ValueError: if it does. Names the line and the function to use.
    """
    for axis in one_loss.axes if one_loss.hidden else ():
        _check([(y.grad_fn, y.output_nr) for y in results], axis, one_loss, differ[axis])


def _check(start: Sequence[Edge], axis: str, one_loss: OneLoss, leaves: set[int]) -> None:
    for node, output in _walk(start, axis):
        row = _over(node, axis)
        if row is not None and row.replicated and not row.one:
            differs, blocks = _differs(node.next_functions, axis, leaves)
            if differs:
                raise ValueError(_counted_often(row.name, axis, node, one_loss.noted))
            for block, own in blocks:
                _exposed(block, axis, one_loss, leaves).summed[own] = (row.name, node)
        if hasattr(node, "exposed"):
            _exposed(node, axis, one_loss, leaves).results.add(output)


def _exposed(block: Any, axis: str, one_loss: OneLoss, leaves: set[int]) -> "Exposed":
    if block.exposed is None:
        block.exposed = {}
    if axis not in block.exposed:
        block.exposed[axis] = Exposed(axis, one_loss, leaves, block.next_functions)
    return block.exposed[axis]


class Exposed:
    """What to check of a block that is rematerialised, once its graph is there.

    Attributes:
        axis: an axis along which the loss is one value.
        one_loss: the loss.
        leaves: the ids of the differentiated tensors around the block that differ by rank.
        behind: the nodes that made the block's arguments, and which of their results these are.
        results: the block's results that the loss depends on, as on one value.
        summed: those of which it depends, as on one value, on copies of a sum: the row's name and its node.
    """

    def __init__(self, axis: str, one_loss: OneLoss, leaves: set[int], behind: Sequence[Edge]) -> None:
        self.axis, self.one_loss, self.leaves, self.behind = axis, one_loss, leaves, behind
        self.results: set[int] = set()
        self.summed: dict[int, tuple[str, Any]] = {}

    def check(self, results: Mapping[int, torch.Tensor], arguments: Mapping[int, torch.Tensor]) -> None:
        """Check a run of the block, and what made its arguments.

        Args:
            results: by number, those that are differentiated.
            arguments: the same of its arguments.
        """
        own = {i: id(x) for i, x in arguments.items()}
        differ = {at for i, at in own.items() if _differs([self.behind[i]], self.axis, self.leaves)[0]}
        for i, (name, node) in self.summed.items():
            if i in results and _differs([(results[i].grad_fn, results[i].output_nr)], self.axis, differ)[0]:
                raise ValueError(_counted_often(name, self.axis, node, self.one_loss.noted))
        start = [(y.grad_fn, y.output_nr) for i, y in results.items() if i in self.results]
        _check(start, self.axis, self.one_loss, differ)
        reached = {id(leaf) for node, _ in _walk(start, self.axis) if (leaf := _leaf(node)) is not None}
        behind = [self.behind[i] for i, at in own.items() if at in reached]
        _check(behind, self.axis, self.one_loss, self.leaves)


# ---------------------------------------------------------------- types, as the autograd graph tells them


def _over(node: Any, axis: str) -> LinearMap | None:
    """Return the row of a node that is a collective over an axis."""
    found = row_of(node)
    return found[0] if found is not None and axis in found[1].axis.split(",") else None


def _leaf(node: Any) -> torch.Tensor | None:
    """Return the tensor at which the graph ends in a node."""
    return getattr(node, "variable", None)


def _differs(start: Sequence[Edge], axis: str, leaves: set[int]) -> tuple[bool, list[Edge]]:
    """Return whether results differ by rank along an axis, as far as what is differentiated says.

    Returns:
        Whether they do; and if not the blocks, and results of these, that may yet make them differ.
    """
    blocks = []
    for node, output in _walk(start, axis):
        row, leaf = _over(node, axis), _leaf(node)
        if (row is not None and not row.replicated) or (leaf is not None and id(leaf) in leaves):
            return True, []
        if hasattr(node, "exposed"):
            blocks.append((node, output))
    return False, blocks


def _walk(start: Sequence[Edge], axis: str) -> Iterator[Edge]:
    """Yield the nodes that results depend on; none behind a block, nor behind what makes one value."""
    stack = [edge for edge in start if edge[0] is not None]
    seen = set(stack)
    while stack:
        node, output = stack.pop()
        yield node, output
        row = _over(node, axis)
        if not hasattr(node, "exposed") and (row is None or not row.one):
            new = [edge for edge in node.next_functions if edge[0] is not None and edge not in seen]
            seen.update(new)
            stack += new


def _counted_often(row: str, axis: str, node: Any, notes: Sequence[Noted]) -> str:
    note = getattr(node, "noted", None) or next((n for n in notes if axis in n.axes), None)
    name, where = (row, "") if note is None else (note.name, f"{note.line}: ")
    one = _ONE.get(name, "the invariant collective").format(axis=axis)
    return (
        f"{where}{name} over {axis!r} gives each rank a copy, and the loss, which is no mean over {axis!r}, depends on "
        f"the copies as on one value: its gradient would come out once for each rank, too large. Use {one}; behind it "
        f"fzero.collectives.pvary(x, {axis!r}) where each rank goes on in a way of its own. If the ranks' "
        f"losses do add up, name "
        f"{axis!r} among the axes of value_and_grad(axis=)"
    )
