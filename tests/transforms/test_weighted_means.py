"""Weighted means over ranks and micro-batches are exact."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import assert_equivalent, assert_trees_close, stages, world_sizes
from tests.helpers import examples, mlp_batch, mlp_params
from tests.precision_steps import MICRO_BATCHES, token_loss


@examples(3, 40)
@given(
    stage=stages(), n=world_sizes(), k=MICRO_BATCHES, seed=st.integers(0, 99), scaled=st.booleans(), aux=st.booleans()
)
def test_a_token_weighted_mean_is_exact(stage, n, k, seed, scaled, aux):
    """Whatever the counts of ranks and micro-batches, those without a token among them: one mean over all tokens."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(2):
        batch = mlp_batch(2 * n * k, seed=seed + i)
        mask = (torch.rand(2 * n * k, generator=g) < 0.4).double()
        mask[: 2 * k] = 0.0  # the first rank has none
        mask[-1] = 1.0
        batches.append({**batch, "mask": mask})
    opt = optim.sgd(0.1, momentum=0.9)
    weighted = (lambda p, b: (token_loss(p, b), b["mask"])) if aux else token_loss

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        options: Any = {"reduce": "weighted", "micro_batches": k, "has_aux": aux}
        if scaled:
            value, grads = fzero.scaled_value_and_grad(weighted, 8.0, **options)(params, batch)
        else:
            value, grads = fzero.value_and_grad(weighted, **options)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value[0] if aux else value

    def dense(params: Any, batch: Any) -> torch.Tensor:
        total, count = token_loss(params, batch)
        return total / count

    assert_equivalent(train_step, mlp_params(), opt, batches, (stage,), (n,))
    # and equal to the mean over the whole batch at once
    state = expected = (mlp_params(), opt.init(mlp_params()))
    for batch in batches:
        state = train_step(*state[:2], batch)
        loss, grads = fzero.value_and_grad(dense)(expected[0], batch)
        updates, opt_state = opt.update(grads, expected[1], expected[0])
        expected = (optim.apply_updates(expected[0], updates), opt_state)
        assert_trees_close(state, (*expected, loss))


def test_a_mean_of_rank_means_differs_from_the_token_weighted_mean():
    batch = {**mlp_batch(8), "mask": torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)}

    def naive(params: Any, batch: Any) -> torch.Tensor:
        total, count = token_loss(params, batch)
        return total / count

    mesh = fzero.mesh(dp=2)
    exact = fzero.value_and_grad(naive)(mlp_params(), batch)[0]
    wrong = mesh.spmd(fzero.value_and_grad(naive))(mlp_params(), mesh.split(batch))[0]
    right = mesh.spmd(fzero.value_and_grad(token_loss, reduce="weighted"))(mlp_params(), mesh.split(batch))[0]
    assert abs(wrong - exact) > 0.1
    torch.testing.assert_close(right, exact)


def test_weights_are_any_numbers_of_any_dtype():
    """Fractions, and counts that half precision holds, but not their sum."""
    f = lambda w, b: ((w.sum() * b["x"]).sum(), b["n"].sum())  # noqa: E731
    for n in (torch.full((4,), 0.125), torch.full((4,), 20000.0, dtype=torch.float16)):
        batch = {"x": torch.ones(4), "n": n}
        loss, _ = fzero.value_and_grad(f, reduce="weighted", micro_batches=2)(torch.ones(3), batch)
        torch.testing.assert_close(loss, torch.tensor(3 / n[0].item()))


def test_a_weighted_loss_without_tokens_is_zero():
    batch = {**mlp_batch(4), "mask": torch.zeros(4, dtype=torch.float64)}
    loss, grads = fzero.value_and_grad(token_loss, reduce="weighted", micro_batches=2)(mlp_params(), batch)
    assert loss == 0 and all((g == 0).all() for g in tree.tensors(grads))


def test_a_weighted_loss_without_total_and_weight_is_refused():
    w = torch.ones(3)
    with pytest.raises(TypeError, match=r"must return \(total, weight\)"):
        fzero.value_and_grad(lambda w: w.sum(), reduce="weighted")(w)
    with pytest.raises(TypeError, match=r"the weight is float32 \[3\], expected a 0-d tensor"):
        fzero.value_and_grad(lambda w: (w.sum(), w), reduce="weighted")(w)
    with pytest.raises(TypeError, match=r"must return \(\(total, weight\), aux\)"):
        fzero.value_and_grad(lambda w: w.sum(), reduce="weighted", has_aux=True)(w)
