"""Micro-batches that are not a loop, since their iterations differ: they are traced one by one."""

from typing import Any

import numpy
import pytest
import torch

import fzero
from fzero._notice import warn_once
from fzero.graph.loop import _loop_marks
from tests.graph.helpers import bitwise
from tests.graph.loops import ADAMW, assert_draws_alike, loops
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


def test_values_that_an_iteration_leaves_behind_are_traced_one_by_one_and_reported(caplog):
    warn_once.cache_clear()

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        left = []

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            left.append(x.sum())
            return (w * x).sum()

        return fzero.value_and_grad(loss, micro_batches=3)(w, x), sum(left)

    w, x = torch.randn(2), torch.randn(6, 2)
    jitted = fzero.jit(step, backend="fx")
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)
    (said,) = [r.getMessage() for r in caplog.records if "micro-batch" in r.getMessage()]
    assert "fzero.jit(step): the second micro-batch computes something other" in said or "leaves the loop" in said
    assert "test_unrolled.py" in said


def make_chained(how: str) -> Any:
    """A step whose micro-batches depend on one another through Python."""

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        state, numbers, memory = [torch.ones(2)], iter(range(1, 100)), {}

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            y = (w * x).sum()
            if how == "a value":
                y, state[0] = y * state[0].sum(), state[0] * 0.9 + x.mean()
            if how == "a value that no iteration changes":
                y, state[0] = y * state[0].sum(), state[0] * 0.9
            if how == "a number":
                y = y * next(numbers)
            if how == "a tensor":
                y = y * TENSORS[next(numbers)]
            if how == "a list":
                state.append(w.detach() * 2)
            if how == "the first batch":
                memory.setdefault("x", x.mean(0))
                y = y * memory["x"].sum()
            if how == "the first noise":
                memory.setdefault("x", torch.rand(2))
                y = y * memory["x"].sum()
            if how == "the first loss":
                return memory.setdefault("y", y)
            return y

        grad = fzero.value_and_grad(loss, micro_batches=3)(w, x)
        return grad, sum(state) if how == "a list" else 0 * w

    return step


TENSORS = torch.arange(9.0).unbind()
CHAINS = ("a value", "a value that no iteration changes", "a number", "a tensor", "a list")
CHAINS += ("the first batch", "the first noise", "the first loss")


@pytest.mark.parametrize("how", CHAINS)
def test_iterations_that_depend_on_one_another_are_traced_one_by_one(how):
    step, w, x = make_chained(how), torch.randn(2), torch.randn(6, 2)
    jitted = fzero.jit(step, backend="fx")
    assert_draws_alike(jitted, step, w, x)
    assert not loops(jitted)
    dropped = fzero.jit(lambda w, x: step(w, x)[0][1], backend="fx")  # without the loss
    assert_draws_alike(dropped, lambda w, x: step(w, x)[0][1], w, x)


@pytest.mark.parametrize("what", ["a number", "an order", "an array", "a tensor or none"])
def test_aux_that_python_changes_is_traced_one_by_one(what):
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        numbers = iter(range(9))

        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            i = next(numbers)
            aux = {
                "a number": i,
                "an order": [x + 1, x + 2][:: -1 if i == 1 else 1],
                "an array": numpy.arange(3) + i,
                "a tensor or none": x.sum() if i == 1 else None,
            }
            return (w * x).sum(), aux[what]

        (y, aux), grad = fzero.value_and_grad(loss, has_aux=True, micro_batches=3)(w, x)
        return y, grad, aux if what == "an order" else x.sum() if aux is None else torch.as_tensor(aux)

    jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)


def test_a_value_that_a_loss_stored_elsewhere_is_refused_as_a_result():
    """It belongs to the transform that has ended; once it was handed out as a stand-in without values."""

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        left = []

        def loss(w: torch.Tensor) -> torch.Tensor:
            left.append(w * 2)
            return left[-1].sum()

        return torch.func.grad(loss)(w), left[0]

    with pytest.raises(RuntimeError, match=r"the step uses a value .* a differentiated function stored it"):
        fzero.jit(step, backend="fx")(torch.ones(2), torch.ones(2))


def test_loop_false_unrolls_the_micro_batches():
    f = fzero.value_and_grad(lambda w, x: (w * x).sum(), micro_batches=3)
    jitted, w, x = fzero.jit(f, backend="fx", loop=False), torch.randn(2), torch.randn(6, 2)
    jitted(w, x)
    assert not loops(jitted)
    with pytest.raises(ValueError, match=r"loop=3: expected True or False"):
        fzero.jit(f, loop=3)


def test_a_derivative_around_the_micro_batches_unrolls_them():
    f = fzero.value_and_grad(lambda w, x: ((w * 2 - x) ** 3).mean(), micro_batches=3)
    w, x = torch.randn(3), torch.randn(6, 3)
    for g in (
        lambda w, x: torch.func.jvp(lambda w: f(w, x), (w,), (torch.ones(3),)),
        lambda w, x: torch.func.jacfwd(lambda w: f(w, x)[1])(w),
        lambda w, x: torch.func.grad(lambda s: f(w * s, x)[0])(torch.ones(3)),
        lambda w, x: torch.func.grad(
            lambda s: fzero.value_and_grad(lambda w, x: (w * s - x).square().mean(), micro_batches=3)(w, x)[0]
        )(w),
    ):
        jitted = fzero.jit(g, backend="fx")
        bitwise(jitted(w, x), g(w, x))
        assert not loops(jitted)


def test_micro_batches_of_a_gradient_in_a_loss_are_unrolled():
    inner = fzero.value_and_grad(lambda w, x: (w * x).square().sum(), micro_batches=3)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x * inner(x.sum(0).detach(), x)[1]).sum()

    f = fzero.value_and_grad(loss, micro_batches=4)
    jitted, w, x = fzero.jit(lambda w, x: f(w, x), backend="fx"), torch.randn(2), torch.randn(12, 2)
    bitwise(jitted(w, x), f(w, x))
    assert [loop.iterations for loop in loops(jitted)] == [4]


def test_a_batch_that_is_differentiated_is_unrolled():
    f = fzero.value_and_grad(lambda w, x: (w * x).square().sum(), argnums=(0, 1), micro_batches=3)
    step = fzero.mesh(dp=2).spmd(lambda w, x: f(w, fzero.PerRank(x)))
    w, x = torch.randn(2), fzero.mesh(dp=2).split(torch.randn(12, 2))
    jitted = fzero.jit(step, backend="fx")
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)


def test_a_micro_batch_that_leaves_a_value_outside_of_the_step_is_refused():
    left: list[torch.Tensor] = []

    def loss(params: Any, batch: Any) -> torch.Tensor:
        left.append(batch["x"].mean())
        return mlp_loss(params, batch) + 0 * sum(left)

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=1, mesh=fzero.mesh(dp=2), check=False)
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(6)))
    with pytest.raises(RuntimeError, match=r"micro-batch stored it outside the step.*loop=False"):
        fzero.jit(step, backend="fx")(*args)
    left.clear()
    fzero.jit(step, backend="fx", loop=False)(*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(6)))


def test_only_jit_traces_micro_batches_as_iterations():
    f = fzero.value_and_grad(lambda w, x: (w * x).sum(), micro_batches=4)
    graph = torch.fx.experimental.proxy_tensor.make_fx(f)(torch.ones(2), torch.ones(4, 2)).graph
    assert not [n for n in graph.nodes if "fzero" in str(n.target)]
    with pytest.raises(AssertionError, match="outside a trace"):
        _loop_marks.iteration(3)


@pytest.mark.slow
def test_torch_compile_of_the_eager_step_runs_every_iteration():
    torch._dynamo.reset()
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(12)))
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    bitwise(compiled(*args), step(*args))
