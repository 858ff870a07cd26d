"""Memory, messages and time of a pipeline's loop on one rank, before it runs.

The rank runs its regions in the order of its row of the schedule. Micro-batches in flight hold residuals between them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.fx import Graph, Node

from fzero.graph.ir import graph_results, is_input, nbytes, node_stand_ins, storages_in
from fzero.graph.loop._loop import Loop
from fzero.graph.loop._rank_schedule import LoopRegion, action_regions
from fzero.graph.loop._split import RegionGraph, Residual, StageLeaf, split
from fzero.parallel.schedules import Action, Value, programs

__all__ = ["SentMessage", "peak_by_region", "pipeline_seconds", "sent_messages"]


class SentMessage(NamedTuple):
    """A message that a rank of a pipeline sends to the rank of another stage, once for each micro-batch.

    Attributes:
        position: the position of the pipeline's loop among the plan's operations.
        kind: "output" for a stage's output, or "gradient" for the gradient of its input.
        stage: the pipeline stage that computes the values.
        bytes: the size of one message, in bytes.
        times: the number of messages.
        axis: the mesh axis along which the stages lie.
    """

    position: int
    kind: str
    stage: int
    bytes: int
    times: int
    axis: str


class _RegionMemory(NamedTuple):
    """The memory of a region, the same for every micro-batch.

    Attributes:
        live: for each position, the bytes that the region has allocated and not yet freed.
        inputs: for each argument that the region owns, the index of its storage and the position of its last reader.
        outputs: for each result, the index of its storage; None for a result in the memory of a loop's argument.
        size: the bytes of each storage.
    """

    live: list[int]
    inputs: dict[Residual | StageLeaf, tuple[int, int]]
    outputs: list[int | None]
    size: list[int]


_CACHE: "WeakKeyDictionary[Graph, dict[LoopRegion, int]]" = WeakKeyDictionary()

_REGIONS: "WeakKeyDictionary[Graph, tuple[RegionGraph, ...]]" = WeakKeyDictionary()


def _split_regions(loop: Loop) -> tuple[RegionGraph, ...]:
    """Split a loop's body, once for its memory, its messages and its seconds."""
    if loop.body not in _REGIONS:
        _REGIONS[loop.body] = split(loop)
    return _REGIONS[loop.body]


def peak_by_region(loop: Loop, last_uses: Callable[..., list[int]]) -> dict[LoopRegion, int]:
    """Return the peak memory of a pipeline's loop during each region, in bytes, without the loop's arguments.

    Args:
        loop: the loop, whose body is scheduled.
        last_uses: returns for each storage the position of its last use.
    """
    if loop.body not in _CACHE:
        profiles = {g.region: (g, _profile_region(g, last_uses)) for g in _split_regions(loop)}
        _CACHE[loop.body] = _RankWalk(loop, profiles).run()
    return _CACHE[loop.body]


def _profile_region(region_graph: RegionGraph, last_uses: Callable[..., list[int]]) -> _RegionMemory:
    """Return the live bytes of a region's own values at each position, and how long it needs its inputs."""
    nodes = list(region_graph.graph.nodes)
    memory, position = storages_in(nodes), {n: i for i, n in enumerate(nodes)}
    stops = last_uses(position, memory)
    arguments = [n for n in nodes if is_input(n)]
    results = graph_results(region_graph.graph)
    output_storages = {s for n in results if isinstance(n, Node) for s in memory.indices[n]}
    change = [0] * (len(nodes) + 1)
    for s, (node, size) in enumerate(zip(memory.producers, memory.sizes, strict=True)):
        if not is_input(node):
            change[position[node]] += size
            change[len(nodes) if s in output_storages else min(stops[s] + 1, len(nodes))] -= size
    live = []
    now = 0
    for delta in change[:-1]:
        now += delta
        live.append(now)
    owners = {x: n for x, n in zip(region_graph.inputs, arguments, strict=True) if not isinstance(x, int)}
    inputs = {x: (memory.indices[n][0], stops[memory.indices[n][0]]) for x, n in owners.items()}
    owned_storages = {s for s, _ in inputs.values()} | {s for s, n in enumerate(memory.producers) if not is_input(n)}
    outputs = [memory.indices[n][0] if memory.indices[n][0] in owned_storages else None for n in results]
    return _RegionMemory(live, inputs, outputs, memory.sizes)


@dataclass
class _HeldMemory:
    """Memory that outlives a region: its size in bytes, and the number of values that lie in it."""

    size: int
    holders: int = 0


@dataclass
class _RankWalk:
    """A walk through a rank's actions in the schedule, which counts live bytes.

    Attributes:
        loop: the loop.
        profiles: each region's graph and memory.
        residuals: for each micro-batch and residual, its memory and the number of regions that have yet to read it.
        ready: for each stage output or gradient on this rank, the memory of each of its leaves.
        in_flight: for each message that is being sent, the memory of each of its leaves.
        now: the bytes of all memory that is held now.
    """

    loop: Loop
    profiles: dict[LoopRegion, tuple[RegionGraph, _RegionMemory]]
    residuals: dict[tuple[int, Residual], list[Any]] = field(default_factory=dict)
    ready: dict[Value, list[_HeldMemory]] = field(default_factory=dict)
    in_flight: dict[Any, list[_HeldMemory]] = field(default_factory=dict)
    now: int = 0

    def run(self) -> dict[LoopRegion, int]:
        """Return the peak memory during each region, in bytes."""
        rank_schedule = self.loop.rank_schedule
        assert rank_schedule is not None
        self.readers = Counter(
            [x for region_graph, _ in self.profiles.values() for x in region_graph.inputs if isinstance(x, Residual)]
        )
        self.leaf_sizes = self._sent_sizes()
        messages = {Value(m.kind, m.stage, m.micro_batch): m for m in rank_schedule.schedule.messages}
        peaks: dict[LoopRegion, int] = dict.fromkeys(self.profiles, 0)
        for instruction in programs(rank_schedule.schedule)[rank_schedule.binding.rank]:
            if isinstance(instruction.operand, Action):
                for region in [r for r in action_regions(instruction.operand) if r in self.profiles]:
                    peak, output = self._run_region(region, instruction.operand.micro_batch)
                    peaks[region] = max(peaks[region], peak)
                    if output is not None and output in messages:
                        self.in_flight[messages[output]] = self.ready.pop(output)
            elif instruction.kind == "receive":
                value = Value(instruction.operand.kind, instruction.operand.stage, instruction.operand.micro_batch)
                self.ready[value] = [self._retain(_HeldMemory(size)) for size in self.leaf_sizes]
            elif instruction.kind == "wait_send":
                for memory in self.in_flight.pop(instruction.operand):
                    self._release(memory)
        return peaks

    def _sent_sizes(self) -> list[int]:
        """Return the bytes of each leaf that stages send to one another."""
        sizes: dict[int, int] = {}
        for region_graph, _ in self.profiles.values():
            inputs = [n for n in region_graph.graph.nodes if is_input(n)]
            for value, n in [
                *zip(region_graph.inputs, inputs, strict=True),
                *zip(region_graph.outputs, graph_results(region_graph.graph), strict=True),
            ]:
                if isinstance(value, StageLeaf):
                    sizes[value.leaf] = nbytes(*node_stand_ins(n))
        return [sizes[i] for i in sorted(sizes)]

    def _retain(self, memory: _HeldMemory) -> _HeldMemory:
        self.now += memory.size if not memory.holders else 0
        memory.holders += 1
        return memory

    def _release(self, memory: _HeldMemory) -> None:
        memory.holders -= 1
        self.now -= memory.size if not memory.holders else 0

    def _run_region(self, region: LoopRegion, m: int) -> tuple[int, Value | None]:
        """Run a region; return its peak memory in bytes, and the value that it computes for another stage, if any."""
        region_graph, profile = self.profiles[region]
        memories, ends = self._take_inputs(region_graph, profile, m)
        peak = max(self._live_bytes(profile, memories, ends), default=0)
        value: Value | None = None
        for output, storage in zip(region_graph.outputs, profile.outputs, strict=True):
            if output is None:
                continue
            memory = (
                memories.setdefault(storage, _HeldMemory(profile.size[storage]))
                if storage is not None
                else _HeldMemory(0)
            )
            self._retain(memory)
            if isinstance(output, Residual):
                self.residuals[m, output] = [memory, self.readers[output]]
            else:
                value = Value(output.kind, output.stage, m)  # pyright: ignore[reportArgumentType]
                self.ready.setdefault(value, []).append(memory)
        for _, _, memory in ends:
            self._release(memory)
        return peak, value

    def _take_inputs(
        self, region_graph: RegionGraph, profile: _RegionMemory, m: int
    ) -> tuple[dict[int | None, _HeldMemory], list[tuple[int, int, _HeldMemory]]]:
        """Take a region's inputs: the memory by storage, and for each last read the storage, position and memory."""
        memories: dict[int | None, _HeldMemory] = {}
        ends = []
        received: dict[Value, list[_HeldMemory]] = {}
        for source, (storage, stop) in profile.inputs.items():
            if isinstance(source, StageLeaf):
                value = Value(source.kind, source.stage, m)  # pyright: ignore[reportArgumentType]
                if value not in received:
                    received[value] = self.ready.pop(value)
                memory, is_last_use = received[value][source.leaf], True
            else:
                entry = self.residuals[m, source]
                entry[1] -= 1
                memory, is_last_use = entry[0], not entry[1]
                if is_last_use:
                    del self.residuals[m, source]
            memories[storage] = memory
            if is_last_use:
                ends.append((storage, stop, memory))
        return memories, ends

    def _live_bytes(
        self, profile: _RegionMemory, memories: dict[Any, _HeldMemory], ends: Sequence[tuple[int, int, _HeldMemory]]
    ) -> list[int]:
        """Return the live bytes at each position of a region."""
        bytes_freed = [0] * (len(profile.live) + 1)
        holder_counts = Counter([id(memory) for _, _, memory in ends])
        stop: dict[int, int] = {}
        outputs = {id(memories[s]) for s in profile.outputs if s in memories}
        for _, position, memory in ends:
            stop[id(memory)] = max(stop.get(id(memory), 0), position)
        for _, _, memory in ends:
            if id(memory) in stop and holder_counts[id(memory)] == memory.holders and id(memory) not in outputs:
                bytes_freed[min(stop.pop(id(memory)) + 1, len(profile.live))] += memory.size
        live = []
        freed_bytes = 0
        for region_bytes, size in zip(profile.live, bytes_freed, strict=False):
            freed_bytes += size
            live.append(self.now + region_bytes - freed_bytes)
        return live


def sent_messages(loop: Loop, position: int) -> list[SentMessage]:
    """List the messages that a rank sends in a pipeline's loop, by stage and direction.

    Args:
        loop: the loop, whose body is scheduled.
        position: the position of the loop's node among the plan's operations.
    """
    assert loop.rank_schedule is not None
    schedule, binding = loop.rank_schedule.schedule, loop.rank_schedule.binding
    times = Counter([(m.kind, m.stage) for m in schedule.messages if m.sender == binding.rank])
    sizes = Counter[tuple[str, int]]()
    for region_graph in _split_regions(loop):
        for output, node in zip(region_graph.outputs, graph_results(region_graph.graph), strict=True):
            if isinstance(output, StageLeaf):
                sizes[output.kind, output.stage] += nbytes(*node_stand_ins(node))
    words = {"F": "output", "G": "gradient"}
    return [
        SentMessage(position=position, kind=words[kind], stage=s, bytes=sizes[kind, s], times=n, axis=binding.axis)
        for (kind, s), n in times.items()
    ]


def pipeline_seconds(loop: Loop, seconds: Callable[[Graph], float], message: Callable[[int, str], float]) -> float:
    """Estimate the seconds of a pipeline's loop: the schedule's makespan, as if all stages took as long as this rank's.

    Args:
        loop: the loop.
        seconds: estimates the seconds of a graph.
        message: estimates the seconds of a message, given its bytes and the axis along which it goes to the next rank.
    """
    assert loop.rank_schedule is not None
    schedule, region_graphs = loop.rank_schedule.schedule, _split_regions(loop)
    by_kind = defaultdict[str, float](float)
    weight = 0.0
    for region_graph in region_graphs:
        duration = seconds(region_graph.graph)
        by_kind[region_graph.region.kind] += duration
        if loop.sends_early and region_graph.region.kind == "W":
            # the first stage sends no gradient, so its backward pass has one region; others halve theirs about so
            weight += duration if region_graph.region.stage else duration / 2
    leaves = [
        n
        for region_graph in region_graphs
        for output, n in zip(region_graph.outputs, graph_results(region_graph.graph), strict=True)
        if isinstance(output, StageLeaf)
    ]
    latency = message(max([nbytes(*node_stand_ins(n)) for n in leaves], default=0), loop.rank_schedule.binding.axis)
    backward = by_kind["I"] + by_kind["W"]
    return schedule.timing(by_kind["F"], backward, weight, latency, sends_early=True).makespan
