"""Every model of the table, sharded at every stage, trains as it does unsharded."""

import copy
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fzero
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases, either
from tests.models.table import MODELS, VOCAB, Model, build_module, pretrained
from tests.models.training import Trained, assert_same_training, train_by_hand, train_sharded

RANKS = 2
LOCKSTEP = fzero.mesh(dp=RANKS, simulate="lockstep")
VMAP = fzero.mesh(dp=RANKS, simulate="vmap")


def models(which: Callable[[Model], bool] = lambda model: True, always: Container[str] = MODELS) -> list[Any]:
    """List the models of which something holds. Marked are the slow ones, and those that need not always run."""
    slow = {k: m.slow or k not in always for k, m in MODELS.items()}
    return [pytest.param(k, marks=[pytest.mark.slow] * slow[k]) for k, m in MODELS.items() if which(m)]


def runs(
    which: Callable[[Model], bool] = lambda model: True, stages: Sequence[int] = ALL_STAGES, first: int = 0
) -> list[Any]:
    """List these models, each at each stage. Every fourth model, from the `first` on, always runs: at stage 1 or 3."""
    results = []
    for i, name in enumerate([k for k, m in MODELS.items() if which(m)]):
        always = () if MODELS[name].slow or i % 4 != first else (3 if i % 8 > 3 else 1,)
        results += [pytest.param(name, s, marks=[pytest.mark.slow] * (s not in always)) for s in stages]
    return results


@functools.cache
def train_unsharded(name: str, attention: str | None = None) -> Trained:
    """Train on whole batches, or part by part where a rank's part gives numbers of its own."""
    parts = RANKS if MODELS[name].per_rank else 1
    return train_by_hand(
        build_module(name, attention), MODELS[name].batches(), parts, MODELS[name].per_rank == "dropout"
    )


@pytest.mark.parametrize("name,stage", runs())
def test_ranks_in_lockstep_train_as_unsharded(name, stage):
    trained = train_sharded(build_module(name), MODELS[name].batches(), stage, LOCKSTEP)
    assert_same_training(trained, train_unsharded(name), MODELS[name].rtol)


@pytest.mark.parametrize("name,stage", runs(lambda m: not m.vmap and m.per_rank != "dropout", first=1))
def test_ranks_under_vmap_train_as_unsharded(name, stage):
    trained = train_sharded(build_module(name, "eager"), MODELS[name].batches(), stage, VMAP)
    assert_same_training(trained, train_unsharded(name, "eager"), MODELS[name].rtol)


@pytest.mark.parametrize("name", models(lambda m: bool(m.vmap)))
def test_the_error_of_a_model_that_vmap_cannot_run_advises_lockstep(name):
    with pytest.raises(RuntimeError, match=MODELS[name].vmap) as caught:
        train_sharded(build_module(name, "eager"), MODELS[name].batches(1), 0, VMAP)
    assert 'simulate="lockstep"' in "".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", models(lambda m: not m.vmap and m.per_rank == "dropout", always=("gpt2, dropout", "vit, dropout"))
)
def test_under_vmap_ranks_draw_other_numbers_but_all_stages_the_same(name):
    first, *others = [
        train_sharded(build_module(name, "eager"), MODELS[name].batches(), stage, VMAP)
        for stage in either((0, 3), ALL_STAGES)
    ]
    for other in others:
        assert_same_training(other, first, MODELS[name].rtol)
    losses = train_unsharded(name, "eager").losses
    assert not torch.equal(first.losses[0], losses[0]) and torch.allclose(first.losses[0], losses[0], rtol=0.1)


@pytest.mark.parametrize("name,stage", runs(lambda m: m.per_rank in ("dropout", "statistics"), (1, 3)))
def test_in_evaluation_mode_a_model_draws_no_random_numbers_and_writes_no_buffers(name, stage):
    batches, before = MODELS[name].batches(), dict(build_module(name).named_buffers())
    expected = train_by_hand(build_module(name).eval(), batches)
    module = build_module(name).eval()
    state = torch.manual_seed(1).get_state()
    trained = train_sharded(module, batches, stage, LOCKSTEP)
    assert_same_training(trained, expected, MODELS[name].rtol)
    assert_trees_close(trained.buffers, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m.training for m in module.modules())


@pytest.mark.parametrize("stage", cases((3,), [1]))
def test_training_keeps_the_mode_of_each_module(stage):
    def partly(name: str) -> torch.nn.Module:
        module = build_module(name)
        for m in module.modules():
            m.train(not isinstance(m, torch.nn.BatchNorm2d))
        return module

    batches, module = MODELS["resnet"].batches(), partly("resnet")
    modes = [m.training for m in module.modules()]
    trained = train_sharded(module, batches, stage, LOCKSTEP)
    assert_same_training(trained, train_by_hand(partly("resnet"), batches), MODELS["resnet"].rtol)
    assert_trees_close(trained.buffers, dict(build_module("resnet").named_buffers()))
    assert [m.training for m in module.modules()] == modes and len(set(modes)) == 2


# What no simulation runs, nor real ranks.


@pytest.mark.parametrize("mesh", [LOCKSTEP, VMAP], ids=["lockstep", "vmap"])
def test_a_model_that_torch_func_refuses_is_not_sent_to_lockstep_and_runs_with_that_module_replaced(mesh):
    """bloom's GELU is an autograd.Function of the old form, as are parts of phimoe, rwkv and a few more."""
    build = pretrained(AutoModelForCausalLM, "bloom", hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCAB)
    module, batches = build("eager").double(), MODELS["gpt2"].batches(1)
    with pytest.raises(
        RuntimeError, match=r"BloomForCausalLM applies an autograd.Function, .* without setup_context"
    ) as caught:
        train_sharded(module, batches, 3, mesh)
    assert 'simulate="lockstep"' not in "".join(getattr(caught.value, "__notes__", []))
    replaced = copy.deepcopy(module)
    for block in replaced.transformer.h:
        block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
    # bloom writes tanh's constant with fewer digits
    assert_same_training(train_sharded(replaced, batches, 3, mesh), train_by_hand(module, batches), 1e-7)
