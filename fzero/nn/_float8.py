"""float8_linear: a linear layer whose three matrix products run in float8.

An operand becomes codes of 8 bits and a scale, a power of two, such that its largest magnitude is among the largest
codes. So dividing by the scale is exact, and the rounding of a number hardly depends on others of its scale.
"""

from typing import Any, NamedTuple

import torch

from fzero._arguments import did_you_mean
from fzero._torch import allow_in_graph, scaled_mm
from fzero._tracebacks import api_boundary
from fzero.codecs import KINDS, block_scales, largest_magnitudes

__all__ = ["SCALINGS", "SIZE_MULTIPLE", "float8_linear"]

SCALINGS = ("tensorwise", "rowwise")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZE_MULTIPLE = 16  # the kernels of GPUs take matrices whose sizes are multiples of it

_VALUE_DTYPE = torch.float8_e4m3fn  # the codes of inputs and weights
_KIND_OF_DTYPE = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}


@api_boundary
def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, scaling: str = "tensorwise"
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, with matrix products in float8 in the forward and the backward pass.

    Inputs and weights are rounded to e4m3 (3 bits of precision). Gradients of the output are rounded to e5m2 (2 bits,
    a wider range) with "tensorwise", and to e4m3 with "rowwise", as in torchao's recipes of these names. Sums are in
    float32. The gradients of `x` and `weight` are those of the exact layer, computed from rounded operands.

    On a CPU torch's float8 product computes the same from the same codes, slowly. A card needs compute capability 8.9
    or above.

    Args:
        x: `[.., k]`, float32, bfloat16 or float16.
        weight: `[n, k]` of the same dtype, as in `torch.nn.Linear`. k and n are multiples of 16.
        bias: `[n]`; None for none.
        scaling: "tensorwise", one scale for each operand; or "rowwise", one for each row of an operand, along the
            dimension that is summed over. Rowwise scales are more exact, and cost a second rounding of each operand.

    Returns:
        `[.., n]` of the dtype of `x`. Each number that shares a scale with an infinite or nan number gives nan.

    Raises:
        ValueError: if the shapes do not match, a size of `weight` is not a multiple of 16, or `scaling` is neither.
        TypeError: if the dtypes are others.
        NotImplementedError: for forward-mode derivatives, such as `torch.func.jvp`.

    Example:
        >>> x, weight = torch.randn(5, 32), torch.randn(48, 32)
        >>> exact = torch.nn.functional.linear(x, weight)
        >>> float((float8_linear(x, weight) - exact).norm() / exact.norm()) < 0.06
        True

    References:
        Micikevicius et al.: FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    _check_product(x, weight, bias, scaling)
    gradient = torch.float8_e5m2 if scaling == "tensorwise" else _VALUE_DTYPE
    rows = x.reshape(-1, x.shape[-1])
    y = _scaled_product(
        _Recipe(a=_VALUE_DTYPE, b=_VALUE_DTYPE, gradient=gradient, is_rowwise=scaling == "rowwise", adds_fast=True),
        rows,
        weight,
    )
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def _check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str) -> None:
    """Raise an error for shapes, dtypes or a scaling that float8 products do not have."""
    if scaling not in SCALINGS:
        raise ValueError(
            f"scaling={scaling!r}: expected {' or '.join(map(repr, SCALINGS))}{did_you_mean(scaling, SCALINGS)}"
        )
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x is {list(x.shape)}, and weight {list(weight.shape)}: expected [.., k] and [n, k]")
    if any(size % SIZE_MULTIPLE for size in weight.shape):
        raise ValueError(
            f"weight is {list(weight.shape)}: expected multiples of {SIZE_MULTIPLE}, as float8 products need; pad it, "
            "or use torch.nn.functional.linear"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}: expected [{len(weight)}], one number for each row of weight")
    for name, other in (("weight", weight), ("bias", bias)):
        if x.dtype not in _DTYPES or (other is not None and other.dtype != x.dtype):
            kind = "None" if other is None else other.dtype
            raise TypeError(
                f"x is {x.dtype}, and {name} {kind}: expected one dtype, float32, bfloat16 or float16; cast either"
            )


class _Recipe(NamedTuple):
    """How the operands of a product `a @ b.mT` are rounded.

    Attributes:
        a: the dtype of the codes of a.
        b: the dtype of the codes of b.
        gradient: the dtype of the codes of the product's gradient.
        is_rowwise: whether each row of a and of b has a scale; else each operand has one.
        adds_fast: whether a card may add in fewer than float32's bits.
    """

    a: torch.dtype
    b: torch.dtype
    gradient: torch.dtype
    is_rowwise: bool
    adds_fast: bool

    def of_gradient(self) -> "_Recipe":
        """Return how a gradient and a value are rounded: never two gradients, for which cards have no product."""
        return _Recipe(
            a=self.gradient, b=_VALUE_DTYPE, gradient=self.gradient, is_rowwise=self.is_rowwise, adds_fast=False
        )


class _ScaledOperand(NamedTuple):
    """An operand's codes and scales.

    Attributes:
        codes: float8 `[m, k]`.
        scale: float32, 0-d or `[m, 1]`. It is infinite if a number that it serves is not finite.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def transposed(self) -> "_ScaledOperand":
        """The codes of the transposed operand; with one scale for all numbers."""
        return _ScaledOperand(self.codes.mT, self.scale)


def _encode_matrix(x: torch.Tensor, dtype: torch.dtype, is_rowwise: bool) -> _ScaledOperand:
    """Return the codes of a matrix, without a derivative."""
    x = x.detach()
    # infinity if a number is not finite: a quotient is then 0 or nan, and the product nan
    largest = largest_magnitudes(x).unsqueeze(-1) if is_rowwise else largest_magnitudes(x.reshape(-1))
    scale = block_scales(KINDS[_KIND_OF_DTYPE[dtype]], largest)
    return _ScaledOperand((x.to(torch.float32) / scale).to(dtype), scale)


def _scaled_product(
    recipe: _Recipe,
    a: torch.Tensor,
    b: torch.Tensor,
    a_operand: _ScaledOperand | None = None,
    b_operand: _ScaledOperand | None = None,
) -> torch.Tensor:
    """Return `a @ b.mT` of `[m, k]` and `[n, k]`, from these codes of the operands or by default from their own."""
    if not a.numel() or not b.numel():
        return a @ b.mT  # nothing has no largest magnitude
    a_operand = _encode_matrix(a, recipe.a, recipe.is_rowwise) if a_operand is None else a_operand
    b_operand = _encode_matrix(b, recipe.b, recipe.is_rowwise) if b_operand is None else b_operand
    return _apply_product(recipe, a, b, *a_operand, *b_operand)


@allow_in_graph  # as collectives/_table.py has it
def _apply_product(recipe: Any, *tensors: torch.Tensor) -> Any:
    return _Product.apply(recipe, *tensors)


class _Product(torch.autograd.Function):
    """`a @ b.mT`, computed from codes. Its gradients are products of the same kind, so it has derivatives of any order.

    The codes of a are kept for the backward pass, which needs no other bits of a: in a traced step nothing else of it
    stays alive. Those of b are made again, since b may be a weight that is gathered again. Rows of the transposed
    operands have other scales, so rowwise codes are made again, too.
    """

    @staticmethod
    def forward(recipe: _Recipe, a: torch.Tensor, b: torch.Tensor, *codes: torch.Tensor) -> torch.Tensor:
        """Return the product `[m, n]` of codes; the columns are padded to the multiple that the kernel needs."""
        a_codes, a_scale, b_codes, b_scale = codes
        # the columns of the product: only derivatives of gradients have a rest
        n, padding = len(b), -len(b) % SIZE_MULTIPLE
        if padding and b_scale.ndim:
            b_scale = torch.nn.functional.pad(b_scale, (0, 0, 0, padding))
        y = scaled_mm(
            a=_pad_codes(a_codes),
            b=_pad_codes(b_codes, padding),
            scale_a=a_scale,
            scale_b=b_scale,
            dtype=a.dtype,
            fast=recipe.adds_fast,
        )
        return y[:, :n] if padding else y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.recipe, a, b, a_codes, a_scale, *_ = inputs
        reuses = not ctx.recipe.is_rowwise and ctx.recipe.a == _VALUE_DTYPE
        ctx.save_for_backward(a, b, *([a_codes, a_scale] if reuses else []))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of the operands, which are float8 products of the rounded gradient."""
        a, b, *scales = ctx.saved_tensors
        (g,), recipe, (_, needs_a, needs_b, *_) = grads, ctx.recipe.of_gradient(), ctx.needs_input_grad
        of_a = of_b = None
        if recipe.is_rowwise:
            of_a = _scaled_product(recipe, g, b.mT) if needs_a else None
            of_b = _scaled_product(recipe, g.mT, a.mT) if needs_b else None
            return None, of_a, of_b, None, None, None, None
        g_operand = _encode_matrix(g, recipe.a, False)
        if needs_a:
            of_a = _scaled_product(recipe, g, b.mT, g_operand, _encode_matrix(b, _VALUE_DTYPE, False).transposed)
        if needs_b:
            a_operand = _ScaledOperand(*scales) if scales else _encode_matrix(a, _VALUE_DTYPE, False)
            of_b = _scaled_product(recipe, g.mT, a.mT, g_operand.transposed, a_operand.transposed)
        return None, of_a, of_b, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "float8 products have no forward-mode derivative: use torch.func.grad or vjp, or take the jvp of the "
            "layer without float8"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, recipe: _Recipe, *tensors: Any) -> Any:
        """Map over samples, such as simulated ranks. Each has scales of its own, so each is a product of its own."""
        columns = list(zip(tensors, in_dims[1:], strict=True))
        samples = [[x if d is None else x.select(d, i) for x, d in columns] for i in range(info.batch_size)]
        return torch.stack([_apply_product(recipe, *sample) for sample in samples]), 0


def _pad_codes(codes: torch.Tensor, rows: int = 0) -> torch.Tensor:
    """Return codes `[m, k]` in row-major order, with zeros: so many rows, and columns up to a multiple of 16."""
    columns = -codes.shape[1] % SIZE_MULTIPLE
    if not columns and not rows:
        return codes.contiguous()
    as_bytes = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows))  # float8 cannot be padded
    return as_bytes.contiguous().view(codes.dtype)
