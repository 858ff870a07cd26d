"""Private torch APIs that find a function's decisions by a size: they run it on stand-ins with a symbol as the size.

They exist in torch 2.13 and 2.14. If torch changes one of them, `tests/_torch/test_decisions.py` shows which.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fzero._torch.compiler import pad_constant
from fzero._torch.recorder import DEVICE_OF, REPLACEMENTS, user_line
from fzero._torch.running_transforms import set_deciding
from fzero._torch.tracing import set_compiling

if TYPE_CHECKING:
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["FixedSizeError", "decisions"]

_MAX_DEGREE = 2  # of the polynomials that sizes may be
_MAX_COMPARISONS = 500  # each takes milliseconds


class FixedSizeError(RuntimeError):
    """A function cannot run with a symbol for a size, or needs the size's number. The message gives the reason."""


def decisions(
    f: Callable[..., Any], tensors: Sequence[torch.Tensor], size_dims: Collection[tuple[int, int]], device: torch.device
) -> Callable[[int], bool]:
    """Return a function that says for which sizes `f` runs the same operations.

    All sizes within `f` must be polynomials of this size. `f` runs once, on stand-ins, and torch records each
    comparison of a size by Python or an operation. Torch records no other use of a size, such as its type, its text, or
    an error about it that is caught.

    Args:
        f: a function of tensors. Its results are ignored.
        tensors: its arguments; their values are not read, and they may be on the meta device.
        size_dims: the positions `(tensor, dimension)` of the size, which is equal at all of them.
        device: the device of the stand-ins.

    Returns:
        A function of a size. It returns whether every comparison has the same outcome as at the current size.

    Raises:
        FixedSizeError: if `f` needs the size as a number, if a size that follows from it is not a polynomial of degree
            2, or if `f` cannot run on stand-ins.
    """
    import sympy

    env = _make_environment()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    stand_ins = [_stand_in(x, mode, {d for j, d in size_dims if j == i}, device) for i, x in enumerate(tensors)]
    symbol = _size_symbol(stand_ins, size_dims)
    operations = _Operations(symbol, env)
    _record_operations(f, stand_ins, mode, operations)
    if len(env.guards) > _MAX_COMPARISONS:
        raise FixedSizeError(f"it compares the length more than {_MAX_COMPARISONS} times")
    operations.check_not_fixed("")
    if operations.refusal is not None:  # the function may have caught this error
        raise operations.refusal
    conditions = [guard.expr for guard in env.guards]

    @cache
    def holds(size: int) -> bool:
        # torch assumes that a symbol is at least 2: sizes 0 and 1 broadcast, and have other strides
        return size >= 2 and all(c.xreplace({symbol: sympy.Integer(size)}) == sympy.true for c in conditions)

    return holds


def _make_environment() -> "ShapeEnv":
    """Return an environment that records comparisons up to a limit: `size in range(10_000)` compares 10_000 times."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class LimitedShapeEnv(ShapeEnv):
        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            if len(self.guards) > _MAX_COMPARISONS:
                raise FixedSizeError(f"it compares the length more than {_MAX_COMPARISONS} times, at {user_line()}")
            return super().evaluate_expr(*args, **kwargs)

    return LimitedShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # no sizes from values


def _record_operations(
    f: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode, operations: "_Operations"
) -> None:
    try:
        with set_compiling(), mode, _Substitutes(), operations, set_deciding():
            f(*args)
    except FixedSizeError:
        raise
    except Exception as error:  # the user's function and torch's kernels may raise anything
        raise FixedSizeError(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error


def _stand_in(x: torch.Tensor, mode: FakeTensorMode, dims: Collection[int], device: torch.device) -> Any:
    if not dims:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(x.dim())]
    real = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(kinds))


def _size_symbol(stand_ins: Sequence[torch.Tensor], size_dims: Collection[tuple[int, int]]) -> "sympy.Symbol":
    sizes = [stand_ins[i].shape[d] for i, d in size_dims]
    symbols = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
    if len(symbols) != 1 or not all(isinstance(size, torch.SymInt) for size in sizes):  # torch has no symbol for 0 or 1
        raise FixedSizeError("the sizes that change are not one length")
    return symbols.pop()


class _Operations(TorchDispatchMode):
    """Runs operations on stand-ins, and checks that the size stays a symbol and all sizes are polynomials of it."""

    def __init__(self, symbol: "sympy.Symbol", env: "ShapeEnv") -> None:
        super().__init__()
        self.symbol, self.env = symbol, env
        self.checked: set[Any] = set()
        self.refusal: FixedSizeError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is torch.ops.aten.constant_pad_nd.default:
            with self:
                return pad_constant(*args, **(kwargs or {}))
        out = REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))
        self.check_not_fixed(user_line())
        for x in tree_leaves((args, kwargs, out)):
            self._check_sizes(x)
        return out

    def check_not_fixed(self, line: str) -> None:
        """Check that no code has read the size as a number; `line` is the current source line.

        Raises:
            FixedSizeError: if code has.
        """
        if self.symbol in self.env.replacements:
            self._refuse(f"it needs the length as a number{line and f', at the latest at {line}'}")

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = self.refusal or FixedSizeError(reason)
        raise self.refusal

    def _check_sizes(self, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            for size in (*x.shape, *x.stride(), x.storage_offset()):
                self._check_sizes(size)
        elif isinstance(x, torch.SymInt) and (expr := x.node.expr) not in self.checked:
            simple = _simplify(expr, self.symbol)
            if not simple.is_polynomial(self.symbol) or simple.as_poly(self.symbol).degree() > _MAX_DEGREE:
                self._refuse(f"a size at {user_line()} is {expr}, no polynomial of the length")
            self.checked.add(expr)
        elif isinstance(x, torch.SymFloat | torch.SymBool):
            self._refuse(f"an operation at {user_line()} gets {x}, which is not a whole number")


def _simplify(expr: Any, symbol: "sympy.Symbol") -> Any:
    """Simplify exact divisions, and `Max(1, x)` with x >= 1, which occurs in strides. Torch leaves both in place.

    The size is 2 or more.
    """
    from torch.utils._sympy.functions import FloorDiv, Max

    for term in sorted(expr.atoms(FloorDiv, Max), key=lambda x: x.count_ops()):
        polynomials = [x.as_poly(symbol) for x in term.args if x != 1 and x.is_polynomial(symbol)]
        if isinstance(term, FloorDiv) and len(polynomials) == 2:
            quotient, rest = polynomials[0].div(polynomials[1])
            is_exact = rest.is_zero and all(c.is_integer for c in quotient.all_coeffs())
            expr = expr.xreplace({term: quotient.as_expr()}) if is_exact else expr
        elif isinstance(term, Max) and 1 in term.args and len(polynomials) == len(term.args) - 1 == 1:
            *rising, _ = polynomials[0].all_coeffs()
            is_positive = min(rising, default=0) >= 0 and polynomials[0].eval(2) >= 1
            expr = expr.xreplace({term: polynomials[0].as_expr()}) if is_positive else expr
    return expr


class _Substitutes(TorchFunctionMode):
    """Replaces functions of torch that read sizes as numbers in C++ by functions whose results have the same shapes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUBSTITUTES:
            return func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.SymFloat | torch.SymInt) for x in tree_leaves((args, kwargs))):
            raise FixedSizeError(f"{func.__name__} at {user_line()} gets a number that follows from the length")
        return _SUBSTITUTES[func](*args, **(kwargs or {}))


def _linear_by_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.matmul(x, weight.t())
    return y if bias is None else y + bias


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not p:
        return x
    return x.mul_(1.0) if inplace else x * 1.0


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    by_name = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
    return F.scaled_dot_product_attention(*args[5:], **by_name | {"dropout_p": 0.0})


_SUBSTITUTES: dict[Any, Any] = {
    F.linear: _linear_by_matmul,
    F.dropout: _dropout,
    torch.dropout: lambda x, p, train: _dropout(x, p, train),
    F.scaled_dot_product_attention: _attention,
}
