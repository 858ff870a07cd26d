"""Tensor, expert and pipeline parallelism, and the schedules of pipelines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rest of fzero stands between schedules and the others, so each is imported where it is used
    from fzero.parallel import experts, pipeline, schedules, tensor

__all__ = ["experts", "pipeline", "schedules", "tensor"]
