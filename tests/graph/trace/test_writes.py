"""What a jitted step writes: into values of its own as the eager step does, into anything else never without a word."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import hessian, linearize, vmap

import fzero
from fzero import tree
from tests.helpers import examples

Tensors = list[torch.Tensor]

# Each writes into the tensors of `xs`, reading those of `ys`.
IN_PLACE: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "_foreach_mul_": lambda xs, ys: torch._foreach_mul_(xs, 2.0),
    "_foreach_add_ of a list": lambda xs, ys: torch._foreach_add_(xs, ys, alpha=3),
    "_foreach_copy_": lambda xs, ys: torch._foreach_copy_(xs, ys),
    "_foreach_lerp_ by keyword": lambda xs, ys: torch._foreach_lerp_(self=xs, tensors1=ys, weight=0.25),
    "out= of two": lambda xs, ys: torch.frexp(xs[0], out=(xs[1], torch.empty(3, dtype=torch.int32))),
    "out=": lambda xs, ys: torch.add(xs[0], ys[0], out=xs[1]),
    "a slice": lambda xs, ys: xs[0][1:].mul_(ys[0][1:]),
    "set_": lambda xs, ys: xs[0].set_(ys[0] * 2),
    "resize_": lambda xs, ys: xs[0].resize_(2),
    "through detach": lambda xs, ys: xs[0].detach().mul_(2),
    "batch norm": lambda xs, ys: F.batch_norm(ys[0][:, None].expand(3, 3), xs[0], xs[1], training=True),
    "embedding": lambda xs, ys: F.embedding(torch.tensor([0]), xs[0].view(1, 3), max_norm=0.5),
}


def values(n: int = 2) -> Tensors:
    return [torch.arange(1.0 + i, 4.0 + i) for i in range(n)]


@examples(6, 25)
@given(names=st.lists(st.sampled_from(sorted({*IN_PLACE} - {"set_", "resize_"})), min_size=1, max_size=3))
def test_a_jitted_step_may_write_into_tensors_that_it_made(names):
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        xs = [x * 2, y + 1]
        view = xs[1][:2]
        for name in names:
            IN_PLACE[name](xs, [y, x])
        return xs, view * 2, x

    got, expected = fzero.jit(step, backend="fx")(*values()), step(*values())
    for a, b in zip(tree.tensors(got), tree.tensors(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_write_into_an_argument_is_refused(name):
    xs, ys = values(), values()
    before = [x.clone() for x in xs]
    step = fzero.jit(lambda p, q: (IN_PLACE[name](p, q), q)[1], backend="fx")
    with pytest.raises(RuntimeError, match=r"writes into argument 0, leaf '[01]' in place .* at .*test_writes\.py:\d+"):
        step(xs, ys)
    assert all(torch.equal(x, y) for x, y in zip(xs, before, strict=True))


def test_a_list_written_among_captured_tensors_is_refused():
    counter = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([x * 1, counter], 1.0)
        return x

    with pytest.raises(RuntimeError, match="writes into a captured tensor in place"):
        fzero.jit(step, backend="fx")(torch.ones(3))


def test_a_step_with_foreach_trains_as_the_eager_one():
    def train_step(params: Any, momentum: Any, x: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"] - p["b"]).square().mean())(params, x)
        gs, (ms, structure) = tree.tensors(grads), tree.flatten(momentum)
        ms, ps = [m.clone() for m in ms], [p.clone() for p in tree.tensors(params)]
        torch._foreach_mul_(ms, 0.9)
        torch._foreach_add_(ms, gs)
        torch._foreach_add_(ps, ms, alpha=-0.1)
        return tree.unflatten(structure, ps), tree.unflatten(structure, ms), loss

    params = {"w": torch.linspace(-1, 1, 6).view(3, 2), "b": torch.ones(2)}
    eager = fast = (params, tree.map(torch.zeros_like, params))
    jitted = fzero.jit(train_step, backend="fx")
    for i in range(3):
        x = torch.linspace(-1, 1 + i, 12).view(4, 3)
        *eager, loss = train_step(*eager, x)
        *fast, other = jitted(*fast, x)
        for a, b in zip(tree.tensors((eager, loss)), tree.tensors((fast, other)), strict=True):
            assert torch.equal(a, b)


def assigns(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.data = x * 2
    return y + 0


def accumulates(x: torch.Tensor) -> Any:
    x.requires_grad_()
    (x * 2).sum().backward()
    return x.grad


@torch.library.custom_op("fzero_tests::write", mutates_args=("x",))
def write(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("fzero_tests::write_all", mutates_args=("xs",))
def write_all(xs: Tensors) -> None:
    for x in xs:
        x.add_(1)


KEPT: dict[str, torch.Tensor] = {}


def keeps(x: torch.Tensor) -> torch.Tensor:
    if not KEPT:
        KEPT["x"] = x * 2
    return x + KEPT["x"].view(-1)[0]


def updates(x: torch.Tensor) -> Any:
    return torch.batch_norm_update_stats(x[:, None], x[:1] * 1, x[:1] * 1, 0.1)


UNTRACEABLE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "x.data = y": (assigns, r"assigns to a tensor's \.data at .*test_writes\.py:\d+"),
    "x.grad": (accumulates, r"writes into argument 0, its \.grad"),
    "an operation that writes": (lambda x: (write(y := x * 1), y), r"custom .*write.default\) at .*test_writes"),
    "a list of it": (lambda x: (write_all([y := x * 1]), y), r"custom .*write_all.default\) at .*test_writes"),
    "hidden statistics": (updates, r"batch norm .*batch_norm_update_stats.default\) at .*test_writes\.py:\d+"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_side_effects_that_a_graph_cannot_hold_are_refused(name):
    f, message = UNTRACEABLE[name]
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=message):
        fzero.jit(f, backend="fx")(x)
    assert x.tolist() == [1, 1, 1] and x.grad is None


def test_a_value_kept_from_an_earlier_trace_is_refused():
    KEPT.clear()
    step = fzero.jit(keeps, backend="fx")
    step(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"uses at .*test_writes\.py:\d+ a value that another trace computed"):
        step(torch.ones(4))


X, T = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 2, 1])
W = torch.linspace(-2, 1, 9).view(3, 3)


@pytest.mark.slow
def test_hessians_of_each_example_jit():
    def loss(w: torch.Tensor, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x @ w)[None], t[None])

    f = vmap(hessian(loss), (None, 0, 0))
    assert torch.equal(fzero.jit(f, backend="fx")(W, X, T), f(W, X, T))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # linearize's own
def test_linearize_jits_or_says_why_it_cannot():
    def tangent(w: torch.Tensor) -> Any:
        y, push = linearize(lambda v: torch.tanh(X @ v), w)
        return y, push(w)

    for a, b in zip(fzero.jit(tangent, backend="fx")(W), tangent(W), strict=True):
        assert torch.equal(a, b)
    nested = torch.func.grad(lambda w: linearize(lambda v: torch.tanh(X @ v).sum(), w)[1](w))
    with pytest.raises(RuntimeError, match=re.escape("torch.func.linearize traces by itself: use torch.func.jvp")):
        fzero.jit(nested, backend="fx")(W)


def test_a_copy_of_a_captured_tensor_may_be_written_into():
    """batch_norm writes so into its running statistics, which `fzero.nn.functional` has copied."""
    mean, var = torch.randn(3), torch.rand(3)
    before = mean.clone()

    def loss(w, x):
        return torch.nn.functional.batch_norm(x * w, mean.clone(), var.clone(), training=True).square().sum()

    x = torch.randn(5, 3)
    gradient = torch.func.grad(loss)
    torch.testing.assert_close(fzero.jit(gradient, backend="fx")(torch.ones(3), x), gradient(torch.ones(3), x))
    assert torch.equal(mean, before)


def test_a_global_nan_does_not_count_as_changed():
    limit = float("nan")
    step = fzero.jit(lambda x: torch.where(x > 0, x, limit), backend="fx")
    assert step(torch.tensor([1.0, -1.0])).isnan().tolist() == [False, True]
