"""Donation: a jitted step or `step.init` reuses the memory of some arguments, which must not be read again."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch

from fzero._notice import trouble_link
from fzero._tracebacks import api_boundary

__all__ = ["DonatedError", "check_not_donated", "donate_memory", "donated_message"]


_RESULTS = {"step.init(..., donate=True)": "params, opt_state", "step.partition(..., donate=True)": "params"}


class DonatedError(RuntimeError):
    """Code read a value whose memory now holds results of a jitted step or of `step.init`.

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


DonatedError.__module__ = "fzero.errors"  # where a pickle finds it


def donated_message(note: str) -> str:
    """Return the message of a `DonatedError`: `note` says which value was donated to what, the rest what to do."""
    if note.endswith("failed midway"):
        return (
            f"{note}: its memory was overwritten, and there are no results. Continue from a copy saved before the call"
        )
    call = note.rpartition(" was donated to ")[2]
    if call.startswith("step."):
        results, without = f"its results, as {_RESULTS[call]} = {call}", "leave out donate=True"
    else:
        results = "the results, as params, opt_state, loss = step(params, opt_state, batch)"
        without = "jit with donate=()"
    return (
        f"{note}: its memory holds the results of that call now. Continue with {results}; or copy values that you need "
        f"before the call, or {without}{trouble_link('a-tensor-that-was-donated')}"
    )


class _DonatedTensor(torch.Tensor):
    """A tensor that was donated: it is empty, and every operation of torch on it raises `DonatedError`.

    Attributes:
        donated: the argument and the step, such as "argument 0 was donated to jit(step)".
    """

    donated: str

    @classmethod
    @api_boundary
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation: arithmetic, `.shape`, `torch.save`, `copy.deepcopy`, `.numpy()`."""
        check_not_donated([args, kwargs or {}])
        raise AssertionError(f"{func} was dispatched to a donated tensor, and none is among its arguments")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return the note about its donation, so that a tree of such tensors can be printed."""
        return f"<{self.donated}>"


def check_not_donated(values: Iterable[Any]) -> None:
    """Check that no value, in lists and dicts of any depth, is a donated tensor.

    Raises:
        DonatedError: if a value is. The message names the argument.
    """
    for x in values:
        if isinstance(x, _DonatedTensor):
            raise DonatedError(donated_message(x.donated))
        if isinstance(x, list | tuple | dict):
            check_not_donated(x.values() if isinstance(x, dict) else x)


def donate_memory(x: torch.Tensor, note: str) -> torch.Tensor:
    """Make `x` a `_DonatedTensor` without data, and return a new tensor over its memory."""
    data = x.data  # not a view, unlike x.detach(), so x's base is not kept alive
    if x._is_view():
        _detach_from_base(x)
    x.data = _empty_tensor(x.dtype, x.device)
    x.donated = note  # pyright: ignore[reportAttributeAccessIssue]
    # Callers may still hold this object, in trees, optimizers or closures. Only a change of its class makes every later
    # use of it, such as saving or summing, raise an error.
    x.__class__ = _DonatedTensor
    return data


def _detach_from_base(x: torch.Tensor) -> None:
    """Detach a view from its base, which would keep the memory in use."""
    with contextlib.suppress(RuntimeError):  # if autograd or a weak reference refers to x
        torch.utils.swap_tensors(x, torch.empty(0, dtype=x.dtype, device=x.device))


@functools.cache
def _empty_tensor(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the empty tensor that all donated tensors share: making one for each took most of a call's time."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)
