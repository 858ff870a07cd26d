"""torch's dropouts, and attention with dropout, by key.

Each takes `draw`, which gives the key of the next draw, and then the arguments of torch's function. It returns
NotImplemented to leave a call to torch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from fzero.random import _draws
from fzero.random._tensors import Draw

__all__ = [
    "alpha_dropout",
    "attention",
    "dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "in_place",
    "native_dropout",
    "rrelu",
]


def dropout(draw: Draw, x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return _draws.dropout(draw(), x, p) if train and p else x


def feature_dropout(draw: Draw, x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    """Drop whole features: of x [n, c, ...] each [...]."""
    if not train or not p:
        return x
    return _draws.drop(x, _draws.keep(draw(), p, _features(x), x.device), p)


def _features(x: torch.Tensor) -> list[int]:
    return [*x.shape[:2], *[1] * (x.ndim - 2)]


ALPHA = 1.7580993408473766  # of SELU: scale * alpha, by which its negative numbers are bounded


def alpha_dropout(draw: Draw, x: torch.Tensor, p: float, train: bool = True, feature: bool = False) -> torch.Tensor:
    """Set to SELU's lowest value, and scale and shift so that mean 0 and variance 1 stay.

    References: Klambauer et al.: Self-normalizing neural networks, 2017.
    """
    if not train or not p:
        return x
    kept = _draws.keep(draw(), p, _features(x) if feature else x.shape, x.device)
    if p == 1:
        return torch.where(kept, x, 0.0)
    a = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p))
    return torch.where(kept, x, -ALPHA) * a + ALPHA * a * p


def feature_alpha_dropout(draw: Draw, x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return alpha_dropout(draw, x, p, train, feature=True)


def native_dropout(draw: Draw, x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or not p:
        return NotImplemented
    kept = _draws.keep(draw(), p, x.shape, x.device)
    return _draws.drop(x, kept, p), kept


def in_place(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def write(draw: Draw, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = f(draw, x, *args, **kwargs)
        return x if y is x else x.copy_(y)

    return write


def rrelu(
    draw: Draw,
    x: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    if not training:
        return NotImplemented
    slope = lower + (upper - lower) * _draws.uniform(draw(), x.shape, x.dtype, x.device)
    return torch.where(x <= 0, x * slope, x)


def attention(
    draw: Draw,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend by the definition in torch's documentation, with all weights [..., l, s] in memory."""
    if not dropout_p or (is_causal and attn_mask is not None):  # torch's own is faster; the latter it refuses
        return NotImplemented
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)  # [..., l, s]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = torch.where(attn_mask, scores, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        nowhere = (scores == -math.inf).all(-1, keepdim=True)  # such a query gets 0
        weights = torch.where(nowhere, 0.0, torch.softmax(torch.where(nowhere, 0.0, scores), -1))
    return _draws.dropout(draw(), weights, dropout_p) @ value
