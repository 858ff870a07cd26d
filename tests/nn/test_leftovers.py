"""What a call leaves in the copy of the module that apply runs."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero import optim, tree


class Cached(nn.Module):
    """It makes a table at its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.table = nn.Linear(5, 5), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.cos(torch.arange(5.0))
        return self.a(x) * self.table


def test_a_plan_leaves_no_stand_in_behind():
    apply, params, buffers = fzero.nn.functional(Cached())
    opt = optim.sgd(0.1)

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())(params)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=3, mesh=mesh)
    state = step.init(params, opt)
    batch = mesh.split(torch.ones(4, 5))
    fzero.plan(step, *state, batch, world_size=8)
    assert apply.module.table is None
    *state, _ = step(*state, batch)
    assert all(type(x) is torch.Tensor for x in tree.tensors(step.gather(state[0])))


@pytest.mark.slow
def test_a_submodule_at_two_places_keeps_no_weights_alive():
    """torch's functional_call leaves what it was given in such a module."""
    shared = nn.Linear(5, 5)
    apply, params, buffers = fzero.nn.functional(nn.Sequential(shared, nn.ReLU(), shared))
    params = {name: p.clone() for name, p in params.items()}
    first = weakref.ref(params["0.weight"])
    apply(params, buffers, torch.ones(2, 5))
    del params
    gc.collect()
    assert first() is None
    assert all(p.is_meta for p in apply.module.parameters())
