"""The short convolutions of models of transformers, such as LFM2's: they read the tokens of neighbouring parts.

Such a module calls `causal_conv1d_fn`, a function of its file. A copy of the module gets a forward that calls another.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from fzero.parallel.context._halo import causal_conv1d

__all__ = ["replace_convolutions", "short_convolutions", "split_convolution"]

_CALLED = "causal_conv1d_fn"
_MISSING: Any = object()

_Convolution = Callable[..., torch.Tensor]


def short_convolutions(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Iterate over the modules that only convolve, by a function of their file, and their paths."""
    for path, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)  # transformers' decorator calls the hooks of accelerate
        # others convolve too, and scan the tokens afterwards
        is_short = "shortconv" in type(module).__name__.lower() and isinstance(forward, FunctionType)
        if is_short and _CALLED in forward.__code__.co_names:
            yield path, module


def replace_convolutions(model_copy: torch.nn.Module, convolution: _Convolution) -> None:
    """Make the short convolutions of a model's copy call another function."""
    for _, module in short_convolutions(model_copy):
        forward = inspect.unwrap(type(module).forward)
        names = {**forward.__globals__, _CALLED: convolution}
        new_forward = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        new_forward.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(new_forward, module)


def split_convolution(name: str, axis: str) -> _Convolution:
    """Return the convolution of tokens that are split over an axis, as transformers' files call it.

    Args:
        name: the name of the model's class, for messages.
        axis: the axis along which tokens are split.
    """
    return partial(_convolve, name, axis)


def _convolve(
    name: str,
    axis: str,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    documents: torch.Tensor | None = _MISSING,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve `[b, channels, t]` by weights `[channels, width]`, within documents."""
    if activation is not None:
        raise ValueError(f"{name} convolves with activation={activation!r}, which convolutions of split sequences lack")
    if documents is _MISSING:
        raise ValueError(
            f"{name} does not hand keyword arguments on to its convolutions, so documents do not reach them"
        )
    y = causal_conv1d(hidden_states.to(weight.dtype), weight, bias, documents=documents, axis=axis)
    return y.to(hidden_states.dtype)
