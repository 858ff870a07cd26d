"""Sums and gathers over ranks as rows of the table: how one rank, and all ranks of a simulation, compute them."""

import torch

from fzero._torch import c10d
from fzero._torch.types import Tensors
from fzero.axes import Binding
from fzero.collectives import gloo
from fzero.collectives._table import COPIES, INVARIANT, DimOptions, LinearMap, NoOptions, RankOperation, add_rows

__all__ = ["ALL_GATHER", "REDUCE_SCATTER", "group_all_gather", "group_psum", "group_psum_scatter"]


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
    return [_parts(xs[0].sum(0, dtype=xs[0].dtype), n, options.dim)]


def _parts(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """View `[.., n k, ..]` as `[n, .., k, ..]`; `dim` is counted from the end."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim - 1, 0)


def _all_ranks_own_part(n: int, options: DimOptions, xs: Tensors) -> Tensors:
    parts = _parts(xs[0], n, options.dim)  # [n parts, n ranks, .., k, ..]
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


def _local_same(binding: Binding, options: NoOptions, xs: Tensors) -> Tensors:
    return [xs[0].view_as(xs[0])]


_ALL_REDUCE = RankOperation(
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
_ALL_REDUCE_STARTED = _ALL_REDUCE._replace(
    local=lambda binding, options, xs: [
        c10d.all_reduce(xs[0].contiguous(), "sum", binding.group) if xs[0].numel() else xs[0].clone()
    ]
)
_ALL_GATHER_STARTED = ALL_GATHER._replace(
    local=lambda binding, options, xs: [
        c10d.all_gather_into_tensor(xs[0].contiguous(), binding.size, binding.group) if xs[0].numel() else xs[0].clone()
    ]
)
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
_OWN_PART = RankOperation(
    "",
    all_ranks=_all_ranks_own_part,
    uniform=lambda n, options, xs: [_parts(xs[0], n, options.dim)],
    local=_local_own_part,
)
_PAD = RankOperation("", all_ranks=_all_ranks_pad, local=_local_pad)


add_rows(
    LinearMap("psum", _ALL_REDUCE, "psum", output=COPIES),
    LinearMap("start_psum", _ALL_REDUCE_STARTED, "", output=COPIES),
    LinearMap("start_all_gather", _ALL_GATHER_STARTED, "", output=COPIES),
    LinearMap("psum_invariant", _ALL_REDUCE, "pvary", output=INVARIANT),
    LinearMap("pvary", _VARY, "psum_invariant", input=INVARIANT),
    LinearMap("all_gather", ALL_GATHER, "psum_scatter", output=COPIES),
    LinearMap("psum_scatter", REDUCE_SCATTER, "all_gather"),
    LinearMap("all_gather_invariant", ALL_GATHER, "own_part_invariant", output=INVARIANT),
    LinearMap("own_part_invariant", _OWN_PART, "all_gather_invariant", input=INVARIANT),
    LinearMap("own_part", _OWN_PART, "own_part_padded"),  # in the joint map: the ranks' inputs may differ
    LinearMap("own_part_padded", _PAD, "own_part"),
    # from the joint map to one value: equal copies become one value, whose gradient they share
    LinearMap("mark_invariant", _JOIN_COPIES, "share_gradient", input=COPIES, output=INVARIANT),
    LinearMap("share_gradient", _DIVIDE, "mark_invariant", input=INVARIANT, output=INVARIANT),
)
