"""Models by name: presets, and the config.json that Hugging Face writes beside weights. Nothing is downloaded."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from fzero.tuning.models._model_names import ModelShape

__all__ = ["PRESETS", "model_shape"]


_LLAMA: dict[str, Any] = {"gated": True, "norm": "rms", "biases": ""}

PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3-8b", width=4096, depth=32, heads=32, mlp=14336, vocab=128256, kv_heads=8, **_LLAMA),
        ModelShape("llama-3-70b", width=8192, depth=80, heads=64, mlp=28672, vocab=128256, kv_heads=8, **_LLAMA),
        ModelShape("llama-3-405b", width=16384, depth=126, heads=128, mlp=53248, vocab=128256, kv_heads=8, **_LLAMA),
        ModelShape(
            "qwen3-8b",
            width=4096,
            depth=36,
            heads=32,
            mlp=12288,
            vocab=151936,
            kv_heads=8,
            head=128,
            head_norm=True,
            **_LLAMA,
        ),
        ModelShape(
            "mixtral-8x7b", width=4096, depth=32, heads=32, mlp=14336, vocab=32000, kv_heads=8, experts=(8, 2), **_LLAMA
        ),
        ModelShape("gpt2", width=768, depth=12, heads=12, mlp=3072, vocab=50257, positions=1024, tied=True),
        ModelShape("gpt2-xl", width=1600, depth=48, heads=25, mlp=6400, vocab=50257, positions=1024, tied=True),
        ModelShape(
            "bert-large", width=1024, depth=24, heads=16, mlp=4096, vocab=30522, positions=512, tied=True, task="masked"
        ),
        ModelShape(
            "vit-g-14", width=1664, depth=48, heads=16, mlp=8192, vocab=1000, positions=257, patch=14, task="image"
        ),
    )
}


def model_shape(model: str) -> ModelShape:
    """Return the sizes of a model: a preset by its name, or a Hugging Face configuration by its file or folder.

    Raises:
        ValueError: if the model is neither. The message lists the presets.
    """
    if model in PRESETS:
        return PRESETS[model]
    path = pathlib.Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _read_config(path)
    raise ValueError(
        f"model {model!r} is unknown: expected one of {', '.join(PRESETS)}, a Hugging Face config.json or its folder, "
        "or module:function for your own make_step"
    )


def _read_config(path: pathlib.Path) -> ModelShape:
    """Read a model's sizes from the configuration file of Hugging Face."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        model_type = config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{os.fspath(path)}: expected a Hugging Face configuration with a model_type: {error}"
        ) from error
    if model_type not in _READERS:
        raise ValueError(
            f"{os.fspath(path)}: model_type {model_type!r} is none of {', '.join(_READERS)}: write a make_step for it, "
            "and pass it as module:function"
        )
    name = config.get("_name_or_path") or path.parent.name or model_type
    try:
        return _READERS[model_type](name, config)
    except KeyError as error:
        raise ValueError(f"{os.fspath(path)}: the configuration of {model_type} lacks {error}") from error


def _read_llama(name: str, c: Mapping[str, Any]) -> ModelShape:
    """Read the sizes of a model like Llama: Mistral, Qwen and Mixtral have the same words."""
    qwen3, mixtral = c["model_type"] == "qwen3", c["model_type"] == "mixtral"
    return ModelShape(
        name,
        width=c["hidden_size"],
        depth=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        mlp=c["intermediate_size"],
        vocab=c["vocab_size"],
        kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
        head=c.get("head_dim") or 0,
        gated=True,
        norm="rms",
        biases="qkv" if c["model_type"] == "qwen2" else "",
        head_norm=qwen3,
        tied=bool(c.get("tie_word_embeddings", False)),
        experts=(c["num_local_experts"], c["num_experts_per_tok"]) if mixtral else (0, 0),
    )


def _read_gpt2(name: str, c: Mapping[str, Any]) -> ModelShape:
    """Read the sizes of a GPT-2, whose configuration has words of its own."""
    d = c["n_embd"]
    mlp = c.get("n_inner") or 4 * d
    return ModelShape(
        name,
        width=d,
        depth=c["n_layer"],
        heads=c["n_head"],
        mlp=mlp,
        vocab=c["vocab_size"],
        positions=c["n_positions"],
        tied=True,
    )


def _bert_shape(name: str, c: Mapping[str, Any]) -> ModelShape:
    sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"])
    return ModelShape(name, *sizes, c["vocab_size"], positions=c["max_position_embeddings"], tied=True, task="masked")


def _vit_shape(name: str, c: Mapping[str, Any]) -> ModelShape:
    sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"])
    positions = (c["image_size"] // c["patch_size"]) ** 2 + 1
    classes = len(c.get("id2label") or range(2))  # the default of transformers
    return ModelShape(name, *sizes, classes, positions=positions, patch=c["patch_size"], task="image")


_READERS: dict[str, Callable[[str, Mapping[str, Any]], ModelShape]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), _read_llama),
    "gpt2": _read_gpt2,
    "bert": _bert_shape,
    "vit": _vit_shape,
}
