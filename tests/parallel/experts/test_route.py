"""Laws of routing and of balance: what is chosen, with which weights, and what all ranks know of it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.helpers import examples

SIMULATIONS = st.sampled_from(["vmap", "lockstep"])


def logits_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40)
@given(st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.booleans(), st.integers(1, 6), st.integers(0, 99))
def test_a_token_goes_to_the_likeliest_experts_and_the_bias_changes_no_gate(score, normalize, biased, k, seed):
    logits = logits_of(2, 3, 6, seed=seed)
    bias = logits_of(6, seed=seed + 1) if biased else None
    r = moe.route(logits, k, score=score, normalize=normalize, scale=2.5, bias=bias)
    probs = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    order = (probs if bias is None else probs + bias).argsort(-1, descending=True)
    gates = probs.gather(-1, order[..., :k])
    assert torch.equal(r.experts, order[..., :k]) and torch.equal(r.probs, probs) and torch.equal(r.logits, logits)
    torch.testing.assert_close(r.gates, 2.5 * (gates / gates.sum(-1, keepdim=True) if normalize else gates))


@settings(max_examples=30)
@given(st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 3)]), st.integers(1, 2), st.booleans(), st.integers(0, 99))
def test_experts_lie_in_the_best_groups(groups, k, biased, seed):
    n, most = groups
    logits, bias = logits_of(2, 3, 8, seed=seed), logits_of(8, seed=seed + 1)
    r = moe.route(logits, k, score="sigmoid", groups=groups, bias=bias if biased else None)
    for row, actual in zip(logits.sigmoid().flatten(0, 1) + bias * biased, r.experts.flatten(0, 1), strict=True):
        parts = row.chunk(n)
        best = sorted(range(n), key=lambda i, parts=parts: -parts[i].sort(descending=True)[0][:2].sum())[:most]
        allowed = [e for e in range(8) if e // (8 // n) in best]
        assert actual.tolist() == sorted(allowed, key=lambda e, row=row: -row[e])[:k]


def test_routing_is_in_float32_and_integer_choices_have_no_gradient():
    r = moe.route(logits_of(1, 2, 4).bfloat16(), 2)
    assert r.gates.dtype == r.probs.dtype == torch.float32 and r.experts.dtype == torch.int64
    bias = torch.zeros(4, dtype=torch.float64)
    grad = torch.func.grad(lambda b: moe.route(logits_of(1, 2, 4), 2, bias=b).gates.sum())(bias)
    assert not grad.any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_token_with_a_nan_goes_nowhere_and_hides_nothing(score, capacity):
    """Its output is nan; the other tokens' outputs are those without it, drops included."""
    x, up = logits_of(2, 4, 3), logits_of(4, 3, 3, seed=1)
    logits = logits_of(2, 4, 4, seed=2)
    logits[0, 1, 2] = torch.nan

    def run(logits: torch.Tensor) -> tuple[moe.Routing, torch.Tensor]:
        r = moe.route(logits, 2, score=score, normalize=True)
        return r, moe.layer(lambda p, rows, linear: linear(rows, p), up, x, r, capacity=capacity)

    r, y = run(logits)
    assert (r.experts[0, 1] == 4).all() and y[0, 1].isnan().all()
    indices = torch.tensor([0, 2, 3])
    assert y[0, indices].isfinite().all() and y[1].isfinite().all()
    cut = moe.route(logits[:1, indices], 2, score=score, normalize=True)
    if capacity is None:
        torch.testing.assert_close(
            y[:1, indices], moe.layer(lambda p, r, linear: linear(r, p), up, x[:1, indices], cut)
        )
    else:
        positions, alone = (moe.assign_positions(e.experts, 4, 0.5 * 4 / 3 if e is cut else 0.5) for e in (r, cut))
        assert torch.equal(positions.position[:1, indices] < 4, alone.position < 4)


@settings(max_examples=12)
@given(SIMULATIONS, st.sampled_from([{"dp": 2}, {"dp": 2, "ep": 2}]), st.integers(0, 9))
def test_jitter_belongs_to_the_data_and_not_to_the_mesh(simulate, axes, seed):
    x, key = logits_of(4, 3, 2, seed=seed), fzero.random.key(seed)
    mesh = fzero.mesh(simulate=simulate, **axes)
    box = mesh.spmd(lambda x, key: fzero.PerRank(moe.jitter(x, key, 0.25)))(mesh.split(x), key)
    expected = moe.jitter(x, key, 0.25)
    assert torch.equal(box.value.flatten(0, 1), expected)
    ratio = expected / x
    assert (ratio >= 0.75).all() and (ratio < 1.25).all() and ratio.unique().numel() == x.numel()
    assert moe.jitter(x.bfloat16(), key).dtype == torch.bfloat16


@examples(8, 15)
@given(SIMULATIONS, st.integers(1, 3), st.sampled_from([None, 0.5, 1.0]), st.integers(0, 99))
def test_the_statistics_of_balance_are_those_of_the_global_batch(simulate, k, capacity, seed):
    logits, bias = 2 * logits_of(4, 5, 4, seed=seed), torch.zeros(4, dtype=torch.float64)

    def balance(logits: torch.Tensor) -> Any:
        r, axes = moe.route(logits, k), fzero.axes.axis_names()
        load = moe.expert_load(r, axes)
        return moe.balance_loss(r, axis=axes), load, moe.balance_bias(bias, load), moe.stats(r, capacity, axes)

    mesh = fzero.mesh(dp=2, ep=2, simulate=simulate)
    loss, load, new_bias, stats = balance(logits)
    assert_trees_close(mesh.spmd(balance)(mesh.split(logits)), (loss, load, new_bias, stats))
    r = moe.route(logits, k)
    share = torch.stack([(r.experts == e).double().mean() for e in range(4)])
    torch.testing.assert_close(loss, 4 * (share * r.probs.mean((0, 1))).sum())
    torch.testing.assert_close(load, share)
    torch.testing.assert_close(new_bias, 1e-3 * torch.sign(share.mean() - share))
    positions = (
        moe.assign_positions(r.experts, 4, capacity).position
        < moe.assign_positions(r.experts, 4, capacity).choice[0].numel()
    ).double()
    torch.testing.assert_close(stats["dropped"], 1 - positions.mean())
    assert 0 <= stats["entropy"] <= math.log(4)


def test_even_routing_has_loss_one_and_a_collapsed_router_the_number_of_experts():
    assert moe.balance_loss(moe.route(torch.zeros(2, 3, 4), k=4)) == 1
    logits = torch.tensor([50.0, 0.0, 0.0, 0.0]).expand(2, 3, 4)
    for over in ("batch", "sequence"):
        torch.testing.assert_close(moe.balance_loss(moe.route(logits, k=1), over), torch.tensor(4.0))


def test_a_router_bias_computed_from_one_ranks_tokens_is_refused():
    mesh = fzero.mesh(dp=2)
    with pytest.raises(ValueError, match="differs by rank"):
        mesh.spmd(lambda x: moe.balance_bias(torch.zeros(4), moe.expert_load(moe.route(x, 1), axis=()).float()))(
            mesh.split(logits_of(4, 5, 4))
        )


def test_the_bias_moves_the_load_towards_equal():
    logits = logits_of(8, 16, 4) + torch.tensor([2.0, 1.0, 0.0, -1.0])
    bias, loads = torch.zeros(4, dtype=torch.float64), []
    for _ in range(300):
        load = moe.expert_load(moe.route(logits, 2, score="sigmoid", bias=bias))
        bias, loads = moe.balance_bias(bias, load, rate=5e-3), [*loads, load]
    assert loads[0].max() > 0.4 and loads[-1].max() < 0.28 and loads[-1].min() > 0.22
    two = moe.balance_bias(torch.zeros(4), torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]), rate=1.0)
    assert two.tolist() == [-1, -1, 1, 1]  # that of the mean of micro-batches


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_are_all_zero_are_divided_by_no_zero(score):
    """Sigmoids of -200 are zeros in float32: such a token gets gates of zero, and gradients that are finite."""
    logits = torch.full((1, 2, 4), -200.0)
    gates, grad = torch.func.vjp(lambda x: moe.route(x, 2, score=score, normalize=True).gates, logits)
    assert torch.equal(gates, torch.full((1, 2, 2), 0.5 if score == "softmax" else 0.0))
    assert grad(torch.ones(1, 2, 2))[0].isfinite().all()
