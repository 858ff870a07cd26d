"""The models of the sweep: tiny, with random weights, but with heads of 16 and sequences of 32, as real kernels want.

A family of transformers is a row of `FAMILIES`. Its sizes are those names of `TINY` that its configuration has.
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Model"]

VOCAB, LENGTH, PIXELS, CLASSES = 64, 32, 32, 5
Batch = dict[str, torch.Tensor]

SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len"), 2 * LENGTH),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_chunk_size", "sliding_window"), 16),
    **{"image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES, "use_cache": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "n_group": 1, "topk_group": 1},
}
DROPOUTS = ("dropout", "dropout_rate", "pdrop", "drop_rate", "drop_path_rate", "layerdrop")


@dataclass(frozen=True)
class Model:
    """A row of the sweep.

    Attributes:
        name: in the table.
        library: it is from.
        build: `(attention implementation or None) -> module`.
        kind: "causal", "masked", "seq2seq", "images" or "diffusion": what it is fed, and its loss.
        attention: whether it has several implementations of attention.
        loose: how many times larger its errors may be: experts are chosen by a maximum, scans sum long products.
        batch_statistics: whether it normalizes over the batch: a rank's batch then differs from the whole one's.
    """

    name: str
    library: str
    build: Callable[[str | None], nn.Module]
    kind: str
    attention: bool = True
    loose: float = 1.0
    batch_statistics: bool = False

    def batch(self, seed: int, size: int, dtype: torch.dtype, mask: bool) -> Batch:
        """Draw a global batch; a mask leaves out the last tokens of every second example."""
        g = torch.Generator().manual_seed(seed)
        if self.kind in ("images", "diffusion"):
            results = {"pixel_values": torch.randn(size, 3, PIXELS, PIXELS, generator=g).to(dtype)}
            return results if self.kind == "images" else {**results, "t": torch.randint(0, 9, (size,), generator=g)}
        tokens = torch.randint(3, VOCAB, (size, LENGTH), generator=g)
        results = {"input_ids": tokens, "targets": torch.randint(3, VOCAB, (size, LENGTH), generator=g)}
        if self.kind == "seq2seq":
            results["decoder_input_ids"] = torch.randint(3, VOCAB, (size, LENGTH), generator=g)
        if mask:
            lengths = torch.tensor([LENGTH, LENGTH - 7])[torch.arange(size) % 2]
            results["attention_mask"] = (torch.arange(LENGTH) < lengths[:, None]).long()
        return results


def inputs_of(batch: Batch) -> Any:
    """Return what a model is called with."""
    return {k: x for k, x in batch.items() if k != "targets"}


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of a language model, mean square of the first output of others; in float32."""
    if "targets" in batch:
        return nn.functional.cross_entropy(output.logits.float().flatten(0, -2), batch["targets"].flatten())
    out = output if isinstance(output, torch.Tensor) else output[0]
    return (out.float() - 1).square().mean()


def of_transformers(name: str, kind: str, **more: Any) -> Callable[[str | None], nn.Module]:
    def build(attention: str | None) -> nn.Module:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        usual = transformers.AutoConfig.for_model(name)
        own = own_sizes(usual, more)
        if getattr(usual, "layer_types", None) and not isinstance(getattr(type(usual), "layer_types", None), property):
            kinds = transformers.AutoConfig.for_model(name, **{**own, "num_hidden_layers": 8}).layer_types
            own["layer_types"] = [kinds[0], kinds[-1]]
        config = transformers.AutoConfig.for_model(name, **own)
        config.pad_token_id = None if kind == "causal" else 0
        for key, value in vars(config).items():
            if (isinstance(value, float) and key.endswith(DROPOUTS)) or key.endswith("_dropout_prob"):
                setattr(config, key, 0.0)
        auto = {
            "causal": "AutoModelForCausalLM",
            "masked": "AutoModelForMaskedLM",
            "seq2seq": "AutoModelForSeq2SeqLM",
            "images": "AutoModel",
        }[kind]
        return build_model(getattr(transformers, auto), config, attention).train()

    return build


def build_model(auto: Any, config: Any, attention: str | None) -> nn.Module:
    """Build a model with an implementation of attention, or with products and a softmax where it has no other."""
    for options in ({} if attention is None else {"attn_implementation": attention}, {"attn_implementation": "eager"}):
        torch.manual_seed(0)
        try:
            return auto.from_config(copy.deepcopy(config), **options)
        except ValueError as error:
            if "does not support an attention implementation" not in str(error):
                raise
    raise AssertionError


def own_sizes(usual: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a configuration has, but not those that follow from others."""
    names = [key for key in SIZES if hasattr(usual, key) and not isinstance(getattr(type(usual), key, None), property)]
    return {key: SIZES[key] for key in names} | more


def family(name: str, kind: str = "causal", like: dict[str, Any] | None = None, **more: Any) -> Model:
    return Model(name, "transformers", of_transformers(name, kind, **more), kind, **(like or {}))


EXPERTS: dict[str, Any] = {"loose": 20.0}
NO_CHOICE: dict[str, Any] = {"attention": False}
FAMILIES = [
    *map(family, ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3")),
    *map(family, ("gpt_neox", "opt", "bloom", "mpt", "falcon", "gpt_bigcode")),
    family("gpt_neo", attention_types=[[["global", "local"], 1]]),
    family("gptj", rotary_dim=8),
    family("codegen", hidden_size=64, num_attention_heads=4, rotary_dim=8),
    *map(family, ("olmo", "olmo2", "granite", "stablelm", "cohere", "cohere2", "starcoder2", "glm", "glm4", "smollm3")),
    *map(family, ("nemotron", "persimmon", "biogpt", "xglm", "bitnet", "exaone4", "ernie4_5", "hunyuan_v1_dense")),
    *[family(name, like=EXPERTS) for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe")],
    *[family(name, like=EXPERTS) for name in ("deepseek_v3", "minimax", "jamba", "llama4_text")],
    *[family(name, like={"loose": 10.0}) for name in ("mamba", "lfm2", "rwkv")],
    family("mamba2", like={"loose": 10.0}, num_heads=4, head_dim=16, n_groups=1, chunk_size=16, state_size=8),
    *[family(name, "masked") for name in ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "esm", "albert")],
    *[family(name, "masked") for name in ("mpnet", "modernbert", "deberta-v2", "convbert", "fnet")],
    *[family(name, "seq2seq") for name in ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "blenderbot", "m2m_100")],
    *[family(name, "images") for name in ("vit", "deit", "beit", "dinov2", "siglip_vision_model", "clip_vision_model")],
    family("convnext", "images", NO_CHOICE, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4),
    family(
        "resnet",
        "images",
        {**NO_CHOICE, "loose": 3.0, "batch_statistics": True},
        hidden_sizes=[8, 16],
        depths=[1, 1],
        embedding_size=8,
        layer_type="basic",
    ),
    family(
        "swin",
        "images",
        NO_CHOICE,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        num_attention_heads=[1, 2],
        window_size=2,
        patch_size=2,
    ),
]


def of_library(library: str, make: Callable[[Any], nn.Module]) -> Callable[[str | None], nn.Module]:
    def build(attention: str | None) -> nn.Module:
        torch.manual_seed(0)
        module = make(importlib.import_module(library)).eval()  # no dropout, and BatchNorm's kept statistics
        return module if library == "peft" else Called(module)

    return build


class Called(nn.Module):
    """Calls a model by the names that those of transformers have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        out = self.model(pixel_values, *more.values())
        return getattr(out, "sample", out)


def other(name: str, library: str, kind: str, make: Callable[[Any], nn.Module]) -> Model:
    return Model(name, library.split(".")[0], of_library(library, make), kind, attention=False)


def lora(peft: Any) -> nn.Module:
    model = of_transformers("gpt2", "causal")("sdpa")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def unet(diffusers: Any) -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(
        sample_size=PIXELS,
        layers_per_block=1,
        block_out_channels=(16, 16),
        norm_num_groups=4,
        attention_head_dim=16,
        **blocks,
    )


VIT = {"image_size": PIXELS, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 48}
SWIN = {"patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 1], "window_size": [2, 2]}
NARROW = {"pretrained": False, "num_classes": CLASSES}
OTHERS = [
    other("torchvision ResNet-18", "torchvision.models", "images", lambda m: m.resnet18(num_classes=CLASSES)),
    other("torchvision ViT", "torchvision.models", "images", lambda m: m.VisionTransformer(num_classes=CLASSES, **VIT)),
    other("torchvision Swin", "torchvision.models", "images", lambda m: m.SwinTransformer(num_classes=CLASSES, **SWIN)),
    other(
        "torchvision MobileNetV3", "torchvision.models", "images", lambda m: m.mobilenet_v3_small(num_classes=CLASSES)
    ),
    other(
        "timm ViT",
        "timm",
        "images",
        lambda m: m.create_model("vit_tiny_patch16_224", img_size=PIXELS, depth=2, embed_dim=32, num_heads=2, **NARROW),
    ),
    other("timm ResNet", "timm", "images", lambda m: m.create_model("resnet10t", **NARROW)),
    other(
        "timm ConvNeXt",
        "timm",
        "images",
        lambda m: m.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), **NARROW),
    ),
    other("diffusers UNet", "diffusers", "diffusion", unet),
    other("peft LoRA on GPT-2", "peft", "causal", lora),
]

LATER = [  # of 2025 and 2026; after the others, since the number of a model decides whether it runs on processes
    *map(family, ("olmo3", "seed_oss", "apertus", "arcee")),
    *[family(name, like=EXPERTS) for name in ("qwen3_5_moe_text", "glm4_moe", "minimax_m2", "deepseek_v2")],
    *[family(name, like=EXPERTS) for name in ("ernie4_5_moe", "phimoe", "qwen3_next")],
    *[family(name, like={"loose": 10.0}) for name in ("qwen3_5_text", "nemotron_h")],
    family("dots1", like=EXPERTS, n_shared_experts=1),
    family("lfm2_moe", like=EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
]
MODELS: dict[str, Model] = {model.name: model for model in [*FAMILIES, *OTHERS, *LATER]}
