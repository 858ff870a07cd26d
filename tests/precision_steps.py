"""Losses and steps in half precision, for tests in one process and on several."""

from typing import Any

import torch
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from tests.helpers import LEAST


def wide_norm(path: str, leaf: torch.Tensor) -> bool:
    return "n" in path.split(".")[-1]


def integers(tree_: Any, seed: int, high: int = 4) -> Any:
    """The tree with small integers for its values."""
    g = torch.Generator().manual_seed(seed)
    return tree.map(lambda x: torch.randint(-high, high, x.shape, generator=g).to(torch.float32), tree_)


def linear_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are integers, whatever the parameters."""
    total = torch.zeros(())
    for i, leaf in enumerate(tree.tensors(params)):
        weights = (torch.arange(leaf.numel()) + i) % 3 - 1.0
        total = total + (leaf.reshape(-1).float() * weights).sum()
    return total * x.sum()


def step_of(opt: Any, loss: Any = linear_loss, scaled: bool = False, **options: Any) -> Any:
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        if scaled:
            scale = optim.loss_scale(opt_state).scale
            loss_, grads = fzero.scaled_value_and_grad(loss, scale, **options)(params, batch)
        else:
            loss_, grads = fzero.value_and_grad(loss, **options)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss_

    return train_step


def token_loss(params: Any, batch: Any) -> Any:
    """The sum of the losses of the tokens that count, and their number."""
    x = batch["x"]
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    losses = ((x @ params["head"][0] * params["scale"] - batch["y"]) ** 2).sum(-1)
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


HALF = [torch.bfloat16, torch.float16]
MICRO_BATCHES = st.integers(1, 5)


def train(
    train_step: Any, opt: Any, params: Any, batches: Any, stage: int, mesh: fzero.ranks.Mesh, jit: bool = False
) -> Any:
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init(params, opt)
    run = fzero.jit(step, backend="fx", **LEAST) if jit else step
    for batch in batches:
        *state, _ = run(*state, mesh.split(batch))
    return step.gather(state[0]), step.gather(state[1])


def train_unsharded(train_step: Any, opt: Any, params: Any, batches: Any) -> Any:
    state = (params if opt.precision is None else opt.precision.cast(params), opt.init(params))
    for batch in batches:
        *state, _ = train_step(*state, batch)
    return tuple(state)
