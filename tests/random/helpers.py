"""A step that draws by key."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fzero
from fzero import PerRank, optim, random


def masks(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a rank's draws: in several ways, and of several sizes."""
    return F.dropout(x, 0.5) + torch.randn(x.shape) + F.dropout1d(x[None], 0.5)[0] * torch.rand_like(x)


def loss_fn(params: Any, batch: Any) -> Any:
    h = F.dropout(torch.tanh(batch["x"] @ params["w"]), 0.3)
    return (h @ params["v"] - batch["y"]).square().mean(), h == 0


def made_by(key: torch.Tensor) -> Any:
    return random.seeded(lambda: {name: p.detach() for name, p in nn.Linear(5, 7).named_parameters()})(key)


def keyed_step(opt: Any, **options: Any) -> Any:
    def train_step(params: Any, opt_state: Any, batch: Any, key: torch.Tensor) -> Any:
        seeded = random.seeded(loss_fn)
        f = fzero.value_and_grad(lambda p, b: seeded(key, p, b), has_aux=True, **options)
        (loss, dropped), grads = f(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss, PerRank(dropped)

    return train_step


G = torch.Generator().manual_seed(0)
PARAMS = {
    "w": torch.randn(5, 7, generator=G, dtype=torch.float64),
    "v": torch.randn(7, 3, generator=G, dtype=torch.float64),
}


BATCH = {
    "x": torch.randn(24, 5, generator=G, dtype=torch.float64),
    "y": torch.randn(24, 3, generator=G, dtype=torch.float64),
}
