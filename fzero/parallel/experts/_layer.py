"""A whole layer of experts: dispatch, experts and combine in one call."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from einops import einsum, rearrange

from fzero._tracebacks import api_boundary
from fzero.parallel.experts._dispatch import assign_positions, check_experts, combine, dispatch
from fzero.parallel.experts._expert_split import check_axis, check_split
from fzero.parallel.experts._grouped import grouped_mm
from fzero.parallel.experts._routing import Routing, check_floating, check_routing, describe
from fzero.parallel.experts._sorted_rows import Order, sort_rows, unsort_rows

__all__ = ["Linear", "grouped_linear", "layer"]


class Linear(Protocol):
    """The function that a layer passes to its experts: `linear(rows, weight, bias)`, with one matrix per expert."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, /) -> torch.Tensor:
        """Multiply each expert's rows by its matrix in `weight [e, d, f]`, and add `bias [e, f]`."""
        ...


def _batched_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows `[e, r, d]` by the matrices `[e, d, f]`, and add the biases `[e, f]`."""
    _check_linear(rows, rows.shape[0], weight, bias)
    y = einsum(rows, weight, "e r d, e d f -> e r f")
    return y if bias is None else y + rearrange(bias, "e f -> e 1 f")


def grouped_linear(
    order: Order, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply sorted rows `[r, d]` by their experts' matrices `[e, d, f]`, and add the biases `[e, f]`."""
    offsets = order.offsets
    expected_rows = order.row.shape[0]  # as many as this rank's tokens have choices
    _check_linear(rows, len(offsets), weight, bias)
    y = grouped_mm(rows, weight, offsets, expected_rows)
    if bias is None:
        return y
    # A product with ones, because its gradient is a sum by expert. Indexing would add the gradient row by row.
    return y + grouped_mm(rows.new_ones(rows.shape[0], 1), rearrange(bias, "e f -> e 1 f"), offsets, expected_rows)


def _check_linear(rows: torch.Tensor, count: int, weight: Any, bias: Any) -> None:
    """Check that each expert has its own matrix and bias, since einsum would broadcast a single one.

    Raises:
        TypeError: if the dtypes do not match.
        ValueError: if the shapes do not match.
    """
    expected = f"[{count}, {rows.shape[-1]}, columns], one matrix for each of {count} experts"
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"linear's weight is {describe(weight)}: expected {expected}")
    if weight.ndim != 3 or weight.shape[:2] != (count, rows.shape[-1]):
        raise ValueError(f"linear's weight has the shape {list(weight.shape)}: expected {expected}")
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.shape != (count, weight.shape[2])):
        actual = f"has the shape {list(bias.shape)}" if isinstance(bias, torch.Tensor) else f"is {bias!r}"
        raise ValueError(f"linear's bias {actual}: expected [{count}, {weight.shape[2]}], one row for each expert")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != rows.dtype and not torch.is_autocast_enabled(rows.device.type):
            raise TypeError(
                f"linear's {name} is {x.dtype}, and the rows are {rows.dtype}: expected one dtype; cast either"
            )


@api_boundary
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

    With a `capacity`, an expert has a limited number of positions per sequence, and further choices are dropped
    (`assign_positions`). Without one, nothing is dropped: rows are sorted by expert (`sort_rows`). In both cases the
    numbers do not depend on the mesh. Add a shared expert to the result: `x + layer(...) + shared(p, x)`.

    Args:
        f: the experts, `(experts, rows, linear) -> rows`. `linear(rows, weight, bias=None)` multiplies each expert's
            rows by its own matrix; everything else must work row by row. Some rows are unused zeros, where gradients
            must still be finite.
        experts: a tree of this rank's experts, along dimension 0 of each leaf.
        x: `[s, t, d]`: sequences of tokens.
        routing: the routing of these tokens, by `route`.
        axis: the axis over which experts are split. If no axis of this name is bound, this rank holds all experts.
        capacity: the positions of an expert, as a multiple of what even routing needs; None for dropless.

    Returns:
        `[s, t, d]`; zeros for a token all of whose choices were dropped.

    Raises:
        TypeError: if `x` is not floating-point, or `routing` is not a `Routing`.
        ValueError: if the axis does not divide the experts, a leaf of `experts` is not split, or shapes do not match.
            Also if there is a capacity, and the tokens of each sequence are split over ranks.

    Example:
        >>> from fzero.parallel import experts
        >>> def ffn(p, rows, linear):
        ...     return linear(torch.tanh(linear(rows, p["up"], p["bias"])), p["down"])
        >>> params = {"up": torch.randn(4, 8, 16), "bias": torch.randn(4, 16), "down": torch.randn(4, 16, 8)}
        >>> x, router, shared = torch.randn(2, 5, 8), torch.randn(8, 4), torch.randn(8, 8)
        >>> routing = experts.route(x @ router, k=2)
        >>> y = x + experts.layer(ffn, params, x, routing, capacity=1.25) + torch.tanh(x @ shared)
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
        outputs = f(experts, rows, partial(grouped_linear, order))
        return unsort_rows(outputs, order, routing.gates, axis)
    positions = assign_positions(routing.experts, count, capacity)
    outputs = f(experts, dispatch(x, positions, axis), _batched_linear)
    return combine(outputs, positions, routing.gates, axis)
