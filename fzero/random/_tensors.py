"""torch's functions that make or fill random tensors, by key.

Each takes `draw`, which gives the key of the next draw, and then the arguments of torch's function. It returns
NotImplemented to leave a call to torch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init

from fzero.random import _draws

__all__ = [
    "bernoulli",
    "bernoulli_",
    "exponential_",
    "init_kaiming_uniform",
    "init_normal",
    "init_uniform",
    "new",
    "new_like",
    "normal",
    "normal_",
    "randint",
    "randint_like",
    "randperm",
    "uniform_",
]

Draw = Callable[[], torch.Tensor]


# ---------------------------------------------------------------- new tensors


def _real(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _device(device: Any) -> Any:
    return torch.empty(()).device if device is None else device  # Dynamo cannot trace torch.get_default_device()


def _ready(x: torch.Tensor, requires_grad: bool = False, **_: Any) -> torch.Tensor:
    """Finish a new tensor; layout and pinned memory are left out."""
    return x.requires_grad_() if requires_grad else x


def _shape(size: tuple[Any, ...], options: dict[str, Any]) -> list[int]:
    size = size or (options.pop("size"),)
    return list(size[0] if len(size) == 1 and not isinstance(size[0], int | torch.SymInt) else size)


def new(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Make torch.rand or torch.randn of a distribution."""

    def make(draw: Draw, *size: Any, out: Any = None, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        if out is not None or _real(dtype) not in _draws.BITS:
            return NotImplemented
        return _ready(f(draw(), _shape(size, options), _real(dtype), _device(device)), **options)

    return make


def new_like(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def make(draw: Draw, x: torch.Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        dtype = dtype or x.dtype
        if dtype not in _draws.BITS:
            return NotImplemented
        return _ready(f(draw(), x.shape, dtype, device or x.device), **options)

    return make


def randint(draw: Draw, *args: Any, out: Any = None, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if out is not None:
        return NotImplemented
    size = options.pop("size") if "size" in options else args[-1]
    low, high = _bounds([x for x in args if isinstance(x, int)], options)
    x = _draws.randint(draw(), low, high, size, _device(device))
    return _ready(x.to(dtype or torch.int64), **options)


def _bounds(numbers: list[int], options: dict[str, Any]) -> tuple[int, int]:
    high = options.pop("high", None)
    high = numbers.pop() if high is None else high
    return (numbers[0] if numbers else options.pop("low", 0)), high


def randint_like(draw: Draw, x: torch.Tensor, *args: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if any(isinstance(a, torch.Tensor) for a in [*args, *options.values()]):
        return NotImplemented
    low, high = _bounds(list(args), options)
    return _ready(_draws.randint(draw(), low, high, x.shape, device or x.device).to(dtype or x.dtype), **options)


def randperm(draw: Draw, n: int, *, out: Any = None, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if out is not None:
        return NotImplemented
    x = _draws.permutation(draw(), n, _device(device))
    return _ready(x.to(dtype or torch.int64), **options)


def bernoulli(draw: Draw, x: torch.Tensor, p: Any = None, *, out: Any = None, **_: Any) -> Any:
    if out is not None:
        return NotImplemented
    return _draws.bernoulli(draw(), x if p is None else p, x.shape, x.device).to(x.dtype)


def normal(draw: Draw, mean: Any, std: Any = 1.0, size: Any = None, *, out: Any = None, **options: Any) -> Any:
    if out is not None:
        return NotImplemented
    given = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    if not given:
        return mean + std * new(_draws.normal)(draw, size, **options)
    shape = torch.broadcast_shapes(*[x.shape for x in given])
    return mean + std * _draws.normal(draw(), shape, given[0].dtype, given[0].device)


# ---------------------------------------------------------------- in place


def uniform_(draw: Draw, x: torch.Tensor, *args: float, **options: Any) -> torch.Tensor:
    low, high = *args, *[options.get("from", 0.0), options.get("to", 1.0)][len(args) :]
    return x.copy_(low + (high - low) * _draws.uniform(draw(), x.shape, x.dtype, x.device))


def normal_(draw: Draw, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return x.copy_(mean + std * _draws.normal(draw(), x.shape, x.dtype, x.device))


def exponential_(draw: Draw, x: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return x.copy_(_draws.exponential(draw(), x.shape, x.dtype, x.device) / lambd)


def bernoulli_(draw: Draw, x: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    return x.copy_(_draws.bernoulli(draw(), p, x.shape, x.device))


def init_uniform(draw: Draw, tensor: torch.Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> torch.Tensor:
    with torch.no_grad():
        return uniform_(draw, tensor, a, b)


def init_normal(draw: Draw, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    with torch.no_grad():
        return normal_(draw, tensor, mean, std)


def init_kaiming_uniform(
    draw: Draw,
    tensor: torch.Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    **_: Any,
) -> Any:
    """Fill a weight [out, in, ...]. References: He et al.: Delving deep into rectifiers, 2015."""
    if tensor.ndim < 2 or not tensor.numel():  # torch complains
        return NotImplemented
    fan = tensor.numel() // tensor.shape[0 if mode == "fan_in" else 1]
    bound = init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
    return init_uniform(draw, tensor, -bound, bound)
