"""The order of tokens: each of n ranks holds an early and a late part of every sequence.

A sequence is divided into 2 n parts. Rank r holds the parts r and 2 n - 1 - r, in this order. So every rank has the
same work in causal attention, where late tokens attend to more tokens than early ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fzero import tree
from fzero._arguments import is_int
from fzero._tracebacks import api_boundary
from fzero.axes import (
    AxisName,
    BatchSplit,
    axis_if_bound,
    axis_size,
    batch_splits,
    bound_axis,
    index_on,
    sequence_lengths,
)
from fzero.collectives import NO_AXIS, check_dim
from fzero.collectives import all_gather as all_gather_in_rank_order
from fzero.ranks import Mesh
from fzero.sharding import PerRank, is_box, leaf_axes
from fzero.tree import Tree

__all__ = [
    "all_gather",
    "check_tokens_split",
    "compute_positions",
    "from_rank_order",
    "positions",
    "shift_labels",
    "split",
    "to_rank_order",
]


def check_tokens_split(axis: str, tokens: int) -> None:
    """Check that the arguments of the running program were not split otherwise than into tokens over this axis.

    Nothing is known of values that ranks loaded. A program may take its tokens of whole sequences by itself.

    Args:
        axis: the axis along which tokens are split, bound or not.
        tokens: the number of this rank's tokens.

    Raises:
        ValueError: if `mesh.split` divided the samples of every batch over the axis, or if `split` divided the tokens
            over another axis or number of ranks. Also if `tokens` are those of whole sequences.
    """
    splits, ranks = batch_splits(), axis_size(axis_if_bound(axis))
    for split in splits:
        if split is not None and split.tokens is not None and split.tokens != (axis, ranks):
            name, parts = split.tokens
            if name != axis and parts > 1:
                raise ValueError(
                    f"axis={axis!r}: the batch's tokens are split over {name!r}: pass axis={name!r} to functions of "
                    f"fzero.parallel.context, or split the batch by context.split(mesh, batch, axis={axis!r})"
                )
            if max(parts, ranks) > 1:
                raise ValueError(
                    f"axis={axis!r}: its {ranks} ranks were given a batch whose tokens are split over {parts} ranks of "
                    f"{name!r}: split it with the mesh of the step, context.split(step.mesh, batch, axis={axis!r})"
                )
    if ranks == 1:
        return
    if splits and all(split is not None and axis in split.samples for split in splits):
        raise ValueError(
            f"axis={axis!r}: the batch was split into samples over it, and its ranks hold other sequences; split the "
            f"tokens of each sequence by fzero.parallel.context.split(mesh, batch, axis={axis!r}) in place of "
            "mesh.split(batch), and give fzero.data.batches an axis= without it"
        )
    lengths = sequence_lengths()
    is_whole = all(split is not None and split.tokens is None and axis not in split.samples for split in splits)
    if is_whole and tokens in lengths and max(lengths) < ranks * tokens:
        raise ValueError(
            f"axis={axis!r}: its {ranks} ranks hold the same {tokens} tokens, those of whole sequences: split them by "
            f"fzero.parallel.context.split(mesh, batch, axis={axis!r}), which takes batches of fzero.data.batches too; "
            f"or take this rank's, x[:, context.positions({tokens} // {ranks})]"
        )


def _parts_in_rank_order(ranks: int) -> list[int]:
    """List the parts of a sequence in the order in which the ranks hold them.

    Example:
        >>> _parts_in_rank_order(2)
        [0, 3, 1, 2]
    """
    return [part for rank in range(ranks) for part in (rank, 2 * ranks - 1 - rank)]


def to_rank_order(x: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Reorder a sequence from the order of its positions to that of the ranks, each of which then holds one slice."""
    return _reorder_tokens(x, _parts_in_rank_order(ranks), dim)


def from_rank_order(x: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Reorder a sequence from the order of the ranks to that of its positions: the inverse of `to_rank_order`."""
    order = _parts_in_rank_order(ranks)
    return _reorder_tokens(x, [order.index(part) for part in range(len(order))], dim)


def _reorder_tokens(x: torch.Tensor, order: list[int], dim: int) -> torch.Tensor:
    if len(order) == 2 or not x.shape[dim]:  # one rank holds both parts in their order
        return x
    parts = x.split(x.shape[dim] // len(order), dim)  # not an index, whose gradient would be summed element by element
    return torch.cat([parts[i] for i in order], dim)


def compute_positions(rank: torch.Tensor, ranks: int, tokens: int) -> torch.Tensor:
    """Return the positions of a rank's tokens: int64 `[.., tokens]` for ranks `[..]`."""
    if ranks == 1:
        return torch.arange(tokens, device=rank.device).expand(*rank.shape, tokens)
    half = torch.arange(tokens // 2, device=rank.device)
    starts = torch.stack([rank, 2 * ranks - 1 - rank], -1) * (tokens // 2)
    return (starts.unsqueeze(-1) + half).flatten(-2)


@api_boundary
def positions(tokens: int, axis: str = "cp", *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the position in its sequence of each of this rank's tokens.

    Models of transformers take it as `position_ids`. Rotary and learned embeddings of positions read it.

    Args:
        tokens: the number of this rank's tokens of a sequence.
        axis: the axis along which tokens are split. If no axis of this name is bound, this rank holds all tokens.
        device: the device of the result; by default the CPU.

    Returns:
        int64 `[tokens]`; it differs by rank.

    Raises:
        ValueError: if the axis has several ranks and `tokens` is odd.

    Example:
        >>> import fzero
        >>> from fzero.parallel import context
        >>> fzero.mesh(cp=2).spmd(lambda: fzero.PerRank(context.positions(4)))().value
        tensor([[0, 1, 6, 7],
                [2, 3, 4, 5]])
    """
    bound = axis_if_bound(axis)
    if not is_int(tokens) or tokens < 0 or (bound and axis_size(axis) > 1 and tokens % 2):
        raise ValueError(
            f"tokens={tokens!r}: expected an even int, since each rank holds two equal parts of a sequence, as "
            "fzero.parallel.context.split makes them"
        )
    own_axis = bound_axis(axis) if bound else NO_AXIS
    check_tokens_split(axis, tokens)
    return compute_positions(
        index_on(torch.device(device or "cpu"), own_axis.token, own_axis.binding), own_axis.size, tokens
    )


@api_boundary
def all_gather(x: torch.Tensor, axis: str = "cp", *, dim: int = 1) -> torch.Tensor:
    """Concatenate the tokens of all ranks in the order of their positions: the inverse of `split` along one axis.

    Each rank then holds whole sequences, as `fzero.predict(step, f, axis="dp")` wants them. Padding is part of them.

    Args:
        x: `[.., t, ..]`: a value for each of this rank's t tokens, such as logits.
        axis: the axis along which tokens are split. If no axis of this name is bound, this rank holds all tokens.
        dim: the dimension of tokens.

    Returns:
        `[.., n t, ..]`, equal on the n ranks of the axis. Its transpose sums, as that of `collectives.all_gather`.

    Raises:
        ValueError: if `x` has no dimension `dim`, or its size is odd and the axis has several ranks.

    Example:
        >>> import fzero
        >>> from fzero.parallel import context
        >>> mesh = fzero.mesh(cp=2)
        >>> own = context.split(mesh, torch.arange(8).view(1, 8))
        >>> mesh.spmd(lambda x: context.all_gather(2 * x))(own)
        tensor([[ 0,  2,  4,  6,  8, 10, 12, 14]])
    """
    dim = check_dim("fzero.parallel.context.all_gather", x, dim)
    check_tokens_split(axis, x.shape[dim])
    if not axis_if_bound(axis):
        return x
    n = axis_size(axis)
    if n > 1 and x.shape[dim] % 2:
        raise ValueError(
            f"x is {list(x.shape)}: expected an even number of tokens in dimension {dim}, since each rank holds two "
            "equal parts of a sequence"
        )
    return from_rank_order(all_gather_in_rank_order(x, axis, dim=dim), n, dim)


_Dims = int | Mapping[str, int | None]


@api_boundary
def split(
    mesh: Mesh,
    batch: Tree,
    *,
    axis: str = "cp",
    dims: _Dims = 1,
    batch_axis: AxisName = None,
    pad: float | Mapping[str, float] | None = None,
) -> PerRank:
    """Split a global batch: samples over the axes of the data, and the tokens of each sequence over one axis.

    It takes the place of `mesh.split`. Each rank receives an early and a late part of every sequence (see `positions`).
    Labels are split like tokens, so shift them before: `shift_labels`. Of a batch whose samples are split already, as
    `fzero.data.batches(.., axis="dp")` yields, it splits the tokens.

    Args:
        mesh: the mesh.
        batch: a tree of tensors `[samples, .., tokens, ..]`, the same on every process; or a `PerRank` of such a tree,
            equal on the ranks of `axis`.
        axis: the axis over which tokens are split.
        dims: the dimension of tokens, or the dimension of each leaf by its path. `None` stands for a leaf without
            tokens, which all ranks of the axis share.
        batch_axis: the axes over which samples are split; by default all other axes. Ranks along axes that are not
            named get the same part, as in `mesh.split`: leave out "tp" and "pp".
        pad: the value that is appended to sequences whose length does not divide by twice the number of ranks. For
            several such leaves it is the value of each by its path. Labels need the value that the loss ignores.

    Returns:
        A `PerRank` of tensors whose samples and tokens are this rank's.

    Raises:
        ValueError: if `dims` names no dimension of a leaf, a number of samples does not divide, or a number of tokens
            does not and `pad` is None. The message names the leaf. Also if `pad` is one value for several leaves, if
            `batch` is a `PerRank` that differs along `axis`, or `batch_axis` is given with it.
        TypeError: if a leaf is not a tensor.

    Example:
        >>> import fzero
        >>> from fzero.parallel import context
        >>> mesh = fzero.mesh(dp=1, cp=2)
        >>> context.split(mesh, torch.arange(8).view(1, 8)).value
        tensor([[[0, 1, 6, 7]],
        <BLANKLINE>
                [[2, 3, 4, 5]]])
    """
    names = mesh.names(axis)
    sample_axes = (
        tuple([n for n in mesh.axis_names if n != axis]) if batch_axis is None else _sample_axes(mesh, batch_axis)
    )
    if len(names) != 1 or axis in sample_axes:
        raise ValueError(
            f"axis={axis!r}, batch_axis={batch_axis!r}: expected one axis for tokens, and others for samples"
        )
    is_loaded = False  # whether this process has only its own samples
    if isinstance(batch, PerRank):
        sample_axes, is_loaded = _loaded_sample_axes(mesh, batch, axis, batch_axis), not mesh.simulated
        batch = batch.value if is_loaded else tree.map_with_path(_join_samples, batch.value)
    axes = tuple([n for n in mesh.axis_names if n == axis or n in sample_axes])
    sizes = dict(mesh.shape)
    ranks = sizes[axis]
    _check_paths(batch, dims)
    padded = tree.map_with_path(
        lambda path, x: _pad_tokens(path, x, _value_at_path(dims, path), ranks, pad), batch, is_box
    )
    _check_pad(pad, batch, padded)

    def part(index: int) -> Any:
        rank = _rank_indices(index, axes, sizes, axis)
        rank = rank._replace(sample=0, samples=1) if is_loaded else rank
        return tree.map_with_path(
            lambda path, x: _rank_part(x, rank, ranks, _value_at_path(dims, path)), padded, is_box
        )

    divisors = [] if is_loaded else [sizes[n] for n in sample_axes]
    tree.map_with_path(lambda path, x: _check_samples(path, x, divisors, mesh), padded, is_box)
    box = mesh.local(part, axes)
    return PerRank(box.value, box.axes, BatchSplit(sample_axes, (axis, ranks)))


def _sample_axes(mesh: Mesh, batch_axis: AxisName) -> tuple[str, ...]:
    """Return the axes over which samples are split: none for `()`, where `Mesh.names` has all."""
    return mesh.names(batch_axis) if batch_axis is None or isinstance(batch_axis, str) or tuple(batch_axis) else ()


def _loaded_sample_axes(mesh: Mesh, batch: PerRank, axis: str, batch_axis: AxisName) -> tuple[str, ...]:
    """Return the axes over which the samples of a batch lie that ranks have loaded."""
    axes_by_box = leaf_axes(batch, mesh.axis_names)
    axes = axes_by_box[0] if axes_by_box else ()
    if axis in axes or batch_axis is not None:
        raise ValueError(
            f"batch is {batch!r}, batch_axis={batch_axis!r}: expected samples that are equal on the ranks of {axis!r}, "
            'such as those of fzero.data.batches(.., axis="dp"), and no batch_axis, which the box knows'
        )
    return axes


def _join_samples(path: str, x: torch.Tensor) -> torch.Tensor:
    """Join the samples of a simulation's ranks, `[N, b, ..]`, to those of the global batch, `[N b, ..]`."""
    if x.ndim < 2:
        raise ValueError(f"{tree.leaf_name('batch', path)} has no dimension of samples: pass it beside the batch")
    return x.flatten(0, 1)


class _RankIndices(NamedTuple):
    """A rank's index along the axis of tokens and among those of samples, and the number of parts of samples."""

    token: int
    sample: int
    samples: int


def _rank_indices(index: int, axes: Sequence[str], sizes: Mapping[str, int], axis: str) -> _RankIndices:
    """Return the indices of the rank with a number along some axes together."""
    token, sample, samples = 0, 0, 1
    for name in reversed(axes):
        index, i = divmod(index, sizes[name])
        if name == axis:
            token = i
        else:
            sample, samples = sample + i * samples, samples * sizes[name]
    return _RankIndices(token, sample, samples)


def _rank_part(x: torch.Tensor, rank: _RankIndices, ranks: int, dim: int | None) -> torch.Tensor:
    """Return a rank's samples of a leaf, and of each the rank's early and late tokens."""
    if not x.ndim:
        return x
    count = len(x) // rank.samples
    rank_samples = x.narrow(0, rank.sample * count, count)
    if dim is None or ranks == 1:
        return rank_samples
    halves = rank_samples.chunk(2 * ranks, dim)
    return torch.cat([halves[rank.token], halves[2 * ranks - 1 - rank.token]], dim)


def _value_at_path(values: Any, path: str) -> Any:
    return values.get(path, 1) if isinstance(values, Mapping) else values


def _check_paths(batch: Any, dims: _Dims) -> None:
    """Check that dims by path name leaves of the batch: else a misspelled one has no effect."""
    paths = tree.flatten_with_paths(batch)[0]
    if isinstance(dims, Mapping) and (unknown := [path for path in dims if path not in paths]):
        raise ValueError(f"dims={dims!r}: {unknown[0]!r} is not a leaf of the batch, which are {list(paths)}")


def _check_samples(path: str, x: torch.Tensor, sizes: list[int], mesh: Mesh) -> None:
    n = torch.Size(sizes).numel()
    if x.ndim and len(x) % n:
        raise ValueError(
            f"{tree.leaf_name('batch', path)} is {list(x.shape)}: dimension 0 must be divisible by the {n} parts of "
            f"samples of {mesh!r}"
        )


def _pad_tokens(path: str, x: Any, dim: int | None, ranks: int, pad: Any) -> torch.Tensor:
    """Append tokens, so that the sequence divides into two parts for each rank."""
    name = tree.leaf_name("batch", path)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}: expected a tensor")
    if dim is None:
        return x
    if x.ndim < 2:
        raise ValueError(
            f"{name} is {list(x.shape)}, and has no dimension of tokens besides that of samples: pass "
            f"dims={{{path!r}: None}} if it has no tokens"
        )
    if not is_int(dim) or not 1 <= dim < x.ndim:
        possible = "1" if x.ndim == 2 else f"1 to {x.ndim - 1}"
        raise ValueError(
            f"{name} is {list(x.shape)}, and its dimension of tokens is dims={dim!r}: expected {possible}, or "
            f"dims={{{path!r}: None}} for a leaf of samples without tokens"
        )
    padding = -x.shape[dim] % (2 * ranks if ranks > 1 else 1)
    if not padding:
        return x
    value = pad.get(path) if isinstance(pad, Mapping) else pad
    if value is None:
        raise ValueError(
            f"{name} is {list(x.shape)}: its {x.shape[dim]} tokens (dimension {dim}) do not divide into {2 * ranks} "
            f"parts, two for each of {ranks} ranks; pass pad={{{path!r}: value}}, or other lengths"
        )
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, padding], value=value)


def _check_pad(pad: Any, batch: Any, padded: Any) -> None:
    """Raise an error for one value that several leaves were padded by: it would be a label among labels."""
    paths, leaves, _ = tree.flatten_with_paths(batch)
    longer_leaves = [path for path, x, y in zip(paths, leaves, tree.flatten(padded)[0], strict=True) if x is not y]
    if len(longer_leaves) > 1 and not isinstance(pad, Mapping):
        values = ", ".join([f"{path!r}: {-100 if 'label' in path else pad}" for path in longer_leaves])
        raise ValueError(
            f"pad={pad!r} is one value for {len(longer_leaves)} leaves, and labels need the value that the loss "
            f"ignores: pass one for each, such as pad={{{values}}}"
        )


@api_boundary
def shift_labels(
    tokens: torch.Tensor, documents: torch.Tensor | None = None, *, ignore_index: int = -100
) -> torch.Tensor:
    """Return for each token its next one, which a language model learns to predict. Call it before `split`.

    Args:
        tokens: int64 `[.., tokens]`, whole sequences.
        documents: int64 `[.., tokens]`, the number of each token's document; None for one document.
        ignore_index: the label of the last token of a sequence and of each document.

    Returns:
        int64 `[.., tokens]`.

    Raises:
        ValueError: if `documents` does not have the shape of `tokens`, or a program calls it whose batch `split` made.

    Example:
        >>> from fzero.parallel import context
        >>> context.shift_labels(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]]))
        tensor([[   6, -100,    8, -100]])
    """
    if documents is not None and documents.shape != tokens.shape:
        raise ValueError(f"documents have the shape {list(documents.shape)}, and tokens {list(tokens.shape)}")
    for split in batch_splits():
        if split is not None and split.tokens is not None and split.tokens[1] > 1:
            raise ValueError(
                f"shift_labels: the batch's tokens are split over {split.tokens[0]!r}, and the next token of a part is "
                "on another rank: shift the labels of whole sequences, before context.split"
            )
    labels = F.pad(tokens[..., 1:], [0, 1], value=ignore_index)
    if documents is None:
        return labels
    last = documents[..., 1:] != documents[..., :-1]
    return torch.where(F.pad(last, [0, 1], value=True), ignore_index, labels)
