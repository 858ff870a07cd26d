"""A function from a configuration to a step, on meta tensors: what the tests of tune plan."""

import functools
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.tuning import Configuration

WIDTH = 512  # so that a block is a megabyte and more, and no bucket joins several


def apply_block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def make_step(config: Configuration) -> Any:
    """Make a step of blocks of two matrices, with masters of adamw, offloaded as asked."""
    pair = optim.master_weights(optim.adamw(1e-3), config.policy)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.offload(pair, config.offload))
    run = fzero.remat(apply_block, None if config.remat is True else config.remat) if config.remat else apply_block

    def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params["h"]:
            x = run(block, x)
        return x.float().square().mean()

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        take = fzero.value_and_grad(
            loss_of, precision=config.policy, micro_batches=config.accumulation, gather=not config.remat
        )
        loss, grads = take(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, config.stage, fzero.mesh(dp=config.ranks))
    with torch.device("meta"):
        shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        params = {"h": [{name: torch.empty(s) for name, s in shapes.items()} for _ in range(config.depth or 3)]}
        x = torch.empty(config.global_batch, WIDTH, dtype=config.policy.param)
    return step, *step.init(params, opt), step.mesh.split(x)


@functools.cache
def planned(config: Configuration) -> fzero.Plan:
    """Plan a configuration once."""
    return fzero.plan(*make_step(config), device="cuda")
