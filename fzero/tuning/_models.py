"""Transformers by their sizes: parameters without memory, and the forward pass, as ordinary functional models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from fzero import moe
from fzero.transforms import gather

__all__ = ["Shape", "batch_of", "init", "loss_of"]

Params = dict[str, Any]
Turns = tuple[torch.Tensor, torch.Tensor]  # by how much each position turns a query or key: cosines and sines


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


def loss_of(shape: Shape, explicit: bool, run: Callable[..., Any], params: Params, batch: Any) -> torch.Tensor:
    """Compute the loss of a batch. What is not in a block is gathered where it is used.

    Args:
        shape: of the model.
        explicit: whether attention is written out, so that its weights are kept, as before flash attention.
        run: wraps a block, as `fzero.remat` does.
        params: the parameters, or their boxes.
        batch: as `batch_of` makes it.
    """
    block = run(partial(_apply_block, shape, explicit))
    x = _embedded(shape, params, batch[0])
    turns = _turns(shape, x) if shape.task == "causal" and not shape.positions else None
    for p in params["blocks"]:
        x = block(p, x, turns)
    x = _normed(shape, gather(params["norm"]), x)
    if shape.task == "image":
        x = x[:, 0]
    if shape.task == "masked":
        x = F.gelu(_applied(gather(params["last"]), x))
    logits = x @ gather(params["tokens"]).T if shape.tied else _applied(gather(params["head"]), x)
    logits = logits + gather(params["bias"]) if "bias" in params else logits
    return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())


def _embedded(shape: Shape, params: Params, given: torch.Tensor) -> torch.Tensor:
    if shape.task == "image":
        n, p = len(given), shape.patch
        weights = gather(params["patches"])
        cut = given.to(weights["w"].dtype).unfold(2, p, p).unfold(3, p, p)
        x = _applied(weights, cut.permute(0, 2, 3, 1, 4, 5).reshape(n, -1, 3 * p * p))
        x = torch.cat([gather(params["first"]).expand(n, 1, -1), x], 1)
    else:
        x = F.embedding(given, gather(params["tokens"]))
    if shape.positions:
        x = x + gather(params["positions"])[: x.shape[1]]
    if shape.task == "masked":
        x = _normed(shape, gather(params["norm0"]), x + gather(params["segments"])[0])
    return x


def _applied(p: Params, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def _normed(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    size = p["w"].shape
    return F.layer_norm(x, size, p["w"], p["b"]) if shape.norm == "layer" else F.rms_norm(x, size, p["w"])


def _apply_block(shape: Shape, explicit: bool, p: Params, x: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    """Apply a block; BERT's norms follow its parts, all others precede theirs."""
    if shape.task == "masked":
        x = _normed(shape, p["norm1"], x + _attended(shape, explicit, p, x, turns))
        return _normed(shape, p["norm2"], x + _fed(shape, p["mlp"], x))
    x = x + _attended(shape, explicit, p, _normed(shape, p["norm1"], x), turns)
    h = _normed(shape, p["norm2"], x)
    if "experts" not in p:
        return x + _fed(shape, p["mlp"], h)
    routing = moe.route(_applied(p["router"], h).float(), k=shape.experts[1], normalise=True)
    return x + moe.layer(partial(_fed_rows, shape), p["experts"], h, routing, capacity=CAPACITY)


CAPACITY = 1.25  # seats of an expert, by even routing


def _fed(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    up = _applied(p["up"], x)
    return _applied(p["down"], F.silu(_applied(p["gate"], x)) * up if shape.gated else F.gelu(up))


def _fed_rows(shape: Shape, p: Params, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    up = linear(rows, p["up"]["w"])
    return linear(F.silu(linear(rows, p["gate"]["w"])) * up if shape.gated else F.gelu(up), p["down"]["w"])


def _attended(shape: Shape, explicit: bool, p: Params, x: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    n, t, _ = x.shape
    q, k, v = (_applied(p[name], x).view(n, t, -1, shape.head_width).transpose(1, 2) for name in "qkv")
    if shape.head_norm:
        q, k = _normed(shape, p["q_norm"], q), _normed(shape, p["k_norm"], k)
    if turns is not None:
        q, k = _turned(q, turns), _turned(k, turns)
    attend = _explicit if explicit else _fused
    return _applied(p["o"], attend(q, k, v, shape.task == "causal").transpose(1, 2).reshape(n, t, -1))


def _turns(shape: Shape, x: torch.Tensor) -> Turns:
    """Say how far the positions turn queries and keys, once for all blocks."""
    t, width = x.shape[1], shape.head_width
    speeds = torch.logspace(0, -1, width // 2, base=500_000.0, device=x.device)
    angles = torch.arange(t, device=x.device)[:, None] * speeds
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def _turned(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn queries or keys by their positions."""
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        t = q.shape[-2]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return scores.softmax(-1) @ v
