"""What pyright says of a user's script: it is among the files that `make types` checks, under the strict rules."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from typing import Any, NamedTuple, assert_type

import torch

import fzero
from fzero import optim


class Params(NamedTuple):
    """A user's own tree."""

    w: torch.Tensor


def loss_fn(params: Params, x: torch.Tensor) -> torch.Tensor:
    return (x @ params.w).square().mean()


def loss_and_aux(params: Params, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return loss_fn(params, x), {"x": x}


def train_step(params: Params, opt_state: Any, x: torch.Tensor) -> tuple[Params, Any]:
    return params, opt_state


def script() -> None:
    params, x = Params(torch.ones(3, 2)), torch.ones(4, 3)
    loss = fzero.value_and_grad(loss_fn)(params, x)[0]
    assert_type(loss, torch.Tensor)
    value = fzero.value_and_grad(loss_and_aux, has_aux=True, micro_batches=2)(params, x)[0]
    assert_type(value, tuple[torch.Tensor, dict[str, torch.Tensor]])
    mesh = fzero.mesh(dp=2, simulate="lockstep")
    assert_type(mesh, fzero.ranks.Mesh)
    assert_type(mesh.split(x), fzero.PerRank)
    assert_type(mesh.split(x, ()), torch.Tensor)
    opt = optim.adamw(1e-3)
    step = fzero.shard(train_step, 3, mesh)
    assert_type(step, fzero.zero.ShardedStep)
    assert_type(fzero.tree.numel(params), int)
    assert_type(fzero.jit(step, backend="fx"), fzero.graph.Jitted)
    assert_type(fzero.observe.nonfinite(step)(*step.init(params, opt), mesh.split(x)), fzero.observe.Nonfinite)
    assert_type(fzero.data.batches([1, 2], mesh, global_batch=2).per_epoch, int)


def mistakes() -> None:
    fzero.value_and_grad(loss_fn)(Params(torch.ones(3, 2)))  # pyright: ignore[reportCallIssue]
    fzero.shard(loss_fn, "2")  # pyright: ignore[reportArgumentType]
    fzero.jit(loss_fn, backend="cuda")  # pyright: ignore[reportArgumentType]
    fzero.mesh(dp=2, simulate="threads")  # pyright: ignore[reportArgumentType]
