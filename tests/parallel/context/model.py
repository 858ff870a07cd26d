"""A small language model whose attention works across an axis, and attention by its definition."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from fzero import optim
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close

VOCABULARY, WIDTH, HEADS = 13, 12, 4
OPT = optim.adamw(1e-2)


def attend_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
    documents: torch.Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of whole sequences, written from its definition and not from fzero's code."""
    t, groups = q.shape[-2], q.shape[-3] // k.shape[-3]
    keep = torch.ones(t, t, dtype=torch.bool)
    for i in range(t):
        for j in range(t):
            keep[i, j] = (not causal or j <= i) and (window is None or abs(i - j) < window)
    if documents is not None:
        keep = keep & (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(-3)
    scores = q @ k.repeat_interleave(groups, -3).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    weights = torch.where(keep, scores, -math.inf)
    if sinks is not None:  # a sink is one more key, whose value is zero
        weights = torch.cat([weights, sinks.view(-1, 1, 1).expand(*weights.shape[:-1], 1)], -1)
    return weights.softmax(-1)[..., :t] @ v.repeat_interleave(groups, -3)


def params_of(dtype: torch.dtype = torch.float64, length: int = 16) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) / 4).to(dtype)

    block = {"qkv": (WIDTH, 2 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 20), "down": (20, WIDTH)}
    return {
        "embed": normal(VOCABULARY, WIDTH),
        "positions": normal(length, WIDTH),
        "blocks": [{name: normal(*shape) for name, shape in block.items()} for _ in range(2)],
        "norm": normal(WIDTH) + 1,
    }


def logits_of(params: Any, batch: Any, attend: Any) -> torch.Tensor:
    """Grouped queries: two heads of keys for four of queries."""
    tokens = batch["tokens"]
    x = params["embed"][tokens] + params["positions"][context.positions(tokens.shape[1])]
    for block in params["blocks"]:
        qkv = (F.rms_norm(x, (WIDTH,), params["norm"]) @ block["qkv"]).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2)
        q, k, v = qkv.split([HEADS, HEADS // 2, HEADS // 2], 1)
        y = attend(q, k, v, documents=batch.get("documents"))
        x = x + y.transpose(1, 2).flatten(2) @ block["out"]
        x = x + torch.tanh(x @ block["up"]) @ block["down"]
    return x @ params["embed"].mT


def loss_for(weighted: bool = False, **options: Any) -> Any:
    """The mean cross entropy of this rank's labels; or their sum, and their number."""

    def loss_fn(params: Any, batch: Any) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any) -> torch.Tensor:
            return context.attention(q, k, v, documents=documents, **options)

        logits, labels = logits_of(params, batch, attend).flatten(0, 1), batch["labels"].flatten()
        if weighted:
            return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()
        return F.cross_entropy(logits, labels)

    return loss_fn


def expert_params() -> Any:
    g = torch.Generator().manual_seed(0)
    shapes = {"router": (12, 4), "up": (4, 12, 10), "down": (4, 10, 12)}
    layer = {name: torch.randn(shape, generator=g, dtype=torch.float64) / 3 for name, shape in shapes.items()}
    params = params_of()
    return params | {"router": layer.pop("router"), "experts": layer}


def expert_loss(method: Any, axis: str, over: Any) -> Any:
    """The model of `loss_for`, with a layer of experts after its blocks and a loss of their balance."""

    def ffn(p: Any, rows: Any, linear: Any) -> torch.Tensor:
        return linear(torch.tanh(linear(rows, p["up"])), p["down"])

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        def attend(q: Any, k: Any, v: Any, documents: Any) -> torch.Tensor:
            return context.attention(q, k, v, causal=True, documents=documents, method=method)

        x = logits_of(params, batch, attend) @ params["embed"]  # [b, t, width]
        routing = moe.route(x @ params["router"], 2)
        x = x + moe.layer(ffn, params["experts"], x, routing, axis=axis)
        loss = F.cross_entropy((x @ params["embed"].mT).flatten(0, 1), batch["labels"].flatten())
        return loss + moe.balance_loss(routing, over)

    return loss_fn


def batch_of(seed: int, documents: bool = False, samples: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    batch = {name: torch.randint(0, VOCABULARY, (samples, length), generator=g) for name in ("tokens", "labels")}
    if documents:
        batch["documents"] = torch.randint(0, 4, (samples, length), generator=g).sort(-1).values
    return batch


def assert_trains_as_whole(train_step: Any, params: Any, step: Any, batches: list[Any], **options: Any) -> None:
    """Two steps, with the losses; micro-batches divide samples, so the order of sums differs."""
    state, expected = step.init(params, OPT), (params, OPT.init(params))
    for batch in batches:
        *state, loss = step(*state, context.split(step.mesh, batch, **options))
        *expected, wanted = train_step(*expected, batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    assert_trees_close(step.gather(tuple(state)), tuple(expected), rtol=1e-11)
