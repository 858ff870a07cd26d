"""Donation: a jitted step, or init, takes over the memory of some arguments, which must not be read again."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DonatedError", "DonatedTensor", "check_not_donated", "empty"]


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
        ... except fzero.errors.DonatedError as error:
        ...     print(str(error)[:27])
        argument 0 was donated to j
    """


DonatedError.__module__ = "fzero"


def message(note: str) -> str:
    """Say what was donated and what to do."""
    if note.endswith("failed midway"):
        return (
            f"{note}: its memory was written into, and there are no results. Go on from what you saved before the call"
        )
    return (
        f"{note}: its memory holds the results of that call now. Go on with them (params, opt_state, loss = "
        "step(params, opt_state, batch)), copy what you want to keep before the call, or call without donation: jit "
        "with donate=(), step.init without donate=True"
    )


class DonatedTensor(torch.Tensor):
    """A tensor that was donated: it holds nothing, and raises `DonatedError` at whatever torch is asked to do with it.

    Attributes:
        donated: which argument it was, of which step.
    """

    donated: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse whatever is asked: arithmetic, `.shape`, `torch.save`, `copy.deepcopy`, `.numpy()`."""
        check_not_donated([args, kwargs or {}])
        raise AssertionError(f"{func} was dispatched to a donated tensor, and none is among its arguments")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Say what became of it, so that a tree of such tensors can be printed."""
        return f"<{self.donated}>"


def check_not_donated(values: Iterable[Any]) -> None:
    """Check that no value, in lists and dicts of any depth, is a tensor that was donated.

    Raises:
        DonatedError: if one is. Names the argument.
    """
    for x in values:
        if isinstance(x, DonatedTensor):
            raise DonatedError(message(x.donated))
        if isinstance(x, list | tuple | dict):
            check_not_donated(x.values() if isinstance(x, dict) else x)


def empty(x: torch.Tensor, note: str) -> torch.Tensor:
    """Empty a tensor, so that whoever reads it learns why, and return a new one over its memory."""
    taken = x.data  # unlike x.detach() no view, so that nothing else keeps x's base alive
    if x._is_view():
        _leave_base(x)
    x.data = _nothing(x.dtype, x.device)
    x.donated = note  # pyright: ignore[reportAttributeAccessIssue]
    # The object is dead: callers that still hold it, in trees, optimizers or closures, are to hear of it. No other way
    # reaches those that save or sum it without asking fzero.
    x.__class__ = DonatedTensor
    return taken


def _leave_base(x: torch.Tensor) -> None:
    """Make a view forget what it was a view of, which would keep the memory in use."""
    with contextlib.suppress(RuntimeError):  # where autograd or a weak reference knows it
        torch.utils.swap_tensors(x, torch.empty(0, dtype=x.dtype, device=x.device))


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the empty tensor that all donated ones share: to make one for each took most of a call's time."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)
