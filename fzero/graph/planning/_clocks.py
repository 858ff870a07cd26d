"""The clocks that compare candidate schedules: they estimate a step's seconds, and when each stream is busy."""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import (
    argument_stand_ins,
    collective_kind,
    is_carried,
    is_collective,
    is_input,
    is_move,
    is_view,
    is_wait,
    nbytes,
    node_stand_ins,
    on_host,
    op_name,
    source_collective,
    wait_start,
)
from fzero.graph.loop import Loop, node_loop, pipeline_seconds
from fzero.graph.planning._collective_seconds import collective_seconds, message_seconds
from fzero.graph.planning._cost import Work, estimate_work
from fzero.graph.planning._fused_values import is_pointwise_kernel, is_tensor_reduction, unstored_values
from fzero.graph.planning._hardware import HARDWARE, Hardware

__all__ = ["LIMITS", "Interval", "estimate_seconds", "seconds_by_bound", "timeline"]


def estimate_seconds(graph: Graph, hardware: Hardware | None = None, first: bool = False) -> float:
    """Estimate the seconds of a graph, with one clock for the device's work, one for collectives and one for the host.

    Work takes `max(flops / hardware.flops, bytes / hardware.memory_bandwidth)` seconds, at least
    `hardware.launch_seconds`. A collective starts after the collectives before it, and takes `collective_seconds`. Work
    stops at a wait until the collective has ended.

    A copy of b bytes between device and host takes `b / host_link_bandwidth` seconds of the device's time, since copies
    are in the order of its work. The host computes at `hardware.host_memory_bandwidth` bytes per second, as soon as its
    operands have arrived.

    Args:
        graph: a step, or the body of a loop.
        hardware: what the graph runs on; if its `host_memory_bandwidth` is 0, the host's work and copies are not
            counted. By default common hardware of the kind that the values lie on; a CPU then does the host's work
            itself.
        first: whether the graph is a loop's first iteration, for which no earlier one has started a reduction.
    """
    clocks = _Clocks(graph, hardware)
    for node in graph.nodes:
        if is_carried(node) and not first:
            clocks.start_carried(node)
        clocks.run(node)
    return max(clocks.work, clocks.host.now)


LIMITS: tuple[str, ...] = ("products", "memory", "launches", "wire", "host link", "host", "pipeline")


class Interval(NamedTuple):
    """A time in which a stream of a step is busy, or waits.

    Attributes:
        stream: "compute", "communication" or "host".
        start: its start in seconds, from the start of the step.
        seconds: its length.
        name: the operation, such as "mm", the unit of a collective, or "wait".
        limit: what bounds it: "products" (the rate of matrix products), "memory" (its bandwidth), "launches", "wire",
            "host link", "host" or "pipeline".
    """

    stream: str
    start: float
    seconds: float
    name: str
    limit: str


def timeline(graph: Graph, hardware: Hardware | None = None, first: bool = False) -> list[Interval]:
    """List when compute, collectives and the host are busy, by the clocks of `estimate_seconds` and its arguments.

    The compute stream has no gaps. A wait for a collective is an interval with the limit "wire", and a wait for the
    host one with the limit "host". The iterations of a loop follow each other; the loop of a pipeline is
    one interval.
    """
    clocks = _Clocks(graph, hardware, [])
    for node in graph.nodes:
        if is_carried(node) and not first:
            clocks.start_carried(node)
        clocks.run(node)
    if clocks.host.now > clocks.work:
        clocks.note("compute", clocks.work, clocks.host.now - clocks.work, "wait", "host")
    return clocks.intervals or []


def seconds_by_bound(intervals: Iterable[Interval]) -> dict[str, float]:
    """Add up the seconds of the compute stream by what bounds them, without zeros. They add up to the step's."""
    sums: dict[str, float] = dict.fromkeys(LIMITS, 0.0)
    for x in intervals:
        if x.stream == "compute":
            sums[x.limit] += x.seconds
    return {limit: seconds for limit, seconds in sums.items() if seconds}


class _Clocks:
    """The clocks of a graph's device, of its collectives and of its host. They advance operation by operation.

    Attributes:
        work: the time at which the device has finished all work so far, in seconds.
        wires: the time at which the last collective so far has ended, in seconds.
        ends: the time at which each collective ends, in seconds.
        host: the host's clock.
        intervals: the busy times so far; None if they are not recorded.
    """

    def __init__(self, graph: Graph, hardware: Hardware | None, intervals: list[Interval] | None = None) -> None:
        self.intervals = intervals
        self._body_hardware = hardware  # a loop's body is estimated as the graph is: None finds its own hardware
        self._hardware = _common_hardware(graph) if hardware is None else hardware
        self._excluded: Collection[Node] = (
            () if hardware is None or self._hardware.host_memory_bandwidth else _host_work(graph)
        )
        self._kernels = _Kernels(graph, self._hardware)
        self.host = _HostClock(on_host(graph.nodes) if self._hardware.host_memory_bandwidth else set())
        self.work, self.wires = 0.0, 0.0
        self.ends: dict[Node, float] = {}

    def run(self, node: Node) -> None:
        """Advance the clocks by a node."""
        if node.op != "call_function" or is_view(node) or node in self._excluded:
            self.host.pass_on(node)
        elif is_collective(node):
            self._start(node)
        elif loop := node_loop(node):
            self._run_loop(loop)
        elif is_wait(node):
            self._wait_until(self.ends.get(wait_start(node), 0.0))
        elif self._hardware.host_memory_bandwidth and is_move(node):
            self._move(node)
        elif node in self.host.nodes:
            seconds = _host_seconds(node, self._hardware)
            self.host.compute(node, seconds)
            self.note("host", self.host.now - seconds, seconds, op_name(node), "host")
        else:
            work = self._kernels.estimate_work(node)
            self.note("compute", self.work, work.seconds, op_name(node), work.limit)
            self.work += work.seconds

    def note(self, stream: str, start: float, seconds: float, name: str, limit: str) -> None:
        """Record a busy time."""
        if self.intervals is not None:
            self.intervals.append(Interval(stream=stream, start=start, seconds=seconds, name=name, limit=limit))

    def _wait_until(self, time: float) -> None:
        if time > self.work:
            self.note("compute", self.work, time - self.work, "wait", "wire")
            self.work = time

    def start_carried(self, node: Node) -> None:
        """Start a reduction that the iteration before left in flight, unless it has started: it began at its end."""
        start = source_collective(node.meta["carried"])
        if start not in self.ends:
            self._start(start)

    def _start(self, node: Node) -> None:
        start, seconds = max(self.work, self.wires), collective_seconds(node, self._hardware)
        self.ends[node] = self.wires = start + seconds
        self.note("communication", start, seconds, node.meta.get("unit", "") or collective_kind(node), "wire")

    def _run_loop(self, loop: Loop) -> None:
        self._wait_until(self.wires)
        start, seconds = self.work, self._loop_seconds(loop)
        self.work = self.wires = start + seconds
        if self.intervals is not None and loop.rank_schedule:
            self.note("compute", start, seconds, f"a pipeline of {loop.iterations} micro-batches", "pipeline")
        elif self.intervals is not None:
            self._note_iterations(loop, start)

    def _note_iterations(self, loop: Loop, start: float) -> None:
        """Record the busy times of a loop's iterations, one after the other."""
        later = timeline(loop.body, self._body_hardware)
        first = timeline(loop.body, self._body_hardware, first=True) if loop.carried_count else later
        for intervals in [first, *[later] * (loop.iterations - 1)]:
            for x in intervals:
                self.note(x.stream, start + x.start, x.seconds, x.name, x.limit)
            start += sum([x.seconds for x in intervals if x.stream == "compute"])

    def _loop_seconds(self, loop: Loop) -> float:
        if loop.rank_schedule:
            message = partial(message_seconds, hardware=self._hardware)
            return pipeline_seconds(loop, partial(estimate_seconds, hardware=self._hardware), message)
        iteration = estimate_seconds(loop.body, self._body_hardware)
        first = estimate_seconds(loop.body, self._body_hardware, first=True) if loop.carried_count else iteration
        return first + (loop.iterations - 1) * iteration

    def _move(self, node: Node) -> None:
        arrival, seconds = self.host.arrival(node), nbytes(*node_stand_ins(node)) / self._hardware.host_link_bandwidth
        if arrival > self.work:
            self.note("compute", self.work, arrival - self.work, "wait", "host")
            self.work = arrival
        self.note("compute", self.work, seconds, op_name(node), "host link")
        self.work += seconds
        self.host.record_arrival(node, self.work)


class _Kernels:
    """The kernels of a graph's operations. Where a compiler fuses, one kernel computes several elementwise operations.

    Such a kernel is launched once, reads each stored operand once, and writes its stored results.
    """

    def __init__(self, graph: Graph, hardware: Hardware) -> None:
        self._hardware = hardware
        self._unstored = unstored_values(list(graph.nodes)) if hardware.fuses else set[Node]()
        self._operands_read: dict[Node, set[Node]] = {}  # the operands that the kernel of an unstored value has read

    def estimate_work(self, node: Node) -> Work:
        """Estimate the seconds of an operation, by itself or within a kernel."""
        work = estimate_work(node, self._hardware)
        if not self._hardware.fuses or not (is_pointwise_kernel(node) or is_tensor_reduction(node)):
            return work
        operands = {_viewed_value(a): a for a in node.all_input_nodes}
        sources = next((self._operands_read[x] for x in operands if x in self._unstored), set[Node]())
        memory_bytes = 0
        for x, a in operands.items():
            if x not in self._unstored and x not in sources:
                # an expanded view is not larger
                memory_bytes += min(nbytes(*node_stand_ins(x)), nbytes(*node_stand_ins(a)))
                sources.add(x)
        if node in self._unstored:
            self._operands_read[node] = sources
            return Work(0.0, memory_bytes / self._hardware.memory_bandwidth, 0.0)
        return Work(
            0.0, (memory_bytes + nbytes(*node_stand_ins(node))) / self._hardware.memory_bandwidth, work.launch_seconds
        )


def _viewed_value(node: Node) -> Node:
    """Return the value that a node is a view of; the node itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


@dataclass
class _HostClock:
    """The host's clock.

    Attributes:
        nodes: the nodes whose results lie in host memory.
        now: the time at which the host has finished all work so far, in seconds.
        ready: the time at which each node's result is ready, in seconds.
    """

    nodes: Set[Node]
    now: float = 0.0
    ready: dict[Node, float] = field(default_factory=dict)

    def arrival(self, node: Node) -> float:
        """Return the time at which all of a node's operands on the host are ready."""
        return max([self.ready.get(a, 0.0) for a in node.all_input_nodes], default=0.0)

    def record_arrival(self, node: Node, time: float) -> None:
        """Record the time at which a copy to the host is ready."""
        if node in self.nodes:
            self.ready[node] = time

    def pass_on(self, node: Node) -> None:
        """Record that a view is ready when its base is."""
        self.record_arrival(node, self.arrival(node))

    def compute(self, node: Node, seconds: float) -> None:
        """Advance the clock by an operation, which starts when the host is free and the operands are ready."""
        self.now = max(self.now, self.arrival(node)) + seconds
        self.ready[node] = self.now


def _host_seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the seconds of one operation of the host."""
    return max(
        nbytes(*node_stand_ins(node), *argument_stand_ins(node)) / hardware.host_memory_bandwidth,
        hardware.launch_seconds,
    )


def _host_work(graph: Graph) -> set[Node]:
    """Return the nodes that the device's clock does not count: the host's work, and copies."""
    return on_host(graph.nodes) | {n for n in graph.nodes if is_move(n)}


def _common_hardware(graph: Graph) -> Hardware:
    kinds = {x.device.type for n in graph.nodes if is_input(n) for x in node_stand_ins(n)}
    return HARDWARE["cuda" if "cuda" in kinds else "cpu"]
