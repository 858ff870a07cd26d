"""torch's random functions with draws by key: new and filled tensors, dropouts, attention with dropout."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import init

from fzero.random import _draws

__all__ = [
    "alpha_dropout",
    "attention",
    "bernoulli",
    "bernoulli_",
    "dropout",
    "exponential_",
    "feature_alpha_dropout",
    "feature_dropout",
    "in_place",
    "init_kaiming_uniform",
    "init_normal",
    "init_uniform",
    "like_factory",
    "native_dropout",
    "normal",
    "normal_",
    "randint",
    "randint_like",
    "randperm",
    "rrelu",
    "sized_factory",
    "uniform_",
]

# Each function takes `draw`, which returns the key of the next draw, and then the arguments of torch's function. It
# returns NotImplemented to leave a call to torch.
_Draw = Callable[[], torch.Tensor]


def _dtype_or_default(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _device_or_default(device: Any) -> Any:
    return torch.empty(()).device if device is None else device  # Dynamo cannot trace torch.get_default_device()


def _set_requires_grad(x: torch.Tensor, requires_grad: bool = False, **_: Any) -> torch.Tensor:
    """Set requires_grad of a new tensor; layout and pinned memory are ignored."""
    return x.requires_grad_() if requires_grad else x


def _size_list(size: tuple[Any, ...]) -> list[int]:
    return list(size[0] if len(size) == 1 and not isinstance(size[0], int | torch.SymInt) else size)


def sized_factory(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return the counterpart of torch.rand or torch.randn for a distribution."""

    def make(draw: _Draw, *size: Any, out: Any = None, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        has_size = bool(size) or "size" in options  # torch names the mistake of a call without
        if out is not None or not has_size or _dtype_or_default(dtype) not in _draws.BITS:
            return NotImplemented
        x = f(draw(), _size_list(size or (options["size"],)), _dtype_or_default(dtype), _device_or_default(device))
        return _set_requires_grad(x, **options)

    return make


def like_factory(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def make(draw: _Draw, x: torch.Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        dtype = dtype or x.dtype
        if dtype not in _draws.BITS:
            return NotImplemented
        return _set_requires_grad(f(draw(), x.shape, dtype, device or x.device), **options)

    return make


def randint(draw: _Draw, *args: Any, out: Any = None, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if out is not None:
        return NotImplemented
    low, high = _integer_bounds([x for x in args if isinstance(x, int)], **options)
    size = options["size"] if "size" in options else args[-1]
    x = _draws.randint(draw(), low, high, size, _device_or_default(device))
    return _set_requires_grad(x.to(dtype or torch.int64), **options)


def _integer_bounds(numbers: Sequence[int], low: int = 0, high: int | None = None, **_: Any) -> tuple[int, int]:
    """Return the bounds of integers: of the arguments by position, and those by name."""
    *lows, high = numbers if high is None else (*numbers, high)
    return lows[0] if lows else low, high


def randint_like(
    draw: _Draw, x: torch.Tensor, *args: Any, dtype: Any = None, device: Any = None, **options: Any
) -> Any:
    if any(isinstance(a, torch.Tensor) for a in [*args, *options.values()]):
        return NotImplemented
    low, high = _integer_bounds(args, **options)
    return _set_requires_grad(
        _draws.randint(draw(), low, high, x.shape, device or x.device).to(dtype or x.dtype), **options
    )


def randperm(draw: _Draw, n: int, *, out: Any = None, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if out is not None:
        return NotImplemented
    x = _draws.permutation(draw(), n, _device_or_default(device))
    return _set_requires_grad(x.to(dtype or torch.int64), **options)


def bernoulli(draw: _Draw, x: torch.Tensor, p: Any = None, *, out: Any = None, **_: Any) -> Any:
    if out is not None:
        return NotImplemented
    return _draws.bernoulli(draw(), x if p is None else p, x.shape, x.device).to(x.dtype)


def normal(draw: _Draw, mean: Any, std: Any = 1.0, size: Any = None, *, out: Any = None, **options: Any) -> Any:
    if out is not None:
        return NotImplemented
    tensors = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    if not tensors:
        return mean + std * sized_factory(_draws.normal)(draw, size, **options)
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    return mean + std * _draws.normal(draw(), shape, tensors[0].dtype, tensors[0].device)


def uniform_(draw: _Draw, x: torch.Tensor, *args: float, **options: Any) -> torch.Tensor:
    low, high = *args, *[options.get("from", 0.0), options.get("to", 1.0)][len(args) :]
    return x.copy_(low + (high - low) * _draws.uniform(draw(), x.shape, x.dtype, x.device))


def normal_(draw: _Draw, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return x.copy_(mean + std * _draws.normal(draw(), x.shape, x.dtype, x.device))


def exponential_(draw: _Draw, x: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return x.copy_(_draws.exponential(draw(), x.shape, x.dtype, x.device) / lambd)


def bernoulli_(draw: _Draw, x: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    return x.copy_(_draws.bernoulli(draw(), p, x.shape, x.device))


def init_uniform(draw: _Draw, tensor: torch.Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> torch.Tensor:
    with torch.no_grad():
        return uniform_(draw, tensor, a, b)


def init_normal(draw: _Draw, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    with torch.no_grad():
        return normal_(draw, tensor, mean, std)


def init_kaiming_uniform(
    draw: _Draw,
    tensor: torch.Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    **_: Any,
) -> Any:
    """Fill a weight [out, in, ...]. References: He et al.: Delving deep into rectifiers, 2015."""
    if tensor.ndim < 2 or not tensor.numel():  # torch's own function warns or raises
        return NotImplemented
    fan = tensor.numel() // tensor.shape[0 if mode == "fan_in" else 1]
    bound = init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
    return init_uniform(draw, tensor, -bound, bound)


def dropout(draw: _Draw, x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return _draws.dropout(draw(), x, p) if train and p else x


def feature_dropout(draw: _Draw, x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    """Drop whole features: for x [n, c, ...], each [...] as one."""
    if not train or not p:
        return x
    return _draws.apply_mask(x, _draws.keep_mask(draw(), p, _feature_sizes(x), x.device), p)


def _feature_sizes(x: torch.Tensor) -> list[int]:
    return [*x.shape[:2], *[1] * (x.ndim - 2)]


_ALPHA = 1.7580993408473766  # SELU's scale * alpha, the bound of its negative values


def alpha_dropout(draw: _Draw, x: torch.Tensor, p: float, train: bool = True, feature: bool = False) -> torch.Tensor:
    """Set dropped elements to SELU's lowest value; scale and shift so that mean 0 and variance 1 are preserved.

    References: Klambauer et al.: Self-normalizing neural networks, 2017.
    """
    if not train or not p:
        return x
    mask = _draws.keep_mask(draw(), p, _feature_sizes(x) if feature else x.shape, x.device)
    if p == 1:
        return torch.where(mask, x, 0.0)
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return torch.where(mask, x, -_ALPHA) * a + _ALPHA * a * p


def feature_alpha_dropout(draw: _Draw, x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return alpha_dropout(draw, x, p, train, feature=True)


def native_dropout(draw: _Draw, x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or not p:
        return NotImplemented
    mask = _draws.keep_mask(draw(), p, x.shape, x.device)
    return _draws.apply_mask(x, mask, p), mask


def in_place(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def write(draw: _Draw, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = f(draw, x, *args, **kwargs)
        return x if y is x else x.copy_(y)

    return write


def rrelu(
    draw: _Draw,
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
    draw: _Draw,
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
    if not dropout_p or (is_causal and attn_mask is not None):  # torch's own is faster, or raises
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
        nowhere = (scores == -math.inf).all(-1, keepdim=True)  # these queries attend to no key and get 0
        weights = torch.where(nowhere, 0.0, torch.softmax(torch.where(nowhere, 0.0, scores), -1))
    return _draws.dropout(draw(), weights, dropout_p) @ value
