"""value_and_grad: the mean over ranks of a loss, and its gradient in the layout of the parameters."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._notice import notice
from fzero._torch import is_tracing
from fzero.collectives import psum
from fzero.layout import Shard, Slot, is_box
from fzero.precision import Precision
from fzero.spec import fact, unit_axes, with_cast
from fzero.transforms._accumulate import accumulate, micro_batches_of
from fzero.transforms._all_reduce import all_reduce_shard
from fzero.transforms._fence import fence
from fzero.transforms._gather import gather as gathered
from fzero.transforms._gather import gather_unit
from fzero.transforms._weighted import total_and_aux, weighted
from fzero.units import apply_over, apply_to_unit, cut, groups
from fzero.world import Axis, AxisName, Rules, joint, resolve, rules_in_scope

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
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: expected a policy, such as fzero.Precision(param=torch.bfloat16)")
    if reduce == "weighted":
        options: Any = {"axis": axis, "micro_batches": micro_batches, "batch_argnums": batch_argnums}
        options |= {"gather": gather, "precision": precision}
        return weighted(
            value_and_grad(total_and_aux(f, has_aux), argnums, True, reduce="sum", **options), has_aux, axis
        )
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce={reduce!r}: expected "mean", "weighted" or "sum"')
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: expected an int, at least 1")
    if precision is not None and precision.param is torch.float16 and not getattr(f, "scales_gradients", False):
        notice(
            "fzero.value_and_grad: gradients in float16 below 6e-8 vanish: scale the loss, loss, grads = "
            "fzero.scaled_value_and_grad(f, opt_state.scale, ...), opt = optim.dynamic_loss_scale(...); or use bfloat16"
        )
    if len(set(nums)) != len(nums):
        raise ValueError(f"argnums={argnums}: a position stands twice")

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if any(not 0 <= i < len(args) for i in nums):
            raise ValueError(f"argnums={argnums}: the function was called with {len(args)} positional arguments")
        axes = resolve(axis)
        fenced = any(a.group for a in axes) and not is_tracing()
        # divided before the sums, which could overflow in half precision
        parts = micro_batches * math.prod([a.size for a in axes]) if reduce == "mean" else 1
        opened = {i: _open(args[i], axes, f"argument {i}", micro_batches, precision) for i in nums}
        fixed = [None if i in opened else gathered(x) if gather else x for i, x in enumerate(args)]
        kwargs = gathered(kwargs) if gather else kwargs
        batches = micro_batches_of(args, fixed, nums, batch_argnums, micro_batches)

        def loss_of(batch: list[Any], variables: list[list[list[torch.Tensor]]]) -> Any:
            full, anchor, handed = list(batch), torch.zeros(0), []
            for (i, arg), pieces in zip(opened.items(), variables, strict=True):
                wholes = [p.whole(xs) if gather else xs for p, xs in zip(arg.pieces, pieces, strict=True)]
                if fenced and gather:
                    for j, leaves in enumerate(wholes):
                        wholes[j], anchor = fence(leaves, anchor)
                full[i] = arg.rebuild(wholes, gather)
                handed += [] if is_tracing() else wholes
            versions = [x._version for leaves in handed for x in leaves]
            loss, aux = _checked(f(*full, **kwargs), has_aux)
            if versions != [x._version for leaves in handed for x in leaves]:
                raise RuntimeError("f wrote into its parameters in place: return new values instead")
            loss = loss if parts == 1 else loss / parts
            return (fence([loss], anchor)[0][0] if fenced else loss), aux

        variables = [[p.variables for p in arg.pieces] for arg in opened.values()]
        dtypes = [[p.dtypes for p in arg.pieces] for arg in opened.values()]
        values, aux, grads = accumulate(loss_of, variables, batches, dtypes)
        if precision is not None:
            values = [v.to(torch.promote_types(v.dtype, torch.float32)) for v in values]
        value = psum(functools.reduce(operator.add, values), axis)
        trees = [arg.finish(g) for arg, g in zip(opened.values(), grads, strict=True)]
        return ((value, aux) if has_aux else value), (trees[0] if isinstance(argnums, int) else tuple(trees))

    return differentiated


class _Piece(NamedTuple):
    """Leaves that are differentiated together: what varies, how it becomes whole, how its gradient is finished."""

    members: list[tuple[int, int]]  # (position in the flattened tree, index in the piece)
    variables: list[torch.Tensor]
    whole: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    finish: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    dtypes: list[torch.dtype]  # that gradients are summed over micro-batches in
    uid: int = -1  # of the shard that the gradient is put into
    closed: Shard | None = None  # the box whose data is what varies


class _Opened(NamedTuple):
    """A differentiated argument, taken apart into pieces."""

    entries: list[Any]
    structure: Any
    pieces: list[_Piece]

    def rebuild(self, wholes: list[Sequence[torch.Tensor]], gather: bool) -> Any:
        entries = list(self.entries)
        for piece, leaves in zip(self.pieces, wholes, strict=True):
            if piece.closed is not None and not gather:
                for position, index in piece.members:
                    entries[position] = Slot(piece.closed.uid, index)
                entries[piece.members[0][0]] = Shard(leaves[0], piece.closed.uid, piece.closed.origin)
                continue
            for position, index in piece.members:
                entries[position] = leaves[index]
        return tree.unflatten(self.structure, entries)

    def finish(self, grads: list[list[torch.Tensor]]) -> Any:
        entries = list(self.entries)
        for piece in self.pieces:
            # taken off the list, so that no piece's gradient is held while the next is finished
            done = piece.finish(grads.pop(0))
            if piece.uid >= 0:
                entries[piece.members[0][0]] = Shard(done[0], piece.uid)
            else:
                for position, index in piece.members:
                    entries[position] = done[index]
        return tree.unflatten(self.structure, entries)


def _same(xs: Any) -> Any:
    return xs


def _open(arg: Any, axes: Sequence[Axis], name: str, micro_batches: int, precision: Precision | None) -> _Opened:
    paths, entries, structure = tree.flatten_with_paths(arg, is_box)
    _check_floating(paths, entries, name)
    if precision is not None:
        precision.check(name, paths, entries)
    pieces = [_shard_piece(*group, axes, micro_batches, precision) for group in groups(paths, entries)]
    if axes:
        plan = cut(arg, axes, Rules(rules_in_scope().units), rest="replicated")
        for unit in plan.units:
            members = [
                (i, x.index)
                for i, x in enumerate(plan.entries)
                if isinstance(x, Slot) and x.uid == unit.uid and not is_box(entries[i])
            ]
            pieces.append(_replicated_piece(unit.uid, axes, unit.leaves, members, precision))
    else:
        pieces.append(_plain_piece(entries, precision))
    return _Opened(entries, structure, pieces)


def _grad_dtype(dtype: torch.dtype, precision: Precision | None) -> torch.dtype:
    return dtype if precision is None else precision.gradients(dtype)[1]


def _cast(uid: int, precision: Precision | None) -> int:
    return uid if precision is None else with_cast(uid, *precision.gradients(fact(uid, "dtype")))


def _shard_piece(
    uid: int,
    box: Shard,
    members: list[tuple[int, int]],
    axes: Sequence[Axis],
    micro_batches: int,
    precision: Precision | None,
) -> _Piece:
    own, names = [a.name for a in unit_axes(uid)], [a.name for a in axes]
    if any(name not in names for name in own):
        raise ValueError(
            f"unit {fact(uid, 'unit')!r} is sharded over {own}, and the mean is over {names}: its gradient would be "
            "summed over more ranks than the loss; name all its axes with axis="
        )
    # replicated along these, as in hybrid sharding: each copy has the gradient of its own part of the batch
    copies = [a for a in axes if a.name not in fact(uid, "varies")]
    cast = _cast(uid, precision)

    def summed(g: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [all_reduce_shard(cast, copies, g[0])]

    # what varies has the gradient's dtype, or autograd would cast the gradient to its own
    dtype = _grad_dtype(box.data.dtype, precision)
    if micro_batches > 1 and fact(uid, "reduce") == "once":
        full = list(gather_unit(uid, box.data, box.origin))
        finish = lambda g: summed(apply_to_unit("reduce_scatter", cast, g))  # noqa: E731
        return _Piece(members, full, _same, finish, [dtype] * len(full), uid)
    closed = Shard(box.data.to(dtype), cast, box.origin)
    whole = lambda xs: gather_unit(cast, xs[0], closed.origin)  # noqa: E731
    return _Piece(members, [closed.data], whole, summed, [dtype], uid, closed)


def _replicated_piece(
    uid: int,
    axes: Sequence[Axis],
    leaves: list[torch.Tensor],
    members: list[tuple[int, int]],
    precision: Precision | None,
) -> _Piece:
    cast, dtypes = _cast(uid, precision), [_grad_dtype(x.dtype, precision) for x in leaves]
    return _Piece(members, leaves, _same, lambda g: apply_over("all_reduce", joint(axes), cast, g), dtypes)


def _plain_piece(entries: list[Any], precision: Precision | None) -> _Piece:
    index: dict[int, int] = {}
    leaves: list[torch.Tensor] = []
    members: list[tuple[int, int]] = []
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            if id(x) not in index:
                index[id(x)] = len(leaves)
                leaves.append(x)
            members.append((position, index[id(x)]))
    dtypes = [_grad_dtype(x.dtype, precision) for x in leaves]
    return _Piece(members, leaves, _same, lambda g: [x.to(d) for x, d in zip(g, dtypes, strict=True)], dtypes)


def _checked(result: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"has_aux=True: f must return (loss, aux), and returned {type(result).__name__}")
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        given = tree.show(loss) if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        advice = "reduce it with .mean()" if isinstance(loss, torch.Tensor) else "for (loss, aux) say has_aux=True"
        raise TypeError(f"f must return a 0-d floating-point loss, and returned {given}; {advice}")
    return loss, aux


def _check_floating(paths: list[str], entries: list[Any], name: str) -> None:
    for path, x in zip(paths, entries, strict=True):
        if x is None or is_box(x):
            continue
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            given = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise TypeError(
                f"{name} is differentiated, and its leaf {path!r} is {given}, which cannot be differentiated "
                "here; pass it in an argument that is not differentiated"
            )
