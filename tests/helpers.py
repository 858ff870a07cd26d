"""What several test files use."""

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import Phase, settings

import fzero
from fzero import optim

T = TypeVar("T")

ALL_STAGES = range(len(fzero.zero.STAGES))


def collectives_of(row: fzero.zero.StageLayouts, k: int) -> tuple[int, int, int]:
    """Count gathers, reduce-scatters and all-reduces of a unit in a step of k micro-batches, by the words of a stage.

    Shards are gathered for each micro-batch, or once where full gradients stay beside the full parameters.
    """
    scatters = {"replicated": 0, "once": 1, "each": k}[row.grads]
    gathers = scatters if row.params == "sharded" else int(row.opt_state == "sharded")
    return gathers, scatters, int(row.grads == "replicated")


# one schedule, so that jit compares no others: where the schedule is not what a test is about
LEAST: dict[str, Any] = {"prefetch": 0, "in_flight": 0, "bucket_bytes": 0, "max_reuse_bytes": 0, "recompute": False}


def either(few: T, many: T) -> T:
    """The first in `make test`, and the second in `make test-all`."""
    return many if os.environ.get("HYPOTHESIS_PROFILE") == "all" else few


# torch 2.11 multiplies no matrices with a symbol for a size, so there fzero traces each length
needs_symbols = pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch's products need numbers for sizes")


def examples(few: int, many: int) -> settings:
    """Try so many examples of a law in `make test`, and in `make test-all`; 0 means those of `@example` alone.

    `make check` tries five at most.
    """
    number = min(few, 5) if os.environ.get("HYPOTHESIS_PROFILE") == "check" else either(few, many)
    return settings(max_examples=number) if number else settings(max_examples=1, phases=[Phase.explicit])


def cases(always: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """List all cases of a test: the first ones always run, and the rest in `make test-all`."""
    first = [*always]
    rest = [x for x in every if x not in first]
    return [*first, *[pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in rest]]


def train_step_for(loss_fn: Callable[..., Any], opt: Any, **options: Any) -> Callable[..., Any]:
    """An ordinary unsharded train step."""

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn, **options)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step


def mlp_params(dtype: torch.dtype = torch.float64, seed: int = 0, width: int = 7) -> dict[str, Any]:
    """Two blocks and a head; no size divides by 2 or more ranks."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) / 3

    return {
        "blocks": [{"w": normal(width, width), "b": normal(width)} for _ in range(2)],
        "scale": normal(),
        "head": (normal(width, 3),),
    }


def mlp_loss(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean squared error of the MLP."""
    x = batch["x"]
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    return ((x @ params["head"][0] * params["scale"] - batch["y"]) ** 2).mean()


def mlp_batch(size: int, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = 7) -> dict[str, torch.Tensor]:
    """A batch for it."""
    g = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(size, width, generator=g, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randn(size, 3, generator=g, dtype=torch.float64).to(dtype)}
