"""Families of transformers that can be cut, and those that are refused, with the reason."""

from typing import Any

import pytest
import torch

from fzero.nn.split._split_module import split_module
from tests.nn.helpers import run

transformers = pytest.importorskip("transformers")

TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "image_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_local_experts", "num_experts", "sliding_window"), 4),
    **dict.fromkeys(("vocab_size", "n_positions", "max_position_embeddings", "intermediate_size", "ffn_dim"), 64),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "patch_size": 8, "moe_intermediate_size": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
CAUSAL = [
    "gpt_neox",
    "opt",
    "bloom",
    "mpt",
    "mistral",
    "qwen2_moe",
    "qwen3_moe",
    "gemma",
    "gemma3_text",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "starcoder2",
    "stablelm",
    "cohere",
    "cohere2",
    "granite",
    "glm",
    "glm4",
    "olmoe",
    "gpt_oss",
    "smollm3",
    "nemotron",
    "persimmon",
    "biogpt",
    "xglm",
    "granitemoe",
    "ernie4_5",
    "hunyuan_v1_dense",
    "llama4_text",
    "lfm2",
]
MASKED = ["roberta", "xlm-roberta", "electra", "distilbert", "esm"]
IMAGES = ["deit", "beit", "dinov2", "siglip_vision_model", "clip_vision_model"]
REFUSED = {
    "albert": "has no repeated blocks",
    "minimax": "blocks 'model.layers.0' and 'model.layers.1' differ in",
    "modernbert": "differ in 'attn_norm.weight': missing and",
    "deberta-v2": "the module changes the value between blocks",
    "mpnet": "block 'mpnet.encoder.layer.0' is given '1', which depends on parameters outside the blocks",
    "bart": "2 lists of blocks: 'encoder.layers' with 4, 'decoder.layers' with",
}


def cut_and_run(name: str, kind: Any) -> None:
    usual = transformers.AutoConfig.for_model(name)
    own: dict[str, Any] = {key: size for key, size in TINY.items() if hasattr(usual, key)}
    if getattr(usual, "layer_types", None):
        kinds = transformers.AutoConfig.for_model(name, **own).layer_types
        own["layer_types"] = (kinds * 2)[:4]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **own)
    model = kind.from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(3, 64, (2, 8))
    batch = {"input_ids": tokens, "attention_mask": (torch.arange(8) < torch.tensor([[8], [7]])).long()}
    batch = {"pixel_values": torch.randn(2, 3, 32, 32)} if name in IMAGES else batch
    assert run(*split_module(model), batch)[0].equal(model(**batch)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CAUSAL, *MASKED, *IMAGES])
def test_a_model_family_split_into_blocks_equals_the_whole(name):
    kinds = {"AutoModelForCausalLM": CAUSAL, "AutoModelForMaskedLM": MASKED, "AutoModel": IMAGES}
    cut_and_run(name, next(getattr(transformers, kind) for kind, names in kinds.items() if name in names))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_family_that_cannot_be_split_is_refused_by_name(name):
    kind = {"minimax": "AutoModelForCausalLM", "bart": "AutoModel"}.get(name, "AutoModelForMaskedLM")
    with pytest.raises(ValueError, match=REFUSED[name]):
        cut_and_run(name, getattr(transformers, kind))
