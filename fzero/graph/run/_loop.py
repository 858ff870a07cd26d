"""Loops at run time: a body that is run so often, each time on its part, and on the sums of the turns before."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fzero.collectives.gloo import PendingMessages
from fzero.graph.ir import results, values
from fzero.graph.loops import Loop

__all__ = ["running"]


def running(loop: Loop, body: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., list[torch.Tensor]]:
    """Make the function of a loop's node: from what the loop is given to its sums and rows.

    Args:
        loop: the loop.
        body: what runs its body: it writes the new sums into the old ones.
    """
    number, *_ = loop.body.nodes
    made = results(loop.body)
    behind = len(made) - loop.carried  # the rows
    rows_of = [(x.shape, x.dtype, x.device) for n in made[loop.sums : behind] for x in values(n)]
    carried_of = [(x.shape, x.dtype, x.device) for n in made[behind:] for x in values(n)]
    first = len(loop.parts)

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        sums, rest = list(given[first : first + loop.sums]), given[first + loop.sums :]
        rows = [torch.empty((loop.turns, *s), dtype=dtype, device=device) for s, dtype, device in rows_of]
        carried: list[Any] = [_arriving(*x) for x in carried_of]
        for j in range(loop.turns):
            turn = torch.tensor(j) if number.users else None
            parts = [x.narrow(p.dim, j * p.size, p.size) for x, p in zip(given, loop.parts, strict=False)]
            args = [turn, *parts, *sums, *rest, *carried]
            del turn, parts, carried
            out = body(args)
            _put(j, rows, out[loop.sums : behind])
            carried = list(out[behind:])
            del out
        return [*sums, *rows, *carried]

    run.__name__ = run.__qualname__ = "loop"
    return run


def _arriving(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PendingMessages:
    """Return what the first turn finds on its way, and makes when it waits for it: -0.0, which changes no sum."""
    return PendingMessages([], partial(torch.full, shape, -0.0, dtype=dtype, device=device))


def _put(j: int, rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy the values of turn j to where they belong, and so let go of them."""
    for row, x in zip(rows, values, strict=True):
        row[j].copy_(x)
