"""Live ranges: when each storage of a scheduled graph is allocated and freed, and the values in it."""

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, Node

from fzero._torch import node_line
from fzero.graph.ir import (
    Storages,
    collective_kind,
    full_bytes,
    is_carried,
    is_collective,
    is_input,
    is_reduce_collective,
    is_view,
    is_wait,
    nbytes,
    node_stand_ins,
    source_collective,
    storages,
    storages_in,
    wait_source,
)
from fzero.graph.loop import Loop, node_loop, peak_by_region, region_positions
from fzero.graph.planning._fused_values import unstored_values
from fzero.graph.planning.memory._storage_kinds import storage_kinds
from fzero.graph.planning.memory._workspaces import workspace_bytes

__all__ = [
    "ITERATION",
    "Range",
    "device_live_bytes",
    "iteration_peak_bytes",
    "iteration_ranges",
    "live_bytes",
    "live_ranges",
    "peak_bytes",
    "record_peak",
]


ITERATION = "one iteration of the loop"  # the label of the range that stands for a loop's body
_IN_FLIGHT = "other micro-batches in flight"


class Range(NamedTuple):
    """A storage, while it is alive.

    Attributes:
        start: the position of the node that allocates the storage; -1 for an argument.
        stop: the position of the storage's last use; the number of nodes for arguments and results.
        bytes: the size of the storage in bytes.
        kind: one of `KINDS`. "gradients" are gradients of parameters, full or sharded. "buffers" are the operands of
            collectives, and intermediate values of the update.
        label: the name of the argument or of the gathered unit, or the source line that computed the value.
        space: the memory that the storage lies in: "device" or "host".
    """

    start: int
    stop: int
    bytes: int
    kind: str
    label: str
    space: str = "device"


def live_ranges(graph: Graph) -> list[Range]:
    """Return when each storage of a graph is alive, if values are freed after their last use.

    The executor "fx" frees them so. A collective keeps its operands until its wait. Arguments belong to the caller and
    are alive throughout.
    """
    memory, kinds = storages(graph), storage_kinds(graph)
    unlabeled = _unlabeled_ranges(list(graph.nodes), memory)
    leaves_in = Counter([s for n in graph.nodes if is_input(n) for s in memory.indices[n]])
    labeled_ranges = [
        r._replace(
            kind=node.meta.get("kind", "inputs"), label=_argument_label(node, leaves_in[memory.indices[node][0]] - 1)
        )
        if is_input(node)
        else r._replace(kind=kinds[node], label=_node_label(node))
        for node, r in zip(memory.producers, unlabeled, strict=False)
    ]
    return unlabeled[len(labeled_ranges) :] + labeled_ranges


def device_live_bytes(
    order: Sequence[Node], memory: Storages | None = None, scalars: Set[Node] | None = None
) -> list[int]:
    """Return the device's live bytes while each node runs: those of `live_ranges`, without kinds and labels.

    Args:
        order: the nodes of a graph, in an order in which they can run.
        memory: the graph's storages; computed if None.
        scalars: the graph's scalars (`find_scalars`); computed if None.
    """
    ranges = _unlabeled_ranges(order, storages_in(order) if memory is None else memory, scalars)
    return live_bytes([r for r in ranges if r.space == "device"], len(order))


def _unlabeled_ranges(order: Sequence[Node], memory: Storages, scalars: Set[Node] | None = None) -> list[Range]:
    """Return the ranges of `live_ranges`, storages first, without kinds and labels, which take longest to find."""
    position = {n: i for i, n in enumerate(order)}
    repeated_waits = _repeated_waits(order)
    stops = _last_uses(position, repeated_waits, memory)
    starts = [-1 if is_input(n) and not is_carried(n) else position[n] for n in memory.producers]
    for node in order:
        if loop := node_loop(node):
            node_storages = memory.indices[node]
            for s in node_storages[len(node_storages) - loop.carried_count :]:  # the last iteration has counted them
                starts[s] += 1
    unstored = unstored_values(order, scalars, memory.on_host)
    sizes = [0 if n in unstored else size for n, size in zip(memory.producers, memory.sizes, strict=True)]
    ranges = [
        Range(
            start=start,
            stop=len(order) if start < 0 else stop,
            bytes=size,
            kind="",
            label="",
            space="host" if n in memory.on_host else "device",
        )
        for start, stop, size, n in zip(starts, stops, sizes, memory.producers, strict=True)
    ]
    return ranges + _extra_ranges(position, repeated_waits)


def _last_uses(position: Mapping[Node, int], repeated_waits: Set[Node], memory: Storages) -> list[int]:
    """Return the position of each storage's last use; the number of nodes for results."""
    stops = [position[n] for n in memory.producers]
    for node, i in position.items():
        # all parts of a view lie in one storage
        used_storages = [
            s for a in node.all_input_nodes for s in (memory.indices[a][:1] if is_view(a) else memory.indices[a])
        ]
        for source in (
            () if node in repeated_waits else _completed_collectives(node)
        ):  # a collective holds its operands until its wait
            if not is_carried(source):
                used_storages += memory.read_by(source_collective(source))
        for s in used_storages:
            stops[s] = i if node.op != "output" else len(position)
    return stops


def _body_last_uses(position: Mapping[Node, int], memory: Storages) -> list[int]:
    return _last_uses(position, _repeated_waits(position), memory)


def _extra_ranges(position: Mapping[Node, int], repeated_waits: Set[Node]) -> list[Range]:
    """Return ranges for memory besides values: of loops' bodies, of kernels' workspaces and of reduce_scatters.

    The reduce_scatters are fzero's own on gloo (`collectives/gloo.py`). Each receives the parts of n - 1 ranks, and
    one of these becomes the result.
    """
    ranges = []
    for node, i in position.items():
        if loop := node_loop(node):
            ranges.append(Range(start=i, stop=i, bytes=iteration_peak_bytes(loop), kind="activations", label=ITERATION))
        if extra := workspace_bytes(node):
            ranges.append(Range(start=i, stop=i, bytes=extra, kind="buffers", label=f"workspace of {node.target}"))
        if node in repeated_waits:
            continue
        for source in _completed_collectives(node):
            ranges += _pending_ranges(source, i if is_wait(node) else len(position), position)
        if is_wait(node) and _is_gloo_reduce_scatter(wait_source(node)):
            x = node_stand_ins(node)[0]
            if full_bytes(node) > 2 * nbytes(x) and x.dtype in (torch.bfloat16, torch.float16):
                # in float32: the sum, and one rank's part
                ranges.append(Range(start=i, stop=i, bytes=4 * nbytes(x), kind="buffers", label="their sum"))
    return ranges


def _repeated_waits(order: Iterable[Node]) -> set[Node]:
    """Return the waits whose collective an earlier wait has ended, as `recompute` makes them: they hold no operands."""
    visited: set[tuple[Node, object]] = set()
    repeated_waits: set[Node] = set()
    for node in order:
        if is_wait(node):
            source = node.all_input_nodes[0]
            key = (source_collective(source), source.args[1] if source.target is operator.getitem else None)
            (repeated_waits.add(node) if key in visited else visited.add(key))
    return repeated_waits


def _completed_collectives(node: Node) -> list[Node]:
    """List the collectives that end at a node: a wait's own, and at the output the reductions carried on."""
    if is_wait(node):
        return node.all_input_nodes
    return (
        [a for a in node.all_input_nodes if is_reduce_collective(source_collective(a))] if node.op == "output" else []
    )


def _pending_ranges(source: Node, stop: int, position: Mapping[Node, int]) -> list[Range]:
    """Return the memory that a collective, or an item of it, holds besides its result until its wait."""
    start = source.meta.get("carried", source)
    size, label = 0, "the ranks' parts"
    if _is_gloo_reduce_scatter(start):
        size += max(full_bytes(start) - 2 * nbytes(*node_stand_ins(start)), 0)
    if is_carried(source):  # the iteration before allocated its operand
        size, label = size + full_bytes(start), "a reduction of the iteration before"
    begin = position[source if is_carried(source) else source_collective(source)]
    return [Range(start=begin, stop=stop, bytes=size, kind="buffers", label=label)] if size else []


def _is_gloo_reduce_scatter(source: Node) -> bool:
    """Return whether a collective, or an item of it, is fzero's own reduce_scatter on gloo."""
    start = source_collective(source)
    return (
        is_collective(start)
        and collective_kind(start) == "reduce_scatter"
        and node_stand_ins(source)[0].device.type == "cpu"
    )


def iteration_ranges(loop: Loop) -> list[Range]:
    """Return when each storage of a loop's body is alive, without the body's arguments.

    The iteration's number counts, although it is an argument. The values of rows live until the iteration's end, when
    they are copied into the rows. Memory that other micro-batches of a pipeline hold during a region is a range of its
    own.
    """
    ranges = _clipped_to_iteration(loop, live_ranges(loop.body))
    return ranges if loop.rank_schedule is None else ranges + _other_micro_batches(loop, ranges)


def _other_micro_batches(loop: Loop, ranges: Sequence[Range]) -> list[Range]:
    """Return ranges for the memory that other iterations hold during each region of a pipeline's iteration."""
    nodes = list(loop.body.nodes)
    live = live_bytes(ranges, len(nodes))
    peaks = peak_by_region(loop, _body_last_uses)
    extra_ranges: list[Range] = []
    for region, positions in region_positions(nodes).items():
        size = peaks.get(region, 0) - max([live[i] for i in positions], default=0)
        if size > 0:
            extra_ranges.append(
                Range(start=positions[0], stop=positions[-1], bytes=size, kind="activations", label=_IN_FLIGHT)
            )
    return extra_ranges


def _clipped_to_iteration(loop: Loop, ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges that begin in an iteration, and end them with the iteration at the latest."""
    end = len(loop.body.nodes) - 1
    iteration = next(iter(loop.body.nodes))
    iteration_range = (
        [
            Range(
                start=0,
                stop=end,
                bytes=nbytes(*node_stand_ins(iteration)),
                kind="inputs",
                label="the iteration's number",
            )
        ]
        if iteration.users
        else []
    )
    return iteration_range + [r._replace(stop=min(r.stop, end)) for r in ranges if r.start >= 0]


def iteration_peak_bytes(loop: Loop) -> int:
    """Return the peak memory of a loop's iteration in bytes, without its arguments.

    For a pipeline's loop the memory of all iterations in flight counts.
    """
    if loop.rank_schedule is not None:
        return max(peak_by_region(loop, _body_last_uses).values())
    if loop.body not in _PEAKS:
        order = list(loop.body.nodes)
        _PEAKS[loop.body] = max(
            live_bytes(_clipped_to_iteration(loop, _unlabeled_ranges(order, storages_in(order))), len(order))
        )
    return _PEAKS[loop.body]


_PEAKS: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
"""A cache by body, which several schedules of a graph share: a pass never changes a graph after returning it."""


def live_bytes(ranges: Iterable[Range], nodes: int) -> list[int]:
    """Return the live bytes while each of a graph's nodes runs."""
    change = [0] * (nodes + 1)
    for r in ranges:
        change[max(r.start, 0)] += r.bytes
        change[min(r.stop + 1, nodes)] -= r.bytes
    return list(itertools.accumulate(change))[:nodes]


def peak_bytes(graph: Graph) -> int:
    """Return a graph's peak memory on the device in bytes, arguments included."""
    recorded_peak = _RECORDED_PEAKS.get(graph)
    return max(device_live_bytes(list(graph.nodes))) if recorded_peak is None else recorded_peak


_RECORDED_PEAKS: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()


def record_peak(graph: Graph, peak: int) -> None:
    """Record the peak of a graph that is known already, from the live bytes of an order that became the graph."""
    _RECORDED_PEAKS[graph] = peak


def _argument_label(node: Node, count: int) -> str:
    """Return an argument's label, with the number of other arguments that share its storage."""
    label = node.meta.get("label", node.name)
    return f"{label} and {count} beside it" if count else label


def _node_label(node: Node) -> str:
    return node.meta.get("unit", "") or node_line(node) or str(node.target)
