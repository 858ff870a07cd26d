"""A layer of experts in one line."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from einops import einsum, rearrange

from fzero.moe._checks import check_floating, given
from fzero.moe._grouped import grouped_mm
from fzero.moe._route import Routing, check_routing
from fzero.moe._seats import check_experts, combine, dispatch, seats
from fzero.moe._sorted import Order, sort_rows, unsort_rows
from fzero.moe._split import check_axis, check_split

__all__ = ["Linear", "grouped_linear", "layer"]


class Linear(Protocol):
    """What a layer hands to its experts: `linear(rows, weight, bias)`, each expert's rows by its own matrix."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, /) -> torch.Tensor:
        """Multiply rows by `weight [e, d, f]`, and add `bias [e, f]`."""
        ...


def batched_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows `[e, r, d]` by the matrices `[e, d, f]`, and add `[e, f]`."""
    _check_linear(rows, rows.shape[0], weight, bias)
    y = einsum(rows, weight, "e r d, e d f -> e r f")
    return y if bias is None else y + rearrange(bias, "e f -> e 1 f")


def grouped_linear(
    order: Order, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply sorted rows `[r, d]` by their experts' matrices `[e, d, f]`, and add `[e, f]`."""
    ends, likely = order.ends, order.row.shape[0]  # as many rows as this rank's tokens choose
    _check_linear(rows, len(ends), weight, bias)
    y = grouped_mm(rows, weight, ends, likely)
    if bias is None:
        return y
    # a product with ones: its gradient is a sum by expert, where indexing would add row by row
    return y + grouped_mm(rows.new_ones(rows.shape[0], 1), rearrange(bias, "e f -> e 1 f"), ends, likely)


def _check_linear(rows: torch.Tensor, count: int, weight: Any, bias: Any) -> None:
    """Check that each expert has a matrix, and a bias: einsum would take one for all of them.

    Raises:
        TypeError: if the dtypes do not fit.
        ValueError: if the shapes do not fit.
    """
    wanted = f"[{count}, {rows.shape[-1]}, columns], a matrix for each of {count} experts"
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"linear's weight is {given(weight)}: expected {wanted}")
    if weight.ndim != 3 or weight.shape[:2] != (count, rows.shape[-1]):
        raise ValueError(f"linear's weight has the shape {list(weight.shape)}: expected {wanted}")
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.shape != (count, weight.shape[2])):
        what = f"has the shape {list(bias.shape)}" if isinstance(bias, torch.Tensor) else f"is {bias!r}"
        raise ValueError(f"linear's bias {what}: expected [{count}, {weight.shape[2]}], a row for each expert")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != rows.dtype and not torch.is_autocast_enabled(rows.device.type):
            raise TypeError(
                f"linear's {name} is {x.dtype}, and the rows are {rows.dtype}: expected one dtype; cast either"
            )


def layer(
    f: Callable[[Any, torch.Tensor, Linear], torch.Tensor],
    experts: Any,
    x: torch.Tensor,
    routing: Routing,
    *,
    axis: str = "ep",
    capacity: float | None = None,
) -> torch.Tensor:
    """Send tokens to their experts, call `f`, bring the results back, and sum them by the gates.

    With a `capacity` an expert has so many seats for each sequence, and what finds none is dropped (`moe.seats`).
    Without one nothing is: rows are sorted by expert (`moe.sort_rows`). Either way the numbers do not depend on the
    mesh. A shared expert is an addition: `x + moe.layer(...) + shared(p, x)`.

    Args:
        f: the experts, `(experts, rows, linear) -> rows`. `linear(rows, weight, bias=None)` multiplies each expert's
            rows by its own matrix; all else is to work by row. Some rows are zeros that nobody reads: gradients must be
            finite there.
        experts: a tree of what this rank has of the experts, along dimension 0 of each leaf.
        x: `[s, t, d]`: sequences of tokens.
        routing: of these tokens, by `moe.route`.
        axis: the name of the axis that experts are split over. Where none of that name is bound, all experts are here.
        capacity: the seats of an expert, as a multiple of what even routing needs; None for dropless.

    Returns:
        `[s, t, d]`; zeros for a token all of whose choices were dropped.

    Raises:
        TypeError: if `x` is not floating-point, or `routing` no `Routing`.
        ValueError: if the axis does not divide the experts, a leaf of `experts` is not split, or shapes do not fit.

    Example:
        >>> from fzero import moe
        >>> def ffn(p, rows, linear):
        ...     return linear(torch.tanh(linear(rows, p["up"], p["bias"])), p["down"])
        >>> experts = {"up": torch.randn(4, 8, 16), "bias": torch.randn(4, 16), "down": torch.randn(4, 16, 8)}
        >>> x, router, shared = torch.randn(2, 5, 8), torch.randn(8, 4), torch.randn(8, 8)
        >>> routing = moe.route(x @ router, k=2)
        >>> y = x + moe.layer(ffn, experts, x, routing, capacity=1.25) + torch.tanh(x @ shared)
        >>> y.shape
        torch.Size([2, 5, 8])
    """
    check_floating("x", x, "[sequences, tokens, width]")
    check_routing(routing)
    count = routing.probs.shape[-1]
    check_experts(routing.experts, count, axis)
    check_axis(axis)
    check_split(experts, count, axis)
    if capacity is None:
        rows, order = sort_rows(x, routing.experts, count, axis)
        done = f(experts, rows, partial(grouped_linear, order))
        return unsort_rows(done, order, routing.gates, axis)
    seated = seats(routing.experts, count, capacity)
    done = f(experts, dispatch(x, seated, axis), batched_linear)
    return combine(done, seated, routing.gates, axis)
