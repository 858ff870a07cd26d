"""Laws of every pass: the results to the bit, the graph it is given as it was, and an order that runs."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Node

from fzero.graph.ir import is_input, node_stand_ins
from fzero.graph.passes import donate, schedule
from tests.graph import graphs
from tests.graph.graphs import Sample, World, bits, lines, reverse_users, run, samples, snapshot
from tests.graph.passes.helpers import apply_passes, check_results, selected_passes, settings_of_passes
from tests.helpers import examples


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
    assert lines(apply_passes(sample._replace(graph=reverse_users(sample.graph)), how)) == expected


@examples(17, 50)
@given(samples(), settings_of_passes())
def test_nodes_of_a_pass_follow_their_operands_and_inputs_come_first(make, how):
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
def test_stand_ins_of_a_passes_values_have_the_shapes_that_run(make, how):
    sample = make()
    graph = apply_passes(sample, how)

    class Checked(graphs.Runner):
        def run_node(self, n: Node) -> Any:
            out = super().run_node(n)
            if n.op == "call_function":
                results = [x for x in ([out] if isinstance(out, torch.Tensor) else out) if isinstance(x, torch.Tensor)]
                assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in node_stand_ins(n)]
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


@pytest.mark.slow
@examples(13, 50)
@given(samples(), settings_of_passes(), st.integers(0, 2))
def test_scheduling_a_scheduled_graph_keeps_the_results(make, how, prefetch):
    sample = make()
    expected = [bits(x) for x in run(sample.graph, sample.args(), sample.n)]
    graph = schedule(schedule(apply_passes(sample, how), prefetch))
    for late in (False, True):
        check_results(sample, graph, how["donate"], late, expected)
