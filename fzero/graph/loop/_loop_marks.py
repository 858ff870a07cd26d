"""Operations that mark a loop while a step is traced.

A loop whose iterations differ only in their data is traced as one iteration. The operations here mark where this
iteration meets the others and the rest of the step. `iteration` begins the body and returns its number. `loop_slice`
is an iteration's slice of a tensor. `_sum_before` is the sum over earlier iterations, and `_sum_after` adds this
iteration's share to it. `rows` stacks the values of all iterations.

Python may make an iteration depend on the one before: by a list that the loss function appends to, a counter, an
iterator. So the forward pass runs `run_again`, and is `check_equal_runs` with the first.

The operations compute nothing: `fzero.graph.loop._insert_loops` replaces them by a loop. In a vmap, of ranks or the
user's, the mapped dimension goes first. So a sum has the same strides before and after an iteration.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fzero._torch import is_tracing

__all__ = [
    "OPERATIONS",
    "LoopSum",
    "NotScannableError",
    "check_equal_runs",
    "is_loop_slice",
    "iteration",
    "loop_slice",
    "record_loops",
    "records_loops",
    "records_pipelines",
    "rows",
    "run_again",
]


class NotScannableError(RuntimeError):
    """Iterations differ by more than their data, or return more than sums and rows."""


class _RecordingState(threading.local):
    on = False
    pipelines = False


_RECORDING = _RecordingState()


@contextmanager
def record_loops(on: bool, pipelines: bool = False) -> Iterator[None]:
    """Set whether this thread's trace records a loop as one iteration, and a pipeline's rank as such a loop."""
    previous_state = _RECORDING.on, _RECORDING.pipelines
    _RECORDING.on, _RECORDING.pipelines = on, pipelines
    try:
        yield
    finally:
        _RECORDING.on, _RECORDING.pipelines = previous_state


def records_loops() -> bool:
    """Return whether a trace runs that records a loop as one iteration."""
    return _RECORDING.on and is_tracing()


def records_pipelines() -> bool:
    """Return whether a trace runs that records a pipeline's rank as one iteration."""
    return _RECORDING.pipelines and is_tracing()


def _refuse_untraced(*args: Any) -> torch.Tensor:
    raise AssertionError("an operation of a loop ran outside a trace")


@torch.library.custom_op("fzero::iteration", mutates_args=())
def iteration(iterations: int) -> torch.Tensor:
    """Begin a loop of this many iterations, and return the number of the running one: a 0-d int64 tensor."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::loop_slice", mutates_args=())
def loop_slice(x: torch.Tensor, iteration: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return `x.narrow(dim, iteration * size, size)`."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::sum_before", mutates_args=())
def _sum_before(like: torch.Tensor, iteration: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum over earlier iterations in a dtype, with the shape and strides of this iteration's share."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::sum_after", mutates_args=())
def _sum_after(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Pass this iteration's sum `x` on to the next one, and return the sum of the last iteration."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::rows", mutates_args=())
def rows(x: torch.Tensor, iteration: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return the values of all iterations, stacked along a new dimension 0."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::run_again", mutates_args=())
def run_again(iteration: torch.Tensor) -> torch.Tensor:
    """Begin to run an iteration's forward pass once more, for comparison, and return the iteration's number."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::check_equal_runs", mutates_args=())
def check_equal_runs(
    x: torch.Tensor, run_again: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]
) -> torch.Tensor:
    """Return `x` if the operations since `run_again`, with results `second`, equal those that computed `first`."""
    return _refuse_untraced()


OPERATIONS = (iteration, loop_slice, _sum_before, _sum_after, rows, run_again, check_equal_runs)


class LoopSum(NamedTuple):
    """A sum over a loop's iterations, in an iteration.

    Attributes:
        before: the sum over earlier iterations.
        updated: the sum with this iteration's share.
    """

    before: torch.Tensor
    updated: torch.Tensor

    @staticmethod
    def with_share(share: torch.Tensor, iteration: torch.Tensor, dtype: torch.dtype) -> "LoopSum":
        """Begin a sum in a dtype, and add this iteration's share."""
        before = _sum_before(share, iteration, dtype)
        return LoopSum(before, torch.add(before, share))

    @staticmethod
    def without_share(like: torch.Tensor, iteration: torch.Tensor, dtype: torch.dtype) -> "LoopSum":
        """Begin a sum of tensors like this one, to which this iteration adds nothing."""
        before = _sum_before(like, iteration, dtype)
        return LoopSum(before, before)

    def after(self) -> torch.Tensor:
        """Pass the sum on to the next iteration, and return the sum after the last one."""
        return _sum_after(self.updated, self.before)


def is_loop_slice(node: Node) -> bool:
    """Return whether a traced node is an iteration's slice of a tensor, which is a view of it in the eager step."""
    return node.target is loop_slice._opoverload


def _stand_in(like: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a stand-in from numbers alone: an operation on a constant's stand-in would give a constant, too."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def _stand_in_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _stand_in(x, x.shape, torch.empty_like(x).stride(), dtype)


@iteration.register_fake
def _(iterations: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@loop_slice.register_fake
def _(x: torch.Tensor, iteration: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return _stand_in(x, [size if i == dim else n for i, n in enumerate(x.shape)], x.stride(), x.dtype)


@_sum_before.register_fake
def _(like: torch.Tensor, iteration: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _stand_in_like(like, dtype)


@_sum_after.register_fake
def _(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return _stand_in_like(before, before.dtype)


@rows.register_fake
def _(x: torch.Tensor, iteration: torch.Tensor, iterations: int) -> torch.Tensor:
    return torch.empty((iterations, *x.shape), dtype=x.dtype, device=x.device)


@run_again.register_fake
def _(iteration: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@check_equal_runs.register_fake
def _(x: torch.Tensor, run_again: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    return _stand_in_like(x, x.dtype)


def _mapped_first(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    return x if dim is None else x.movedim(dim, 0)


def _mapped_dim(dim: int | None) -> int | None:
    return None if dim is None else 0


@loop_slice.register_vmap
def _(info: Any, dims: Any, x: torch.Tensor, iteration: torch.Tensor, dim: int, size: int) -> Any:
    return loop_slice(_mapped_first(x, dims[0]), iteration, dim + (dims[0] is not None), size), _mapped_dim(dims[0])


@_sum_before.register_vmap
def _(info: Any, dims: Any, like: torch.Tensor, iteration: torch.Tensor, dtype: torch.dtype) -> Any:
    return _sum_before(_mapped_first(like, dims[0]), iteration, dtype), _mapped_dim(dims[0])


@_sum_after.register_vmap
def _(info: Any, dims: Any, x: torch.Tensor, before: torch.Tensor) -> Any:
    return _sum_after(_mapped_first(x, dims[0]), _mapped_first(before, dims[1])), _mapped_dim(dims[0])


@rows.register_vmap
def _(info: Any, dims: Any, x: torch.Tensor, iteration: torch.Tensor, iterations: int) -> Any:
    return rows(_mapped_first(x, dims[0]), iteration, iterations), None if dims[0] is None else 1


@check_equal_runs.register_vmap
def _(
    info: Any,
    dims: Any,
    x: torch.Tensor,
    run_again: torch.Tensor,
    first: list[torch.Tensor],
    second: list[torch.Tensor],
) -> Any:
    return check_equal_runs(_mapped_first(x, dims[0]), run_again, first, second), _mapped_dim(dims[0])
