"""The (init, update) pair of optax, its hyperparameters, and the checks that every pair shares."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim._precision import Precision
from fzero.optim.schedules import Schedule
from fzero.tree import Tree

__all__ = [
    "Mask",
    "Number",
    "OptState",
    "Optimizer",
    "Pair",
    "Params",
    "Updates",
    "answers",
    "apply_updates",
    "around",
    "as_optimizer",
    "at_least_float32",
    "chain",
    "check_pair",
    "check_rate",
    "find_state",
    "fraction",
    "is_zero",
    "nonnegative",
    "of_torch",
    "positive",
    "rate_at",
]

# What every function that takes an (init, update) pair checks of it.


_EQUIVALENTS = ("sgd", "adam", "adamw", "adagrad", "adafactor", "muon")  # of the same name in torch.optim


def check_pair(opt: Any, needed: str) -> None:
    """Check that an optimizer is an (init, update) pair, as far as it is needed: its "init" or its "update".

    Raises:
        TypeError: if it is an optimizer of torch.optim, a class or function that was not called, or has not what is
            needed.
    """
    if isinstance(opt, torch.optim.Optimizer) or (isinstance(opt, type) and issubclass(opt, torch.optim.Optimizer)):
        raise TypeError(of_torch(opt))
    if callable(getattr(opt, needed, None)):
        return
    if isinstance(opt, type) or inspect.isroutine(opt):
        raise TypeError(f"opt is {opt!r}, which makes an optimizer: call it, such as fzero.optim.adamw(1e-3)")
    raise TypeError(
        f"opt is {opt!r}, which has no {needed}: expected an (init, update) pair, such as fzero.optim.adamw(1e-3)"
    )


def of_torch(opt: Any) -> str:
    """Say what fzero has in the place of an optimizer of torch.optim, or of its class."""
    kind = opt if isinstance(opt, type) else type(opt)
    said = f"opt is a torch.optim.{kind.__name__}, which writes into parameters that it holds. A sharded step takes an "
    said += "(init, update) pair, two pure functions: "
    if kind.__name__.lower() not in _EQUIVALENTS:
        return f"{said}fzero.optim has {', '.join(_EQUIVALENTS)}, lion, lamb, and links to chain your own"
    rate = "1e-3" if isinstance(opt, type) else repr(opt.defaults["lr"])
    return f"{said}fzero.optim.{kind.__name__.lower()}({rate})"


# The (init, update) pair, optax's: an optimizer is two pure functions over trees.
#
# `init(params) -> state`; `update(grads, state, params) -> (updates, state)`; `apply_updates` adds the updates to the
# parameters. On boxed trees `tree_map` visits the shards, so an elementwise pair runs on any layout unchanged.


Params = Tree
"""A tree of parameters: plain tensors, or at stages 1 to 3 boxes."""
Updates = Tree
"""A tree like the parameters: gradients, or the differences that `apply_updates` adds to the parameters."""
OptState = Tree
"""The state of a pair: any tree, whose leaves that are like the parameters lie in boxes as they do."""
Mask = Tree | Callable[[Params], Tree]
"""A tree of bools like the whole parameters, or a function that makes one of the whole leaves (as meta tensors)."""

State = TypeVar("State")


class Pair(Protocol):
    """An (init, update) pair: an `Optimizer`, or a third-party one, such as optax's form in PyTorch.

    Example:
        >>> import fzero, torch
        >>> class Descend:
        ...     def init(self, params):
        ...         return ()
        ...
        ...     def update(self, grads, state, params=None):
        ...         return fzero.tree.map(lambda g: -0.1 * g, grads), state
        >>> opt = chain(Descend())
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init({"w": torch.tensor(1.0)}))[0]
        {'w': tensor(-0.2000)}
    """

    def init(self, params: Params, /) -> OptState:
        """Make the state for these parameters."""
        ...

    def update(self, grads: Updates, state: OptState, /, *, params: Params | None = None) -> tuple[Updates, OptState]:
        """Make updates of gradients; return them and the new state. Its arguments stay as they are."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """An (init, update) pair; it unpacks as one: `init, update = opt`.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params) -> (updates, state)`; `params` may be None if it is not needed.
        elementwise: whether the pair gives the same numbers on flat shards as on whole leaves: True of all pairs
            in `fzero.optim`; None if not known, and `fzero.testing.check_elementwise` finds out.
        precision: the policy by which `step.init` casts the parameters, if the pair keeps master weights.
        skips: whether the pair skips steps that overflowed: a loss scale.
        parts: the pairs that it is made of.
        pointwise: False of a pair that reads more of a leaf than one element to update it, such as a norm.
        offloads: whether a part of its state lies in host memory.
        lowers: the share of the parameters that `step.init` puts into host memory, or a rule `(path) -> share`.

    Example:
        >>> from fzero import optim
        >>> optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
        Optimizer(chain(clip_by_global_norm, adamw))
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    elementwise: bool | None = None
    precision: Precision | None = None
    skips: bool = False
    parts: tuple["Optimizer", ...] = ()
    pointwise: bool | None = None
    offloads: bool = False
    lowers: float | Callable[[str], float] = 0

    @property
    def name(self) -> str:
        """Name the pair by the function or class that made it, and those of its parts."""
        own = getattr(self.update, "__qualname__", type(self.update).__name__)
        inner = ", ".join([part.name for part in self.parts])
        return own.split(".")[0] + (f"({inner})" if inner else "")

    def __repr__(self) -> str:
        return f"Optimizer({self.name})"

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))


def as_optimizer(pair: Pair) -> Optimizer:
    """Return a pair as an `Optimizer`; a third-party one may have an attribute `elementwise`.

    Raises:
        TypeError: if it is no pair.
    """
    if isinstance(pair, Optimizer):
        return pair
    for needed in ("init", "update"):
        check_pair(pair, needed)
    return Optimizer(pair.init, pair.update, getattr(pair, "elementwise", None))


def around(
    init: Callable[[Params], OptState], update: Callable[..., tuple[Updates, OptState]], *pairs: Pair
) -> Optimizer:
    """Make a pair of functions around others: it is elementwise, keeps masters and skips steps as these do."""
    known = [as_optimizer(pair) for pair in pairs]
    elementwise = {pair.elementwise for pair in known}
    policies = [pair.precision for pair in known if pair.precision is not None]
    return Optimizer(
        init,
        update,
        elementwise=False if False in elementwise else None if None in elementwise else True,
        precision=policies[0] if policies else None,
        skips=any(pair.skips for pair in known),
        parts=tuple(known),
        pointwise=False if any(pair.pointwise is False for pair in known) else None,
        offloads=any(pair.offloads for pair in known),
        lowers=next((pair.lowers for pair in known if pair.lowers), 0),
    )


def find_state(opt_state: OptState, kind: type[State]) -> State:
    """Find the one state of this type in an optimizer's state.

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = [x for x in tree.flatten(opt_state, lambda x: isinstance(x, kind))[0] if isinstance(x, kind)]
    if len(found) != 1:
        raise ValueError(f"opt_state holds {len(found)} of {kind.__name__}: expected one")
    return found[0]


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add updates to parameters, keeping their dtypes; leaves that are one tensor object (tied) stay one.

    Raises:
        ValueError: if the trees differ in structure or are cut differently. Names the path.

    Example:
        >>> import torch
        >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.5)})
        {'w': tensor(1.5000)}
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def chain(*pairs: Pair) -> Optimizer:
    """Compose pairs: the updates of one are the gradients of the next.

    Args:
        *pairs: (init, update) pairs, third-party ones among them.

    Returns:
        A pair whose state is the tuple of their states.

    Raises:
        ValueError: if `master_weights` is not the last: a link after it would change the parameters and not the
            masters. Also if a link is a loss scale, which goes around the chain.

    Example:
        >>> import torch
        >>> from fzero.optim import clip_by_global_norm, sgd
        >>> opt, params = chain(clip_by_global_norm(1.0), sgd(0.5)), {"w": torch.zeros(2)}
        >>> opt.update({"w": torch.tensor([3.0, 4.0])}, opt.init(params), params)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """
    known = [as_optimizer(pair) for pair in pairs]
    if any(pair.precision is not None for pair in known[:-1]):
        raise ValueError("chain: master_weights must be the last link, or around the whole chain")
    if any(pair.skips for pair in known):
        raise ValueError(
            "chain: a loss scale goes around the whole chain: a clip before it would hide an overflow, and a link "
            "after it would see steps that are skipped"
        )

    def init(params: Params) -> OptState:
        return tuple([pair.init(params) for pair in pairs])

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        new = []
        for pair, s in zip(pairs, state, strict=True):
            grads, s = pair.update(grads, s, params=params)
            new.append(s)
        return grads, tuple(new)

    return around(init, update, *pairs)


# What an optimizer answers to torch's words: `adamw(lr=1e-3)` is an error that says which word is fzero's.


P = ParamSpec("P")
R = TypeVar("R")

_NOT_NEEDED = "fzero.jit makes one program of the update, so there is nothing to set"

# torch's and optax's words -> fzero's, tried one after the other; the value goes with it
_WORDS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "betas": ("b1, b2", "b1"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "clip_value": ("max_delta",),
    "decay": ("weight_decay", "decay"),
    "d": ("clipping_threshold",),
}

# words that are no argument here -> what to do instead
_INSTEAD: dict[str, str] = {
    "params": "the parameters go to step.init(params, opt), or to opt.init(params)",
    "weight_decay": "{name} decays no weights: use optim.adamw(..., weight_decay={value!r}), or torch's L2 penalty, "
    "optim.chain(optim.add_decayed_weights({value!r}), optim.{name}(...))",
    "beta2_decay": "{name} has decay_rate, its negative",
    "momentum": "{name} has b1 in its place",
    "dampening": "there is none: scale the gradients with optim.scale in a chain",
    "maximize": "negate the loss",
    "lr_decay": "give a schedule as learning_rate, such as optim.exponential_decay",
    "amsgrad": "there is no such variant: write an own pair, optim.Optimizer(init, update)",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), _NOT_NEEDED),
}


def answers(make: Callable[P, R]) -> Callable[P, R]:
    """Let a function that makes an optimizer answer to words of torch with its own.

    Returns:
        The function, with its signature and docstring. Called with a word that it does not know, or with parameters
        in place of a number, it raises a TypeError that says what to write.

    Example:
        >>> from fzero import optim
        >>> optim.adamw(lr=1e-3)
        Traceback (most recent call last):
        TypeError: adamw takes learning_rate=, and not lr=: adamw(learning_rate=0.001)
    """
    name, signature = make.__name__, inspect.signature(make)
    known = frozenset(signature.parameters)

    @functools.wraps(make)
    def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        for word, value in kwargs.items():
            if word not in known:
                raise TypeError(_answer(name, tuple(signature.parameters), word, value))
        if args and _are_parameters(args[0]):
            first = next(iter(signature.parameters))
            raise TypeError(
                f"{name} takes no parameters: they go to step.init(params, opt), or opt.init(params). Its first "
                f"argument is {first}: optim.{name}(1e-3)"
            )
        return make(*args, **kwargs)

    return api_boundary(answering)


def _answer(name: str, known: Iterable[str], word: str, value: Any) -> str:
    """Say what to write in place of a word."""
    known = tuple(known)
    for ours in _WORDS.get(word, ()):
        names = ours.split(", ")
        if set(names) <= set(known):
            values = tuple(value) if isinstance(value, tuple | list) else (value,)
            pairs = ", ".join(f"{n}={v!r}" for n, v in zip(names, values, strict=False))
            return f"{name} takes {ours.replace(', ', '= and ')}=, and not {word}=: {name}({pairs})"
    if word in _INSTEAD:
        return f"{name} takes no {word}=: " + _INSTEAD[word].format(name=name, value=value)
    return f"{name} takes no {word}=: its arguments are {', '.join(known)}"


def _are_parameters(x: Any) -> bool:
    """Return whether an argument is what torch.optim takes first: a module, its parameters, or groups of them."""
    if isinstance(x, torch.nn.Module | torch.nn.Parameter):
        return True
    return inspect.isgenerator(x) or isinstance(x, list | tuple | dict)


# Hyperparameters: numbers that are checked when a pair is made, or 0-d tensors that may change as training goes.


Number = float | torch.Tensor  # a 0-d tensor is one that `inject_hyperparams` keeps in the state


def nonnegative(**values: object) -> None:
    """Check that hyperparameters, given by name, are finite numbers >= 0; tensors are not looked into."""
    _check(values, "a number >= 0", lambda v: 0 <= v < math.inf)


def positive(**values: object) -> None:
    """Check that hyperparameters are positive numbers; infinity is one."""
    _check(values, "a positive number", lambda v: v > 0)


def fraction(**values: object) -> None:
    """Check that hyperparameters are numbers in [0, 1)."""
    _check(values, "a number in [0, 1)", lambda v: 0 <= v < 1)


def _check(values: Mapping[str, object], expected: str, holds: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            continue  # to look at its value would stop a trace
        if not (isinstance(value, Real) and holds(value)):
            hint = "; for a schedule see optim.inject_hyperparams" if callable(value) else ""
            raise ValueError(f"{name}={value!r}: expected {expected}{hint}")


def is_zero(value: Number) -> bool:
    """Return whether a hyperparameter is the number 0; a tensor never is, since it may change."""
    return not isinstance(value, torch.Tensor) and value == 0


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen a half-precision tensor to float32: squares overflow in it, and an eps of 1e-8 is 0."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# A learning rate is a number or a schedule.


def rate_at(rate: Number | Schedule, count: torch.Tensor) -> Number:
    """Return a rate, or a schedule's rate after `count` updates."""
    return rate(count) if callable(rate) else rate


def check_rate(learning_rate: Number | Schedule) -> None:
    """Check that a learning rate is a number >= 0 or a schedule.

    Raises:
        ValueError: if it is not.
    """
    if not callable(learning_rate):
        nonnegative(learning_rate=learning_rate)
