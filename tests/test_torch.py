"""The private torch API that fzero uses, one test each: what fails here says what broke when torch changed."""

import warnings
from typing import ClassVar

import optree
import pytest
import torch
from torch.utils import _pytree as pytree

from fzero import _torch


def test_versions():
    assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11)


def test_functional_collectives_exist():
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        assert hasattr(_torch.c10d, name)


class _Ordered(torch.autograd.Function):
    order: ClassVar[list[str]] = []

    @staticmethod
    def forward(x: torch.Tensor, name: str) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        _Ordered.order.append(ctx.name)
        return grad, None


@pytest.mark.parametrize("raised", [True, False])
def test_raised_priority_runs_a_node_as_soon_as_its_gradient_exists(raised):
    """Inside torch.func.grad too. Without it the first node of the forward pass runs last."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        first = _Ordered.apply(x, "gather")
        if raised:
            _torch.raise_priority(first)
        y = _Ordered.apply(x * 2, "early layer")
        return (_Ordered.apply(y, "late layer") * first).sum()

    _Ordered.order.clear()
    torch.func.grad(loss)(torch.ones(2))
    assert _Ordered.order.index("gather") == (0 if raised else 2)


def test_is_tracing_knows_make_fx_and_dynamo():
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_tracing())
        return x + 1

    f(torch.ones(1))
    make_fx(f)(torch.ones(1))
    assert seen == [False, True]
    assert torch.compile(lambda x: x + (1 if _torch.is_tracing() else 0), backend="eager")(torch.zeros(1)).item() == 1


def test_boxes_are_nodes_for_torch_and_optree():
    class Pair:
        def __init__(self, child: torch.Tensor, static: int) -> None:
            self.child, self.static = child, static

    _torch.register_box(Pair, lambda p: ((p.child,), p.static), lambda s, c: Pair(c[0], s))
    pair = Pair(torch.ones(2), 7)
    for mapped in (pytree.tree_map(lambda x: x + 1, pair), optree.tree_map(lambda x: x + 1, pair)):
        assert mapped.static == 7 and mapped.child.tolist() == [2, 2]
    assert pytree.tree_flatten_with_path(pair)[0][0][1] is pair.child


def test_vmap_fallback_warning_is_silent_only_inside():
    q = torch.randn(2, 1, 1, 3, 4)

    def attend() -> None:
        torch.vmap(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))(q)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _torch.quiet_vmap_fallback():
            attend()
        with pytest.raises(UserWarning, match="batching rule"):
            attend()


def test_assume_constant_result_runs_for_real_under_dynamo():
    ran: list[tuple[str, tuple[int, ...]]] = []

    @_torch.assume_constant_result
    def note(name: str, shape: tuple[int, ...]) -> int:
        ran.append((name, shape))
        return 5

    f = torch.compile(lambda x: x + note("a", tuple(int(d) for d in x.shape)), backend="eager", fullgraph=True)
    assert f(torch.zeros(3)).tolist() == [5, 5, 5]
    assert ran == [("a", (3,))]


class _Doubled(torch.autograd.Function):
    """The identity, whose gradient is custom: 2 where 1 would be right."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_allow_in_graph_keeps_a_custom_backward_under_compile():
    """pytorch#193279: an autograd.Function that Dynamo inlines under torch.func loses its backward, silently.

    fzero therefore calls its Functions through `allow_in_graph`, which this test watches.
    """

    @_torch.allow_in_graph
    def double(x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x)

    grad = torch.func.grad(lambda x: double(x).sum())
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        assert torch.compile(grad, backend=backend, fullgraph=True)(torch.ones(2)).tolist() == [2, 2]
