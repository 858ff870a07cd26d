"""Dispatch: tokens go to experts and come back, by seats for each expert or as rows sorted by expert."""

import math
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange

from fzero._torch import allow_in_graph
from fzero.axes import axis_size, where_bound
from fzero.collectives import all_to_all
from fzero.parallel.experts._route import check_floating

__all__ = [
    "Order",
    "Seats",
    "check_experts",
    "combine",
    "counted",
    "dispatch",
    "inverse",
    "moved",
    "seats",
    "seats_of_an_expert",
    "sort_rows",
    "unsort_rows",
]

# Rows that move: a linear map that copies rows to places, whose transpose copies them back.


class _Moved(torch.autograd.Function):
    """y[m] = the sum over j of x[at[m, j]]. Gathers both ways: a scatter adds in any order, and so rounds at will."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([x, x.new_zeros((1, x.shape[1]))])
        return padded[at.squeeze(1)] if at.shape[1] == 1 else padded[at].sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, at, back = inputs
        ctx.save_for_backward(at, back)
        ctx.save_for_forward(at, back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        at, back = ctx.saved_tensors
        return moved(grad, back, at), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *places: Any) -> torch.Tensor:
        return moved(tangent, *ctx.saved_tensors)


@allow_in_graph  # as collectives/_table.py has it
def moved(x: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Sum rows into places.

    Args:
        x: rows `[n, d]`.
        at: int64 `[m, j]`: the rows that are summed into each place; n for none.
        back: int64 `[n, i]`: the places that each row goes to, as `at` has them; m for none.

    Returns:
        `[m, d]`.
    """
    return _Moved.apply(x, at, back)


def inverse(at: torch.Tensor, size: int) -> torch.Tensor:
    """Return where each of the numbers below `size` stands in `at [.., m]`: int64 `[.., size]`, m for nowhere."""
    m = at.shape[-1]
    empty = torch.full((*at.shape[:-1], size + 1), m, device=at.device)
    places = torch.arange(m, device=at.device).expand(at.shape)
    return empty.scatter(-1, at, places)[..., :-1]


# Seats: each expert has so many for each sequence, so what is dropped belongs to the data and not to the mesh.


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


# Rows sorted by expert: no seats, and nothing is dropped.


class Order(NamedTuple):
    """How rows were sorted: m tokens with k choices each, sent to n ranks that have b rows for each other rank.

    Attributes:
        ends: int64 `[E / n]`: where the rows of each of this rank's experts end.
        choice: int64 `[n b]`: which of the own m k choices was sent in each row; m k for none.
        row: int64 `[m k]`: in which row each choice was sent; n b for none.
        order: int64 `[n b]`: which of the received rows each sorted row is.
    """

    ends: torch.Tensor
    choice: torch.Tensor
    row: torch.Tensor
    order: torch.Tensor


def sort_rows(x: torch.Tensor, experts: torch.Tensor, count: int, axis: str = "ep") -> tuple[torch.Tensor, Order]:
    """Send tokens to their experts, and sort what arrives by expert.

    Shapes do not depend on the data. So a rank has room for all that the n ranks could send it, up to n times what it
    gets when routing is even. This costs memory and no arithmetic, for `grouped_mm` passes by the rows behind the last.

    Args:
        x: `[.., d]`, this rank's tokens.
        experts: int64 `[.., k]`: their experts, different ones for each token; `count` for none.
        count: the number of experts, E.
        axis: the name of the axis that experts are split over. Where none of that name is bound, all experts are here.

    Returns:
        Rows `[r, d]` sorted by this rank's experts, zeros behind them, and an `Order`, whose `ends` says where each
        expert's rows end.

    Raises:
        TypeError: if `experts` is no int64 tensor, or `x` not floating-point.
        ValueError: if the axis does not divide the experts, or the shapes do not fit.

    Example:
        >>> x, experts = torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([[1], [0], [1]])
        >>> rows, order = sort_rows(x, experts, count=2)
        >>> rows.flatten(), order.ends
        (tensor([6., 5., 7.]), tensor([1, 3]))
    """
    check_experts(experts, count, axis)
    check_floating("x", x, "[.., width], the tokens of these experts")
    if x.shape[:-1] != experts.shape[:-1]:
        wanted = ", ".join([str(size) for size in experts.shape[:-1]])
        raise ValueError(f"x has the shape {list(x.shape)}: expected [{wanted}, width], as `experts` has it")
    ep = where_bound(axis)
    n, k = axis_size(ep), experts.shape[-1]
    tokens = rearrange(x, "... d -> (...) d")
    room = tokens.shape[0] * min(k, count // n)
    row, counts = _sending(experts.flatten(), count, n, room)
    choice = inverse(row, n * room)
    token = torch.div(choice, k, rounding_mode="floor")
    sent = moved(tokens, rearrange(token, "r -> r 1"), rearrange(row, "(m k) -> m k", k=k))
    got, got_counts = all_to_all(sent, ep), all_to_all(counts, ep)
    order = _by_expert(got_counts, room) if ep else torch.arange(got.shape[0], device=got.device)
    ends = got_counts.sum(0).cumsum(0)
    rows = (
        moved(got, rearrange(order, "r -> r 1"), rearrange(inverse(order, order.shape[0]), "r -> r 1")) if ep else got
    )
    return rows, Order(ends, choice, row, order)


def _sending(experts: torch.Tensor, count: int, n: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each choice `[q]`, n room for none, and how many go to each expert: `[n, E / n]`."""
    ordered, order = experts.sort(stable=True)
    counts, first = counted(experts, count)
    rank = torch.div(ordered, count // n, rounding_mode="floor")
    place = torch.arange(experts.shape[0], device=experts.device) - first[rank * (count // n)]
    row = torch.where((rank < n) & (place < room), rank * room + place, n * room)
    return torch.zeros_like(row).scatter(0, order, row), rearrange(counts[:-1], "(n e) -> n e", n=n)


def _by_expert(counts: torch.Tensor, room: int) -> torch.Tensor:
    """Return the order that sorts received rows by expert, those of nobody last; each rank's are sorted already."""
    zeros = torch.zeros((len(counts), room + 1), dtype=torch.int64, device=counts.device)
    marked = zeros.scatter_add(1, counts.cumsum(1), torch.ones_like(counts))  # where an expert's rows end
    return torch.argsort(marked.cumsum(1)[:, :-1].flatten(), stable=True)


def unsort_rows(y: torch.Tensor, order: Order, gates: torch.Tensor, axis: str = "ep") -> torch.Tensor:
    """Bring sorted rows back to their tokens, and sum each token's choices by its gates.

    Args:
        y: `[r, d]`, what this rank's experts made of what `sort_rows` gave them.
        order: how they were sorted.
        gates: `[.., k]`.
        axis: as for `sort_rows`.

    Returns:
        `[.., d]`.

    Raises:
        TypeError: if `y` or `gates` are not floating-point.
        ValueError: if the shapes do not fit.

    Example:
        >>> x, experts = torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([[1], [0], [1]])
        >>> rows, order = sort_rows(x, experts, count=2)
        >>> unsort_rows(rows, order, torch.ones(3, 1)).flatten()
        tensor([5., 6., 7.])
    """
    check_floating("y", y, f"[{order.order.shape[0]}, width], what the experts return")
    check_floating("gates", gates, "[.., k], one for each choice")
    if y.ndim != 2 or y.shape[0] != order.order.shape[0]:
        raise ValueError(
            f"y has the shape {list(y.shape)}: expected [{order.order.shape[0]}, width], as sort_rows has it"
        )
    if gates.numel() != order.row.shape[0]:
        raise ValueError(
            f"gates has the shape {list(gates.shape)}: expected a gate for each of {order.row.shape[0]} choices"
        )
    if ep := where_bound(axis):
        there = rearrange(inverse(order.order, order.order.shape[0]), "r -> r 1")
        y = all_to_all(moved(y, there, rearrange(order.order, "r -> r 1")), ep)
    mine = moved(y, rearrange(order.row, "m -> m 1"), rearrange(order.choice, "r -> r 1"))
    return weighted(mine.unflatten(0, gates.shape), gates)
