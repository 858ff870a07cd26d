"""tiled computes what its function computes, in parts of the tokens, and keeps the activations of one part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import nn, optim
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, examples, train_step_for

WIDTH = 6


def params_of(dtype=torch.float64, width=WIDTH, hidden=10):
    g = torch.Generator().manual_seed(0)
    shapes = {"norm": (width,), "up": (width, hidden), "down": (hidden, width)}
    return {name: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) / 3 for name, s in shapes.items()}


def mlp(x, p):
    width = x.shape[-1]
    return x + torch.tanh(torch.nn.functional.rms_norm(x, (width,), p["norm"]) @ p["up"]) @ p["down"]


@examples(20, 100)
@given(st.integers(1, 12), st.integers(0, 11), st.sampled_from([-2, 0, 1, 2]), st.booleans())
def test_a_tiled_function_equals_the_function(chunk, tokens, dim, second):
    """Values and derivatives of the first and second order, for lengths that do not divide and empty ones."""
    x = torch.randn((tokens, 3, WIDTH), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x.movedim(0, dim) if dim != 2 else x.permute(1, 2, 0)

    def apart(x, p):
        last = x if dim != 2 else x.mT
        y = mlp(last, p)
        y = y if dim != 2 else y.mT
        return {"y": y, "squares": (y.square(), y)}

    def loss(f):
        def of(p, x):
            out = f(x, p)
            places = torch.arange(x.numel(), dtype=x.dtype).cos().view(x.shape)  # each element counts differently
            return (places * (out["y"].sin() + out["squares"][0] * out["squares"][1])).sum()

        def of_gradient(p, x):
            return sum(g.square().sum() for g in torch.func.grad(of, (0, 1))(p, x)[0].values())

        return of_gradient if second else of

    actual, expected = (torch.func.grad_and_value(loss(f), (0, 1)) for f in (nn.tiled(apart, chunk, dim=dim), apart))
    assert_trees_close(actual(params_of(), x), expected(params_of(), x))


@pytest.mark.slow
def test_a_tiled_function_holds_the_activations_of_one_tile():
    """In the plan those of the hidden layer, which is 16 times as wide, shrink with the tile."""
    mesh = fzero.mesh(dp=2)

    def peak(chunk):
        f = mlp if chunk is None else nn.tiled(mlp, chunk)
        params = [params_of(torch.float32, 16, 256) for _ in range(2)]

        def loss_fn(params, x):
            for p in params:
                x = f(x, p)
            return x.square().mean()

        opt = optim.sgd(0.1)
        step = fzero.jit(fzero.shard(train_step_for(loss_fn, opt), stage=3, mesh=mesh), backend="fx", **LEAST)
        plan = fzero.plan(step, *step.init(params, opt), mesh.split(torch.zeros(2, 512, 16)))
        return plan.peak_bytes - plan.argument_bytes

    hidden = 4 * 512 * 256
    whole, half, eighth = peak(None), peak(256), peak(64)
    assert whole > 4 * hidden, whole / hidden  # two results of each of two layers
    assert half - eighth > 2 * (hidden / 2 - hidden / 8), (half - eighth) / hidden
    assert eighth < whole / 4, (eighth / hidden, whole / hidden)


def test_wrong_arguments_of_tiled_are_refused():
    x = torch.ones(2, 6, 4)
    with pytest.raises(ValueError, match="chunk=0"):
        nn.tiled(mlp, 0)
    with pytest.raises(ValueError, match=r"dim=3: x is \[2, 6, 4\]"):
        nn.tiled(mlp, 2, dim=3)(x, {})
    with pytest.raises(ValueError, match=r"result leaf 'mean' is \[2, 1, 4\] for a tile of 4 tokens"):
        nn.tiled(lambda x: {"mean": x.mean(1, keepdim=True)}, 4)(x)
    with pytest.raises(ValueError, match="is int for a tile of 4 tokens"):
        nn.tiled(lambda x: 3, 4)(x)
