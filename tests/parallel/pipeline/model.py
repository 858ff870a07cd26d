"""A small model split at its blocks, with tied ends and a weighted loss; and training with it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fzero
from fzero import optim, tree

OPT = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
WIDTH = 5


def make_params(depth: int, dtype: torch.dtype = torch.float64, tied: bool = True) -> dict[str, Any]:
    """Blocks that differ, so that their order shows; a table at one end, and at the other unless it is tied."""
    g = torch.Generator().manual_seed(depth)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) / 2).to(dtype)

    blocks = [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(depth)]
    params = {"blocks": blocks, "table": normal(7, WIDTH), "scale": normal()}
    return params if tied else {**params, "head": normal(7, WIDTH)}


def fill(values: Any) -> Any:
    """The same tree with numbers that are all different, ties kept."""
    count = iter(range(1 << 20))

    def numbers(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return torch.tensor([next(count) for _ in range(x.numel())]).to(x.dtype).view(x.shape)

    return tree.map(numbers, values)


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Add a layer to x [b, WIDTH]."""
    return x + torch.tanh(x @ p["w"] + p["b"])


def first(rest: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Look tokens [b] up."""
    return rest["table"][batch["tokens"]] * rest["scale"]


def last(rest: dict[str, Any], x: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    """Sum weighted losses, and weights."""
    logits = x @ rest.get("head", rest["table"]).T
    losses = F.cross_entropy(logits, batch["targets"], reduction="none")
    return (losses * batch["weights"].to(losses.dtype)).sum(), batch["weights"].sum()


def make_batch(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, targets, and weights of which some are zero."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(7, (2, size), generator=g).unbind(0)
    weights = torch.rand(size, generator=g, dtype=torch.float64).sub(0.3).relu()
    weights[-1] = 1.0
    return {"tokens": tokens, "targets": targets, "weights": weights}


def make_loss(micro_batches: int, **options: Any) -> fzero.parallel.pipeline.Pipeline:
    """The pipelined loss."""
    parts = {"block": block, "first": first, "last": last, **options}
    return fzero.pipeline(micro_batches=micro_batches, **parts)


def make_step(loss: Callable[..., Any], opt: Any = OPT, **options: Any) -> Callable[..., Any]:
    """The ordinary train step of a weighted loss."""

    def train_step(params: Any, opt_state: Any, *args: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, reduce="weighted", **options)(params, *args)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step


def train_plainly(
    loss: fzero.parallel.pipeline.Pipeline, params: Any, size: int, *more: Any, opt: Any = OPT, steps: int = 2
) -> Any:
    """Train without a mesh: the parameters, the optimizer's state and the losses."""
    step, state, losses = make_step(loss, opt), (params, opt.init(params)), []
    for i in range(steps):
        *state, value = step(*state, make_batch(size, i), *more)
        losses.append(value)
    return state[0], losses


def train_on(
    mesh: fzero.ranks.Mesh,
    stage: Any,
    loss: fzero.parallel.pipeline.Pipeline,
    params: Any,
    size: int,
    *more: Any,
    opt: Any = OPT,
    jit: dict[str, Any] | None = None,
    steps: int = 2,
    **options: Any,
) -> Any:
    """Train on a mesh; return the whole parameters and the losses, as `train_plainly` does."""
    axes = tuple([name for name in mesh.axis_names if name in ("dp", "pp")])
    step: Any = fzero.shard(make_step(loss, opt, **options), stage, mesh, axis=axes, split=loss.split)
    state, losses = step.init(loss.stack(params, mesh), opt), []
    run = step if jit is None else fzero.jit(step, **jit)
    for i in range(steps):
        batch = make_batch(size, i)
        *state, value = run(*state, mesh.split(batch, "dp") if "dp" in mesh.axis_names else batch, *more)
        losses.append(value)
    return loss.unstack(step.gather(state[0]), mesh), losses


def train_by_small_gradients(mesh: fzero.ranks.Mesh, scale: float, jit: dict[str, Any] | None = None) -> Any:
    """Train in float16 by gradients that vanish there without a loss scale: how far the masters move."""
    policy = fzero.Precision(param=torch.float16)
    opt = optim.master_weights(optim.sgd(1e5), policy)

    def small(rest: Any, x: torch.Tensor, batch: Any) -> Any:
        return (x @ rest["table"].T).float().square().sum() * 1e-9, batch["weights"].sum()

    loss, params = make_loss(2, last=small), make_params(4, torch.float32)

    def train_step(params: Any, state: Any, batch: Any, scale: torch.Tensor) -> Any:
        _, grads = fzero.scaled_value_and_grad(loss, scale, reduce="weighted", precision=policy)(params, batch)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    step: Any = fzero.shard(train_step, 1, mesh, axis=mesh.axis_names, split=loss.split)
    state = step.init(loss.stack(params, mesh), opt)
    run = step if jit is None else fzero.jit(step, **jit)
    state = run(*state, mesh.split(make_batch(8), "dp"), torch.tensor(scale))
    return tree.map(torch.sub, loss.unstack(step.gather(optim.master_params(*state)), mesh), params)
