"""Check sums over ranks in a loss that is one value: find sums that would count its gradient once for each rank.

`psum` gives each rank a copy of its result, and its transpose sums the gradients of the copies. This is right if each
rank uses its copy in its own way. If all ranks compute one loss from the copies, the gradients of the copies are one
gradient, and the sum is n times too large. As in JAX's `shard_map(check_vma=True)`, types tell the two cases apart. A
value differs by rank if it depends on a value that differs, or on copies of its sum. A loss that is one value must not
differ. The types are read from the autograd graph of the loss. So one check serves simulations, processes and traces.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero._torch.levels import is_differentiated
from fzero._torch.recorder import user_line
from fzero.axes import Axis, InvariantLoss, LossCollective, current_invariant_loss
from fzero.collectives._table import COPIES, INVARIANT, VARYING, LinearMap, collective_row

__all__ = ["DeferredCheck", "check_copies", "note_call"]

_Edge = tuple[Any, int]
"""A node of an autograd graph, and the index of one of its results."""

_REMEDIES = {
    "psum": "fzero.collectives.psum_invariant(x, {axis!r})",
    "pmean": "fzero.collectives.psum_invariant(x / n, {axis!r})",
    "all_gather": "fzero.collectives.all_gather_invariant(x, {axis!r}, dim=)",
    "broadcast": "fzero.collectives.psum_invariant of x on the source, and of zeros elsewhere",
}


def note_call(name: str, axes: Sequence[Axis], y: torch.Tensor) -> torch.Tensor:
    """Note the call of a collective over axes along which the running loss is one value, and return its result `y`."""
    invariant_loss = None if torch.compiler.is_dynamo_compiling() else current_invariant_loss()
    if invariant_loss is not None and y.is_floating_point():
        shared = tuple([part for a in axes for part in a.name.split(",") if part in invariant_loss.axes])
        if shared and is_differentiated(y):
            invariant_loss.calls.append(LossCollective(name, shared, user_line()))
            node: Any = y.grad_fn
            if collective_row(node) is not None:  # a list of nodes would keep the nodes' residuals alive
                node.note = invariant_loss.calls[-1]
        invariant_loss.has_calls |= bool(shared)
    return y


def check_copies(
    results: Sequence[torch.Tensor], invariant_loss: InvariantLoss, varying: Mapping[str, set[int]]
) -> None:
    """Check that a loss that is one value does not use copies of a rank-dependent value as one value.

    Blocks under remat have no graph yet; they store what to check once it exists.

    Args:
        results: the loss, or results of a block under remat that the loss depends on.
        invariant_loss: the axes along which the loss is one value, and the collectives over them that it called.
        varying: axis -> the ids of the differentiated tensors that differ by rank along it.

    Raises:
        ValueError: if it does. The message names the line and the function to use.
    """
    if not invariant_loss.has_calls:
        return
    for axis in invariant_loss.axes:
        _check_calls_over([(y.grad_fn, y.output_nr) for y in results], axis, invariant_loss, varying[axis])


def _check_calls_over(start: Sequence[_Edge], axis: str, invariant_loss: InvariantLoss, leaves: set[int]) -> None:
    for node, output in _walk(start, axis):
        row = _row_over(node, axis)
        if row is not None and row.output is COPIES:
            differs, blocks = _differs(node.next_functions, axis, leaves)
            if differs:
                raise ValueError(_copies_message(row.name, axis, node, invariant_loss.calls))
            for block, index in blocks:
                _deferred_check(block, axis, invariant_loss, leaves).summed[index] = (row.name, node)
        if hasattr(node, "deferred_checks"):
            _deferred_check(node, axis, invariant_loss, leaves).results.add(output)


def _deferred_check(block: Any, axis: str, invariant_loss: InvariantLoss, leaves: set[int]) -> "DeferredCheck":
    if block.deferred_checks is None:
        block.deferred_checks = {}
    if axis not in block.deferred_checks:
        block.deferred_checks[axis] = DeferredCheck(axis, invariant_loss, leaves, block.next_functions)
    return block.deferred_checks[axis]


class DeferredCheck:
    """The checks of a block under remat, for the time when its graph exists.

    Attributes:
        axis: an axis along which the loss is one value.
        invariant_loss: the loss.
        leaves: the ids of the differentiated tensors outside the block that differ by rank.
        sources: the edges to the nodes that computed the block's arguments.
        results: the indices of the block's results that the loss uses as one value.
        summed: the indices of results whose sum the loss uses as one value -> the name and node of the sum.
    """

    def __init__(self, axis: str, invariant_loss: InvariantLoss, leaves: set[int], sources: Sequence[_Edge]) -> None:
        self.axis, self.invariant_loss, self.leaves, self.sources = axis, invariant_loss, leaves, sources
        self.results: set[int] = set()
        self.summed: dict[int, tuple[str, Any]] = {}

    def check(self, results: Mapping[int, torch.Tensor], arguments: Mapping[int, torch.Tensor]) -> None:
        """Check a run of the block, and the graph that computed its arguments.

        Args:
            results: the differentiated results, by index.
            arguments: the differentiated arguments, by index.
        """
        arg_ids = {i: id(x) for i, x in arguments.items()}
        varying = {x for i, x in arg_ids.items() if _differs([self.sources[i]], self.axis, self.leaves)[0]}
        for i, (name, node) in self.summed.items():
            if i in results and _differs([(results[i].grad_fn, results[i].output_nr)], self.axis, varying)[0]:
                raise ValueError(_copies_message(name, self.axis, node, self.invariant_loss.calls))
        start = [(y.grad_fn, y.output_nr) for i, y in results.items() if i in self.results]
        _check_calls_over(start, self.axis, self.invariant_loss, varying)
        reachable_ids = {id(leaf) for node, _ in _walk(start, self.axis) if (leaf := _leaf_tensor(node)) is not None}
        sources = [self.sources[i] for i, x in arg_ids.items() if x in reachable_ids]
        _check_calls_over(sources, self.axis, self.invariant_loss, self.leaves)


def _row_over(node: Any, axis: str) -> LinearMap | None:
    """Return the row of a node that is a collective over an axis; None for other nodes."""
    call = collective_row(node)
    return call[0] if call is not None and axis in call[1].axis.split(",") else None


def _leaf_tensor(node: Any) -> torch.Tensor | None:
    """Return the leaf tensor of a node at the end of the graph; None for other nodes."""
    return getattr(node, "variable", None)


def _differs(start: Sequence[_Edge], axis: str, leaves: set[int]) -> tuple[bool, list[_Edge]]:
    """Return whether results differ by rank along an axis, as far as the autograd graph shows.

    Returns:
        Whether they differ. If not, also the edges to blocks under remat that may make them differ.
    """
    blocks = []
    for node, output in _walk(start, axis):
        row, leaf = _row_over(node, axis), _leaf_tensor(node)
        if (row is not None and row.output is VARYING) or (leaf is not None and id(leaf) in leaves):
            return True, []
        if hasattr(node, "deferred_checks"):
            blocks.append((node, output))
    return False, blocks


def _walk(start: Sequence[_Edge], axis: str) -> Iterator[_Edge]:
    """Yield the nodes that results depend on, up to blocks under remat and collectives that make one value."""
    stack = [edge for edge in start if edge[0] is not None]
    visited = set(stack)
    while stack:
        node, output = stack.pop()
        yield node, output
        row = _row_over(node, axis)
        if not hasattr(node, "deferred_checks") and (row is None or row.output is not INVARIANT):
            new = [edge for edge in node.next_functions if edge[0] is not None and edge not in visited]
            visited.update(new)
            stack += new


def _copies_message(row: str, axis: str, node: Any, notes: Sequence[LossCollective]) -> str:
    note = getattr(node, "note", None) or next((n for n in notes if axis in n.axes), None)
    name, line = (row, "") if note is None else (note.name, f"{note.source_line}: ")
    remedy = _REMEDIES.get(name, "the invariant collective").format(axis=axis)
    return (
        f"{line}{name} over {axis!r} gives each rank a copy, and the loss, which is not a mean over {axis!r}, uses the "
        f"copies as one value: its gradient would be counted once for each rank, and be too large. Use {remedy}, "
        f"and then fzero.collectives.pvary(x, {axis!r}) where each rank uses the result in its own way. If the loss is "
        f"the sum of the ranks' losses, name {axis!r} among the axes of value_and_grad(axis=)"
    )
