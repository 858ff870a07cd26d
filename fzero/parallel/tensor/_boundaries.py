"""The ends of a parallel layer: where a replicated value meets parts of the weights, and where results are one again.

`enter` is Megatron's f and `leave` its g (arXiv:1909.08053). With `sequence` ranks hold parts of the sequence between
the layers, and the two gather and cut it (arXiv:2205.05198). All are the identity where the axis is not bound.
"""

import torch

from fzero.axes import Axis, averaged_axes, axis_size, lookup, where_bound
from fzero.collectives import Along, Whole, apply_along, dimension

__all__ = ["SEQUENCE", "along", "cut", "enter", "join", "leave"]

SEQUENCE = -2  # the dimension of tokens: [.., tokens, width]


def along(name: str, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Apply a row of the table that cuts or joins a tensor along a dimension, where the axis is bound."""
    return apply_along(name, x, _bound(axis), Along(dimension(name, x, dim) - x.ndim))


def _bound(axis: str) -> list[Axis]:
    """Return the axis, if it is bound, and check that its ranks have one loss.

    Raises:
        ValueError: if the step averages over it. What is split would get a gradient n times too small.
    """
    averaged = averaged_axes()
    if axis in averaged and axis_size(axis) > 1:
        others = tuple([name for name in averaged if name != axis])
        wanted = f"axis={others}" if others else f"axis='dp' of fzero.mesh(dp=1, {axis}={axis_size(axis)})"
        raise ValueError(
            f"axis={axis!r}: its ranks compute one loss together, and the step averages over it, "
            f"fzero.shard(axis={averaged}): name the axes of the data alone, {wanted}"
        )
    return [lookup(bound) for bound in where_bound(axis)]


def enter(x: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Hand a value to all ranks along an axis, each of which goes on with its own part of a layer.

    Call it once for several products of one value: each call is a sum, or a gather, of its own. A replicated weight
    that is used on parts, such as that of a norm on parts of the sequence, enters too.

    Args:
        x: a replicated tensor; with `sequence` this rank's part `[.., t / n, d]` of the tokens.
        axis: the name of the axis. Where none of that name is bound this is the identity.
        sequence: whether x is cut along the sequence.

    Returns:
        `x`; with `sequence` `[.., t, d]`, gathered. The transpose sums the ranks' gradients: an all_reduce, or with
        `sequence` a reduce_scatter.

    Raises:
        TypeError: if `axis` is no name.
        ValueError: if the step averages over the axis. In a simulation also if x differs by rank, and `sequence` does
            not say so.

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
        # ranks' parts lie one after the other, so each product would make, and keep, a copy of its own
        return along("all_gather", x, axis, SEQUENCE).contiguous()
    return apply_along("pvary", x, _bound(axis), Whole())


def leave(x: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Sum the ranks' partial results of a layer into one value again.

    Args:
        x: `[.., t, d]`, this rank's part of the sum.
        axis: the name of the axis. Where none of that name is bound this is the identity.
        sequence: whether each rank is to have a part of the tokens in place of all.

    Returns:
        The sum, replicated; with `sequence` this rank's part `[.., t / n, d]` of it. The transpose hands the gradient
        on, with `sequence` gathered.

    Raises:
        TypeError: if `axis` is no name.
        ValueError: if the tokens do not divide by n, with `sequence`.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> x = fzero.PerRank(torch.tensor([[[1.0], [2.0]], [[10.0], [20.0]]]))  # [2 ranks, 2 tokens, 1]
        >>> fzero.mesh(tp=2).spmd(tp.leave)(x).mT
        tensor([[11., 22.]])
    """
    if sequence:
        _check_length(x, axis, SEQUENCE)
        return along("psum_scatter", x, axis, SEQUENCE)
    return apply_along("psum_invariant", x, _bound(axis), Whole())


def cut(x: torch.Tensor, axis: str = "tp", *, dim: int = SEQUENCE) -> torch.Tensor:
    """Take this rank's part of a replicated tensor `[.., n k, ..]`: `[.., k, ..]`.

    The transpose gathers the ranks' gradients.

    Args:
        x: a replicated tensor.
        axis: the name of the axis. Where none of that name is bound this is the identity.
        dim: the dimension of size n k; by default that of the tokens, the last but one.

    Raises:
        TypeError: if `axis` is no name.
        ValueError: if the dimension does not divide by n; in a simulation, if x differs by rank.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> fzero.mesh(tp=2).spmd(lambda x: fzero.PerRank(tp.cut(x, dim=0)))(torch.arange(4)).value
        tensor([[0, 1],
                [2, 3]])
    """
    _check_length(x, axis, dim)
    return along("own_part_invariant", x, axis, dim)


def join(x: torch.Tensor, axis: str = "tp", *, dim: int = SEQUENCE) -> torch.Tensor:
    """Concatenate the ranks' parts `[.., k, ..]` into one value `[.., n k, ..]`: the inverse of `cut`.

    The transpose is `cut`: it communicates nothing.

    Args:
        x: this rank's part.
        axis: the name of the axis. Where none of that name is bound this is the identity.
        dim: the dimension of size k; by default that of the tokens, the last but one.

    Raises:
        TypeError: if `axis` is no name.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> fzero.mesh(tp=2).spmd(lambda x: tp.join(tp.cut(x, dim=0), dim=0))(torch.arange(4))
        tensor([0, 1, 2, 3])
    """
    return along("all_gather_invariant", x, axis, dim)


def _check_length(x: torch.Tensor, axis: str, dim: int) -> None:
    dim, n = dimension("a cut", x, dim), axis_size(where_bound(axis))
    if x.shape[dim] % n:
        raise ValueError(
            f"dimension {dim} of a tensor {list(x.shape)} is to be cut in {n} equal parts along {axis!r}, and "
            f"{x.shape[dim]} does not divide by {n}: pad the sequences, or take another size of the axis"
        )
