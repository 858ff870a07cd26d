"""The cost model that ranks candidate schedules: seconds of a step on a device, roughly."""

from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph._wire import full_bytes, group_size, wire
from fzero.graph.ir import (
    collective_of,
    flops,
    is_carried,
    is_collective,
    is_input,
    is_wait,
    nbytes,
    start_of,
    values,
    values_of_args,
)
from fzero.graph.loops import loop_of
from fzero.graph.ops import is_view

__all__ = ["DEVICES", "Device", "seconds"]


class Device(NamedTuple):
    """What a device can do.

    Attributes:
        flops: floating-point operations a second.
        memory: bytes a second, read or written.
        link: bytes a second that a collective moves.
        latency: seconds that a collective takes at least.
        launch: seconds that an operation takes at least.
    """

    flops: float
    memory: float
    link: float
    latency: float
    launch: float


DEVICES = {
    "cpu": Device(flops=5e10, memory=1e10, link=1e9, latency=1e-4, launch=2e-6),  # one core or two, gloo
    "cuda": Device(flops=4e14, memory=3e12, link=1e11, latency=2e-5, launch=4e-6),  # a data-centre GPU, NVLink
}


def seconds(graph: Graph, first: bool = False) -> float:
    """Estimate how long a graph runs: work on one clock, collectives on another.

    Work takes `max(flops / device.flops, bytes / device.memory)`, at least `device.launch`. A collective of b bytes in
    all over n ranks starts after those before it. It takes `latency + b (n - 1) / n / link`; an all_reduce sends twice
    that. Work stands still at a wait whose collective has not ended.

    Args:
        graph: a step, or the body of a loop.
        first: whether it is a loop's first turn, which no turn has left a reduction to.
    """
    device = _device(graph)
    work, wires = 0.0, 0.0
    ends: dict[Node, float] = {}
    for node in graph.nodes:
        if is_carried(node) and not first:  # it began at the end of the turn before
            start = collective_of(node.meta["carried"])
            if start not in ends:
                ends[start] = wires = max(work, wires) + collective_seconds(start, device)
        if node.op != "call_function" or is_view(node):
            continue
        if is_collective(node):
            wires = max(work, wires) + collective_seconds(node, device)
            ends[node] = wires
        elif loop := loop_of(node):
            turn = seconds(loop.body)
            begin = seconds(loop.body, first=True) if loop.carried else turn
            work = wires = max(work, wires) + begin + (loop.turns - 1) * turn
        elif is_wait(node):
            work = max(work, ends.get(start_of(node), 0.0))
        else:
            moved = nbytes(*values(node), *values_of_args(node))
            work += max(flops(node) / device.flops, moved / device.memory, device.launch)
    return work


def collective_seconds(node: Node, device: Device) -> float:
    """Estimate how long one collective takes by itself."""
    total, n = full_bytes(node), group_size(node)
    kind = wire(node)
    crossing = total * (n - 1) / n if kind in ("all_gather", "reduce_scatter") else total  # the others tell no n
    crossing = 2 * total if kind == "all_reduce" else crossing
    return device.latency + crossing / device.link


def _device(graph: Graph) -> Device:
    kinds = {x.device.type for n in graph.nodes if is_input(n) for x in values(n)}
    return DEVICES["cuda" if "cuda" in kinds else "cpu"]
