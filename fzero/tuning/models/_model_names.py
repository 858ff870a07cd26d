"""Transformers by their sizes. Their parameters take no memory."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

__all__ = ["TENSOR", "ModelParams", "ModelShape", "init", "make_batch"]


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
    d, has_biases = shape.width, shape.biases == "all"
    params: ModelParams = {"blocks": [_block_params(shape) for _ in range(depth)]}
    if shape.task == "image":
        params |= {"patches": _linear_params(3 * shape.patch**2, d, True), "first": _empty_leaf(d)}
    else:
        params |= {"tokens": _empty_leaf(shape.vocab, d)}
    if shape.positions:
        params |= {"positions": _empty_leaf(shape.positions, d)}
    if shape.task == "masked":  # BERT: segments, the norm after the embeddings, and the layer before the head
        params |= {"segments": _empty_leaf(2, d), "norm0": _norm_params(shape, d), "last": _linear_params(d, d, True)}
    params |= {"norm": _norm_params(shape, d)}
    if shape.tied:
        return params | ({"bias": _empty_leaf(shape.vocab)} if shape.task == "masked" else {})
    return params | {"head": _linear_params(d, shape.vocab, has_biases)}


def _empty_leaf(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


def _linear_params(inputs: int, outputs: int, bias: bool, *leading: int) -> ModelParams:
    return {"w": _empty_leaf(*leading, inputs, outputs)} | ({"b": _empty_leaf(*leading, outputs)} if bias else {})


def _norm_params(shape: ModelShape, width: int) -> ModelParams:
    return {"w": _empty_leaf(width)} | ({"b": _empty_leaf(width)} if shape.norm == "layer" else {})


def _block_params(shape: ModelShape) -> ModelParams:
    """Return the parameters of one block, by name: attention, and an MLP or experts."""
    d, h, all_ = shape.width, shape.head_width, shape.biases == "all"
    kv = (shape.kv_heads or shape.heads) * h
    qkv = all_ or shape.biases == "qkv"
    block = {"norm1": _norm_params(shape, d), "norm2": _norm_params(shape, d)}
    block |= {
        "q": _linear_params(d, shape.heads * h, qkv),
        "k": _linear_params(d, kv, qkv),
        "v": _linear_params(d, kv, qkv),
    }
    block |= {"o": _linear_params(shape.heads * h, d, all_)}
    if shape.head_norm:
        block |= {"q_norm": _norm_params(shape, h), "k_norm": _norm_params(shape, h)}
    count = shape.experts[0]
    leading = (count,) if count else ()
    mlp = {"up": _linear_params(d, shape.mlp, all_, *leading), "down": _linear_params(shape.mlp, d, all_, *leading)}
    if shape.gated:
        mlp |= {"gate": _linear_params(d, shape.mlp, all_, *leading)}
    return block | ({"experts": mlp, "router": _linear_params(d, count, False)} if count else {"mlp": mlp})


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
