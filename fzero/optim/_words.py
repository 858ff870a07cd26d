"""What an optimizer answers to torch's words: `adamw(lr=1e-3)` is an error that says which word is fzero's."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from fzero._tracebacks import api_boundary

__all__ = ["answers"]

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
