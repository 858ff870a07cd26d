"""Loops in a trace: the operations of `fzero.graph.loop` mark them, and here they become nodes of the graph."""

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._torch import line_of
from fzero.graph._ir import aten, described, is_wait, reordered
from fzero.graph._ops import is_random
from fzero.graph.loop import _scan
from fzero.graph.loop._rank_schedule import ASIDE, ASIDE_ENDS, BEGINS, NEEDS, SENT, RankSchedule, rank_schedule_of
from fzero.graph.loop._scan import Loop, LoopSlice, NotScannable, function_of, loop_of

__all__ = ["needed_by", "renumbered", "sends_first", "track_at", "with_loops", "without_asides"]


# A rank of a pipeline in a trace: what its turn is made of, before it becomes a loop.
#
# What was run for its shapes alone goes. In each backward pass, what leads to the gradient that is sent comes first.


def without_asides(graph: Graph) -> None:
    """Remove what was run for its shapes alone."""
    while True:
        nodes = list(graph.nodes)
        begin = next((i for i, n in enumerate(nodes) if n.target is ASIDE), None)
        if begin is None:
            return
        end = next(i for i, n in enumerate(nodes) if i > begin and n.target is ASIDE_ENDS)
        for n in reversed(nodes[begin : end + 1]):
            if not n.users:
                graph.erase_node(n)


def track_at(start: Node) -> RankSchedule | None:
    """Return the track of a turn that is one of a pipeline's."""
    node = _needs(start)
    return None if node is None else rank_schedule_of(int(node.args[1]))  # pyright: ignore[reportArgumentType]


def needed_by(start: Node) -> list[Node]:
    """List what a pipeline's loop is given whether its turns read it or not."""
    node = _needs(start)
    return [] if node is None else list(node.args[2])  # pyright: ignore[reportArgumentType]


def _needs(start: Node) -> Node | None:
    return next((n for n in start.users if n.target is NEEDS), None)


def sends_first(start: Node) -> None:
    """In each backward pass of a pipeline's turn, move what leads to the gradient that is sent in front of the rest."""
    nodes = list(start.graph.nodes)
    nodes = nodes[nodes.index(start) :]
    for i, begin in enumerate(nodes):
        if begin.target is not BEGINS or begin.args[0] != "B":
            continue
        stop = next((j for j in range(i + 1, len(nodes)) if nodes[j].target is BEGINS), len(nodes))
        sent = next((n for n in nodes[i + 1 : stop] if n.target is SENT), None)
        if sent is None:
            continue
        leading = {sent}
        for n in reversed(nodes[i + 1 : stop]):
            if n in leading:
                leading.update(n.all_input_nodes)
        at = begin
        for n in nodes[i + 1 : stop]:
            if n in leading:
                at.append(n)
                at = n


def renumbered(graph: Graph) -> Graph:
    """Copy a graph with names by what is left in it: the same on all ranks of a pipeline, whose stages differ."""
    out, copies = Graph(), dict[Node, Node]()
    for n in graph.nodes:
        args, kwargs = (map_arg(x, copies.__getitem__) for x in (n.args, n.kwargs))  # pyright: ignore
        copies[n] = out.create_node(n.op, n.target, args, kwargs, None if n.op == "call_function" else n.name)  # pyright: ignore
        copies[n].meta = dict(n.meta)
    return out


# Loops in a trace: the operations of `fzero.graph.loop._scan` say where they are; here they become nodes.
#
# 1. The body of a loop is what was traced from its `turn` on, up to the last operation that refers to it.
# 2. Its forward pass was traced twice. If they differ, the turns depend on one another, and there is no loop.
# 3. The body becomes a graph of its own, whose arguments are what it uses of the rest.
# 4. A node that runs the loop takes its place, behind sums that begin as -0.0: added to any number it gives the number.
#
# A rank of a pipeline is a loop, too, whose turns are cut in phases (`_rank_schedule`). Its forward pass is traced
# once: a model in a pipeline is a function of its arguments alone.


TURN, PART, BEFORE, AFTER, ROWS, AGAIN, COMPARED = [op._opoverload for op in _scan.OPERATIONS]


@dataclass(frozen=True)
class _Turn:
    """The nodes of a traced turn.

    Attributes:
        start: the node of its number.
        nodes: all its nodes, in order.
        parts: the nodes that cut parts.
        sums: pairs of a sum before and after.
        rows: the nodes whose values become rows.
    """

    start: Node
    nodes: list[Node]
    parts: list[Node]
    sums: list[tuple[Node, Node]]
    rows: list[Node]

    @property
    def marks(self) -> set[Node]:
        """All nodes that compute nothing."""
        needs = [n for n in self.start.users if n.target is NEEDS]
        return {self.start, *needs, *self.parts, *self.rows, *[n for pair in self.sums for n in pair]}


def with_loops(graph: Graph) -> Graph:
    """Put nodes that run loops in the places of traced turns.

    Args:
        graph: a traced graph, which is changed.

    Raises:
        NotScannable: if a turn hands on a value that is no sum and no row, or if the next one would run something else.
    """
    without_asides(graph)
    for start in [n for n in graph.nodes if n.target is TURN]:
        if track_at(start) is None:
            _compare(graph, _turn_of(start))
        else:
            sends_first(start)
        _hoist(graph, _turn_of(start))
        _replace(graph, _turn_of(start))
    tracked = any(loop.track for n in graph.nodes if (loop := loop_of(n)))
    return renumbered(graph) if tracked else reordered(graph, graph.nodes)


def _turn_of(start: Node) -> _Turn:
    befores = [n for n in start.users if n.target is BEFORE]
    after = {_before_of(n): n for n in start.graph.nodes if n.target is AFTER}
    position = {n: i for i, n in enumerate(start.graph.nodes)}
    sums = sorted([(n, after[n]) for n in befores if n in after], key=lambda pair: position[pair[1]])
    rows = [n for n in start.users if n.target is ROWS]
    nodes = list(position)
    stop = max([position[n] for n in [start, *rows, *[after for _, after in sums]]])
    parts = [n for n in start.users if n.target is PART]
    return _Turn(start, nodes[position[start] : stop + 1], parts, sums, rows)


def _before_of(after: Node) -> Node:
    """Return the sum before of a sum after, which may be given a view of it."""
    node: Any = after.args[1]
    while node.target is not BEFORE:
        node = node.all_input_nodes[0]
    return node


def _compare(graph: Graph, turn: _Turn) -> None:
    """Check that the forward pass ran alike a second time, and remove the second."""
    again = next((n for n in turn.start.users if n.target is AGAIN), None)
    end = next((n for n in again.users if n.target is COMPARED), None) if again is not None else None
    if again is None or end is None:
        raise NotScannable("the step drops the loss, by which two micro-batches are compared")
    nodes = list(graph.nodes)
    behind = nodes[nodes.index(again) + 1 : nodes.index(end)]
    x, _, results, others = end.args
    second, own = _leading_to(others, behind), _of_the_turn(turn)
    theirs = {*second, end}
    same: dict[Node, Node] = {again: turn.start}  # for each node, the one that stands for all that compute the same
    first: dict[Any, Node] = {}
    for n in turn.nodes[1:]:
        same[n] = _alike(n, same) or first.setdefault(described(n, same), n)
    for n in second:
        found = _alike(n, same) or first.get(described(n, same))
        kept = any(a in own for a in n.all_input_nodes)  # what the first micro-batch has left behind
        if found is None or kept or any(u not in theirs for u in n.users):
            where = line_of(n) or str(n.target)
            raise NotScannable(f"the second micro-batch computes something else than the first at {where}")
        same[n] = found
    pairs: Any = zip(results, others, strict=True)  # pyright: ignore[reportArgumentType]
    if any(same.get(a, a) is not same.get(b, b) or b in own for a, b in pairs):
        raise NotScannable("the second micro-batch returns something else than the first")
    end.replace_all_uses_with(x)  # pyright: ignore[reportArgumentType]
    graph.erase_node(end)
    for n in reversed(behind):  # random draws that nothing needs among them
        if not n.users:
            graph.erase_node(n)
    graph.erase_node(again)


def _of_the_turn(turn: _Turn) -> set[Node]:
    """Find those nodes of a turn that depend on which turn it is: on its number, its parts, its random numbers."""
    found = {turn.start}
    for n in turn.nodes[1:]:
        if is_random(n) or any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found - {turn.start}


def _leading_to(results: Any, nodes: list[Node]) -> list[Node]:
    """List those of some nodes that results depend on."""
    found = set(results)
    for n in reversed(nodes):
        if n in found:
            found.update(n.all_input_nodes)
    return [n for n in nodes if n in found]


def _alike(node: Node, same: dict[Node, Node]) -> Node | None:
    """Return the value that a node passes on as it is, if that is all it does."""
    source = node.args[0] if node.target in (aten.detach.default, aten.alias.default) else None
    return same.get(source, source) if isinstance(source, Node) else None


def _hoist(graph: Graph, turn: _Turn) -> None:
    """Move what parts are cut of in front of a turn, and check that nothing else of it is used by others."""
    inside, out = set(turn.nodes), {*[after for _, after in turn.sums], *turn.rows}
    wanted = set[Any]([n.args[0] for n in turn.parts])
    for n in reversed(turn.nodes):
        if n not in out and any(u not in inside for u in n.users):
            raise NotScannable(f"a turn hands on what {line_of(n) or 'an operation'} computes")
        if n in wanted:
            wanted.update(n.all_input_nodes)
    for n in turn.nodes:
        if n in wanted:
            turn.start.prepend(n)


def _replace(graph: Graph, turn: _Turn) -> None:
    """Put a node that runs the turn as a loop in its place."""
    turns = int(turn.start.args[0])  # pyright: ignore[reportArgumentType]
    body, rest = _body(turn)
    parts = tuple([LoopSlice(int(n.args[2]), int(n.args[3])) for n in turn.parts])  # pyright: ignore[reportArgumentType]
    with graph.inserting_before(turn.start):
        begun = [_begun(graph, before.meta["val"]) for before, _ in turn.sums]
        sources = [n.args[0] for n in turn.parts]
        node = graph.call_function(function_of(), (*sources, *begun, *rest))
        results = [begin.meta["val"] for begin in begun] + [n.meta["val"] for n in turn.rows]
        loop = Loop(body, turns, parts, len(turn.sums), track=track_at(turn.start))
        node.meta = {**turn.start.meta, "val": tuple(results), "loop": loop}
        for i, n in enumerate([*[after for _, after in turn.sums], *turn.rows]):
            item = graph.call_function(operator.getitem, (node, i))
            item.meta = {"val": results[i]}
            n.replace_all_uses_with(item)
    for n in reversed(turn.nodes):
        graph.erase_node(n)


def _begun(graph: Graph, like: Any) -> Node:
    """Make a sum as it begins: -0.0, which any number keeps its value when it is added to."""
    order = sorted(range(like.ndim), key=lambda d: (-like.stride(d), d))
    shape = [int(like.shape[d]) for d in order]
    options = {"dtype": like.dtype, "layout": like.layout, "device": like.device, "pin_memory": False}
    full = graph.call_function(aten.full.default, (shape, -0.0), options)
    full.meta = {"val": like.new_empty(shape)}
    back = [order.index(d) for d in range(like.ndim)]
    if back == sorted(back):
        return full
    permuted = graph.call_function(aten.permute.default, (full, back))
    permuted.meta = {"val": full.meta["val"].permute(back)}
    return permuted


def _argument(body: Graph, node: Node) -> Node:
    """Make an argument of the body that stands for a node outside it."""
    argument = body.placeholder(node.name)
    argument.meta = {"label": node.name, "block": node.meta.get("block", ""), "val": node.meta["val"]}
    return argument


def _body(turn: _Turn) -> tuple[Graph, list[Node]]:
    """Make the graph of one turn, and list what it is given beside the turn's number, the parts and the sums."""
    body, copies, rest = Graph(), dict[Node, Node](), list[Node]()
    for n in [turn.start, *turn.parts, *[before for before, _ in turn.sums]]:
        copies[n] = _argument(body, n)
    marks, inside = turn.marks, {*turn.nodes}
    left = [n for n in turn.nodes if n not in marks]
    results: list[Any] = [n.args[0] for n in [*[after for _, after in turn.sums], *turn.rows]]
    for a in [*needed_by(turn.start), *[a for n in left for a in n.all_input_nodes], *results]:
        if a not in copies and a not in inside:
            copies[a] = _argument(body, a)
            rest.append(a)
    for n in left:
        copies[n] = body.node_copy(n, copies.__getitem__)
    body.output(tuple([copies[n] for n in results]))
    # torch keeps a wait that nothing reads, and so its collective: a module's last stage calls its embedding
    body.eliminate_dead_code(lambda n: n.is_impure() and not is_wait(n))
    return body, rest
