"""The private torch API that copies graphs: what fails here says what broke when torch changed."""

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from fzero._torch import copy_nodes


def two_sums() -> Graph:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.add, (x, y), {"alpha": 2})
    second = graph.call_function(torch.stack, ([x, first],))
    first.meta["unit"] = "blocks.0"
    graph.output((second, first, None))
    return graph


def test_a_copied_graph_has_the_nodes_that_node_copy_makes():
    graph, slow = two_sums(), Graph()
    copies = {}
    for node in graph.nodes:
        copies[node] = slow.node_copy(node, copies.__getitem__)
    fast = copy_nodes(graph.nodes)
    fast.lint()
    assert str(fast) == str(slow) and len(fast.nodes) == len(slow.nodes) == 5
    for a, b in zip(fast.nodes, slow.nodes, strict=True):
        assert (a.name, a.op, a.target, a.meta) == (b.name, b.op, b.target, b.meta)
        assert [u.name for u in a.users] == [u.name for u in b.users]
    x, y = torch.ones(2), torch.arange(2.0)
    assert torch.equal(GraphModule({}, fast).forward(x, y)[0], torch.stack([x, x + 2 * y]))
    assert len(fast.find_nodes(op="call_function", target=torch.add)) == 1


def test_changes_of_a_copied_graph_leave_the_original_alone():
    graph = two_sums()
    before, copy = str(graph), copy_nodes(graph.nodes)
    _, _, first, second, _ = copy.nodes
    with copy.inserting_before(second):
        new = copy.call_function(operator.neg, (first,))
    second.replace_input_with(first, new)
    first.meta["unit"] = "another"
    assert new.name == "neg" and copy.call_function(torch.add, (first, new)).name == "add_1"
    copy.eliminate_dead_code()
    copy.lint()
    assert str(graph) == before and [n.meta for n in graph.nodes][2] == {"unit": "blocks.0"}


def test_an_order_in_which_a_node_comes_before_its_argument_is_refused():
    x, y, first, second, output = two_sums().nodes
    with pytest.raises(KeyError):
        copy_nodes([x, y, second, first, output])
