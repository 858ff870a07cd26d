"""Tied and frozen parameters of functional modules: one leaf each, no gradient and no state of a frozen one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero import optim, tree
from fzero.nn import functional
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases
from tests.nn.modules import IDS, Tied, build


def test_tied_parameters_have_one_name():
    _, params, _ = functional(build(Tied))
    assert "embed.weight" in params and "head.weight" not in params
    assert len({x.data_ptr() for x in params.values()}) == len(params)


def test_tied_parameters_stay_one_in_the_copy_without_storage():
    module: Any = functional(build(Tied)).apply.module
    assert module.head.weight is module.embed.weight


def tied_step(apply: Any, opt: Any) -> Any:
    def loss(params: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        logits, _ = apply(params, buffers, ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), (ids * 7 % 11).flatten())

    def train_step(params: Any, state: Any, buffers: Any, ids: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(params, buffers, ids)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    return train_step


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
@pytest.mark.parametrize("n", [2, 4])
def test_tied_module_trains_as_with_torch_optim(n, stage):
    module = build(Tied)
    apply, params, buffers = functional(copy.deepcopy(module))
    opt, mesh = optim.adamw(1e-2), fzero.mesh(dp=n)
    step = fzero.shard(tied_step(apply, opt), stage, mesh)
    params, state = step.init(params, opt)
    reference = torch.optim.AdamW(module.parameters(), 1e-2)
    for ids in IDS:
        reference.zero_grad()
        expected = nn.functional.cross_entropy(module(ids).flatten(0, 1), (ids * 7 % 11).flatten())
        expected.backward()
        reference.step()
        params, state, value = step(params, state, buffers, mesh.split(ids))
        assert_trees_close(value, expected.detach())
    assert_trees_close(step.gather(params), {k: p.detach() for k, p in module.named_parameters()})
    assert "head.weight" not in params


def frozen() -> Any:
    module = build(Tied)
    for p in module.blocks[0].parameters():
        p.requires_grad_(False)
    return module


def test_frozen_parameters_are_among_the_buffers():
    module = frozen()
    apply, params, buffers = functional(module)
    names = {f"blocks.0.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert buffers.keys() == names
    assert params.keys() == dict(module.named_parameters()).keys() - names
    assert {n for n, p in apply.module.named_parameters() if not p.requires_grad} == names


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_frozen_parameters_have_no_gradient_and_no_state(stage):
    module = frozen()
    apply, params, buffers = functional(copy.deepcopy(module))
    before = tree.map(torch.clone, buffers)
    opt, mesh = optim.adamw(1e-2), fzero.mesh(dp=2)
    step = fzero.shard(tied_step(apply, opt), stage, mesh)
    params, state = step.init(params, opt)
    assert not any(name.startswith("blocks.0") for name in state.mu)
    trainable = [p for p in module.parameters() if p.requires_grad]
    held = sum(x.numel() for x in tree.tensors(step.gather(state.mu)))
    assert held == sum(p.numel() for p in trainable)
    reference = torch.optim.AdamW(trainable, 1e-2)
    for ids in IDS:
        reference.zero_grad()
        nn.functional.cross_entropy(module(ids).flatten(0, 1), (ids * 7 % 11).flatten()).backward()
        reference.step()
        params, state, _ = step(params, state, buffers, mesh.split(ids))
    assert_trees_close(buffers, before, 0.0)
    whole = step.gather(params)
    assert_trees_close(whole, {k: p.detach() for k, p in module.named_parameters() if p.requires_grad})


def test_frozen_parameters_may_be_sharded_like_the_others():
    apply, params, buffers = functional(frozen())
    mesh = fzero.mesh(dp=2)

    def loss(params: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, ids)[0].square().mean()

    def program(params: Any, buffers: Any, ids: torch.Tensor) -> Any:
        return fzero.value_and_grad(loss)(fzero.partition(params), fzero.partition(buffers), ids)[0]

    assert_trees_close(mesh.spmd(program)(params, buffers, mesh.split(IDS[0])), loss(params, buffers, IDS[0]))
