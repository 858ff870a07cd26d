"""Edges of neighbours: the tokens before and after each part of a sequence, and a causal convolution of them."""

import torch
import torch.nn.functional as F

from fzero._arguments import is_int
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_size, bound_axis, index_on
from fzero.collectives import PermutationOptions, apply, check_dim
from fzero.parallel.context._layout import check_tokens_split

__all__ = ["causal_conv1d", "halo", "neighbours"]


@api_boundary
def halo(x: torch.Tensor, before: int, after: int = 0, *, axis: str = "cp", dim: int = 1) -> list[torch.Tensor]:
    """Return the parts of a sequence that this rank holds, each with the tokens before and after it.

    The neighbours send the edges of their parts. A function that reads a token's neighbours, such as a convolution
    without padding, is applied to each part, and its results are concatenated.

    Args:
        x: `[.., t, ..]`: this rank's tokens, in the order of `positions`.
        before: the number of tokens before each part.
        after: the number of tokens after each part.
        axis: the axis along which tokens are split. If no axis of this name is bound, this rank holds all tokens.
        dim: the dimension of tokens.

    Returns:
        The early and the late part, each `[.., before + t / 2 + after, ..]`; one part of all t tokens if the axis has
        one rank. Tokens before a sequence and after it are zeros. The transpose adds the gradients of edges to those
        of the tokens.

    Raises:
        ValueError: if `x` has no dimension `dim`, or a number is negative. Also if a part has fewer tokens than
            `before` or `after`, or t is odd and the axis has several ranks.

    Example:
        >>> import fzero
        >>> from fzero.parallel import context
        >>> mesh = fzero.mesh(dp=1, cp=2)
        >>> own = context.split(mesh, torch.arange(1, 9).view(1, 8))
        >>> mesh.spmd(lambda x: fzero.PerRank(torch.cat(context.halo(x, 1), 0)))(own).value
        tensor([[[0, 1, 2],
                 [6, 7, 8]],
        <BLANKLINE>
                [[2, 3, 4],
                 [4, 5, 6]]])
    """
    dim = check_dim("fzero.parallel.context.halo", x, dim)
    n = axis_size(axis_if_bound(axis))
    _check_sizes(x, before, after, dim, n)
    check_tokens_split(axis, x.shape[dim])
    if n == 1:
        return [F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])]
    early, late = x.chunk(2, dim)
    own_axis, size = bound_axis(axis), early.shape[dim]

    def tail(part: torch.Tensor) -> torch.Tensor:
        return part.narrow(dim, size - before, before)

    def head(part: torch.Tensor) -> torch.Tensor:
        return part.narrow(dim, 0, after)

    def shift(part: torch.Tensor, step: int) -> torch.Tensor:
        if not before + after:
            return part
        pairs = tuple([(r, r + step) for r in range(n) if 0 <= r + step < n])
        return apply(own_axis.token, "ppermute", own_axis.binding, PermutationOptions(pairs), part)[0]

    # early parts lie on the ranks in the order of the sequence, and late parts in the reverse order
    up = shift(torch.cat([tail(early), head(late)], dim), 1)
    down = shift(torch.cat([tail(late), head(early)], dim), -1)
    is_last = index_on(x.device, own_axis.token, own_axis.binding) == n - 1  # it holds both parts of the middle
    before_early, after_late = up.split([before, after], dim)
    before_late, after_early = down.split([before, after], dim)
    before_late = torch.where(is_last, tail(early), before_late)
    after_early = torch.where(is_last, head(late), after_early)
    return [torch.cat([before_early, early, after_early], dim), torch.cat([before_late, late, after_late], dim)]


def _check_sizes(x: torch.Tensor, before: int, after: int, dim: int, n: int) -> None:
    tokens = x.shape[dim]
    if n > 1 and tokens % 2:
        raise ValueError(
            f"x is {list(x.shape)}: expected an even number of tokens in dimension {dim}, since each rank holds two "
            "equal parts of a sequence"
        )
    for name, count in ("before", before), ("after", after):
        if not is_int(count) or count < 0 or (n > 1 and count > tokens // 2):
            limit_text = f" and at most {tokens // 2}, the tokens of a part" if n > 1 else ""
            raise ValueError(f"{name}={count!r}: expected an int of at least 0{limit_text}")


@api_boundary
def neighbours(
    x: torch.Tensor,
    before: int,
    after: int = 0,
    *,
    documents: torch.Tensor | None = None,
    axis: str = "cp",
    dim: int = 1,
) -> list[torch.Tensor]:
    """Return the neighbours of each token at each distance, within its document: what a convolution combines.

    It exchanges edges as `halo` does. A token shift is one of its results, and a convolution is a sum of them.

    Args:
        x: `[.., t, ..]`: this rank's tokens, in the order of `positions`.
        before: the largest distance of a neighbour before.
        after: the largest distance of a neighbour after.
        documents: ints, the sizes of the first dimensions of `x` and then t, such as `[b, t]`: a neighbour in another
            document is zero. None for one document.
        axis: the axis along which tokens are split. If no axis of this name is bound, this rank holds all tokens.
        dim: the dimension of tokens.

    Returns:
        `before + 1 + after` tensors of the shape of `x`. Tensor i has for each token the one `before - i` before it;
        zeros where the sequence or the document has none.

    Raises:
        ValueError: as `halo`, and if `documents` do not have one number for each token.

    Example:
        >>> from fzero.parallel import context
        >>> x, documents = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1]])
        >>> [y.tolist() for y in context.neighbours(x, 1, documents=documents)]
        [[[0, 1, 0, 3]], [[1, 2, 3, 4]]]
    """
    dim = check_dim("fzero.parallel.context.neighbours", x, dim)
    if documents is not None:
        _check_documents(x, documents, dim)
    parts = halo(x, before, after, axis=axis, dim=dim)
    if documents is None:
        return [_concatenate_slices(parts, i, before + after, dim) for i in range(before + 1 + after)]
    numbers = halo(documents, before, after, axis=axis, dim=documents.ndim - 1)
    neighbour_slices = []
    for i in range(before + 1 + after):
        y = _concatenate_slices(parts, i, before + after, dim)
        are_same_document = _concatenate_slices(numbers, i, before + after, documents.ndim - 1) == documents
        broadcast = are_same_document.reshape(
            *are_same_document.shape[:-1],
            *[1] * (dim + 1 - are_same_document.ndim),
            x.shape[dim],
            *[1] * (x.ndim - 1 - dim),
        )
        neighbour_slices.append(y if i == before else torch.where(broadcast, y, 0))
    return neighbour_slices


def _concatenate_slices(parts: list[torch.Tensor], start: int, further: int, dim: int) -> torch.Tensor:
    """Concatenate the slices of parts that begin at an element, each `further` elements shorter than its part."""
    return torch.cat([part.narrow(dim, start, part.shape[dim] - further) for part in parts], dim)


def _check_documents(x: torch.Tensor, documents: torch.Tensor, dim: int) -> None:
    lead = documents.ndim - 1
    if not 0 <= lead <= dim or list(documents.shape) != [*x.shape[:lead], x.shape[dim]]:
        raise ValueError(
            f"documents have the shape {list(documents.shape)}: expected {[x.shape[0], x.shape[dim]]}, one number for "
            f"each token of x, which is {list(x.shape)} with its tokens in dimension {dim}"
        )


@api_boundary
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    documents: torch.Tensor | None = None,
    axis: str = "cp",
) -> torch.Tensor:
    """Convolve each channel with the tokens before: the short convolution of Mamba, LFM2 and others.

    Args:
        x: `[b, channels, t]`: this rank's tokens, in the order of `positions`.
        weight: `[channels, width]`: the last element is the factor of a token itself.
        bias: `[channels]`, or None.
        documents: ints `[b, t]`: tokens of another document count as zeros; None for one document.
        axis: the axis along which tokens are split. If no axis of this name is bound, this rank holds all tokens.

    Returns:
        `[b, channels, t]`, this rank's tokens.

    Raises:
        ValueError: if shapes do not match, or a part has fewer tokens than `width - 1`.

    Example:
        >>> from fzero.parallel import context
        >>> context.causal_conv1d(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]]))
        tensor([[[ 1., 12., 23.]]])
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)}, and weight {list(weight.shape)}: expected [batch, channels, tokens] and "
            "[channels, width]"
        )
    if documents is not None:
        _check_documents(x, documents, 2)
    if not x.numel():  # torch's kernels need a token
        return torch.zeros_like(x)
    channels, width = weight.shape
    n = axis_size(axis_if_bound(axis))
    if n > 1 and width - 1 > x.shape[2] // 2:
        raise ValueError(
            f"x is {list(x.shape)}: a part of its sequence has {x.shape[2] // 2} tokens on each of {n} ranks, and "
            f"weight {list(weight.shape)} reads {width - 1} tokens before each; take longer sequences or fewer ranks"
        )
    if documents is None:
        parts = halo(x, width - 1, axis=axis, dim=2)
        return torch.cat([F.conv1d(part, weight.unsqueeze(1), bias, groups=channels) for part in parts], 2)
    taps = neighbours(x, width - 1, documents=documents, axis=axis, dim=2)
    y = torch.stack([tap * weight[:, i : i + 1] for i, tap in enumerate(taps)]).sum(0)
    return y if bias is None else y + bias.unsqueeze(-1)
