"""value_and_grad: the mean over ranks of a loss, and its gradient in the layout of the parameters."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from fzero import tree
from fzero._notice import notice
from fzero._torch import is_tracing, raise_priority
from fzero._torch.levels import differentiates_now, is_differentiated, written
from fzero._tracebacks import api_boundary
from fzero.axes import Axis, AxisName, OneLoss, as_one_loss, bound, in_loss, joint, resolve
from fzero.collectives import check_copies, one_of_copies, psum
from fzero.graph import loop
from fzero.optim import Precision
from fzero.sharding import own_values
from fzero.transforms._gather import gather as gathered
from fzero.transforms.gradients._accumulate import MicroBatches, accumulate, micro_batches_of
from fzero.transforms.gradients._primals import Argument, OwnPrimal, as_one_value, open_argument

__all__ = ["fence", "loss_and_aux_of", "total_and_aux", "value_and_grad", "weighted_mean"]

# A fence between units: gradients are reduced in one order on all ranks, each unit exactly once.
#
# Eager autograd never runs the reduce_scatter of a unit that the loss did not use, and runs the others in the order
# in which the loss happened to use them. Ranks whose data take different branches (an expert that only one of them
# chose) would then meet in different collectives: a hang, or gradients of the wrong unit. Fences chain the units, in
# the backward pass from the last of the tree to the first, so list parameters in the order of their use.


class _Fence(torch.autograd.Function):
    """The identity on leaves; its backward waits for the fence after it, even if no leaf was used."""

    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: torch.Tensor, *leaves: torch.Tensor) -> Any:
        return (anchor.new_zeros(0), *[x.view_as(x) for x in leaves])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents


def fence(leaves: Sequence[torch.Tensor], anchor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Pass a unit's leaves on, ordered after the fence that made `anchor` (an empty tensor), and give the next."""
    following, *out = _Fence.apply(anchor, *leaves)  # pyright: ignore[reportGeneralTypeIssues]
    # below a gather's own priority: the reduce_scatter after this fence runs before the next fence opens
    raise_priority(following, by=0)
    return tuple(out), following


# What a loss function returns, as (value, aux); and the mean of totals that have unequal weights.


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


P = ParamSpec("P")
R = TypeVar("R")


@overload
def value_and_grad(
    f: Callable[P, R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduce: Literal["mean", "sum"] = "mean",
    axis: AxisName = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    gather: bool = True,
    precision: Precision | None = None,
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    f: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduce: Literal["weighted"],
    axis: AxisName = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    gather: bool = True,
    precision: Precision | None = None,
) -> Callable[P, tuple[Any, Any]]: ...
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
) -> Callable[..., Any]:
    """Make a function that returns `f`'s value over all ranks and its gradient, in the layout of the arguments.

    Arguments that hold boxes are gathered for `f`, whether differentiated or not; their gradients are reduced into
    shards. Replicated arguments' gradients are all_reduced, one collective a unit. A value that is this rank's own,
    such as its part of the batch, is differentiated in a box. `f` is handed `x` for `fzero.PerRank(x)`, whose gradient
    is a `PerRank` of the rank's own gradient, added to no other rank's. Outside any mesh this is
    `torch.func.grad_and_value` with its results in JAX's order. Gradients are values: call it as often as you like in a
    step, on any trees. A notice says so if a loss depends on nothing that is differentiated.

    Args:
        f: a pure function that returns a 0-d loss, or with `has_aux` a pair `(loss, aux)`.
        argnums: the position, or positions, of the arguments to differentiate: trees of floating-point tensors
            or boxes. A plain tensor must be equal on all ranks.
        has_aux: whether `f` also returns `aux`, a tree of tensors. It is handed out as this rank computed it: make
            it replicated (`pmean`) before a step returns it.
        reduce: "mean" over ranks and micro-batches. "weighted": `f` returns `(total, weight)` in place of the loss: the
            sum of its losses and that of their weights (its number of tokens, a constant), each 0-d. The result is the
            sum of all totals over the sum of all weights, also if ranks and micro-batches have unequal weights; 0 if
            they have none. "sum" for losses that `f` normalises itself; a psum in `f` is over the ranks' one
            micro-batch.
        axis: the axes that the mean is over; `None` for the axes of the running step.
        micro_batches: k. The batch arguments are cut in k equal parts along dimension 0. One after the other is
            differentiated, and gradients accumulate. They accumulate in full until the last for boxes cut with
            `reduce="once"` (stage 1) and for replicated trees (stage 0), and in shards for others. `aux` gets a leading
            dimension [k] when k > 1.
        batch_argnums: the position, or positions, of the arguments to cut; by default the only one that holds
            tensors and no parameters: one that is not differentiated, or is `PerRank`.
        gather: whether `f` is handed whole leaves. If not it is handed boxes as they are, and gathers each where it
            uses it, with `fzero.gather`. A function made by `fzero.remat` gathers it too, lets it go, and gathers it
            again for the backward pass.
        precision: the dtypes that gradients are summed in over ranks and micro-batches and are returned in; by default
            the parameters' own. All that is differentiated must be parameters of the policy. The value is summed in
            float32 at least.

    Returns:
        A function of `f`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`. `value` is a 0-d
        tensor, equal on all ranks. `grads` is like the argument at `argnums`; a tuple if `argnums` is a sequence.
        Leaves that are one tensor object (tied) get one gradient.

    Raises:
        ValueError: if `reduce`, `micro_batches` or `argnums` is out of range, or a batch does not divide by k. In a
            simulation, if a plain tensor that is differentiated differs by rank. Names the argument and the path. Also
            if a psum over an axis that is none of the mean's would count a gradient once for each rank. Names the line.
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
        batch = micro_batches_of(args, nums, batch_argnums, micro_batches)
        opened = {i: open_argument(args[i], axes, f"argument {i}", micro_batches, gather, precision) for i in nums}
        one_value = _is_differentiated_itself(opened)
        if one_value:
            opened = {i: replace(x, primals=[as_one_value(p) for p in x.primals]) for i, x in opened.items()}
        kwargs, rest = own_values((kwargs, [None if i in opened else x for i, x in enumerate(args)]))
        if gather:
            kwargs, rest = gathered(kwargs), [gathered(x) for x in rest]
        # divided before the sums, which could overflow in half precision
        parts = micro_batches * math.prod([a.size for a in axes]) if reduce == "mean" else 1
        fenced = gather and _runs_in_eager_order(axes)
        one = _one_value_along(axes, opened)
        loss = _Loss(loss_and_aux, rest, kwargs, opened, batch, parts, fenced, one, getattr(f, "__name__", "f"))
        primals = [p for argument in opened.values() for p in argument.primals]
        variables, dtypes = [x for p in primals for x in p.variables], [d for p in primals for d in p.dtypes]

        looped = _is_a_loop(batch, nums) and all(
            torch.promote_types(x.dtype, d) == d for x, d in zip(variables, dtypes, strict=True)
        )
        value, aux, gradients = accumulate(loss, variables, dtypes, micro_batches, looped, precision is not None)
        value = psum(value, axis)
        value = one_of_copies(value, joint(axes)) if one_value else value
        trees = [argument.closed(gradients) for argument in opened.values()]
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


def _is_differentiated_itself(opened: dict[int, Argument]) -> bool:
    """Return whether a transform of torch.func is around this gradient, and no other `value_and_grad`."""
    if in_loss() or torch.compiler.is_dynamo_compiling():
        return False
    return any(is_differentiated(x) for argument in opened.values() for p in argument.primals for x in p.variables)


def _is_a_loop(batch: MicroBatches, nums: Sequence[int]) -> bool:
    """Return whether a trace may record one micro-batch for all, as the body of a loop.

    Not where a derivative is taken around it, as in another loss. Nor where a batch is differentiated, each part of
    whose gradient is another micro-batch's.
    """
    apart = batch.count > 2 and loop.are_recorded() and not set(nums) & set(batch.argnums)
    return apart and not differentiates_now()


def _one_value_along(axes: Sequence[Axis], opened: dict[int, Argument]) -> tuple[str, ...]:
    """List the axes along which a loss is one value: no axes of the mean, and leaves are parts of one model there.

    Where all that is differentiated is each rank's own, in a `PerRank`, so is its loss.
    """
    primals = [p for argument in opened.values() for p in argument.primals if p.variables]
    others = [a.name for a in bound() if a.size > 1 and a.name not in [own.name for own in axes]]
    return tuple([a for a in others if not all(isinstance(p, OwnPrimal) and a in p.varies for p in primals)])


def _runs_in_eager_order(axes: Sequence[Axis]) -> bool:
    """Return whether autograd decides in which order this rank's collectives run, and other ranks wait for them."""
    return any(a.group for a in axes) and not is_tracing()


@dataclass(frozen=True)
class _Loss:
    """The loss as a function of the variables of all primals.

    Attributes:
        loss_and_aux: what the user's function became.
        args: its arguments by position, of all micro-batches; those that are differentiated stand in `opened`.
        kwargs: its other arguments, which are not cut.
        opened: the differentiated arguments, by position.
        batch: how the arguments are cut in micro-batches.
        parts: what the loss is divided by.
        fenced: whether units are reduced in the order of the tree.
        one: the axes along which the loss is one value.
        name: of the user's function.
    """

    loss_and_aux: Callable[..., tuple[torch.Tensor, Any]]
    args: list[Any]
    kwargs: dict[str, Any]
    opened: dict[int, Argument]
    batch: MicroBatches
    parts: int
    fenced: bool
    one: tuple[str, ...]
    name: str

    def __call__(self, j: int | torch.Tensor) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]]:
        """Return the loss of micro-batch j, a function of the variables to it and aux."""
        return functools.partial(self._of, j, [self.batch.part(x, i, j) for i, x in enumerate(self.args)])

    def _of(self, j: int | torch.Tensor, cut: list[Any], variables: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        args, rest, anchor = list(cut), iter(variables), torch.zeros(0)
        handed: dict[int, list[torch.Tensor]] = {}
        for i, argument in self.opened.items():
            leaves = []
            for primal in argument.primals:
                xs = primal.leaves([next(rest) for _ in primal.variables])
                if self.fenced:
                    xs, anchor = fence(xs, anchor)
                leaves.append(xs)
            args[i] = self.batch.part(argument.handed(leaves), i, j)
            handed[i] = [] if is_tracing() else [x for xs in leaves for x in xs]  # a trace finds writes by itself
        before = {i: [written(x) for x in xs] for i, xs in handed.items()}
        loss, aux = self._as_one_value(variables, args) if self.one else self.loss_and_aux(*args, **self.kwargs)
        for i, xs in handed.items():
            if before[i] != [written(x) for x in xs]:
                raise RuntimeError(
                    f"f wrote into its parameters in place, into argument {i}: let it make new values (p = p * mask)"
                )
        self._check_dependence(variables, loss)
        loss = loss if self.parts == 1 else loss / self.parts
        return (fence([loss], anchor)[0][0] if self.fenced else loss), aux

    def _as_one_value(self, variables: list[torch.Tensor], args: list[Any]) -> tuple[torch.Tensor, Any]:
        """Compute a loss that is one value along some axes, and check that no sum over one counts it several times."""
        one_loss = OneLoss(self.one)
        loss, aux = as_one_loss(one_loss, self.loss_and_aux, *args, **self.kwargs)
        if one_loss.hidden:
            rest = iter(variables)
            own = [(p.varies, [next(rest) for _ in p.variables]) for x in self.opened.values() for p in x.primals]
            check_copies([loss], one_loss, {a: {id(x) for v, xs in own if a in v for x in xs} for a in self.one})
        return loss, aux

    def _check_dependence(self, variables: list[torch.Tensor], loss: torch.Tensor) -> None:
        """Say so if a loss depends on nothing that is differentiated, which a rank without examples may mean."""
        if torch.compiler.is_dynamo_compiling() or not variables or loss.requires_grad:
            return
        which = " or ".join([f"argument {i}" for i in self.opened])
        notice(
            f"fzero.value_and_grad: the loss of {self.name} does not depend on {which}, so its gradients are zero: let "
            "it read the parameters that it is given, and not a module's own, or detached ones"
        )
