"""value_and_grad: the mean over ranks of a loss, and its gradient in the layout of the parameters."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero._notice import notice
from fzero._torch import is_tracing
from fzero.axes.axis import AxisName
from fzero.axes.scope import resolve
from fzero.collectives.sums import psum
from fzero.precision import Precision
from fzero.transforms._gather import gather as gathered
from fzero.transforms.gradients._accumulate import accumulate, micro_batches_of
from fzero.transforms.gradients._fence import fence
from fzero.transforms.gradients._opened import Opened, open_argument
from fzero.transforms.gradients._returned import loss_and_aux_of, total_and_aux, weighted_mean

__all__ = ["value_and_grad"]


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduce: str = "mean",
    axis: AxisName = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    gather: bool = True,
    precision: Precision | None = None,
) -> Callable[..., Any]:
    """Make a function that returns `f`'s value over all ranks and its gradient, in the layout of the arguments.

    Arguments that hold boxes are gathered for `f`, whether differentiated or not; their gradients are reduced into
    shards. Replicated arguments' gradients are all_reduced, one collective a unit. Outside any mesh this is
    `torch.func.grad_and_value` with its results in JAX's order. Gradients are values: call it as often as you
    like in a step, on any trees.

    Args:
        f: a pure function that returns a 0-d loss, or with `has_aux` a pair `(loss, aux)`.
        argnums: the position, or positions, of the arguments to differentiate: trees of floating-point tensors
            or boxes.
        has_aux: whether `f` also returns `aux`, a tree of tensors. It is handed out as this rank computed it: make
            it replicated (`pmean`) before a step returns it.
        reduce: "mean" over ranks and micro-batches; "weighted": `f` returns `(total, weight)` in place of the loss, the
            sum of its losses and of their weights (its number of tokens, a constant), 0-d, and the result is the sum
            of all totals over the sum of all weights, exact if ranks and micro-batches have unequal weights, 0 if they
            have none; or "sum" for losses that `f` normalises itself (by what it knows before: a psum in `f` is over
            the ranks' one micro-batch).
        axis: the axes that the mean is over; `None` for the axes of the running step.
        micro_batches: k. The batch arguments are cut in k equal parts along dimension 0, one after the other is
            differentiated, and gradients accumulate: in full until the last for boxes cut with `reduce="once"`
            (stage 1) and for replicated trees (stage 0), in shards for others. `aux` gets a leading dimension [k]
            when k > 1.
        batch_argnums: the position, or positions, of the arguments to cut; by default the only one that is not
            differentiated and holds plain tensors.
        gather: whether `f` is handed whole leaves. If not it is handed boxes as they are, and gathers each where it
            uses it, with `fzero.gather` or in a function made by `fzero.remat`, which lets it go and gathers it again
            for the backward pass.
        precision: the dtypes that gradients are summed in over ranks and micro-batches and are returned in; by default
            the parameters' own. All that is differentiated must be parameters of the policy. The value is summed in
            float32 at least.

    Returns:
        A function of `f`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`: `value` is a 0-d
        tensor, equal on all ranks; `grads` is like the argument at `argnums`, a tuple if `argnums` is a sequence.
        Leaves that are one tensor object (tied) get one gradient.

    Raises:
        ValueError: if `reduce`, `micro_batches` or `argnums` is out of range, or a batch does not divide by k.
        TypeError: if a differentiated leaf is not a floating-point tensor, or `f` does not return a 0-d tensor.
            With `precision`, if a parameter has not the dtype that the policy keeps it in.
        RuntimeError: if `f` writes into its parameters in place.

    Example:
        >>> import fzero, torch
        >>> f = lambda w, x: (w * x).mean()
        >>> w, x = torch.tensor(3.0), torch.tensor([1.0, 2.0, 3.0, 6.0])
        >>> fzero.value_and_grad(f)(w, x)
        (tensor(9.), tensor(3.))
        >>> mesh = fzero.mesh(dp=2)
        >>> mesh.spmd(fzero.value_and_grad(f))(w, mesh.split(x))
        (tensor(9.), tensor(3.))
    """
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    _check_options(reduce, micro_batches, nums, precision)
    if precision is not None and precision.param is torch.float16 and not getattr(f, "scales_gradients", False):
        notice(
            "fzero.value_and_grad: gradients in float16 below 6e-8 vanish: scale the loss, loss, grads = "
            "fzero.scaled_value_and_grad(f, opt_state.scale, ...), opt = optim.dynamic_loss_scale(...); or use bfloat16"
        )
    loss_and_aux = total_and_aux(f, has_aux) if reduce == "weighted" else loss_and_aux_of(f, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if any(not 0 <= i < len(args) for i in nums):
            raise ValueError(f"argnums={argnums}: the function was called with {len(args)} positional arguments")
        axes = resolve(axis)
        # divided before the sums, which could overflow in half precision
        parts = micro_batches * math.prod([a.size for a in axes]) if reduce == "mean" else 1
        opened = {i: open_argument(args[i], axes, f"argument {i}", micro_batches, precision) for i in nums}
        fixed = [None if i in opened else gathered(x) if gather else x for i, x in enumerate(args)]
        kwargs = gathered(kwargs) if gather else kwargs
        batches = micro_batches_of(args, fixed, nums, batch_argnums, micro_batches)
        fenced = any(a.group for a in axes) and not is_tracing()
        loss_of = _of_variables(functools.partial(loss_and_aux, **kwargs), opened, parts, gather, fenced)
        variables, dtypes = [o.variables for o in opened.values()], [o.dtypes for o in opened.values()]
        values, aux, grads = accumulate(loss_of, variables, batches, dtypes)
        if precision is not None:
            values = [v.to(torch.promote_types(v.dtype, torch.float32)) for v in values]
        value = psum(functools.reduce(operator.add, values), axis)
        trees = [o.finish(g) for o, g in zip(opened.values(), grads, strict=True)]
        if reduce == "weighted":
            value, aux, trees = weighted_mean(value, aux, trees, axis)
        return ((value, aux) if has_aux else value), (trees[0] if isinstance(argnums, int) else tuple(trees))

    return differentiated


def _check_options(reduce: str, micro_batches: int, nums: Sequence[int], precision: Precision | None) -> None:
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: expected a policy, such as fzero.Precision(param=torch.bfloat16)")
    if reduce not in ("mean", "weighted", "sum"):
        raise ValueError(f'reduce={reduce!r}: expected "mean", "weighted" or "sum"')
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: expected an int, at least 1")
    if len(set(nums)) != len(nums):
        raise ValueError(f"argnums={nums}: a position stands twice")


def _of_variables(
    loss_and_aux: Callable[..., tuple[torch.Tensor, Any]],
    opened: dict[int, Opened],
    parts: int,
    gather: bool,
    fenced: bool,
) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Make the loss a function of what varies: the pieces of the arguments at these positions."""

    def loss_of(batch: list[Any], variables: list[list[list[torch.Tensor]]]) -> tuple[torch.Tensor, Any]:
        full, anchor, handed = list(batch), torch.zeros(0), []
        for (i, arg), pieces in zip(opened.items(), variables, strict=True):
            wholes = [p.whole(xs) if gather else xs for p, xs in zip(arg.pieces, pieces, strict=True)]
            if fenced and gather:
                for j, leaves in enumerate(wholes):
                    wholes[j], anchor = fence(leaves, anchor)
            full[i] = arg.rebuild(wholes, gather)
            handed += [] if is_tracing() else wholes
        versions = [x._version for leaves in handed for x in leaves]
        loss, aux = loss_and_aux(*full)
        if versions != [x._version for leaves in handed for x in leaves]:
            raise RuntimeError("f wrote into its parameters in place: return new values instead")
        loss = loss if parts == 1 else loss / parts
        return (fence([loss], anchor)[0][0] if fenced else loss), aux

    return loss_of
