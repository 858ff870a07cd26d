"""A small GPT twice: in plain torch, and with the parts of `fzero.parallel.tensor`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fzero
from fzero import optim
from fzero.parallel import tensor as tp

VOCAB, WIDTH, HEADS, LENGTH = 24, 8, 4, 8
OPT = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, eps=1e-3))
DIMS = {
    **{"tokens": 0, "head": -1, "qkv": 2, "qkv_bias": 1, "out": 0},
    **{"up": -1, "up_bias": 0, "down": 0},
}
SPLIT = tp.split_rule(DIMS)
TIED = tp.split_rule({name: dim for name, dim in DIMS.items() if name != "head"})


def params_of(tied: bool = False, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) / 2

    def block() -> dict[str, torch.Tensor]:
        return {
            "norm1": 1 + normal(WIDTH),
            "qkv": normal(WIDTH, 3, HEADS, 2),
            "qkv_bias": normal(3, HEADS, 2),
            "out": normal(HEADS, 2, WIDTH),
            "out_bias": normal(WIDTH),
            "norm2": 1 + normal(WIDTH),
            "up": normal(WIDTH, 12),
            "up_bias": normal(12),
            "down": normal(12, WIDTH),
            "down_bias": normal(WIDTH),
        }

    params = {
        "tokens": normal(VOCAB, WIDTH),
        "positions": normal(LENGTH, WIDTH),
        "blocks": [block() for _ in range(2)],
        "norm": 1 + normal(WIDTH),
    }
    return params if tied else {**params, "head": normal(WIDTH, VOCAB)}


def batch_of(size: int = 4, seed: int = 0, ignored: bool = True) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed + 100)
    tokens = torch.randint(VOCAB, (size, LENGTH + 1), generator=g)
    targets = tokens[:, 1:].clone()
    if ignored:
        targets[:, 2] = -100  # as many in each part of the batch
    return {"tokens": tokens[:, :-1], "targets": targets}


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], scale)


def attend(qkv: torch.Tensor) -> torch.Tensor:
    """[b, t, 3, heads, k] to [b, t, heads, k]."""
    q, k, v = qkv.movedim(2, 0).transpose(2, 3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def plain_loss(params: Any, batch: Any) -> torch.Tensor:
    """The model without a word of ranks."""
    x = params["tokens"][batch["tokens"]] + params["positions"]
    for p in params["blocks"]:
        qkv = torch.einsum("btd,dchk->btchk", norm(x, p["norm1"]), p["qkv"]) + p["qkv_bias"]
        x = x + torch.einsum("bthk,hkd->btd", attend(qkv), p["out"]) + p["out_bias"]
        x = x + F.gelu(norm(x, p["norm2"]) @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
    logits = norm(x, params["norm"]) @ (params["head"] if "head" in params else params["tokens"].mT)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def loss_for(sequence: bool = False, remat: bool = False, axis: str = "tp") -> Callable[..., torch.Tensor]:
    options = {"axis": axis, "sequence": sequence}

    def apply_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return norm(x, tp.enter(scale, axis) if sequence else scale)

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        qkv = tp.column(apply_norm(x, p["norm1"]), p["qkv"], p["qkv_bias"], **options)
        x = x + tp.row(attend(qkv), p["out"], p["out_bias"], **options)
        h = F.gelu(tp.column(apply_norm(x, p["norm2"]), p["up"], p["up_bias"], **options))
        return x + tp.row(h, p["down"], p["down_bias"], **options)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        positions = tp.scatter(params["positions"], axis) if sequence else params["positions"]
        x = tp.embed(batch["tokens"], params["tokens"], **options) + positions
        for p in params["blocks"]:
            x = (fzero.remat(block) if remat else block)(p, x)
        head = params["head"] if "head" in params else params["tokens"].mT
        logits = tp.column(apply_norm(x, params["norm"]), head, **options)
        return tp.cross_entropy(logits, batch["targets"], axis)

    return loss_fn
