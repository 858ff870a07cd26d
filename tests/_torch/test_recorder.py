"""The private torch API that records operations: what fails here says what broke when torch changed."""

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn import functional

import fzero
from fzero import _torch
from fzero._torch import recorder
from fzero.sharding.maps._flat import flatten_leaves


def in_place(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    z = x + y
    view = z[0]
    z.mul_(2)
    z.t_()
    torch.add(x, y, out=z.t())
    return [z, view, z.unsqueeze_(0)]


def tuples(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    normed, mean, _ = torch.native_layer_norm(x, [4], y[0], None, 1e-5)
    first, second = x.split([1, 3])
    values, places = x.topk(2)
    return [normed, mean, *x.unbind(), first, second, values, places, *torch._foreach_add([x, y], [y, x])]


def kinds(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    rows = torch.tensor([1, 0])
    made = torch.zeros(4, 4, dtype=torch.float64, device=x.device) + torch.arange(4)
    some = torch.where(x > 0, x.to(torch.bfloat16).float(), torch.full_like(y, float("inf")))
    return [x[rows], x[:, rows], made, some, torch.einsum("ij,jk->ik", x, y), x.real, x.detach(), x.view(torch.int32)]


def transforms(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]).square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1))(x, y)
    each = torch.func.vmap(torch.func.grad(lambda row, y: (y @ row).tanh().sum()), in_dims=(0, None))(x, y)
    _, tangent = torch.func.jvp(lambda x: functional.softmax(x, -1), (x,), (y,))
    return [*grads, each, tangent, torch.func.jacrev(torch.func.grad(lambda v: (v @ y @ v).sin()))(x[0])]


def random(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [functional.dropout(x, 0.5), torch.randn(2, 3), torch.randint(9, (3,)), x.clone().uniform_()]


def counters(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    size = torch.tensor(3)
    size.add_(1)
    return [x * (size + 1).item(), y + size]


def constants(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Write known numbers into constants through views of them, and read them."""
    number, row, flag = torch.tensor(3.0), torch.tensor([1.0]), torch.tensor([True])
    number.view(1).mul_(2)
    torch.add(number.unsqueeze(0), 1, out=number.unsqueeze(0))
    row[0] = 5.0
    row.detach().add_(1)
    flag[0] = False
    return [x * number.item(), x * row.item(), -x if flag else x]


def list_operations(graph: Graph) -> list[Any]:
    """List what a graph computes, in order, and which of its values share memory."""
    memory: dict[int, int] = {}

    def value(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x if not isinstance(x, tuple | list) else [value(y) for y in x]
        place = memory.setdefault(_torch.storage_id(x), len(memory))
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, type(x), x.requires_grad, place

    def name_value(a: Node) -> str:
        return f"%{a.name}"

    rows = []
    for n in graph.nodes:
        args, kwargs = map_arg(n.args, name_value), map_arg(n.kwargs, name_value)
        rows.append((n.name, n.op, str(n.target), str(args), str(kwargs), value(n.meta.get("val"))))
    return rows


def record_both(f: Callable[..., Any], *xs: torch.Tensor) -> tuple[Graph, Graph]:
    """Record a function, and have make_fx alone do it."""
    stand_ins = _torch.stand_ins_like(xs)
    mine = _torch.trace(f, stand_ins)
    stand_ins = _torch.stand_ins_like(xs)
    with stand_ins[0].fake_mode:
        other = make_fx(lambda *xs: f(*xs), _allow_non_fake_inputs=True)(*stand_ins)
    for graph in (mine.graph, other.graph):
        graph.eliminate_dead_code()
    return mine.graph, other.graph


@pytest.mark.parametrize("f", [in_place, tuples, kinds, transforms, random, counters, constants])
def test_a_trace_is_what_make_fx_records(f):
    """From torch 2.15 on make_fx writes a detach as an alias, which is a view as well."""
    mine, other = record_both(f, torch.randn(4, 4), torch.randn(4, 4))
    assert [with_aliases(x) for x in list_operations(mine)] == [with_aliases(x) for x in list_operations(other)]


def with_aliases(described: Any) -> Any:
    return [str(x).replace("detach", "alias") for x in described]


def test_numbers_that_are_written_through_views_are_read():
    x = torch.randn(4, 4)
    gm = _torch.trace(lambda x: constants(x, x), _torch.stand_ins_like([x]))
    assert all(torch.equal(a, b) for a, b in zip(gm(x), [7 * x, 6 * x, x], strict=True))


def test_a_constant_that_data_is_written_into_has_no_value_to_read():
    """make_fx alone would read the old one."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        row = torch.tensor([1.0])
        row[0] = x[0]
        return [x * row.item()]

    def g(x: torch.Tensor) -> list[torch.Tensor]:
        row = torch.tensor([1.0])
        torch._foreach_copy_([row], [x[:1]])
        return [x * row.item()]

    for step in (f, g):
        with pytest.raises(RuntimeError, match="the step reads the value of a tensor in Python"):
            fzero.jit(step, backend="fx")(torch.ones(2))


def test_operations_are_recorded_without_make_fx(monkeypatch):
    recorded = []
    before = recorder._record_node
    monkeypatch.setattr(
        recorder, "_record_node", lambda tracer, f, *rest, **by: recorded.append(f) or before(tracer, f, *rest, **by)
    )
    graph, _ = record_both(transforms, torch.randn(4, 4), torch.randn(4, 4))
    count = len([n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem])
    assert len(recorded) >= count > 20


def test_operations_that_the_recorder_does_not_know_are_left_to_make_fx():
    aten = torch.ops.aten
    plain = [aten.add.Tensor, aten.add_.Tensor, aten.split_with_sizes.default, aten.native_dropout.default]
    others = [aten.matmul.default, aten.lift_fresh.default, aten._local_scalar_dense.default, aten.nonzero.default]
    assert [recorder._is_plain(f) for f in plain + others] == [True] * 4 + [False] * 4
    assert not recorder._is_plain(torch.ops.higher_order.cond) and not recorder._is_plain(aten.equal.default)


def test_nodes_say_whether_they_are_of_a_backward_pass():
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.func.grad(lambda x: (x.sin() * x).sum())(x).exp()]

    graph = _torch.trace(f, _torch.stand_ins_like([torch.ones(3)])).graph
    of = {str(n.target): _torch.is_backward(n) for n in graph.nodes if n.op == "call_function"}
    assert of["aten.cos.default"] and not of["aten.sin.default"] and not of["aten.exp.default"]


def test_nodes_carry_their_source_line_and_the_users_annotations():
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.fx.traceback.annotate({"mine": 3}):
            y = x.sin()
        return [y.cos()]

    graph = _torch.trace(f, _torch.stand_ins_like([torch.ones(2)])).graph
    sin, cos = [n for n in graph.nodes if n.op == "call_function"]
    assert [_torch.node_line(n).split(":")[0] for n in (sin, cos)] == [__file__, __file__]
    assert sin.meta["custom"]["mine"] == 3 and "mine" not in cos.meta["custom"]


def halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:1] * 1, x[1:] * 1]


one_node = _torch.OneNode(halves)


def calls(graph: Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def test_a_function_is_recorded_as_one_node_whose_results_are_its_items():
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        first, second = one_node(x.sin())
        return [first, second.cos()]

    gm = _torch.trace(f, _torch.stand_ins_like([torch.ones(4)]))
    assert calls(gm.graph) == [torch.ops.aten.sin.default, one_node, torch.ops.aten.cos.default]
    (node,) = [n for n in gm.graph.nodes if n.target is one_node]
    assert [tuple(x.shape) for x in node.meta["val"]] == [(1,), (3,)]
    assert _torch.node_line(node).split(":")[0] == __file__
    x = torch.randn(4)
    assert all(torch.equal(a, b) for a, b in zip(gm(x), f(x), strict=True))


def test_under_a_transform_a_one_node_function_is_traced_as_its_operations():
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.func.vmap(lambda row: torch.cat(one_node(row)))(x),
            torch.func.grad(lambda v: one_node(v)[0].sum())(x[0]),
        ]

    gm = _torch.trace(f, _torch.stand_ins_like([torch.ones(2, 4)]))
    assert one_node not in calls(gm.graph)
    x = torch.randn(2, 4)
    assert all(torch.equal(a, b) for a, b in zip(gm(x), f(x), strict=True))


def test_make_fx_traces_a_one_node_function_as_its_operations():
    assert one_node not in calls(make_fx(lambda x: one_node(x), tracing_mode="fake")(torch.ones(4)).graph)


def test_a_one_node_function_has_the_same_name_in_all_processes():
    assert repr(one_node) == f"{__name__}.halves" and one_node.__name__ == "halves"
    assert pickle.loads(pickle.dumps(flatten_leaves)) is flatten_leaves


def test_results_after_a_none_keep_their_positions():
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        none, slope, _ = torch.ops.aten.convolution_backward(
            y, x, x[:1], None, [1], [0], [1], False, [0], 1, [False, True, False]
        )
        assert none is None
        return [slope]

    x, y = torch.randn(4, 1, 4), torch.randn(4, 1, 1)
    gm = _torch.trace(f, _torch.stand_ins_like([x, y]))
    assert torch.equal(gm(x, y)[0], f(x, y)[0])
