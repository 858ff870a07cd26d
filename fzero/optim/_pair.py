"""What every function that takes an (init, update) pair checks of it."""

import inspect
from typing import Any

import torch

__all__ = ["check_pair", "of_torch"]

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
