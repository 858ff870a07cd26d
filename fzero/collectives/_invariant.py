"""Collectives on values that are equal on all ranks: the building blocks of tensor parallelism.

The collectives in `collectives/_sums.py` have the transposes of the joint map, where each rank's copy of a replicated
value is a separate input. If the ranks compute one loss together, each from its part of the weights, a replicated value
is one value. `pvary`, Megatron's f (arXiv:1909.08053), uses it on every rank; its transpose is the sum. Megatron's g,
`psum_invariant`, sums partial results; its transpose is `pvary`. With the collectives of `_sums.py` the gradients would
be n times too large. JAX's `shard_map(check_vma=True)` tells the two families apart by type. Here they have separate
names, and a simulation checks that invariant inputs are equal on all ranks.
"""

from collections.abc import Sequence

import torch

from fzero import tree
from fzero.axes import Axis, AxisName, Binding, joint, resolve
from fzero.collectives._sums import along, group_all_gather, group_psum, number, stacked_gather, tensor
from fzero.collectives._table import DimOptions, LinearMap, NoOptions, Tensors, add_row, apply_along
from fzero.tree import Tree

__all__ = ["all_gather_invariant", "mark_invariant", "own_part", "psum_invariant", "pvary"]


def _parts(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """View `[.., n k, ..]` as `[n, .., k, ..]`; `dim` is counted from the end."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim - 1, 0)


def _diagonal(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    parts = _parts(xs[0], n, options.dim)  # [n parts, n ranks, .., k, ..]
    return [torch.diagonal(parts, 0, 0, 1).movedim(-1, 0)]


def _own(binding: Binding, options: DimOptions, xs: Tensors) -> Tensors:
    k = xs[0].shape[options.dim] // binding.size
    return [xs[0].narrow(options.dim, binding.rank * k, k).clone()]


def _pad(binding: Binding, options: DimOptions, xs: Tensors) -> Tensors:
    (x,), (dim,) = xs, options
    shape = list(x.shape)
    shape[dim] *= binding.size
    full = x.new_zeros(shape)
    full.narrow(dim, binding.rank * x.shape[dim], x.shape[dim]).copy_(x)
    return [full]


def _stacked_pad(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    parts, dim = torch.diag_embed(xs[0].movedim(0, -1), dim1=0, dim2=1), options.dim  # [n ranks, n parts, .., k, ..]
    return [parts.movedim(1, dim - 1).flatten(dim - 1, dim)]


add_row(
    LinearMap(
        name="pvary",
        wire="",
        stacked=lambda n, options, xs: [xs[0]],
        uniform=lambda n, options, xs: [xs[0].expand(n, *xs[0].shape)],
        local=lambda binding, options, xs: [xs[0].view_as(xs[0])],
        transpose="psum_invariant",
        replicated=False,
        invariant=True,
    )
)
add_row(
    LinearMap(
        name="psum_invariant",
        wire="all_reduce",
        stacked=lambda n, options, xs: [xs[0].sum(0, dtype=xs[0].dtype)],
        local=lambda binding, options, xs: [group_psum(xs[0], binding)],
        transpose="pvary",
        replicated=True,
        one=True,
    )
)
add_row(
    LinearMap(
        name="all_gather_invariant",
        wire="all_gather",
        stacked=stacked_gather,
        local=lambda binding, options, xs: [group_all_gather(xs[0], binding, options.dim)],
        transpose="own_part_invariant",
        replicated=True,
        one=True,
    )
)
add_row(
    LinearMap(
        name="own_part_invariant",
        wire="",
        stacked=_diagonal,
        uniform=lambda n, options, xs: [_parts(xs[0], n, options.dim)],
        local=_own,
        transpose="all_gather_invariant",
        replicated=False,
        invariant=True,
    )
)
# from the joint map to one value: equal copies become one value, whose gradient they share
add_row(
    LinearMap(
        name="mark_invariant",
        wire="",
        stacked=lambda n, options, xs: [xs[0][0]],
        uniform=lambda n, options, xs: [xs[0]],
        local=lambda binding, options, xs: [xs[0].view_as(xs[0])],
        transpose="share_gradient",
        replicated=True,
        one=True,
        invariant=True,
    )
)
add_row(
    LinearMap(
        name="share_gradient",
        wire="",
        stacked=lambda n, options, xs: [xs[0][0] / n],
        uniform=lambda n, options, xs: [xs[0] / n],
        local=lambda binding, options, xs: [xs[0] / binding.size],
        transpose="mark_invariant",
        replicated=True,
        one=True,
        invariant=True,
    )
)
# the same split in the joint map: the ranks' inputs may differ
add_row(
    LinearMap(
        name="own_part",
        wire="",
        stacked=_diagonal,
        uniform=lambda n, options, xs: [_parts(xs[0], n, options.dim)],
        local=_own,
        transpose="own_part_padded",
        replicated=False,
    )
)
add_row(
    LinearMap(
        name="own_part_padded",
        wire="",
        stacked=_stacked_pad,
        local=_pad,
        transpose="own_part",
        replicated=False,
    )
)


def pvary(x: Tree, axis: AxisName = None) -> Tree:
    """Use a replicated tensor, or tree of tensors, on every rank in its own way: Megatron's f.

    It is the identity. Its transpose sums the ranks' gradients, so that the gradient is replicated too.

    Args:
        x: a tree of tensors, equal on all ranks of `axis`.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.

    Returns:
        The tree, to combine with values that differ by rank.

    Raises:
        ValueError: if an axis is not bound; in a simulation also if `x` differs by rank.

    Example:
        >>> import fzero, torch
        >>> f = lambda x, w: fzero.collectives.psum_invariant((fzero.collectives.pvary(x, "tp") * w).sum(), "tp")
        >>> x, w = torch.ones(2), fzero.PerRank(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> fzero.mesh(tp=2).spmd(torch.func.grad(f))(x, w)
        tensor([4., 6.])
    """
    axes = joint(resolve(axis))
    return tree.map_with_path(
        lambda path, leaf: apply_along("pvary", tensor(path, leaf), axes, NoOptions()), x, tree.is_box
    )


def psum_invariant(x: Tree, axis: AxisName = None) -> Tree:
    """Sum a tensor, or each tensor of a tree, over ranks that compute one result together: Megatron's g.

    It is like `psum`, but its transpose is `pvary`: the result is one value, and every rank holds its gradient.

    Args:
        x: a tree of tensors, each rank's part of the sum.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.

    Returns:
        The sums, equal on all ranks.

    Raises:
        ValueError: if an axis is not bound; in a simulation, when differentiated, if the gradient of the result
            differs by rank.

    Example:
        >>> import fzero, torch
        >>> x = fzero.PerRank(torch.tensor([1.0, 2.0]))
        >>> fzero.mesh(tp=2).spmd(lambda x: fzero.collectives.psum_invariant(x, "tp"))(x)
        tensor(3.)
    """
    axes = joint(resolve(axis))
    return tree.map_with_path(
        lambda path, leaf: apply_along("psum_invariant", number(path, leaf), axes, NoOptions()), x, tree.is_box
    )


def all_gather_invariant(x: torch.Tensor, axis: AxisName = None, *, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' parts of one tensor along `dim`, in rank order.

    It is like `all_gather`, but its transpose takes this rank's part of the gradient, which is equal on all ranks,
    without communication. See `all_gather` for arguments and errors.

    Example:
        >>> import fzero, torch
        >>> f = lambda x: fzero.collectives.all_gather_invariant(x, "tp").square().sum()
        >>> x = fzero.PerRank(torch.tensor([[1.0], [2.0]]))
        >>> fzero.mesh(tp=2).spmd(lambda x: fzero.PerRank(torch.func.grad(f)(x)))(x).value
        tensor([[2.],
                [4.]])
    """
    return apply_along("all_gather_invariant", x, joint(resolve(axis))[::-1], along("all_gather_invariant", x, dim))


def own_part(x: torch.Tensor, axis: AxisName, *, dim: int = 0) -> torch.Tensor:
    """Return this rank's part `[.., k, ..]` of a replicated tensor `[.., n k, ..]`."""
    return apply_along("own_part", x, joint(resolve(axis)), along("own_part", x, dim))


def mark_invariant(x: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Mark equal copies on the ranks of `axes` as one replicated value, so that the ranks share one gradient."""
    return apply_along("mark_invariant", x, axes, NoOptions())
