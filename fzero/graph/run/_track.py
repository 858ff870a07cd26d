"""A rank of a pipeline at run time: its phases, each on its micro-batch, in the order of its row of the schedule."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.collectives.point_to_point import StageMessages
from fzero.graph.ir import results, values
from fzero.graph.loops import Loop
from fzero.graph.phases import phases_of
from fzero.graph.split import Arrival, PhaseGraph, Residual
from fzero.schedules import Action
from fzero.schedules._actions import Value
from fzero.schedules._program import programs

__all__ = ["following"]

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
