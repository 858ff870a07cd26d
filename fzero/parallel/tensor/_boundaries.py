"""The boundaries of split layers: there a replicated input meets split weights, or partial results meet.

`enter` is Megatron's f, and `leave` its g (arXiv:1909.08053). With `sequence` each rank holds part of the tokens
between the layers: `enter` gathers them, and `leave` scatters them (arXiv:2205.05198). If the axis is not bound, these
functions are the identity.
"""

import torch

from fzero._tracebacks import api_boundary
from fzero.axes import Axis, averaged_axes, axis_if_bound, axis_size, bound_axis
from fzero.collectives import DimOptions, NoOptions, apply_along, check_dim

__all__ = ["all_gather", "along", "enter", "leave", "scatter"]

_SEQUENCE = -2  # the dimension of tokens: [.., tokens, width]


def along(name: str, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Apply a collective that splits or joins a tensor along a dimension, over the axis if it is bound."""
    return apply_along(name, x, _checked_axes(axis), DimOptions(check_dim(name, x, dim) - x.ndim))


def _checked_axes(axis: str) -> list[Axis]:
    """Return the axis if it is bound, after a check that its ranks share one loss.

    Raises:
        ValueError: if the step averages over the axis: gradients of split leaves would be n times too small.
    """
    averaged = averaged_axes()
    if axis in averaged and axis_size(axis) > 1:
        rest = tuple([name for name in averaged if name != axis])
        expected = f"axis={rest}" if rest else f"axis='dp' of fzero.mesh(dp=1, {axis}={axis_size(axis)})"
        raise ValueError(
            f"axis={axis!r}: its ranks compute one loss together, but the step averages over it, "
            f"fzero.shard(axis={averaged}): name only the data-parallel axes, {expected}"
        )
    return [bound_axis(bound) for bound in axis_if_bound(axis)]


@api_boundary
def enter(x: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Bring a replicated value into a layer that is split over an axis.

    Call it once for several products with one value, since each call costs a sum or a gather of its own. A replicated
    weight that is applied to parts must enter too, such as the weight of a norm on parts of the sequence.

    Args:
        x: a replicated tensor; with `sequence` this rank's part `[.., t / n, d]` of the tokens.
        axis: the name of the axis. If no axis of this name is bound, `enter` is the identity.
        sequence: whether x is split along the sequence.

    Returns:
        `x`; with `sequence` the gathered tokens `[.., t, d]`. The transpose sums the ranks' gradients by an all_reduce,
        or with `sequence` by a reduce_scatter.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if the step averages over the axis. In a simulation also if x differs by rank without `sequence`.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> def mlp(x, up, down):
        ...     return tp.leave(torch.tanh(tp.enter(x) @ up) @ down)
        >>> x, up, down = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 3)
        >>> parts = fzero.PerRank(torch.stack(up.chunk(2, 1))), fzero.PerRank(torch.stack(down.chunk(2, 0)))
        >>> torch.equal(fzero.mesh(tp=2).spmd(mlp)(x, *parts), mlp(x, up, down))
        True
    """
    if sequence:
        # The ranks' parts are gathered one after the other. Without this copy, each product would make and keep one.
        return along("all_gather", x, axis, _SEQUENCE).contiguous()
    return apply_along("pvary", x, _checked_axes(axis), NoOptions())


@api_boundary
def leave(x: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Sum the ranks' partial results of a layer into one value.

    Args:
        x: `[.., t, d]`, this rank's part of the sum.
        axis: the name of the axis. If no axis of this name is bound, `leave` is the identity.
        sequence: whether each rank receives only its part of the tokens.

    Returns:
        The sum, replicated; with `sequence` this rank's part `[.., t / n, d]` of it. The transpose passes on the
        gradient, which it gathers with `sequence`.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if `sequence` is set and the number of tokens does not divide by n.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> x = fzero.PerRank(torch.tensor([[[1.0], [2.0]], [[10.0], [20.0]]]))  # [2 ranks, 2 tokens, 1]
        >>> fzero.mesh(tp=2).spmd(tp.leave)(x).mT
        tensor([[11., 22.]])
    """
    if sequence:
        _check_length(x, axis, _SEQUENCE)
        return along("psum_scatter", x, axis, _SEQUENCE)
    return apply_along("psum_invariant", x, _checked_axes(axis), NoOptions())


@api_boundary
def scatter(x: torch.Tensor, axis: str = "tp", *, dim: int = _SEQUENCE) -> torch.Tensor:
    """Return this rank's part `[.., k, ..]` of a replicated tensor `[.., n k, ..]`.

    The transpose gathers the ranks' gradients.

    Args:
        x: a replicated tensor.
        axis: the name of the axis. If no axis of this name is bound, `scatter` is the identity.
        dim: the dimension of size n k; by default the last but one, that of the tokens.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if the dimension does not divide by n. In a simulation also if x differs by rank.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> fzero.mesh(tp=2).spmd(lambda x: fzero.PerRank(tp.scatter(x, dim=0)))(torch.arange(4)).value
        tensor([[0, 1],
                [2, 3]])
    """
    _check_length(x, axis, dim)
    return along("own_part_invariant", x, axis, dim)


@api_boundary
def all_gather(x: torch.Tensor, axis: str = "tp", *, dim: int = _SEQUENCE) -> torch.Tensor:
    """Concatenate the ranks' parts `[.., k, ..]` into one value `[.., n k, ..]`: the inverse of `scatter`.

    The transpose is `scatter`, which communicates nothing.

    Args:
        x: this rank's part.
        axis: the name of the axis. If no axis of this name is bound, `all_gather` is the identity.
        dim: the dimension of size k; by default the last but one, that of the tokens.

    Raises:
        TypeError: if `axis` is not a name.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> fzero.mesh(tp=2).spmd(lambda x: tp.all_gather(tp.scatter(x, dim=0), dim=0))(torch.arange(4))
        tensor([0, 1, 2, 3])
    """
    return along("all_gather_invariant", x, axis, dim)


def _check_length(x: torch.Tensor, axis: str, dim: int) -> None:
    dim, n = check_dim("fzero.parallel.tensor.scatter", x, dim), axis_size(axis_if_bound(axis))
    if x.shape[dim] % n:
        raise ValueError(
            f"dimension {dim} of a tensor {list(x.shape)} is split into {n} equal parts along {axis!r}, but "
            f"{x.shape[dim]} does not divide by {n}: pad the sequences, or change the size of the axis"
        )
