"""Real models from transformers, tiny and with random weights: sharded training equals unsharded.

What vmap, and so a simulated mesh, needs of a transformers model (distributed meshes need none of it):
- `attn_implementation="eager"` runs as it is. "sdpa" runs too, but torch's fused CPU attention has no batching rule
  (a slow loop, with a warning), so choose the math backend: `sdpa_kernel(SDPBackend.MATH)`.
- With "sdpa", a 2-D `attention_mask` is read by Python (`if mask.all()`), which vmap refuses; "eager" does not, and
  a 4-D mask is taken as it is.
- `use_cache=False`: a cache would be written in place.
The models' own `labels=` loss is taken in float32 whatever the model's dtype, so the float64 tests take their own.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import fzero
from fzero import nn, optim, tree
from fzero.testing import assert_equivalent, assert_trees_close

logging.set_verbosity_error()

VOCAB = 37


def gpt2(dropout: float = 0.0, **options: Any) -> Any:
    rates = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCAB, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends, use_cache=False, **options))


def llama(**options: Any) -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, **options))


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama, tied": lambda **options: llama(tie_word_embeddings=True, **options),
}


def built(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    return MODELS[name](attn_implementation=attention, **options).to(dtype)


def batches_of(size: int = 8, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, VOCAB, (size, 9), generator=g)} for _ in range(steps)]


def own_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Next-token cross-entropy in the model's dtype."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def train_step_for(model: Any, opt: Any, own: bool = True, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Make a train step of a transformers model, and its parameters."""
    apply, params, buffers = nn.functional(model)

    def loss(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if own:
            return own_loss(apply(params, buffers, **batch)[0].logits, batch)
        return apply(params, buffers, **batch, labels=batch["input_ids"])[0].loss

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, **options)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step, params


# Measured, relative to a leaf's largest element: 8e-15, but 6e-13 for GPT-2 with Adam's usual eps: the gradients of its
# keys' biases are zero but for rounding, which Adam scales up. The larger eps shows that nothing else is behind it.
CASES = [("gpt2", 1e-8, 1e-11), ("gpt2", 1e-3, 1e-13), ("llama", 1e-8, 1e-13), ("llama, tied", 1e-8, 1e-13)]


@pytest.mark.parametrize("n, stage", [(2, 0), (2, 1), (2, 2), (2, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("name, eps, rtol", CASES)
def test_sharded_training_equals_unsharded(name, eps, rtol, n, stage):
    opt = optim.adamw(1e-2, eps=eps, weight_decay=0.1)
    train_step, params = train_step_for(built(name), opt)
    assert_equivalent(train_step, params, opt, batches_of(), [stage], [n], rtol=rtol)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_sharded_training_equals_torch_optim_on_the_module(name, stage):
    model = built(name)
    opt, mesh = optim.adamw(1e-2, eps=1e-3), fzero.mesh(dp=2)
    train_step, params = train_step_for(model, opt)
    step = fzero.shard(train_step, stage, mesh)
    params, state = step.init(tree.map(torch.clone, params), opt)  # the model's own are trained in place below
    reference = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    for batch in batches_of():
        reference.zero_grad()
        expected = own_loss(model(**batch).logits, batch)
        expected.backward()
        reference.step()
        params, state, value = step(params, state, mesh.split(batch))
        assert_trees_close(value, expected.detach())
    assert_trees_close(step.gather(params), {k: p.detach() for k, p in model.named_parameters()})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_equal_the_whole_batch(name, stage):
    opt = optim.adamw(1e-2, eps=1e-3)
    whole, params = train_step_for(built(name), opt)
    in_parts, _ = train_step_for(built(name), opt, micro_batches=2)
    mesh, batch = fzero.mesh(dp=2), batches_of(steps=1)[0]
    step = fzero.shard(in_parts, stage, mesh)
    new, _, value = step(*step.init(params, opt), mesh.split(batch))
    expected, _, expected_value = whole(params, opt.init(params), batch)
    assert_trees_close(value, expected_value)
    assert_trees_close(step.gather(new), expected)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_loss_in_float32_equals_unsharded(name, stage):
    opt = optim.adamw(1e-3, eps=1e-4)
    train_step, params = train_step_for(built(name, dtype=torch.float32), opt, own=False)
    assert_equivalent(train_step, params, opt, batches_of(), [stage], [2], rtol=1e-4)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_scaled_dot_product_attention_equals_unsharded(name, stage):
    opt = optim.adamw(1e-2, eps=1e-3)
    train_step, params = train_step_for(built(name, attention="sdpa"), opt)
    with sdpa_kernel(SDPBackend.MATH):
        assert_equivalent(train_step, params, opt, batches_of(), [stage], [2])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_equal_unsharded(name, attention):
    opt = optim.adamw(1e-2, eps=1e-3)
    train_step, params = train_step_for(built(name, attention=attention), opt)
    seen = torch.arange(9) < torch.tensor([9, 7, 9, 5, 8, 9, 6, 4])[:, None]  # [batch, keys]
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    masks = {"eager": seen.long(), "sdpa": seen[:, None, None] & causal}  # [batch, keys], [batch, 1, queries, keys]
    batches = [{**batch, "attention_mask": masks[attention]} for batch in batches_of()]
    with sdpa_kernel(SDPBackend.MATH) if attention == "sdpa" else contextlib.nullcontext():
        assert_equivalent(train_step, params, opt, batches, [3], [2])


@pytest.mark.parametrize("name", MODELS)
def test_each_block_is_a_unit_and_tied_embeddings_are_stored_once(name):
    model = built(name)
    _, params, _ = nn.functional(model)
    assert ("lm_head.weight" in params) == (name == "llama")
    step = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=2))
    boxes, _ = step.init(params, optim.sgd(0.1))
    units = {box.spec.unit for box in boxes.values()}
    blocks = "transformer.h" if name == "gpt2" else "model.layers"
    assert {f"{blocks}.0", f"{blocks}.1"} < units
    held = sum(x.numel() for x in tree.tensors(boxes))
    assert 0 <= held - sum(p.numel() for p in model.parameters()) < 2 * len(units)  # padding


@pytest.mark.parametrize("stage", range(4))
def test_a_model_with_dropout_trains(stage):
    opt, mesh = optim.adamw(1e-2), fzero.mesh(dp=2)
    train_step, params = train_step_for(built("gpt2", dropout=0.1), opt)
    step, batch = fzero.shard(train_step, stage, mesh), batches_of(steps=1)[0]
    params, state = step.init(params, opt)
    values = []
    for _ in range(10):
        params, state, value = step(params, state, mesh.split(batch))
        values.append(value.item())
    assert values[-1] < values[0]
