"""Send tokens to experts in rows sorted by expert: nothing is dropped."""

from typing import NamedTuple

import torch
from einops import rearrange

from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_size
from fzero.collectives import all_to_all, to_host
from fzero.parallel.experts._dispatch import check_experts
from fzero.parallel.experts._grouped import reads_offsets_on_host
from fzero.parallel.experts._routing import check_floating, count_choices
from fzero.parallel.experts._sum_rows import inverse, sum_rows, weighted_sum

__all__ = ["Order", "sort_rows", "unsort_rows"]


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


@api_boundary
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
    choice = inverse(row, n * max_rows)
    token = torch.div(choice, k, rounding_mode="floor")
    send_rows = sum_rows(tokens, rearrange(token, "r -> r 1"), rearrange(row, "(m k) -> m k", k=k))
    recv_rows, recv_counts = all_to_all(send_rows, ep), all_to_all(counts, ep)
    order = _expert_order(recv_counts, max_rows) if ep else torch.arange(recv_rows.shape[0], device=recv_rows.device)
    offsets = recv_counts.sum(0).cumsum(0)
    if reads_offsets_on_host(recv_rows):  # one copy for all products of the layer, under way while the rows are sorted
        offsets = to_host(offsets)
    rows = (
        sum_rows(recv_rows, rearrange(order, "r -> r 1"), rearrange(inverse(order, order.shape[0]), "r -> r 1"))
        if ep
        else recv_rows
    )
    return rows, Order(offsets, choice, row, order)


def _send_order(experts: torch.Tensor, count: int, n: int, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each choice `[q]`, n * max_rows for none, and each expert's number of choices `[n, E / n]`."""
    sorted_experts, order = experts.sort(stable=True)
    counts, first = count_choices(experts, count)
    rank = torch.div(sorted_experts, count // n, rounding_mode="floor")
    position = torch.arange(experts.shape[0], device=experts.device) - first[rank * (count // n)]
    row = torch.where((rank < n) & (position < max_rows), rank * max_rows + position, n * max_rows)
    return torch.zeros_like(row).scatter(0, order, row), rearrange(counts[:-1], "(n e) -> n e", n=n)


def _expert_order(counts: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Return the order that sorts received rows by expert, empty rows last; each sender's rows are sorted already."""
    zeros = torch.zeros((len(counts), max_rows + 1), dtype=torch.int64, device=counts.device)
    boundaries = zeros.scatter_add(1, counts.cumsum(1), torch.ones_like(counts))  # one where an expert's rows end
    return torch.argsort(boundaries.cumsum(1)[:, :-1].flatten(), stable=True)


@api_boundary
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
        inverse_order = rearrange(inverse(order.order, order.order.shape[0]), "r -> r 1")
        y = all_to_all(sum_rows(y, inverse_order, rearrange(order.order, "r -> r 1")), ep)
    rows = sum_rows(y, rearrange(order.row, "m -> m 1"), rearrange(order.choice, "r -> r 1"))
    return weighted_sum(rows.unflatten(0, gates.shape), gates)
