"""A transform of torch.func around value_and_grad gives the unsharded derivatives, at every stage."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases, mlp_batch, mlp_loss, mlp_params

BATCH = mlp_batch(12)
OPT = optim.sgd(0.1)


def sum_weighted(params: Any, batch: Any) -> Any:
    w = batch["x"][:, 0].abs()
    return (w * (params["scale"] * batch["x"] @ params["head"][0] - batch["y"]).square().sum(-1)).sum(), w.sum()


def make_pullback_step(**options: Any) -> Callable[..., Any]:
    """A step whose new parameters are the vjp of (value, gradients), with cotangents of both."""
    f = sum_weighted if options.get("reduce") == "weighted" else mlp_loss

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, _), pull = torch.func.vjp(lambda p: fzero.value_and_grad(f, **options)(p, batch), params)
        (pulled,) = pull((2 * torch.ones_like(value), tree.map(torch.sin, params)))
        return pulled, opt_state, value

    return train_step


def make_pushforward_step(**options: Any) -> Callable[..., Any]:
    """A step whose new parameters are a Hessian-vector product, forward over reverse."""

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        def f(p: Any) -> Any:
            return fzero.value_and_grad(mlp_loss, **options)(p, batch)

        (value, _), (_, product) = torch.func.jvp(f, (params,), (tree.map(torch.sin, params),))
        return product, opt_state, value

    return train_step


OPTIONS = {"mean": {}, "weighted": {"reduce": "weighted"}, "micro-batches": {"micro_batches": 2}}


def check(train_step: Callable[..., Any], mesh: fzero.ranks.Mesh, stage: int, **options: Any) -> None:
    step = fzero.shard(train_step, stage=stage, mesh=mesh, **options)
    params, _, value = step(*step.init(mlp_params(), OPT), mesh.split(BATCH))
    expected, _, wanted = train_step(mlp_params(), OPT.init(mlp_params()), BATCH)
    torch.testing.assert_close(value, wanted)
    assert_trees_close(step.gather(params), expected, rtol=1e-10)


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize(
    "stage,simulate", cases([(1, "lockstep"), (3, "vmap")], itertools.product(ALL_STAGES, ("vmap", "lockstep")))
)
def test_the_vjp_of_sharded_gradients_equals_the_unsharded_one(options, stage, simulate):
    check(make_pullback_step(**OPTIONS[options]), fzero.mesh(dp=3, simulate=simulate), stage)


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_the_jvp_of_sharded_gradients_equals_the_unsharded_one(stage):
    check(make_pushforward_step(), fzero.mesh(dp=3), stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_vjp_of_hybrid_sharded_gradients_equals_the_unsharded_one(stage):
    check(make_pullback_step(), fzero.mesh(replica=2, shard=3), stage, axis=("replica", "shard"), over="shard")


@pytest.mark.parametrize("stage", cases((3,), [0, 1]))
def test_the_vjp_of_gradients_in_a_jitted_step_equals_the_eager_one(stage):
    mesh, train_step = fzero.mesh(dp=2), make_pullback_step()
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    expected, _, wanted = step(*step.init(mlp_params(), OPT), mesh.split(BATCH))
    got, _, value = fzero.jit(step, backend="fx", **LEAST)(*step.init(mlp_params(), OPT), mesh.split(BATCH))
    assert_trees_close((got, value), (expected, wanted), rtol=0)
