"""Operations that mark the regions of a pipeline's rank while a step is traced.

Each rank of a pipeline runs a loop over micro-batches (`fzero.graph.loop._rank_schedule`). While the step is traced,
each stage runs once. The operations here mark where a region begins, what it receives and what it sends. Every rank
along the axis has such a loop. The bodies differ by rank, and the loops' arguments are the same.

The operations compute nothing: `fzero.graph.loop._insert_loops` replaces them by the loop.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node, has_side_effect

__all__ = [
    "BEGIN_REGION",
    "BEGIN_SHAPES_ONLY",
    "END_SHAPES_ONLY",
    "MARKERS",
    "MARK_PIPELINE",
    "RECEIVE",
    "SEND",
    "begin_region",
    "begin_shapes_only",
    "end_shapes_only",
    "is_marker",
    "mark_pipeline",
    "receive",
    "send",
]


def _refuse_untraced(*args: Any) -> torch.Tensor:
    raise AssertionError("an operation of a pipeline's loop ran outside a trace")


@torch.library.custom_op("fzero::mark_pipeline", mutates_args=())
def mark_pipeline(iteration: torch.Tensor, rank_schedule: int, arguments: list[torch.Tensor]) -> torch.Tensor:
    """Mark an iteration as one of a pipeline's loop, and these tensors as arguments of the loop, read or not."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::begin_region", mutates_args=())
def begin_region(kind: str, stage: int) -> torch.Tensor:
    """Begin the forward ("F") or the backward ("B") pass of a stage."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::receive", mutates_args=())
def receive(
    kind: str, stage: int, leaf: int, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a leaf that another stage sends to this one: of its output ("F") or of its input's gradient ("G")."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::send", mutates_args=())
def send(kind: str, stage: int, xs: list[torch.Tensor]) -> torch.Tensor:
    """Send the leaves of a stage's output ("F"), or of its input's gradient ("G"), to the next stage."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::begin_shapes_only", mutates_args=())
def begin_shapes_only() -> torch.Tensor:
    """Begin a region that runs only for its shapes and is not part of the step."""
    return _refuse_untraced()


@torch.library.custom_op("fzero::end_shapes_only", mutates_args=())
def end_shapes_only() -> torch.Tensor:
    """End a region that runs only for its shapes."""
    return _refuse_untraced()


MARKERS = (mark_pipeline, begin_region, receive, send, begin_shapes_only, end_shapes_only)
MARK_PIPELINE, BEGIN_REGION, RECEIVE, SEND, BEGIN_SHAPES_ONLY, END_SHAPES_ONLY = [op._opoverload for op in MARKERS]
for _marker in (MARK_PIPELINE, BEGIN_REGION, SEND, BEGIN_SHAPES_ONLY, END_SHAPES_ONLY):
    has_side_effect(_marker)  # nothing reads their results


def is_marker(node: Node) -> bool:
    """Return whether a node marks where a region begins, or what it sends or receives."""
    return node.target in (BEGIN_REGION, RECEIVE, SEND)


def _no_result() -> torch.Tensor:
    return torch.empty((0,), dtype=torch.int64, device="cpu")


@mark_pipeline.register_fake
def _(iteration: torch.Tensor, rank_schedule: int, arguments: list[torch.Tensor]) -> torch.Tensor:
    return _no_result()


@begin_region.register_fake
def _(kind: str, stage: int) -> torch.Tensor:
    return _no_result()


@receive.register_fake
def _(kind: str, stage: int, leaf: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=device)


@send.register_fake
def _(kind: str, stage: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return _no_result()


@begin_shapes_only.register_fake
def _() -> torch.Tensor:
    return _no_result()


@end_shapes_only.register_fake
def _() -> torch.Tensor:
    return _no_result()
