"""A small model with a layer of experts, whose every part the laws may vary."""

from collections.abc import Callable
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.parallel import experts as moe

D, F = 6, 10


def normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) / 2


def experts_params(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"up": (count, D, F), "bias": (count, F), "down": (count, F, D)}
    return {name: normal(g, *shape) for name, shape in shapes.items()}


def params_of(count: int = 4, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed + 1)
    layer = {"router": normal(g, D, count), "experts": experts_params(count, seed)}
    return {"inp": normal(g, D, D), "layer": layer, "head": normal(g, D, 3)}


def batch_of(size: int = 8, tokens: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed + 100)
    return {"x": 2 * normal(g, size, tokens, D), "y": 2 * normal(g, size, tokens, 3)}


def ffn(p: Any, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    return linear(torch.tanh(linear(rows, p["up"], p["bias"])), p["down"])


def sum_by_hand(p: Any, x: torch.Tensor, routing: moe.Routing) -> torch.Tensor:
    """The sum over a token's choices of gate x expert(token), token by token."""
    out = torch.zeros_like(x)
    for i, j in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        for e, gate in zip(routing.experts[i, j].tolist(), routing.gates[i, j], strict=True):
            out[i, j] += gate * (torch.tanh(x[i, j] @ p["up"][e] + p["bias"][e]) @ p["down"][e])
    return out


def loss_for(
    k: int = 2,
    capacity: float | None = None,
    over: Any = "batch",
    call: Callable[..., torch.Tensor] = moe.layer,
    remat: bool = False,
    **routing: Any,
) -> Callable[..., torch.Tensor]:
    def block(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed = moe.route(x @ p["router"], k, **{"normalize": True, **routing})
        y = call(ffn, p["experts"], x, routed, capacity=capacity)
        return x + y, 0.1 * moe.balance_loss(routed, over) + 0.01 * moe.z_loss(routed)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x, auxiliary = (fzero.remat(block) if remat else block)(params["layer"], torch.tanh(batch["x"] @ params["inp"]))
        return (x @ params["head"] - batch["y"]).square().mean() + auxiliary

    return loss_fn


OPT = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, eps=1e-3))
