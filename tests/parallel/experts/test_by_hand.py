"""A layer and its losses are the papers' formulas, with their gradients: beside loops that share no line of code.

The laws of training compare the library with itself on other meshes, and would not see a fault of both.
"""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.helpers import examples
from tests.parallel.experts.model import D, batch_of, experts_params, ffn, loss_for, normal, params_of

CAPACITIES = st.sampled_from([None, 0.01, 0.25, 0.5, 1.0, 1.1, 2.0, 50.0])


def run_by_loops(p: Any, x: torch.Tensor, k: int, capacity: float | None, over: str, **options: Any) -> Any:
    """Return `(y, auxiliary)` token by token: gates, positions by sequence, drops, balance and z losses."""
    (s, t, _), count = x.shape, p["router"].shape[1]
    positions = t if capacity is None else min(t, math.ceil(Fraction(str(capacity)) * t * k / count))
    logits = x @ p["router"]
    e = torch.exp(logits)
    scores = 1 / (1 + 1 / e) if options.get("score") == "sigmoid" else e / e.sum(-1, keepdim=True)
    y, shares = torch.zeros_like(x), torch.zeros(s, count, dtype=x.dtype)
    for i in range(s):
        best = [sorted(range(count), key=lambda e, j=j: -float(scores[i, j, e].detach()))[:k] for j in range(t)]
        counts = [0] * count
        for c, j in [(c, j) for c in range(k) for j in range(t)]:
            e = best[j][c]
            shares[i, e] += 1 / (t * k)
            counts[e] += 1
            if counts[e] <= positions:
                whole = sum(scores[i, j, other] for other in best[j]) if options.get("normalize", True) else 1
                gate = options.get("scale", 1.0) * scores[i, j, e] / whole
                h = torch.tanh(x[i, j] @ p["experts"]["up"][e] + p["experts"]["bias"][e])
                y[i, j] = y[i, j] + gate * (h @ p["experts"]["down"][e])
    if over == "batch":
        balance = count * sum(shares.mean(0)[e] * scores[..., e].mean() for e in range(count))
    else:
        balance = count * sum(shares[i, e] * scores[i, :, e].mean() for i in range(s) for e in range(count)) / s
    return y, 0.1 * balance + 0.01 * torch.log(torch.exp(logits).sum(-1)).pow(2).mean()


@examples(15, 30)
@given(
    st.integers(1, 4),
    st.sampled_from([4, 5]),
    CAPACITIES,
    st.sampled_from(["batch", "sequence"]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_layer_with_its_losses_is_the_formulas_and_their_gradients(k, count, capacity, over, score, normalize, seed):
    options = {"score": score, "normalize": normalize, "scale": 2.5}
    params, batch = params_of(count, seed), batch_of(2, 4, seed)

    def loops(params: Any) -> torch.Tensor:
        x = torch.tanh(batch["x"] @ params["inp"])
        y, auxiliary = run_by_loops(params["layer"], x, k, capacity, over, **options)
        return ((x + y) @ params["head"] - batch["y"]).square().mean() + auxiliary

    expected = torch.func.grad_and_value(loops)(params)
    got = torch.func.grad_and_value(lambda p: loss_for(k, capacity, over, **options)(p, batch))(params)
    assert_trees_close(got, expected, 1e-11)


@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_the_axis_of_experts_may_have_any_name(capacity, simulate):
    """One that is called other than the default, beside one that is called so."""
    p, x = params_of(4)["layer"], batch_of(4)["x"]
    expected = moe.layer(ffn, p["experts"], x, moe.route(x @ p["router"], 2), capacity=capacity)

    def program(x: torch.Tensor) -> Any:
        mine = fzero.tree.map(lambda v: v.view(2, 2, *v.shape[1:])[fzero.axes.axis_index("ways")], p["experts"])
        return fzero.PerRank(moe.layer(ffn, mine, x, moe.route(x @ p["router"], 2), axis="ways", capacity=capacity))

    mesh = fzero.mesh(ways=2, ep=2, simulate=simulate)
    got = mesh.spmd(program)(mesh.split(x)).value
    torch.testing.assert_close(got.reshape(expected.shape), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_forward_and_backward_derivatives_agree(capacity):
    """The tangent of a layer is its Jacobian, of which the gradient is the transpose."""
    g = torch.Generator().manual_seed(1)
    p, x = experts_params(4), batch_of(2)["x"]
    routing = moe.route(normal(g, 2, 5, 4), 2)

    def f(x: torch.Tensor, p: Any) -> torch.Tensor:
        return moe.layer(ffn, p, x, routing, capacity=capacity)

    dx, dp, dy = normal(g, *x.shape), fzero.tree.map(lambda v: normal(g, *v.shape), p), normal(g, 2, 5, D)
    _, forward = torch.func.jvp(f, (x, p), (dx, dp))
    gx, gp = torch.func.vjp(f, x, p)[1](dy)
    backward = (gx * dx).sum() + sum((gp[name] * dp[name]).sum() for name in p)
    torch.testing.assert_close((forward * dy).sum(), backward, rtol=1e-11, atol=1e-12)


def test_the_entropy_of_sigmoid_scores_is_that_of_their_shares():
    """log(E) at most, for scores that do not sum to one."""
    routing = moe.route(torch.zeros(1, 3, 5), 1, score="sigmoid")
    torch.testing.assert_close(moe.stats(routing)["entropy"], torch.tensor(math.log(5)))


def test_micro_batches_jitter_in_ways_of_their_own():
    x = torch.ones(4, 2, 3)

    def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
        noisy = moe.jitter(x, fzero.random.key(0), 0.5)
        return (w * noisy).sum(), noisy

    (_, noisy), _ = fzero.value_and_grad(loss, has_aux=True, micro_batches=2)(torch.ones(()), x)
    assert not torch.equal(noisy[0], noisy[1])


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (4, 0)])
def test_grouped_products_of_nothing_are_empty_or_zero(rows, columns):
    """torch's kernel takes neither no rows nor no columns."""
    x, w = torch.ones(rows, 8, dtype=torch.bfloat16), torch.ones(2, 8, columns, dtype=torch.bfloat16)
    offsets = torch.tensor([rows // 2, rows])
    y, back = torch.func.vjp(lambda x, w: moe.grouped_mm(x, w, offsets), x, w)
    assert y.shape == (rows, columns)
    assert [g.shape for g in back(torch.ones_like(y))] == [x.shape, w.shape]
