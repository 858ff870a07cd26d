"""What a loss function returns, as (value, aux); and the mean of totals that have unequal weights."""

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero.axes.axis import AxisName
from fzero.collectives.sums import psum

__all__ = ["loss_and_aux_of", "total_and_aux", "weighted_mean"]


ADVICE = 'for (loss, aux) say has_aux=True, and for (total, weight) reduce="weighted"'


def loss_and_aux_of(f: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Turn a function that returns `loss`, or `(loss, aux)`, into one that returns `(loss, aux)`, checked."""

    def loss_and_aux(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        loss, aux = _pair(f(*args, **kwargs), "(loss, aux)") if has_aux else (f(*args, **kwargs), None)
        return _zero_dimensional(loss, "loss"), aux

    return loss_and_aux


def total_and_aux(f: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Turn a function of `(total, weight)`, or `((total, weight), aux)`, into one of `(total, (weight, aux))`."""

    def total_and_weight(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        out = f(*args, **kwargs)
        pair, aux = _pair(out, "((total, weight), aux)") if has_aux else (out, None)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                'reduce="weighted": f must return (total, weight), the sum of its losses and of their weights, such as '
                f"the number of tokens; it returned {type(pair).__name__}"
            )
        weight = torch.as_tensor(pair[1])
        if weight.ndim:
            raise TypeError(f'reduce="weighted": the weight is {tree.show(weight)}, expected a 0-d tensor: its sum')
        return _zero_dimensional(pair[0], "total"), (weight.detach(), aux)

    return total_and_weight


def weighted_mean(total: torch.Tensor, aux: Any, grads: Any, axis: AxisName) -> tuple[torch.Tensor, Any, Any]:
    """Divide the sum of totals and its gradients by the sum of the weights, which `total_and_aux` put into aux."""
    weights, aux = aux
    weight = psum(weights.to(torch.promote_types(total.dtype, torch.float32)).sum(), axis)
    weight = torch.where(weight == 0, torch.ones_like(weight), weight)  # no token at all: a loss of 0
    return (total / weight).to(total.dtype), aux, tree.map(lambda g: (g / weight).to(g.dtype), grads)


def _pair(out: Any, expected: str) -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"has_aux=True: f must return {expected}, and returned {type(out).__name__}")
    return out


def _zero_dimensional(loss: Any, name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        given = tree.show(loss) if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        advice = "reduce it with .mean()" if isinstance(loss, torch.Tensor) else ADVICE
        raise TypeError(f"f must return a 0-d floating-point {name}, and returned {given}; {advice}")
    return loss
