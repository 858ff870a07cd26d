"""Rows sorted by expert: no seats, and nothing is dropped."""

from typing import NamedTuple

import torch
from einops import rearrange

from fzero.axes.scope import axis_size, where_bound
from fzero.collectives.exchange import all_to_all
from fzero.moe._checks import check_floating
from fzero.moe._moved import inverse, moved
from fzero.moe._seats import check_experts, counted, weighted

__all__ = ["Order", "sort_rows", "unsort_rows"]


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
