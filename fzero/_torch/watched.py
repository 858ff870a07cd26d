"""Private torch APIs that watch operations as they run, with real values.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_watched.py` shows which.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["WatchedOperation", "record_node_lines", "watch_operations", "without_watchers"]


class WatchedOperation(NamedTuple):
    """A running operation.

    Attributes:
        name: its name, such as "aten::log".
        arguments: the tensors among its arguments.
        mutated_arguments: the tensors among its arguments that it writes into.
        numbers: the floats among its arguments.
    """

    name: str
    arguments: list[torch.Tensor]
    mutated_arguments: list[torch.Tensor]
    numbers: list[float]


class _Watch(TorchDispatchMode):
    """Passes each operation to `before` before it runs, and to `after` with its results."""

    supports_higher_order_operators = True

    def __init__(
        self, before: Callable[[WatchedOperation], Any], after: Callable[[WatchedOperation, Any, Any], None]
    ) -> None:
        super().__init__()
        self.before, self.after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _watched_operation(func, args, kwargs)
        context = self.before(operation)
        out = func(*args, **kwargs)
        self.after(operation, context, [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)])
        return out


def _watched_operation(func: Any, args: Any, kwargs: Any) -> WatchedOperation:
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    numbers = [x for x in leaves if isinstance(x, float)]
    if not isinstance(func, OpOverload):
        return WatchedOperation(str(func), tensors, [], numbers)
    by_name = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    outputs = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    mutated = [x for name in outputs for x in tree_leaves(by_name.get(name)) if isinstance(x, torch.Tensor)]
    return WatchedOperation(func._schema.name, tensors, mutated, numbers)


@contextmanager
def watch_operations(
    before: Callable[[WatchedOperation], Any], after: Callable[[WatchedOperation, Any, Any], None]
) -> Iterator[None]:
    """Watch each operation that runs in this context, also in ranks in lockstep.

    Args:
        before: called with the operation before it runs.
        after: called with the operation, the value that `before` returned, and the tensors among the results.
    """
    with _Watch(before, after):
        yield


@contextmanager
def without_watchers() -> Iterator[None]:
    """Run code in this context without any dispatch mode, so that no watcher sees its operations."""
    with _disable_current_modes():
        yield


@contextmanager
def record_node_lines() -> Iterator[None]:
    """Make autograd record the source line of each node that is made in this context."""
    anomaly_settings = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(True, check_nan=False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(*anomaly_settings)
