"""Models by name: presets, and the configurations that Hugging Face writes beside weights; sizes alone, no download."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from fzero.tuning._models import Shape

__all__ = ["PRESETS", "shape_of"]

LLAMA: dict[str, Any] = {"gated": True, "norm": "rms", "biases": ""}

PRESETS = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", 4096, 32, 32, 14336, 128256, kv_heads=8, **LLAMA),
        Shape("llama-3-70b", 8192, 80, 64, 28672, 128256, kv_heads=8, **LLAMA),
        Shape("qwen3-8b", 4096, 36, 32, 12288, 151936, kv_heads=8, head=128, head_norm=True, **LLAMA),
        Shape("mixtral-8x7b", 4096, 32, 32, 14336, 32000, kv_heads=8, experts=(8, 2), **LLAMA),
        Shape("gpt2", 768, 12, 12, 3072, 50257, positions=1024, tied=True),
        Shape("gpt2-xl", 1600, 48, 25, 6400, 50257, positions=1024, tied=True),
        Shape("bert-large", 1024, 24, 16, 4096, 30522, positions=512, tied=True, task="masked"),
        Shape("vit-g-14", 1664, 48, 16, 8192, 1000, positions=257, patch=14, task="image"),
    )
}


def shape_of(model: str) -> Shape:
    """Return the sizes of a model: a preset by name, or a Hugging Face configuration by its file or folder.

    Raises:
        ValueError: if it is none of these. Names the presets.
    """
    if model in PRESETS:
        return PRESETS[model]
    path = pathlib.Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _read(path)
    raise ValueError(
        f"model {model!r} is unknown: expected one of {', '.join(PRESETS)}, a Hugging Face config.json or its folder, "
        "or module:function for a make_step of yours"
    )


def _read(path: pathlib.Path) -> Shape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{os.fspath(path)}: expected a Hugging Face configuration with a model_type: {error}"
        ) from error
    if kind not in READERS:
        raise ValueError(
            f"{os.fspath(path)}: model_type {kind!r} is none of {', '.join(READERS)}: write a make_step for it, and "
            "name it as module:function"
        )
    name = config.get("_name_or_path") or path.parent.name or kind
    try:
        return READERS[kind](name, config)
    except KeyError as error:
        raise ValueError(f"{os.fspath(path)}: the configuration of a {kind} lacks {error}") from error


def _llama(name: str, c: Mapping[str, Any]) -> Shape:
    qwen3, mixtral = c["model_type"] == "qwen3", c["model_type"] == "mixtral"
    return Shape(
        name,
        c["hidden_size"],
        c["num_hidden_layers"],
        c["num_attention_heads"],
        c["intermediate_size"],
        c["vocab_size"],
        kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
        head=c.get("head_dim") or 0,
        gated=True,
        norm="rms",
        biases="qkv" if c["model_type"] == "qwen2" else "",
        head_norm=qwen3,
        tied=bool(c.get("tie_word_embeddings", False)),
        experts=(c["num_local_experts"], c["num_experts_per_tok"]) if mixtral else (0, 0),
    )


def _gpt2(name: str, c: Mapping[str, Any]) -> Shape:
    d = c["n_embd"]
    mlp = c.get("n_inner") or 4 * d
    return Shape(name, d, c["n_layer"], c["n_head"], mlp, c["vocab_size"], positions=c["n_positions"], tied=True)


def _bert(name: str, c: Mapping[str, Any]) -> Shape:
    sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"])
    return Shape(name, *sizes, c["vocab_size"], positions=c["max_position_embeddings"], tied=True, task="masked")


def _vit(name: str, c: Mapping[str, Any]) -> Shape:
    sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"])
    places = (c["image_size"] // c["patch_size"]) ** 2 + 1
    classes = len(c.get("id2label") or range(2))  # as transformers has it by default
    return Shape(name, *sizes, classes, positions=places, patch=c["patch_size"], task="image")


READERS: dict[str, Callable[[str, Mapping[str, Any]], Shape]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), _llama),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
}
