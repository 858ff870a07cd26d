"""Tiny models with random weights, a row each: how to build it, what it is fed, its loss, and how exact it can be.

All are float64 but for those with grouped_mm, of which torch has no float64 kernel (transformers' loop to fall back on
is an operator that torch.func refuses). transformers' own `labels=` loss is taken in float32 whatever the model's
dtype, so rows have their own. Some models take norms or routing probabilities in float32 all the same: of each token by
itself, so that cutting the batch changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.utils import logging

logging.set_verbosity_error()

VOCAB, LENGTH, PIXELS, CLASSES = 37, 7, 16, 5
SIZE = 8  # the global batch
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A row of the table.

    Attributes:
        build: `(attention implementation) -> module`; None for the model's own choice.
        inputs: names of the inputs: token ids, or pixels.
        dtype: of the parameters.
        rtol: the error allowed, relative to a leaf's largest element.
        per_rank: what makes a rank's part of the batch give other numbers by itself than within the whole batch, so
            that data-parallel training is that on the parts one by one: "statistics", "dropout", "routing", or
            "float32" for sums over the batch in float32, such as the gradients of weights that the model casts.
        vmap: the error, and so the reason, with which the simulation by vmap refuses the model; empty if it runs.
        slow: only `make test-all` runs it.
    """

    build: Callable[[str | None], nn.Module]
    inputs: tuple[str, ...] = ("input_ids",)
    dtype: torch.dtype = torch.float64
    rtol: float = 1e-13
    per_rank: str = ""
    vmap: str = ""
    slow: bool = False

    def batches(self, steps: int = 3, size: int = SIZE) -> list[Batch]:
        """Draw global batches, with targets."""
        g = torch.Generator().manual_seed(0)

        def draw() -> Batch:
            shape, classes = ((size, LENGTH), VOCAB) if self.inputs != ("pixel_values",) else ((size,), CLASSES)
            given = {
                name: torch.randn(size, 3, PIXELS, PIXELS, generator=g, dtype=torch.float64).to(self.dtype)
                if name == "pixel_values"
                else torch.randint(VOCAB, (size, LENGTH), generator=g)
                for name in self.inputs
            }
            return {**given, "targets": torch.randint(classes, shape, generator=g)}

        return [draw() for _ in range(steps)]


def build_module(name: str, attention: str | None = None) -> nn.Module:
    """Build a row's module, all of whose parameters are away from zero: of those at zero a relative error says little.

    (Biases start at zero. Those of attention's keys stay there: their gradients are zero but for rounding.)
    """
    torch.manual_seed(0)
    model = MODELS[name]
    module = model.build(attention).to(model.dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return module.train()


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy, in the model's dtype, and a routing loss where the model has one."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    routing = getattr(output, "aux_loss", None)
    loss = cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())
    return loss if routing is None else loss + 0.1 * routing


DROPOUTS = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "dropout", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "attn_dropout", "embd_dropout"),
)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 16, "pad_token_id": None}
CAUSAL = {**TEXT, "num_key_value_heads": 1, "use_cache": False}
IMAGE = {"num_labels": CLASSES, "image_size": PIXELS}


def pretrained(auto: Any, name: str, dropout: float = 0.0, experts: str = "", **options: Any) -> Any:
    """Build a transformers model by the name of its architecture, offline."""

    def build(attention: str | None) -> nn.Module:
        config = AutoConfig.for_model(name, **options)
        for key in DROPOUTS:
            if hasattr(config, key):
                setattr(config, key, dropout)
        experts_option = {"experts_implementation": experts} if experts else {}
        return auto.from_config(config, attn_implementation=attention, **experts_option)

    return build


def gpt2(dropout: float = 0.0) -> Any:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return pretrained(AutoModelForCausalLM, "gpt2", dropout, **sizes, **ends, use_cache=False)


def llama(**options: Any) -> Any:
    return pretrained(AutoModelForCausalLM, "llama", **CAUSAL, **options)


def bert(dropout: float = 0.0) -> Any:
    return pretrained(AutoModelForMaskedLM, "bert", dropout, **TEXT)


def vit(dropout: float = 0.0) -> Any:
    return pretrained(AutoModelForImageClassification, "vit", dropout, **SIZES, **IMAGE, patch_size=8)


def t5(dropout: float = 0.0) -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB}
    return pretrained(AutoModelForSeq2SeqLM, "t5", dropout, **sizes, use_cache=False)


def resnet() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return pretrained(AutoModelForImageClassification, "resnet", **sizes, num_labels=CLASSES)


def mixtral(experts: str, **options: Any) -> Any:
    options = {**CAUSAL, "num_local_experts": 4, "num_experts_per_tok": 2, **options}
    return pretrained(AutoModelForCausalLM, "mixtral", experts=experts, **options)


def qwen2_moe(experts: str) -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    inner = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return pretrained(AutoModelForCausalLM, "qwen2_moe", experts=experts, **CAUSAL, **sizes, **inner)


class Lstm(nn.Module):
    """A language model; its first state is LSTM's own zeros, or zeros made from the input."""

    def __init__(self, dropout: float = 0.0, given: bool = False) -> None:
        super().__init__()
        self.given = given
        self.embed = nn.Embedding(VOCAB, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        zeros = x.new_zeros(2, x.shape[0], 16)
        return self.head(self.lstm(x, (zeros, zeros) if self.given else None)[0])


class Encoder(nn.Module):
    """torch's TransformerEncoder between an embedding and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


# Why vmap cannot: the eager experts loop over those that some token chose, which Python must read; LSTM adds what
# differs by rank to the projection of its first state, which does not, in place.
READS_DATA = r"calling \.item\(\) on a Tensor or .* data-dependent control flow"
IN_PLACE = r"output with shape \[4, 64\] doesn't match the broadcast shape \[2, 4, 64\]"

MODELS = {
    "gpt2": Model(gpt2()),
    "llama": Model(llama()),
    "llama, tied": Model(llama(tie_word_embeddings=True)),
    "bert": Model(bert()),
    "vit": Model(vit(), ("pixel_values",)),
    "t5": Model(t5(), ("input_ids", "decoder_input_ids")),
    "resnet": Model(resnet(), ("pixel_values",), per_rank="statistics"),
    "lstm": Model(lambda _: Lstm(), vmap=IN_PLACE),
    "lstm, given a state": Model(lambda _: Lstm(given=True)),
    "encoder": Model(lambda _: Encoder()),
}
for _name, _make in {"mixtral": mixtral, "qwen2_moe": qwen2_moe}.items():
    MODELS |= {
        f"{_name}, eager": Model(_make("eager"), vmap=READS_DATA),
        f"{_name}, batched_mm": Model(_make("batched_mm")),
        f"{_name}, grouped_mm": Model(_make("grouped_mm"), dtype=torch.float32, rtol=1e-5),
    }
MODELS |= {
    # how evenly a rank's tokens are routed: a statistic of the batch, in float32
    "mixtral, routing loss": Model(mixtral("batched_mm", output_router_logits=True), per_rank="routing"),
    "gpt2, dropout": Model(gpt2(0.1), per_rank="dropout"),
    "bert, dropout": Model(bert(0.1), per_rank="dropout"),
    "vit, dropout": Model(vit(0.1), ("pixel_values",), per_rank="dropout"),
    "t5, dropout": Model(t5(0.1), ("input_ids", "decoder_input_ids"), per_rank="dropout"),
    "lstm, dropout": Model(lambda _: Lstm(0.1), per_rank="dropout", vmap=IN_PLACE),
    "encoder, dropout": Model(lambda _: Encoder(0.1), per_rank="dropout"),
}


SEQ2SEQ, PICTURES = ("input_ids", "decoder_input_ids"), ("pixel_values",)
LAYERS = {"hidden_size": 16, "vocab_size": VOCAB, "use_cache": False, "pad_token_id": None}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SCANS = {"per_rank": "float32", "rtol": 1e-5}


def slow(auto: Any, name: str, inputs: Any = ("input_ids",), like: Any = None, **options: Any) -> dict[str, Model]:
    row = Model(pretrained(auto, name, **options), inputs, slow=True)
    return {f"{name}, {options['experts']}" if "experts" in options else name: replace(row, **(like or {}))}


for _name in (
    "mistral",
    "qwen2",
    "qwen3",
    "phi",
    "phi3",
    "olmo2",
    "stablelm",
    "gpt_neox",
    "granite",
    "starcoder2",
    "glm",
):
    MODELS |= slow(AutoModelForCausalLM, _name, **CAUSAL)
for _name in ("smollm3", "nemotron", "bitnet", "exaone4", "falcon"):
    MODELS |= slow(AutoModelForCausalLM, _name, **CAUSAL)
for _name in ("gemma", "gemma2", "gemma3_text", "cohere"):  # norms cast their weights
    MODELS |= slow(AutoModelForCausalLM, _name, like={"per_rank": "float32"}, **CAUSAL)
for _name in ("gpt_oss", "olmoe", "qwen3_moe", "granitemoe", "minimax", "jamba", "deepseek_v3"):
    _like = {"per_rank": "float32" if _name in ("jamba", "deepseek_v3") else ""}
    _more = LATENT if _name == "deepseek_v3" else {}
    for _experts, _vmap in (("eager", READS_DATA), ("batched_mm", "")):
        _row = {**CAUSAL, **EXPERTS, **_more, "experts": _experts}
        MODELS |= slow(AutoModelForCausalLM, _name, like={**_like, "vmap": _vmap}, **_row)
MODELS |= {
    **slow(AutoModelForCausalLM, "opt", **TEXT, ffn_dim=24, word_embed_proj_dim=16, use_cache=False),
    **slow(
        AutoModelForCausalLM,
        "gpt_neo",
        **{**LAYERS, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 16},
        attention_types=[[["global", "local"], 1]],
    ),
    **slow(AutoModelForCausalLM, "mamba", like=SCANS, **LAYERS, num_hidden_layers=2, state_size=4),
    **slow(
        AutoModelForCausalLM,
        "mamba2",
        like=SCANS,
        **{**LAYERS, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1},
        chunk_size=4,
    ),
}
for _name in ("roberta", "xlm-roberta", "mpnet", "electra", "albert", "distilbert", "modernbert", "fnet"):
    _more = {"pad_token_id": 1 if _name in ("roberta", "xlm-roberta", "mpnet") else 0, "max_position_embeddings": 32}
    _more |= {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2} if _name == "distilbert" else {}
    MODELS |= slow(AutoModelForMaskedLM, _name, **{**TEXT, **_more, "embedding_size": 16})
for _name in ("deberta-v2", "convbert"):  # they read sizes as tensors
    MODELS |= slow(
        AutoModelForMaskedLM, _name, like={"vmap": READS_DATA}, **{**TEXT, "pad_token_id": 0}, embedding_size=16
    )
_heads = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_inner = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCAB, "max_position_embeddings": 16}
_stages = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "num_labels": CLASSES}
_windows = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 2}
MODELS |= {
    **slow(AutoModelForSeq2SeqLM, "bart", SEQ2SEQ, d_model=16, **_heads, **_inner, use_cache=False),
    **slow(AutoModelForImageClassification, "beit", PICTURES, **SIZES, **IMAGE, patch_size=8),
    **slow(AutoModelForImageClassification, "dinov2", PICTURES, **SIZES, **IMAGE, patch_size=8),
    **slow(AutoModelForImageClassification, "convnext", PICTURES, **_stages),
    **slow(AutoModelForImageClassification, "swin", PICTURES, **_windows, **IMAGE),
}
