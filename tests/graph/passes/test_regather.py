"""Laws of the pass that gathers parameters again."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from fzero.graph.ir import nbytes, node_stand_ins, parameter_gathers, views_and_users
from fzero.graph.passes import regather
from tests.graph.graphs import lines, samples
from tests.graph.passes.helpers import REUSES, members
from tests.helpers import examples


@pytest.mark.slow
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


def events(graph: Graph) -> list[tuple[int, str, int]]:
    """List the uses of gathered parameters, that are not results: where, which, of how many bytes."""
    index = {n: i for i, n in enumerate(graph.nodes)}
    results = []
    for g in parameter_gathers(graph):
        for w in g.users:
            users = views_and_users(w)[1]
            if all(u.op != "output" for u in users):
                results += [(index[u], g.meta["unit"], sum(map(nbytes, node_stand_ins(w)))) for u in users]
    return sorted(results)


@examples(20, 100)
@given(samples(), st.sampled_from(REUSES))
def test_regather_frees_a_unit_only_where_much_is_used_in_between(make, reuse):
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
