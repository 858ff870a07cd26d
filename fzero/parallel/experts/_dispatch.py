"""Dispatch: send tokens to experts and bring them back, by positions at each expert or as rows sorted by expert."""

from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange

from fzero._arguments import check_int
from fzero._torch import allow_in_graph
from fzero.axes import axis_if_bound, axis_size, tokens_axis
from fzero.collectives import all_to_all, to_host
from fzero.parallel.experts._grouped import reads_offsets_on_host
from fzero.parallel.experts._routing import check_floating, count_choices, expert_capacity

__all__ = ["Order", "Positions", "assign_positions", "check_experts", "combine", "dispatch", "sort_rows", "unsort_rows"]

# A linear map that sums rows into places. Its transpose is a map of the same kind.


class _SumRows(torch.autograd.Function):
    """y[m] = the sum over j of x[at[m, j]]. Both directions gather, since a scatter sums in a varying order."""

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
        return _sum_rows(grad, back, at), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *indices: Any) -> torch.Tensor:
        return _sum_rows(tangent, *ctx.saved_tensors)


@allow_in_graph  # as collectives/_table.py has it
def _sum_rows(x: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Sum rows into places.

    Args:
        x: rows `[n, d]`.
        at: int64 `[m, j]`: the rows that are summed into each place; n stands for no row.
        back: int64 `[n, i]`: the places into which each row goes, in agreement with `at`; m stands for no place.

    Returns:
        `[m, d]`.
    """
    return _SumRows.apply(x, at, back)


def _inverse(at: torch.Tensor, size: int) -> torch.Tensor:
    """Return the index in `at [.., m]` of each number below `size`: int64 `[.., size]`; m if it is not there."""
    m = at.shape[-1]
    empty = torch.full((*at.shape[:-1], size + 1), m, device=at.device)
    indices = torch.arange(m, device=at.device).expand(at.shape)
    return empty.scatter(-1, at, indices)[..., :-1]


# Positions: each expert has a capacity per sequence, so the dropped choices depend on the data and not on the mesh.


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
    choice = _inverse(rearrange(position, "s t k -> s (t k)"), count * c)
    return Positions(position, rearrange(choice, "s (e c) -> s e c", e=count))


def _queue_positions(queue: torch.Tensor, count: int) -> torch.Tensor:
    """Return, for each choice in a queue `[s, q]`, how many earlier choices have the same expert."""
    ordered, order = queue.sort(dim=-1, stable=True)
    _, first = count_choices(queue, count)
    position = torch.arange(queue.shape[1], device=queue.device) - first.gather(1, ordered)
    return torch.zeros_like(queue).scatter(1, order, position)


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
    at = rearrange(_flat(token.flatten(1), t), "m -> m 1")
    back = rearrange(_flat(positions.position.flatten(1), count * c), "(n k) -> n k", k=k)
    rows = _sum_rows(rearrange(x, "s t d -> (s t) d"), at, back)
    rows = rearrange(rows, "(s e c) d -> e (s c) d", s=s, e=count)
    return all_to_all(rows, axis_if_bound(axis), split_dim=0, concat_dim=1)


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
    at = rearrange(_flat(positions.position.flatten(1), count * c), "m -> m 1")
    choice = rearrange(_flat(positions.choice.flatten(1), t * k), "m -> m 1")
    return _weighted_sum(rearrange(_sum_rows(back, at, choice), "(s t k) d -> s t k d", s=s, t=t), gates)


def _weighted_sum(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Sum the rows `[.., k, d]` of each token's choices by its gates `[.., k]`."""
    return einsum(rows, gates.to(rows.dtype), "... k d, ... k -> ... d")


def _flat(at: torch.Tensor, size: int) -> torch.Tensor:
    """Renumber `[s, m]`, numbers below `size` within a sequence, to numbers among all sequences; s size for none."""
    s = at.shape[0]
    first = rearrange(torch.arange(s, device=at.device) * size, "s -> s 1")
    return torch.where(at < size, at + first, s * size).flatten()


# Rows sorted by expert: nothing is dropped.


class Order(NamedTuple):
    """The order of sorted rows: m tokens with k choices each, sent to n ranks with room for b rows from each rank.

    Attributes:
        offsets: int64 `[E / n]`: where the rows of each of this rank's experts end. On a GPU they lie in host memory
            unless torch's kernel multiplies the rows (`reads_offsets_on_host`).
        choice: int64 `[n b]`: which of this rank's m k choices was sent in each row; m k for an empty row.
        row: int64 `[m k]`: the row in which each choice was sent; n b if it was not sent.
        order: int64 `[n b]`: for each sorted row, which of the received rows it is.
    """

    offsets: torch.Tensor
    choice: torch.Tensor
    row: torch.Tensor
    order: torch.Tensor


def sort_rows(x: torch.Tensor, experts: torch.Tensor, count: int, axis: str = "ep") -> tuple[torch.Tensor, Order]:
    """Send tokens to their experts, and sort the received rows by expert.

    Shapes do not depend on the data. So a rank has room for every row that the n ranks could send it, up to n times as
    many as with even routing. This costs memory but no computation, since `grouped_mm` skips the unused rows.

    Args:
        x: `[.., d]`, this rank's tokens.
        experts: int64 `[.., k]`: each token's experts, all different; `count` stands for no expert.
        count: the number of experts, E.
        axis: the axis over which experts are split. If no axis of this name is bound, this rank holds all experts.

    Returns:
        Rows `[r, d]` sorted by this rank's experts, with zeros behind them, and an `Order`. Its `offsets` are the
            ends of each expert's rows.

    Raises:
        TypeError: if `experts` is not an int64 tensor, or `x` is not floating-point.
        ValueError: if the axis does not divide the experts, or the shapes do not match.

    Example:
        >>> x, experts = torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([[1], [0], [1]])
        >>> rows, order = sort_rows(x, experts, count=2)
        >>> rows.flatten(), order.offsets
        (tensor([6., 5., 7.]), tensor([1, 3]))
    """
    check_experts(experts, count, axis)
    check_floating("x", x, "[.., width], the tokens of these experts")
    if x.shape[:-1] != experts.shape[:-1]:
        expected = ", ".join([str(size) for size in experts.shape[:-1]])
        raise ValueError(f"x has the shape {list(x.shape)}: expected [{expected}, width], to match `experts`")
    ep = axis_if_bound(axis)
    n, k = axis_size(ep), experts.shape[-1]
    tokens = rearrange(x, "... d -> (...) d")
    max_rows = tokens.shape[0] * min(k, count // n)
    row, counts = _send_order(experts.flatten(), count, n, max_rows)
    choice = _inverse(row, n * max_rows)
    token = torch.div(choice, k, rounding_mode="floor")
    send_rows = _sum_rows(tokens, rearrange(token, "r -> r 1"), rearrange(row, "(m k) -> m k", k=k))
    recv_rows, recv_counts = all_to_all(send_rows, ep), all_to_all(counts, ep)
    order = _expert_order(recv_counts, max_rows) if ep else torch.arange(recv_rows.shape[0], device=recv_rows.device)
    offsets = recv_counts.sum(0).cumsum(0)
    if reads_offsets_on_host(recv_rows):  # one copy for all products of the layer, under way while the rows are sorted
        offsets = to_host(offsets)
    rows = (
        _sum_rows(recv_rows, rearrange(order, "r -> r 1"), rearrange(_inverse(order, order.shape[0]), "r -> r 1"))
        if ep
        else recv_rows
    )
    return rows, Order(offsets, choice, row, order)


def _send_order(experts: torch.Tensor, count: int, n: int, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each choice `[q]`, n * max_rows for none, and each expert's number of choices `[n, E / n]`."""
    ordered, order = experts.sort(stable=True)
    counts, first = count_choices(experts, count)
    rank = torch.div(ordered, count // n, rounding_mode="floor")
    position = torch.arange(experts.shape[0], device=experts.device) - first[rank * (count // n)]
    row = torch.where((rank < n) & (position < max_rows), rank * max_rows + position, n * max_rows)
    return torch.zeros_like(row).scatter(0, order, row), rearrange(counts[:-1], "(n e) -> n e", n=n)


def _expert_order(counts: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Return the order that sorts received rows by expert, empty rows last; each sender's rows are sorted already."""
    zeros = torch.zeros((len(counts), max_rows + 1), dtype=torch.int64, device=counts.device)
    boundaries = zeros.scatter_add(1, counts.cumsum(1), torch.ones_like(counts))  # one where an expert's rows end
    return torch.argsort(boundaries.cumsum(1)[:, :-1].flatten(), stable=True)


def unsort_rows(y: torch.Tensor, order: Order, gates: torch.Tensor, axis: str = "ep") -> torch.Tensor:
    """Bring sorted rows back to their tokens, and sum each token's choices by its gates.

    Args:
        y: `[r, d]`, the outputs of this rank's experts for the rows that `sort_rows` returned.
        order: the `Order` that `sort_rows` returned.
        gates: `[.., k]`.
        axis: as for `sort_rows`.

    Returns:
        `[.., d]`.

    Raises:
        TypeError: if `y` or `gates` are not floating-point.
        ValueError: if the shapes do not match.

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
            f"y has the shape {list(y.shape)}: expected [{order.order.shape[0]}, width], the shape of sort_rows' result"
        )
    if gates.numel() != order.row.shape[0]:
        raise ValueError(
            f"gates has the shape {list(gates.shape)}: expected a gate for each of {order.row.shape[0]} choices"
        )
    if ep := axis_if_bound(axis):
        inverse_order = rearrange(_inverse(order.order, order.order.shape[0]), "r -> r 1")
        y = all_to_all(_sum_rows(y, inverse_order, rearrange(order.order, "r -> r 1")), ep)
    rows = _sum_rows(y, rearrange(order.row, "m -> m 1"), rearrange(order.choice, "r -> r 1"))
    return _weighted_sum(rows.unflatten(0, gates.shape), gates)
