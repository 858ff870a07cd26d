"""Live ranges: when each storage of a scheduled graph is allocated and freed, and what lies in it."""

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, Node

from fzero._torch import line_of
from fzero.graph._ir import (
    CASTS,
    COMPILED,
    COPY,
    FUSED,
    aten,
    awaited,
    collective_of,
    full_bytes,
    is_carried,
    is_cheap,
    is_collective,
    is_gather,
    is_input,
    is_reduction,
    is_wait,
    nbytes,
    users_through_views,
    values,
    values_of_args,
    wire,
)
from fzero.graph._ops import is_factory, is_linear, is_pointwise, is_view, name_of
from fzero.graph._storages import Storages, storages, storages_in
from fzero.graph.loop._memory import peak_by_phase
from fzero.graph.loop._scan import Loop, loop_of
from fzero.graph.loop._split import regions
from fzero.graph.run._groups import cut

__all__ = [
    "A_TURN",
    "KINDS",
    "Range",
    "is_loop",
    "live_bytes",
    "live_in",
    "live_ranges",
    "most_in_a_turn",
    "never_stored",
    "peak_bytes",
    "ranges_of_a_turn",
    "reduces",
    "workspace_bytes",
]

# Fused: the values that a compiler computes within a loop over others, and never stores.


REDUCTIONS = {"sum", "mean", "linalg_vector_norm", "amax", "amin", "any", "all"}


def is_loop(node: Node) -> bool:
    """Return whether a node computes one tensor, element by element."""
    by_element = is_pointwise(node) or is_factory(node) or node.target is COPY or node.target in CASTS
    return node.op == "call_function" and by_element and len(values(node)) == 1


def reduces(node: Node) -> bool:
    """Return whether a node sums a tensor, or the like: a loop over its elements."""
    return name_of(node) in REDUCTIONS


def never_stored(order: Sequence[Node]) -> set[Node]:
    """List the values that `mark_fused` marked and that take no memory in an order.

    All that reads such a value is compiled with it, and between the two stand loops alone. What a sum or a matrix
    product comes in between of is stored.

    Args:
        order: the nodes of a graph, in an order in which they can run.
    """
    if not any(FUSED in n.meta for n in order):
        return set()
    found: set[Node] = set()
    for group in cut(order):
        run: dict[Node, int] = {}  # the loops that may be one have equal numbers
        count = 0
        for n in group:
            count += not is_loop(n) and not reduces(n)
            run[n] = count
            count += reduces(n)
        found |= {n for n in group if FUSED in n.meta and all(run.get(u) == run[n] for u in users_through_views(n))}
    return found


# Memory that kernels take for themselves while they run, as far as it is known.
#
# Reductions that first copy an operand of another dtype into the one that they compute in.
CASTING = {
    aten.mean,
    aten.sum,
    aten.nansum,
    aten.prod,
    aten.cumsum,
    aten.cumprod,
    aten.linalg_vector_norm,
}
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}


def workspace_bytes(node: Node) -> int:
    """Return what an operation allocates beside its results, in bytes; 0 where nothing is known.

    Known are a CPU's convolutions, its reductions in another dtype than the operand's, and what it computes element by
    element of several dtypes, unless that is compiled. Measured on torch 2.13; what is left out: docs/plan.md.
    """
    if is_pointwise(node):
        return 0 if COMPILED in node.meta else _promoted_bytes(node)
    reduction = getattr(node.target, "overloadpacket", None)
    if reduction not in CASTING and reduction not in CONVOLUTIONS:
        return 0
    given = values_of_args(node)
    if not given or any(x.device.type != "cpu" for x in given):
        return 0
    if node.target is aten.convolution.default:
        return max(nbytes(*given[:2]), nbytes(*values(node)))
    if node.target is aten.convolution_backward.default:
        grad, x, _ = given[:3]
        wants_input: Any = node.args[-1]
        return nbytes(grad) + (nbytes(x) if wants_input[0] else 0)
    return _cast_bytes(reduction, given[0], values(node)[0].dtype) if reduction in CASTING else 0


def _promoted_bytes(node: Node) -> int:
    """Return the bytes of operands in the dtype that they are computed in with others of a wider one."""
    given = [x for x in values_of_args(node) if x.is_floating_point() and x.dim()]
    if len({x.dtype for x in given}) < 2 or any(x.device.type != "cpu" for x in given):
        return 0
    wide = reduce(torch.promote_types, [x.dtype for x in given])
    return sum([x.numel() * wide.itemsize for x in given if x.dtype is not wide])


def _cast_bytes(reduction: Any, x: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a reduction's operand in the dtype that it is reduced in; 0 where that is its own."""
    if reduction is aten.mean and dtype.itemsize == 2:
        dtype = torch.float32
    return 0 if dtype is x.dtype else x.numel() * dtype.itemsize


A_TURN = "a turn of the loop"  # the label of what a loop's body holds
IN_FLIGHT = "other micro-batches in flight"
KINDS = ("parameters", "optimizer state", "inputs", "gathered", "activations", "gradients", "buffers")


class Range(NamedTuple):
    """A storage, while it is alive.

    Attributes:
        start: the position of the node that allocates it; -1 for an argument.
        stop: the position of the last node that needs it; the number of nodes for arguments and results.
        bytes: its size.
        kind: one of `KINDS`. "gradients" are gradients of parameters, whole or reduced; "buffers" what collectives
            are given, and the update's own values.
        label: an argument's name, a gathered unit's, or the source line that computed it.
        space: the memory that it takes: "device" or "host".
    """

    start: int
    stop: int
    bytes: int
    kind: str
    label: str
    space: str = "device"


def live_ranges(graph: Graph) -> list[Range]:
    """Find when each storage of a graph is alive, if values are freed after their last use.

    The executor "fx" does just that. A collective keeps its operands until it is waited for. Arguments belong to
    the caller, and so live throughout.
    """
    lent, kinds = storages(graph), _kinds(graph)
    unnamed = _unnamed(list(graph.nodes), lent)
    beside = Counter([s for n in graph.nodes if is_input(n) for s in lent.of[n]])
    named = [
        r._replace(kind=node.meta.get("kind", "inputs"), label=_argument(node, beside[lent.of[node][0]] - 1))
        if is_input(node)
        else r._replace(kind=kinds[node], label=_label(node))
        for node, r in zip(lent.born, unnamed, strict=False)
    ]
    return unnamed[len(named) :] + named


def live_in(order: Sequence[Node], lent: Storages | None = None) -> list[int]:
    """Count the device's bytes that are alive while each node runs: of `live_ranges`, which also says what they are.

    Args:
        order: the nodes of a graph, in an order in which they can run.
        lent: the graph's storages, if they are known.
    """
    ranges = _unnamed(order, storages_in(order) if lent is None else lent)
    return live_bytes([r for r in ranges if r.space == "device"], len(order))


def _unnamed(order: Sequence[Node], lent: Storages) -> list[Range]:
    """Find the ranges of `live_ranges`, storages first, without what takes longest: to say what lies there."""
    position = {n: i for i, n in enumerate(order)}
    later = _waits_again(order)
    stops = _last_uses(position, later, lent)
    starts = [-1 if is_input(n) and not is_carried(n) else position[n] for n in lent.born]
    for node in order:
        if loop := loop_of(node):
            for s in lent.of[node][len(lent.of[node]) - loop.carried :]:  # the last turn has counted them
                starts[s] += 1
    fused = never_stored(order)
    sizes = [0 if n in fused else size for n, size in zip(lent.born, lent.size, strict=True)]
    own = [
        Range(start, len(order) if start < 0 else stop, size, "", "", "host" if n in lent.on_host else "device")
        for start, stop, size, n in zip(starts, stops, sizes, lent.born, strict=True)
    ]
    return own + _copies(position, later)


def _last_uses(position: Mapping[Node, int], later: Set[Node], lent: Storages) -> list[int]:
    """Find for each storage the place of the last node that needs it; the number of nodes for results."""
    stop = [position[n] for n in lent.born]
    for node, i in position.items():
        # the parts that a view cuts a value in lie in one storage
        held = [s for a in node.all_input_nodes for s in (lent.of[a][:1] if is_view(a) else lent.of[a])]
        for source in () if node in later else _sources(node):  # it holds what the collective was given
            held += [] if is_carried(source) else lent.read_by(collective_of(source))
        for s in held:
            stop[s] = i if node.op != "output" else len(position)
    return stop


def _last_uses_of(position: Mapping[Node, int], lent: Storages) -> list[int]:
    return _last_uses(position, _waits_again(position), lent)


def _copies(position: Mapping[Node, int], later: Set[Node]) -> list[Range]:
    """Find the memory that is held beside values: in loops, by kernels as they work, and by reduce_scatters.

    The latter are those of fzero's own on gloo (`collectives/gloo.py`). Of n ranks' parts the own one lies in the
    operand, and one that arrives becomes the result.
    """
    found = []
    for node, i in position.items():
        if loop := loop_of(node):
            found.append(Range(i, i, most_in_a_turn(loop), "activations", A_TURN))
        if extra := workspace_bytes(node):
            found.append(Range(i, i, extra, "buffers", f"workspace of {node.target}"))
        if node in later:
            continue
        for source in _sources(node):
            found += _on_the_way(source, i if is_wait(node) else len(position), position)
        if is_wait(node) and _is_messages(awaited(node)):
            x = values(node)[0]
            if full_bytes(node) > 2 * nbytes(x) and x.dtype in (torch.bfloat16, torch.float16):
                found.append(Range(i, i, 4 * nbytes(x), "buffers", "their sum"))  # in float32 the sum, and a row
    return found


def _waits_again(order: Iterable[Node]) -> set[Node]:
    """List the waits for what an earlier wait has ended, as `recompute` makes them: nothing more is held."""
    seen: set[tuple[Node, object]] = set()
    found: set[Node] = set()
    for node in order:
        if is_wait(node):
            source = node.all_input_nodes[0]
            key = (collective_of(source), source.args[1] if source.target is operator.getitem else None)
            (found.add(node) if key in seen else seen.add(key))
    return found


def _sources(node: Node) -> list[Node]:
    """List what a node ends: what a wait waits for, and reductions that a turn leaves on their way."""
    if is_wait(node):
        return node.all_input_nodes
    return [a for a in node.all_input_nodes if is_reduction(collective_of(a))] if node.op == "output" else []


def _on_the_way(source: Node, stop: int, position: Mapping[Node, int]) -> list[Range]:
    """Find what a collective, or an item of it, holds beside its result until it has arrived."""
    begun = source.meta.get("carried", source)
    held, label = 0, "the ranks' parts"
    if _is_messages(begun):
        held += max(full_bytes(begun) - 2 * nbytes(*values(begun)), 0)
    if is_carried(source):  # its operand is another turn's
        held, label = held + full_bytes(begun), "a reduction of the turn before"
    start = position[source if is_carried(source) else collective_of(source)]
    return [Range(start, stop, held, "buffers", label)] if held else []


def _is_messages(source: Node) -> bool:
    """Return whether a collective, or an item of it, is a reduce_scatter of fzero's own."""
    start = collective_of(source)
    return is_collective(start) and wire(start) == "reduce_scatter" and values(source)[0].device.type == "cpu"


def ranges_of_a_turn(loop: Loop) -> list[Range]:
    """Find when each storage of a loop's body is alive, but for those that it is given.

    The number of the turn is its own; a row lives until the turn's end, when it is copied to where it belongs. What
    other micro-batches of a pipeline hold during a phase is a range of its own.
    """
    found = _within(loop, live_ranges(loop.body))
    return found if loop.track is None else found + _in_flight(loop, found)


def _in_flight(loop: Loop, ranges: Sequence[Range]) -> list[Range]:
    """Find what other turns than this one hold during each phase of a pipeline's turn."""
    nodes = list(loop.body.nodes)
    live, most, found = live_bytes(ranges, len(nodes)), peak_by_phase(loop, _last_uses_of), []
    for phase, region in regions(nodes).items():
        others = most.get(phase, 0) - max([live[i] for i in region], default=0)
        if others > 0:
            found.append(Range(region[0], region[-1], others, "activations", IN_FLIGHT))
    return found


def _within(loop: Loop, ranges: Iterable[Range]) -> list[Range]:
    """Return those of a body's ranges that a turn begins, and ends at the latest when it ends."""
    end = len(loop.body.nodes) - 1
    number = next(iter(loop.body.nodes))
    own = [Range(0, end, nbytes(*values(number)), "inputs", "the number of the turn")] if number.users else []
    return own + [r._replace(stop=min(r.stop, end)) for r in ranges if r.start >= 0]


def most_in_a_turn(loop: Loop) -> int:
    """Return the most bytes that a turn of a loop holds at any time beside what it is given.

    Of a pipeline's loop it is what all turns in flight hold.
    """
    if loop.track is not None:
        return max(peak_by_phase(loop, _last_uses_of).values())
    if loop.body not in _TURNS:
        order = list(loop.body.nodes)
        _TURNS[loop.body] = max(live_bytes(_within(loop, _unnamed(order, storages_in(order))), len(order)))
    return _TURNS[loop.body]


_TURNS: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
"""What was found of a body, which several schedules of a graph have in common: no pass changes a graph that it made."""


def live_bytes(ranges: Iterable[Range], nodes: int) -> list[int]:
    """Add up the bytes that are alive while each of a graph's nodes runs."""
    change = [0] * (nodes + 1)
    for r in ranges:
        change[max(r.start, 0)] += r.bytes
        change[min(r.stop + 1, nodes)] -= r.bytes
    return list(itertools.accumulate(change))[:nodes]


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes of the device that are alive at any time of a graph, its arguments included."""
    return max(live_in(list(graph.nodes)))


def _argument(node: Node, others: int) -> str:
    """Name an argument, and how many others lie beside it in its storage."""
    label = node.meta.get("label", node.name)
    return f"{label} and {others} beside it" if others else label


def _label(node: Node) -> str:
    return node.meta.get("unit", "") or line_of(node) or str(node.target)


def _kinds(graph: Graph) -> dict[Node, str]:
    """Say what each node computes, from how it is connected to collectives and to work."""
    kinds: dict[Node, str] = {}
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    after: set[Node] = set()  # whatever follows a reduction
    for n in nodes:
        if is_reduction(n) or any(a in after for a in n.all_input_nodes):
            after.add(n)
    feeds_work: set[Node] = set()
    for n in reversed(nodes):
        if not is_cheap(n) or n in feeds_work:
            feeds_work.update(n.all_input_nodes)
    sums = {a for n in nodes if (loop := loop_of(n)) for a in n.args[len(loop.parts) :][: loop.sums]}
    for n in reversed(nodes):
        users = list(n.users)
        if is_gather(n):
            kinds[n] = "gathered"
        elif is_reduction(n) or n in sums or any(u in sums for u in users):
            kinds[n] = "gradients"
        elif n in after and n not in feeds_work:
            kinds[n] = "buffers"
        elif users and all(is_reduction(u) for u in users_through_views(n)):
            kinds[n] = "packed"
        elif users and n not in feeds_work and all(kinds.get(u) == "packed" or _passes_on(u, kinds) for u in users):
            kinds[n] = "gradients"
        else:
            kinds[n] = "buffers" if n.target is COPY else "activations"
    return {n: "buffers" if kind == "packed" else kind for n, kind in kinds.items()}


def _passes_on(user: Node, kinds: dict[Node, str]) -> bool:
    """Return whether a user of gradients only lays them out, scales or sums them."""
    return is_linear(user) and kinds.get(user) == "gradients"
