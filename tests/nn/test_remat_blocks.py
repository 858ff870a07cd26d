"""functional(remat=): the repeated blocks of a module, computed again."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch.func import functional_call

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.helpers import cases


class Residual(torch.nn.Module):
    """A block with statistics, dropout, a keyword, and a tuple as its result."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        y = self.norm(self.linear(x))
        return self.dropout(torch.tanh(y)) * scale + x, y


class Net(torch.nn.Module):
    """Three of them."""

    def __init__(self, dropout: float, tied: bool) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList([Residual(6, dropout) for _ in range(3)])
        self.out = torch.nn.Linear(6, 2)
        if tied:
            self.h[2].linear.weight = self.h[0].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for b in self.h:
            assert b.linear.weight.shape == (6, 6)  # attributes are as they were
            x, y = b(x, scale=0.5)
            total = total + y.mean()
        return self.out(x) + total


def module_step(module: torch.nn.Module, remat: Any, whole: bool = True) -> Any:
    apply, params, buffers = fzero.nn.functional(module, remat)

    def loss(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers

    def program(params, buffers, x):
        (value, buffers), grads = fzero.value_and_grad(loss, has_aux=True, gather=whole)(params, buffers, x)
        return value, fzero.collectives.pmean({k: v.double() for k, v in buffers.items()}), fzero.gather(grads)

    return program, params, buffers


def net(dropout: float = 0.0, tied: bool = False) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(dropout, tied).double(), torch.randn(8, 6, dtype=torch.float64)


@pytest.mark.parametrize("remat", (True, "matmuls"))
def test_a_module_with_blocks_under_remat_equals_the_plain_one(remat):
    module, x = net(dropout=0.2)
    results = []
    for r in (False, remat):
        program, params, buffers = module_step(module, r)
        torch.manual_seed(0)
        results.append(program(params, buffers, x))
    assert_trees_close(*results)
    assert results[1][1]["h.0.norm.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    "sim,stage,tied",
    cases(
        [("vmap", 2, False), ("lockstep", 3, False), ("vmap", 3, True)],
        itertools.product(("vmap", "lockstep"), (2, 3), (False, True)),
    ),
)
def test_a_sharded_module_with_blocks_under_remat_equals_the_plain_one(sim, stage, tied):
    module, x = net(tied=tied)
    mesh = fzero.mesh(dp=2, simulate=sim)
    results, gathers = [], []
    for remat, whole in ((False, True), (True, True), (True, False), ("matmuls", False)):
        program, params, buffers = module_step(module, remat, whole)

        def sharded(params, buffers, x, program=program):
            params = fzero.partition(params)
            params = params if stage == 2 else fzero.tree.map(lambda x: x, params)  # a box forgets its origin
            return program(params, buffers, x)

        with fzero.collectives.record() as log:
            results.append(mesh.spmd(sharded)(params, buffers, mesh.split(x)))
        gathers.append([e.unit for e in log.events if e.kind == "all_gather"])
    for other in results[1:]:
        assert_trees_close(other, results[0])
    if stage == 3:  # the last ones are of the gradients
        again = ["h.1"] if tied else ["h.2", "h.1", "h.0"]
        assert [u for u in gathers[2][: -len(gathers[0]) // 2] if u != "out"].count("h.1") == 2
        assert len(gathers[2]) == len(gathers[0]) + (2 if tied else len(again))


def test_blocks_under_remat_of_a_module_and_its_copy_are_apart():
    module, x = net()
    _, params, buffers = module_step(module, True)
    assert "forward" not in module.h[0].__dict__
    apply = fzero.nn.functional(module, remat=True).apply
    assert apply.blocks == ("h.0", "h.1", "h.2")
    twin = copy.deepcopy(apply.module)
    assert twin.h[1].forward.block is twin.h[1]
    assert_trees_close(functional_call(twin, {**params, **buffers}, (x,)), apply(params, buffers, x)[0])


def test_remat_of_a_module_without_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no repeated blocks"):
        fzero.nn.functional(torch.nn.Linear(2, 2), remat=True)


@pytest.mark.parametrize("name", ("gpt2", "llama"))
def test_a_language_model_of_transformers_runs_its_blocks_again(name):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    common = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=8, n_embd=8, n_layer=2, n_head=2, **common)
    else:
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, **common
        )
    module = transformers.AutoModelForCausalLM.from_config(config).double().train()
    results = []
    for remat in (False, True, "matmuls"):
        apply, params, buffers = fzero.nn.functional(module, remat)

        def loss(p, apply=apply, buffers=buffers, **options):
            return apply(p, buffers, input_ids=ids, labels=ids, **options)[0].loss

        torch.manual_seed(0)
        results.append(fzero.value_and_grad(lambda p, loss=loss: loss(p, use_cache=False))(params))
        if remat:
            with pytest.raises(TypeError, match=r"is a DynamicCache.*use_cache=False"):
                fzero.value_and_grad(lambda p, loss=loss: loss(p, use_cache=True))(params)
    assert_trees_close(results[1], results[0])
    assert_trees_close(results[2], results[0])


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_frozen_parameters_stay_in_their_boxes(simulate):
    """With gather=False each block gathers its frozen parameters for itself, and they cost no gradient."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)]).double()
    for layer in module:
        layer.weight.requires_grad_(False)
    plain, params, frozen = fzero.nn.functional(module)
    apply = fzero.nn.functional(module, remat=True).apply
    x, opt = torch.randn(4, 6).double(), optim.sgd(0.1)

    def train_step(params: Any, opt_state: Any, frozen: Any, x: Any, apply: Any = plain, gather: bool = True) -> Any:
        loss = lambda p, f, x: apply(p, f, x)[0].square().mean()  # noqa: E731
        value, grads = fzero.value_and_grad(loss, gather=gather)(params, frozen, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    expected = train_step(params, opt.init(params), frozen, x)
    mesh = fzero.mesh(dp=2, simulate=simulate)
    lazy = functools.partial(train_step, apply=apply, gather=False)
    step = fzero.shard(lazy, stage=3, mesh=mesh)
    boxes, _ = step.init(frozen, optim.set_to_zero())
    with fzero.collectives.record() as log:
        new, _, loss = step(*step.init(params, opt), boxes, mesh.split(x))
    assert_trees_close((step.gather(new), loss), (expected[0], expected[2]))
    assert log.count("all_gather") == 12 and log.count("reduce_scatter") == 3  # 3 blocks x 2 units, twice; biases
