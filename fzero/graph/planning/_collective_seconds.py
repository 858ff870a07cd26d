"""The time of a collective: its bytes over the slowest link on the way, and a latency that grows with the ranks."""

import functools
import itertools
import math
from typing import NamedTuple

from torch.fx import Node

from fzero.graph.ir import collective_axes, collective_kind, full_bytes, group_size
from fzero.graph.planning._hardware import Hardware

__all__ = ["collective_seconds", "message_seconds", "transfer_seconds"]


class _Route(NamedTuple):
    """The distribution of a group's ranks over machines.

    Attributes:
        ranks: the number of ranks.
        local_ranks: the number of these ranks on the machine of the first one, itself included.
        machines: the number of machines.
    """

    ranks: int
    local_ranks: int
    machines: int


@functools.cache
def _find_route(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], ranks_per_machine: float) -> _Route:
    """Return how the ranks along some axes of a mesh are distributed over machines.

    Args:
        axes: the axes that a collective runs over.
        mesh: all axes with their sizes, the slowest first.
        ranks_per_machine: the number of ranks on a machine.
    """
    strides = dict[str, int]()
    stride = 1
    for name, size in reversed(mesh):
        strides[name] = stride
        stride *= size
    sizes = dict(mesh)
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in axes]
    machines = [
        0 if ranks_per_machine == math.inf else sum(starts) // int(ranks_per_machine)
        for starts in itertools.product(*steps)
    ]
    return _Route(len(machines), machines.count(0), len(set(machines)))


def collective_seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the seconds that one collective of b bytes takes by itself, over n ranks on m machines.

    An all_gather and a reduce_scatter are rings of n - 1 steps, m - 1 of them between machines. They take
    `latency + (n - m) hop + (m - 1) network_hop + b (n - 1) / n / speed`. An all_reduce is two of these, or a tree
    through the machines if its latency is lower. Within a machine `speed` is `link_bandwidth`. Between machines it is
    at most `network_bandwidth` times the number of the group's ranks on a machine, since each rank has its own link.

    In an all_to_all each rank sends a part to every other rank, over its own network link alone.

    References:
        The numbers of steps are those by which NCCL chooses an algorithm, in `src/graph/tuning.cc`.
    """
    total, kind = full_bytes(node), collective_kind(node)
    names = tuple([x for x in collective_axes(node, dict(hardware.group_axes)).split(",") if x])
    is_known = bool(names) and {*names} <= {name for name, _ in hardware.axes}
    if not is_known:
        n = group_size(node)
        ring = (n - 1) / n
        share = {"all_gather": ring, "reduce_scatter": ring, "all_reduce": 2}.get(kind, 1)
        speed = hardware.link_bandwidth if n <= hardware.ranks_per_machine else hardware.network_bandwidth
        return hardware.latency_seconds + total * share / speed
    route = _find_route(names, hardware.axes, hardware.ranks_per_machine)
    if route.ranks == 1:
        return hardware.latency_seconds
    limit = min([speed for name, speed in hardware.axis_bandwidths if name in names], default=0.0)
    return (
        hardware.latency_seconds
        + _latency_seconds(kind, route, hardware)
        + _transfer_seconds(kind, total, route, hardware, limit)
    )


def transfer_seconds(kind: str, total: float, axes: tuple[str, ...], hardware: Hardware) -> float:
    """Return the seconds that the bytes of a collective over some axes of the mesh take, without any latency."""
    route = _find_route(axes, hardware.axes, hardware.ranks_per_machine)
    limit = min([speed for name, speed in hardware.axis_bandwidths if name in axes], default=0.0)
    return 0.0 if route.ranks == 1 else _transfer_seconds(kind, total, route, hardware, limit)


def message_seconds(size: int, axis: str, hardware: Hardware) -> float:
    """Estimate the seconds of a message of `size` bytes to the next rank along an axis, over the slowest link there."""
    is_known = axis in dict(hardware.axes)
    crosses_machines = is_known and _find_route((axis,), hardware.axes, hardware.ranks_per_machine).machines > 1
    speed = dict(hardware.axis_bandwidths).get(axis) or (
        hardware.network_bandwidth if crosses_machines else hardware.link_bandwidth
    )
    return (
        hardware.latency_seconds
        + (hardware.network_hop_seconds if crosses_machines else hardware.hop_seconds)
        + size / speed
    )


def _latency_seconds(kind: str, route: _Route, hardware: Hardware) -> float:
    """Return the part of a collective's latency that grows with the number of ranks, in seconds."""
    n, _, m = route
    if kind == "all_to_all":  # all messages are sent at the same time
        return hardware.network_hop_seconds if m > 1 else hardware.hop_seconds
    ring = (n - m) * hardware.hop_seconds + (m - 1) * hardware.network_hop_seconds
    if kind != "all_reduce":
        return ring
    return 2 * min(ring, (n / m - 1) * hardware.hop_seconds + math.ceil(math.log2(m)) * hardware.network_hop_seconds)


def _transfer_seconds(kind: str, total: float, route: _Route, hardware: Hardware, limit: float) -> float:
    """Return the seconds that a collective's bytes take; a `limit` above 0 is the speed of its axis."""
    n, local_ranks, m = route
    if kind == "all_to_all":
        local_bytes, cross_machine_bytes = total * (local_ranks - 1) / n, total * (n - local_ranks) / n
        if limit:
            return (local_bytes + cross_machine_bytes) / limit
        return max(local_bytes / hardware.link_bandwidth, cross_machine_bytes / hardware.network_bandwidth)
    speed = limit or (
        hardware.link_bandwidth if m == 1 else min(hardware.link_bandwidth, local_ranks * hardware.network_bandwidth)
    )
    times = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
    return total * times.get(kind, 1.0) / speed
