"""What a collective takes: bytes over the slowest link on its way, and latency that grows with the ranks."""

import functools
import itertools
import math
from typing import NamedTuple

from torch.fx import Node

from fzero.graph._wire import axis_of, full_bytes, group_size, wire
from fzero.graph.plan._device import Device

__all__ = ["Route", "collective_seconds", "message_seconds", "route_of"]


class Route(NamedTuple):
    """Where the ranks of a group are.

    Attributes:
        ranks: how many there are; 0 where nothing says so.
        near: how many of them the first one has on its machine, itself included.
        machines: on how many they are.
    """

    ranks: int
    near: int
    machines: int


@functools.cache
def route_of(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], near: float) -> Route:
    """Find the machines of the ranks along some axes of a mesh.

    Args:
        axes: that a collective runs over.
        mesh: all axes with their sizes, the slowest first.
        near: how many ranks a machine has.
    """
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh):
        strides[name] = stride
        stride *= size
    sizes = dict(mesh)
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in axes]
    machines = [0 if near == math.inf else sum(at) // int(near) for at in itertools.product(*steps)]
    return Route(len(machines), machines.count(0), len(set(machines)))


def collective_seconds(node: Node, device: Device) -> float:
    """Estimate how long one collective of b bytes in all takes by itself, over n ranks on m machines.

    An all_gather and a reduce_scatter are rings of n - 1 steps, m - 1 of them between machines. They take
    `latency + (n - m) hop + (m - 1) far_hop + b (n - 1) / n / speed`. An all_reduce is two of these. Its steps may also
    be those of a tree through the machines. Within a machine `speed` is `link`. Else it is at most `network` times the
    ranks of the group that a machine has, since each has a way out of its own.

    Of an all_to_all each rank sends its part to each other one, over its own way out alone.

    References:
        The steps are those of NCCL's own choice of an algorithm, `src/graph/tuning.cc`.
    """
    total, kind = full_bytes(node), wire(node)
    names = tuple([x for x in axis_of(node, dict(device.groups)).split(",") if x])
    known = bool(names) and {*names} <= {name for name, _ in device.axes}
    if not known:
        n = group_size(node)
        share = (n - 1) / n if kind in ("all_gather", "reduce_scatter") else 2 if kind == "all_reduce" else 1
        return device.latency + total * share / (device.link if n <= device.near else device.network)
    route = route_of(names, device.axes, device.near)
    if route.ranks == 1:
        return device.latency
    limit = min([speed for name, speed in device.links if name in names], default=0.0)
    return device.latency + _hops(kind, route, device) + _crossing(kind, total, route, device, limit)


def message_seconds(size: int, axis: str, device: Device) -> float:
    """Estimate how long a message of so many bytes takes to the next rank along an axis, over the slowest such way."""
    known = axis in dict(device.axes)
    far = known and route_of((axis,), device.axes, device.near).machines > 1
    speed = dict(device.links).get(axis) or (device.network if far else device.link)
    return device.latency + (device.far_hop if far else device.hop) + size / speed


def _hops(kind: str, route: Route, device: Device) -> float:
    """Return the latency that grows with the ranks."""
    n, _, m = route
    if kind == "all_to_all":  # all messages are on their way at once
        return device.far_hop if m > 1 else device.hop
    ring = (n - m) * device.hop + (m - 1) * device.far_hop
    if kind != "all_reduce":
        return ring
    return 2 * min(ring, (n / m - 1) * device.hop + math.ceil(math.log2(m)) * device.far_hop)


def _crossing(kind: str, total: float, route: Route, device: Device, limit: float) -> float:
    """Return the seconds of the bytes, at the speed of an axis, if one was given as a `limit`."""
    n, near, m = route
    if kind == "all_to_all":
        within, beyond = total * (near - 1) / n, total * (n - near) / n
        if limit:
            return (within + beyond) / limit
        return max(within / device.link, beyond / device.network)
    speed = limit or (device.link if m == 1 else min(device.link, near * device.network))
    times = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
    return total * times.get(kind, 1.0) / speed
