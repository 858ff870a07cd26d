"""What a rank of a pipeline holds: its phases in the order of its row, with what micro-batches in flight leave."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.fx import Graph, Node

from fzero.graph._ir import is_input, nbytes, results, values
from fzero.graph._storages import storages_in
from fzero.graph.loop._rank_schedule import Phase, phases_of
from fzero.graph.loop._scan import Loop
from fzero.graph.loop._split import Arrival, PhaseGraph, Residual, split
from fzero.parallel.schedules import Action, Value, programs

__all__ = ["Sent", "most_in_phases", "sent_by", "track_seconds"]


class Sent(NamedTuple):
    """What a rank of a pipeline sends to the rank of another stage, once for each micro-batch.

    Attributes:
        position: of the pipeline among the plan's operations.
        kind: "output" of a stage, or the "gradient" of its input.
        stage: of the pipeline, that makes it.
        bytes: of one message.
        times: how many there are.
        axis: of the mesh, along which stages lie.
    """

    position: int
    kind: str
    stage: int
    bytes: int
    times: int
    axis: str


class _Profile(NamedTuple):
    """The memory of a phase, whichever micro-batch it runs on.

    Attributes:
        live: by position, the bytes that it has allocated and not yet freed.
        given: by argument that it owns, the place of its storage, and the position of its last reader.
        made: by result, the place of its storage; None of what lies in an argument of the loop.
        size: the bytes of each storage.
    """

    live: list[int]
    given: dict[Residual | Arrival, tuple[int, int]]
    made: list[int | None]
    size: list[int]


_KNOWN: "WeakKeyDictionary[Graph, dict[Phase, int]]" = WeakKeyDictionary()


def most_in_phases(loop: Loop, last_uses: Callable[..., list[int]]) -> dict[Phase, int]:
    """Return the most bytes that a pipeline's loop holds during each phase, beside what it is given.

    Args:
        loop: the loop, whose body is scheduled.
        last_uses: finds for each storage the place of the last node that needs it.
    """
    if loop.body not in _KNOWN:
        parts = split(loop)
        profiles = {part.phase: (part, _profile(part, last_uses)) for part in parts}
        _KNOWN[loop.body] = _Walk(loop, profiles).run()
    return _KNOWN[loop.body]


def _profile(part: PhaseGraph, last_uses: Callable[..., list[int]]) -> _Profile:
    nodes = list(part.graph.nodes)
    lent, position = storages_in(nodes), {n: i for i, n in enumerate(nodes)}
    stops = last_uses(position, lent)
    inputs = [n for n in nodes if is_input(n)]
    kept = {s for n in results(part.graph) if isinstance(n, Node) for s in lent.of[n]}
    change = [0] * (len(nodes) + 1)
    for s, (node, size) in enumerate(zip(lent.born, lent.size, strict=True)):
        if not is_input(node):
            change[position[node]] += size
            change[len(nodes) if s in kept else min(stops[s] + 1, len(nodes))] -= size
    live, now = [], 0
    for c in change[:-1]:
        now += c
        live.append(now)
    owned = {x: n for x, n in zip(part.given, inputs, strict=True) if not isinstance(x, int)}
    given = {x: (lent.of[n][0], stops[lent.of[n][0]]) for x, n in owned.items()}
    mine = {s for s, _ in given.values()} | {s for s, n in enumerate(lent.born) if not is_input(n)}
    made = [lent.of[n][0] if lent.of[n][0] in mine else None for n in results(part.graph)]
    return _Profile(live, given, made, lent.size)


@dataclass
class _Block:
    """Memory that outlives a phase: how large it is, and how many have a hold on it."""

    size: int
    holders: int = 0


@dataclass
class _Walk:
    """A walk through a rank's row.

    Attributes:
        loop: the loop.
        profiles: each phase, and its memory.
        held: by micro-batch and residual, its memory, and how many phases are still to read it.
        here: by value of a stage, the memory of its leaves.
        leaving: likewise by message.
        now: the bytes of all that outlives a phase.
    """

    loop: Loop
    profiles: dict[Phase, tuple[PhaseGraph, _Profile]]
    held: dict[tuple[int, Residual], list[Any]] = field(default_factory=dict)
    ready: dict[Value, list[_Block]] = field(default_factory=dict)
    in_flight: dict[Any, list[_Block]] = field(default_factory=dict)
    now: int = 0

    def run(self) -> dict[Phase, int]:
        """Return the most bytes that are alive during each phase."""
        track = self.loop.track
        assert track is not None
        self.readers = Counter([x for part, _ in self.profiles.values() for x in part.given if isinstance(x, Residual)])
        self.forms = self._forms()
        messages = {Value(m.kind, m.stage, m.micro_batch): m for m in track.schedule.messages}
        most: dict[Phase, int] = dict.fromkeys(self.profiles, 0)
        for instruction in programs(track.schedule)[track.binding.rank]:
            if isinstance(instruction.of, Action):
                for phase in [p for p in phases_of(instruction.of) if p in self.profiles]:
                    peak, made = self._phase(phase, instruction.of.micro_batch)
                    most[phase] = max(most[phase], peak)
                    if made is not None and made in messages:
                        self.in_flight[messages[made]] = self.ready.pop(made)
            elif instruction.kind == "receive":
                value = Value(instruction.of.kind, instruction.of.stage, instruction.of.micro_batch)
                self.ready[value] = [self._hold(_Block(size)) for size in self.forms]
            elif instruction.kind == "sent":
                for block in self.in_flight.pop(instruction.of):
                    self._let_go(block)
        return most

    def _forms(self) -> list[int]:
        """Return the bytes of the leaves of what stages hand on."""
        found: dict[int, int] = {}
        for part, _ in self.profiles.values():
            inputs = [n for n in part.graph.nodes if is_input(n)]
            for what, n in [*zip(part.given, inputs, strict=True), *zip(part.made, results(part.graph), strict=True)]:
                if isinstance(what, Arrival):
                    found[what.leaf] = nbytes(*values(n))
        return [found[i] for i in sorted(found)]

    def _hold(self, block: _Block) -> _Block:
        self.now += block.size if not block.holders else 0
        block.holders += 1
        return block

    def _let_go(self, block: _Block) -> None:
        block.holders -= 1
        self.now -= block.size if not block.holders else 0

    def _phase(self, phase: Phase, m: int) -> tuple[int, Value | None]:
        """Run a phase; returns the most bytes alive while it runs, and what it makes for another stage."""
        part, profile = self.profiles[phase]
        blocks, ends = self._taken(part, profile, m)
        most = max(self._alive(profile, blocks, ends), default=0)
        made: Value | None = None
        for what, storage in zip(part.made, profile.made, strict=True):
            if what is None:
                continue
            block = blocks.setdefault(storage, _Block(profile.size[storage])) if storage is not None else _Block(0)
            self._hold(block)
            if isinstance(what, Residual):
                self.held[m, what] = [block, self.readers[what]]
            else:
                made = Value(what.kind, what.stage, m)  # pyright: ignore[reportArgumentType]
                self.ready.setdefault(made, []).append(block)
        for _, _, block in ends:
            self._let_go(block)
        return most, made

    def _taken(
        self, part: PhaseGraph, profile: _Profile, m: int
    ) -> tuple[dict[int | None, _Block], list[tuple[int, int, _Block]]]:
        """Take what a phase is given: its memory by storage, and of what it reads last the storage and when it ends."""
        blocks: dict[int | None, _Block] = {}
        ends = []
        arrived: dict[Value, list[_Block]] = {}
        for what, (storage, stop) in profile.given.items():
            if isinstance(what, Arrival):
                value = Value(what.kind, what.stage, m)  # pyright: ignore[reportArgumentType]
                if value not in arrived:
                    arrived[value] = self.ready.pop(value)
                block, last = arrived[value][what.leaf], True
            else:
                entry = self.held[m, what]
                entry[1] -= 1
                block, last = entry[0], not entry[1]
                if last:
                    del self.held[m, what]
            blocks[storage] = block
            if last:
                ends.append((storage, stop, block))
        return blocks, ends

    def _alive(
        self, profile: _Profile, blocks: dict[Any, _Block], ends: Sequence[tuple[int, int, _Block]]
    ) -> list[int]:
        """Return the bytes alive at each position of a phase."""
        freed = [0] * (len(profile.live) + 1)
        holds = Counter([id(block) for _, _, block in ends])
        stop: dict[int, int] = {}
        kept = {id(blocks[s]) for s in profile.made if s in blocks}
        for _, at, block in ends:
            stop[id(block)] = max(stop.get(id(block), 0), at)
        for _, _, block in ends:
            if id(block) in stop and holds[id(block)] == block.holders and id(block) not in kept:
                freed[min(stop.pop(id(block)) + 1, len(profile.live))] += block.size
        found, gone = [], 0
        for mine, size in zip(profile.live, freed, strict=False):
            gone += size
            found.append(self.now + mine - gone)
        return found


def sent_by(loop: Loop, position: int) -> list[Sent]:
    """List what a rank sends in a pipeline's loop, by stage and direction.

    Args:
        loop: the loop, whose body is scheduled.
        position: of its node among the plan's operations.
    """
    assert loop.track is not None
    schedule, binding = loop.track.schedule, loop.track.binding
    times = Counter([(m.kind, m.stage) for m in schedule.messages if m.sender == binding.rank])
    each = Counter[tuple[str, int]]()
    for part in split(loop):
        for what, node in zip(part.made, results(part.graph), strict=True):
            if isinstance(what, Arrival):
                each[what.kind, what.stage] += nbytes(*values(node))
    words = {"F": "output", "G": "gradient"}
    return [Sent(position, words[kind], s, each[kind, s], n, binding.axis) for (kind, s), n in times.items()]


def track_seconds(loop: Loop, seconds: Callable[[Graph], float], message: Callable[[int, str], float]) -> float:
    """Estimate how long a pipeline's loop takes: its schedule's makespan, if all stages took as long as this rank's.

    Args:
        loop: the loop.
        seconds: estimates how long a graph takes.
        message: estimates how long so many bytes take to the next rank along an axis.
    """
    assert loop.track is not None
    schedule, parts = loop.track.schedule, split(loop)
    each = Counter[str]()
    for part in parts:
        each[part.phase.kind] += seconds(part.graph)  # pyright: ignore[reportArgumentType]
    sent = [
        n for part in parts for what, n in zip(part.made, results(part.graph), strict=True) if isinstance(what, Arrival)
    ]
    hop = message(max([nbytes(*values(n)) for n in sent], default=0), loop.track.binding.axis)
    backward = each["I"] + each["W"]
    return schedule.timing(forward=each["F"], backward=backward, weight=each["W"], hop=hop).makespan
