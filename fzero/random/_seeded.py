"""seeded: a function's random draws taken from a key."""

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fzero._torch import TorchDispatchMode
from fzero._torch.levels import vmaps
from fzero.axes import axis_index, axis_names, data_axes, micro_batch
from fzero.random import _draws, _torch_draws
from fzero.random._keys import check_key, fold_in

__all__ = ["BODIES", "DRAWS", "draw_from", "next_key", "seeded"]

# The random functions of torch that draw by key in a seeded function.


DRAWS: dict[Any, Callable[..., Any]] = {
    torch.dropout: _torch_draws.dropout,
    torch.feature_dropout: _torch_draws.feature_dropout,
    torch.alpha_dropout: _torch_draws.alpha_dropout,
    torch.feature_alpha_dropout: _torch_draws.feature_alpha_dropout,
    torch.dropout_: _torch_draws.in_place(_torch_draws.dropout),
    torch.feature_dropout_: _torch_draws.in_place(_torch_draws.feature_dropout),
    torch.alpha_dropout_: _torch_draws.in_place(_torch_draws.alpha_dropout),
    torch.feature_alpha_dropout_: _torch_draws.in_place(_torch_draws.feature_alpha_dropout),
    torch.native_dropout: _torch_draws.native_dropout,
    torch.rrelu: _torch_draws.rrelu,
    torch.rrelu_: _torch_draws.in_place(_torch_draws.rrelu),
    F.scaled_dot_product_attention: _torch_draws.attention,
    torch.rand: _torch_draws.new(_draws.uniform),
    torch.randn: _torch_draws.new(_draws.normal),
    torch.rand_like: _torch_draws.new_like(_draws.uniform),
    torch.randn_like: _torch_draws.new_like(_draws.normal),
    torch.randint: _torch_draws.randint,
    torch.randint_like: _torch_draws.randint_like,
    torch.randperm: _torch_draws.randperm,
    torch.bernoulli: _torch_draws.bernoulli,
    torch.Tensor.bernoulli: _torch_draws.bernoulli,
    torch.normal: _torch_draws.normal,
    torch.Tensor.uniform_: _torch_draws.uniform_,
    torch.Tensor.normal_: _torch_draws.normal_,
    torch.Tensor.exponential_: _torch_draws.exponential_,
    torch.Tensor.bernoulli_: _torch_draws.bernoulli_,
    init.uniform_: _torch_draws.init_uniform,
    init.normal_: _torch_draws.init_normal,
    init.kaiming_uniform_: _torch_draws.init_kaiming_uniform,
}
"""torch's function -> the function that answers its calls."""


def _body(f: Any) -> Any:
    """Copy a function of torch.nn.functional without its first question, whether a mode wants the whole call.

    A mode that says yes is switched off in the call, and would not be asked about the draws that the body makes.
    """
    no = {name: lambda *_: False for name in f.__globals__ if name.startswith("has_torch_function")}
    body = types.FunctionType(f.__code__, {**f.__globals__, **no}, f.__name__, f.__defaults__, f.__closure__)
    body.__kwdefaults__ = f.__kwdefaults__
    return body


BODIES: dict[Any, Any] = {
    f: _body(f)
    for f in (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.multi_head_attention_forward,
    )
}
"""torch's Python functions that make draws -> their bodies."""


def seeded(f: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that takes a key first, and draws all its random numbers from it.

    Inside, these draw from the key in the order of the calls: torch's dropouts, attention with dropout, `rand`,
    `randn`, `randint`, `normal`, `bernoulli`, `randperm`, and their `_like` and in-place forms. So do functions that
    call them: `nn.init`, `gumbel_softmax`, `rrelu`. torch's own generator is neither read nor advanced. A call that is
    given a `generator` keeps it.

    The key is first folded with this rank's index along the axes of the data, then with the number of the micro-batch.
    The axes of the data are those of the running step; in `mesh.spmd` all are, and outside any mesh the index is 0. So
    ranks draw differently, and ranks that compute one sample together, as in tensor parallelism, draw alike. One key
    gives each rank the same numbers at every stage, in every simulation, and on real processes.

    To have the samples of a `torch.vmap` inside `f` differ, map a seeded function of its own over `split(key, n)`; with
    `randomness="same"` they draw alike. Under torch.compile nothing is refused: a function without a draw by key
    draws from torch's generator there, and samples draw alike.

    Args:
        f: any function of torch code.

    Returns:
        A function `(key, *args, **kwargs)` that returns the result of `f(*args, **kwargs)`.

    Raises:
        TypeError: when called, if the first argument is no key.
        RuntimeError: when called, if `f` calls a function that has no draw by key here (`multinomial`, an LSTM's
            dropout). Also if `f` draws in a vmap inside, or in a rank program, where all draws would silently be alike.

    Example:
        >>> import fzero
        >>> from fzero import random
        >>> import torch.nn.functional as F
        >>> f = random.seeded(lambda x: F.dropout(x, 0.5))
        >>> f(random.key(0), torch.ones(6))
        tensor([2., 0., 0., 2., 0., 0.])
        >>> f(random.key(0), torch.ones(6))
        tensor([2., 0., 0., 2., 0., 0.])
        >>> mesh = fzero.mesh(dp=2)
        >>> mesh.spmd(lambda k, x: fzero.PerRank(f(k, x)))(random.key(0), torch.ones(6)).value
        tensor([[2., 0., 0., 2., 0., 0.],
                [2., 0., 2., 2., 0., 0.]])
    """

    def from_key(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        check_key(key)
        index = axis_index(tuple([a.name for a in data_axes()]))
        return draw_from(fold_in(fold_in(key, index), micro_batch()), f, *args, **kwargs)

    return from_key


class _Running(threading.local):
    """The seeded functions that this thread runs."""

    def __init__(self) -> None:
        self.stack: list[_Drawing] = []


_RUNNING = _Running()


def draw_from(key: torch.Tensor, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `f(*args, **kwargs)` with its draws taken from this very key, folded with nothing."""
    mode = _Drawing(key)
    _RUNNING.stack.append(mode)
    try:
        if torch.compiler.is_dynamo_compiling():  # which traces no TorchDispatchMode
            with mode:
                return f(*args, **kwargs)
        with mode, _Refusing(mode):
            return f(*args, **kwargs)
    finally:
        _RUNNING.stack.pop()


def next_key() -> torch.Tensor | None:
    """Take the key of the next draw from the seeded function that runs; None where none does.

    A caller that runs a function twice, such as a rematerialisation, calls `draw_from` with this key both times.
    """
    return _RUNNING.stack[-1].next_key() if _RUNNING.stack else None


class _Drawing(TorchFunctionMode):
    """Answers calls of torch's random functions with draws by key."""

    def __init__(self, key: torch.Tensor) -> None:
        super().__init__()
        self.key, self.drawn, self.calls = key, 0, ""
        self.axes, self.maps = axis_names(), _vmaps()

    def next_key(self) -> torch.Tensor:
        if axis_names() != self.axes:
            raise RuntimeError(
                f"fzero.random.seeded: a rank program over {list(axis_names())} runs inside, whose ranks have no "
                "keys of their own: call seeded(f)(key, ...) inside the rank program, or the step"
            )
        if set(_vmaps()[len(self.maps) :]) - {"Same"}:
            raise RuntimeError(
                "fzero.random.seeded: a vmap inside draws random numbers. Say randomness='same' to have all samples "
                "draw alike; to have them differ, map a seeded function of its own over fzero.random.split(key, n)"
            )
        self.drawn += 1
        return fold_in(self.key, self.drawn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BODIES:  # torch has switched this mode off, and its Python function's body makes the draws
            with self:
                return BODIES[func](*args, **kwargs)
        if func in DRAWS and kwargs.get("generator") is None:
            out = DRAWS[func](self.next_key, *args, **kwargs)
            if out is not NotImplemented:
                return out
        before, self.calls = self.calls, getattr(func, "__name__", "")
        try:
            return func(*args, **kwargs)
        finally:
            self.calls = before


def _vmaps() -> list[str]:
    return [] if torch.compiler.is_dynamo_compiling() else vmaps()  # Dynamo does not see them


class _Refusing(TorchDispatchMode):
    """Refuses operations that draw from torch's generator."""

    supports_higher_order_operators = True

    def __init__(self, drawing: _Drawing) -> None:
        super().__init__()
        self.drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _is_a_draw(func, args, kwargs):
            calls = f"torch's {self.drawing.calls} ({func})" if self.drawing.calls else str(func)
            raise RuntimeError(
                f"fzero.random.seeded: {calls} draws from torch's own generator, and has no draw by key here. Make "
                "it of what has (fzero.random: uniform, normal, bernoulli, randint, dropout), or give it a generator"
            )
        return func(*args, **kwargs)


def _is_a_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation that can draw does: not with dropout 0, in evaluation, or with a generator."""
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
    if any(isinstance(x, torch.Generator) for x in given.values()):
        return False
    if any(given.get(name) is False for name in ("train", "training")):
        return False
    return not any(given.get(name, 1) == 0 for name in ("dropout", "dropout_p"))
