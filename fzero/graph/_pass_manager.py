"""The passes in their order: they turn a traced graph into a schedule.

Each row of `PASSES` derives its pass's arguments from `PassSettings`, the settings of one schedule, and from a
`PassContext`, which all schedules of a step share. To add an optimization, write the pass into a file of
`fzero/graph/passes/` and insert its row. A setting of the pass is a field of `PassSettings`;
`fzero.graph._candidates` enumerates its values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero.graph._schedule_options import FITTING
from fzero.graph.ir import FUSED, copy_graph, has_moves, is_input, nbytes, node_stand_ins
from fzero.graph.loop import node_loop, set_body
from fzero.graph.passes import (
    bucket,
    carry,
    cat_into,
    donate,
    drop_lone_collectives,
    gather_into,
    hoist,
    in_place,
    keep_on_host,
    mark_fused,
    move_early,
    recast,
    recompute,
    regather,
    schedule,
    send_early,
    slice_of_gather,
)
from fzero.graph.passes.scheduling import Orders
from fzero.graph.planning import Hardware, PlanSettings, device_live_bytes, iteration_peak_bytes

__all__ = ["PASSES", "PassContext", "PassManager", "PassResult", "PassSettings"]


class PassSettings(NamedTuple):
    """The settings of one schedule.

    Attributes:
        recompute: whether cheap values are computed again for their late uses.
        max_reuse_bytes: how many bytes of other units may be used while a gathered unit stays in memory.
        bucket_bytes: up to what size collectives are joined.
        prefetch: how many gathers start ahead, or `FITTING`.
        in_flight: how many reductions may be in flight while work goes on.
        across_iterations: whether an iteration's last reductions stay in flight until the next one starts its own.
        prefetch_budget: the memory budget of `prefetch=FITTING`, in bytes. It follows from other schedules, and
            no plan shows it.
        recast: whether widening casts run again for uses that wait for a collective.
        send_early: whether a pipeline stage sends its input's gradient before it computes those of its weights.
    """

    recompute: bool
    max_reuse_bytes: float
    bucket_bytes: int
    prefetch: int | str = 0
    in_flight: int = 0
    across_iterations: bool = False
    prefetch_budget: float = math.inf
    recast: bool = False
    send_early: bool = False

    def shown_in_plan(self) -> PlanSettings:
        """Return the settings that a plan shows, by name. Some are shown only if True."""
        hidden = {"prefetch_budget", *[name for name in _SHOWN_IF_TRUE if not getattr(self, name)]}
        return {k: v for k, v in self._asdict().items() if k not in hidden}


_SHOWN_IF_TRUE = ("across_iterations", "recast", "send_early")


class PassContext(NamedTuple):
    """The inputs of passes that all schedules of a step share.

    Attributes:
        overwrites: the positions `(result, argument)` of results that are written into donated arguments.
        donated: the positions of all donated arguments.
        functional: whether no collective may overwrite its operand, as Inductor requires of a full graph.
        group_ranks: this rank's index in each process group, by the group's name.
        has_moves: whether values are copied between device and host.
        hardware: the hardware of the cost model; None for that of the values.
        lone_groups: the process groups of one rank.
        fuses: whether Inductor compiles segments: it does not store values that it computes within a loop.
        splits_backward: whether the graph is the body of a pipeline whose schedule splits backward passes into halves.
    """

    overwrites: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    functional: bool = False
    group_ranks: tuple[tuple[str, int], ...] = ()
    has_moves: bool = False
    hardware: Hardware | None = None
    lone_groups: tuple[str, ...] = ()
    fuses: bool = False
    splits_backward: bool = False


class Pass(NamedTuple):
    """A row of `PASSES`.

    Attributes:
        name: the pass's name.
        apply: the pass: a pure function from a graph and `arguments` to a graph with the same results.
        arguments: returns all inputs of the pass besides the graph; None skips the pass.
        analyze: analyses the graph. Its result is the pass's last argument, which all schedules share.
        runs_on_loops: whether the pass runs once on loops whose bodies are scheduled, and not on each graph.
    """

    name: str
    apply: Callable[..., Graph]
    arguments: Callable[[PassSettings, PassContext], tuple[Any, ...] | None]
    analyze: Callable[[Graph], Any] | None = None
    runs_on_loops: bool = False


def _schedule_arguments(settings: PassSettings, context: PassContext) -> tuple[int | str, int, float]:
    """Return the arguments of `schedule`: `prefetch`, `in_flight` and `limit` (bytes)."""
    if settings.prefetch == FITTING:
        return 1, settings.in_flight, settings.prefetch_budget
    return settings.prefetch, settings.in_flight, math.inf


PASSES = (
    Pass(
        "drop_lone_collectives",
        drop_lone_collectives,
        lambda settings, context: (context.lone_groups,) if context.lone_groups else None,
    ),
    Pass(
        "send_early",
        send_early,
        lambda settings, context: () if settings.send_early or context.splits_backward else None,
    ),
    Pass("keep_on_host", keep_on_host, lambda settings, context: () if context.has_moves else None),
    Pass("hoist", hoist, lambda settings, context: (settings.max_reuse_bytes,)),
    Pass("recompute", recompute, lambda settings, context: () if settings.recompute else None),
    Pass("regather", regather, lambda settings, context: (settings.max_reuse_bytes,)),
    Pass("bucket", bucket, lambda settings, context: (settings.bucket_bytes,)),
    Pass("recast", recast, lambda settings, context: () if settings.recast else None),
    Pass("move_early", move_early, lambda settings, context: () if context.has_moves else None),
    Pass("donate", donate, lambda settings, context: (context.overwrites, context.donated)),
    Pass("in_place", in_place, lambda settings, context: None if context.functional else ()),
    Pass("gather_into", gather_into, lambda settings, context: None if context.functional else ()),
    Pass(
        "slice_of_gather",
        slice_of_gather,
        lambda settings, context: None if context.functional else (context.group_ranks,),
    ),
    Pass("cat_into", cat_into, lambda settings, context: None if context.functional else (context.fuses,)),
    Pass("mark_fused", mark_fused, lambda settings, context: () if context.fuses else None),
    Pass("schedule", schedule, _schedule_arguments, Orders),
    Pass(
        "carry",
        carry,
        lambda settings, context: (settings.in_flight,) if settings.across_iterations else None,
        runs_on_loops=True,
    ),
)


class PassResult(NamedTuple):
    """A graph after a pass.

    Attributes:
        row: the pass.
        arguments: the pass's arguments; None if it was skipped.
        graph: the pass's result, or the graph before it if it was skipped.
    """

    row: Pass
    arguments: tuple[Any, ...] | None
    graph: Graph


@dataclass(eq=False)  # it keeps the graphs of settings that it has run
class PassManager:
    """The passes over one traced graph. Settings that begin alike share the results of the first passes.

    Attributes:
        traced: the graph.
        context: the inputs that all schedules share.
    """

    traced: Graph
    context: PassContext
    # results by graph, pass and arguments; settings with equal results so far have the same graph object
    _graphs: dict[tuple[Any, ...], Graph] = field(default_factory=dict, repr=False)
    _results: dict[tuple[str, Graph], list[Graph]] = field(default_factory=dict, repr=False)
    _shared: dict[tuple[str, Graph], Any] = field(default_factory=dict, repr=False)
    # the managers of loop bodies, by the function of the loop's node
    _bodies: dict[Any, "PassManager"] = field(default_factory=dict, repr=False)

    def run(self, settings: PassSettings, last_pass: str = PASSES[-1].name) -> list[PassResult]:
        """Return the graph after each pass, in order, up to and including `last_pass`.

        The bodies of loops are scheduled after the last pass over each graph, so that passes over loops find scheduled
        bodies.
        """
        graph = self.traced
        states = []
        for row, next_row in zip(PASSES, [*PASSES[1:], None], strict=True):
            arguments = row.arguments(settings, self.context)
            if row.runs_on_loops:
                arguments = arguments if _has_loops(graph) else None
                graph = graph if arguments is None else row.apply(graph, *arguments)
            elif arguments is not None:
                graph = self._apply_cached(row, graph, arguments)
            if next_row is not None and next_row.runs_on_loops and not row.runs_on_loops:
                graph = self._with_bodies(graph, settings)
            states.append(PassResult(row, arguments, graph))
            if row.name == last_pass:
                break
        return states

    def _apply_cached(self, row: Pass, graph: Graph, arguments: tuple[Any, ...]) -> Graph:
        """Return the graph after a pass, from the cache if possible."""
        key = (graph, row.name, arguments)
        if key not in self._graphs:
            shared = []
            if row.analyze is not None:
                if (row.name, graph) not in self._shared:
                    self._shared[row.name, graph] = row.analyze(graph)
                shared = [self._shared[row.name, graph]]
            self._graphs[key] = self._deduplicate(row, graph, row.apply(graph, *arguments, *shared))
        return self._graphs[key]

    def _deduplicate(self, row: Pass, graph: Graph, result: Graph) -> Graph:
        """Return the graph that is equal to a pass's result: the one before it, or what other settings gave."""
        results = self._results.setdefault((row.name, graph), [graph])
        equal = next((x for x in results if x is result or _are_equal(x, result)), None)
        if equal is None:
            results.append(result)
        return equal or result

    def schedule_with(self, settings: PassSettings) -> Graph:
        """Return the graph after all passes."""
        return self.run(settings)[-1].graph

    def _with_bodies(self, graph: Graph, settings: PassSettings) -> Graph:
        """Return a graph whose loops have scheduled bodies."""
        loops = [n for n in graph.nodes if node_loop(n)]
        if not loops:
            return graph
        bodies = []
        for node in loops:
            inside = (
                settings
                if settings.prefetch_budget == math.inf
                else settings._replace(prefetch_budget=_budget_in_body(graph, node, settings.prefetch_budget))
            )
            sends_early = settings.send_early or self.body(node).context.splits_backward
            bodies.append((self.body(node).schedule_with(inside), sends_early))
        key = (graph, "bodies", tuple(bodies))
        if key not in self._graphs:
            self._graphs[key] = _replace_bodies(graph, bodies)
        return self._graphs[key]

    def changed_by(self, settings: PassSettings, name: str) -> bool:
        """Return whether a pass adds or removes operations, in the graph or in the body of a loop."""
        before, after = [x.graph for x in [PassResult(PASSES[0], None, self.traced), *self.run(settings, name)][-2:]]
        if len(before.nodes) != len(after.nodes):
            return True
        return any(self.body(n).changed_by(settings, name) for n in after.nodes if node_loop(n))

    def body(self, node: Node) -> "PassManager":
        """Return the manager of a loop's body, given the loop's node in any graph."""
        if node.target not in self._bodies:
            loop = node_loop(node)
            assert loop is not None
            inside = self.context._replace(group_ranks=(), hardware=None, has_moves=has_moves(loop.body))
            context = inside._replace(
                overwrites=loop.overwrites, donated=tuple(loop.sum_indices), splits_backward=loop.splits_backward
            )
            self._bodies[node.target] = PassManager(loop.body, context)
        return self._bodies[node.target]


def _has_loops(graph: Graph) -> bool:
    return any(node_loop(n) for n in graph.nodes)


def _replace_bodies(graph: Graph, bodies: Sequence[tuple[Graph, bool]]) -> Graph:
    """Copy a graph, and give its loops these bodies and their `sends_early`."""
    graph = copy_graph(graph)
    for node, (body, sends_early) in zip([n for n in graph.nodes if node_loop(n)], bodies, strict=True):
        set_body(node, body, sends_early=sends_early)
        for item in reversed(list(node.users)):  # right behind the loop, since its tuple would hold all results
            node.append(item)
    return graph


def _are_equal(graph: Graph, other_graph: Graph) -> bool:
    """Return whether two graphs are equal, node by node, so that later passes give equal results."""
    if len(graph.nodes) != len(other_graph.nodes):
        return False
    return all(_are_alike(a, b) for a, b in zip(graph.nodes, other_graph.nodes, strict=True))


def _are_alike(a: Node, b: Node) -> bool:
    """Return whether two nodes have one name, operation, unit and mark, and arguments of the same names."""
    if a.target is not b.target and a.target != b.target:
        return False
    same_meta = a.meta.get("unit") == b.meta.get("unit") and (FUSED in a.meta) == (FUSED in b.meta)
    return same_meta and a.name == b.name and _have_same_names(a.args, b.args) and _have_same_names(a.kwargs, b.kwargs)


def _have_same_names(x: Any, y: Any) -> bool:
    """Return whether two arguments are equal, if nodes of one name are."""
    if isinstance(x, Node):
        return isinstance(y, Node) and x.name == y.name
    if isinstance(x, list | tuple):
        return isinstance(y, list | tuple) and len(x) == len(y) and all(map(_have_same_names, x, y))
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(_have_same_names(x[k], y[k]) for k in x)
    return x is y or (type(x) is type(y) and x == y)


def _budget_in_body(graph: Graph, node: Node, budget: float) -> float:
    """Return how many bytes may be live in a loop's body, its arguments included."""
    loop = node_loop(node)
    assert loop is not None
    position = list(graph.nodes).index(node)
    around = device_live_bytes(list(graph.nodes))[position] - iteration_peak_bytes(loop)
    return budget - around + nbytes(*[x for n in loop.body.nodes if is_input(n) for x in node_stand_ins(n)])
