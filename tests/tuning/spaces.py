"""A function from a configuration to a step, on meta tensors: what the tests of tune plan."""

import functools
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.parallel import tensor as tp
from fzero.tuning import Configuration

WIDTH = 512  # so that a block is a megabyte and more, and no bucket joins several


def apply_block(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply a block, of whose matrices a rank along "tp" has a part."""
    return x + tp.leave(torch.tanh(tp.enter(x) @ p["up"]) @ p["down"])


def loss_fn(config: Configuration) -> Any:
    """Return the mean square of what the blocks make: of all of them, or as a pipeline."""
    if config.pp > 1:
        return fzero.pipeline(
            first=lambda rest, x: x,
            block=apply_block,
            last=lambda rest, x, batch: x.float().square().mean(),
            micro_batches=config.accumulation,
            schedule=config.schedule,
            stages_per_rank=config.pipeline_stages,
            blocks="h",
            depth=config.depth or 3,
            remat=config.remat,
            split=rules(config),
        )
    run = fzero.remat(apply_block, None if config.remat is True else config.remat) if config.remat else apply_block

    def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params["h"]:
            x = run(block, x)
        return x.float().square().mean()

    return loss_of


def rules(config: Configuration) -> Any:
    return tp.split_rule({"up": -1, "down": 0}) if config.tp > 1 else None


def make_step(config: Configuration) -> Any:
    """Make a step of blocks of two matrices, with masters of adamw, offloaded as asked."""
    optimizer = optim.master_weights(optim.adamw(1e-3), config.policy)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.offload(optimizer, config.offload))
    loss = loss_fn(config)
    more: Any = (
        {"reduce": "weighted"} if config.pp > 1 else {"micro_batches": config.accumulation, "gather": not config.remat}
    )
    take = fzero.value_and_grad(loss, precision=config.policy, **more)

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        loss, grads = take(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    mesh = fzero.mesh(**config.axes)
    split = loss.split if config.pp > 1 else rules(config)
    step = fzero.shard(train_step, config.stage, mesh, axis=config.mean, split=split)
    with torch.device("meta"):
        shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        params = {"h": [{name: torch.empty(s) for name, s in shapes.items()} for _ in range(config.depth or 3)]}
        x = torch.empty(config.global_batch, WIDTH, dtype=config.policy.param)
    params = loss.stack(params, mesh) if config.pp > 1 else params
    return step, *step.init(params, opt), mesh.split(x, "dp")


@functools.cache
def plan_once(config: Configuration) -> fzero.graph.Plan:
    """Plan a configuration once."""
    return fzero.plan(*make_step(config), hardware="cuda")
