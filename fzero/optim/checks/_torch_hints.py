"""Hints for users of torch.optim: the error of `adamw(lr=1e-3)` says which argument to use instead.

An optimizer of torch.optim in place of an (init, update) pair is an error that names fzero's own.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from fzero import tree
from fzero._tracebacks import api_boundary

__all__ = ["check_has_method", "torch_equivalents", "torch_hints", "torch_optimizer_message"]


_MAKERS: dict[str, Callable[..., Any]] = {}  # what `torch_hints` decorates, by name


def torch_equivalents() -> dict[str, Callable[..., Any]]:
    """Return the functions that make an optimizer of torch's name, by the names of torch's classes."""
    classes = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type)]
    return {name: _MAKERS[name.lower()] for name in sorted(classes) if name.lower() in _MAKERS}


def check_has_method(opt: Any, method: str, name: str = "opt") -> None:
    """Check that an optimizer is an (init, update) pair with the method that is needed: "init" or "update".

    Messages call it by `name`.

    Raises:
        TypeError: if `opt` is an optimizer of torch.optim, a class or function that was not called, or has no such
            method.
    """
    if isinstance(opt, torch.optim.Optimizer) or (isinstance(opt, type) and issubclass(opt, torch.optim.Optimizer)):
        raise TypeError(torch_optimizer_message(opt, name))
    if callable(getattr(opt, method, None)):
        return
    if isinstance(opt, type) or inspect.isroutine(opt):
        raise TypeError(f"{name} is {opt!r}, which makes an optimizer: call it, such as fzero.optim.adamw(1e-3)")
    remedy = "expected an (init, update) pair, such as fzero.optim.adamw(1e-3)"
    if isinstance(opt, list | tuple) and opt and all(hasattr(x, method) for x in opt):
        remedy = "pass optimizers one by one, optim.chain(*opts)"
    elif _are_parameters(opt):
        remedy += "; step.init takes it after the parameters, step.init(params, opt)"
    raise TypeError(f"{name} is {tree.show(opt)}, which has no {method}: {remedy}")


def torch_optimizer_message(opt: Any, argument: str = "opt") -> str:
    """Return an error message that says which fzero optimizer replaces an optimizer of torch.optim, or its class."""
    kind = opt if isinstance(opt, type) else type(opt)
    is_torch_class = kind.__module__.startswith("torch.")
    name = (
        f"a torch.optim.{kind.__name__}"
        if is_torch_class
        else f"an optimizer of torch, {kind.__module__}.{kind.__qualname__}"
    )
    text = f"{argument} is {name}, which writes into parameters that it holds. "
    text += "A sharded step takes an (init, update) pair, two pure functions: "
    if kind.__name__ not in torch_equivalents():
        optimizers = [f for f in _MAKERS.values() if next(iter(inspect.signature(f).parameters)) == "learning_rate"]
        return (
            f"{text}fzero.optim has {', '.join(sorted([f.__name__ for f in optimizers]))}, and links to chain your own"
        )
    rate = "1e-3" if isinstance(opt, type) else repr(opt.defaults["lr"])
    return f"{text}fzero.optim.{kind.__name__.lower()}({rate})"


_P = ParamSpec("_P")


_R = TypeVar("_R")


_NOT_NEEDED = "fzero.jit makes one program of the update, so there is nothing to set"


# names of torch and optax -> fzero's arguments that take the value; the first that the optimizer has is used
_EQUIVALENT_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "betas": ("b1, b2", "b1"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "clip_value": ("max_delta",),
    "decay": ("weight_decay", "decay"),
    "d": ("clipping_threshold",),
}


_FOREIGN_ARGUMENTS: dict[str, str] = {  # arguments of torch that no argument replaces
    "params": "the parameters go to step.init(params, opt), or to opt.init(params)",
    "weight_decay": "{name} decays no weights: use optim.adamw(..., weight_decay={value!r}), or torch's L2 penalty, "
    "optim.chain(optim.add_decayed_weights({value!r}), optim.{name}(...))",
    "beta2_decay": "{name} has decay_rate, its negative",
    "momentum": "{name} has b1 in its place",
    "dampening": "there is none: scale the gradients with optim.scale in a chain",
    "maximize": "negate the loss",
    "lr_decay": "give a schedule as learning_rate, such as optim.exponential_decay",
    "amsgrad": "there is no such variant: write your own optimizer, optim.Optimizer(init, update)",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), _NOT_NEEDED),
}


def torch_hints(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that makes an optimizer: its TypeErrors explain how to replace torch's arguments.

    Returns:
        The function, with its signature and docstring. If it is called with an unknown argument, or with parameters in
        place of a number, it raises a TypeError that says what to write.

    Example:
        >>> from fzero import optim
        >>> optim.adamw(lr=1e-3)
        Traceback (most recent call last):
        TypeError: adamw takes learning_rate=, and not lr=: adamw(learning_rate=0.001)
    """
    name, signature = make.__name__, inspect.signature(make)
    arguments = frozenset(signature.parameters)
    _MAKERS[name] = make

    @functools.wraps(make)
    def make_with_hints(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for argument, value in kwargs.items():
            if argument not in arguments:
                raise TypeError(_argument_hint(name, tuple(signature.parameters), argument, value))
        if args and _are_parameters(args[0]):
            first_name = next(iter(signature.parameters))
            raise TypeError(
                f"{name} takes no parameters: they go to step.init(params, opt), or opt.init(params). Its first "
                f"argument is {first_name}: optim.{name}(1e-3)"
            )
        return make(*args, **kwargs)

    return api_boundary(make_with_hints)


def _argument_hint(name: str, arguments: Iterable[str], unknown: str, value: Any) -> str:
    """Return the error message for an unknown argument of the function `name`."""
    arguments = tuple(arguments)
    for equivalent in _EQUIVALENT_ARGUMENTS.get(unknown, ()):
        names = equivalent.split(", ")
        if set(names) <= set(arguments):
            values = tuple(value) if isinstance(value, tuple | list) else (value,)
            pairs = ", ".join(f"{n}={v!r}" for n, v in zip(names, values, strict=False))
            return f"{name} takes {equivalent.replace(', ', '= and ')}=, and not {unknown}=: {name}({pairs})"
    if unknown in _FOREIGN_ARGUMENTS:
        return f"{name} takes no {unknown}=: " + _FOREIGN_ARGUMENTS[unknown].format(name=name, value=value)
    return f"{name} takes no {unknown}=: its arguments are {', '.join(arguments)}"


def _are_parameters(x: Any) -> bool:
    """Return whether a first argument is one for torch.optim: a module, its parameters, or groups of parameters."""
    if isinstance(x, torch.nn.Module | torch.nn.Parameter):
        return True
    return inspect.isgenerator(x) or isinstance(x, list | tuple | dict)
