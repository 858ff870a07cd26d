"""torch.autocast, within a step or around it, gives a jitted step the numbers of the uncompiled one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from tests.graph.helpers import bitwise
from tests.helpers import cases

OPT = optim.sgd(0.1)
X = torch.arange(64.0).view(8, 8) / 64


def autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled)


def params() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 8, generator=g) for name in ("w", "v")}


def train(around: bool, remat: bool, micro_batches: int, stage: int, simulate: str, jit: bool, steps: int = 2) -> Any:
    """Train with autocast around the step, or within the loss, and a region of full precision in both."""

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        with nullcontext() if around else autocast():
            y = torch.tanh(x @ p["w"])
            with autocast(False):
                y = y.float() @ p["v"]
            return (y @ p["w"]).float()  # the second use of a weight, whose cast autocast may cache

    run = fzero.remat(block) if remat else block

    def train_step(p: Any, state: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: run(p, x).square().mean(), micro_batches=micro_batches)(p, x)
        updates, state = OPT.update(grads, state, p)
        return optim.apply_updates(p, updates), state, loss

    loss, mesh = None, fzero.mesh(dp=2, simulate=simulate)  # pyright: ignore[reportArgumentType]
    with autocast() if around else nullcontext():
        step = fzero.shard(train_step, stage, mesh)
        state = step.init(params(), OPT)
        call = fzero.jit(step, backend="fx") if jit else step
        for _ in range(steps):
            *state, loss = call(*state, mesh.split(X))
    return step.gather(state[0]), loss


@pytest.mark.slow
@pytest.mark.parametrize("around", [False, True], ids=["within", "around"])
@pytest.mark.parametrize(
    "remat,micro_batches,stage", cases([(True, 1, 2), (False, 4, 0)], [(False, 1, 3), (True, 4, 1)])
)
def test_a_jitted_step_casts_where_the_step_does(around, remat, micro_batches, stage):
    eager = train(around, remat, micro_batches, stage, "vmap", jit=False)
    bitwise(train(around, remat, micro_batches, stage, "vmap", jit=True), eager)
    bitwise(train(around, remat, micro_batches, stage, "lockstep", jit=False), eager)
    bitwise(train(around, False, micro_batches, stage, "vmap", jit=False), eager)  # remat changes no number


def test_gradients_of_a_weight_that_is_used_twice_are_summed_in_its_own_dtype():
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return ((x @ p["w"]).float() + (x.flip(0) @ p["w"]).float()).square().sum()

    def apart(p: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return ((x @ p["w"]).float() + (x.flip(0) @ p["v"]).float()).square().sum()

    w = params()["w"]
    separate = fzero.value_and_grad(apart)({"w": w, "v": w.clone()}, X)[1]
    with autocast(False):
        bitwise(fzero.value_and_grad(loss)({"w": w}, X)[1]["w"], separate["w"] + separate["v"])
    assert torch.is_autocast_cache_enabled()
