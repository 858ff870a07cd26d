"""Small models of transformers, cut in tests: their sizes, and batches for them."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
LANGUAGE = {
    **SIZES,
    "num_key_value_heads": 1,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 32, "n_positions": 16, "use_cache": False}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2, scaled by the layer's number": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "bos_token_id": 1, "eos_token_id": 2, "scale_attn_by_inverse_layer_idx": True},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LANGUAGE),
    "qwen2, tied": ("Qwen2ForCausalLM", "Qwen2Config", {**LANGUAGE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LANGUAGE, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LANGUAGE, "head_dim": 8, "sliding_window": 3}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**LANGUAGE, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 16}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 8, "patch_size": 4}),
}


def build(name: str, **more: Any) -> Any:
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes, attn_implementation="eager", **more)
    return getattr(transformers, model)(made).double().eval()


def batch_for(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, 32, (2, 8))
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0  # a short sequence
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
