"""Pieces: a scheduled graph cut at its collectives into segments, of which equal ones are compiled once."""

import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.ir import (
    COPY,
    is_collective,
    is_input,
    is_reduction,
    is_wait,
    results,
    signature,
    users_through_views,
)
from fzero.graph.ops import is_view, name_of

__all__ = ["Call", "Program", "Segment", "pieces"]


class Call(NamedTuple):
    """One operation that runs by itself: a collective, a wait, a packing, or a view that one or a result needs."""

    target: Any
    template: Callable[[list[Any]], tuple[Sequence[Any], dict[str, Any]]]
    out: int
    free: list[int]


class Segment(NamedTuple):
    """Operations that are compiled together.

    Attributes:
        key: what segments with equal code share.
        graph: the code: its arguments are the slots `ins`, its results go to the slots `outs`.
        fakes: stand-ins of the arguments.
        ins: slots.
        outs: slots.
        free: slots that are not needed after it.
    """

    key: Any
    graph: Graph
    fakes: list[torch.Tensor]
    ins: list[int]
    outs: list[int]
    free: list[int]


class Program(NamedTuple):
    """What runs, in order, over numbered slots, of which the first are the arguments."""

    steps: list[Call | Segment]
    slots: int
    results: list[int | None]


def pieces(graph: Graph) -> Program:
    """Cut a graph at its collectives and what they are packed by, and where it goes on to another block's parameters.

    Views go where they are used, so that segments exchange whole buffers. Blocks of one shape give equal segments, so
    what there is to compile does not grow with their number; neither does it with the number of micro-batches.
    """
    runs, parts = _cut(graph), _parts(graph)
    home = {n: i for i, run in enumerate(runs) for n in run}
    wanted = [None if x is None else _written(x) for x in results(graph)]
    alone = _needed_views(runs, wanted) | parts
    exports = _exports(runs, home, wanted)
    slot = {n: i for i, n in enumerate(n for n in graph.nodes if is_input(n))}
    steps: list[Call | Segment] = []
    for i, run in enumerate(runs):
        if _is_call(run[0]):
            for node in [*_views_to(run[0].all_input_nodes, slot, alone), run[0]]:
                steps.append(_call(node, slot))
        else:
            for node in _views_to(_sources([a for n in run for a in n.all_input_nodes], parts), slot, alone):
                steps.append(_call(node, slot))
            segment = _segment(run, exports[i], slot, parts)
            if segment is not None:
                steps.append(segment)
    for node in _views_to([x for x in wanted if x is not None], slot, alone):
        steps.append(_call(node, slot))
    kept = [None if x is None else slot[x] for x in wanted]
    return Program(_with_frees(steps, slot, wanted, graph), len(slot), kept)


def _written(node: Node) -> Node:
    """Return the argument that a write wrote: it is the result."""
    while node.target is COPY:
        node = node.all_input_nodes[0]
    return node


def _is_call(node: Node) -> bool:
    return is_collective(node) or is_wait(node) or _packs(node)


def _packs(node: Node) -> bool:
    """Tell whether a node packs a unit's gradients: Inductor would take the buffer as soon as the first is there."""
    users = users_through_views(node) if name_of(node) == "cat" else []
    return bool(users) and all(is_reduction(u) for u in users)


def moves(node: Node) -> bool:
    """Tell whether a node is a view of one tensor, or an item of several such views or of a collective's results."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and (is_view(source) or is_collective(source))
    return is_view(node)


def _cut(graph: Graph) -> list[list[Node]]:
    runs: list[list[Node]] = []
    home: dict[Node, list[Node]] = {}
    block, fresh = "", True
    for n in graph.nodes:
        if n.op != "call_function" or moves(n):
            continue
        if n.target is operator.getitem:  # a tuple does not leave its segment
            home[n.all_input_nodes[0]].append(n)
            continue
        if _is_call(n):
            runs.append([n])
            fresh = True
            continue
        mine = next((b for a in n.all_input_nodes if (b := _block(a))), "")
        if mine and mine != block:
            block, fresh = mine, True
        if fresh:
            runs.append([])
        runs[-1].append(n)
        home[n] = runs[-1]
        fresh = False
    return runs


def _parts(graph: Graph) -> set[Node]:
    """List the views that cut an argument in several parts of one shape, as micro-batches are.

    They become arguments of segments: with its place in the argument inside, no segment would equal another part's.
    """
    found: dict[Any, list[Node]] = {}
    for n in graph.nodes:
        if name_of(n) == "slice" and is_input(n.args[0]):
            found.setdefault((n.args[0], n.meta["val"].shape), []).append(n)
    return {n for nodes in found.values() if len(nodes) > 1 for n in nodes}


def _block(node: Node) -> str:
    """Return the repeated block whose argument (a parameter, a moment) a value is a view of, or ""."""
    while moves(node):
        node = node.all_input_nodes[0]
    return node.meta.get("block", "") if is_input(node) else ""


def _needed_views(runs: list[list[Node]], results: Sequence[Node | None]) -> set[Node]:
    """List the views that must exist as values: a collective's operands and the graph's results."""
    found: set[Node] = set()
    stack = [a for run in runs if _is_call(run[0]) for a in run[0].all_input_nodes]
    stack += [x for x in results if x is not None]
    while stack:
        n = stack.pop()
        if moves(n) and n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return found


def _sources(nodes: Sequence[Node], parts: AbstractSet[Node] = frozenset()) -> list[Node]:
    """List the values, other than views except for `parts`, that nodes are views of."""
    found: dict[Node, None] = {}
    stack, seen = list(reversed(nodes)), set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if moves(n) and n not in parts:
            stack += n.all_input_nodes
        else:
            found[_written(n)] = None
    return list(found)


def _exports(runs: list[list[Node]], home: dict[Node, int], results: Sequence[Node | None]) -> list[list[Node]]:
    """List for each run the values that later ones, or the caller, need."""
    exports: list[dict[Node, None]] = [{} for _ in runs]
    for i, run in enumerate(runs):
        for x in _sources([a for n in run for a in n.all_input_nodes]):
            if x in home and home[x] != i:
                exports[home[x]][x] = None
    for x in _sources([x for x in results if x is not None]):
        if x in home:
            exports[home[x]][x] = None
    return [list(e) for e in exports]


def _views_to(nodes: Sequence[Node], slot: dict[Node, int], alone: set[Node]) -> list[Node]:
    """List the views that must run for `nodes` to have slots, in an order that can run."""
    found: list[Node] = []
    stack = [(n, False) for n in reversed(nodes)]
    while stack:
        n, ready = stack.pop()
        if n in slot or n not in alone or n in found:
            continue
        if ready:
            found.append(n)
        else:
            stack.append((n, True))
            stack += [(a, False) for a in n.all_input_nodes]
    return found


def _call(node: Node, slot: dict[Node, int]) -> Call:
    args, kwargs = node.args, node.kwargs
    slots = {a: slot[a] for a in node.all_input_nodes}

    def template(env: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        def value(a: Node) -> Any:
            return env[slots[a]]

        return map_arg(args, value), map_arg(kwargs, value)  # pyright: ignore

    slot[node] = len(slot)
    return Call(node.target, template, slot[node], [])


def _segment(run: list[Node], exports: list[Node], slot: dict[Node, int], parts: set[Node]) -> Segment | None:
    if not exports and not any(n.target is COPY for n in run):
        return None
    graph, copies, ins = Graph(), {}, []
    sources = [x for x in _sources([a for n in run for a in n.all_input_nodes], parts) if x in slot]
    for x in sources:
        copies[x] = graph.placeholder(f"x{len(ins)}")
        copies[x].meta = {"val": x.meta["val"]}
        ins.append(x)

    def need(node: Node) -> Node:
        """Return the copy of a value; a view is made anew."""
        todo = [node]
        while todo:
            n = todo[-1]
            missing = [] if n in copies else [a for a in n.all_input_nodes if a not in copies]
            if n in copies or not missing:
                if n not in copies:
                    copies[n] = graph.node_copy(n, copies.__getitem__)
                todo.pop()
            todo += missing
        return copies[node]

    for node in run:
        for a in node.all_input_nodes:
            need(a)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outs = graph.output(tuple(copies[x] for x in exports))
    outs.meta = {}
    graph.eliminate_dead_code()
    for x in exports:
        slot[x] = len(slot)
    return Segment(
        _key(graph), graph, [x.meta["val"] for x in ins], [slot[x] for x in ins], [slot[x] for x in exports], []
    )


def _key(graph: Graph) -> Any:
    """Describe a graph so that equal descriptions have equal code."""
    number = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Any:
        if is_input(n):
            return signature(n.meta["val"])
        return str(n.target), repr(map_arg((n.args, n.kwargs), lambda a: _Number(number[a])))  # pyright: ignore

    return tuple([line(n) for n in graph.nodes])


class _Number(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _with_frees(
    steps: list[Call | Segment], slot: dict[Node, int], results: Sequence[Node | None], graph: Graph
) -> list[Call | Segment]:
    """Say after which step each slot is free."""
    kept = {slot[x] for x in results if x is not None} | {slot[n] for n in graph.nodes if is_input(n)}
    node_of = {i: n for n, i in slot.items()}
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        used = step.ins if isinstance(step, Segment) else [slot[a] for a in node_of[step.out].all_input_nodes]
        for s in [*used, *(step.outs if isinstance(step, Segment) else [step.out])]:
            last[s] = i
    frees: list[list[int]] = [[] for _ in steps]
    for s, i in last.items():
        if s not in kept:
            frees[i].append(s)
    return [step._replace(free=free) for step, free in zip(steps, frees, strict=True)]
