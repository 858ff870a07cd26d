"""Seats: each expert has so many for each sequence, so what is dropped belongs to the data and not to the mesh."""

import math
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange

from fzero.axes.scope import axis_size, where_bound
from fzero.collectives.exchange import all_to_all
from fzero.moe._checks import check_floating
from fzero.moe._moved import inverse, moved

__all__ = ["Seats", "check_experts", "combine", "counted", "dispatch", "seats", "seats_of_an_expert"]


class Seats(NamedTuple):
    """Where each choice of each token sits, in s sequences of t tokens with k choices each.

    Attributes:
        seat: int64 `[s, t, k]`: the number of its seat among the E c of its sequence; E c for a choice without one.
        choice: int64 `[s, E, c]`: who sits there, as a number among the t k choices; t k for nobody.
    """

    seat: torch.Tensor
    choice: torch.Tensor


def check_experts(experts: Any, count: int, axis: str) -> None:
    """Check the choices of tokens, and that the experts divide among the ranks.

    Raises:
        TypeError: if `experts` are no int64 tensor.
        ValueError: if `count` is no number of experts, or the axis does not divide it.
    """
    if not isinstance(experts, torch.Tensor) or experts.dtype != torch.int64:
        given = experts.dtype if isinstance(experts, torch.Tensor) else repr(experts)
        raise TypeError(f"experts is {given}: expected an int64 tensor [.., k], as moe.route returns it")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}: expected the number of experts, of which `experts` holds numbers")
    n = axis_size(where_bound(axis))
    if count % n:
        raise ValueError(
            f"axis={axis!r} has {n} ranks, and the {count} experts do not divide by {n}: each rank has as many; "
            "take another size of the axis, or another number of experts"
        )


def seats_of_an_expert(tokens: int, k: int, count: int, capacity: float | None) -> int:
    """Return how many seats an expert has for a sequence.

    Raises:
        ValueError: if `capacity` is not positive and finite.
    """
    if capacity is None:
        return tokens
    if not isinstance(capacity, int | float) or isinstance(capacity, bool) or not 0 < capacity < math.inf:
        raise ValueError(
            f"capacity={capacity!r}: expected a number above 0, such as 1.25, times the seats that even routing needs; "
            "or None, with which no token is dropped"
        )
    # 1.1 x 100 / 10 is 11.000000000000002 in binary, and is to be 11
    return min(tokens, max(1, math.ceil(round(capacity * tokens * k / count, 9))))


def seats(experts: torch.Tensor, count: int, capacity: float | None = None) -> Seats:
    """Seat the choices of each sequence: all first choices before the second ones, in the order of the tokens.

    An expert has `capacity * t * k / count` seats for each sequence, rounded up. A choice that finds none is dropped.
    Sequences do not compete, so that a sequence's drops are the same on any mesh, and in any micro-batch.

    Args:
        experts: int64 `[s, t, k]`, as `route` chooses them; `count` for no expert.
        count: the number of experts, E.
        capacity: how many seats there are, as a multiple of what even routing needs; None for as many as tokens.

    Returns:
        `Seats`.

    Raises:
        TypeError: if `experts` is no int64 tensor.
        ValueError: if it has not three dimensions, or `capacity` is not positive.

    Example:
        >>> experts = torch.tensor([[[0], [0], [0], [1]]])  # one sequence, four tokens, one choice each
        >>> seats(experts, count=2, capacity=1.0).seat  # two seats an expert: the third token finds none
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
    t, k = experts.shape[1:]
    c = seats_of_an_expert(t, k, count, capacity)
    queue = rearrange(experts, "s t k -> s (k t)").contiguous()
    place = _places(queue, count)
    seat = torch.where((queue < count) & (place < c), queue * c + place, count * c)
    seat = rearrange(seat, "s (k t) -> s t k", k=k)
    choice = inverse(rearrange(seat, "s t k -> s (t k)"), count * c)
    return Seats(seat, rearrange(choice, "s (e c) -> s e c", e=count))


def _places(queue: torch.Tensor, count: int) -> torch.Tensor:
    """Return how many before each in a queue `[s, q]` want the same expert."""
    ordered, order = queue.sort(dim=-1, stable=True)
    _, first = counted(queue, count)
    place = torch.arange(queue.shape[1], device=queue.device) - first.gather(1, ordered)
    return torch.zeros_like(queue).scatter(1, order, place)


def counted(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the choices `[.., q]` of each expert, `[.., E + 1]`; also return where each one's begin, once sorted."""
    zeros = torch.zeros((*experts.shape[:-1], count + 1), dtype=torch.int64, device=experts.device)
    counts = zeros.scatter_add(-1, experts, torch.ones_like(experts))
    return counts, counts.cumsum(-1) - counts


def dispatch(x: torch.Tensor, seated: Seats, axis: str = "ep") -> torch.Tensor:
    """Send tokens to their seats: each rank gets what sits with its experts, from all ranks along an axis.

    Args:
        x: `[s, t, d]`, this rank's tokens.
        seated: where they sit.
        axis: the name of the axis that experts are split over. Where none of that name is bound, all experts are here.

    Returns:
        `[E / n, n s c, d]` for n ranks; zeros on empty seats. With gates of one it is the transpose of `combine`.

    Raises:
        TypeError: if `x` is not floating-point.
        ValueError: if the axis does not divide the experts, or `x` does not fit.

    Example:
        >>> seated = seats(torch.tensor([[[1], [0], [1]]]), count=2)
        >>> dispatch(torch.tensor([[[5.0], [6.0], [7.0]]]), seated).squeeze(-1)
        tensor([[6., 0., 0.],
                [5., 7., 0.]])
    """
    s, t, k = seated.seat.shape
    count, c = seated.choice.shape[1:]
    check_experts(seated.seat, count, axis)
    check_floating("x", x, f"[{s}, {t}, width], the tokens that were seated")
    if x.ndim != 3 or x.shape[:2] != (s, t):
        raise ValueError(f"x has the shape {list(x.shape)}: expected [{s}, {t}, width], the tokens that were seated")
    token = torch.div(seated.choice, k, rounding_mode="floor")
    at = rearrange(_flat(token.flatten(1), t), "m -> m 1")
    back = rearrange(_flat(seated.seat.flatten(1), count * c), "(n k) -> n k", k=k)
    rows = moved(rearrange(x, "s t d -> (s t) d"), at, back)
    rows = rearrange(rows, "(s e c) d -> e (s c) d", s=s, e=count)
    return all_to_all(rows, where_bound(axis), split_dim=0, concat_dim=1)


def combine(y: torch.Tensor, seated: Seats, gates: torch.Tensor, axis: str = "ep") -> torch.Tensor:
    """Bring tokens back from their seats, and sum each token's choices by its gates.

    Args:
        y: `[E / n, n s c, d]`, what this rank's experts made of what `dispatch` gave them.
        seated: where the tokens sit.
        gates: `[s, t, k]`; a choice without a seat adds nothing.
        axis: as for `dispatch`.

    Returns:
        `[s, t, d]`.

    Raises:
        TypeError: if `y` or `gates` are not floating-point.
        ValueError: if the axis does not divide the experts, or `y` or `gates` do not fit.

    Example:
        >>> seated = seats(torch.tensor([[[1], [0], [1]]]), count=2)
        >>> rows = dispatch(torch.tensor([[[5.0], [6.0], [7.0]]]), seated)
        >>> combine(rows, seated, torch.ones(1, 3, 1)).flatten()
        tensor([5., 6., 7.])
    """
    s, t, k = seated.seat.shape
    count, c = seated.choice.shape[1:]
    check_experts(seated.seat, count, axis)
    n = axis_size(where_bound(axis))
    wanted = f"[{count // n}, {n * s * c}, width]"
    check_floating("y", y, f"{wanted}, what the experts return")
    check_floating("gates", gates, f"[{s}, {t}, {k}], one for each choice")
    if gates.shape != (s, t, k):
        raise ValueError(f"gates has the shape {list(gates.shape)}: expected [{s}, {t}, {k}], one for each choice")
    if y.ndim != 3 or y.shape[:2] != (count // n, n * s * c):
        raise ValueError(f"y has the shape {list(y.shape)}: expected {wanted}, experts and seats as dispatch has them")
    back = all_to_all(y, where_bound(axis), split_dim=1, concat_dim=0)
    back = rearrange(back, "e (s c) d -> (s e c) d", s=s)
    at = rearrange(_flat(seated.seat.flatten(1), count * c), "m -> m 1")
    whose = rearrange(_flat(seated.choice.flatten(1), t * k), "m -> m 1")
    return weighted(rearrange(moved(back, at, whose), "(s t k) d -> s t k d", s=s, t=t), gates)


def weighted(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Sum the rows `[.., k, d]` of each token's choices by its gates `[.., k]`."""
    return einsum(rows, gates.to(rows.dtype), "... k d, ... k -> ... d")


def _flat(at: torch.Tensor, size: int) -> torch.Tensor:
    """Make numbers `[s, m]` below `size` in each sequence those among all sequences; s size for none."""
    s = at.shape[0]
    first = rearrange(torch.arange(s, device=at.device) * size, "s -> s 1")
    return torch.where(at < size, at + first, s * size).flatten()
