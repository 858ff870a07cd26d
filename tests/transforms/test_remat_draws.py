"""Random numbers in a block of remat: both passes draw the same, from the generator or from a key."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, vmap

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases
from tests.transforms.helpers import needs_compiler


def drops(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Linear in w, so that the value is the gradient's product with w, if both passes drop the same."""
    y = F.dropout(x * w, 0.5) + F.dropout(x * w, 0.1, training=False)
    # Inductor, as fzero.jit calls it, has no rand
    return y if torch.compiler.is_compiling() else y + torch.rand_like(x) * w


WORLDS = {
    "eager": lambda f: f,
    "fx": lambda f: fzero.jit(f, backend="fx", **LEAST),
    "inductor": fzero.jit,
    "vmap": lambda f: lambda w, x: fzero.mesh(dp=2).spmd(f)(w, fzero.mesh(dp=2).split(x)),
    "lockstep": lambda f: lambda w, x: fzero.mesh(dp=2, simulate="lockstep").spmd(f)(w, fzero.mesh(dp=2).split(x)),
    "vmap fx": lambda f: fzero.jit(
        lambda w, x: fzero.mesh(dp=2).spmd(f)(w, fzero.mesh(dp=2).split(x)), backend="fx", **LEAST
    ),
}


@pytest.mark.parametrize(
    "world", [pytest.param(w, marks=[needs_compiler, pytest.mark.slow] if w == "inductor" else ()) for w in WORLDS]
)
@pytest.mark.parametrize("save", cases((None,), ("matmuls",)))
def test_both_runs_of_a_block_under_remat_draw_the_same_numbers(world, save):
    w, x = torch.full((6,), 3.0, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)
    torch.manual_seed(0)
    f = fzero.remat(fzero.remat(drops) if save is None else drops, save)
    value, g = WORLDS[world](fzero.value_and_grad(lambda w, x: f(w, x).mean()))(w, x)
    assert_trees_close(value, (w * g).sum())
    assert len(g.unique()) > 1


@pytest.mark.parametrize("randomness", ("same", "different"))
def test_both_runs_of_a_block_under_remat_draw_the_same_numbers_under_vmap(randomness):
    w, x = torch.full((6,), 3.0, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)
    f = fzero.remat(drops)
    gs, ys = vmap(torch.func.grad_and_value(lambda w, x: f(w, x).sum()), (None, 0), randomness=randomness)(w, x)
    assert_trees_close(ys, gs @ w)
    assert bool((ys == ys[0]).all()) == (randomness == "same")
    torch.manual_seed(0)
    expected = jacrev(lambda w: drops(w, x).sum(1))(w)
    torch.manual_seed(0)
    assert_trees_close(jacrev(lambda w: f(w, x).sum(1))(w), expected)


def test_remat_advances_the_generator_as_the_plain_block_does():
    w, x = torch.ones(6), torch.ones(6, 6)
    states = []
    for f in (drops, fzero.remat(drops)):
        torch.manual_seed(0)
        g = grad(lambda w, f=f: f(w, x).sum())(w)
        states.append((g, torch.get_rng_state()))
    assert_trees_close(*states, rtol=0)


def keyed_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(x @ p["w"]), 0.3)

    for p in params["blocks"]:
        x = fzero.remat(block)(p, x)
    return (x @ params["h"]).square().mean()


def keyed_params() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(5, 5, generator=g, dtype=torch.float64) / 2} for _ in range(3)]
    return {"blocks": blocks, "h": torch.randn(5, generator=g, dtype=torch.float64)}


def test_a_seeded_block_draws_the_same_in_both_runs():
    """The derivative is that of the very function that the forward pass computed."""
    x, params = torch.randn(8, 5, dtype=torch.float64), keyed_params()

    def f(params: Any) -> torch.Tensor:
        return fzero.random.seeded(keyed_loss)(fzero.random.key(1), params, x)

    direction = tree.map(torch.randn_like, params)
    before = torch.get_rng_state()
    ahead, behind = (f(tree.map(lambda p, d, e=e: p + e * d, params, direction)) for e in (1e-6, -1e-6))
    grads = torch.func.grad(f)(params)
    slope = sum((g * d).sum() for g, d in zip(tree.tensors(grads), tree.tensors(direction), strict=True))
    torch.testing.assert_close((ahead - behind) / 2e-6, slope, rtol=1e-6, atol=1e-6)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("k", [1, 2])
def test_a_block_under_remat_that_seeds_itself_equals_the_plain_one(k):
    """It does so in a later micro-batch, which draws for itself."""
    x, params, key = torch.randn(8, 5, dtype=torch.float64), keyed_params(), fzero.random.key(3)
    results = []
    for wrapped in (fzero.remat, lambda f: f):

        def block(p: Any, x: torch.Tensor) -> torch.Tensor:
            return x + fzero.random.seeded(lambda x: F.dropout(torch.tanh(x @ p["w"]), 0.3))(key, x)

        run = wrapped(block)

        def loss(params: Any, x: torch.Tensor, run: Any = run) -> torch.Tensor:
            for p in params["blocks"]:
                x = run(p, x)
            return (x @ params["h"]).square().mean()

        results.append(fzero.value_and_grad(loss, micro_batches=k)(params, x))
    assert_trees_close(*results)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_under_remat_of_any_probability_equals_the_plain_one(p):
    """At p = 1 all is 0, and so is the gradient: not 0 times infinity."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x), p) + x

    results = []
    for f in (fzero.remat(block), block):
        torch.manual_seed(0)
        results.append(torch.func.grad_and_value(lambda x, f=f: f(x).square().sum())(torch.linspace(-1, 1, 16)))
    assert_trees_close(*results)


@pytest.mark.slow
def test_seeded_blocks_under_remat_draw_alike_on_every_mesh():
    opt, x = optim.sgd(0.1, momentum=0.9), torch.randn(8, 5, dtype=torch.float64)

    def train_step(params: Any, opt_state: Any, batch: Any, key: Any, gather: bool = True) -> Any:
        loss = lambda p, b: fzero.random.seeded(keyed)(key, p, b)  # noqa: E731

        def keyed(p: Any, b: Any) -> torch.Tensor:
            return keyed_loss(p if gather else {**p, "h": fzero.gather(p["h"])}, b)

        value, grads = fzero.value_and_grad(loss, micro_batches=2, gather=gather)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    results = []
    for simulate, stage in (("vmap", 1), ("vmap", 3), ("lockstep", 3)):
        mesh = fzero.mesh(dp=2, simulate=simulate)
        for gather in (True, False):
            step = fzero.shard(functools.partial(train_step, gather=gather), stage, mesh)
            for run in (step, fzero.jit(step, backend="fx", **LEAST)) if simulate == "vmap" and stage == 3 else (step,):
                state = run.init(keyed_params(), opt)
                for i in range(2):
                    *state, loss = run(*state, mesh.split(x), fzero.random.fold_in(fzero.random.key(0), i))
                results.append((step.gather(state[0]), loss))
    for other in results[1:]:
        assert_trees_close(other, results[0])
