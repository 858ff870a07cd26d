"""Live ranges are what a run holds."""

import math

import pytest
import torch
from hypothesis import given
from torch.fx import Graph, Node

from fzero.graph.ir import graph_results, is_input, nbytes, node_stand_ins
from fzero.graph.ir._storages import storages
from fzero.graph.planning.memory._live_ranges import live_bytes, live_ranges, peak_bytes
from tests.graph.graphs import measure, samples
from tests.graph.passes.helpers import apply_passes, settings_of_passes
from tests.helpers import examples


@examples(13, 50)
@given(samples(), settings_of_passes())
def test_live_bytes_of_a_plan_are_those_measured_in_a_run(make, how):
    sample = make()
    graph = apply_passes(sample, {**how, "passes": how["passes"] - {"mark_fused"}})  # a run here stores all
    ranges = [r for r in live_ranges(graph) if r.label != "the ranks' parts"]
    count = len(sample.shapes)
    expected = live_bytes(ranges, len(graph.nodes))
    assert expected[count - 1 :] == measure(graph, sample.args(), sample.n)[count - 1 :]


@pytest.mark.slow
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
        node_stand_ins(n)[0]
        for n in dict.fromkeys(graph_results(graph))
        if isinstance(n, Node) and not is_view_of_any(n)
    ]


def is_view_of_any(node: Node) -> bool:
    return not is_input(node) and len({*storages(node.graph).producers} & {node}) == 0
