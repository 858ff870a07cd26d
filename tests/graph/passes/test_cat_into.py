"""Parts of a concatenation are written into its result: on graphs made by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

import fzero
from fzero.graph.ir import aten, write_part
from fzero.graph.ir._ops import op_name
from fzero.graph.passes import cat_into, schedule
from fzero.graph.planning._subgraphs import split_into_subgraphs
from fzero.graph.planning.memory._live_ranges import peak_bytes
from fzero.nn import linear_cross_entropy
from tests.graph import graphs
from tests.helpers import examples

WRITTEN = ("", "transposed", "last smaller", "pointwise")
AS_BEFORE = ("read", "an argument", "twice", "a view of one", "two", "sizes")


def graph_of(parts: int, dim: int, order: list[int], change: str = "") -> Graph:
    """Make a graph that concatenates products `[4, 4]` of its arguments, computed in some order.

    Args:
        parts: the number of parts.
        dim: the dimension along which they are concatenated.
        order: the order in which they are computed.
        change: what is otherwise: the parts are transposed or pointwise; the last is smaller; one is read once more, is
            an argument, occurs twice; all are views of one value; there are two; one before the last is smaller.
    """
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(2)]
    b = graphs.Builder(2, [(4, 4), (4, 4)], labels, False)
    x, y = b.inputs
    products, whole = {}, b(aten.tanh.default, x)
    for i in order:
        product = b(aten.mul.Tensor, whole if change == "a view of one" else b(aten.mm.default, x, y), float(i + 1))
        if change in ("", "transposed", "last smaller"):
            product = b(aten.mm.default, product, y)
        if change == "transposed":
            product = b(aten.t.default, product)
        products[i] = product
    values = [products[i] for i in range(parts)]
    if change in ("last smaller", "sizes"):
        at = -1 if change == "last smaller" else 0
        rows = b(aten.slice.Tensor, x, 0, 0, 3) if dim == 0 else x
        columns = y if dim == 0 else b(aten.slice.Tensor, y, 1, 0, 3)
        values[at] = b(aten.mm.default, rows, columns)
    if change == "an argument":
        values[1] = x
    if change == "twice":
        values[1] = values[0]
    if change == "a view of one":
        values = [b(aten.slice.Tensor, b(aten.view.default, whole, [4, 4]), 0, i % 4, i % 4 + 1) for i in range(parts)]
    joined = b(aten.cat.default, values[:2] if change == "two" else values, dim)
    more = [b(aten.sum.default, values[0])] if change == "read" else []
    return b.done([b(aten.tanh.default, joined), *more])


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("change", WRITTEN + AS_BEFORE)
@examples(2, 10)
@given(data=st.data(), parts=st.integers(6, 9), dim=st.sampled_from([0, 1, -1]))
def test_writing_parts_into_one_result_keeps_results_bit_for_bit(data, parts, dim, change, fuses):
    graph = graph_of(parts, dim, data.draw(st.permutations(range(parts))), change)
    args = graphs.arguments([(4, 4), (4, 4)])
    expected = graphs.run(graph, args, 2)
    written = cat_into(graph, fuses)
    for actual in (written, schedule(written)):
        for x, y in zip(graphs.run(actual, args, 2), expected, strict=True):
            assert torch.equal(x, y)
    writes = [n for n in written.nodes if n.target is write_part]
    is_written = change in WRITTEN and not (fuses and change == "pointwise")
    assert len(writes) == (parts if is_written else 0)
    assert any(op_name(n) == "cat" for n in written.nodes) != is_written


def test_parts_are_concatenated_where_memory_is_fuller_before():
    graph = graph_of(3, 0, [0, 1, 2])
    assert not any(n.target is write_part for n in cat_into(graph).nodes)


def test_while_parts_are_concatenated_one_exists_beside_the_result():
    graph = graph_of(6, 0, [*range(6)])
    part, arguments = 64, 2 * 64
    before, after = (peak_bytes(schedule(g)) for g in (graph, cat_into(graph)))
    assert before >= arguments + 12 * part
    assert after <= arguments + 6 * part + 6 * part  # the tanh of the result


def test_a_compiled_step_writes_parts_between_its_segments():
    graph = schedule(cat_into(graph_of(6, 0, [5, 3, 4, 2, 1, 0]), True))
    subgraphs = split_into_subgraphs(graph.nodes)
    assert all(len(nodes) == 1 for nodes in subgraphs if any(n.target is write_part for n in nodes))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_gradient_of_a_head_exists_once(backend):
    tokens, width, classes, chunk = 8, 64, 1024, 64
    head, x = torch.randn(classes, width), torch.randn(tokens, width)
    labels = torch.arange(tokens)

    def grads(head: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.func.grad(lambda w, x: linear_cross_entropy(x, w, labels, chunk=chunk), argnums=(0, 1))(head, x)

    jitted = fzero.jit(grads, backend=backend)
    plan = jitted.plan(head, x)
    of_head = 4 * head.numel()
    assert plan.peak_bytes - plan.argument_bytes < 1.25 * of_head
    for actual, expected in zip(jitted(head, x), grads(head, x), strict=True):
        torch.testing.assert_close(actual, expected)
