"""Buffers of functional modules: results of a call, ranks' running statistics, and the module's own, which stay."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fzero
from fzero import optim, tree
from fzero.nn import functional
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases
from tests.nn.modules import IMAGES, Norms, build, randn


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), [0]))
@pytest.mark.parametrize("frozen", [False, True])
def test_a_jitted_step_donates_copies_of_the_modules_buffers(frozen, stage):
    module, opt, mesh = build(Norms), optim.sgd(0.1), fzero.mesh(dp=2)
    module.conv.requires_grad_(not frozen)  # a frozen one is handed on, in memory that the module has as well
    apply, params, buffers = functional(module)
    averaged = {name for name, b in module.named_buffers() if b.is_floating_point()}

    def train_step(params: Any, opt_state: Any, buffers: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, new = apply(params, buffers, x)
            return y.square().mean(), new

        (value, new), grads = fzero.value_and_grad(loss, has_aux=True)(params, x)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        new = tree.map_with_path(lambda name, b: fzero.collectives.pmean(b) if name in averaged else b, new)
        return params, opt_state, new, value

    before = copy.deepcopy(module.state_dict())
    step = fzero.jit(fzero.shard(train_step, stage=stage, mesh=mesh), backend="fx", **LEAST)
    new, state, after, _ = step(*step.init(params, opt), buffers, mesh.split(IMAGES[0]))
    *_, after, _ = step(new, state, after, mesh.split(IMAGES[0]))
    assert after["norm2d.num_batches_tracked"] == 2 and after["norm2d.running_mean"].any()
    with pytest.raises(fzero.errors.DonatedError):
        buffers["norm2d.running_mean"].sum()
    assert_trees_close(dict(module.state_dict()), dict(before), 0.0)


def norm_step(apply: Any, opt: Any) -> Any:
    """A train step that carries BatchNorm's statistics, as the docstring of `Apply` says."""

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        return mse_loss(y, x.mean((1, 2, 3))), buffers

    def train_step(params: Any, state: Any, buffers: Any, x: torch.Tensor) -> Any:
        (value, buffers), grads = fzero.value_and_grad(loss, has_aux=True)(params, buffers, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, fzero.collectives.pmean(buffers), value

    return train_step


def test_unsharded_training_carries_the_modules_own_running_statistics():
    module = build(Norms)
    apply, params, buffers = functional(copy.deepcopy(module))
    opt = optim.sgd(0.1)
    step, state = norm_step(apply, opt), opt.init(params)
    reference = torch.optim.SGD(module.parameters(), 0.1)
    for x in IMAGES:
        reference.zero_grad()
        mse_loss(module(x), x.mean((1, 2, 3))).backward()
        reference.step()
        params, state, buffers, _ = step(params, state, buffers, x)
        assert_trees_close(buffers, dict(module.named_buffers()))
    assert_trees_close(params, {k: p.detach() for k, p in module.named_parameters()})


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", [2, 4])
def test_running_statistics_of_a_sharded_step_are_the_mean_over_ranks(n, stage):
    opt, mesh = optim.sgd(0.1), fzero.mesh(dp=n)
    module = build(Norms)
    apply, params, buffers = functional(copy.deepcopy(module))
    step = fzero.shard(norm_step(apply, opt), stage, mesh)
    params, state = step.init(params, opt)
    by_hand = dict(copy.deepcopy(module).named_buffers())
    for i, x in enumerate(IMAGES):
        replicas = []
        for part in x.chunk(n):  # each rank starts from the same statistics
            replica = copy.deepcopy(module)
            replica.load_state_dict({**step.gather(params), **by_hand})
            replica(part)
            replicas.append(dict(replica.named_buffers()))
        by_hand = {
            k: sum(r[k] for r in replicas) / n if v.is_floating_point() else replicas[0][k] for k, v in by_hand.items()
        }
        params, state, buffers, _ = step(params, state, buffers, mesh.split(x))
        assert_trees_close(buffers, by_hand, what=f"step {i}")
        assert buffers["norm2d.num_batches_tracked"].dtype == torch.int64
        assert buffers["norm2d.num_batches_tracked"] == i + 1


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_batch_norm_in_evaluation_mode_trains_as_unsharded(stage):
    module = build(Norms)
    module(IMAGES[0])
    apply, params, buffers = functional(module.eval())
    opt, mesh = optim.sgd(0.1), fzero.mesh(dp=2)
    train_step = norm_step(apply, opt)
    step = fzero.shard(train_step, stage, mesh)
    sharded, state = (params, opt.init(params), buffers), None
    p, state = step.init(params, opt)
    b = buffers
    for x in IMAGES:
        *sharded, expected = train_step(*sharded, x)
        p, state, b, value = step(p, state, b, mesh.split(x))
        assert_trees_close(value, expected)
    assert_trees_close(step.gather(p), sharded[0])
    assert_trees_close(b, buffers)


def test_buffers_of_one_rank_are_refused_as_a_replicated_result():
    apply, params, buffers = functional(build(Norms))
    mesh = fzero.mesh(dp=2)
    with pytest.raises(ValueError, match=r"'norm2d.running_mean' differs by rank.*fzero.collectives.pmean"):
        mesh.spmd(lambda p, b, x: apply(p, b, x)[1])(params, buffers, mesh.split(IMAGES[0]))


@pytest.mark.parametrize("n", [2, 4])
def test_cumulative_batch_norm_runs_on_simulated_ranks(n):
    """With momentum=None the running mean is that of all batches: BatchNorm reads its counter as a Python number."""
    module = nn.BatchNorm1d(3, momentum=None).double()
    apply, params, buffers = functional(module)
    mesh, x = fzero.mesh(dp=n), randn(2, 12, 3)
    for batch in x:
        buffers = mesh.spmd(lambda p, b, x: fzero.collectives.pmean(apply(p, b, x)[1]))(
            params, buffers, mesh.split(batch)
        )
    assert_trees_close(buffers["running_mean"], x.mean((0, 1)))


class Writer(nn.Module):
    """A module that writes one of its buffers, each in another way."""

    history: torch.Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.name:
            case "calls":
                self.calls += 1
            case "history":
                self.history[0] += 1
            case "last":
                self.last = x.mean(0)
            case "total":
                self.total += x.sum(0)
            case "scratch":
                self.scratch += x.sum(0)
            case "cache":
                self.cache = x.sum(0)
        return (self.w * x).sum()


WRITTEN = ["calls", "history", "last", "total", "scratch", "cache"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_buffer_that_forward_writes_is_returned_or_named_in_an_error(name, training):
    module = Writer(name).train(training)
    apply, params, buffers = functional(copy.deepcopy(module))
    before = tree.map(torch.clone, buffers)
    x = torch.arange(6.0).reshape(2, 3)
    module(x)
    try:
        _, after = apply(params, buffers, x)
    except (ValueError, RuntimeError) as error:
        assert repr(name) in str(error)
        return
    assert_trees_close(buffers, before, 0.0, "argument")
    assert_trees_close(after, dict(module.named_buffers()), 0.0, "result")


class Statistics(nn.Module):
    """A module whose ranks write different values into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += x.sum(0)
        self.last = x.mean(0)
        return (self.w * x).sum()


def test_buffers_that_ranks_write_differ_by_rank():
    apply, params, buffers = functional(Statistics())
    mesh = fzero.mesh(dp=2)
    x = torch.arange(12.0).reshape(4, 3)
    program = mesh.spmd(lambda p, b, x: fzero.PerRank(apply(p, b, x)[1]))
    after = program(params, buffers, mesh.split(x)).value
    assert after["last"].tolist() == [[1.5, 2.5, 3.5], [7.5, 8.5, 9.5]]
    assert after["total"].tolist() == [[3, 5, 7], [15, 17, 19]]
    assert after["calls"].tolist() == [1, 1]
