"""Transformers by their sizes: parameters without memory, a batch, and how parameters are cut over ranks."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

__all__ = ["TENSOR", "Params", "Shape", "batch_of", "init"]

Params = dict[str, Any]

# the names of leaves of which each rank along "tp" has a part, and the dimension: heads, hidden units, the vocabulary
TENSOR = {
    **dict.fromkeys(("q.w", "k.w", "v.w", "up.w", "gate.w", "q.b", "k.b", "v.b", "up.b", "head.w", "head.b"), -1),
    **dict.fromkeys(("o.w", "down.w"), -2),
    **dict.fromkeys(("tokens", "bias"), 0),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer, and which of the common parts it has.

    Attributes:
        name: of the model.
        width: of the residual stream.
        depth: the number of blocks.
        heads: of queries.
        mlp: the width within a feed-forward part.
        vocab: tokens, or an image model's classes.
        kv_heads: of keys and values; as many as `heads` by default.
        head: the width of a head; `width / heads` by default.
        gated: whether the feed-forward part has a gate (SwiGLU).
        norm: "rms", or "layer" with biases.
        biases: which matrices have a bias: "", "qkv", or "all".
        head_norm: whether queries and keys are normalised.
        tied: whether the head is the table of tokens.
        positions: of a learned table; 0 for rotary positions.
        task: "causal" language model, "masked" one, or "image" classifier.
        experts: in each block, and how many of them a token uses; (0, 0) for a dense model.
        patch: of an image, its side in pixels.
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

    def padded(self, tp: int) -> "Shape":
        """Return the sizes with a vocabulary that divides over so many ranks, as those who train so pad it."""
        return replace(self, vocab=-(-self.vocab // tp) * tp)


def init(shape: Shape, depth: int) -> Params:
    """Make the parameters of a model of some blocks, on the meta device."""
    d, biased = shape.width, shape.biases == "all"
    params: Params = {"blocks": [_block(shape) for _ in range(depth)]}
    if shape.task == "image":
        params |= {"patches": _linear(3 * shape.patch**2, d, True), "first": _empty(d)}
    else:
        params |= {"tokens": _empty(shape.vocab, d)}
    if shape.positions:
        params |= {"positions": _empty(shape.positions, d)}
    if shape.task == "masked":  # BERT: its segments, the norm behind the tables, and what stands before the head
        params |= {"segments": _empty(2, d), "norm0": _norm(shape, d), "last": _linear(d, d, True)}
    params |= {"norm": _norm(shape, d)}
    if shape.tied:
        return params | ({"bias": _empty(shape.vocab)} if shape.task == "masked" else {})
    return params | {"head": _linear(d, shape.vocab, biased)}


def _empty(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


def _linear(inputs: int, outputs: int, bias: bool, *before: int) -> Params:
    return {"w": _empty(*before, inputs, outputs)} | ({"b": _empty(*before, outputs)} if bias else {})


def _norm(shape: Shape, width: int) -> Params:
    return {"w": _empty(width)} | ({"b": _empty(width)} if shape.norm == "layer" else {})


def _block(shape: Shape) -> Params:
    d, h, all_ = shape.width, shape.head_width, shape.biases == "all"
    kv = (shape.kv_heads or shape.heads) * h
    qkv = all_ or shape.biases == "qkv"
    block = {"norm1": _norm(shape, d), "norm2": _norm(shape, d)}
    block |= {"q": _linear(d, shape.heads * h, qkv), "k": _linear(d, kv, qkv), "v": _linear(d, kv, qkv)}
    block |= {"o": _linear(shape.heads * h, d, all_)}
    block |= {"q_norm": _norm(shape, h), "k_norm": _norm(shape, h)} if shape.head_norm else {}
    count = shape.experts[0]
    before = (count,) if count else ()
    mlp = {"up": _linear(d, shape.mlp, all_, *before), "down": _linear(shape.mlp, d, all_, *before)}
    mlp |= {"gate": _linear(d, shape.mlp, all_, *before)} if shape.gated else {}
    return block | ({"experts": mlp, "router": _linear(d, count, False)} if count else {"mlp": mlp})


def batch_of(shape: Shape, samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch on the meta device: tokens and what is to be told of each, or images and their classes.

    Args:
        shape: of the model.
        samples: sequences or images.
        length: tokens of a sequence; an image's side in pixels.
    """
    if shape.task == "image":
        kinds = torch.empty(samples, dtype=torch.long, device="meta")
        return torch.empty(samples, 3, length, length, device="meta"), kinds
    tokens = torch.empty(samples, length, dtype=torch.long, device="meta")
    return tokens, torch.empty_like(tokens)
