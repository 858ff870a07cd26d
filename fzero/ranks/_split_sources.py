"""The global tensors that `mesh.split` split, for the check of a step's first call.

A batch that each rank loaded itself is not a global batch: split again, most of it would be dropped without an error.
"""

import weakref
from collections.abc import Sequence

import torch

__all__ = ["note_split", "split_source"]

_MAX_PARTS = 64  # parts that live at once; a step is checked at its first call only
_SOURCES: dict[int, tuple["weakref.ref[torch.Tensor]", torch.Tensor]] = {}


def note_split(parts: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Note the tensors that this rank's parts were taken from, as long as the parts live."""
    for part, source in zip(parts, sources, strict=True):
        if len(_SOURCES) < _MAX_PARTS:
            part_id = id(part)
            _SOURCES[part_id] = weakref.ref(part, lambda _, part_id=part_id: _SOURCES.pop(part_id, None)), source


def split_source(part: torch.Tensor) -> torch.Tensor | None:
    """Return the global tensor that `mesh.split` took a rank's part from; None for other tensors."""
    reference, source = _SOURCES.get(id(part), (None, None))
    return source if reference is not None and reference() is part else None
