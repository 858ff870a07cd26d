"""Training with an optimizer on shards and with torch's, and the data for it."""

from typing import Any

import torch

import fzero
from fzero import tree
from tests.helpers import train_step_for

RTOL = {torch.float32: 1e-6, torch.float64: 1e-12}
SIZES = [1, 3, 4]  # numbers of ranks


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def params_of(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Two blocks, a head and a 0-d leaf; no size divides by 3 or 4 ranks."""
    return {
        "blocks": [{"w": normal((5, 5), 2 * i, dtype), "b": normal((5,), 2 * i + 1, dtype)} for i in range(2)],
        "head": (normal((5, 2), 7, dtype), None),
        "scale": normal((), 8, dtype),
    }


def loss_of(params: Any, batch: torch.Tensor) -> torch.Tensor:
    x = batch
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    return (x @ params["head"][0] * params["scale"] - batch[:, :2]).square().mean()


def batches_of(steps: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [normal((12, 5), 100 + i, dtype) for i in range(steps)]


def train(opt: Any, params: Any, batches: list[torch.Tensor], loss: Any = loss_of) -> Any:
    """Train unsharded with an optimizer."""
    step, state = train_step_for(loss, opt), opt.init(params)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return params


def train_with_torch(
    make: Any, params: Any, batches: list[torch.Tensor], schedule: Any = None, clip: Any = None, loss: Any = loss_of
) -> Any:
    """Train with the torch.optim optimizer that `make` builds from the list of leaves."""
    params = tree.map(lambda x: x.clone().requires_grad_(), params)
    leaves = tree.tensors(params)
    optimizer = make(leaves)
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for batch in batches:
        optimizer.zero_grad()
        loss(params, batch).backward()
        if clip:
            clip(leaves)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return tree.map(lambda x: x.detach(), params)


def matrices(params: Any) -> Any:
    return tree.map(lambda p: p.ndim >= 2, params)


def partition_simulated(params: Any, n: int, units: Any = None) -> Any:
    return fzero.mesh(dp=n).spmd(lambda t: fzero.partition(t, units=units))(params)


def poison(boxes: Any, value: float) -> Any:
    """Fill the padding of every shard."""

    def fill(x: Any) -> Any:
        if not isinstance(x, fzero.sharding.Shard):
            return x
        data = x.data.clone()
        data.view(-1)[x.spec.numel :] = value if data.is_floating_point() else 255
        return fzero.sharding.Shard(data, x.spec_id)

    return tree.map(fill, boxes, is_leaf=lambda x: isinstance(x, (fzero.sharding.Shard, fzero.sharding.Slot)))
