"""The forward pass of a transformer, split at its blocks: an ordinary functional model."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fzero import tree
from fzero.axes import axis_if_bound, axis_size
from fzero.nn import SIZE_MULTIPLE, float8_linear, linear_cross_entropy
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.transforms import gather
from fzero.tuning.models._model_names import ModelParams, ModelShape

__all__ = ["ForwardOptions", "apply_single_block", "compute_loss", "embed", "head_loss"]


@dataclass(frozen=True)
class ForwardOptions:
    """How a forward pass is computed.

    Attributes:
        explicit: whether attention is written out, so that its weights are saved for the backward pass.
        chunked: whether logits never exist as a whole.
        sequence: whether ranks along "tp" hold parts of the tokens between the layers, as `tp.enter` describes.
        float8: the scaling with which linear layers of blocks multiply in float8; None if they multiply in their dtype.
    """

    explicit: bool = False
    chunked: bool = False
    sequence: bool = False
    float8: str | None = None


_Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the rotary angles, by position


def compute_loss(
    shape: ModelShape, options: ForwardOptions, run: Callable[..., Any], params: ModelParams, batch: Any
) -> torch.Tensor:
    """Compute the loss of a batch. Parameters outside of blocks are gathered where they are used.

    Args:
        shape: the sizes of the model.
        options: how it is computed.
        run: returns the variants of a block that the model uses in turn, such as `[fzero.remat(block)]`.
        params: the parameters, or their boxes.
        batch: as `make_batch` makes it.
    """
    blocks = itertools.cycle(run(partial(_apply_block, shape, options)))
    x = embed(shape, options, params, batch)
    tables = _rotary_tables(shape, options, x)
    for p, block in zip(params["blocks"], blocks, strict=False):
        x = block(p, x, tables)
    return head_loss(shape, options, params, x, batch)


def embed(shape: ModelShape, options: ForwardOptions, params: ModelParams, batch: Any) -> torch.Tensor:
    """Return the input of the first block for a batch: `[samples, tokens, width]` of this rank's tokens."""
    inputs = batch[0]
    if shape.task == "image":
        n, p = len(inputs), shape.patch
        weights = gather(params["patches"])
        patches = inputs.to(weights["w"].dtype).unfold(2, p, p).unfold(3, p, p)
        x = _apply_linear(weights, patches.permute(0, 2, 3, 1, 4, 5).reshape(n, -1, 3 * p * p))
        x = torch.cat([gather(params["first"]).expand(n, 1, -1), x], 1)
    else:
        x = tp.embed(inputs, gather(params["tokens"]), sequence=options.sequence)
    if shape.positions:
        x = x + _learned_positions(options, gather(params["positions"]), x)
    if shape.task == "masked":
        segment = _enter_for_own_tokens(options, gather(params["segments"])[0])
        x = _apply_norm(shape, _enter_for_own_tokens(options, gather(params["norm0"])), x + segment)
    return x


def _learned_positions(options: ForwardOptions, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of the positions of a rank's tokens `x`."""
    t = _token_count(options, x)
    rows = F.embedding(context.positions(t, device=table.device), table) if axis_if_bound("cp") else table[:t]
    return tp.scatter(rows) if options.sequence else rows


def apply_single_block(shape: ModelShape, options: ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Apply one block by itself, as a stage of a pipeline does."""
    return _apply_block(shape, options, p, x, _rotary_tables(shape, options, x))


def head_loss(
    shape: ModelShape, options: ForwardOptions, params: ModelParams, x: torch.Tensor, batch: Any
) -> torch.Tensor:
    """Return the loss, given the output of the last block."""
    x = _apply_norm(shape, _enter_for_own_tokens(options, gather(params["norm"])), x)
    if shape.task == "image":
        x = x[:, 0]
    if shape.task == "masked":
        x = F.gelu(_apply_linear(_enter_for_own_tokens(options, gather(params["last"])), x))
    if options.chunked:
        weight, bias = _output_head(shape, params)
        axis = "tp" if axis_size(axis_if_bound("tp")) > 1 else None
        return linear_cross_entropy(tp.all_gather(x) if options.sequence else x, weight, batch[1], bias, axis=axis)
    x = tp.enter(x, sequence=options.sequence)
    logits = x @ gather(params["tokens"]).T if shape.tied else _apply_linear(gather(params["head"]), x)
    logits = (logits + gather(params["bias"]) if "bias" in params else logits).flatten(0, -2).float()
    loss = F.cross_entropy if axis_size(axis_if_bound("tp")) == 1 else tp.cross_entropy
    return loss(logits, batch[1].flatten())


def _output_head(shape: ModelShape, params: ModelParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight `[classes, width]` of the output head, and its bias."""
    if shape.tied:
        return gather(params["tokens"]), gather(params["bias"]) if "bias" in params else None
    head = gather(params["head"])
    return head["w"].mT, head.get("b")


def _apply_linear(p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def _linear_product(options: ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Multiply by the weight of a linear layer of a block, in float8 if its sizes allow it."""
    if options.float8 is None or any(n % SIZE_MULTIPLE for n in p["w"].shape):
        return x @ p["w"]
    return float8_linear(x, p["w"].mT, scaling=options.float8)


def _block_linear(options: ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    y = _linear_product(options, p, x)
    return y + p["b"] if "b" in p else y


def _enter_for_own_tokens(options: ForwardOptions, weights: Any) -> Any:
    """Return replicated weights for use on a rank's own tokens: their gradients are summed over the ranks."""
    return tree.map(tp.enter, weights) if options.sequence else weights


def _token_count(options: ForwardOptions, x: torch.Tensor) -> int:
    """Return the number of tokens that a rank's layers read, given the values `[samples, tokens, ..]` between them."""
    return x.shape[1] * (axis_size("tp") if options.sequence else 1)


def _row_linear(options: ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Multiply by this rank's rows, sum over the ranks, and add the bias once."""
    y = tp.leave(_linear_product(options, p, x), sequence=options.sequence)
    return y + _enter_for_own_tokens(options, p["b"]) if "b" in p else y


def _apply_norm(shape: ModelShape, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    size = p["w"].shape
    return F.layer_norm(x, size, p["w"], p["b"]) if shape.norm == "layer" else F.rms_norm(x, size, p["w"])


def _apply_block(
    shape: ModelShape, options: ForwardOptions, p: ModelParams, x: torch.Tensor, tables: _Rotary | None
) -> torch.Tensor:
    """Apply a block. The norms follow attention and MLP in BERT, and precede them in all other models."""
    norm1, norm2 = (partial(_apply_norm, shape, _enter_for_own_tokens(options, p[name])) for name in ("norm1", "norm2"))
    if shape.task == "masked":
        x = norm1(x + _apply_attention(shape, options, p, x, tables))
        return norm2(x + _apply_mlp(shape, options, p["mlp"], x))
    x = x + _apply_attention(shape, options, p, norm1(x), tables)
    h = norm2(x)
    return x + (_apply_experts(shape, options, p, h) if "experts" in p else _apply_mlp(shape, options, p["mlp"], h))


_CAPACITY_FACTOR = 1.25  # positions at an expert, relative to even routing


def _apply_experts(shape: ModelShape, options: ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Send tokens to their experts. A rank along "tp" holds part of each expert, and routes all tokens."""
    x = tp.all_gather(x) if options.sequence else x
    routing = moe.route(_apply_linear(p["router"], x).float(), k=shape.experts[1], normalize=True)
    routing = routing._replace(gates=tp.enter(routing.gates))
    y = moe.layer(partial(_expert_mlp, shape), p["experts"], tp.enter(x), routing, capacity=_CAPACITY_FACTOR)
    return tp.leave(y, sequence=options.sequence)


def _apply_mlp(shape: ModelShape, options: ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    x = tp.enter(x, sequence=options.sequence)
    up = _block_linear(options, p["up"], x)
    hidden = F.silu(_block_linear(options, p["gate"], x)) * up if shape.gated else F.gelu(up)
    return _row_linear(options, p["down"], hidden)


def _expert_mlp(shape: ModelShape, p: ModelParams, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    up = linear(rows, p["up"]["w"])
    return linear(F.silu(linear(rows, p["gate"]["w"])) * up if shape.gated else F.gelu(up), p["down"]["w"])


def _apply_attention(
    shape: ModelShape, options: ForwardOptions, p: ModelParams, x: torch.Tensor, tables: _Rotary | None
) -> torch.Tensor:
    """Return the output of a block's attention, `[n, t, width]`, with this rank's heads."""
    x = tp.enter(x, sequence=options.sequence)
    n, t, _ = x.shape
    q, k, v = (_block_linear(options, p[name], x).view(n, t, -1, shape.head_width).transpose(1, 2) for name in "qkv")
    if shape.head_norm:
        norms = {name: {part: tp.enter(w) for part, w in p[f"{name}_norm"].items()} for name in "qk"}
        q, k = _apply_norm(shape, norms["q"], q), _apply_norm(shape, norms["k"], k)
    if tables is not None:
        q, k = _rotate_heads(q, tables), _rotate_heads(k, tables)
    attend = _explicit_attention if options.explicit else context.attention
    return _row_linear(
        options, p["o"], attend(q, k, v, causal=shape.task == "causal").transpose(1, 2).reshape(n, t, -1)
    )


def _rotary_tables(shape: ModelShape, options: ForwardOptions, x: torch.Tensor) -> _Rotary | None:
    """Return the tables of rotary embeddings for a rank's tokens; None for a model without them."""
    if shape.task != "causal" or shape.positions:
        return None
    width = shape.head_width
    speeds = torch.logspace(0, -1, width // 2, base=500_000.0, device=x.device)
    angles = context.positions(_token_count(options, x), device=x.device)[:, None] * speeds
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def _rotate_heads(x: torch.Tensor, tables: _Rotary) -> torch.Tensor:
    """Rotate queries or keys by their positions."""
    cos, sin = tables
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _explicit_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        t = q.shape[-2]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return scores.softmax(-1) @ v
