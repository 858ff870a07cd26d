"""The results of a loss function, as (value, aux), and the mean of totals with unequal weights."""

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._arguments import function_name
from fzero._dtypes import sum_dtype
from fzero.axes import AxisName
from fzero.collectives import psum

__all__ = ["describe_result", "total_and_aux", "weighted_mean", "with_aux"]


_ADVICE = 'for (loss, aux) pass has_aux=True, and for (total, weight) pass reduce="weighted"'


def with_aux(f: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Make a function that returns `(loss, aux)`, checked, from one that returns `loss` or `(loss, aux)`."""

    def loss_and_aux(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        out = f(*args, **kwargs)
        loss, aux = _check_pair(f, out, "(loss, aux)") if has_aux else (out, None)
        return _zero_dimensional(f, loss, "loss"), aux

    return loss_and_aux


def total_and_aux(f: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Make a function that returns `(total, (weight, aux))`.

    The function `f` returns `(total, weight)`, or `((total, weight), aux)` with `has_aux`.
    """

    def total_and_weight(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        out = f(*args, **kwargs)
        pair, aux = _check_pair(f, out, "((total, weight), aux)") if has_aux else (out, None)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f'reduce="weighted": {function_name(f)} must return (total, weight), the sum of its losses and the '
                f"sum of their weights (for example its number of tokens), but it returned {describe_result(pair)}"
            )
        weight = pair[1] if isinstance(pair[1], torch.Tensor) else torch.tensor(pair[1], device="cpu")
        if weight.ndim:
            raise TypeError(f'reduce="weighted": the weight is {tree.show(weight)}, expected a 0-d tensor: sum it')
        return _zero_dimensional(f, pair[0], "total"), (weight.detach(), aux)

    return total_and_weight


def weighted_mean(total: torch.Tensor, aux: Any, grads: Any, axis: AxisName) -> tuple[torch.Tensor, Any, Any]:
    """Divide the summed totals and their gradients by the summed weights, which `total_and_aux` put into aux."""
    weights, aux = aux
    weight = psum(weights.to(sum_dtype(total.dtype)).sum(), axis)
    weight = torch.where(weight == 0, torch.ones_like(weight), weight)  # no tokens: the loss is 0
    return (total / weight).to(total.dtype), aux, tree.map(lambda g: (g / weight).to(g.dtype), grads)


def describe_result(out: Any) -> str:
    """Describe the result of a function, in a message: a tensor by its dtype and shape, any other by its type."""
    return tree.show(out) if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"


def _check_pair(f: Callable[..., Any], out: Any, expected: str) -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"has_aux=True: {function_name(f)} must return {expected}, but it returned {describe_result(out)}"
        )
    return out


def _zero_dimensional(f: Callable[..., Any], loss: Any, name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        advice = "reduce it with .mean()" if isinstance(loss, torch.Tensor) and loss.ndim else _ADVICE
        advice = "return the loss" if loss is None else advice
        raise TypeError(
            f"{function_name(f)} must return a 0-d floating-point {name}, but it returned {describe_result(loss)}; "
            f"{advice}"
        )
    return loss
