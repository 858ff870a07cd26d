"""Sums and gathers over ranks: rows of the table, and the public functions that apply them.

`psum`, `all_gather` and `psum_scatter` have the transposes of the joint map over all ranks, where each rank's copy of a
replicated value is a separate input. So `psum` is its own transpose, like in JAX's `pmap` and
`shard_map(check_vma=False)`. `torch.func.grad` inside a rank program computes d(sum over ranks of the loss) / d(this
rank's inputs).

If the ranks compute one loss together, use the collectives of `_invariant`.
"""

import math
from typing import Any

import torch

from fzero import tree
from fzero._arguments import is_int
from fzero._torch import c10d
from fzero._torch.types import Tensors
from fzero._tracebacks import api_boundary
from fzero.axes import Axis, AxisName, Binding, axis_size, in_mesh_order, join_axes, resolve_axes
from fzero.collectives import gloo
from fzero.collectives._check_copies import note_call
from fzero.collectives._table import (
    COPIES,
    DimOptions,
    LinearMap,
    NoOptions,
    RankOperation,
    add_rows,
    apply_along,
)
from fzero.tree import Tree

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "OWN_PART",
    "REDUCE_SCATTER",
    "all_gather",
    "check_dim",
    "check_dim_options",
    "check_number",
    "check_tensor",
    "group_all_gather",
    "group_psum",
    "group_psum_scatter",
    "own_part",
    "pmean",
    "psum",
    "psum_scatter",
    "start_all_gather",
    "start_psum",
    "summed_axes",
    "wait_tensor",
]


def group_psum(x: torch.Tensor, binding: Binding) -> torch.Tensor:
    """All-reduce over a process group; an empty tensor is not sent."""
    if x.numel() == 0:
        return x.clone()
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", binding.group))


def group_all_gather(x: torch.Tensor, binding: Binding, dim: int) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    if x.numel() == 0:
        return x.new_empty((binding.size * x.shape[0], *x.shape[1:])).movedim(0, dim)
    return gloo.wait(gloo.all_gather(x, binding.size, binding.group)).movedim(0, dim)


def group_psum_scatter(x: torch.Tensor, binding: Binding, dim: int) -> torch.Tensor:
    """Sum the ranks' tensors, and return this rank's part along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    if x.numel() == 0:
        return x.new_empty((x.shape[0] // binding.size, *x.shape[1:])).movedim(0, dim)
    return gloo.wait(gloo.reduce_scatter(x, "sum", binding.size, binding.group)).movedim(0, dim)


def _dim_text(options: DimOptions, xs: Tensors) -> str:
    return f"({options.dim % max(xs[0].ndim, 1)})"


def _all_ranks_gather(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    dim = options.dim
    return [xs[0].movedim(0, dim - 1).flatten(dim - 1, dim)]  # [n, .., k, ..] -> [.., n, k, ..] -> [.., n k, ..]


def _all_ranks_scatter(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    # [n, .., n k, ..] -> [.., n k, ..] -> [n, .., k, ..]
    return [_view_by_rank(xs[0].sum(0, dtype=xs[0].dtype), n, options.dim)]


def _view_by_rank(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """View `[.., n k, ..]` as `[n, .., k, ..]`; `dim` is counted from the end."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim - 1, 0)


def _all_ranks_own_part(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    parts = _view_by_rank(xs[0], n, options.dim)  # [n parts, n ranks, .., k, ..]
    return [torch.diagonal(parts, 0, 0, 1).movedim(-1, 0)]


def _local_own_part(binding: Binding, options: DimOptions, xs: Tensors) -> Tensors:
    k = xs[0].shape[options.dim] // binding.size
    return [xs[0].narrow(options.dim, binding.rank * k, k).clone()]


def _local_pad(binding: Binding, options: DimOptions, xs: Tensors) -> Tensors:
    (x,), (dim,) = xs, options
    shape = list(x.shape)
    shape[dim] *= binding.size
    full = x.new_zeros(shape)
    full.narrow(dim, binding.rank * x.shape[dim], x.shape[dim]).copy_(x)
    return [full]


def _all_ranks_pad(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    parts, dim = torch.diag_embed(xs[0].movedim(0, -1), dim1=0, dim2=1), options.dim  # [n ranks, n parts, .., k, ..]
    return [parts.movedim(1, dim - 1).flatten(dim - 1, dim)]


ALL_REDUCE = RankOperation(
    "all_reduce",
    all_ranks=lambda n, options, xs: [xs[0].sum(0, dtype=xs[0].dtype)],
    local=lambda binding, options, xs: [group_psum(xs[0], binding)],
)
ALL_GATHER = RankOperation(
    "all_gather",
    all_ranks=_all_ranks_gather,
    local=lambda binding, options, xs: [group_all_gather(xs[0], binding, options.dim)],
    detail=_dim_text,
)
REDUCE_SCATTER = RankOperation(
    "reduce_scatter",
    all_ranks=_all_ranks_scatter,
    local=lambda binding, options, xs: [group_psum_scatter(xs[0], binding, options.dim)],
    detail=_dim_text,
)
_ALL_REDUCE_STARTED = ALL_REDUCE._replace(
    local=lambda binding, options, xs: [
        c10d.all_reduce(xs[0].contiguous(), "sum", binding.group) if xs[0].numel() else xs[0].clone()
    ]
)
_ALL_GATHER_STARTED = ALL_GATHER._replace(
    local=lambda binding, options, xs: [
        c10d.all_gather_into_tensor(xs[0].contiguous(), binding.size, binding.group) if xs[0].numel() else xs[0].clone()
    ]
)
OWN_PART = RankOperation(
    "",
    all_ranks=_all_ranks_own_part,
    uniform=lambda n, options, xs: [_view_by_rank(xs[0], n, options.dim)],
    local=_local_own_part,
)
_PAD = RankOperation("", all_ranks=_all_ranks_pad, local=_local_pad)


add_rows(
    LinearMap("psum", ALL_REDUCE, "psum", output=COPIES),
    LinearMap("start_psum", _ALL_REDUCE_STARTED, "", output=COPIES),
    LinearMap("start_all_gather", _ALL_GATHER_STARTED, "", output=COPIES),
    LinearMap("all_gather", ALL_GATHER, "psum_scatter", output=COPIES),
    LinearMap("psum_scatter", REDUCE_SCATTER, "all_gather"),
    LinearMap("own_part", OWN_PART, "own_part_padded"),  # in the joint map: the ranks' inputs may differ
    LinearMap("own_part_padded", _PAD, "own_part"),
)


def summed_axes(axis: AxisName) -> tuple[Axis, ...]:
    """Return the axes that a sum runs over. Their order means nothing, so one group may stand for all."""
    return join_axes(in_mesh_order(resolve_axes(axis)))


@api_boundary
def psum(x: Tree, axis: AxisName = None) -> Tree:
    """Sum a tensor, or each tensor of a tree, over the ranks of `axis`.

    Args:
        x: a tree of tensors of any shape and dtype, the same on every rank (bool becomes int64).
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.

    Returns:
        A tree of tensors of the same shapes, equal on all ranks. The transpose of psum is psum.

    Raises:
        ValueError: if an axis is not bound.
        TypeError: if a leaf is a box, or not a tensor.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=4).spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index("dp"), "dp"))()
        tensor(6)
    """
    axes = summed_axes(axis)

    def total(path: str, leaf: Any) -> torch.Tensor:
        return note_call("psum", axes, apply_along("psum", check_number(path, leaf), axes, NoOptions()))

    return tree.map_with_path(total, x, tree.is_box)


def start_psum(x: torch.Tensor, axis: AxisName) -> torch.Tensor:
    """Start the sum of a tensor over the ranks of `axis`, without a derivative. Only `wait_tensor` may read it.

    On processes it returns while the sum is under way.
    """
    return apply_along("start_psum", x, summed_axes(axis), NoOptions())


def start_all_gather(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Start to concatenate the ranks' tensors `[k]` along one axis, as `start_psum` starts a sum."""
    return apply_along("start_all_gather", x, resolve_axes(axis), DimOptions(-1))


def wait_tensor(x: torch.Tensor) -> torch.Tensor:
    """Wait for a result of `start_psum` or `start_all_gather`, in the same rank program or in a later one."""
    return c10d.wait_tensor(x) if type(x) is torch.Tensor else x


@api_boundary
def pmean(x: Tree, axis: AxisName = None) -> Tree:
    """Average a tensor, or each tensor of a tree, over the ranks of `axis`.

    An integer or bool tensor keeps its dtype, and its mean is rounded down. So a bool is true where it is true on all
    ranks. See `psum` for the arguments.

    Example:
        >>> import fzero, torch
        >>> fzero.mesh(dp=4).spmd(lambda x: fzero.collectives.pmean(x, "dp"))(
        ...     fzero.PerRank(torch.tensor([1.0, 2.0, 3.0, 6.0]))
        ... )
        tensor(3.)
    """
    axes, n = summed_axes(axis), axis_size(axis)

    def mean(path: str, leaf: Any) -> torch.Tensor:
        x = check_number(path, leaf)
        if x.is_floating_point() or x.is_complex():
            # divide first, since a sum could overflow in half precision
            return note_call("pmean", axes, apply_along("psum", x / n, axes, NoOptions()))
        return (apply_along("psum", x.long(), axes, NoOptions()) // n).to(leaf.dtype)

    return tree.map_with_path(mean, x, tree.is_box)


def check_number(path: str, leaf: Any) -> torch.Tensor:
    """Check that a leaf is a tensor, and return it as one that can be summed: bool becomes int64."""
    x = check_tensor(path, leaf)
    return x.long() if x.dtype == torch.bool else x


def check_tensor(path: str, leaf: Any) -> torch.Tensor:
    """Check that a leaf is a tensor, not a box, and return it."""
    label = f"leaf {path!r}" if path else "its argument"
    if tree.is_box(leaf):
        raise TypeError(
            f"a sum over ranks would add different parts of the tree: {label} is {leaf!r}. Gradients of boxes are "
            "reduced already; to sum full leaves gather it first"
        )
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"a collective takes tensors, but {label} is {leaf!r}; make it a torch.tensor")
    return leaf


@api_boundary
def all_gather(x: torch.Tensor, axis: AxisName = None, *, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`, in rank order.

    The dimension becomes n times as large, and no dimension is added: JAX's `all_gather(tiled=True)`.

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
        >>> fzero.mesh(dp=2).spmd(fzero.collectives.all_gather)(fzero.PerRank(torch.tensor([[1, 2], [3, 4]])))
        tensor([1, 2, 3, 4])
    """
    axes = join_axes(resolve_axes(axis))
    return note_call(
        "all_gather", axes, apply_along("all_gather", x, axes[::-1], check_dim_options("all_gather", x, dim))
    )


@api_boundary
def psum_scatter(x: torch.Tensor, axis: AxisName = None, *, dim: int = 0) -> torch.Tensor:
    """Sum the ranks' tensors, and return this rank's part of n equal parts along `dim`: a reduce_scatter.

    The dimension becomes n times smaller, and no dimension is removed: JAX's `psum_scatter(tiled=True)`.

    Args:
        x: a tensor `[.., n k, ..]`, of one shape on every rank.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.
        dim: the dimension of size n k.

    Returns:
        A tensor `[.., k, ..]`: this rank's part. The transpose of psum_scatter is all_gather.

    Raises:
        ValueError: if an axis is not bound, `x` has no dimension `dim`, or its size is not divisible by n.

    Example:
        >>> import fzero, torch
        >>> fzero.mesh(dp=2).spmd(lambda x: fzero.PerRank(fzero.collectives.psum_scatter(x)))(
        ...     torch.tensor([1, 2])
        ... ).value
        tensor([[2],
                [4]])
    """
    options, axes = check_dim_options("psum_scatter", x, dim), join_axes(resolve_axes(axis))
    dim = check_dim("psum_scatter", x, dim)
    n = math.prod([a.size for a in axes])
    if x.shape[dim] % n:
        raise ValueError(
            f"psum_scatter splits dimension {dim} of a tensor {list(x.shape)} into {n} equal parts, "
            f"but {x.shape[dim]} is not divisible by {n}; pad it"
        )
    return apply_along("psum_scatter", x, axes, options)


def check_dim(name: str, x: Any, dim: int, min_ndim: int = 1) -> int:
    """Check a dimension of a tensor, and count it from the front."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes one tensor, but was given {x!r}; for a tree use tree.map")
    if not is_int(dim) or not -x.ndim <= dim < max(x.ndim, 1 - min_ndim):
        expected = f"expected {-x.ndim} to {x.ndim - 1}" if x.ndim else "give it one, such as by x.unsqueeze(0)"
        raise ValueError(f"{name}: dim={dim!r} is not a dimension of a tensor {list(x.shape)}: {expected}")
    return dim % max(x.ndim, 1)


def check_dim_options(name: str, x: Any, dim: int) -> DimOptions:
    """Check a dimension of a tensor, and return it as a row's options."""
    return DimOptions(check_dim(name, x, dim) - x.ndim)


def own_part(x: torch.Tensor, axis: AxisName, *, dim: int = 0) -> torch.Tensor:
    """Return this rank's part `[.., k, ..]` of a replicated tensor `[.., n k, ..]`."""
    return apply_along("own_part", x, join_axes(resolve_axes(axis)), check_dim_options("own_part", x, dim))
