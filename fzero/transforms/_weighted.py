"""A weighted mean over ranks and micro-batches that hold unequal weights: sums first, one division at the end."""

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero.collectives import psum
from fzero.world import AxisName

__all__ = ["total_and_aux", "weighted"]


def total_and_aux(f: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Turn a function that returns `(total, weight)`, or `((total, weight), aux)`, into one of `total` with aux."""

    def split(*args: Any, **kwargs: Any) -> Any:
        out = f(*args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"has_aux=True: f must return ((total, weight), aux), and returned {type(out).__name__}")
        pair, aux = out if has_aux else (out, None)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                'reduce="weighted": f must return (total, weight), the sum of its losses and of their weights, such as '
                f"the number of tokens; it returned {type(pair).__name__}"
            )
        weight = torch.as_tensor(pair[1])
        if weight.ndim:
            raise TypeError(f'reduce="weighted": the weight is {tree.show(weight)}, expected a 0-d tensor: its sum')
        return pair[0], (weight.detach(), aux)

    split.__dict__.update(scales_gradients=getattr(f, "scales_gradients", False))
    return split


def weighted(differentiated: Callable[..., Any], has_aux: bool, axis: AxisName) -> Callable[..., Any]:
    """Divide what a function of summed totals returns by the summed weights."""

    def mean(*args: Any, **kwargs: Any) -> Any:
        (total, (weights, aux)), grads = differentiated(*args, **kwargs)
        weight = psum(weights.to(torch.promote_types(total.dtype, torch.float32)).sum(), axis)
        weight = torch.where(weight == 0, torch.ones_like(weight), weight)  # no token at all: a loss of 0
        value, grads = (total / weight).to(total.dtype), tree.map(lambda g: (g / weight).to(g.dtype), grads)
        return ((value, aux) if has_aux else value), grads

    return mean
