"""Private torch APIs that find what a function decides by a size: it runs on stand-ins, one of whose sizes is a symbol.

They were seen on torch 2.13 and 2.14. `tests/_torch/test_decisions.py` says which one broke when torch changes.
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

from fzero._torch.compiler import padded
from fzero._torch.levels import deciding
from fzero._torch.recorder import DEVICE_OF, INSTEAD, user_line
from fzero._torch.tracing import compiling

if TYPE_CHECKING:
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["FixedSizeError", "decisions"]

DEGREE = 2  # of the polynomials that sizes may be
COMPARISONS = 500  # each takes milliseconds


class FixedSizeError(RuntimeError):
    """A function cannot be run with a symbol for a size, or needs its number. Says why."""


def decisions(
    f: Callable[..., Any], tensors: Sequence[torch.Tensor], places: Collection[tuple[int, int]], device: torch.device
) -> Callable[[int], bool]:
    """Find for which sizes a function runs the same operations, with sizes that are polynomials of the one.

    It runs `f` once, computes nothing, and lets torch note each comparison that Python, or an operation, makes. What
    Python learns of a size without comparing it is not noted: its type, its text, an error about it that is caught.

    Args:
        f: a function of tensors. What it returns is ignored.
        tensors: its arguments; their values are not looked at, and they may be on the meta device.
        places: the positions `(tensor, dimension)` of the size, which is one number at all of them.
        device: where the tensors are to lie.

    Returns:
        A function of a size: whether every comparison has the outcome that it has for the given one.

    Raises:
        FixedSizeError: if `f` needs the size as a number, if a size that follows from it is no polynomial of degree 2,
            or if `f` cannot be run so.
    """
    import sympy

    env = _environment()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    stand_ins = [_stand_in(x, mode, {d for j, d in places if j == i}, device) for i, x in enumerate(tensors)]
    symbol = _symbol_of(stand_ins, places)
    operations = _Operations(symbol, env)
    _run(f, stand_ins, mode, operations)
    if len(env.guards) > COMPARISONS:
        raise FixedSizeError(f"it compares the length more than {COMPARISONS} times")
    operations.check_not_fixed("")
    if operations.refusal is not None:  # which the function may have caught
        raise operations.refusal
    conditions = [guard.expr for guard in env.guards]

    @cache
    def holds(size: int) -> bool:
        # torch takes a symbol for a size of 2 or more: 0 and 1 broadcast, and lie otherwise
        return size >= 2 and all(c.xreplace({symbol: sympy.Integer(size)}) == sympy.true for c in conditions)

    return holds


def _environment() -> "ShapeEnv":
    """Make what notes comparisons, which refuses too many: `size in range(10_000)` makes one for each number."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Limited(ShapeEnv):
        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            if len(self.guards) > COMPARISONS:
                raise FixedSizeError(f"it compares the length more than {COMPARISONS} times, at {user_line()}")
            return super().evaluate_expr(*args, **kwargs)

    return Limited(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # a value is no size


def _run(f: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode, operations: "_Operations") -> None:
    try:
        with compiling(), mode, _Substitutes(), operations, deciding():
            f(*args)
    except FixedSizeError:
        raise
    except Exception as error:  # whatever a user's function and torch's kernels raise
        raise FixedSizeError(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error


def _stand_in(x: torch.Tensor, mode: FakeTensorMode, dims: Collection[int], device: torch.device) -> Any:
    if not dims:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(x.dim())]
    real = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(kinds))


def _symbol_of(stand_ins: Sequence[torch.Tensor], places: Collection[tuple[int, int]]) -> "sympy.Symbol":
    sizes = [stand_ins[i].shape[d] for i, d in places]
    found = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
    if len(found) != 1 or not all(isinstance(size, torch.SymInt) for size in sizes):  # torch has no symbol for 0 or 1
        raise FixedSizeError("the sizes that change are not one length")
    return found.pop()


class _Operations(TorchDispatchMode):
    """Runs operations on stand-ins, and checks that the size stays a symbol, and all sizes polynomials of it."""

    def __init__(self, symbol: "sympy.Symbol", env: "ShapeEnv") -> None:
        super().__init__()
        self.symbol, self.env = symbol, env
        self.known: set[Any] = set()
        self.refusal: FixedSizeError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is torch.ops.aten.constant_pad_nd.default:
            with self:
                return padded(*args, **(kwargs or {}))
        out = INSTEAD.get(func, func)(*args, **(kwargs or {}))
        self.check_not_fixed(user_line())
        for x in tree_leaves((args, kwargs, out)):
            self._check(x)
        return out

    def check_not_fixed(self, line: str) -> None:
        """Check that nothing has asked for the size as a number.

        Raises:
            FixedSizeError: if something has.
        """
        if self.symbol in self.env.replacements:
            self._refuse(f"it needs the length as a number{line and f', at the latest at {line}'}")

    def _refuse(self, why: str) -> NoReturn:
        self.refusal = self.refusal or FixedSizeError(why)
        raise self.refusal

    def _check(self, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            for size in (*x.shape, *x.stride(), x.storage_offset()):
                self._check(size)
        elif isinstance(x, torch.SymInt) and (expr := x.node.expr) not in self.known:
            simple = _simplified(expr, self.symbol)
            if not simple.is_polynomial(self.symbol) or simple.as_poly(self.symbol).degree() > DEGREE:
                self._refuse(f"a size at {user_line()} is {expr}, no polynomial of the length")
            self.known.add(expr)
        elif isinstance(x, torch.SymFloat | torch.SymBool):
            self._refuse(f"an operation at {user_line()} is given {x}, no whole number")


def _simplified(expr: Any, symbol: "sympy.Symbol") -> Any:
    """Replace what torch leaves standing: a division without rest, and `Max(1, x)`, as strides have it, of x from 1 on.

    The size is 2 or more.
    """
    from torch.utils._sympy.functions import FloorDiv, Max

    for found in sorted(expr.atoms(FloorDiv, Max), key=lambda x: x.count_ops()):
        polynomials = [x.as_poly(symbol) for x in found.args if x != 1 and x.is_polynomial(symbol)]
        if isinstance(found, FloorDiv) and len(polynomials) == 2:
            quotient, rest = polynomials[0].div(polynomials[1])
            whole = rest.is_zero and all(c.is_integer for c in quotient.all_coeffs())
            expr = expr.xreplace({found: quotient.as_expr()}) if whole else expr
        elif isinstance(found, Max) and 1 in found.args and len(polynomials) == len(found.args) - 1 == 1:
            *rising, _ = polynomials[0].all_coeffs()
            positive = min(rising, default=0) >= 0 and polynomials[0].eval(2) >= 1
            expr = expr.xreplace({found: polynomials[0].as_expr()}) if positive else expr
    return expr


class _Substitutes(TorchFunctionMode):
    """Runs functions of torch that ask in C++ for sizes as numbers by others whose results have the same shapes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUBSTITUTES:
            return func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.SymFloat | torch.SymInt) for x in tree_leaves((args, kwargs))):
            raise FixedSizeError(f"a number that {func.__name__} is given at {user_line()} follows from the length")
        return _SUBSTITUTES[func](*args, **(kwargs or {}))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.matmul(x, weight.t())
    return y if bias is None else y + bias


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not p:
        return x
    return x.mul_(1.0) if inplace else x * 1.0


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
    return F.scaled_dot_product_attention(*args[5:], **given | {"dropout_p": 0.0})


_SUBSTITUTES: dict[Any, Any] = {
    F.linear: _linear,
    F.dropout: _dropout,
    torch.dropout: lambda x, p, train: _dropout(x, p, train),
    F.scaled_dot_product_attention: _attention,
}
