"""The loss scale: a step is skipped on all ranks or on none, and the scale leaves no trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero._notice import warn_once
from fzero.testing import assert_trees_close, trees, world_sizes
from tests.helpers import ALL_STAGES, cases, examples
from tests.precision_steps import step_of, train, train_unsharded, wide_norm

WAYS = [(1, 2, 0, "nan"), (4, 1, 1, "inf"), (4, 1, 3, "nan"), (3, 3, 2, "nan"), (3, 3, 3, "inf")]


@pytest.mark.parametrize(
    "n,k,stage,value",
    cases(WAYS, [(*w, s, v) for w in ((1, 2), (4, 1), (3, 3)) for s in range(4) for v in ("inf", "nan")]),
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage, n, k, value):
    """One sample of one micro-batch of one rank overflows; parameters and state keep their bits; the run goes on."""
    precision = fzero.Precision(torch.float16, full=wide_norm)
    optimizer = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), precision)
    opt = optim.dynamic_loss_scale(optimizer, 64.0, growth_interval=2)
    train_step = step_of(opt, scaled=True, micro_batches=k, precision=precision)
    mesh = fzero.mesh(simulate=True, dp=n)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init({"w": torch.tensor([-0.0, 0.0, 1.0, -2.0, 3.0]), "n": torch.ones(3), "0": torch.ones(())}, opt)
    good = torch.ones(2 * n * k)
    bad = good.clone()
    bad[-2] = float(value)
    before = [x.clone() for x in tree.tensors((state[0], state[1].inner))]
    *state, _ = step(*state, mesh.split(bad))
    after = tree.tensors((state[0], state[1].inner))
    assert all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True) if x.ndim
    )
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True) if not x.ndim)
    assert (state[1].scale, state[1].growth, state[1].skipped) == (32.0, 0, 1)
    for _ in range(2):  # it goes on
        *state, loss = step(*state, mesh.split(good))
    assert (state[1].scale, state[1].growth, state[1].skipped) == (64.0, 0, 1)
    assert loss.isfinite() and not torch.equal(before[0], tree.tensors(state[0])[0])


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_a_loss_scale_changes_no_result(stage):
    """Loss and gradients are the true ones at any power of two, and what follows, clipping, sees no scale."""
    precision = fzero.Precision(torch.bfloat16)
    results = []
    for scale in (1.0, 2.0**20):
        optimizer = optim.chain(optim.clip(0.5), optim.clip_by_global_norm(2.0), optim.sgd(2.0**-3))
        opt = optim.static_loss_scale(optim.master_weights(optimizer, precision), scale)
        train_step = step_of(opt, scaled=True, reduce="sum", precision=precision)
        params, batches = {"w": torch.ones(5, 3), "v": torch.ones(4)}, [torch.ones(4), -torch.ones(4)]
        results.append(train(train_step, opt, params, batches, stage, fzero.mesh(dp=2)))
        assert_trees_close(results[-1][0], train_unsharded(train_step, opt, params, batches)[0], rtol=0.0)
    assert_trees_close(results[0][0], results[1][0], rtol=0.0)


def test_small_gradients_survive_in_half_precision_only_with_a_scale(caplog):
    warn_once.cache_clear()
    w = torch.ones(3, dtype=torch.float16)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w.float() * x).mean()

    precision = fzero.Precision(torch.float16)
    x = torch.full((3,), 2.0**-26)
    value, grad = fzero.scaled_value_and_grad(loss, 2.0**12, precision=precision)(w, x)
    assert not caplog.records
    assert value == loss(w, x)
    for _ in range(2):
        _, lost = fzero.value_and_grad(loss, precision=precision)(w, x)
    assert caplog.text.count("gradients in float16 below 6e-8 vanish: scale the loss") == 1
    assert lost.tolist() == [0.0] * 3
    torch.testing.assert_close(grad, x / 3, rtol=1e-3, atol=0)


def test_the_returned_loss_is_the_unscaled_one():
    w = torch.ones(2)
    value, grad = fzero.scaled_value_and_grad(lambda w: w.detach().sum() * 1e36 + w[0], 2.0**12)(w)
    assert value.item() == pytest.approx(2e36) and grad.tolist() == [1, 0]


def test_a_dynamic_loss_scale_grows_within_its_bounds():
    opt = optim.dynamic_loss_scale(optim.sgd(0.1), 4.0, growth_interval=2, minimum=2.0, maximum=8.0)
    params = {"w": torch.ones(2)}
    state, good, bad = opt.init(params), {"w": torch.ones(2)}, {"w": torch.tensor([1.0, float("nan")])}
    scales = []
    for grads in [good, good, good, good, bad, bad, bad, good, bad, good]:
        _, state = opt.update(grads, state, params)
        scales.append((state.scale.item(), state.growth.item(), state.skipped.item()))
    expected = [(4, 1, 0), (8, 0, 0), (8, 1, 0), (8, 0, 0), (4, 0, 1), (2, 0, 2), (2, 0, 3), (2, 1, 3)]
    assert scales == [*expected, (2, 0, 4), (2, 1, 4)]  # in a row: the good step before a bad one does not count


def test_higher_derivatives_go_through_a_scale():
    f = lambda w: (w**3).sum()  # noqa: E731
    w = torch.tensor([1.0, 2.0])
    inner = lambda w: fzero.scaled_value_and_grad(f, 8.0)(w)[1].sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(inner)(w), 6 * w)
    torch.testing.assert_close(torch.func.jvp(inner, (w,), (torch.ones(2),))[1], (6 * w).sum())
    value = lambda w: fzero.scaled_value_and_grad(f, 8.0)(w)[0]  # noqa: E731
    torch.testing.assert_close(torch.func.grad(value)(w), 3 * w**2)


@examples(20, 40)
@given(params=trees(), n=world_sizes(), bad=st.booleans(), data=st.data())
def test_all_finite_sees_every_rank(params, n, bad, data):
    leaves = [x for x in tree.tensors(params) if x.numel()]
    if bad and leaves:
        leaf = leaves[data.draw(st.integers(0, len(leaves) - 1))].view(-1)
        leaf[data.draw(st.integers(0, len(leaf) - 1))] = float("nan")
    f = lambda params: optim.all_finite(fzero.partition(params))  # noqa: E731
    assert fzero.mesh(simulate=True, dp=n).spmd(f)(params).item() == (not (bad and leaves))
