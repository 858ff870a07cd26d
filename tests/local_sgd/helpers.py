"""A small model whose leaves do not divide by the number of ranks, and its train step and batches."""

from typing import Any

import torch

import fzero
from fzero import optim

SHAPES = {"first.w": (3, 5), "first.b": (5,), "empty": (0, 2), "second.w": (5,), "scale": ()}
NAMES = list(SHAPES)


def start(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x.to(p["first.w"].dtype) @ p["first.w"] + p["first.b"])
    return ((hidden @ p["second.w"] * p["scale"] - 1) ** 2).mean() + p["empty"].sum()


def train_step_of(opt: Any, **options: Any) -> Any:
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss, **options)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step


def batches_of(steps: int, ranks: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2 * ranks, 3, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]
