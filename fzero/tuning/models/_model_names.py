"""Transformers by their sizes, from presets and Hugging Face configurations; their parameters take no memory."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

__all__ = ["PRESETS", "TENSOR", "ModelParams", "ModelShape", "init", "make_batch", "shape_of"]


ModelParams = dict[str, Any]

# the leaves that "tp" splits, and the dimension: heads, hidden units, the vocabulary
TENSOR = {
    **dict.fromkeys(("q.w", "k.w", "v.w", "up.w", "gate.w", "q.b", "k.b", "v.b", "up.b", "head.w", "head.b"), -1),
    **dict.fromkeys(("o.w", "down.w"), -2),
    **dict.fromkeys(("tokens", "bias"), 0),
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer, and the optional parts that it has.

    Attributes:
        name: the name of the model.
        width: the width of the residual stream.
        depth: the number of blocks.
        heads: the number of heads of queries.
        mlp: the hidden width of the MLP.
        vocab: the size of the vocabulary, or the number of classes of an image model.
        kv_heads: the number of heads of keys and values; 0 for as many as `heads`.
        head: the width of a head; 0 for `width / heads`.
        gated: whether the MLP has a gate (SwiGLU).
        norm: "rms", or "layer" with biases.
        biases: the matrices that have a bias: "" for none, "qkv", or "all".
        head_norm: whether queries and keys are normalised.
        tied: whether the output head shares the weights of the token embedding.
        positions: rows of the learned position embedding; 0 for rotary positions.
        task: "causal" language model, "masked" one, or "image" classifier.
        experts: the number of experts of a block, and how many of them a token uses; (0, 0) for a dense model.
        patch: the side of an image patch in pixels.
    """

    name: str
    width: int
    depth: int
    heads: int
    mlp: int
    vocab: int
    kv_heads: int = 0
    head: int = 0
    gated: bool = False
    norm: Literal["rms", "layer"] = "layer"
    biases: Literal["", "qkv", "all"] = "all"
    head_norm: bool = False
    tied: bool = False
    positions: int = 0
    task: Literal["causal", "masked", "image"] = "causal"
    experts: tuple[int, int] = (0, 0)
    patch: int = 0

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head or self.width // self.heads

    def pad_vocab(self, tp: int) -> "ModelShape":
        """Return the sizes with the vocabulary pad_vocab to a multiple of `tp`, as usual with tensor parallelism."""
        return replace(self, vocab=-(-self.vocab // tp) * tp)


def init(shape: ModelShape, depth: int) -> ModelParams:
    """Make the parameters of a model with `depth` blocks, on the meta device."""
    d, biased = shape.width, shape.biases == "all"
    params: ModelParams = {"blocks": [_block(shape) for _ in range(depth)]}
    if shape.task == "image":
        params |= {"patches": _linear(3 * shape.patch**2, d, True), "first": _empty(d)}
    else:
        params |= {"tokens": _empty(shape.vocab, d)}
    if shape.positions:
        params |= {"positions": _empty(shape.positions, d)}
    if shape.task == "masked":  # BERT: segments, the norm after the embeddings, and the layer before the head
        params |= {"segments": _empty(2, d), "norm0": _norm(shape, d), "last": _linear(d, d, True)}
    params |= {"norm": _norm(shape, d)}
    if shape.tied:
        return params | ({"bias": _empty(shape.vocab)} if shape.task == "masked" else {})
    return params | {"head": _linear(d, shape.vocab, biased)}


def _empty(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


def _linear(inputs: int, outputs: int, bias: bool, *leading: int) -> ModelParams:
    return {"w": _empty(*leading, inputs, outputs)} | ({"b": _empty(*leading, outputs)} if bias else {})


def _norm(shape: ModelShape, width: int) -> ModelParams:
    return {"w": _empty(width)} | ({"b": _empty(width)} if shape.norm == "layer" else {})


def _block(shape: ModelShape) -> ModelParams:
    """Return the parameters of one block, by name: attention, and an MLP or experts."""
    d, h, all_ = shape.width, shape.head_width, shape.biases == "all"
    kv = (shape.kv_heads or shape.heads) * h
    qkv = all_ or shape.biases == "qkv"
    block = {"norm1": _norm(shape, d), "norm2": _norm(shape, d)}
    block |= {"q": _linear(d, shape.heads * h, qkv), "k": _linear(d, kv, qkv), "v": _linear(d, kv, qkv)}
    block |= {"o": _linear(shape.heads * h, d, all_)}
    block |= {"q_norm": _norm(shape, h), "k_norm": _norm(shape, h)} if shape.head_norm else {}
    count = shape.experts[0]
    leading = (count,) if count else ()
    mlp = {"up": _linear(d, shape.mlp, all_, *leading), "down": _linear(shape.mlp, d, all_, *leading)}
    mlp |= {"gate": _linear(d, shape.mlp, all_, *leading)} if shape.gated else {}
    return block | ({"experts": mlp, "router": _linear(d, count, False)} if count else {"mlp": mlp})


def make_batch(shape: ModelShape, samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch on the meta device: tokens and a target for each, or images and their classes.

    Args:
        shape: the sizes of the model.
        samples: the number of sequences or images.
        length: tokens of a sequence, or the side of an image in pixels.
    """
    if shape.task == "image":
        labels = torch.empty(samples, dtype=torch.long, device="meta")
        return torch.empty(samples, 3, length, length, device="meta"), labels
    tokens = torch.empty(samples, length, dtype=torch.long, device="meta")
    return tokens, torch.empty_like(tokens)


# Models by name: presets, and the config.json that Hugging Face writes beside weights. Nothing is downloaded.


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


def shape_of(model: str) -> ModelShape:
    """Return the sizes of a model: a preset by its name, or a Hugging Face configuration by its file or folder.

    Raises:
        ValueError: if the model is neither. The message lists the presets.
    """
    if model in PRESETS:
        return PRESETS[model]
    path = pathlib.Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _read(path)
    raise ValueError(
        f"model {model!r} is unknown: expected one of {', '.join(PRESETS)}, a Hugging Face config.json or its folder, "
        "or module:function for your own make_step"
    )


def _read(path: pathlib.Path) -> ModelShape:
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


def _bert(name: str, c: Mapping[str, Any]) -> ModelShape:
    sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"])
    return ModelShape(name, *sizes, c["vocab_size"], positions=c["max_position_embeddings"], tied=True, task="masked")


def _vit(name: str, c: Mapping[str, Any]) -> ModelShape:
    sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"])
    positions = (c["image_size"] // c["patch_size"]) ** 2 + 1
    classes = len(c.get("id2label") or range(2))  # the default of transformers
    return ModelShape(name, *sizes, classes, positions=positions, patch=c["patch_size"], task="image")


_READERS: dict[str, Callable[[str, Mapping[str, Any]], ModelShape]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), _read_llama),
    "gpt2": _read_gpt2,
    "bert": _bert,
    "vit": _vit,
}
