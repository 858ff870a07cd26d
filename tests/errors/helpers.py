"""A small step on two ranks, and rows of bad input: what is done, the error, and its message."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from tests.helpers import ALL_STAGES, train_step_for

TWO, FOUR = fzero.mesh(dp=2), fzero.mesh(dp=4)
STAGES = ALL_STAGES
SHARDED = STAGES[1:]


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses every leaf, whatever the tree."""
    return x.mean() * sum(leaf.square().sum() for leaf in tree.tensors(params))


PARAMS: dict[str, Any] = {"a": {"w": torch.ones(3, 2), "b": torch.ones(2)}, "c": torch.ones(5)}
X = torch.ones(8, 3)
OPT = optim.adamw(0.1)
TRAIN_STEP = train_step_for(loss_of, OPT)


def step_of(
    stage: Any, mesh: fzero.ranks.Mesh = TWO, train_step: Any = TRAIN_STEP, **options: Any
) -> fzero.zero.ShardedStep:
    return fzero.shard(train_step, stage, mesh, **options)


def init(stage: int, mesh: fzero.ranks.Mesh = TWO, params: Any = PARAMS) -> tuple[Any, Any]:
    return step_of(stage, mesh).init(params, OPT)


def run(stage: int, params: Any, state: Any, mesh: fzero.ranks.Mesh = TWO, batch: Any = None, **options: Any) -> Any:
    return step_of(stage, mesh, **options)(params, state, mesh.split(X) if batch is None else batch)


def spmd(program: Callable[..., Any], *args: Any) -> Any:
    return TWO.spmd(program)(*args)


BOXES, BOXED_STATE = init(3)
SHARD, SLOT = BOXES["a"]["w"], BOXES["a"]["b"]
PIECES = TWO.split(X)

# what is done, the error, a pattern in its message
Row = tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]


def check(row: Row) -> None:
    action, error, message = row
    with pytest.raises(error, match=message):
        action()


def value_and_grad(f: Any = loss_of, **options: Any) -> Any:
    return fzero.value_and_grad(f, **options)
