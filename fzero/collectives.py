"""Collectives as linear maps: one table, one row each, one autograd Function for all.

A row says what the map does to the stacked values of all ranks (simulation), what one rank does (a process
group), and which row is its transpose. The Function makes every row differentiable to any order in both
directions, vmappable, and traceable by make_fx and torch.compile.

Transposes are those of the joint map over all ranks, so `psum` is its own transpose: `torch.func.grad` inside a
rank program gives d(sum over ranks of the loss) / d(own inputs). JAX's `pmap` and `shard_map(check_vma=False)`
do the same.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import _record, tree
from fzero._torch import allow_in_graph, c10d
from fzero.world import Axis, AxisName, axis_size, resolve

__all__ = ["Row", "add_row", "all_gather", "apply", "pmean", "psum", "psum_scatter"]

Tensors = Sequence[torch.Tensor]
Meta = tuple[str, str, int, int]  # axis name, process group, size, rank
Params = tuple[int, ...]


class Row(NamedTuple):
    """A linear map over the ranks of one axis.

    Attributes:
        name: the row's key.
        wire: the operation on the wire: "all_gather", "reduce_scatter", "all_reduce", or "" for none.
        stacked: `(n, params, xs [n, ...]) -> ys`, all ranks at once; `ys` are `[n, ...]`, or without the leading
            dimension when `replicated`.
        local: `(meta, params, xs) -> ys`, one rank of a process group.
        transpose: the name of the transposed row.
        replicated: whether the results are equal on all ranks.
        shift: what `params` become when a leading dimension is put before the inputs' own.
        uniform: like `stacked`, for inputs that all ranks share and that have no `[n]` dimension; optional.
        label: what the recorder calls the map's operand, given `params`; "" for a user's own.
    """

    name: str
    wire: str
    stacked: Callable[[int, Params, Tensors], Tensors]
    local: Callable[[Meta, Params, Tensors], Tensors]
    transpose: str
    replicated: bool
    shift: Callable[[Params], Params] = lambda params: params
    uniform: Callable[[int, Params, Tensors], Tensors] | None = None
    label: Callable[[Params], str] = lambda params: ""


_ROWS: dict[str, Row] = {}


def add_row(row: Row) -> None:
    """Put a linear map into the table."""
    _ROWS[row.name] = row


class _LinearMap(torch.autograd.Function):
    """A row of the table, applied."""

    @staticmethod
    def forward(token: torch.Tensor, name: str, meta: Meta, params: Params, *xs: torch.Tensor) -> Any:
        row = _ROWS[name]
        if not meta[1]:
            raise RuntimeError(f"{name} over the simulated axis {meta[0]!r} ran outside that axis's vmap")
        ys = tuple(row.local(meta, params, xs))
        _record.add(row.wire, meta, _numel(xs), _numel(ys), xs[0], row.label(params))
        return ys

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.token, ctx.name, ctx.meta, ctx.params = inputs[:4]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[4:]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        transposed = _LinearMap.apply(ctx.token, _ROWS[ctx.name].transpose, ctx.meta, ctx.params, *grads)
        return (None, None, None, None, *transposed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        filled = [
            torch.zeros(shape, dtype=dtype, device=device) if t is None else t
            for t, (shape, dtype, device) in zip(tangents[4:], ctx.like, strict=True)
        ]
        return _LinearMap.apply(ctx.token, ctx.name, ctx.meta, ctx.params, *filled)

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Any, name: str, meta: Meta, params: Params, *xs: Any) -> Any:
        row, dims, n = _ROWS[name], in_dims[4:], info.batch_size
        if in_dims[0] is None:  # a user's vmap: carry its dimension through, in front
            ys = _LinearMap.apply(token, name, meta, row.shift(params), *_in_front(xs, dims, n))
            return ys, (0,) * len(ys)
        if row.uniform is not None and all(d is None for d in dims):
            sent, ys = _numel(xs), tuple(row.uniform(n, params, xs))
        else:
            stacked = _in_front(xs, dims, n)
            sent, ys = _numel(stacked) // n, tuple(row.stacked(n, params, stacked))
        received = _numel(ys) if row.replicated else _numel(ys) // n
        _record.add(row.wire, meta, sent, received, xs[0], row.label(params))
        return ys, (None if row.replicated else 0,) * len(ys)


def _numel(xs: Tensors) -> int:
    return sum(x.numel() for x in xs)


def _in_front(xs: Tensors, dims: Sequence[int | None], n: int) -> list[torch.Tensor]:
    return [x.unsqueeze(0).expand(n, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]


@allow_in_graph  # Dynamo would inline the Function and, under functorch, lose its backward (pytorch#193279)
def apply(token: torch.Tensor, name: str, meta: Meta, params: Params, *xs: torch.Tensor) -> Any:
    """Apply the row `name` over the axis of `token` and `meta` to tensors; returns a tuple of tensors."""
    return _LinearMap.apply(token, name, meta, params, *xs)


# ---------------------------------------------------------------- what a rank of a process group does


def group_psum(x: torch.Tensor, meta: Meta) -> torch.Tensor:
    """All-reduce over a process group; an empty tensor is not sent."""
    if x.numel() == 0:
        return x.clone()
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", meta[1]))


def group_all_gather(x: torch.Tensor, meta: Meta, dim: int) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    if x.numel() == 0:
        return x.new_empty((meta[2] * x.shape[0], *x.shape[1:])).movedim(0, dim)
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, meta[2], meta[1])).movedim(0, dim)


def group_psum_scatter(x: torch.Tensor, meta: Meta, dim: int) -> torch.Tensor:
    """Sum the ranks' tensors and keep the own part along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    if x.numel() == 0:
        return x.new_empty((x.shape[0] // meta[2], *x.shape[1:])).movedim(0, dim)
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", meta[2], meta[1])).movedim(0, dim)


# ---------------------------------------------------------------- the table

add_row(
    Row(
        name="psum",
        wire="all_reduce",
        stacked=lambda n, params, xs: [xs[0].sum(0, dtype=xs[0].dtype)],
        local=lambda meta, params, xs: [group_psum(xs[0], meta)],
        transpose="psum",
        replicated=True,
    )
)
add_row(
    Row(
        name="all_gather",
        wire="all_gather",
        # [n, .., k, ..] -> [.., n, k, ..] -> [.., n k, ..]
        stacked=lambda n, params, xs: [xs[0].movedim(0, params[0]).flatten(params[0], params[0] + 1)],
        local=lambda meta, params, xs: [group_all_gather(xs[0], meta, params[0])],
        transpose="psum_scatter",
        replicated=True,
        shift=lambda params: (params[0] + 1,),
    )
)
add_row(
    Row(
        name="psum_scatter",
        wire="reduce_scatter",
        # [n, .., n k, ..] -> [.., n k, ..] -> [.., n, k, ..] -> [n, .., k, ..]
        stacked=lambda n, params, xs: [
            xs[0]
            .sum(0, dtype=xs[0].dtype)
            .unflatten(params[0], (n, xs[0].shape[params[0] + 1] // n))
            .movedim(params[0], 0)
        ],
        local=lambda meta, params, xs: [group_psum_scatter(xs[0], meta, params[0])],
        transpose="all_gather",
        replicated=False,
        shift=lambda params: (params[0] + 1,),
    )
)


# ---------------------------------------------------------------- the public face


def _over(name: str, x: torch.Tensor, axes: Sequence[Axis], params: Params) -> torch.Tensor:
    for axis in axes:
        (x,) = apply(axis.token, name, axis.meta, params, x)
    return x


def psum(x: Any, axis: AxisName = None) -> Any:
    """Sum a tensor, or each tensor of a tree, over the ranks of `axis`.

    Args:
        x: a tree of tensors of any shape and dtype, the same on every rank (bool becomes int64).
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.

    Returns:
        A tree of tensors of the same shapes, equal on all ranks. The transpose of psum is psum.

    Raises:
        ValueError: if an axis is not bound.
        TypeError: if a leaf is no tensor, or a box.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=4).spmd(lambda: fzero.psum(fzero.axis_index("dp"), "dp"))()
        tensor(6)
    """
    axes = resolve(axis)
    return tree.map_with_path(lambda path, leaf: _over("psum", _number(path, leaf), axes, ()), x, tree.is_box)


def pmean(x: Any, axis: AxisName = None) -> Any:
    """Average a tensor, or each tensor of a tree, over the ranks of `axis`.

    An integer tensor keeps its dtype: its mean is rounded down. See `psum` for the arguments.

    Example:
        >>> import fzero, torch
        >>> fzero.mesh(dp=4).spmd(lambda x: fzero.pmean(x, "dp"))(fzero.PerRank(torch.tensor([1.0, 2.0, 3.0, 6.0])))
        tensor(3.)
    """
    axes, n = resolve(axis), axis_size(axis)

    def mean(path: str, leaf: Any) -> torch.Tensor:
        x = _number(path, leaf)
        if x.is_floating_point() or x.is_complex():
            return _over("psum", x / n, axes, ())  # divided first: a sum could overflow in half precision
        return (_over("psum", x.long(), axes, ()) // n).to(x.dtype)

    return tree.map_with_path(mean, x, tree.is_box)


def _number(path: str, leaf: Any) -> torch.Tensor:
    where = f"leaf {path!r}" if path else "its argument"
    if tree.is_box(leaf):
        raise TypeError(
            f"a sum over ranks would add different parts of the tree: {where} is {leaf!r}. Gradients of boxes are "
            "reduced already; for whole leaves gather it first"
        )
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"a collective takes tensors, and {where} is {leaf!r}; make it a torch.tensor")
    return leaf.long() if leaf.dtype == torch.bool else leaf


def all_gather(x: torch.Tensor, axis: AxisName = None, *, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`, in rank order.

    Args:
        x: a tensor `[.., k, ..]`, of one shape on every rank.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity. For a tuple the first axis is the slowest, as in JAX.
        dim: the dimension of size k.

    Returns:
        A tensor `[.., n k, ..]`, equal on all ranks. The transpose of all_gather is psum_scatter.

    Raises:
        ValueError: if an axis is not bound, or `x` has no dimension `dim`.

    Example:
        >>> import fzero, torch
        >>> fzero.mesh(dp=2).spmd(fzero.all_gather)(fzero.PerRank(torch.tensor([[1, 2], [3, 4]])))
        tensor([1, 2, 3, 4])
    """
    return _over("all_gather", x, resolve(axis)[::-1], (_dimension("all_gather", x, dim),))


def psum_scatter(x: torch.Tensor, axis: AxisName = None, *, dim: int = 0) -> torch.Tensor:
    """Sum the ranks' tensors and keep the own one of n equal parts along `dim`: a reduce_scatter.

    Args:
        x: a tensor `[.., n k, ..]`, of one shape on every rank.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.
        dim: the dimension of size n k.

    Returns:
        A tensor `[.., k, ..]`: this rank's part. The transpose of psum_scatter is all_gather.

    Raises:
        ValueError: if an axis is not bound, `x` has no dimension `dim`, or its size does not divide by n.

    Example:
        >>> import fzero, torch
        >>> fzero.mesh(dp=2).spmd(lambda x: fzero.PerRank(fzero.psum_scatter(x)))(torch.tensor([1, 2])).value
        tensor([[2],
                [4]])
    """
    dim, axes = _dimension("psum_scatter", x, dim), resolve(axis)
    n = math.prod([a.size for a in axes])
    if x.shape[dim] % n:
        raise ValueError(
            f"psum_scatter cuts dimension {dim} of a tensor {list(x.shape)} into {n} equal parts, "
            f"and {x.shape[dim]} does not divide by {n}; pad it"
        )
    return _over("psum_scatter", x, axes, (dim,))


def _dimension(name: str, x: Any, dim: int) -> int:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes one tensor, and was given {x!r}; for a tree use tree.map")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} is not a dimension of a tensor {list(x.shape)}")
    return dim % x.ndim
