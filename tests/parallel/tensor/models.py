"""Tiny models of transformers whose heads and vocabulary divide by two, and their dense training."""

import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import fzero
from fzero import tree
from fzero.parallel import tensor as tp
from tests.helpers import train_step_for
from tests.models.table import CAUSAL, loss_of, pretrained
from tests.parallel.tensor.model import OPT

VOCAB, LENGTH = 24, 8
HEADS = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2: dict[str, Any] = {
    "*.wte": "embedding_rowwise",
    "*.attn": tp.divided("split_size"),
    "*.attn.c_attn": tp.packed(3),
    "*.attn.c_proj": "rowwise",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}


def model_of(name: str, experts: str = "", dropout: float = 0.0, **options: Any) -> torch.nn.Module:
    """Build a model in float64, all of whose parameters are away from zero."""
    torch.manual_seed(0)
    options = {**CAUSAL, "vocab_size": VOCAB, **HEADS, **(EXPERTS if experts else {}), **options}
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
        options = {**sizes, "vocab_size": VOCAB, "use_cache": False}
    model = pretrained(AutoModelForCausalLM, name, dropout, experts, **options)("eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 8)
    return model.double()


def batches_of(size: int = 4) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {name: torch.randint(VOCAB, (size, LENGTH), generator=g) for name in ("input_ids", "targets")} for _ in "ab"
    ]


def step_and_params(
    model: torch.nn.Module, layers: tp.Layers | None = None, size: int = 4, loss: Any = None, **options: Any
) -> tuple[Any, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply, params, buffers = fzero.nn.functional(model, tp=layers, **options)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return (loss or loss_of)(apply(params, buffers, batch["input_ids"])[0], batch)

    return train_step_for(loss_fn, OPT), tree.map(torch.clone, params), batches_of(size)


def losses_of(model: torch.nn.Module, size: int = 4) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Train the dense model; return its parameters and losses."""
    train_step, params, batches = step_and_params(model, size=size)
    state, losses = (params, OPT.init(params)), []
    for batch in batches:
        *state, loss = train_step(*state, batch)
        losses.append(loss)
    return state[0], losses
