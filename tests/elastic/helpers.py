"""A run in float64 that any ranks may train, and whose end does not depend on them."""

from collections.abc import Callable
from typing import Any

import torch

import fzero
from fzero import optim, random
from tests.helpers import LEAST

__all__ = ["GLOBAL_BATCH", "STEPS", "final", "train"]

STEPS, GLOBAL_BATCH = 8, 12
OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def params() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 7), "b": (7,), "v": (7, 1)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def examples() -> torch.Tensor:
    return torch.randn(50, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(params: Any, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ params["w"] + params["b"] + noise) @ params["v"]
    return (y.squeeze(-1) - x.sum(-1)).square().mean()


def train(
    run: fzero.elastic.ElasticRun,
    stage: int = 3,
    jitted: bool = False,
    at: Callable[[str, int], None] = lambda moment, step: None,
    steps: int = STEPS,
) -> Any:
    """Train to the end; `at` is called at each moment of a step, within the forward pass too."""
    doing = [0]

    def loss_fn(params: Any, x: Any, noise: torch.Tensor) -> torch.Tensor:
        at("forward", doing[0])
        return loss_of(params, x, noise)

    def train_step(params: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        key, use = random.split(key)
        noise = random.normal(use, (7,), dtype=torch.float64)
        count = run.batch_plan.accumulation
        loss, grads = fzero.value_and_grad(loss_fn, micro_batches=count, batch_argnums=1)(params, batch, noise)
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, key, loss

    step = fzero.shard(train_step, stage=stage, mesh=run.mesh)
    state = run.restore((*step.init(params(), OPT), random.key(7)))
    data = fzero.data.batches(examples(), run.mesh, global_batch=GLOBAL_BATCH)
    call = fzero.jit(step, backend="fx", **LEAST) if jitted else step
    for i, batch in data.steps(run.step, steps):
        doing[0] = i
        *state, _ = call(*state, batch)
        at("updated", i)
        run.save(i + 1, tuple(state))
        at("kept", i)
    return step.gather(state[0])


def final(steps: int = STEPS) -> Any:
    """The parameters of an uninterrupted run without fzero's ranks: plain steps on whole batches."""
    p, key = params(), random.key(7)
    opt_state = OPT.init(p)
    data = fzero.data.batches(examples(), fzero.mesh(dp=1, simulate=True), global_batch=GLOBAL_BATCH)
    for i in range(steps):
        key, use = random.split(key)
        noise = random.normal(use, (7,), dtype=torch.float64)
        grads = torch.func.grad(loss_of)(p, examples()[data.indices(i)], noise)
        updates, opt_state = OPT.update(grads, opt_state, p)
        p = optim.apply_updates(p, updates)
    return p
