"""The forward pass of a transformer of some sizes, cut at its blocks: an ordinary functional model.

Along an axis "tp" each rank has some heads, hidden units, and a part of the vocabulary. Without one nothing is cut.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fzero import moe, tp
from fzero.axes.scope import axis_size, where_bound
from fzero.transforms import gather
from fzero.tuning._models import Params, Shape

__all__ = ["apply_block", "embedded", "loss_of", "told"]

Turns = tuple[torch.Tensor, torch.Tensor]  # by how much each position turns a query or key: cosines and sines


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
    x = embedded(shape, params, batch)
    turns = _turns(shape, x)
    for p in params["blocks"]:
        x = block(p, x, turns)
    return told(shape, params, x, batch)


def embedded(shape: Shape, params: Params, batch: Any) -> torch.Tensor:
    """Return what the first block is given of a batch: `[samples, tokens, width]`."""
    given = batch[0]
    if shape.task == "image":
        n, p = len(given), shape.patch
        weights = gather(params["patches"])
        cut = given.to(weights["w"].dtype).unfold(2, p, p).unfold(3, p, p)
        x = _applied(weights, cut.permute(0, 2, 3, 1, 4, 5).reshape(n, -1, 3 * p * p))
        x = torch.cat([gather(params["first"]).expand(n, 1, -1), x], 1)
    else:
        x = tp.embed(given, gather(params["tokens"]))
    if shape.positions:
        x = x + gather(params["positions"])[: x.shape[1]]
    if shape.task == "masked":
        x = _normed(shape, gather(params["norm0"]), x + gather(params["segments"])[0])
    return x


def apply_block(shape: Shape, explicit: bool, p: Params, x: torch.Tensor) -> torch.Tensor:
    """Apply one block by itself, as a stage of a pipeline does."""
    return _apply_block(shape, explicit, p, x, _turns(shape, x))


def told(shape: Shape, params: Params, x: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the loss of what the last block made."""
    x = _normed(shape, gather(params["norm"]), x)
    if shape.task == "image":
        x = x[:, 0]
    if shape.task == "masked":
        x = F.gelu(_applied(gather(params["last"]), x))
    x = tp.enter(x)
    logits = x @ gather(params["tokens"]).T if shape.tied else _applied(gather(params["head"]), x)
    logits = (logits + gather(params["bias"]) if "bias" in params else logits).flatten(0, -2).float()
    loss = F.cross_entropy if axis_size(where_bound("tp")) == 1 else tp.cross_entropy
    return loss(logits, batch[1].flatten())


def _applied(p: Params, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def _left(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Multiply by this rank's rows, sum over the ranks, and add a bias once."""
    y = tp.leave(x @ p["w"])
    return y + p["b"] if "b" in p else y


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
    return x + (_sent(shape, p, h) if "experts" in p else _fed(shape, p["mlp"], h))


CAPACITY = 1.25  # seats of an expert, by even routing


def _sent(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    """Send tokens to their experts, of each of which a rank along "tp" has a part."""
    routing = moe.route(_applied(p["router"], x).float(), k=shape.experts[1], normalise=True)
    routing = routing._replace(gates=tp.enter(routing.gates))
    return tp.leave(moe.layer(partial(_fed_rows, shape), p["experts"], tp.enter(x), routing, capacity=CAPACITY))


def _fed(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    x = tp.enter(x)
    up = _applied(p["up"], x)
    return _left(p["down"], F.silu(_applied(p["gate"], x)) * up if shape.gated else F.gelu(up))


def _fed_rows(shape: Shape, p: Params, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    up = linear(rows, p["up"]["w"])
    return linear(F.silu(linear(rows, p["gate"]["w"])) * up if shape.gated else F.gelu(up), p["down"]["w"])


def _attended(shape: Shape, explicit: bool, p: Params, x: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    n, t, _ = x.shape
    x = tp.enter(x)
    q, k, v = (_applied(p[name], x).view(n, t, -1, shape.head_width).transpose(1, 2) for name in "qkv")
    if shape.head_norm:
        own = {name: {part: tp.enter(w) for part, w in p[f"{name}_norm"].items()} for name in "qk"}
        q, k = _normed(shape, own["q"], q), _normed(shape, own["k"], k)
    if turns is not None:
        q, k = _turned(q, turns), _turned(k, turns)
    attend = _explicit if explicit else _fused
    return _left(p["o"], attend(q, k, v, shape.task == "causal").transpose(1, 2).reshape(n, t, -1))


def _turns(shape: Shape, x: torch.Tensor) -> Turns | None:
    """Say how far the positions turn queries and keys; None where they do not."""
    if shape.task != "causal" or shape.positions:
        return None
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
