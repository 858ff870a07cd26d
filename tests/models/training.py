"""A table's model trained by fzero on ranks, and by hand without it."""

from typing import Any, NamedTuple

import torch
from torch import nn

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.models.table import Batch, loss_of

# eps: Adam divides small gradients by their own size, and so a rounding error counts as much as a gradient
OPTIONS = {"eps": 1e-3, "weight_decay": 0.1}
RATE = 1e-2


class Trained(NamedTuple):
    """The results of training: the parameters and buffers at the end, and the loss of each step."""

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    losses: list[torch.Tensor]


def train_by_hand(module: nn.Module, batches: list[Batch], parts: int = 1, functional: bool = False) -> Trained:
    """Train with torch.optim alone, in place: the module is applied to equal parts of the batch, one by one.

    The parts' gradients are averaged, and so are the buffers that they write, of which each part starts with the same.

    `functional` takes gradients by torch.func: within it dropout draws the same numbers in another order than outside
    it, for inputs that are not contiguous.
    """
    opt = torch.optim.AdamW(module.parameters(), RATE, **OPTIONS)
    for p in module.parameters():  # of one that the loss does not use too: without a gradient torch would not decay it
        p.grad = torch.zeros_like(p)
    losses = []
    torch.manual_seed(1)
    for batch in batches:
        opt.zero_grad(set_to_none=False)
        start = {k: b.clone() for k, b in module.named_buffers()}
        written: list[dict[str, torch.Tensor]] = []
        loss: Any = 0
        for i in range(parts):
            _set_buffers(module, start)
            part = {k: x.chunk(parts)[i] for k, x in batch.items()}
            loss = loss + (_func_backward if functional else _backward)(module, part, parts)
            written.append({k: b.clone() for k, b in module.named_buffers()})
        losses.append(loss)
        mean = {k: sum(w[k] for w in written) / parts for k in start}
        _set_buffers(module, {k: mean[k] if b.is_floating_point() else written[0][k] for k, b in start.items()})
        opt.step()
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    return Trained(params, {k: b.clone() for k, b in module.named_buffers()}, losses)


def train_sharded(module: nn.Module, batches: list[Batch], stage: int, mesh: fzero.ranks.Mesh) -> Trained:
    """Train with fzero at a stage, from the module's parameters, which are left as they are."""
    apply, params, buffers = fzero.nn.functional(module)
    opt = optim.adamw(RATE, **OPTIONS)

    def loss_fn(params: Any, buffers: Any, batch: Batch) -> Any:
        output, buffers = apply(params, buffers, **_inputs(batch))
        return loss_of(output, batch), buffers

    def train_step(params: Any, opt_state: Any, buffers: Any, batch: Batch) -> Any:
        (loss, buffers), grads = fzero.value_and_grad(loss_fn, has_aux=True)(params, buffers, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, fzero.collectives.pmean(buffers), loss

    step = fzero.shard(train_step, stage, mesh)
    state = (*step.init(params, opt), buffers)
    losses = []
    torch.manual_seed(1)
    for batch in batches:
        *state, loss = step(*state, mesh.split(batch))
        losses.append(loss)
    return Trained(step.gather(state[0]), state[2], losses)


def assert_same_training(trained: Trained, expected: Trained, rtol: float) -> None:
    assert_trees_close(trained.losses, expected.losses, rtol, "loss")
    assert_trees_close(trained.buffers, expected.buffers, rtol, "buffers")
    assert_trees_close(trained.params, expected.params, rtol, "parameters")


def _backward(module: nn.Module, batch: Batch, parts: int) -> torch.Tensor:
    loss = loss_of(module(**_inputs(batch)), batch) / parts
    loss.backward()
    return loss.detach()


def _func_backward(module: nn.Module, batch: Batch, parts: int) -> torch.Tensor:
    def loss_fn(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(torch.func.functional_call(module, params, (), _inputs(batch)), batch) / parts

    params = dict(module.named_parameters())
    grads, loss = torch.func.grad_and_value(loss_fn)({k: p.detach() for k, p in params.items()})
    for k, p in params.items():
        p.grad += grads[k]
    return loss


def _inputs(batch: Batch) -> Batch:
    return {k: x for k, x in batch.items() if k != "targets"}


def _set_buffers(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for k, b in module.named_buffers():
            b.copy_(values[k])
