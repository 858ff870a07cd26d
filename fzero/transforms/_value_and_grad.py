"""value_and_grad: the mean over ranks of a loss, and its gradient in the layout of the parameters."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from fzero import tree
from fzero._arguments import check_choice, check_int, function_name, is_int
from fzero._notice import trouble_link, warn_once
from fzero._torch import is_tracing, without_autocast_cache
from fzero._torch.levels import differentiates_now, is_differentiated
from fzero._torch.running_transforms import in_transform
from fzero._tracebacks import api_boundary
from fzero.axes import Axis, AxisName, bound_axes, in_lockstep, in_loss, in_mesh_order, join_axes, resolve_axes
from fzero.collectives import mark_invariant, psum
from fzero.graph import loop
from fzero.optim import Precision, mark_role
from fzero.sharding import is_box, unwrap_per_rank
from fzero.transforms._accumulate import MicroBatches, accumulate, find_micro_batches
from fzero.transforms._gradient_groups import Argument, PerRankGroup, open_argument
from fzero.transforms._loss import LossOfGroups
from fzero.transforms._loss_results import describe_result, total_and_aux, weighted_mean, with_aux
from fzero.transforms._stage_transforms import gather as gather_tree

__all__ = ["value_and_grad"]


def _check_function(f: Any, argnums: Any) -> None:
    """Check that `f` is a function, and that `argnums` are positions of arguments.

    Raises:
        TypeError: if not. The message shows the call.
    """
    call = "loss, grads = fzero.value_and_grad(loss_fn)(params, batch)"
    if isinstance(f, torch.nn.Module) or not callable(f):
        raise TypeError(f"f is {describe_result(f)}, and fzero.value_and_grad takes a function, the loss: {call}")
    if not is_int(argnums) and not (isinstance(argnums, tuple | list) and all(is_int(i) for i in argnums)):
        raise TypeError(
            f"argnums is {describe_result(argnums)}: expected the position of an argument, such as 0; the arguments "
            f"themselves go to the function that value_and_grad returns: {call}"
        )


_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def value_and_grad(
    f: Callable[_P, _R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduce: Literal["mean", "sum"] = "mean",
    axis: AxisName = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    gather: bool = True,
    precision: Precision | None = None,
    autograd: bool = False,
) -> Callable[_P, tuple[_R, Any]]: ...
@overload
def value_and_grad(
    f: Callable[_P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduce: Literal["weighted"],
    axis: AxisName = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    gather: bool = True,
    precision: Precision | None = None,
    autograd: bool = False,
) -> Callable[_P, tuple[Any, Any]]: ...
@api_boundary
def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduce: Literal["mean", "weighted", "sum"] = "mean",
    axis: AxisName = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    gather: bool = True,
    precision: Precision | None = None,
    autograd: bool = False,
) -> Callable[..., Any]:
    """Make a function that returns `f`'s value over all ranks and its gradient, in the layout of the arguments.

    Arguments that hold boxes are gathered for `f`, whether they are differentiated or not; their gradients are reduced
    into shards. One all_reduce per unit sums the gradients of replicated arguments. A value that differs by rank, such
    as a rank's part of the batch, is differentiated in a box: for `fzero.PerRank(x)`, `f` receives `x`. The gradient
    is a `PerRank` of this rank's gradient, which is not summed over ranks. Outside any mesh this is
    `torch.func.grad_and_value` with its results in JAX's order. Gradients are values: call the function as often as you
    like in a step, on any trees.

    Args:
        f: a pure function that returns a 0-d loss, or with `has_aux` a pair `(loss, aux)`.
        argnums: the position, or positions, of the arguments to differentiate: trees of floating-point tensors
            or boxes. A plain tensor must be equal on all ranks.
        has_aux: whether `f` also returns `aux`, a tree of tensors. It is returned as this rank computed it: make
            it replicated (`pmean`) before a step returns it.
        reduce: "mean" averages over ranks and micro-batches. With "weighted", `f` returns `(total, weight)` in place of
            the loss, each 0-d. They are the sum of its losses and the sum of their weights (a constant, such as its
            number of tokens). The value is the sum of all totals over the sum of all weights. It is right for unequal
            weights of ranks and micro-batches, and 0 if all weights are 0. "sum" is for losses that `f` normalises
            itself; a psum in `f` sums over the ranks' one micro-batch.
        axis: the axes that the mean is over; `None` for the axes of the running step.
        micro_batches: k. The batch arguments are split into k equal parts along dimension 0. The parts are
            differentiated one after the other, and gradients accumulate. Full gradients accumulate until the last
            micro-batch for boxes partitioned with `reduce_grads="once"` (stage 1) and for replicated trees (stage 0).
            For all other boxes, shards accumulate. `aux` gets a leading dimension [k] if k > 1.
        batch_argnums: the position, or positions, of the arguments to split. By default it is the only argument that
            holds tensors and no parameters, and is not differentiated or is `PerRank`.
        gather: whether `f` receives full leaves. If not, it receives the boxes, and gathers each box where it uses it,
            with `fzero.gather`. A function made by `fzero.remat` also gathers its boxes, frees the leaves, and gathers
            them again for the backward pass.
        precision: the dtypes in which gradients are summed over ranks and micro-batches, and returned; by default the
            parameters' dtypes. Every differentiated argument must hold parameters of the policy. The value is summed in
            float32 at least.
        autograd: whether torch.autograd differentiates `f`, in place of torch.func. Then `f` may apply an
            `autograd.Function` without `setup_context`, as some libraries' kernels do. It works in lockstep, on
            processes and unsharded, where no other transform is around the call.

    Returns:
        A function of `f`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`. `value` is a 0-d
        tensor, equal on all ranks. `grads` is like the argument at `argnums`; a tuple if `argnums` is a sequence.
        Leaves that are one tensor object (tied) get one gradient.

    Raises:
        ValueError: if `reduce`, `micro_batches` or `argnums` is out of range, `has_aux`, `gather` or `autograd` is no
            bool, or a batch does not divide by k. Also if the loss depends on no differentiated leaf in any
            micro-batch; where each rank runs its own Python, that is a notice. In a simulation, if a differentiated
            plain tensor differs by rank; the message names the argument and the leaf.
            Also if a psum over an axis outside the mean would count a gradient once for each rank; the message names
            the line.
        TypeError: if a differentiated leaf is not a floating-point tensor, or `f` does not return a 0-d tensor.
            With `precision`, if a parameter does not have the dtype that the policy keeps it in.
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
    _check_function(f, argnums)
    for name, value in (("has_aux", has_aux), ("gather", gather), ("autograd", autograd)):
        check_choice(name, value, (True, False))
    options = _GradOptions(
        argnums=argnums,
        reduce=reduce,
        axis=axis,
        micro_batches=micro_batches,
        batch_argnums=batch_argnums,
        gather=gather,
        precision=precision,
        autograd=autograd,
    )
    if precision is not None and precision.param is torch.float16 and not getattr(f, "scales_gradients", False):
        warn_once(
            "fzero.value_and_grad: gradients in float16 below 6e-8 vanish: scale the loss with "
            "fzero.scaled_value_and_grad(f, opt_state.scale, ...) and optim.dynamic_loss_scale(...), or use bfloat16"
        )
    loss_and_aux = total_and_aux(f, has_aux) if reduce == "weighted" else with_aux(f, has_aux)

    @api_boundary
    def value_and_grads(*args: Any, **kwargs: Any) -> Any:
        options.check_call(args)
        inputs = _open_boxes(args, kwargs, options)
        loss = _make_loss(loss_and_aux, function_name(f), inputs, options)
        with nullcontext() if torch.compiler.is_dynamo_compiling() else without_autocast_cache():
            value, aux, gradients = _sum_micro_batches(loss, in_float32=precision is not None, autograd=autograd)
        if not loss.is_reached and not inputs.is_invariant:  # a derivative of the gradient may be of anything
            _report_unreached(loss.name, {i: args[i] for i in options.nums}, inputs.axes)
        value, aux, trees = _reduce_over_ranks(value, aux, gradients, inputs, options)
        mark_role(trees, "gradients")
        return ((value, aux) if has_aux else value), (trees[0] if isinstance(argnums, int) else tuple(trees))

    return value_and_grads


@dataclass(frozen=True, kw_only=True, eq=False)  # as Spmd, for Dynamo of torch 2.11
class _GradOptions:
    """The options of `value_and_grad`.

    Raises:
        ValueError: if `reduce` or `micro_batches` is out of range, or a position is listed twice.
        TypeError: if `precision` is no policy.
    """

    argnums: int | Sequence[int]
    reduce: str
    axis: AxisName
    micro_batches: int
    batch_argnums: int | Sequence[int] | None
    gather: bool
    precision: Precision | None
    autograd: bool

    def __post_init__(self) -> None:
        if self.precision is not None and not isinstance(self.precision, Precision):
            raise TypeError(
                f"precision={self.precision!r}: expected a policy, as fzero.Precision(param=torch.bfloat16)"
            )
        check_choice("reduce", self.reduce, ("mean", "weighted", "sum"))
        check_int("micro_batches", self.micro_batches)
        if len(set(self.nums)) != len(self.nums):
            raise ValueError(f"argnums={self.nums}: a position is listed twice; list each once")

    @property
    def nums(self) -> tuple[int, ...]:
        """The positions of the differentiated arguments."""
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    def check_call(self, args: Sequence[Any]) -> None:
        """Check that a call has the differentiated arguments, and runs where the options work.

        Raises:
            ValueError: if not.
        """
        if self.autograd and in_transform():
            raise ValueError(
                "autograd=True works where no transform is around the call, such as fzero.jit or the vmap of simulated "
                'ranks: run the step uncompiled, on processes or with fzero.mesh(..., simulate="lockstep")'
            )
        if any(not 0 <= i < len(args) for i in self.nums):
            raise ValueError(
                f"argnums={self.argnums}: the function was called with {len(args)} positional arguments; pass the "
                "arguments that argnums names positionally, or name others"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _CallInputs:
    """The arguments of a call, out of their boxes.

    Attributes:
        arguments: the differentiated ones, by their positions.
        rest: the other positional arguments, with None at the positions of the differentiated ones.
        kwargs: the keyword arguments.
        axes: the axes that the mean is over.
        batch: how the arguments are split into micro-batches.
        is_invariant: whether a torch.func transform differentiates the gradient itself.
    """

    arguments: dict[int, Argument]
    rest: list[Any]
    kwargs: dict[str, Any]
    axes: Sequence[Axis]
    batch: MicroBatches
    is_invariant: bool


def _open_boxes(args: Sequence[Any], kwargs: dict[str, Any], options: _GradOptions) -> _CallInputs:
    """Take the arguments of a call out of their boxes. Those that are not differentiated are gathered with `gather`."""
    axes = in_mesh_order(resolve_axes(options.axis))
    batch = find_micro_batches(args, options.nums, options.batch_argnums, options.micro_batches)
    arguments = {
        i: open_argument(
            arg=args[i],
            axes=axes,
            name=f"argument {i}",
            micro_batches=options.micro_batches,
            gather=options.gather,
            precision=options.precision,
        )
        for i in options.nums
    }
    is_invariant = _is_differentiated_itself(arguments)
    if is_invariant:
        arguments = {i: x.as_invariant() for i, x in arguments.items()}
    kwargs, other_args = unwrap_per_rank((kwargs, [None if i in arguments else x for i, x in enumerate(args)]))
    if options.gather:
        kwargs, other_args = gather_tree(kwargs), [gather_tree(x) for x in other_args]
    return _CallInputs(
        arguments=arguments, rest=other_args, kwargs=kwargs, axes=axes, batch=batch, is_invariant=is_invariant
    )


def _make_loss(
    loss_and_aux: Callable[..., tuple[torch.Tensor, Any]], name: str, inputs: _CallInputs, options: _GradOptions
) -> LossOfGroups:
    """Make the loss of a call, a function of the variables that are differentiated."""
    return LossOfGroups(
        loss_and_aux=loss_and_aux,
        args=inputs.rest,
        kwargs=inputs.kwargs,
        arguments=inputs.arguments,
        batch=inputs.batch,
        # the loss is divided before the sums, since a sum could overflow in half precision
        divisor=options.micro_batches * math.prod([a.size for a in inputs.axes]) if options.reduce == "mean" else 1,
        is_fenced=options.gather and _runs_in_eager_order(inputs.axes),
        invariant_axes=_invariant_axes(inputs.axes, inputs.arguments),
        name=name,
        is_reached_by_call=[],
    )


def _reduce_over_ranks(
    value: torch.Tensor, aux: Any, gradients: list[torch.Tensor], inputs: _CallInputs, options: _GradOptions
) -> tuple[torch.Tensor, Any, list[Any]]:
    """Sum the value and the gradients over the ranks. The list of gradients is empty afterwards.

    Returns:
        The value, the aux, and a tree of gradients for each differentiated argument.
    """
    value = psum(value, options.axis)
    value = mark_invariant(value, join_axes(inputs.axes)) if inputs.is_invariant else value
    remaining = _pop_items(gradients)
    trees = [argument.reduce(remaining) for argument in inputs.arguments.values()]
    return weighted_mean(value, aux, trees, options.axis) if options.reduce == "weighted" else (value, aux, trees)


def _is_differentiated_itself(arguments: dict[int, Argument]) -> bool:
    """Return whether a torch.func transform differentiates this gradient, outside any other `value_and_grad`."""
    if in_loss() or torch.compiler.is_dynamo_compiling():
        return False
    return any(
        is_differentiated(x) for argument in arguments.values() for group in argument.groups for x in group.variables
    )


def _sum_micro_batches(
    loss: LossOfGroups, in_float32: bool, autograd: bool
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Return the value, the aux and the variables' gradients, summed over the micro-batches; aux is stacked."""
    groups = [group for argument in loss.arguments.values() for group in argument.groups]
    variables = [x for group in groups for x in group.variables]
    dtypes = [d for group in groups for d in group.dtypes]
    is_looped = _is_a_loop(loss.batch, list(loss.arguments)) and all(
        torch.promote_types(x.dtype, d) == d for x, d in zip(variables, dtypes, strict=True)
    )
    return accumulate(
        loss_of=loss,
        variables=variables,
        dtypes=dtypes,
        micro_batches=loss.batch.count,
        is_looped=is_looped,
        in_float32=in_float32,
        autograd=autograd,
    )


def _report_unreached(name: str, arguments: dict[int, Any], axes: Sequence[Axis]) -> None:
    """Refuse a loss that depends on none of the leaves that are differentiated.

    It is only a notice where each rank runs its own Python: a rank without examples may return a constant loss there.

    Raises:
        ValueError: if all ranks run this call. The message names the leaves.
    """
    texts = []
    for i, argument in arguments.items():
        paths, entries, _ = tree.flatten_with_paths(argument, is_box)
        unreached_paths = [repr(path) for path, x in zip(paths, entries, strict=True) if path and x is not None]
        listed_paths = (
            [*unreached_paths[:3], f"and {len(unreached_paths) - 3} more"]
            if len(unreached_paths) > 4
            else unreached_paths
        )
        texts.append(f"argument {i}" + (f" ({', '.join(listed_paths)})" if unreached_paths else ""))
    text = (
        f"fzero.value_and_grad: the loss of {name} depends on no leaf of {' or '.join(texts)}, so its gradients are "
        "zero: let it read the parameters in its arguments, as apply(params, buffers, x) does, not a module's own or "
        f"detached ones. If zero is meant, add 0 * leaf.sum(){trouble_link('a-loss-that-trains-nothing')}"
    )
    if any(a.size > 1 and (a.group or in_lockstep()) for a in axes) and not is_tracing():
        warn_once(text)
    else:
        raise ValueError(text)


def _pop_items(values: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the items of a list in order, and take each out of the list, so that its reader frees it."""
    values.reverse()
    while values:
        yield values.pop()


def _is_a_loop(batch: MicroBatches, nums: Sequence[int]) -> bool:
    """Return whether a trace may record one micro-batch as the body of a loop over all micro-batches.

    It may not if the gradient itself is differentiated, for example inside another loss. It may not if the batch is
    differentiated: each micro-batch then computes another part of the batch's gradient.
    """
    can_loop = batch.count > 2 and loop.records_loops() and not set(nums) & set(batch.argnums)
    return can_loop and not differentiates_now()


def _invariant_axes(axes: Sequence[Axis], arguments: dict[int, Argument]) -> tuple[str, ...]:
    """List the axes along which a loss is one value: axes outside the mean, whose ranks hold parts of one model.

    If every differentiated value is in a `PerRank` that differs along an axis, the loss differs along it too.
    """
    groups = [group for argument in arguments.values() for group in argument.groups if group.variables]
    rest = [a.name for a in bound_axes() if a.size > 1 and a.name not in [b.name for b in axes]]
    return tuple(
        [a for a in rest if not all(isinstance(group, PerRankGroup) and a in group.varies for group in groups)]
    )


def _runs_in_eager_order(axes: Sequence[Axis]) -> bool:
    """Return whether autograd decides the order of this rank's collectives, and other ranks wait for them."""
    return any(a.group for a in axes) and not is_tracing()
