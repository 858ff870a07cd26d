"""value_and_grad(autograd=True): torch.autograd differentiates, with torch.func's numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.helpers import examples


class Doubled(torch.autograd.Function):
    """Returns its input, and doubles the gradient; it has no `setup_context`, so torch.func refuses it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def loss(params, batch):
    return ((torch.tanh(batch @ params["w"]) @ params["v"] + params["b"]) ** 2).mean()


def values(rows, dtype=torch.float64):
    torch.manual_seed(0)
    params = {
        "w": torch.randn(3, 5, dtype=dtype),
        "v": torch.randn(5, 2, dtype=dtype),
        "b": torch.randn((), dtype=dtype),
    }
    return params, torch.randn(rows, 3, dtype=dtype)


def train(n, stage, k, autograd, f=loss):
    """Train three steps on n ranks in lockstep; return the parameters and the last loss."""
    mesh = fzero.mesh(dp=n, simulate="lockstep")
    opt = optim.adam(0.1)

    def train_step(params, opt_state, batch):
        value, grads = fzero.value_and_grad(f, micro_batches=k, autograd=autograd)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    params, batch = values(n * k * 2)
    params, state = step.init(params, opt)
    for _ in range(3):
        params, state, value = step(params, state, mesh.split(batch))
    return step.gather(params), value


@examples(4, 100)
@given(n=st.integers(1, 4), stage=st.integers(0, 3), k=st.integers(1, 3))
def test_gradients_by_plain_autograd_equal_those_of_torch_func(n, stage, k):
    assert_trees_close(train(n, stage, k, autograd=True), train(n, stage, k, autograd=False))


@pytest.mark.parametrize("stage", [0, 3])
def test_autograd_differentiates_a_function_of_the_old_form(stage):
    def double_loss(params, batch):
        return Doubled.apply(loss(params, batch))

    with pytest.raises(RuntimeError):
        train(2, stage, 1, autograd=False, f=double_loss)
    result = train(2, stage, 1, autograd=True, f=double_loss)
    # adam's steps do not depend on the gradients' size, but for its eps
    torch.testing.assert_close(result, train(2, stage, 1, autograd=False), rtol=1e-5, atol=1e-5)
    params, batch = values(4)
    of_loss, of_doubled = (
        fzero.value_and_grad(loss)(params, batch),
        fzero.value_and_grad(double_loss, autograd=True)(params, batch),
    )
    assert_trees_close(of_doubled[1], {name: 2 * g for name, g in of_loss[1].items()})
    assert not of_doubled[0].requires_grad


def test_autograd_returns_aux_and_zeros_for_unused_parameters():
    def f(params, batch):
        return (batch @ params["w"]).sum(), {"mean": batch.mean(), "name": "aux"}

    params, batch = values(4)
    expected = fzero.value_and_grad(f, has_aux=True)(params, batch)
    actual = fzero.value_and_grad(f, has_aux=True, autograd=True)(params, batch)
    assert actual[0][1]["name"] == "aux"
    assert_trees_close(
        (actual[0][0], actual[0][1]["mean"], actual[1]), (expected[0][0], expected[0][1]["mean"], expected[1])
    )

    def late(params, batch):
        return (batch @ params["w"]).sum() if batch[0, 0] > 0 else batch.sum()

    batch[:2] = -batch[:2].abs()
    batch[2:] = batch[2:].abs()
    grads = fzero.value_and_grad(late, autograd=True, micro_batches=2)(params, batch)[1]
    assert torch.equal(grads["w"][:, 0], batch[2:].sum(0) / 2) and not grads["b"].any()


def test_autograd_is_refused_within_a_transform():
    params, batch = values(4)
    inner = fzero.value_and_grad(loss, autograd=True)
    with pytest.raises(ValueError, match="autograd=True works where no transform is around the call"):
        fzero.jit(lambda p, b: inner(p, b), backend="fx")(params, batch)
    with pytest.raises(ValueError, match='simulate="lockstep"'):
        fzero.mesh(dp=2).spmd(inner)(params, fzero.mesh(dp=2).split(batch))
