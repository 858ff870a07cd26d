"""The table of operations: every row is an operation, and its columns are true of it."""

import operator

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import fzero.parallel.experts  # noqa: F401  its operations have rows, too
from fzero._torch import OneNode
from fzero.graph._trace_agreement import _node_signatures
from fzero.graph.ir import is_cheap
from fzero.graph.ir._ops import _OPERATIONS, _OperationTraits, is_factory, is_known_cheap, is_view
from fzero.graph.passes import recompute, schedule
from fzero.sharding.maps import _coded_rows, _flat
from tests.graph import graphs

aten = graphs.aten


def rows(column: _OperationTraits) -> list[str]:
    return [name for name, traits in _OPERATIONS.items() if column in traits]


@pytest.mark.parametrize("name", _OPERATIONS)
def test_every_row_of_operations_is_a_cheap_operation_of_torch(name):
    if any(isinstance(getattr(module, name, None), OneNode) for module in (_flat, _coded_rows)):
        return
    packet = next(getattr(ops, name) for ops in (aten, torch.ops.prims, torch.ops.fzero) if hasattr(ops, name))
    assert packet not in flop_registry or _OPERATIONS[name] is _OperationTraits.HOST_SIZES
    assert not any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())


def test_traits_of_operations_that_imply_others_are_consistent():
    cheap = {*rows(_OperationTraits.CHEAP)}
    assert cheap >= {*rows(_OperationTraits.FACTORY), *rows(_OperationTraits.EMPTY), *rows(_OperationTraits.LAYOUT)}
    assert {*rows(_OperationTraits.BY_RANK)} >= {*rows(_OperationTraits.FACTORY), *rows(_OperationTraits.LAYOUT)}
    assert all(traits for traits in _OPERATIONS.values())


CALLS = {  # of operations that are linear, or lay out, or share memory: what they may be called with beside a tensor
    "add": lambda x: aten.add.Tensor(x, x),
    "div": lambda x: aten.div.Tensor(x, 3.0),
    "mul": lambda x: aten.mul.Tensor(x, 3.0),
    "cat": lambda x: aten.cat.default([x, x]),
    "clone": lambda x: aten.clone.default(x),
    "constant_pad_nd": lambda x: aten.constant_pad_nd.default(x, [1, 2]),
    "_to_copy": lambda x: aten._to_copy.default(x, dtype=torch.float64),
    "convert_element_type": lambda x: torch.ops.prims.convert_element_type.default(x, torch.float64),
    "_unsafe_view": lambda x: aten._unsafe_view.default(x, [6]),
    "flatten_leaves": lambda x: _flat.flatten_leaves([x, x], 0, 2),
    "view_ranges": lambda x: _flat.view_ranges(x.view(6), [2, 4], [[2], [2, 2]])[0],
    "to_host": torch.ops.fzero.to_host.default,
    "to_device": lambda x: torch.ops.fzero.to_device.default(x, torch.device("cpu")),
    "_reshape_alias": lambda x: aten._reshape_alias.default(x, [6], [1]),
}


@pytest.mark.parametrize("name", rows(_OperationTraits.LINEAR))
def test_operations_marked_linear_are_linear(name):
    x, y = torch.arange(6.0), 2.0 ** torch.arange(6)
    torch.testing.assert_close(CALLS[name](x + y), CALLS[name](x) + CALLS[name](y))


@pytest.mark.parametrize("name", rows(_OperationTraits.LAYOUT))
def test_operations_of_layout_change_no_value(name):
    x = torch.arange(1.0, 7.0)
    result = CALLS[name](x)
    assert result[result != 0].tolist() == x.tolist()


@pytest.mark.parametrize("name", rows(_OperationTraits.VIEW))
def test_a_view_lies_in_its_operands_memory(name):
    x = torch.arange(6.0).view(2, 3)
    assert CALLS[name](x).data_ptr() == x.data_ptr()


def test_operations_that_torch_describes_need_no_row():
    b = graphs.Builder(2, [(4, 4)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    (x,) = b.inputs
    assert is_cheap(b(aten.tanh.default, x)) and is_view(b(aten.t.default, x))
    assert not is_cheap(b(aten.mm.default, x, x)) and not is_cheap(b(aten.rand_like.default, x))
    both = b(aten.var_mean.correction, x, [0], correction=0)
    assert is_cheap(both) and is_view(b(operator.getitem, both, 0))


def test_no_operation_that_draws_may_run_twice():
    """Torch calls `rrelu` pointwise, and such operations are cheap unless they draw."""
    draw_count = 0
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if name.startswith("aten::") and operation is not None and torch.Tag.nondeterministic_seeded in operation.tags:
            draw_count += 1
            assert not is_known_cheap(operation), name
    assert draw_count > 100


def test_uninitialised_memory_is_not_recomputed():
    """Another run would find other bytes in it."""

    def count(name: str) -> int:
        b = graphs.Builder(2, [(64, 128)], [{"label": "x", "kind": "parameters", "block": ""}], False)
        (x,) = b.inputs
        result = b(getattr(aten, name).default, x)
        h, square = b(aten.add.Tensor, x, result), b(aten.mm.default, x, b(aten.t.default, x))
        for _ in range(20):
            h = b(aten.tanh.default, h)
        for _ in range(2):
            h = b(aten.mm.default, square, h)
        graph = recompute(b.done([b(aten.mm.default, b(aten.t.default, h), result)]), 1)
        return sum(str(n.target) == f"aten.{name}.default" for n in graph.nodes)

    assert (count("zeros_like"), count("empty_like")) == (2, 1)


def test_a_constant_is_made_right_before_it_is_used():
    b = graphs.Builder(2, [(4, 4)], [{"label": "x", "kind": "parameters", "block": ""}], False)
    (x,) = b.inputs
    ones = b(aten.full.default, [4, 4], 1.0)
    graph = schedule(b.done([b(aten.mm.default, b(aten.mm.default, x, x), ones)]))
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    assert is_factory(nodes[1]) and len(nodes) == 3


def test_the_number_of_a_ranks_gpu_is_no_difference_between_ranks():
    def node_signatures_of_rank(rank: int) -> list[str]:
        b = graphs.Builder(2, [(4,)], [{"label": "x", "kind": "parameters", "block": ""}], False)
        graph = b.done([b(aten.mul.Tensor, b.inputs[0], 2.0)])
        (node,) = [n for n in graph.nodes if n.target is aten.mul.Tensor]
        node.kwargs = {"device": torch.device("cuda", rank)}  # as `aten._to_copy` has it
        return _node_signatures(graph)

    assert node_signatures_of_rank(0) == node_signatures_of_rank(1) and "'cuda'" in node_signatures_of_rank(0)[0]


def test_how_a_rank_cuts_out_its_shard_is_no_difference_between_ranks():
    def cut(rank: int) -> list[str]:
        b = graphs.Builder(2, [(6,), (4,)], [{"label": x, "kind": "parameters", "block": ""} for x in "xy"], False)
        x, y = b.inputs
        piece = b(aten.slice.Tensor, x, 0, 4 * rank, 4 * rank + 4)
        piece = b(aten.constant_pad_nd.default, piece, [0, 2]) if rank else piece
        return _node_signatures(b.done([b(aten.mul.Tensor, piece, y)]))

    assert cut(0) == cut(1) and len(cut(0)) == 1
