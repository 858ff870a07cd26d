"""Laws of the passes over graphs, of live ranges, and of the executors."""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from fzero import _torch
from fzero._torch import c10d
from fzero.graph._ir import (
    COPY,
    GATHER_INTO,
    collective_kind,
    full_bytes,
    graph_results,
    is_cheap,
    is_collective,
    is_gather,
    is_input,
    is_reduce_collective,
    is_wait,
    moved_numel,
    nbytes,
    parameter_gathers,
    sort_graph,
    stand_ins_of,
    start_of,
    views_and_users,
)
from fzero.graph._ops import is_random, is_view, name_of
from fzero.graph._pass_manager import PASSES
from fzero.graph._storages import storages
from fzero.graph._trace_agreement import digest_of_order
from fzero.graph.passes import (
    bucket,
    carry,
    cat_into,
    donate,
    drop_lone_collectives,
    early_move,
    gather_into,
    hoist,
    in_place,
    keep_on_host,
    mark_fused,
    recast,
    recompute,
    regather,
    schedule,
    send_early,
    slice_of_gather,
)
from fzero.graph.planning._live_ranges import live_bytes, live_ranges, peak_bytes
from fzero.graph.run import _backends
from fzero.graph.run._backends import lower
from fzero.graph.run._program import Program, SingleOperation, make_program
from fzero.graph.run._segment import Segment
from fzero.graph.trace._trace import trace
from tests.graph import graphs
from tests.graph.graphs import (
    Chain,
    Sample,
    World,
    bits,
    build,
    build_chain,
    chains,
    in_world,
    lines,
    measured,
    not_compiled,
    run,
    samples,
    snapshot,
    specs,
    users_reversed,
)
from tests.helpers import either, examples

PLACES = (("g", 0),)  # of the only rank in a world of equal ones
REUSES = (0, 16, 64, 96, math.inf)
BUCKETS = (0, 40, 100, 300, 1 << 20)


@st.composite
def settings_of_passes(draw: Any) -> dict[str, Any]:
    return {
        "reuse": draw(st.sampled_from(REUSES)),
        "bucket_bytes": draw(st.sampled_from(BUCKETS)),
        "prefetch": draw(st.integers(0, 2)),
        "in_flight": draw(st.integers(0, 2)),
        "limit": draw(st.sampled_from((math.inf, 0, 100, 300, 1000))),
        "donate": draw(st.booleans()),
        "passes": draw(st.sets(st.sampled_from([row.name for row in PASSES if row.name != "donate"]), min_size=1)),
    }


def selected_passes(sample: Sample, choices: dict[str, Any]) -> list[tuple[str, Any]]:
    """List the passes that `choices` selects, in jit's order."""
    functions = {
        "drop_lone_collectives": lambda g: drop_lone_collectives(g, ("g", "h") if sample.n == 1 else ()),
        "send_early": send_early,  # nor pipelines: see tests/parallel/pipeline/test_plan.py
        "keep_on_host": keep_on_host,
        "hoist": lambda g: hoist(g, choices["reuse"]),
        "recompute": lambda g: recompute(g, 1),
        "regather": lambda g: regather(g, choices["reuse"]),
        "bucket": lambda g: bucket(g, choices["bucket_bytes"]),
        "recast": lambda g: recast(g, 1),
        "early_move": early_move,
        "donate": lambda g: donate(g, sample.pairs, sample.donated),
        "in_place": in_place,
        "gather_into": gather_into,
        "slice_of_gather": lambda g: slice_of_gather(g, PLACES),
        "cat_into": cat_into,
        "mark_fused": mark_fused,
        "schedule": lambda g: schedule(g, choices["prefetch"], choices["in_flight"], choices["limit"]),
        "carry": lambda g: carry(g, 1),  # these have no loops: see test_carry.py
    }
    assert [*functions] == [row.name for row in PASSES], "a pass that no law sees"
    names = {*choices["passes"], *(["donate"] if choices["donate"] else [])}
    return [(row.name, functions[row.name]) for row in PASSES if row.name in names]


def apply_passes(sample: Sample, how: dict[str, Any]) -> Graph:
    graph = sample.graph
    for _, f in selected_passes(sample, how):
        graph = f(graph)
    return graph


def pairs_in_one_memory(results: Sequence[Any]) -> set[tuple[int, int]]:
    """List the pairs of results that lie in the same memory."""
    at = [None if x is None else x.untyped_storage().data_ptr() for x in results]
    return {(i, j) for i, x in enumerate(at) for j in range(i) if x is not None and x == at[j]}


def check_results(sample: Sample, graph: Graph, donated: bool, late: bool, expected: list[Any]) -> None:
    args = sample.args()
    out = run(graph, args, sample.n, late)
    assert [bits(x) for x in out] == expected
    assert pairs_in_one_memory(out) <= pairs_in_one_memory(run(sample.graph, sample.args(), sample.n))
    into = {j: i for i, j in sample.pairs} if donated else {}
    for j, (x, before) in enumerate(zip(args, sample.args(), strict=True)):
        assert bits(x) == (expected[into[j]] if j in into else bits(before))
    if donated:
        donated_memory = {args[j].untyped_storage().data_ptr() for j in sample.donated}
        for i, x in enumerate(out):
            if i in into.values():
                assert x is args[next(j for j, k in into.items() if k == i)]
            elif x is not None:
                assert x.untyped_storage().data_ptr() not in donated_memory


@examples(8, 100)
@given(samples(), settings_of_passes())
def test_every_pass_keeps_the_results_to_the_bit(make, how):
    sample = make()
    expected = [bits(x) for x in run(sample.graph, sample.args(), sample.n)]
    graph, donated = sample.graph, False
    for name, f in selected_passes(sample, how):
        graph = f(graph)
        donated = donated or name == "donate"
        for late in (False, True):
            check_results(sample, graph, donated, late, expected)


@examples(10, 50)
@given(samples(), settings_of_passes())
def test_a_pass_leaves_its_graph_as_it_was(make, how):
    sample = make()
    graph = sample.graph
    for _, f in selected_passes(sample, how):
        before = snapshot(graph)
        out = f(graph)
        assert snapshot(graph) == before
        assert out is graph or not {*out.nodes} & {*graph.nodes}  # itself, where there is nothing to do
        graph = out


@examples(10, 50)
@given(samples(), settings_of_passes())
def test_a_pass_depends_on_the_graph_alone(make, how):
    sample, renamed = make(), make(rename=True)
    assert lines(renamed.graph) == lines(sample.graph)
    expected = lines(apply_passes(sample, how))
    assert lines(apply_passes(sample, how)) == expected
    assert lines(apply_passes(renamed, how)) == expected
    assert lines(apply_passes(sample._replace(graph=users_reversed(sample.graph)), how)) == expected


@examples(17, 50)
@given(samples(), settings_of_passes())
def test_nodes_follow_what_they_need_and_inputs_come_first(make, how):
    sample = make()
    graph = sample.graph
    for _, f in selected_passes(sample, how):
        graph = f(graph)
        graph.lint()
        nodes = list(graph.nodes)
        position = {n: i for i, n in enumerate(nodes)}
        assert all(position[a] < position[n] for n in nodes for a in n.all_input_nodes)
        assert [n.name for n in nodes if is_input(n)] == [n.name for n in nodes[: len(sample.shapes)]]
        assert [n.meta["label"] for n in nodes if is_input(n)] == [
            n.meta["label"] for n in list(sample.graph.nodes) if is_input(n)
        ]
        assert [n.op for n in nodes].count("output") == 1
        assert nodes[-1].op == "output"


@examples(13, 50)
@given(samples(), settings_of_passes())
def test_what_a_pass_says_of_a_value_is_what_runs(make, how):
    sample = make()
    graph = apply_passes(sample, how)

    class Checked(graphs.Runner):
        def run_node(self, n: Node) -> Any:
            out = super().run_node(n)
            if n.op == "call_function":
                found = [x for x in ([out] if isinstance(out, torch.Tensor) else out) if isinstance(x, torch.Tensor)]
                assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in stand_ins_of(n)]
            return out

    Checked(graph, World(sample.n, False)).run(*sample.args())


def test_an_argument_is_not_overwritten_while_a_gather_of_it_is_on_its_way():
    b = graphs.Builder(2, [(4,), (8,), (8,)], [{"label": x, "kind": "parameters", "block": ""} for x in "xpq"], False)
    x, p, q = b.inputs
    first, between, again = (b.fit(b.gather(w), (4, 4)) for w in (q, p, q))
    mm = graphs.aten.mm.default
    h = b(mm, b.fit(x, (1, 4)), first)
    new = b(graphs.aten.add.Tensor, b(graphs.aten.mul.Tensor, q, 0.5), b.reduce_scatter(b.flat(h, 16)))
    graph = b.done([b(mm, b(mm, h, between), again), new])
    sample = Sample(graph, [(4,), (8,), (8,)], 2, [(1, 2)], [2])
    expected = [bits(x) for x in run(graph, sample.args(), 2)]
    for prefetch in (0, 1, 2):
        scheduled = schedule(donate(graph, sample.pairs, sample.donated), prefetch)
        check_results(sample, scheduled, True, True, expected)


def test_a_view_of_a_donated_argument_is_handed_on_as_a_copy():
    b = graphs.Builder(2, [(4, 4)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    graph = b.done([b(graphs.aten.t.default, b.inputs[0]), b.inputs[0]])
    sample = Sample(graph, [(4, 4)], 2, [], [0])
    expected = [bits(x) for x in run(graph, sample.args(), 2)]
    check_results(sample, donate(graph, [], [0]), True, False, expected)


# ---------------------------------------------------------------- collectives


def members(graph: Graph) -> list[tuple[Any, ...]]:
    """List what each collective moves: those of a coalesced one by one."""
    found = []
    for n in graph.nodes:
        if is_collective(n):
            units = n.meta["unit"].split(" + ")
            assert len(units) == len(stand_ins_of(n))
            found += [
                (collective_kind(n), unit, tuple(x.shape), x.dtype, n.args[1:])
                for unit, x in zip(units, stand_ins_of(n), strict=True)
            ]
    return found


@examples(17, 50)
@given(samples(), st.integers(0, 2), st.integers(0, 2))
def test_donate_and_schedule_keep_the_collectives(make, prefetch, in_flight):
    sample = make()
    donated = donate(sample.graph, sample.pairs, sample.donated)
    assert members(donated) == members(sample.graph)
    for graph in (sample.graph, donated):
        scheduled = schedule(graph, prefetch, in_flight)
        assert Counter(members(scheduled)) == Counter(members(graph))
        assert Counter(str(n.target) for n in scheduled.nodes) == Counter(str(n.target) for n in graph.nodes)


@examples(20, 100)
@given(samples(), st.sampled_from(BUCKETS), st.sampled_from(REUSES))
def test_a_bucket_holds_whole_units_of_one_group_and_no_more_than_its_size(make, size, reuse):
    graph = regather(make().graph, reuse)
    bucketed = bucket(graph, size)
    first = dict[Any, str]()  # gathers of one operand become one gather, which has the first one's unit
    same = {n.meta["unit"]: first.setdefault(n.args[0], n.meta["unit"]) for n in parameter_gathers(graph)}
    before, after = (
        Counter((kind, same.get(unit, unit), *rest) for kind, unit, *rest in members(x)) for x in (graph, bucketed)
    )
    assert {*after} == {*before}
    repeated = {n.meta["unit"] for n in parameter_gathers(graph)}
    assert all(count == before[m] or m[1] in repeated for m, count in after.items())
    assert after <= before
    for n in bucketed.nodes:
        if is_collective(n) and "coalesced" in str(n.target):
            assert full_bytes(n) <= size
            assert len({x.dtype for x in stand_ins_of(n)}) == 1
            for m in members(graph):
                assert m[1] not in n.meta["unit"].split(" + ") or m[4] == n.args[1:]
    if not size:
        assert lines(bucketed) == lines(sort_graph(graph))


def test_where_collectives_are_joined_what_waits_for_nothing_stays_where_it_is_used():
    b, aten = graphs.Builder(2, [(4, 4)], [{}], False), graphs.aten
    (x,) = b.inputs
    one, other = b.all_reduce(b(aten.sum.default, x)), b(aten.sum.default, b(aten.mul.Tensor, x, x))
    y = b(aten.mm.default, b(aten.mul.Tensor, x, one), x)
    again = b(aten.tanh.default, x)  # as `recompute` makes it
    graph = b.done([b(aten.mm.default, y, again), b.all_reduce(other)])
    names = [str(n.target).split(".")[-2] for n in bucket(graph, 1 << 20).nodes if "." in str(n.target)]
    assert "all_reduce_coalesced" in names and names[names.index("tanh") + 1] == "mm"


def test_neighbours_are_joined():
    sample = build_chain(Chain(2, (4, 4, 4, 4), 3, 3, False, False, True, False, False, False))
    joined = bucket(sample.graph, 1 << 20)
    assert Counter(n.target for n in joined.nodes if is_collective(n)) == {
        c10d.all_gather_into_tensor_coalesced.default: 1,
        c10d.reduce_scatter_tensor_coalesced.default: 1,
        c10d.all_reduce.default: 1,
    }


def test_collectives_of_two_groups_stay_apart():
    b = graphs.Builder(2, [(4,), (4,)], [{"label": x, "kind": "parameters", "block": ""} for x in "xy"], False)
    graph = b.done([b(graphs.aten.tanh.default, b.gather(x, group)) for x, group in zip(b.inputs, "gh", strict=True)])
    assert Counter(members(bucket(graph, 1 << 20))) == Counter(members(graph))
    assert lines(bucket(graph, 1 << 20)) == lines(sort_graph(graph))


@examples(13, 50)
@given(samples(), st.sampled_from(REUSES))
def test_regather_only_adds_gathers_of_inputs(make, reuse):
    graph = make().graph
    again = regather(graph, reuse)
    before, after = Counter(members(graph)), Counter(members(again))
    assert before <= after
    movable = {n.meta["unit"] for n in parameter_gathers(graph)}
    assert all(m[0] == "all_gather" and m[1] in movable for m in after - before)
    if reuse == math.inf:
        assert lines(again) == lines(graph)


@examples(25, 50)
@given(samples())
def test_recompute_only_adds_cheap_operations_that_draw_nothing(make):
    graph = make().graph
    again = recompute(graph, 1)
    assert members(again) == members(graph)
    before, after = Counter(str(n.target) for n in graph.nodes), Counter(str(n.target) for n in again.nodes)
    assert before <= after
    cheap = {str(n.target) for n in graph.nodes if is_cheap(n) and not is_random(n)}
    assert {*(after - before)} <= cheap


def mlp_step(*params: torch.Tensor) -> list[torch.Tensor]:
    def loss(ws: Any) -> torch.Tensor:
        x = torch.ones(64, 64)
        for i, w in enumerate(ws):
            x = torch.nn.functional.gelu(x @ w)
            x = torch.nn.functional.dropout(x, 0.5) if i == 1 else x
        return x.sum()

    return [w - g for w, g in zip(params, torch.func.grad(loss)(params), strict=True)]


def test_recompute_repeats_activation_functions_and_no_costly_or_random_operations():
    sizes = [torch.ones(64, 64) for _ in range(6)]
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(6)]
    graph = trace(mlp_step, _torch.fake_like(sizes), labels).graph
    again = recompute(graph)
    before, after = (Counter(name_of(n) for n in g.nodes) for g in (graph, again))
    assert after["gelu"] > before["gelu"] == 6
    for name in ("mm", *{name_of(n) for n in graph.nodes if is_random(n)}):
        assert after[name] == before[name] > 0
    assert peak_bytes(schedule(again)) < peak_bytes(schedule(graph))
    assert lines(recompute(graph, 1 << 20)) == lines(graph)


def residual_step(*params: torch.Tensor) -> list[torch.Tensor]:
    """Blocks with a layer norm, whose backward pass makes a gradient used at once and one that is live to the end."""

    def loss(ws: Any) -> torch.Tensor:
        x = torch.ones(256, 64)
        for scale, w, v in zip(ws[1::3], ws[2::3], ws[3::3], strict=True):
            normed = torch.nn.functional.layer_norm(x, [64], scale)
            x = x + torch.nn.functional.gelu(normed @ w) @ v
        return torch.nn.functional.layer_norm(x, [64], ws[0]).square().sum()

    return [w - g for w, g in zip(params, torch.func.grad(loss)(params), strict=True)]


def test_a_gradient_is_not_computed_again_from_values_that_are_kept_for_that_alone():
    shapes = [(64,), *[shape for _ in range(6) for shape in ((64,), (64, 256), (256, 64))]]
    sizes = [torch.ones(*shape) for shape in shapes]
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(len(sizes))]
    graph = trace(residual_step, _torch.fake_like(sizes), labels).graph
    again = recompute(graph)
    before, after = (Counter(name_of(n) for n in g.nodes) for g in (graph, again))
    assert after["gelu"] > before["gelu"] and after["native_layer_norm"] > before["native_layer_norm"]
    assert after["add"] == before["add"] > 6
    assert peak_bytes(schedule(again)) < peak_bytes(schedule(graph))


@examples(13, 50)
@given(samples(), st.booleans())
def test_in_place_changes_all_reduces_of_what_nothing_else_reads_and_no_more(make, donated):
    sample = make()
    before = donate(sample.graph, sample.pairs, sample.donated) if donated else sample.graph
    after = in_place(before)
    assert in_place(after).python_code("self").src == after.python_code("self").src
    memory, given = storages(before), {s for n in before.nodes if is_input(n) for s in storages(before).indices[n]}
    for old, new in zip(before.nodes, after.nodes, strict=True):
        if old.target is c10d.all_reduce.default:
            (s,) = memory.indices[old.all_input_nodes[0]]
            readers = [n for n in before.nodes if s in memory.read_by(n) and not is_view(n)]
            mine = s not in given and readers == [old]
            assert (new.target is c10d.all_reduce_.default) == mine
        else:
            assert new.target is old.target


def test_an_all_reduce_of_a_fresh_buffer_is_in_place_one_of_a_gradient_that_is_used_again_not():
    b = graphs.Builder(2, [(4,)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    (x,) = b.inputs
    fresh, kept = b(graphs.aten.tanh.default, x), b(graphs.aten.exp.default, x)
    graph = in_place(b.done([b.all_reduce(fresh), b.all_reduce(kept), kept, b.all_reduce(x)]))
    expected = [c10d.all_reduce_.default, c10d.all_reduce.default, c10d.all_reduce.default]
    assert [n.target for n in graph.nodes if is_collective(n)] == expected


def test_in_place_leaves_operands_with_other_strides_and_repeated_operands_alone():
    b = graphs.Builder(2, [(4, 3)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    turned = b(graphs.aten.t.default, b(graphs.aten.tanh.default, *b.inputs))
    twice = b(graphs.aten.exp.default, *b.inputs)
    both = b(c10d.all_reduce_coalesced.default, [twice, twice], "sum", "g")
    items = [b.wait(b(operator.getitem, both, i)) for i in range(2)]
    graph = in_place(b.done([b.all_reduce(turned), *items]))
    expected = [c10d.all_reduce_coalesced.default, c10d.all_reduce.default]
    assert sorted([n.target for n in graph.nodes if is_collective(n)], key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("n,dtype", [(1, torch.float32), (2, torch.bfloat16), (4, torch.float32), (4, torch.bfloat16)])
def test_beside_the_result_a_reduce_scatter_holds_what_other_ranks_send(n, dtype):
    """Two of n parts are in the operand and in the result; half precision is summed in float32, row by row."""
    b = graphs.Builder(n, [(16,)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    graph = b.done([b.reduce_scatter(b.cast(b(graphs.aten.tanh.default, *b.inputs), dtype))])
    part = 16 * dtype.itemsize // n
    held = {r.label: r.bytes for r in live_ranges(graph) if r.label in ("the ranks' parts", "their sum")}
    expected = {"the ranks' parts": (n - 2) * part} if n > 2 else {}
    assert held == (expected | {"their sum": 4 * part} if n > 2 and dtype is torch.bfloat16 else expected)


def test_in_place_spares_a_buffer():
    b = graphs.Builder(2, [(4,)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    graph = b.done([b(graphs.aten.sum.default, b.all_reduce(b(graphs.aten.tanh.default, *b.inputs)))])
    assert (peak_bytes(graph), peak_bytes(in_place(graph))) == (48, 36)


UNIT = [(3,), (1, 4), (3,), (2, 2), (3,)]  # its shard on 4 ranks, leaves of 4 elements


def written_unit(change: str = "") -> Graph:
    """Gather a unit of two leaves and donate the old ones, with something about it that may be otherwise."""
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(len(UNIT))]
    b = graphs.Builder(3, UNIT, labels, False)
    new, *_, other = b.inputs
    full = b.gather(b.cast(new, torch.bfloat16) if change == "cast" else new)
    parts = [b(graphs.aten.slice.Tensor, full, 0, 4 * i, 4 * i + 4) for i in (0, 1)]
    leaves = [b(graphs.aten.view.default, x, shape) for x, shape in zip(parts, ((1, 4), (2, 2)), strict=True)]
    if change == "cast":
        leaves = [b.cast(x, torch.float32) for x in leaves]
    if change == "turned":
        leaves[1] = b(graphs.aten.t.default, leaves[1])
    results = [*leaves, b(graphs.aten.sum.default, full if change == "read" else other)]
    graph = b.done([results[0], *results[2:]] if change == "one" else results)
    if change == "one":
        return donate(graph, [(0, 1)], [1])
    if change == "arguments":
        return graph
    return donate(graph, [(0, 1), (1, 3)], [1, 3])


def into(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.target is GATHER_INTO]


@pytest.mark.parametrize("change", ["", "one"])
def test_a_gathered_unit_that_is_only_written_arrives_in_its_leaves(change):
    before = written_unit(change)
    after = gather_into(before)
    (start,) = into(after)
    assert (
        collective_kind(start) == "all_gather" and full_bytes(start) == moved_numel(start) * 4 == 3 * 3 * 4
    )  # padding counts
    assert not any(n.target is COPY or n.target is c10d.all_gather_into_tensor.default for n in after.nodes)
    given, the_sum = sum(x.nbytes for x in graphs.arguments(UNIT)), 4
    assert peak_bytes(schedule(before)) == given + full_bytes(start)
    assert peak_bytes(schedule(after)) == given + the_sum
    for late in (False, True):
        for graph in (after, schedule(after, 0, 1)):
            args = graphs.arguments(UNIT)
            out = run(graph, args, 3, late)
            whole = graphs.arguments(UNIT)[0].repeat(3)
            assert out[0] is args[1] and torch.equal(args[1], whole[:4].view(1, 4))
            assert change or (out[1] is args[3] and torch.equal(args[3], whole[4:8].view(2, 2)))


@pytest.mark.parametrize("change", ["read", "cast", "turned", "arguments"])
def test_a_gathered_unit_that_has_another_reader_or_layout_stays_one_buffer(change):
    graph = written_unit(change)
    assert lines(gather_into(graph)) == lines(graph)


def test_leaves_are_overwritten_when_all_that_read_them_have_run():
    b = graphs.Builder(2, [(2, 2)], [{"label": "w", "kind": "parameters", "block": ""}], False)
    (w,) = b.inputs
    new = b.fit(b.gather(b.reduce_scatter(b.flat(b(graphs.aten.mm.default, w, w)))), (2, 2))
    read = b(graphs.aten.mm.default, b(graphs.aten.t.default, w), w)
    graph = schedule(gather_into(donate(b.done([new, read]), [(0, 0)], [0])))
    order = [n.target for n in graph.nodes]
    assert order.index(GATHER_INTO) > len(order) - order[::-1].index(graphs.aten.mm.default) - 1


def events(graph: Graph) -> list[tuple[int, str, int]]:
    """List the uses of gathered parameters, that are no results: where, which, of how many bytes."""
    index = {n: i for i, n in enumerate(graph.nodes)}
    found = []
    for g in parameter_gathers(graph):
        for w in g.users:
            users = views_and_users(w)[1]
            if all(u.op != "output" for u in users):
                found += [(index[u], g.meta["unit"], sum(map(nbytes, stand_ins_of(w)))) for u in users]
    return sorted(found)


@examples(20, 100)
@given(samples(), st.sampled_from(REUSES))
def test_regather_lets_go_just_where_more_is_used_in_between(make, reuse):
    graph = make().graph
    uses = events(graph)
    gathered = Counter(unit for kind, unit, *_ in members(regather(graph, reuse)) if kind == "all_gather")
    for unit in {u for _, u, _ in uses}:
        at = [i for i, u, _ in uses if u == unit]
        least = most = 1
        for a, b in itertools.pairwise(at):
            inside = {u: size for i, u, size in uses if a < i < b and u != unit}
            around = {u: size for i, u, size in uses if a <= i <= b and u != unit}
            least += sum(inside.values()) > reuse
            most += sum(around.values()) > reuse
        assert least <= gathered[unit] <= most


# ---------------------------------------------------------------- order and memory


@examples(10, 50)
@given(chains(stages=[3], sam=False), st.integers(0, 2), st.integers(0, 2))
def test_no_more_units_are_gathered_than_prefetched_and_one(chain, prefetch, in_flight):
    graph = schedule(donate_all(regather(build_chain(chain).graph, 0), chain), prefetch, in_flight)
    gathered = [r for r in live_ranges(graph) if r.kind == "gathered"]
    counts = live_bytes([r._replace(bytes=1) for r in gathered], len(graph.nodes))
    layers = len(chain.widths) - 1
    assert len(gathered) >= layers
    assert max(counts) <= prefetch + 1
    if prefetch and layers > prefetch:
        assert max(counts) == prefetch + 1


@examples(14, 100)
@given(chains(stages=[3], sam=False), st.integers(1, 3), st.integers(0, 1), st.sampled_from((0, 0.5, 1, 1.1, 1.3, 2)))
def test_gathers_start_ahead_just_where_there_is_room(chain, prefetch, in_flight, part):
    graph = donate_all(regather(build_chain(chain).graph, 0), chain)
    lean, eager = (schedule(graph, k, in_flight) for k in (0, prefetch))
    limit = part * peak_bytes(lean)
    fitting = schedule(graph, prefetch, in_flight, limit)
    assert peak_bytes(fitting) <= max(limit, peak_bytes(lean))
    counts = [started_ahead(g) for g in (lean, fitting, eager)]
    assert counts == sorted(counts)
    if limit < min(live_bytes(live_ranges(lean), len(lean.nodes))):
        assert list(map(str, fitting.nodes)) == list(map(str, lean.nodes))
    if limit >= peak_bytes(lean) + prefetch * 2 * max(full_bytes(g) for g in parameter_gathers(graph)):
        assert list(map(str, fitting.nodes)) == list(map(str, eager.nodes))


def started_ahead(graph: Graph) -> int:
    """Count the gathers that start while another has yet to be waited for."""
    flying = ahead = 0
    for n in graph.nodes:
        ahead += is_gather(n) and flying > 0
        flying += is_gather(n)
        flying -= is_wait(n) and is_gather(start_of(n))
    return ahead


def test_where_little_is_alive_the_next_gather_starts():
    """Activations pile up, so early in the forward pass and late in the backward pass there is room."""
    chain = Chain(2, (4,) * 7, 8, 3, False, False, False, False, False, False)
    graph = donate_all(regather(build_chain(chain).graph, 0), chain)
    lean, eager = schedule(graph), schedule(graph, 1)
    fitting = schedule(graph, 1, 0, peak_bytes(lean))
    assert peak_bytes(fitting) == peak_bytes(lean) < peak_bytes(eager)
    assert started_ahead(lean) == 0 < started_ahead(fitting) < started_ahead(eager)
    orders = [digest_of_order(x) for x in (lean, eager, schedule(graph, 1))]
    assert orders[0] != orders[1] == orders[2]  # ranks do not take one for the other
    for extra in range(0, 1000, either(50, 10)):  # several ahead share the room
        limit = peak_bytes(lean) + extra
        assert peak_bytes(schedule(graph, 3, 0, limit)) <= limit


def donate_all(graph: Graph, chain: Chain) -> Graph:
    count = 2 * (len(chain.widths) - 1)
    return donate(graph, [(i, i) for i in range(count)], list(range(count)))


@examples(13, 50)
@given(chains(stages=[3], sam=False))
def test_all_of_a_unit_is_there_at_once_without_prefetch(chain):
    """A gather starts when work needs it, and nothing but its wait and views lies in between."""
    graph = schedule(regather(build_chain(chain).graph, 0))
    nodes = list(graph.nodes)
    gathers = {*parameter_gathers(graph)}
    for i, n in enumerate(nodes):
        if n in gathers:
            assert is_wait(nodes[i + 1])
            assert nodes[i + 1].args[0] is n


@examples(13, 50)
@given(chains(stages=[0, 1, 3], sam=False), st.booleans())
def test_a_reduction_starts_before_the_next_gradient_is_packed(chain, donated):
    graph = build_chain(chain).graph
    graph = schedule(donate_all(graph, chain) if donated else graph)
    position = {n: i for i, n in enumerate(graph.nodes)}
    memory = storages(graph)
    reductions = [n for n in graph.nodes if is_reduce_collective(n)][:-1]  # the last is the loss's
    reductions = [n for n in reductions if n.meta["val"].dim()]
    assert len(reductions) >= len(chain.widths) - 2
    for earlier, later in itertools.pairwise(reductions):
        packed = memory.producers[memory.indices[later.args[0]][0]]
        assert position[earlier] < position[packed]
        wait = next(iter(earlier.users))
        assert position[wait] < position[packed]


@examples(14, 100)
@given(chains(sam=False), st.sampled_from((0, math.inf)), st.booleans())
def test_schedule_needs_no_more_memory_than_the_order_as_traced(chain, reuse, donated):
    graph = regather(build_chain(chain).graph, reuse)
    graph = donate_all(graph, chain) if donated else graph
    assert peak_bytes(schedule(graph)) <= peak_bytes(graph)


@examples(13, 50)
@given(samples(), settings_of_passes())
def test_live_bytes_are_what_a_run_holds(make, how):
    sample = make()
    graph = apply_passes(sample, {**how, "passes": how["passes"] - {"mark_fused"}})  # a run here stores all
    ranges = [r for r in live_ranges(graph) if r.label != "the ranks' parts"]
    count = len(sample.shapes)
    expected = live_bytes(ranges, len(graph.nodes))
    assert expected[count - 1 :] == measured(graph, sample.args(), sample.n)[count - 1 :]


@examples(13, 50)
@given(samples(), settings_of_passes())
def test_arguments_are_alive_throughout(make, how):
    sample = make()
    graph = apply_passes(sample, how)
    least = sum(4 * math.prod(shape) for shape in sample.shapes)
    assert min(live_bytes(live_ranges(graph), len(graph.nodes))) >= least
    assert peak_bytes(graph) >= max(least, sum(map(nbytes, distinct_results(graph))))


def distinct_results(graph: Graph) -> list[torch.Tensor]:
    return [
        stand_ins_of(n)[0] for n in dict.fromkeys(graph_results(graph)) if isinstance(n, Node) and not is_view_of_any(n)
    ]


def is_view_of_any(node: Node) -> bool:
    return not is_input(node) and len({*storages(node.graph).producers} & {node}) == 0


@examples(13, 50)
@given(samples(), settings_of_passes(), st.integers(0, 2))
def test_schedule_of_a_schedule_keeps_the_results(make, how, prefetch):
    sample = make()
    expected = [bits(x) for x in run(sample.graph, sample.args(), sample.n)]
    graph = schedule(schedule(apply_passes(sample, how), prefetch))
    for late in (False, True):
        check_results(sample, graph, how["donate"], late, expected)


@examples(13, 50)
@given(chains(), st.integers(1, 2))
def test_no_more_collectives_are_in_flight_while_work_goes_on_than_asked(chain, in_flight):
    graph = schedule(build_chain(chain).graph, 0, in_flight)
    flying = 0
    counted = {n for n in graph.nodes if is_collective(n)} - {*parameter_gathers(graph)}
    for n in graph.nodes:
        flying += n in counted
        flying -= is_wait(n) and n.args[0] in counted
        assert n.target is not graphs.aten.mm.default or flying <= in_flight
    assert flying == 0


# ---------------------------------------------------------------- executors


def in_a_world(program: Program, world: World) -> Program:
    targets = world.targets()
    new = [
        x._replace(target=targets.get(x.target, x.target)) if isinstance(x, SingleOperation) else x
        for x in program.instructions
    ]
    return program._replace(instructions=new)


@examples(14, 100)
@given(samples(), settings_of_passes(), st.booleans())
def test_executors_compute_what_the_graph_says(make, how, late):
    sample = make()
    graph = apply_passes(sample, how)
    reference = sample.args()
    expected = [bits(x) for x in run(graph, reference, sample.n, late)]
    with pytest.MonkeyPatch.context() as patch:
        not_compiled(patch)
        patch.setattr(_backends, "make_program", lambda g: in_a_world(make_program(g), World(sample.n, late)))
        for backend, g in (("fx", in_world(graph, World(sample.n, late))), ("inductor", graph)):
            given_args = sample.args()
            box = list(given_args)
            out = lower(g, backend)(box)
            assert not box
            assert [bits(x) for x in out] == expected
            assert [bits(x) for x in given_args] == [bits(x) for x in reference]
            into = dict(sample.pairs) if how["donate"] else {}
            assert all(out[i] is given_args[j] for i, j in into.items())


@examples(13, 50)
@given(specs(local=True))
def test_local_graphs_are_one_segment_a_block(spec):
    sample = build(spec)
    expected = [bits(x) for x in run(sample.graph, sample.args(), sample.n)]
    assert [bits(x) for x in lower(sample.graph, "fx")(sample.args())] == expected
    with pytest.MonkeyPatch.context() as patch:
        not_compiled(patch)
        assert [bits(x) for x in lower(sample.graph, "inductor")(sample.args())] == expected


class Reads(list):
    def __init__(self, registers: int) -> None:
        super().__init__([None] * registers)
        self.seen: list[int] = []

    def __getitem__(self, i: Any) -> Any:
        self.seen.append(i)
        return super().__getitem__(i)


@examples(13, 50)
@given(samples(), settings_of_passes())
def test_a_register_is_free_right_after_its_last_use(make, how):
    sample = make()
    program = make_program(apply_passes(sample, how))
    count = len(sample.shapes)
    held, freed, last = {*range(count)}, {}, {}
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Segment):
            ins, outs = instruction.ins, instruction.outs
        else:
            registers = Reads(program.register_count)
            instruction.arguments.values(registers)
            ins, outs = registers.seen, [instruction.out]
        assert held >= {*ins}
        assert not held & {*outs}
        assert len({*instruction.free}) == len(instruction.free)
        held = (held | {*outs}) - {*instruction.free}
        last |= dict.fromkeys([*ins, *outs], i)
        freed |= dict.fromkeys(instruction.free, i)
    kept = {*range(count), *[r for r in program.results if r is not None]}
    assert held == kept
    assert freed == {s: i for s, i in last.items() if s not in kept}


@examples(3, 12)
@given(chains(stages=[0, 3], sam=False))
def test_segments_to_compile_do_not_grow_with_the_blocks(chain):
    def distinct(depth: int) -> int:
        graph = schedule(regather(build_chain(chain._replace(widths=(4,) * (depth + 1))).graph, 0))
        return len({s.key for s in make_program(graph).instructions if isinstance(s, Segment)})

    assert distinct(6) == distinct(9)
