"""Pipelines with tensor parallelism and experts on one mesh: training is that of the whole model."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero import optim
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.testing import assert_trees_close
from tests.helpers import cases, examples
from tests.parallel.pipeline.helpers import (
    TENSOR,
    batch_of,
    block,
    check,
    first,
    last,
    params_of,
)
from tests.parallel.pipeline.model import OPT, make_step


@pytest.mark.slow
@examples(2, 6)
@given(
    st.sampled_from([(2, 2, 2), (1, 2, 2), (1, 4, 2), (2, 2, 1)]),
    st.integers(0, 3),
    st.sampled_from(["vmap", "lockstep"]),
    st.sampled_from(["1f1b", "zbv"]),
)
def test_a_pipeline_trains_with_tensor_parallelism(sizes, stage, simulate, schedule):
    dp, pp, n = sizes
    stages = 2 if schedule == "zbv" else 1
    loss = fzero.pipeline(
        block=block, first=first, last=last, micro_batches=4, schedule=schedule, stages_per_rank=stages, split=TENSOR
    )
    check(fzero.mesh(dp=dp, pp=pp, tp=n, simulate=simulate), stage, loss, params_of(pp * stages))


def test_a_mean_over_tp_is_refused_with_the_axes_to_name():
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=2, split=TENSOR)
    mesh = fzero.mesh(dp=2, pp=2, tp=2)
    step = fzero.shard(make_step(loss, OPT), 1, mesh, split=loss.split)
    state = step.init(loss.stack(params_of(2), mesh), OPT)
    with pytest.raises(ValueError, match=r"averages over 'tp'.*leave it out of the mean, .*axis=\('dp', 'pp'\)"):
        step(*state, mesh.split(batch_of(8, 0), "dp"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases([2], [0, 3]))
def test_a_pipeline_of_experts_equals_unsharded_training(stage):
    """Their balance loss travels with the tokens, and is added at the end."""
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=2, split=moe.split_rule("experts"))
    check(fzero.mesh(ep=2, pp=2, simulate="lockstep"), stage, loss, params_of(4, experts=4))
    check(fzero.mesh(dp=2, ep=2, pp=2), stage, loss, params_of(2, experts=4), steps=1)


@pytest.mark.slow
def test_a_pipeline_of_experts_with_tensor_parallelism_equals_unsharded_training():
    loss = fzero.pipeline(
        block=block, first=first, last=last, micro_batches=2, split=(TENSOR, moe.split_rule("experts"))
    )
    check(fzero.mesh(ep=2, pp=2, tp=2, simulate="lockstep"), 3, loss, params_of(2, experts=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "simulate,sequence",
    cases([("vmap", True)], itertools.product(("vmap", "lockstep"), (False, True))),
)
def test_a_model_of_transformers_trains_in_stages_heads_and_columns(simulate, sequence):
    """Cut into stages, by heads and columns, and along the sequence, without being edited."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=16, use_cache=False)).double()
    ids = torch.randint(16, (8, 5))
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9))

    apply, params, buffers = fzero.nn.functional(model)

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = apply(params, buffers, ids[:, :-1])[0].logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    value, grads = fzero.value_and_grad(loss_fn)(params, ids)
    updates, _ = opt.update(grads, opt.init(params), params)
    expected = optim.apply_updates(params, updates)

    layers = tp.layers(model, {"lm_head": "colwise"}, sequence=sequence)
    loss, split_params, join = fzero.nn.pipeline(
        model,
        lambda output, ids: tp.cross_entropy(output.logits, ids[:, 1:]),
        inputs=lambda ids: ids[:, :-1],
        micro_batches=2,
        tp=layers,
    )
    mesh = fzero.mesh(dp=2, pp=2, tp=2, simulate=simulate)
    step = fzero.shard(make_step(loss, opt), 2, mesh, axis=("dp", "pp"), split=loss.split)
    state = step.init(loss.stack(split_params, mesh), opt)
    *state, actual = step(*state, mesh.split(ids, "dp"))
    assert_trees_close(actual, value, 1e-9)
    trained = layers.pack(join(loss.unstack(step.gather(state[0]), mesh)))
    assert_trees_close(trained, {name: expected[name] for name in trained}, 1e-9)
    assert trained.keys() == expected.keys()


def test_no_collective_of_a_stage_is_joined_with_one_of_another_region():
    """Where small sums are joined, that of a forward pass's end would wait for the backward pass's first."""
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=4, split=TENSOR)
    mesh = fzero.mesh(dp=1, pp=2, tp=2)
    step = fzero.shard(make_step(loss), 1, mesh, axis=("dp", "pp"), split=loss.split)
    state = step.init(loss.stack(params_of(4), mesh), OPT)
    for rank in (0, 1):
        plan = fzero.plan(fzero.jit(step, backend="fx"), *state, mesh.split(batch_of(8, 0), "dp"), rank={"pp": rank})
        sums = [c for c in plan.collectives if c.times > 1 and c.axis == "tp"]
        assert len(sums) >= 4
