"""Move tensors between ranks without summing: all_to_all, ppermute, broadcast."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import is_int
from fzero._torch import c10d
from fzero._torch.types import Tensors
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName, Binding, axis_size, join_axes, resolve_axes
from fzero.collectives._check_copies import note_call
from fzero.collectives._sums import check_dim, check_tensor, group_psum
from fzero.collectives._table import (
    COPIES,
    DimOptions,
    LinearMap,
    PermutationOptions,
    RankOperation,
    SourceOptions,
    add_rows,
    apply,
    apply_along,
)
from fzero.tree import Tree

__all__ = ["all_to_all", "broadcast", "group_all_to_all", "ppermute"]


def _all_ranks_ppermute(n: int, options: PermutationOptions, xs: Tensors) -> Tensors:
    source = {to: sender for sender, to in options.pairs}
    return [torch.stack([xs[0][source[r]] if r in source else torch.zeros_like(xs[0][0]) for r in range(n)])]


def _local_ppermute(binding: Binding, options: PermutationOptions, xs: Tensors) -> Tensors:
    """Send and receive at most one tensor, by an all_to_all with empty parts."""
    (x,), rank = xs, binding.rank
    send_counts = [int((rank, r) in options.pairs) for r in range(binding.size)]
    receive_counts = [int((r, rank) in options.pairs) for r in range(binding.size)]
    if x.numel() == 0:
        return [x.clone()]
    parts = x.unsqueeze(0).contiguous() if sum(send_counts) else x.new_empty((0, *x.shape))
    y = c10d.wait_tensor(c10d.all_to_all_single(parts, receive_counts, send_counts, binding.group))
    return [y.squeeze(0) if sum(receive_counts) else torch.zeros_like(x)]


def group_all_to_all(x: torch.Tensor, binding: Binding) -> torch.Tensor:
    """Send row r of a contiguous tensor `[n, ..]` to rank r, and return the received rows; an empty one is not sent."""
    if x.numel() == 0:
        return x.clone()
    ones = [1] * binding.size
    return c10d.wait_tensor(c10d.all_to_all_single(x, ones, ones, binding.group))


def _local_all_to_all(binding: Binding, options: DimOptions, xs: Tensors) -> Tensors:
    x = xs[0].movedim(options.dim, 0).contiguous()
    return [group_all_to_all(x, binding).movedim(0, options.dim)]


def _keep_for_source(xs: torch.Tensor, source: int) -> torch.Tensor:
    """Return the sum for the source, and zeros for all other ranks."""
    rank = torch.arange(len(xs), device=xs.device).reshape(-1, *[1] * (xs.ndim - 1))
    total = xs.sum(0, dtype=xs.dtype)
    return torch.where(rank == source, total, torch.zeros_like(total))


def _local_broadcast(binding: Binding, options: SourceOptions, xs: Tensors) -> Tensors:
    (x,) = xs
    if not x.numel():
        return [x.clone()]
    return [c10d.wait_tensor(c10d.broadcast(x.contiguous(), options.rank, binding.group))]


def _local_psum_to_one(binding: Binding, options: SourceOptions, xs: Tensors) -> Tensors:
    total = group_psum(xs[0], binding)
    return [total if binding.rank == options.rank else torch.zeros_like(total)]


add_rows(
    LinearMap(
        "ppermute",
        RankOperation(
            "ppermute",
            all_ranks=_all_ranks_ppermute,
            local=_local_ppermute,
            detail=lambda options, xs: f"({', '.join([f'{sender} to {to}' for sender, to in options.pairs])})",
        ),
        "ppermute",
        transpose_options=lambda options: PermutationOptions(tuple([(to, sender) for sender, to in options.pairs])),
    ),
    LinearMap(
        "all_to_all",
        RankOperation(
            "all_to_all",
            all_ranks=lambda n, options, xs: [
                xs[0].transpose(0, options.dim)
            ],  # [from, .., to, ..] -> [to, .., from, ..]
            local=_local_all_to_all,
            detail=lambda options, xs: f"({options.dim % xs[0].ndim})",
        ),
        "all_to_all",
    ),
    LinearMap(
        "broadcast",
        RankOperation(
            "broadcast",
            all_ranks=lambda n, options, xs: [xs[0][options.rank]],
            local=_local_broadcast,
            detail=lambda options, xs: f"({options.rank})",
        ),
        "psum_to_one",
        output=COPIES,
    ),
    LinearMap(
        "psum_to_one",
        RankOperation(
            "all_reduce",
            all_ranks=lambda n, options, xs: [_keep_for_source(xs[0], options.rank)],
            local=_local_psum_to_one,
            detail=lambda options, xs: f"({options.rank})",
        ),
        "broadcast",
    ),
)


@api_boundary
def all_to_all(x: torch.Tensor, axis: AxisName = None, *, split_dim: int = 0, concat_dim: int = 0) -> torch.Tensor:
    """Split a tensor into n equal parts along `split_dim`, send part r to rank r, and concatenate the received parts.

    Expert parallelism dispatches tokens with it (arXiv:2006.16668). It is JAX's `all_to_all(tiled=True)`.

    Args:
        x: a tensor `[.., n k, ..]`, of one shape on every rank.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.
        split_dim: the dimension of size n k.
        concat_dim: the dimension along which the received parts are concatenated, in rank order.

    Returns:
        A tensor whose `split_dim` is n times smaller and whose `concat_dim` is n times larger. The transpose is
        all_to_all with the two dimensions exchanged.

    Raises:
        ValueError: if an axis is not bound, a dimension does not exist, or its size is not divisible by n.

    Example:
        >>> import fzero, torch
        >>> x = fzero.PerRank(torch.tensor([[1, 2], [3, 4]]))
        >>> fzero.mesh(dp=2).spmd(lambda x: fzero.PerRank(fzero.collectives.all_to_all(x)))(x).value
        tensor([[1, 3],
                [2, 4]])
    """
    axes = join_axes(resolve_axes(axis))
    split, concat = check_dim("all_to_all", x, split_dim), check_dim("all_to_all", x, concat_dim)
    sizes = [a.size for a in axes]
    n = math.prod(sizes)
    if x.shape[split] % n:
        raise ValueError(
            f"all_to_all splits dimension {split} of a tensor {list(x.shape)} into {n} equal parts, "
            f"but {x.shape[split]} is not divisible by {n}; pad it"
        )
    if not axes:
        return x
    # [.., n k, ..] -> [to.., .., k, ..]: one dimension per axis, each exchanged by itself
    y = x.unflatten(split, (*sizes, x.shape[split] // n)).movedim(*_movedim_to_front(split, len(sizes)))
    for i, a in enumerate(axes):
        (y,) = apply(a.token, "all_to_all", a.binding, DimOptions(i - y.ndim), y)
    return y.flatten(0, len(sizes) - 1).movedim(0, concat).flatten(concat, concat + 1)


def _movedim_to_front(first: int, count: int) -> tuple[list[int], list[int]]:
    """Return the arguments of movedim that put `count` dimensions from `first` in front."""
    return list(range(first, first + count)), list(range(count))


@api_boundary
def ppermute(x: torch.Tensor, axis: AxisName = None, *, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send a tensor from rank to rank, as at the boundary of a pipeline stage or in a step of a ring.

    Args:
        x: a tensor of one shape on every rank.
        axis: the name of one axis; `None` for the axis of the running step.
        perm: pairs `(from, to)` of ranks along the axis. No rank sends twice, and none receives twice.

    Returns:
        The tensor that was sent to this rank, or zeros. The transpose sends in the other direction.

    Raises:
        ValueError: if the axis is not bound or is several axes, or `perm` lists a rank twice or a rank off the axis.

    Example:
        >>> import fzero, torch
        >>> ring = [(0, 1), (1, 2), (2, 0)]
        >>> f = lambda x: fzero.PerRank(fzero.collectives.ppermute(x, "dp", perm=ring))
        >>> fzero.mesh(dp=3).spmd(f)(fzero.PerRank(torch.tensor([10, 11, 12]))).value
        tensor([12, 10, 11])
    """
    check_dim("ppermute", x, 0, min_ndim=0)
    axes = resolve_axes(axis)
    if len(axes) > 1:
        raise ValueError(f"ppermute runs over one axis, but axis={axis!r} means {[a.name for a in axes]}: name one")
    n = axis_size(axis)
    pairs = _rank_pairs(perm, n)
    if not axes:
        return x if pairs else torch.zeros_like(x)
    return apply_along("ppermute", x, axes, PermutationOptions(pairs))


def _rank_pairs(perm: Any, n: int) -> tuple[tuple[int, int], ...]:
    """Check the argument `perm` of ppermute over n ranks, and return it as pairs of ints.

    Raises:
        ValueError: if it is no list of pairs of ranks, or a rank sends or receives twice.
    """
    pairs = list(perm) if isinstance(perm, Iterable) else perm
    expected = f"perm={pairs!r}: expected pairs (from, to) of ranks 0 to {n - 1}"
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{expected}, such as [(0, {n - 1})]")
    for verb, ranks in ("sends", [a for a, _ in pairs]), ("receives", [b for _, b in pairs]):
        if not all(is_int(r) and 0 <= r < n for r in ranks) or len(set(ranks)) != len(ranks):
            raise ValueError(f"{expected}, in which no rank {verb} twice")
    return tuple([(sender, to) for sender, to in pairs])


@api_boundary
def broadcast(x: Tree, axis: AxisName = None, *, source: int = 0) -> Tree:
    """Send one rank's tensor, or tree of tensors, to all ranks.

    Args:
        x: a tree of tensors, of one shape and dtype on every rank.
        axis: an axis name or a tuple of names; `None` for the axes of the running step. Outside any mesh, `None`
            makes this the identity.
        source: the rank whose values are sent, counted along the axis (along a tuple of axes the first is slowest).

    Returns:
        A tree of tensors, equal on all ranks. The transpose sums to the source, and gives all other ranks zeros.

    Raises:
        ValueError: if an axis is not bound, or `source` is not a rank along it.

    Example:
        >>> import fzero, torch
        >>> x = fzero.PerRank(torch.tensor([5, 6, 7]))
        >>> fzero.mesh(dp=3).spmd(lambda x: fzero.collectives.broadcast(x, source=1))(x)
        tensor(6)
    """
    n, axes = axis_size(axis), join_axes(resolve_axes(axis))
    if not is_int(source) or not 0 <= source < n:
        raise ValueError(f"source={source!r}: expected a rank, 0 to {n - 1}")

    def one(path: str, x: Any) -> torch.Tensor:
        x, rank = check_tensor(path, x), source
        for a in reversed(axes):
            rank, i = divmod(rank, a.size)
            (x,) = apply(a.token, "broadcast", a.binding, SourceOptions(i), x)
        return note_call("broadcast", axes, x)

    return tree.map_with_path(one, x, tree.is_box)
