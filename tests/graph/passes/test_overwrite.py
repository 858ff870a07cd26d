"""Laws of the passes that write a result into memory that exists."""

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph.ir import COPY, GATHER_INTO, is_collective, is_input
from fzero.graph.ir._collective_sizes import collective_kind, full_bytes, moved_numel
from fzero.graph.ir._ops import is_view
from fzero.graph.ir._storages import storages
from fzero.graph.passes import donate, gather_into, in_place, schedule
from fzero.graph.planning.memory._live_ranges import live_ranges, peak_bytes
from tests.graph import graphs
from tests.graph.graphs import lines, run, samples
from tests.helpers import examples


@examples(13, 50)
@given(samples(), st.booleans())
def test_in_place_changes_only_all_reduces_whose_operand_has_no_other_reader(make, donated):
    sample = make()
    before = donate(sample.graph, sample.pairs, sample.donated) if donated else sample.graph
    after = in_place(before)
    assert in_place(after).python_code("self").src == after.python_code("self").src
    memory, inputs = storages(before), {s for n in before.nodes if is_input(n) for s in storages(before).indices[n]}
    for old, new in zip(before.nodes, after.nodes, strict=True):
        if old.target is c10d.all_reduce.default:
            (s,) = memory.indices[old.all_input_nodes[0]]
            readers = [n for n in before.nodes if s in memory.read_by(n) and not is_view(n)]
            mine = s not in inputs and readers == [old]
            assert (new.target is c10d.all_reduce_.default) == mine
        else:
            assert new.target is old.target


def test_an_all_reduce_of_a_gradient_that_is_used_again_is_not_in_place():
    b = graphs.Builder(2, [(4,)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    (x,) = b.inputs
    fresh, gradient = b(graphs.aten.tanh.default, x), b(graphs.aten.exp.default, x)
    graph = in_place(b.done([b.all_reduce(fresh), b.all_reduce(gradient), gradient, b.all_reduce(x)]))
    expected = [c10d.all_reduce_.default, c10d.all_reduce.default, c10d.all_reduce.default]
    assert [n.target for n in graph.nodes if is_collective(n)] == expected


def test_in_place_skips_strided_and_repeated_operands():
    b = graphs.Builder(2, [(4, 3)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    turned = b(graphs.aten.t.default, b(graphs.aten.tanh.default, *b.inputs))
    twice = b(graphs.aten.exp.default, *b.inputs)
    both = b(c10d.all_reduce_coalesced.default, [twice, twice], "sum", "g")
    items = [b.wait(b(operator.getitem, both, i)) for i in range(2)]
    graph = in_place(b.done([b.all_reduce(turned), *items]))
    expected = [c10d.all_reduce_coalesced.default, c10d.all_reduce.default]
    assert sorted([n.target for n in graph.nodes if is_collective(n)], key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("n,dtype", [(1, torch.float32), (2, torch.bfloat16), (4, torch.float32), (4, torch.bfloat16)])
def test_a_reduce_scatter_holds_the_parts_that_other_ranks_send(n, dtype):
    """Two of n parts are in the operand and in the result; half precision is summed in float32, row by row."""
    b = graphs.Builder(n, [(16,)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    graph = b.done([b.reduce_scatter(b.cast(b(graphs.aten.tanh.default, *b.inputs), dtype))])
    part = 16 * dtype.itemsize // n
    held = {r.label: r.bytes for r in live_ranges(graph) if r.label in ("the ranks' parts", "their sum")}
    expected = {"the ranks' parts": (n - 2) * part} if n > 2 else {}
    assert held == (expected | {"their sum": 4 * part} if n > 2 and dtype is torch.bfloat16 else expected)


def test_an_all_reduce_in_place_saves_a_buffer():
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
    inputs, the_sum = sum(x.nbytes for x in graphs.arguments(UNIT)), 4
    assert peak_bytes(schedule(before)) == inputs + full_bytes(start)
    assert peak_bytes(schedule(after)) == inputs + the_sum
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


def test_leaves_are_overwritten_after_all_their_readers():
    b = graphs.Builder(2, [(2, 2)], [{"label": "w", "kind": "parameters", "block": ""}], False)
    (w,) = b.inputs
    new = b.fit(b.gather(b.reduce_scatter(b.flat(b(graphs.aten.mm.default, w, w)))), (2, 2))
    read = b(graphs.aten.mm.default, b(graphs.aten.t.default, w), w)
    graph = schedule(gather_into(donate(b.done([new, read]), [(0, 0)], [0])))
    order = [n.target for n in graph.nodes]
    assert order.index(GATHER_INTO) > len(order) - order[::-1].index(graphs.aten.mm.default) - 1
