"""Grouped products: multiply rows that are sorted by expert by each expert's matrix; and the transposes of this map.

fzero has its own operation because torch's `grouped_mm` refuses float64, refuses all dtypes but bfloat16 under
stand-ins, and cannot be mapped over `offsets` that differ by rank. The operation calls torch's kernel where it applies.
"""

from typing import Any

import torch

from fzero._torch import allow_in_graph, register_flop_formula
from fzero._tracebacks import api_boundary

__all__ = ["grouped_mm", "grouped_outer", "reads_offsets_on_host"]


@torch.library.custom_op("fzero::grouped_mm", mutates_args=())
def _mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, expected_rows: int) -> torch.Tensor:
    if _has_kernel(x, w):
        offsets = offsets.to(x.device, non_blocking=True)
        y = torch.nn.functional.grouped_mm(_align_strides(x), _align_strides(w), offs=offsets.to(torch.int32))
        is_used = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        return torch.where(is_used.unsqueeze(-1), y, 0)  # the kernel does not write the rows behind the last end
    y, start = x.new_zeros(x.shape[0], w.shape[2]), 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], w[e], out=y[start:end])
        start = end
    return y


@torch.library.custom_op("fzero::grouped_outer", mutates_args=())
def _outer(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, expected_rows: int) -> torch.Tensor:
    if _has_kernel(x, y):
        ends = offsets.to(x.device, torch.int32, non_blocking=True)
        return torch.nn.functional.grouped_mm(_align_strides(x).mT, _align_strides(y), offs=ends)
    out, start = x.new_zeros(len(offsets), x.shape[1], y.shape[1]), 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end].mT, y[start:end], out=out[e])
        start = end
    return out


def _has_kernel(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether torch's grouped kernel applies: bfloat16, rows of a multiple of 16 bytes, and not empty."""
    sizes = (x.shape[-1], y.shape[-1])
    return x.dtype == torch.bfloat16 and x.shape[0] > 0 and all(size and size % 8 == 0 for size in sizes)


def reads_offsets_on_host(rows: torch.Tensor) -> bool:
    """Return whether the products of these rows read their offsets on the host, which waits for a GPU."""
    return rows.device.type == "cuda" and not (rows.dtype == torch.bfloat16 and rows.shape[-1] % 8 == 0)


def _align_strides(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that the kernel cannot read: its rows or columns must begin at multiples of 16 bytes.

    A leaf of a gathered unit is a view of the unit's buffer, and may begin anywhere.
    """
    *outer, rows, columns = x.stride()
    is_dense = (columns == 1 and rows >= x.shape[-1]) or (rows == 1 and columns >= x.shape[-2] and x.ndim == 3)
    is_aligned = all(stride % 8 == 0 for stride in (*outer, max(rows, columns))) and x.data_ptr() % 16 == 0
    return x if is_dense and is_aligned else x.clone(memory_format=torch.contiguous_format)


@_mm.register_fake
def _(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, expected_rows: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_outer.register_fake
def _(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, expected_rows: int) -> torch.Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


@register_flop_formula([torch.ops.fzero.grouped_mm, torch.ops.fzero.grouped_outer])
def _count_flops(
    x: Any, y: Any, offsets: Any, expected_rows: int, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Count the multiplications and additions for the expected rows: the other rows take no time."""
    return 2 * expected_rows * x[1] * y[-1]


class _GroupedProduct(torch.autograd.Function):
    """`grouped_mm` of rows `[r, d]` and matrices `[e, d, f]`; or `grouped_outer` of rows `[r, d]` and `[r, f]`."""

    @staticmethod
    def forward(is_outer: bool, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        return (_outer if is_outer else _mm)(x, y, offsets, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.is_outer, *tensors, ctx.rows = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y, *grouping = *ctx.saved_tensors, ctx.rows
        if ctx.is_outer:
            return None, _apply_mm(y, grad.mT, *grouping), _apply_mm(x, grad, *grouping), None, None
        return None, _apply_mm(grad, y.mT, *grouping), _apply_outer(x, grad, *grouping), None, None

    @staticmethod
    def jvp(ctx: Any, _: Any, dx: Any, dy: Any, *others: Any) -> Any:
        """Return the tangent of a bilinear map; a tangent of None stands for zeros."""
        x, y, *rest = *ctx.saved_tensors, ctx.rows
        f = _apply_outer if ctx.is_outer else _apply_mm
        parts = [f(*pair, *rest) for pair in ((dx, y), (x, dy)) if pair[0] is not None and pair[1] is not None]
        return sum(parts[1:], parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, is_outer: bool, *args: Any) -> Any:
        """Map over samples, such as simulated ranks, each of which has its own offsets."""
        f, columns = _apply_outer if is_outer else _apply_mm, list(zip(args, in_dims[1:], strict=True))
        samples = [[x if d is None else x.select(d, i) for x, d in columns] for i in range(info.batch_size)]
        return torch.stack([f(*sample) for sample in samples]), 0


@allow_in_graph  # as collectives/_table.py has it
def _apply_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, expected_rows: int) -> torch.Tensor:
    """Run `grouped_mm`; a plan counts the work of `expected_rows`."""
    return _GroupedProduct.apply(False, x, w, offsets, expected_rows)


@allow_in_graph
def _apply_outer(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, expected_rows: int) -> torch.Tensor:
    """Run `grouped_outer`; a plan counts the work of `expected_rows`."""
    return _GroupedProduct.apply(True, x, y, offsets, expected_rows)


@api_boundary
def grouped_mm(
    rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, expected_rows: int | None = None
) -> torch.Tensor:
    """Multiply rows that are sorted by expert by their expert's matrix.

    It runs under grad, jvp, vmap and jit, in any floating-point dtype. On a GPU, bfloat16 uses torch's kernel, which
    does not synchronise. The other dtypes read `offsets` on the host, and wait for them unless they lie there already,
    as those of `sort_rows` do: one copy serves all products of a layer.

    Args:
        rows: `[r, d]`.
        weights: `[e, d, f]`, of the rows' dtype.
        offsets: int64 `[e]`: where each expert's rows end. They begin where the previous expert's rows end.
        expected_rows: the number of rows before the last offset if routing is even, by default r. A plan counts their
            work.

    Returns:
        `[r, f]`; zeros behind the last end. Its transposes are `grouped_mm` with transposed matrices, and
        `grouped_outer`.

    Raises:
        TypeError: if the dtypes do not match.
        ValueError: if the shapes do not match.

    Example:
        >>> rows, weights = torch.ones(3, 1), torch.tensor([[[10.0]], [[20.0]]])
        >>> grouped_mm(rows, weights, torch.tensor([1, 3])).flatten()
        tensor([10., 20., 20.])
    """
    _check_rows("rows", rows, offsets)
    shape = (len(offsets), rows.shape[1])
    if weights.ndim != 3 or weights.shape[:2] != shape:
        raise ValueError(
            f"weights has the shape {list(weights.shape)}: expected [{shape[0]}, {shape[1]}, columns], "
            f"one matrix for each of the {shape[0]} experts in `offsets`"
        )
    _check_dtypes("weights", weights, rows)
    return _apply_mm(rows, weights, offsets, rows.shape[0] if expected_rows is None else expected_rows)


@api_boundary
def grouped_outer(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sum the outer products of each expert's rows: the gradient of `grouped_mm` by its matrices.

    Args:
        x: `[r, d]`, sorted by expert.
        y: `[r, f]`, of the same dtype.
        offsets: int64 `[e]`: where each expert's rows end.

    Returns:
        `[e, d, f]`; zeros for an expert without rows.

    Raises:
        TypeError: if the dtypes do not match.
        ValueError: if the shapes do not match.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, 1)
        >>> grouped_outer(x, y, torch.tensor([1, 3])).flatten()
        tensor([1., 5.])
    """
    _check_rows("x", x, offsets)
    if y.ndim != 2 or y.shape[0] != x.shape[0]:
        raise ValueError(f"y has the shape {list(y.shape)}: expected [{x.shape[0]}, columns], a row for each row of x")
    _check_dtypes("y", y, x)
    return _apply_outer(x, y, offsets, x.shape[0])


def _check_rows(name: str, rows: torch.Tensor, offsets: torch.Tensor) -> None:
    if rows.ndim != 2:
        raise ValueError(f"{name} has the shape {list(rows.shape)}: expected [rows, columns]")
    if not rows.is_floating_point():
        raise TypeError(f"{name} is {rows.dtype}: expected a floating-point tensor")
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(
            f"offsets has the shape {list(offsets.shape)}: expected [experts], where each expert's rows end"
        )
    if offsets.dtype != torch.int64:
        raise TypeError(f"offsets is {offsets.dtype}: expected int64")


def _check_dtypes(name: str, x: torch.Tensor, rows: torch.Tensor) -> None:
    if x.dtype != rows.dtype:
        raise TypeError(f"{name} is {x.dtype}, and the rows are {rows.dtype}: expected one dtype; cast either")
