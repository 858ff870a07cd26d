"""Tensor, expert and pipeline parallelism, and the schedules of pipelines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # other rooms import schedules, and the rest import those rooms; so each is imported where it is used
    from fzero.parallel import experts, pipeline, schedules, tensor

__all__ = ["experts", "pipeline", "schedules", "tensor"]
