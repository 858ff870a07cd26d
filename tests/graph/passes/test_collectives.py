"""Laws of the passes that join and order collectives."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fzero._torch import c10d
from fzero.graph.ir import is_collective, node_stand_ins, parameter_gathers, sort_graph
from fzero.graph.ir._collective_sizes import full_bytes
from fzero.graph.passes import bucket, donate, regather, schedule
from tests.graph import graphs
from tests.graph.graphs import Chain, build_chain, lines, samples
from tests.graph.passes.helpers import BUCKETS, REUSES, members
from tests.helpers import examples


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
            assert len({x.dtype for x in node_stand_ins(n)}) == 1
            for m in members(graph):
                assert m[1] not in n.meta["unit"].split(" + ") or m[4] == n.args[1:]
    if not size:
        assert lines(bucketed) == lines(sort_graph(graph))


def test_joining_collectives_moves_no_other_operation():
    b, aten = graphs.Builder(2, [(4, 4)], [{}], False), graphs.aten
    (x,) = b.inputs
    one, other = b.all_reduce(b(aten.sum.default, x)), b(aten.sum.default, b(aten.mul.Tensor, x, x))
    y = b(aten.mm.default, b(aten.mul.Tensor, x, one), x)
    again = b(aten.tanh.default, x)  # as `recompute` makes it
    graph = b.done([b(aten.mm.default, y, again), b.all_reduce(other)])
    names = [str(n.target).split(".")[-2] for n in bucket(graph, 1 << 20).nodes if "." in str(n.target)]
    assert "all_reduce_coalesced" in names and names[names.index("tanh") + 1] == "mm"


def test_neighbouring_collectives_are_joined():
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
