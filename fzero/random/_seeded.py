"""seeded: take all random draws of a function from a key."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fzero._arguments import check_callable
from fzero._torch import TorchDispatchMode
from fzero._torch.levels import vmaps
from fzero._tracebacks import api_boundary
from fzero.axes import axis_index, axis_names, loss_axes, micro_batch
from fzero.random._keys import check_key, fold_in
from fzero.random._random_functions import BODIES, DRAWS

__all__ = ["call_with_key", "next_key", "seeded"]


@api_boundary
def seeded(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes a key as its first argument and draws all its random numbers from it.

    Inside `f`, torch's random functions draw from the key, in the order of the calls. These are dropouts, attention
    with dropout, `rand`, `randn`, `randint`, `normal`, `bernoulli`, `randperm`, and their `_like` and in-place forms.
    So do functions that call them: `nn.init`, `gumbel_softmax`, `rrelu`. torch's own generator is neither read nor
    advanced. A call with a `generator` argument uses that generator.

    This rank's index along the data-parallel axes is folded into the key, and then the micro-batch's number. The
    data-parallel axes are those of the running step. In `mesh.spmd` they are all axes, and outside any mesh the index
    is 0. So ranks draw different numbers, but ranks that compute one sample together, as in tensor parallelism, draw
    the same. One key gives each rank the same numbers at every stage, in every simulation, and on real processes.

    To draw different numbers for the samples of a `torch.vmap` inside `f`, map another seeded function over
    `split(key, n)`. With `randomness="same"` all samples draw the same numbers. Under torch.compile nothing is refused:
    a function without a draw by key draws from torch's generator there, and samples draw the same numbers. With torch
    2.11 those are also `torch.rand` and the others that take no tensor, which Dynamo 2.12 shows to `seeded`.

    Args:
        f: any function of torch code.

    Returns:
        A function `(key, *args, **kwargs)` that returns the result of `f(*args, **kwargs)`.

    Raises:
        TypeError: when called, if the first argument is not a key.
        RuntimeError: when called, if `f` calls a function that has no draw by key (`multinomial`, an LSTM's dropout).
            Also if `f` draws in an inner vmap or rank program, where all draws would silently be the same.

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
    check_callable("f", f, "a function, as in fzero.random.seeded(f)(key, x)")

    @api_boundary
    def from_key(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        check_key(key)
        index = axis_index(tuple([a.name for a in loss_axes()]))
        return call_with_key(fold_in(fold_in(key, index), micro_batch()), f, *args, **kwargs)

    return from_key


class _DrawStack(threading.local):
    """The stack of seeded functions that this thread is running."""

    def __init__(self) -> None:
        self.stack: list[_DrawsByKey] = []


_RUNNING = _DrawStack()


def call_with_key(key: torch.Tensor, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `f(*args, **kwargs)` and take its draws from this key, with nothing folded in."""
    mode = _DrawsByKey(key)
    _RUNNING.stack.append(mode)
    try:
        if torch.compiler.is_dynamo_compiling():  # Dynamo traces no TorchDispatchMode
            with mode:
                return f(*args, **kwargs)
        with mode, _RefusalOfDraws(mode):
            return f(*args, **kwargs)
    finally:
        _RUNNING.stack.pop()


def next_key() -> torch.Tensor | None:
    """Take the key of the next draw from the running seeded function; return None outside any.

    A caller that runs a function twice, such as remat, calls `call_with_key` with this key both times.
    """
    return _RUNNING.stack[-1].next_key() if _RUNNING.stack else None


class _DrawsByKey(TorchFunctionMode):
    """Replaces calls of torch's random functions by draws with a key."""

    def __init__(self, key: torch.Tensor) -> None:
        super().__init__()
        self.key, self.count, self.function = key, 0, ""
        self.axes, self.maps = axis_names(), _vmap_names()

    def next_key(self) -> torch.Tensor:
        """Return the key of the next draw; an error where ranks or samples would all get the same numbers."""
        if axis_names() != self.axes:
            raise RuntimeError(
                f"fzero.random.seeded: the function runs a rank program over {list(axis_names())}, whose ranks would "
                "all draw the same numbers: call seeded(f)(key, ...) inside the rank program, or inside the step"
            )
        if set(_vmap_names()[len(self.maps) :]) - {"Same"}:
            raise RuntimeError(
                "fzero.random.seeded: a vmap inside draws random numbers. Pass randomness='same' to vmap if all "
                "samples may draw the same numbers; else map another seeded function over fzero.random.split(key, n)"
            )
        self.count += 1
        return fold_in(self.key, self.count)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a draw of torch by the next key in place of a generator, and run any other function as it is."""
        kwargs = kwargs or {}
        if func in BODIES:  # torch has switched this mode off, and the function's body makes the draws
            with self:
                return BODIES[func](*args, **kwargs)
        if func in DRAWS and kwargs.get("generator") is None:
            out = DRAWS[func](self.next_key, *args, **kwargs)
            if out is not NotImplemented:
                return out
        previous_function, self.function = self.function, getattr(func, "__name__", "")
        try:
            return func(*args, **kwargs)
        finally:
            self.function = previous_function


def _vmap_names() -> list[str]:
    return [] if torch.compiler.is_dynamo_compiling() else vmaps()  # Dynamo does not see them


class _RefusalOfDraws(TorchDispatchMode):
    """Raises an error for operations that draw from torch's generator."""

    supports_higher_order_operators = True

    def __init__(self, drawing: _DrawsByKey) -> None:
        super().__init__()
        self.drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _is_random_call(func, args, kwargs):
            name = f"torch's {self.drawing.function} ({func})" if self.drawing.function else str(func)
            raise RuntimeError(
                f"fzero.random.seeded: {name} draws from torch's own generator, and has no draw by key. Build "
                "it from functions of fzero.random (uniform, normal, bernoulli, randint, dropout), or pass a generator"
            )
        return func(*args, **kwargs)


def _is_random_call(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of a random operation draws: not with dropout 0, in evaluation, or with a generator."""
    arguments = func._schema.arguments
    settings = {a.name: a.default_value for a in arguments if a.has_default_value()}
    settings |= dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
    if any(isinstance(x, torch.Generator) for x in settings.values()):
        return False
    if any(settings.get(name) is False for name in ("train", "training")):
        return False
    return not any(settings.get(name, 1) == 0 for name in ("dropout", "dropout_p"))
