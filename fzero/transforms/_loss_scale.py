"""Loss scaling: the loss is scaled and the gradients are unscaled, so that they lie in half precision's range."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_callable
from fzero._dtypes import at_least_float32
from fzero._torch import allow_in_graph
from fzero._tracebacks import api_boundary
from fzero.axes import call_with_loss_scale
from fzero.transforms._value_and_grad import value_and_grad

__all__ = ["scaled_value_and_grad"]


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose backward pass multiplies the gradient by `scale`. So the loss itself cannot overflow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return (grad * scale).to(grad.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        (scale,) = ctx.saved_tensors
        return (tangent * scale).to(tangent.dtype)


@allow_in_graph
def _scale_gradient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _ScaleGradient.apply(x, scale)  # pyright: ignore[reportReturnType]


@api_boundary
def scaled_value_and_grad(
    f: Callable[..., Any], scale: torch.Tensor | float, argnums: int | Sequence[int] = 0, **options: Any
) -> Callable[..., Any]:
    """Make a function like `fzero.value_and_grad`'s, with loss scaling in its backward pass (arXiv:1710.03740).

    The backward pass computes `scale` times the gradients, so that small gradients do not vanish in float16. The
    function returns the unscaled value and unscaled gradients, so later operations such as clipping need not know the
    scale. Gradients that overflowed are infinite or nan: `optim.dynamic_loss_scale` skips the step, and maintains
    the scale.

    Args:
        f: a loss function, as for `fzero.value_and_grad`; its loss is best in float32 (`logits.float()`).
        scale: a 0-d tensor, such as `optim.loss_scale(opt_state).scale`, or a number.
        argnums: the position, or positions, of the arguments to differentiate.
        **options: other options of `fzero.value_and_grad`.

    Returns:
        A function like `fzero.value_and_grad`'s; gradients are in float32 at least.

    Raises:
        TypeError: if `scale` is neither a number nor a tensor, for example an optimizer state that holds the scale.
        ValueError: if `scale` is not positive or not 0-d, or if `fzero.value_and_grad` raises it.

    Example:
        >>> f = lambda w: (w * 2**-20).half().sum().float()
        >>> scaled_value_and_grad(f, 1024.0)(torch.ones(1))
        (tensor(9.5367e-07), tensor([9.5367e-07]))
    """
    check_callable("f", f, "a loss function, as in fzero.scaled_value_and_grad(loss_fn, scale)(params, batch)")
    if not isinstance(scale, torch.Tensor | float | int):
        advice = "; pass its scale, opt_state.scale" if hasattr(scale, "scale") else ""
        raise TypeError(f"scale is a {type(scale).__name__}, expected a positive number, or a 0-d tensor{advice}")
    factor = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale, device="cpu")
    factor = factor.to(torch.float32)
    if factor.ndim or (not isinstance(scale, torch.Tensor) and not 0 < scale < math.inf):
        raise ValueError(f"scale={scale!r}: expected a positive number, or a 0-d tensor")
    scaled_value_and_grads = value_and_grad(_ScaledLoss(f, factor), argnums, **options)

    def unscale(*args: Any, **kwargs: Any) -> Any:
        value, grads = scaled_value_and_grads(*args, **kwargs)
        # derivatives of the value are unscaled too
        value = _change_loss(value, lambda x: _scale_gradient(x, 1 / factor))
        return value, tree.map(lambda g: at_least_float32(g) / factor, grads)

    return unscale


class _ScaledLoss:
    """A loss function whose gradients are scaled. In float16 `value_and_grad` looks for its `scales_gradients`."""

    scales_gradients = True

    def __init__(self, f: Callable[..., Any], scale: torch.Tensor) -> None:
        self.f = f
        self.scale = scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _change_loss(
            call_with_loss_scale(self.scale, self.f, *args, **kwargs), lambda x: _scale_gradient(x, self.scale)
        )


def _change_loss(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the loss, the first item in loss, (loss, aux), (total, weight) or ((total, weight), aux)."""
    if isinstance(out, tuple) and out:
        return (_change_loss(out[0], change), *out[1:])
    return change(out) if isinstance(out, torch.Tensor) and out.is_floating_point() else out
