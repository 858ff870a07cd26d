"""Loops at run time: a body runs once for each micro-batch, or in the order of a pipeline schedule."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fzero.collectives import PendingMessages, StageMessages
from fzero.graph._ir import results, values
from fzero.graph.loop._rank_schedule import phases_of
from fzero.graph.loop._scan import Loop
from fzero.graph.loop._split import Arrival, PhaseGraph, Residual
from fzero.parallel.schedules import Action, Value, programs

__all__ = ["following", "running"]

# Loops at run time: a body that is run so often, each time on its part, and on the sums of the turns before.


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


# A rank of a pipeline at run time: its phases, each on its micro-batch, in the order of its row of the schedule.


Body = Callable[[list[Any]], Sequence[Any]]


def following(loop: Loop, parts: Sequence[PhaseGraph], bodies: Sequence[Body]) -> Callable[..., list[torch.Tensor]]:
    """Make the function of a pipeline's loop: from what it is given to its sums.

    Args:
        loop: the loop.
        parts: its body, split in phases.
        bodies: what runs each: it writes the new sums into the old ones, and takes what it is given off the list.
    """
    assert loop.track is not None
    track, first = loop.track, len(loop.parts)
    phases = {part.phase: (part, body) for part, body in zip(parts, bodies, strict=True)}
    readers = Counter([x for part in parts for x in part.given if isinstance(x, Residual)])
    forms, device = _forms(parts)
    row = programs(track.schedule)[track.binding.rank]
    messages = {Value(m.kind, m.stage, m.micro_batch): m for m in track.schedule.messages}

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        turns = _Turns(loop, given, dict(readers), StageMessages(track.schedule, track.binding, forms, device))
        for instruction in row:
            if not isinstance(instruction.of, Action):
                turns.messages.execute(instruction)
                continue
            for phase in phases_of(instruction.of):
                if phase not in phases:  # the first stage has no gradient to send
                    continue
                made = turns.run(*phases[phase], instruction.of.micro_batch)
                if made is not None and made in messages:
                    turns.messages.send(messages[made])
        return list(given[first : first + loop.sums])

    run.__name__ = run.__qualname__ = "pipeline"
    return run


def _forms(parts: Sequence[PhaseGraph]) -> tuple[list[torch.Tensor], torch.device]:
    """Return stand-ins of the leaves of what stages hand on, and the device where they lie."""
    found: dict[int, torch.Tensor] = {}
    for part in parts:
        made = [(what, n) for what, n in zip(part.made, results(part.graph), strict=True)]
        inputs = [n for n in part.graph.nodes if n.op == "placeholder"]
        for what, n in [*zip(part.given, inputs, strict=True), *made]:
            if isinstance(what, Arrival):
                found[what.leaf] = values(n)[0]
    forms = [torch.empty(found[i].shape, dtype=found[i].dtype, device="meta") for i in sorted(found)]
    return forms, found[0].device if found else torch.device("cpu")


@dataclass
class _Turns:
    """The turns of a loop that have begun.

    Attributes:
        loop: whose.
        given: what it is given.
        readers: by residual, how many phases read it.
        messages: what goes from stage to stage.
        held: by micro-batch and residual, its value, and how many are still to read it.
    """

    loop: Loop
    given: Sequence[torch.Tensor]
    readers: dict[Residual, int]
    messages: StageMessages
    held: dict[tuple[int, Residual], list[Any]] = field(default_factory=dict)

    def run(self, part: PhaseGraph, body: Body, m: int) -> Value | None:
        """Run a phase of a turn; returns what it has made for another stage."""
        arrived: dict[Value, list[torch.Tensor]] = {}
        args = [self._argument(x, m, arrived) for x in part.given]
        arrived.clear()
        out = list(body(args))
        made: dict[Value, list[torch.Tensor]] = {}
        for what, x in zip(part.made, out, strict=True):
            if isinstance(what, Residual):
                self.held[m, what] = [x, self.readers[what]]
            elif isinstance(what, Arrival):
                made.setdefault(Value(what.kind, what.stage, m), []).append(x)  # pyright: ignore[reportArgumentType]
        for value, xs in made.items():
            self.messages.put(value, xs)
        return next(iter(made), None)

    def _argument(self, source: int | Residual | Arrival, m: int, arrived: dict[Value, list[torch.Tensor]]) -> Any:
        if isinstance(source, Residual):
            entry = self.held[m, source]
            entry[1] -= 1
            return self.held.pop((m, source))[0] if not entry[1] else entry[0]
        if isinstance(source, Arrival):
            value = Value(source.kind, source.stage, m)  # pyright: ignore[reportArgumentType]
            if value not in arrived:
                arrived[value] = self.messages.take(value)
            return arrived[value][source.leaf]
        if source == 0:
            return torch.tensor(m)
        x = self.given[source - 1]
        if source > len(self.loop.parts):
            return x
        part = self.loop.parts[source - 1]
        return x.narrow(part.dim, m * part.size, part.size)
