"""Losses whose values or gradients are not finite."""

from collections.abc import Callable
from typing import Any

import torch

import fzero
from fzero import optim

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def log_of_negative(params: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = x[:, :-1] @ params["w"]
    return (hidden * (x[:, -1:] + 1).log()).sum() * params["n"].sum()  # HERE


def overflow(params: Any, x: torch.Tensor) -> torch.Tensor:
    grown = torch.exp(x[:, -1].half() * -30) * 100  # HERE
    return ((x[:, :-1] @ params["w"]).sum(1) * grown).float().sum() * params["n"].sum()


def root_of_zero(params: Any, x: torch.Tensor) -> torch.Tensor:
    scale = (x[:, -1:] + 2) * params["n"].sum()
    length = (scale - scale.detach() * (x[:, -1:] < -0.5)).sqrt()  # HERE
    return (length * 0).sum() + (x[:, :-1] @ params["w"]).sum()


OPT = optim.adam(0.01)


def params() -> Any:
    return {"w": torch.linspace(0.1, 0.5, 10).view(2, 5), "n": torch.full((3,), 0.5)}


def batch(ranks: int, rows: int = 2) -> torch.Tensor:
    x = torch.linspace(0.1, 1.0, ranks * rows * 3).view(ranks * rows, 3)
    x[:, -1] = 1
    return x


def train_step_of(loss: Loss, micro_batches: int = 1) -> Callable[..., Any]:
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss, micro_batches=micro_batches)(params, x)
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step


def line_of(f: Callable[..., Any]) -> str:
    """Return the line of a function that is marked HERE."""
    code = f.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    at = next(i for i in range(code.co_firstlineno, len(lines)) if "# HERE" in lines[i])
    return f"{code.co_filename}:{at + 1}"
