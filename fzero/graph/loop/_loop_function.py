"""A loop over micro-batches runs its body on slices of the inputs and on the sums so far."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fzero.collectives import PendingMessages
from fzero.graph.ir import graph_results, node_stand_ins
from fzero.graph.loop._loop import Loop

__all__ = ["loop_function"]


def loop_function(loop: Loop, body: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., list[torch.Tensor]]:
    """Return the function of a loop's node: it maps the loop's arguments to its sums and rows.

    Args:
        loop: the loop.
        body: runs the loop's body. It writes the new sums over the old ones.
    """
    first_argument, *_ = loop.body.nodes
    outputs = graph_results(loop.body)
    end_of_rows = len(outputs) - loop.carried_count  # sums, then rows, then carried values
    row_stand_ins = [x for n in outputs[loop.sum_count : end_of_rows] for x in node_stand_ins(n)]
    carried_stand_ins = [x for n in outputs[end_of_rows:] for x in node_stand_ins(n)]
    sums_start = len(loop.slices)

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run the loop's iterations one after the other, and return the sums, the rows and the carried values."""
        sums = list(inputs[sums_start : sums_start + loop.sum_count])
        outside_values = inputs[sums_start + loop.sum_count :]
        rows = [torch.empty((loop.iterations, *x.shape), dtype=x.dtype, device=x.device) for x in row_stand_ins]
        pending_values: list[Any] = [_pending_zeros(x.shape, x.dtype, x.device) for x in carried_stand_ins]
        for i in range(loop.iterations):
            iteration = torch.tensor(i, device="cpu") if first_argument.users else None
            slices = [x.narrow(p.dim, i * p.size, p.size) for x, p in zip(inputs, loop.slices, strict=False)]
            args = [iteration, *slices, *sums, *outside_values, *pending_values]
            del iteration, slices, pending_values
            out = body(args)
            _write_rows(i, rows, out[loop.sum_count : end_of_rows])
            pending_values = list(out[end_of_rows:])
            del out
        return [*sums, *rows, *pending_values]

    run.__name__ = run.__qualname__ = "loop"
    return run


def _pending_zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PendingMessages:
    """Return the pending reduction that the first iteration waits for: it gives -0.0, which changes no sum."""
    return PendingMessages([], partial(torch.full, shape, -0.0, dtype=dtype, device=device))


def _write_rows(iteration: int, rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy an iteration's values into the rows, so that their own memory can be freed."""
    for row, x in zip(rows, values, strict=True):
        row[iteration].copy_(x)
