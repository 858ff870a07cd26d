"""Sums and gathers over ranks that compute one result together: a replicated value is one value, not a copy per rank.

If the ranks compute one loss together, each from its part of the weights, a replicated value is one value. `pvary`,
Megatron's f (arXiv:1909.08053), uses it on every rank; its transpose is the sum. Megatron's g, `psum_invariant`, sums
partial results; its transpose is `pvary`. With `psum` the gradients would be n times too large. JAX's
`shard_map(check_vma=True)` tells the two families apart by type. Here they have separate names, and a simulation checks
that invariant inputs are equal on all ranks.
"""

from collections.abc import Sequence

import torch

from fzero import tree
from fzero._torch.types import Tensors
from fzero._tracebacks import api_boundary
from fzero.axes import Axis, AxisName, Binding, join_axes, resolve_axes
from fzero.collectives._sums import (
    ALL_GATHER,
    ALL_REDUCE,
    OWN_PART,
    check_dim_options,
    check_number,
    check_tensor,
    summed_axes,
)
from fzero.collectives._table import COPIES, INVARIANT, LinearMap, NoOptions, RankOperation, add_rows, apply_along
from fzero.tree import Tree

__all__ = ["all_gather_invariant", "mark_invariant", "psum_invariant", "pvary"]


def _local_same(binding: Binding, options: NoOptions, xs: Tensors) -> Tensors:
    return [xs[0].view_as(xs[0])]


_VARY = RankOperation(
    "",
    all_ranks=lambda n, options, xs: [xs[0]],
    uniform=lambda n, options, xs: [xs[0].expand(n, *xs[0].shape)],
    local=_local_same,
)
_JOIN_COPIES = RankOperation(
    "",
    all_ranks=lambda n, options, xs: [xs[0][0]],
    uniform=lambda n, options, xs: [xs[0]],
    local=_local_same,
)
_DIVIDE = RankOperation(
    "",
    all_ranks=lambda n, options, xs: [xs[0][0] / n],
    uniform=lambda n, options, xs: [xs[0] / n],
    local=lambda binding, options, xs: [xs[0] / binding.size],
)


add_rows(
    LinearMap("psum_invariant", ALL_REDUCE, "pvary", output=INVARIANT),
    LinearMap("pvary", _VARY, "psum_invariant", input=INVARIANT),
    LinearMap("all_gather_invariant", ALL_GATHER, "own_part_invariant", output=INVARIANT),
    LinearMap("own_part_invariant", OWN_PART, "all_gather_invariant", input=INVARIANT),
    # from the joint map to one value: equal copies become one value, whose gradient they share
    LinearMap("mark_invariant", _JOIN_COPIES, "share_gradient", input=COPIES, output=INVARIANT),
    LinearMap("share_gradient", _DIVIDE, "mark_invariant", input=INVARIANT, output=INVARIANT),
)


@api_boundary
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
    axes = summed_axes(axis)
    return tree.map_with_path(
        lambda path, leaf: apply_along("pvary", check_tensor(path, leaf), axes, NoOptions()), x, tree.is_box
    )


@api_boundary
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
    axes = summed_axes(axis)
    return tree.map_with_path(
        lambda path, leaf: apply_along("psum_invariant", check_number(path, leaf), axes, NoOptions()), x, tree.is_box
    )


@api_boundary
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
    return apply_along(
        "all_gather_invariant",
        x,
        join_axes(resolve_axes(axis))[::-1],
        check_dim_options("all_gather_invariant", x, dim),
    )


def mark_invariant(x: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Mark equal copies on the ranks of `axes` as one replicated value, so that the ranks share one gradient."""
    return apply_along("mark_invariant", x, axes, NoOptions())
