"""Laws of positions, of rows in order, and of the ways there and back."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.parallel import experts as moe
from tests.helpers import examples
from tests.parallel.experts.model import experts_params, ffn

CAPACITIES = st.sampled_from([None, 0.1, 0.5, 1.0, 1.25, 9.0])
SIMULATIONS = st.sampled_from(["vmap", "lockstep"])


def choices(s: int, t: int, k: int, count: int, seed: int) -> torch.Tensor:
    """Different experts for each token, and none for some."""
    g = torch.Generator().manual_seed(seed)
    experts = torch.rand((s, t, count), generator=g).topk(k, -1).indices
    nowhere = torch.rand((s, t, 1), generator=g) < 0.1
    return torch.where(nowhere, count, experts)


def rows_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 4), CAPACITIES, st.integers(0, 999))
def test_positions_are_taken_first_choices_first_and_tokens_in_order(s, t, k, capacity, seed):
    count = 5
    experts = choices(s, t, k, count, seed)
    result = moe.assign_positions(experts, count, capacity)
    c = t if capacity is None else min(t, math.ceil(capacity * t * k / count))
    assert result.choice.shape == (s, count, c)
    for i in range(s):
        counts, choice = [0] * count, torch.full((count, c), t * k)
        for j in range(k):
            for token in range(t):
                e = int(experts[i, token, j])
                position = count * c
                if e < count and counts[e] < c:
                    position, choice[e, counts[e]] = e * c + counts[e], token * k + j
                    counts[e] += 1
                assert result.position[i, token, j] == position
        assert torch.equal(result.choice[i], choice)


@examples(13, 25)
@given(st.sampled_from([{"ep": 2}, {"dp": 2, "ep": 2}, {"ep": 4}]), SIMULATIONS, CAPACITIES, st.integers(0, 999))
def test_dispatch_and_combine_are_transposes_of_each_other(axes, simulate, capacity, seed):
    """<dispatch(x), y> = <x, combine(y, ones)>, over all ranks; and each is the other's gradient."""
    mesh = fzero.mesh(simulate=simulate, **axes)
    n, s, t, k, d = mesh.size, 2, 4, 2, 3
    experts = choices(n * s, t, k, 4, seed)
    x, seed = rows_of(n * s, t, d, seed=seed), seed + 1

    def program(x: torch.Tensor, experts: torch.Tensor) -> object:
        positions, ones = moe.assign_positions(experts, 4, capacity), x.new_ones(experts.shape)
        there = moe.dispatch(x, positions)
        y = torch.cos(there + torch.arange(there.numel()).view(there.shape))  # any rows, another on each rank
        back = moe.combine(y, positions, ones)
        gradient = torch.func.vjp(lambda x: moe.dispatch(x, positions), x)[1](y)[0]
        forth = torch.func.vjp(lambda y: moe.combine(y, positions, ones), y)[1](x)[0]
        return fzero.PerRank(((there * y).sum(), (x * back).sum(), gradient - back, forth - there))

    left, right, *zeros = mesh.spmd(program)(mesh.split(x), mesh.split(experts)).value
    torch.testing.assert_close(left.sum(), right.sum(), rtol=1e-12, atol=1e-12)
    assert all(z.abs().max() < 1e-12 for z in zeros)


@examples(13, 25)
@given(st.sampled_from([{"ep": 2}, {"dp": 2, "ep": 2}, {"ep": 4}]), SIMULATIONS, st.integers(1, 4), st.integers(0, 999))
def test_sorted_rows_arrive_by_expert_and_go_back(axes, simulate, k, seed):
    mesh = fzero.mesh(simulate=simulate, **axes)
    experts = choices(mesh.size * 2, 3, k, 4, seed)
    x = rows_of(mesh.size * 2, 3, 2, seed=seed).abs() + 1  # no row is zero

    def program(x: torch.Tensor, experts: torch.Tensor) -> object:
        rows, order = moe.sort_rows(x, experts, 4)
        back = moe.unsort_rows(rows, order, (experts + 1).double())
        return fzero.PerRank((rows, order.offsets, back))

    rows, offsets, back = mesh.spmd(program)(mesh.split(x), mesh.split(experts)).value
    gates = torch.where(experts < 4, experts + 1, 0).sum(-1, keepdim=True)
    torch.testing.assert_close(back.flatten(0, 1), gates * x, rtol=1e-14, atol=0)
    sizes, mine = dict(mesh.shape), 4 // dict(mesh.shape)["ep"]
    for row in range(sizes.get("dp", 1)):  # the ranks along ep share their tokens' experts
        part = slice(row * 2 * sizes["ep"], (row + 1) * 2 * sizes["ep"])
        for r in range(sizes["ep"]):
            rank, start = row * sizes["ep"] + r, 0
            for e in range(mine):
                end = int(offsets[rank, e])
                here = (experts[part] == r * mine + e).any(-1)
                got = rows[rank, start:end]
                assert torch.equal(got[got[:, 0].argsort()], x[part][here][x[part][here][:, 0].argsort()])
                start = end
            assert not rows[rank, start:].any()


@examples(10, 20)
@given(st.integers(1, 4), st.sampled_from([None, 0.5]), st.integers(0, 99))
def test_permuting_the_experts_permutes_their_gradients(k, capacity, seed):
    p, x = experts_params(4, seed), rows_of(2, 5, 6, seed=seed)
    router, order = rows_of(6, 4, seed=seed + 1), torch.randperm(4, generator=torch.Generator().manual_seed(seed))

    def loss(p, router):
        r = moe.route(x @ router, k, normalize=True)
        return moe.layer(ffn, p, x, r, capacity=capacity).square().sum() + moe.balance_loss(r)

    mine, routers = torch.func.grad(loss, (0, 1))(p, router)
    theirs, permuted = torch.func.grad(loss, (0, 1))({name: w[order] for name, w in p.items()}, router[:, order])
    for name in p:
        torch.testing.assert_close(theirs[name], mine[name][order], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(permuted, routers[:, order], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("capacity", [0.7, 1.1, 1.2, 1.25, 1.3, 2.2])
@pytest.mark.parametrize("tokens", [10, 100, 1000])
def test_a_capacity_is_the_decimal_that_was_written(capacity, tokens):
    """1.1 x 100 / 10 is 11 positions, though in binary it is a little more."""
    for k, count in itertools.product((1, 2, 4), (2, 5, 10, 64)):
        exact = math.ceil(Fraction(str(capacity)) * tokens * k / count)
        experts = torch.zeros(1, tokens, k, dtype=torch.int64)
        assert moe.assign_positions(experts, count, capacity).choice.shape[-1] == min(tokens, exact)
