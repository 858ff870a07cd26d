"""Dispatch: send tokens to experts and bring them back, each at a position.

Each expert has a capacity per sequence, so the dropped choices depend on the data and not on the mesh.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange

from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_size, tokens_axis
from fzero.collectives import all_to_all
from fzero.parallel.experts._load_balance import expert_capacity
from fzero.parallel.experts._routing import check_floating, count_choices
from fzero.parallel.experts._sum_rows import inverse, sum_rows, weighted_sum

__all__ = ["Positions", "assign_positions", "check_experts", "combine", "dispatch"]


class Positions(NamedTuple):
    """The position of each choice of each token, in s sequences of t tokens with k choices each.

    Attributes:
        position: int64 `[s, t, k]`: the choice's position among the E c of its sequence; E c for a dropped choice.
        choice: int64 `[s, E, c]`: the choice at each position, a number among the t k choices; t k for an empty one.
    """

    position: torch.Tensor
    choice: torch.Tensor


def check_experts(experts: Any, count: int, axis: str) -> None:
    """Check the choices of tokens, and check that the experts divide among the ranks.

    Raises:
        TypeError: if `experts` is not an int64 tensor.
        ValueError: if `count` is not a positive int, or the axis does not divide it.
    """
    if not isinstance(experts, torch.Tensor) or experts.dtype != torch.int64:
        actual = experts.dtype if isinstance(experts, torch.Tensor) else repr(experts)
        raise TypeError(
            f"experts is {actual}: expected an int64 tensor [.., k], as fzero.parallel.experts.route returns it"
        )
    check_int("count", count, 1, "the number of experts")
    n = axis_size(axis_if_bound(axis))
    if count % n:
        raise ValueError(
            f"axis={axis!r} has {n} ranks, and the {count} experts do not divide by {n}: each rank must hold the same "
            "number; change the size of the axis, or the number of experts"
        )


@api_boundary
def assign_positions(experts: torch.Tensor, count: int, capacity: float | None = None) -> Positions:
    """Assign positions to the choices of each sequence: first choices before second ones, in the order of the tokens.

    An expert has `capacity * t * k / count` positions per sequence, rounded up. A choice that finds none is dropped.
    Sequences do not compete, so a sequence's drops are the same on any mesh and in any micro-batch.

    Args:
        experts: int64 `[s, t, k]`, as `route` chooses them; `count` stands for no expert.
        count: the number of experts, E.
        capacity: the number of positions, as a multiple of what even routing needs; None for one position per token.

    Returns:
        `Positions`.

    Raises:
        TypeError: if `experts` is not an int64 tensor.
        ValueError: if `experts` does not have three dimensions, or `capacity` is not positive. Also if the tokens of a
            sequence are split over ranks, and so its positions are not known here.

    Example:
        >>> experts = torch.tensor([[[0], [0], [0], [1]]])  # one sequence, four tokens, one choice each
        >>> assign_positions(
        ...     experts, count=2, capacity=1.0
        ... ).position  # two positions per expert: the third token is dropped
        tensor([[[0],
                 [1],
                 [4],
                 [2]]])

    References:
        Lepikhin et al.: GShard, arXiv:2006.16668.
    """
    check_experts(experts, count, "")
    if experts.ndim != 3:
        raise ValueError(f"experts has the shape {list(experts.shape)}: expected [sequences, tokens, k]")
    if capacity is not None and (tokens := tokens_axis()) is not None:
        raise ValueError(
            f"capacity={capacity!r} counts the choices of a whole sequence, and the tokens of each are split over "
            f"{tokens!r}: take capacity=None, which drops no choice"
        )
    t, k = experts.shape[1:]
    c = expert_capacity(t, k, count, capacity)
    queue = rearrange(experts, "s t k -> s (k t)").contiguous()
    position = _queue_positions(queue, count)
    position = torch.where((queue < count) & (position < c), queue * c + position, count * c)
    position = rearrange(position, "s (k t) -> s t k", k=k)
    choice = inverse(rearrange(position, "s t k -> s (t k)"), count * c)
    return Positions(position, rearrange(choice, "s (e c) -> s e c", e=count))


def _queue_positions(queue: torch.Tensor, count: int) -> torch.Tensor:
    """Return, for each choice in a queue `[s, q]`, how many earlier choices have the same expert."""
    sorted_queue, order = queue.sort(dim=-1, stable=True)
    _, first = count_choices(queue, count)
    position = torch.arange(queue.shape[1], device=queue.device) - first.gather(1, sorted_queue)
    return torch.zeros_like(queue).scatter(1, order, position)


@api_boundary
def dispatch(x: torch.Tensor, positions: Positions, axis: str = "ep") -> torch.Tensor:
    """Send tokens to their experts: each rank receives the tokens of its experts from all ranks along an axis.

    Args:
        x: `[s, t, d]`, this rank's tokens.
        positions: the tokens' positions.
        axis: the axis over which experts are split. If no axis of this name is bound, this rank holds all experts.

    Returns:
        `[E / n, n s c, d]` for n ranks; zeros at empty positions. With gates of one it is the transpose of `combine`.

    Raises:
        TypeError: if `x` is not floating-point.
        ValueError: if the axis does not divide the experts, or `x` does not match the positions.

    Example:
        >>> positions = assign_positions(torch.tensor([[[1], [0], [1]]]), count=2)
        >>> dispatch(torch.tensor([[[5.0], [6.0], [7.0]]]), positions).squeeze(-1)
        tensor([[6., 0., 0.],
                [5., 7., 0.]])
    """
    s, t, k = positions.position.shape
    count, c = positions.choice.shape[1:]
    check_experts(positions.position, count, axis)
    check_floating("x", x, f"[{s}, {t}, width], the tokens that have these positions")
    if x.ndim != 3 or x.shape[:2] != (s, t):
        raise ValueError(f"x has the shape {list(x.shape)}: expected [{s}, {t}, width], one row per token")
    token = torch.div(positions.choice, k, rounding_mode="floor")
    row_index = rearrange(_number_in_batch(token.flatten(1), t), "m -> m 1")
    back = rearrange(_number_in_batch(positions.position.flatten(1), count * c), "(n k) -> n k", k=k)
    rows = sum_rows(rearrange(x, "s t d -> (s t) d"), row_index, back)
    rows = rearrange(rows, "(s e c) d -> e (s c) d", s=s, e=count)
    return all_to_all(rows, axis_if_bound(axis), split_dim=0, concat_dim=1)


@api_boundary
def combine(y: torch.Tensor, positions: Positions, gates: torch.Tensor, axis: str = "ep") -> torch.Tensor:
    """Bring tokens back from their experts, and sum each token's choices by its gates.

    Args:
        y: `[E / n, n s c, d]`, the outputs of this rank's experts for the rows that `dispatch` returned.
        positions: the tokens' positions.
        gates: `[s, t, k]`; a dropped choice adds nothing.
        axis: as for `dispatch`.

    Returns:
        `[s, t, d]`.

    Raises:
        TypeError: if `y` or `gates` are not floating-point.
        ValueError: if the axis does not divide the experts, or `y` or `gates` do not match the positions.

    Example:
        >>> positions = assign_positions(torch.tensor([[[1], [0], [1]]]), count=2)
        >>> rows = dispatch(torch.tensor([[[5.0], [6.0], [7.0]]]), positions)
        >>> combine(rows, positions, torch.ones(1, 3, 1)).flatten()
        tensor([5., 6., 7.])
    """
    s, t, k = positions.position.shape
    count, c = positions.choice.shape[1:]
    check_experts(positions.position, count, axis)
    n = axis_size(axis_if_bound(axis))
    expected = f"[{count // n}, {n * s * c}, width]"
    check_floating("y", y, f"{expected}, what the experts return")
    check_floating("gates", gates, f"[{s}, {t}, {k}], one for each choice")
    if gates.shape != (s, t, k):
        raise ValueError(f"gates has the shape {list(gates.shape)}: expected [{s}, {t}, {k}], one for each choice")
    if y.ndim != 3 or y.shape[:2] != (count // n, n * s * c):
        raise ValueError(f"y has the shape {list(y.shape)}: expected {expected}, the shape that dispatch returned")
    back = all_to_all(y, axis_if_bound(axis), split_dim=1, concat_dim=0)
    back = rearrange(back, "e (s c) d -> (s e c) d", s=s)
    row_index = rearrange(_number_in_batch(positions.position.flatten(1), count * c), "m -> m 1")
    choice = rearrange(_number_in_batch(positions.choice.flatten(1), t * k), "m -> m 1")
    return weighted_sum(rearrange(sum_rows(back, row_index, choice), "(s t k) d -> s t k d", s=s, t=t), gates)


def _number_in_batch(index: torch.Tensor, size: int) -> torch.Tensor:
    """Renumber `[s, m]`, numbers below `size` within a sequence, to numbers among all sequences; s size for none."""
    s = index.shape[0]
    first = rearrange(torch.arange(s, device=index.device) * size, "s -> s 1")
    return torch.where(index < size, index + first, s * size).flatten()
