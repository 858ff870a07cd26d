"""The slice of a gather is read and written in place: on graphs made by hand, in a world of equal ranks."""

from dataclasses import dataclass

import pytest
import torch
from torch.fx import Graph, Node

import fzero
from fzero import optim, tree
from fzero.graph.ir import COPY, GATHER_INTO, aten, is_input
from fzero.graph.ir._ops import op_name
from fzero.graph.passes import donate, gather_into, schedule, slice_of_gather
from fzero.graph.planning._subgraphs import _is_own_part, split_into_subgraphs
from fzero.graph.planning.memory._live_ranges import live_ranges, peak_bytes
from tests.graph import graphs
from tests.helpers import LEAST, mlp_batch, mlp_loss, mlp_params, train_step_for

PLACES = (("g", 0),)


@dataclass(frozen=True)
class StepForm:
    """How a step of stage 1 differs from the plain one, whose two leaves lie side by side.

    Attributes:
        adjacent: the inputs that lie in one buffer, in the order of their places.
        shapes: those of the inputs: two leaves of one unit, the gradient of the own part, and another argument.
        group: the process group of the gather; PLACES knows "g" alone.
        place: the rank's place in the group.
        reads_old_part: whether the update reads the old part; with master weights it does not.
        reads_more: whether something reads the old part once more, and a half of it.
    """

    adjacent: tuple[int, ...] = (0, 1)
    shapes: tuple[tuple[int, ...], ...] = ((2, 3), (2,), (4,), (6,))
    group: str = "g"
    place: int = 0
    reads_old_part: bool = True
    reads_more: bool = False


PLAIN, MASTERS, READ = StepForm(), StepForm(reads_old_part=False), StepForm(reads_more=True)
KEPT_COPIES = {
    "apart": StepForm(adjacent=()),
    "padded": StepForm(shapes=((2, 3), (3,), (5,), (6,))),
    "of a group that is none of the mesh's": StepForm(group="elsewhere"),
    "in another order than in the unit": StepForm(adjacent=(1, 0)),
    "in two buffers": StepForm(adjacent=(3, 1)),
}
UPDATED_IN_PLACE = {"plain": PLAIN, "with masters": MASTERS, "read once more": READ}
FORMS = {**UPDATED_IN_PLACE, **KEPT_COPIES, "at another place": StepForm(place=1)}


def step(form: StepForm = PLAIN, metric: bool = False) -> Graph:
    """Make a step of stage 1 for one unit of two leaves and two ranks.

    Args:
        form: how it differs from the plain step.
        metric: whether the step returns the sum of a whole old leaf, too.
    """
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(4)]
    b = graphs.Builder(2, list(form.shapes), labels, False, form.adjacent)
    w, v, gradient, _ = b.inputs
    k = b.numel(gradient)
    pieces = [b(aten.slice.Tensor, b.flat(w), 0, 0, k)] if k < 6 else [b.flat(w)]
    own = b(aten.cat.default, pieces)
    new = b(aten.sub.Tensor, own, gradient) if form.reads_old_part else gradient
    new = b(aten.mul.Tensor, new, 0.5)
    full = b.gather(new, form.group)
    leaves = [b.fit(b(aten.slice.Tensor, full, 0, 0, 6), (2, 3)), b(aten.slice.Tensor, full, 0, 6, 6 + b.numel(v))]
    half = b(aten.cat.default, [b(aten.slice.Tensor, b.flat(w), 0, 0, 2)])
    more = [b(aten.sum.default, own), b(aten.sum.default, half)] if form.reads_more else []
    more += [b(aten.sum.default, b(aten.mul.Tensor, w, w))] if metric else []
    return gather_into(donate(b.done([*leaves, *more]), [(0, 0), (1, 1)], [0, 1]))


def arguments(form: StepForm) -> list[torch.Tensor]:
    return graphs.arguments(list(form.shapes), form.adjacent)


def views(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if _is_own_part(n)]


@pytest.mark.parametrize("name", FORMS)
def test_slice_of_gather_keeps_results_bit_for_bit(name):
    form = FORMS[name]
    before, places = step(form, metric=True), (("g", form.place),)
    for in_flight in (0, 1):
        graph = schedule(slice_of_gather(before, places), 0, in_flight)
        for late in (False, True):
            out = [x.clone() for x in graphs.run(graph, arguments(form), 2, late)]
            expected = [x.clone() for x in graphs.run(schedule(before), arguments(form), 2, late)]
            assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize("form", UPDATED_IN_PLACE.values(), ids=UPDATED_IN_PLACE)
def test_leaves_that_lie_side_by_side_are_updated_where_they_lie(form):
    before = step(form)
    after = slice_of_gather(before, PLACES)
    (view,), (gather,) = views(after), [n for n in after.nodes if n.target is GATHER_INTO]
    written = gather.args[0]
    assert isinstance(written, Node) and written.target is COPY and written.args[0] is view
    packs = [n for n in after.nodes if op_name(n) == "cat"]
    assert len(packs) == (1 if form is READ else 0)  # the half; the old part is not copied
    assert (view.args[2], view.args[1], view.args[3]) == ([1], [4], 0)
    totals = [sum(r.bytes for r in live_ranges(schedule(graph))) for graph in (before, after)]
    assert totals[0] - totals[1] == (0 if form is MASTERS else 16)
    assert peak_bytes(schedule(after)) <= peak_bytes(schedule(before))


def test_each_rank_updates_its_own_part_of_the_leaves():
    (view,) = views(slice_of_gather(step(), (("g", 1),)))
    assert view.args[3] == 4


@pytest.mark.parametrize("form", KEPT_COPIES.values(), ids=KEPT_COPIES)
def test_units_that_lie_apart_keep_their_copies(form):
    before = step(form)
    assert graphs.lines(slice_of_gather(before, PLACES)) == graphs.lines(before)


def test_the_old_part_is_read_before_it_is_overwritten():
    graph = schedule(slice_of_gather(step(READ, metric=True), PLACES))
    order = list(graph.nodes)
    write = next(i for i, n in enumerate(order) if n.target is COPY)
    reads = [i for i, n in enumerate(order) if any(_is_own_part(a) or is_input(a) for a in n.all_input_nodes)]
    assert len(reads) == 7 and sum(i > write for i in reads) == 1  # the gather's


def test_no_segment_reads_a_leaf_and_writes_the_part_of_it():
    """Inductor takes two arguments for separate, and may do the one before the other."""
    graph = slice_of_gather(step(metric=True), PLACES)
    nodes = list(graph.nodes)
    read = next(n for n in nodes if op_name(n) == "mul" and n.args[0] is n.args[1])
    write = next(n for n in nodes if n.target is COPY)
    ordered = schedule(graph)
    home = {n.name: i for i, subgraph in enumerate(split_into_subgraphs(ordered.nodes)) for n in subgraph}
    assert home[read.name] < home[write.name]
    alone = schedule(slice_of_gather(step(), PLACES))
    home = {n.name: i for i, subgraph in enumerate(split_into_subgraphs(alone.nodes)) for n in subgraph}
    assert home[write.name] == home["sub_tensor"]  # it is compiled with what it writes


def test_arguments_that_lie_side_by_side_are_one_storage_of_the_plan():
    ranges = [r for r in live_ranges(step()) if r.start < 0]
    assert [(r.label, r.bytes) for r in ranges] == [("0 and 1 beside it", 32), ("2", 16), ("3", 24)]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_plan_without_world_size_assumes_leaves_side_by_side(stage):
    """At `world_size=2` the blocks divide, and the head does not."""
    mesh, opt = fzero.mesh(dp=4), optim.adamw(1e-2)
    jitted = fzero.jit(fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=mesh), backend="fx", **LEAST)
    params, state = jitted.init(mlp_params(), opt)
    batch = mesh.split(mlp_batch(8))
    counts = []
    for values in (params, tree.map(torch.clone, params)):
        plan = fzero.plan(jitted, values, state, batch, world_size=2)
        counts.append(sum(o.target == "aten.as_strided.default" for o in plan.operations))
    assert counts == [2, 0]
