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
from fzero.axes.axis import Axis
from fzero.axes.scope import Noted, OneLoss, one_loss_here
from fzero.collectives.table import Row, row_of

__all__ = ["Exposed", "check_copies", "noted"]

_ONE = {
    "psum": "fzero.psum_invariant(x, {axis!r})",
    "pmean": "fzero.psum_invariant(x / n, {axis!r})",
    "all_gather": "fzero.all_gather_invariant(x, {axis!r}, dim=)",
    "broadcast": "fzero.psum_invariant of x on the source, and of zeros elsewhere",
}


def noted(name: str, axes: Sequence[Axis], y: torch.Tensor) -> torch.Tensor:
    """Take down that a collective was called in a loss that is one value along one of its axes; return its result."""
    here = None if torch.compiler.is_dynamo_compiling() else one_loss_here()
    if here is not None and y.is_floating_point():
        own = tuple([part for a in axes for part in a.name.split(",") if part in here.axes])
        if own and is_differentiated(y):
            here.noted.append(Noted(name, own, y.grad_fn, user_line()))
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
        for node, output in _walk([(y.grad_fn, 0) for y in results], axis):
            found = _over(node, axis)
            behind = [n for n, _ in node.next_functions]
            if found is not None and found.replicated and not found.one and _differs(behind, axis, differ[axis]):
                raise ValueError(_counted_often(found.name, axis, node, one_loss.noted))
            if hasattr(node, "exposed"):  # a block
                node.exposed = node.exposed or Exposed(one_loss)
                own = {i for i, n in enumerate(behind) if _differs([n], axis, differ[axis])}
                node.exposed.add(axis, output, own)


class Exposed:
    """What to check of a block that is rematerialised, once its graph is there.

    Attributes:
        one_loss: the loss that depends on it.
        results: axis -> which of its results the loss depends on without a collective between that makes one value.
        differ: axis -> which of its arguments differ by rank.
    """

    def __init__(self, one_loss: OneLoss) -> None:
        self.one_loss = one_loss
        self.results: dict[str, set[int]] = {axis: set() for axis in one_loss.axes}
        self.differ: dict[str, set[int]] = {axis: set() for axis in one_loss.axes}

    def add(self, axis: str, result: int, differ: set[int]) -> None:
        """Add a result, and the arguments that differ."""
        self.results[axis].add(result)
        self.differ[axis] |= differ

    def check(self, results: Mapping[int, torch.Tensor], arguments: Mapping[int, torch.Tensor]) -> None:
        """Check a run of the block, given the results and arguments that are differentiated, by their number."""
        wanted = [y for i, y in results.items() if any(i in at for at in self.results.values())]
        differ = {axis: {id(x) for i, x in arguments.items() if i in own} for axis, own in self.differ.items()}
        check_copies(wanted, self.one_loss, differ)


def _over(node: Any, axis: str) -> Row | None:
    """Return the row of a node that is a collective over an axis."""
    found = row_of(node)
    return found[0] if found is not None and axis in found[1].axis.split(",") else None


def _differs(start: Sequence[Any], axis: str, leaves: set[int]) -> bool:
    """Return whether results differ by rank along an axis, as far as what is differentiated says."""
    for node, _ in _walk([(node, 0) for node in start], axis):
        row, leaf = _over(node, axis), getattr(node, "variable", None)
        if (row is not None and not row.replicated) or (leaf is not None and id(leaf) in leaves):
            return True
    return False


def _walk(start: Sequence[tuple[Any, int]], axis: str) -> Iterator[tuple[Any, int]]:
    """Yield the nodes that results depend on, and which of a node's results; none behind what makes one value."""
    stack = [edge for edge in start if edge[0] is not None]
    seen = set(stack)
    while stack:
        node, output = stack.pop()
        yield node, output
        row = _over(node, axis)
        if row is None or not row.one:
            new = [edge for edge in node.next_functions if edge[0] is not None and edge not in seen]
            seen.update(new)
            stack += new


def _counted_often(row: str, axis: str, node: Any, notes: Sequence[Noted]) -> str:
    alike = [n for n in notes if n.node is node] or [n for n in notes if axis in n.axes]
    name, where = (alike[0].name, f"{alike[0].line}: ") if alike else (row, "")
    one = _ONE.get(name, "the invariant collective").format(axis=axis)
    return (
        f"{where}{name} over {axis!r} gives each rank a copy, and the loss, which is no mean over {axis!r}, depends on "
        f"the copies as on one value: its gradient would come out once for each rank, too large. Use {one}; behind it "
        f"fzero.pvary(x, {axis!r}) where each rank goes on in a way of its own. If the ranks' losses do add up, name "
        f"{axis!r} among the axes of value_and_grad(axis=)"
    )
