"""Segments: subgraphs of operations as graphs of their own, with keys so that equal segments are compiled once."""

import operator
from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.ir import COPY, is_input, op_name, signature
from fzero.graph.planning import read_by_kernels, subgraph_operands, view_sources

__all__ = ["Segment", "make_segment"]


# `optim.master_weights` returns the difference of two narrow values, and `optim.apply_updates` adds it to the old
# parameter. Compiled, this would read the old parameter needlessly, which takes a fifth of the update's time.
def _read_rounded_values(graph: Graph) -> None:
    """Replace each `p + (r - p)`, of narrow values in a wide dtype, by `r`, which is exact; the sum may round."""
    for node in graph.nodes:
        operand = _rounded_operand(node)
        if operand is not None:
            node.replace_all_uses_with(operand)


def _rounded_operand(node: Node) -> Node | None:
    """Return `r` of a node `narrow(p + (wide(r) - wide(p)))`, if nothing else reads `wide(r)`; else None."""
    total = _operation_operands(node, "_to_copy", 1)
    parts = _operation_operands(total[0], "add", 2) if total else []
    step = _operation_operands(parts[1], "sub", 2) if parts else []
    operands = [x for a in step for x in _operation_operands(a, "_to_copy", 1)]
    if len(operands) != 2 or operands[1] is not parts[0] or len(operands[0].users) != 1:
        return None
    have_equal_signatures = (
        signature(operands[0].meta["val"]) == signature(node.meta["val"]) == signature(operands[1].meta["val"])
    )
    widened = [a.meta["val"].dtype for a in (*step, total[0])]
    return (
        operands[0]
        if have_equal_signatures and all(x.itemsize > node.meta["val"].dtype.itemsize for x in widened)
        else None
    )


def _operation_operands(node: Node, name: str, count: int) -> list[Node]:
    """List the operands of a node if it is the operation `name` with exactly `count` operands, all nodes; else none."""
    if op_name(node) != name or len(node.args) != count or "alpha" in node.kwargs:
        return []
    operands = [a for a in node.args if isinstance(a, Node)]
    return operands if len(operands) == count else []


class Segment(NamedTuple):
    """Operations that are compiled together.

    Attributes:
        key: equal for segments with equal code.
        graph: the operations.
        stand_ins: stand-ins of the arguments.
        outputs: stand-ins of the results.
        ins: the registers of the arguments.
        outs: the registers of the results.
        free: the registers that are free after it.
        scalars: whether it computes 0-d values only. Such a segment is not compiled: compiling takes longer than it
            saves.
    """

    key: Hashable
    graph: Graph
    stand_ins: list[torch.Tensor]
    outputs: list[torch.Tensor]
    ins: list[int]
    outs: list[int]
    free: list[int]
    scalars: bool = False


def make_segment(
    subgraph: Sequence[Node],
    exports: Sequence[Node],
    register_of: dict[Node, int],
    parts: AbstractSet[Node],
    scalars: AbstractSet[Node],
) -> Segment | None:
    """Make a segment of a subgraph; None if nothing needs the subgraph's results.

    Args:
        subgraph: nodes that are compiled together.
        exports: the nodes of the subgraph whose values later subgraphs or the caller need. They get new registers.
        register_of: the registers of all values computed so far.
        parts: the views that count as values.
        scalars: the scalars of the graph.
    """
    if not exports and not any(n.target is COPY for n in subgraph):
        return None
    exports = list(dict.fromkeys([*exports, *read_by_kernels(subgraph, scalars)]))
    graph = Graph()
    ins = [x for x in view_sources(subgraph_operands(subgraph), parts) if x in register_of]
    copies: dict[Node, Node] = {}
    for i, x in enumerate(ins):
        copies[x] = graph.placeholder(f"x{i}")
        copies[x].meta = {"val": x.meta["val"]}
    for node in _items_first(subgraph):
        for a in node.all_input_nodes:
            _copy_views(a, graph, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in exports)).meta = {}
    _read_rounded_values(graph)
    graph.eliminate_dead_code()
    for x in exports:
        register_of[x] = len(register_of)
    stand_ins, outputs = [x.meta["val"] for x in ins], [x.meta["val"] for x in exports]
    key, is_scalar = (_graph_key(graph), tuple([signature(x) for x in outputs])), scalars >= {*subgraph}
    return Segment(
        key=key,
        graph=graph,
        stand_ins=stand_ins,
        outputs=outputs,
        ins=[register_of[x] for x in ins],
        outs=[register_of[x] for x in exports],
        free=[],
        scalars=is_scalar,
    )


def _items_first(subgraph: Sequence[Node]) -> Iterator[Node]:
    """Yield the items of a tuple right after it, by their index, so that equal blocks have equal code.

    The schedule places an item before its first use, which is another one in each block.
    """
    nodes, items = {*subgraph}, {n for n in subgraph if n.target is operator.getitem}
    for node in subgraph:
        if node not in items or node.args[0] not in nodes:
            yield node
        yield from sorted((n for n in node.users if n in items and n.args[0] is node), key=lambda n: str(n.args[1]))


def _copy_views(node: Node, graph: Graph, copies: dict[Node, Node]) -> None:
    """Recompute a view, and the views that lead to it, in a segment's graph, unless the graph has them already."""
    todo = [node]
    while todo:
        n = todo[-1]
        uncopied = [] if n in copies else [a for a in n.all_input_nodes if a not in copies]
        if uncopied:
            todo += uncopied
            continue
        if n not in copies:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        todo.pop()


def _graph_key(graph: Graph) -> Hashable:
    """Describe a graph so that equal descriptions mean equal code."""
    index = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Hashable:
        if is_input(n):
            return signature(n.meta["val"])
        return str(n.target), repr(map_arg((n.args, n.kwargs), lambda a: _NodeLabel(index[a])))  # pyright: ignore

    return tuple([line(n) for n in graph.nodes])


class _NodeLabel(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"
