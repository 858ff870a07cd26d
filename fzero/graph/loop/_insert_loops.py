"""Replace the operations that mark a loop in a trace (`fzero.graph.loop._loop_marks`) by a node that runs it.

1. The body of a loop begins at its `iteration` and ends at the last operation that refers to the loop.
2. Its forward pass was traced twice. If the two differ, iterations depend on one another, and there is no loop.
3. The body becomes a graph of its own, whose arguments are the outside values that it reads.
4. A node that runs the loop replaces the body. The sums start as -0.0, which changes no number that is added to it.

A rank of a pipeline is a loop, too. Its iterations are split into regions (`_rank_schedule`), and its forward pass is
traced once: a model in a pipeline depends on its arguments alone.
"""

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._torch import node_line
from fzero.graph.ir import aten, copy_graph, describe, is_random, is_wait
from fzero.graph.loop import _loop_marks
from fzero.graph.loop._loop import Loop, LoopSlice, new_loop_function, node_loop
from fzero.graph.loop._loop_marks import NotScannableError
from fzero.graph.loop._pipeline_marks import BEGIN_SHAPES_ONLY, END_SHAPES_ONLY, MARK_PIPELINE
from fzero.graph.loop._rank_schedule import RankSchedule, find_rank_schedule

__all__ = ["insert_loops"]


_ITERATION, _LOOP_SLICE, _BEFORE, _AFTER, _ROWS, _RUN_AGAIN, _COMPARED = [
    op._opoverload for op in _loop_marks.OPERATIONS
]


@dataclass(frozen=True)
class _TracedIteration:
    """The nodes of a traced iteration.

    Attributes:
        start: the node that returns the iteration's number.
        nodes: all nodes of the iteration, in order.
        slices: the nodes that slice tensors.
        sums: pairs of a sum before and after the iteration.
        rows: the nodes whose values become rows.
    """

    start: Node
    nodes: list[Node]
    slices: list[Node]
    sums: list[tuple[Node, Node]]
    rows: list[Node]

    @property
    def marks(self) -> set[Node]:
        """The nodes that mark the loop and compute nothing."""
        needs = [n for n in self.start.users if n.target is MARK_PIPELINE]
        return {self.start, *needs, *self.slices, *self.rows, *[n for pair in self.sums for n in pair]}


def insert_loops(graph: Graph) -> Graph:
    """Replace traced iterations by nodes that run loops.

    Args:
        graph: a traced graph, which is changed.

    Raises:
        NotScannableError: if an iteration returns a value that is neither a sum nor a row, or if the next iteration
            would run other operations.
    """
    _drop_shapes_only(graph)
    for start in [n for n in graph.nodes if n.target is _ITERATION]:
        if _rank_schedule_at(start) is None:
            _compare_runs(graph, _find_iteration(start))
        _hoist_slices(graph, _find_iteration(start))
        _replace_by_loop(graph, _find_iteration(start))
    has_pipeline = any(loop.rank_schedule for n in graph.nodes if (loop := node_loop(n)))
    return _rename_nodes(graph) if has_pipeline else copy_graph(graph)


def _find_iteration(start: Node) -> _TracedIteration:
    befores = [n for n in start.users if n.target is _BEFORE]
    after = {_find_before(n): n for n in start.graph.nodes if n.target is _AFTER}
    position = {n: i for i, n in enumerate(start.graph.nodes)}
    sums = sorted([(n, after[n]) for n in befores if n in after], key=lambda pair: position[pair[1]])
    rows = [n for n in start.users if n.target is _ROWS]
    nodes = list(position)
    stop = max([position[n] for n in [start, *rows, *[after for _, after in sums]]])
    slices = [n for n in start.users if n.target is _LOOP_SLICE]
    return _TracedIteration(start=start, nodes=nodes[position[start] : stop + 1], slices=slices, sums=sums, rows=rows)


def _find_before(after: Node) -> Node:
    """Return the `_sum_before` that belongs to a `_sum_after`, whose argument may be a view of it."""
    node: Any = after.args[1]
    while node.target is not _BEFORE:
        node = node.all_input_nodes[0]
    return node


def _compare_runs(graph: Graph, iteration: _TracedIteration) -> None:
    """Check that the second run of the forward pass computes the same as the first, and remove it."""
    second_run = next((n for n in iteration.start.users if n.target is _RUN_AGAIN), None)
    end = next((n for n in second_run.users if n.target is _COMPARED), None) if second_run is not None else None
    if second_run is None or end is None:
        raise NotScannableError("the step drops the loss, which is needed to compare two micro-batches")
    all_nodes = list(graph.nodes)
    nodes_again = all_nodes[all_nodes.index(second_run) + 1 : all_nodes.index(end)]
    _match_nodes(iteration, second_run, end, nodes_again)
    _remove_second_run(graph, second_run, end, nodes_again)


def _match_nodes(iteration: _TracedIteration, second_run: Node, end: Node, nodes_again: list[Node]) -> None:
    """Find for each node of the second run an equal node of the first, and compare the results.

    Raises:
        NotScannableError: if a node has no equal, depends on the first micro-batch, or is used after the comparison.
    """
    _, _, results, second_results = end.args
    second_nodes, varying = _ancestors_among(second_results, nodes_again), _varying_nodes(iteration)
    removable = {*second_nodes, end}
    representatives: dict[Node, Node] = {second_run: iteration.start}  # for each node, the representative of its equals
    node_of_description: dict[Any, Node] = {}
    for n in iteration.nodes[1:]:
        equal_node = _passed_value(n, representatives)
        representatives[n] = equal_node or node_of_description.setdefault(describe(n, representatives), n)
    for n in second_nodes:
        match = _passed_value(n, representatives) or node_of_description.get(describe(n, representatives))
        depends_on_first = any(a in varying for a in n.all_input_nodes)  # state that the first micro-batch left behind
        if match is None or depends_on_first or any(u not in removable for u in n.users):
            where = node_line(n) or str(n.target)
            raise NotScannableError(f"the second micro-batch computes something other than the first at {where}")
        representatives[n] = match
    pairs: Any = zip(results, second_results, strict=True)  # pyright: ignore[reportArgumentType]
    if any(representatives.get(a, a) is not representatives.get(b, b) or b in varying for a, b in pairs):
        raise NotScannableError("the second micro-batch returns something other than the first")


def _remove_second_run(graph: Graph, second_run: Node, end: Node, nodes_again: list[Node]) -> None:
    end.replace_all_uses_with(end.args[0])  # pyright: ignore[reportArgumentType]
    graph.erase_node(end)
    for n in reversed(nodes_again):  # unused random draws among them
        if not n.users:
            graph.erase_node(n)
    graph.erase_node(second_run)


def _varying_nodes(iteration: _TracedIteration) -> set[Node]:
    """Return the nodes that differ by iteration: they depend on its number, its slices or its random numbers."""
    varying = {iteration.start}
    for n in iteration.nodes[1:]:
        if is_random(n) or any(a in varying for a in n.all_input_nodes):
            varying.add(n)
    return varying - {iteration.start}


def _ancestors_among(results: Any, nodes: list[Node]) -> list[Node]:
    """List the given nodes that the results depend on."""
    ancestors = set(results)
    for n in reversed(nodes):
        if n in ancestors:
            ancestors.update(n.all_input_nodes)
    return [n for n in nodes if n in ancestors]


def _passed_value(node: Node, representatives: dict[Node, Node]) -> Node | None:
    """Return the value that a node returns unchanged; None if the node computes something."""
    source = node.args[0] if node.target in (aten.detach.default, aten.alias.default) else None
    return representatives.get(source, source) if isinstance(source, Node) else None


def _hoist_slices(graph: Graph, iteration: _TracedIteration) -> None:
    """Move the tensors that are sliced in front of the iteration; check that outside nodes use only its outputs."""
    members, outputs = set(iteration.nodes), {*[after for _, after in iteration.sums], *iteration.rows}
    sliced_values = set[Any]([n.args[0] for n in iteration.slices])
    for n in reversed(iteration.nodes):
        if n not in outputs and any(u not in members for u in n.users):
            raise NotScannableError(
                f"the value of {node_line(n) or 'an operation'} leaves the loop, and is neither a sum nor a row"
            )
        if n in sliced_values:
            sliced_values.update(n.all_input_nodes)
    for n in iteration.nodes:
        if n in sliced_values:
            iteration.start.prepend(n)


def _replace_by_loop(graph: Graph, iteration: _TracedIteration) -> None:
    """Replace an iteration by a node that runs it as a loop."""
    count = int(iteration.start.args[0])  # pyright: ignore[reportArgumentType]
    body, outside_values = _make_body(iteration)
    slices = tuple([LoopSlice(int(n.args[2]), int(n.args[3])) for n in iteration.slices])  # pyright: ignore[reportArgumentType]
    with graph.inserting_before(iteration.start):
        initial = [_add_initial_sum(graph, before.meta["val"]) for before, _ in iteration.sums]
        sources = [n.args[0] for n in iteration.slices]
        node = graph.call_function(new_loop_function(), (*sources, *initial, *outside_values))
        results = [x.meta["val"] for x in initial] + [n.meta["val"] for n in iteration.rows]
        loop = Loop(body, count, slices, len(iteration.sums), rank_schedule=_rank_schedule_at(iteration.start))
        node.meta = {**iteration.start.meta, "val": tuple(results), "loop": loop}
        for i, n in enumerate([*[after for _, after in iteration.sums], *iteration.rows]):
            item = graph.call_function(operator.getitem, (node, i))
            item.meta = {"val": results[i]}
            n.replace_all_uses_with(item)
    for n in reversed(iteration.nodes):
        graph.erase_node(n)


def _add_initial_sum(graph: Graph, like: Any) -> Node:
    """Make the initial value of a sum: -0.0, since adding it changes no number."""
    order = sorted(range(like.ndim), key=lambda d: (-like.stride(d), d))
    shape = [int(like.shape[d]) for d in order]
    options = {"dtype": like.dtype, "layout": like.layout, "device": like.device, "pin_memory": False}
    full = graph.call_function(aten.full.default, (shape, -0.0), options)
    full.meta = {"val": like.new_empty(shape)}
    back = [order.index(d) for d in range(like.ndim)]
    if back == sorted(back):
        return full
    transposed_full = graph.call_function(aten.permute.default, (full, back))
    transposed_full.meta = {"val": full.meta["val"].permute(back)}
    return transposed_full


def _add_argument(body: Graph, node: Node) -> Node:
    """Add an argument to the body that stands for a node outside it."""
    argument = body.placeholder(node.name)
    argument.meta = {"label": node.name, "block": node.meta.get("block", ""), "val": node.meta["val"]}
    return argument


def _make_body(iteration: _TracedIteration) -> tuple[Graph, list[Node]]:
    """Make the graph of one iteration; list its arguments besides the iteration's number, the slices and the sums."""
    body = Graph()
    copies = dict[Node, Node]()
    outside_values = list[Node]()
    for n in [iteration.start, *iteration.slices, *[before for before, _ in iteration.sums]]:
        copies[n] = _add_argument(body, n)
    marks, members = iteration.marks, {*iteration.nodes}
    operations = [n for n in iteration.nodes if n not in marks]
    results: list[Any] = [n.args[0] for n in [*[after for _, after in iteration.sums], *iteration.rows]]
    for a in [*_loop_arguments(iteration.start), *[a for n in operations for a in n.all_input_nodes], *results]:
        if a not in copies and a not in members:
            copies[a] = _add_argument(body, a)
            outside_values.append(a)
    for n in operations:
        copies[n] = body.node_copy(n, copies.__getitem__)
    body.output(tuple([copies[n] for n in results]))
    # torch keeps an unread wait, and so its collective, such as the gather of the embedding on a last stage
    body.eliminate_dead_code(lambda n: n.is_impure() and not is_wait(n))
    return body, outside_values


def _drop_shapes_only(graph: Graph) -> None:
    """Remove the regions that ran only for their shapes."""
    while True:
        nodes = list(graph.nodes)
        begin = next((i for i, n in enumerate(nodes) if n.target is BEGIN_SHAPES_ONLY), None)
        if begin is None:
            return
        end = next(i for i, n in enumerate(nodes) if i > begin and n.target is END_SHAPES_ONLY)
        for n in reversed(nodes[begin : end + 1]):
            if not n.users:
                graph.erase_node(n)


def _rank_schedule_at(start: Node) -> RankSchedule | None:
    """Return the schedule of the pipeline's rank that an iteration belongs to; None for other loops."""
    node = _pipeline_marker(start)
    return None if node is None else find_rank_schedule(int(node.args[1]))  # pyright: ignore[reportArgumentType]


def _loop_arguments(start: Node) -> list[Node]:
    """List the nodes that are arguments of a pipeline's loop, whether or not its iterations read them."""
    node = _pipeline_marker(start)
    return [] if node is None else list(node.args[2])  # pyright: ignore[reportArgumentType]


def _pipeline_marker(start: Node) -> Node | None:
    return next((n for n in start.users if n.target is MARK_PIPELINE), None)


def _rename_nodes(graph: Graph) -> Graph:
    """Copy a graph and name its nodes anew, so that names are the same on all ranks of a pipeline."""
    out = Graph()
    copies = dict[Node, Node]()
    for n in graph.nodes:
        args, kwargs = (map_arg(x, copies.__getitem__) for x in (n.args, n.kwargs))  # pyright: ignore
        copies[n] = out.create_node(n.op, n.target, args, kwargs, None if n.op == "call_function" else n.name)  # pyright: ignore
        copies[n].meta = dict(n.meta)
    return out
