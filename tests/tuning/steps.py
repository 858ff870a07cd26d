"""Functions from a ratio to a step, on meta tensors: what the tests of tuning plan."""

import functools
from collections.abc import Callable
from typing import Any

import torch

import fzero
from fzero import optim
from tests.optim.offloading import BF16


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    for block in params["h"]:
        x = torch.tanh(x @ block["w"])
    return x.float().square().mean()


def maker(layers: int = 3, width: int = 128, stage: int = 2, clip: bool = False, **options: Any) -> Callable[..., Any]:
    """Return a function from a ratio to `(step, *args)`: masters of adamw, on two ranks that are simulated."""
    mesh = fzero.mesh(dp=2)

    def make_step(ratio: float) -> Any:
        optimizer = optim.offload(optim.master_weights(optim.adamw(1e-3), BF16), ratio, **options)
        opt = optim.chain(optim.clip_by_global_norm(1.0), optimizer) if clip else optimizer

        def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
            loss, grads = fzero.value_and_grad(loss_of, precision=BF16)(params, x)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        step = fzero.shard(train_step, stage, mesh)
        params = {"h": [{"w": torch.empty(width, width, device="meta")} for _ in range(layers)]}
        return step, *step.init(params, opt), mesh.split(torch.empty(128, width, device="meta"))

    return make_step


@functools.cache
def plan_step(
    ratio: float, stage: int = 2, clip: bool = False, update_on: str = "host", world_size: int = 2
) -> fzero.graph.Plan:
    return fzero.plan(*maker(stage=stage, clip=clip, update_on=update_on)(ratio), world_size=world_size)
