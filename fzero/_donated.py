"""Donation: a jitted step, or init, takes over the memory of some arguments, which must not be read again."""

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DonatedError", "check_not_donated", "empty"]


class DonatedError(RuntimeError):
    """A value was read whose memory a jitted step, or `step.init`, has taken over for its results.

    Example:
        >>> import fzero, torch
        >>> step = fzero.jit(lambda x: x + 1, donate=0, backend="fx")
        >>> x = torch.zeros(2)
        >>> step(x)
        tensor([1., 1.])
        >>> try:
        ...     step(x)
        ... except fzero.DonatedError as error:
        ...     print(str(error)[:27])
        argument 0 was donated to j
    """


DonatedError.__module__ = "fzero"


def message(note: str) -> str:
    """Say what was donated and what to do."""
    return (
        f"{note}: its memory holds the results of that call now. Go on with them (params, opt_state, loss = "
        "step(params, opt_state, batch)), copy what you want to keep before the call, or call without donation: jit "
        "with donate=(), step.init without donate=True"
    )


def check_not_donated(leaves: Iterable[Any]) -> None:
    """Check that no leaf is a tensor that was donated.

    Raises:
        DonatedError: if one is. Names the argument.
    """
    for x in leaves:
        if isinstance(x, torch.Tensor) and (note := getattr(x, "donated", "")):
            raise DonatedError(message(note))


def empty(x: torch.Tensor, note: str) -> torch.Tensor:
    """Empty a tensor, noting why, and return a new one over its memory."""
    taken = x.detach()
    x.data = x.new_empty(0)
    x.donated = note  # pyright: ignore[reportAttributeAccessIssue]
    return taken
