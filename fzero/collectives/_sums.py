"""Sums and gathers over ranks as linear maps: rows of the table, and their public functions.

A transpose is the transpose of the joint map over all ranks, so `psum` is its own transpose. `torch.func.grad` inside a
rank program computes d(sum over ranks of the loss) / d(this rank's inputs), like JAX's `pmap` and
`shard_map(check_vma=False)`. For values that are equal on all ranks, as in tensor parallelism, see
`collectives/_invariant.py`.
"""

import math
from typing import Any

import torch

from fzero import tree
from fzero._torch import c10d
from fzero.axes import AxisName, Binding, axis_size, joint, resolve
from fzero.collectives import gloo
from fzero.collectives._copies import note_call
from fzero.collectives._table import DimOptions, LinearMap, NoOptions, Tensors, add_row, apply_along
from fzero.tree import Tree

__all__ = ["all_gather", "pmean", "psum", "psum_scatter"]

# ---------------------------------------------------------------- one rank of a process group


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


# ---------------------------------------------------------------- the table


def _dim_text(options: DimOptions, xs: Tensors) -> str:
    return f"({options.dim % max(xs[0].ndim, 1)})"


def stacked_gather(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    """Concatenate the ranks' tensors, stacked along dimension 0, along dimension `options.dim` of each."""
    dim = options.dim
    return [xs[0].movedim(0, dim - 1).flatten(dim - 1, dim)]  # [n, .., k, ..] -> [.., n, k, ..] -> [.., n k, ..]


def stacked_scatter(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    """Sum the ranks' tensors, stacked along dimension 0, and split the sum along its dimension `options.dim`."""
    total, dim = xs[0].sum(0, dtype=xs[0].dtype), options.dim  # [n, .., n k, ..] -> [.., n k, ..]
    return [total.unflatten(dim, (n, total.shape[dim] // n)).movedim(dim - 1, 0)]  # -> [.., n, k, ..] -> [n, .., k, ..]


add_row(
    LinearMap(
        name="psum",
        wire="all_reduce",
        stacked=lambda n, options, xs: [xs[0].sum(0, dtype=xs[0].dtype)],
        local=lambda binding, options, xs: [group_psum(xs[0], binding)],
        transpose="psum",
        replicated=True,
    )
)
add_row(
    LinearMap(
        name="all_gather",
        wire="all_gather",
        stacked=stacked_gather,
        local=lambda binding, options, xs: [group_all_gather(xs[0], binding, options.dim)],
        transpose="psum_scatter",
        replicated=True,
        detail=_dim_text,
    )
)
add_row(
    LinearMap(
        name="psum_scatter",
        wire="reduce_scatter",
        stacked=stacked_scatter,
        local=lambda binding, options, xs: [group_psum_scatter(xs[0], binding, options.dim)],
        transpose="all_gather",
        replicated=False,
        detail=_dim_text,
    )
)


# ---------------------------------------------------------------- the public functions


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
    axes = joint(resolve(axis))

    def total(path: str, leaf: Any) -> torch.Tensor:
        return note_call("psum", axes, apply_along("psum", number(path, leaf), axes, NoOptions()))

    return tree.map_with_path(total, x, tree.is_box)


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
    axes, n = joint(resolve(axis)), axis_size(axis)

    def mean(path: str, leaf: Any) -> torch.Tensor:
        x = number(path, leaf)
        if x.is_floating_point() or x.is_complex():
            # divide first, since a sum could overflow in half precision
            return note_call("pmean", axes, apply_along("psum", x / n, axes, NoOptions()))
        return (apply_along("psum", x.long(), axes, NoOptions()) // n).to(leaf.dtype)

    return tree.map_with_path(mean, x, tree.is_box)


def number(path: str, leaf: Any) -> torch.Tensor:
    """Return a leaf as a tensor that can be summed: bool becomes int64."""
    x = tensor(path, leaf)
    return x.long() if x.dtype == torch.bool else x


def tensor(path: str, leaf: Any) -> torch.Tensor:
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
    axes = joint(resolve(axis))
    return note_call("all_gather", axes, apply_along("all_gather", x, axes[::-1], along("all_gather", x, dim)))


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
    options, axes = along("psum_scatter", x, dim), joint(resolve(axis))
    dim = dimension("psum_scatter", x, dim)
    n = math.prod([a.size for a in axes])
    if x.shape[dim] % n:
        raise ValueError(
            f"psum_scatter splits dimension {dim} of a tensor {list(x.shape)} into {n} equal parts, "
            f"but {x.shape[dim]} is not divisible by {n}; pad it"
        )
    return apply_along("psum_scatter", x, axes, options)


def dimension(name: str, x: Any, dim: int, least: int = 1) -> int:
    """Check a dimension of a tensor, and count it from the front."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes one tensor, but was given {x!r}; for a tree use tree.map")
    if not -x.ndim <= dim < max(x.ndim, 1 - least):
        raise ValueError(f"dim={dim} is not a dimension of a tensor {list(x.shape)}")
    return dim % max(x.ndim, 1)


def along(name: str, x: Any, dim: int) -> DimOptions:
    """Check a dimension of a tensor, and return it as a row's options."""
    return DimOptions(dimension(name, x, dim) - x.ndim)
