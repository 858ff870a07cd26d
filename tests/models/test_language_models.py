"""Causal language models from transformers, closer: micro-batches, padding, the models' own loss, attention, units.

What vmap needs of a transformers model (ranks in lockstep, and real ones, need none of it):
- `attn_implementation="eager"` runs as it is. "sdpa" runs too, but torch's fused CPU attention has no batching rule
  (a slow loop), so choose the math backend: `sdpa_kernel(SDPBackend.MATH)`.
- With "sdpa", a 2-D `attention_mask` is read by Python (`if mask.all()`), which vmap refuses; "eager" does not, and
  a 4-D mask is taken as it is.
- `use_cache=False`: a cache would be written in place.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fzero
from fzero import optim, tree
from fzero.testing import assert_equivalent, assert_trees_close
from tests.helpers import ALL_STAGES, cases
from tests.models.table import MODELS, Batch, build_module, loss_of

NAMES = ["gpt2", "llama", "llama, tied"]


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    return output.loss


def train_step_for(model: nn.Module, opt: Any, loss: Any = loss_of, **options: Any) -> tuple[Any, Any]:
    """Make a train step of a transformers model, and its parameters."""
    apply, params, buffers = fzero.nn.functional(model)

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        inputs = {
            ("labels" if k == "targets" else k): x for k, x in batch.items() if k != "targets" or loss is own_loss
        }
        return loss(apply(params, buffers, **inputs)[0], batch)

    def train_step(params: Any, opt_state: Any, batch: Batch) -> Any:
        value, grads = fzero.value_and_grad(loss_fn, **options)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step, params


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_with_adams_usual_eps_train_as_one(name):
    """It scales up the rounding errors of small gradients: measured, 6e-13; 3e-12 where the exact gradient is 0."""
    opt = optim.adamw(1e-2, weight_decay=0.1)
    train_step, params = train_step_for(build_module(name, "eager"), opt)
    assert_equivalent(train_step, params, opt, MODELS[name].batches(), [3], [4], rtol=1e-10)


@pytest.mark.parametrize("stage", cases((3,), (1, 2)))
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_equal_the_whole_batch(name, stage):
    opt = optim.adamw(1e-2, eps=1e-3)
    whole, params = train_step_for(build_module(name, "eager"), opt)
    in_parts, _ = train_step_for(build_module(name, "eager"), opt, micro_batches=2)
    mesh, (batch,) = fzero.mesh(dp=2), MODELS[name].batches(1)
    step = fzero.shard(in_parts, stage, mesh)
    new, _, value = step(*step.init(params, opt), mesh.split(batch))
    expected, _, expected_value = whole(params, opt.init(params), batch)
    assert_trees_close(value, expected_value)
    assert_trees_close(step.gather(new), expected)


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_the_models_own_loss_in_float32_equals_unsharded(stage):
    opt = optim.adamw(1e-3, eps=1e-4)
    train_step, params = train_step_for(build_module("gpt2", "eager").float(), opt, own_loss)
    assert_equivalent(train_step, params, opt, MODELS["gpt2"].batches(), [stage], [2], rtol=1e-4)


@pytest.mark.parametrize("stage", cases((3,), (0,)))
@pytest.mark.parametrize("name", NAMES)
def test_scaled_dot_product_attention_under_vmap_equals_unsharded(name, stage):
    opt = optim.adamw(1e-2, eps=1e-3)
    train_step, params = train_step_for(build_module(name, "sdpa"), opt)
    with sdpa_kernel(SDPBackend.MATH):
        assert_equivalent(train_step, params, opt, MODELS[name].batches(), [stage], [2])


@pytest.mark.parametrize("attention, simulate", cases([("eager", "vmap"), ("sdpa", "lockstep")], [("sdpa", "vmap")]))
@pytest.mark.parametrize("name", NAMES)
def test_padded_batches_equal_unsharded(name, attention, simulate):
    """Of sequences that end earlier only the keys are masked: every token counts in the loss, on each rank as many."""
    opt = optim.adamw(1e-2, eps=1e-3)
    train_step, params = train_step_for(build_module(name, attention), opt)
    visible = torch.arange(7) < torch.tensor([7, 5, 7, 3, 6, 7, 4, 2])[:, None]  # [batch, keys]
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    four_d = attention == "sdpa" and simulate == "vmap"
    mask = visible[:, None, None] & causal if four_d else visible.long()  # [batch, 1, queries, keys] or [batch, keys]
    batches = [{**batch, "attention_mask": mask} for batch in MODELS[name].batches()]
    with sdpa_kernel(SDPBackend.MATH) if four_d else contextlib.nullcontext():
        meshes = [fzero.mesh(dp=2, simulate=simulate)]
        assert_equivalent(train_step, params, opt, batches, [3], meshes=meshes, rtol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_each_block_is_a_unit_and_tied_embeddings_are_stored_once(name):
    model = build_module(name)
    _, params, _ = fzero.nn.functional(model)
    assert ("lm_head.weight" in params) == (name == "llama")
    step = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=2))
    boxes, _ = step.init(params, optim.sgd(0.1))
    units = {box.spec.unit for box in boxes.values()}
    blocks = "transformer.h" if name == "gpt2" else "model.layers"
    assert {f"{blocks}.0", f"{blocks}.1"} < units
    held = sum(x.numel() for x in tree.tensors(boxes))
    assert 0 <= held - sum(p.numel() for p in model.parameters()) < 2 * len(units)  # padding
