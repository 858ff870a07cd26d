"""Steps that the cases of fzero.jit run on every rank, and their peak memory."""

from typing import Any

import torch
from torch.fx import GraphModule

import fzero
from fzero import optim
from tests.helpers import mlp_batch, mlp_params
from tests.memory import peak_bytes

OPT = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, eps=1e-3))


def train_both(step: fzero.zero.ShardedStep, jitted: fzero.graph.Jitted, steps: int, size: int) -> tuple[Any, Any]:
    eager, fast = step.init(mlp_params(), OPT), jitted.init(mlp_params(), OPT)
    for i in range(steps):
        batch = step.mesh.split(mlp_batch(size, seed=i))
        *eager, loss = step(*eager, batch)
        *fast, other = jitted(*fast, batch)
        assert torch.equal(loss, other) or jitted.options.backend != "fx"
    return list(eager), list(fast)


def step_peak(jitted: fzero.graph.Jitted, held: list[Any], batch: Any) -> int:
    """Return the most bytes that a step holds besides its arguments.

    Nothing else may hold the state, the one item of `held`; the new state takes its place.
    """

    def run() -> None:
        *state, _ = jitted(*held.pop(), batch)
        held.append(state)

    return peak_bytes(run)


def run_uncompiled(codes: Any, one: Any) -> Any:
    """Take the place of Inductor: run each segment operation by operation."""
    return ((code, lambda args, graph=code.graph: GraphModule({}, graph).forward(*args)) for code in codes)
