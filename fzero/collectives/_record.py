"""A recorder of collectives: it counts the elements and bytes that a step sends.

A collective counts the elements of its full padded buffer. An all_reduce counts them twice, since it is a
reduce_scatter and an all_gather. A link carries (n - 1) / n of this count.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fzero.axes import Binding

__all__ = ["CollectiveEvent", "CollectiveLog", "record"]


class CollectiveEvent(NamedTuple):
    """One collective: its kind, axis, elements (an all_reduce counted twice), wire dtype, and unit.

    The axis of a collective over two axes names both: "dp,ep". The unit of a user's collective is "".
    """

    kind: str
    axis: str
    elements: int
    dtype: torch.dtype
    unit: str

    @property
    def bytes(self) -> int:
        """Bytes of the full buffer, an all_reduce counted twice."""
        return self.elements * self.dtype.itemsize


@dataclass(eq=False)
class CollectiveLog:
    """The collectives that ran, in their order."""

    events: list[CollectiveEvent] = field(default_factory=list)

    @property
    def unit_events(self) -> list[CollectiveEvent]:
        """The collectives that move units of parameters or gradients."""
        return [e for e in self.events if e.unit]

    @property
    def other_events(self) -> list[CollectiveEvent]:
        """All other collectives: of losses, of norms, and the user's."""
        return [e for e in self.events if not e.unit]

    @property
    def elements(self) -> int:
        """Elements that the units' collectives moved."""
        return sum(e.elements for e in self.unit_events)

    @property
    def bytes(self) -> int:
        """Bytes that the units' collectives moved."""
        return sum(e.bytes for e in self.unit_events)

    def count(self, kind: str) -> int:
        """Count the units' collectives of a kind: "all_gather", "reduce_scatter" or "all_reduce"."""
        return Counter(e.kind for e in self.unit_events)[kind]

    def __str__(self) -> str:
        width = max([8, *[len(e.axis) + 1 for e in self.events]])
        lines = [f"{'collective':<16}{'axis':<{width}}{'unit':<24}{'elements':>12}{'bytes':>14}"]
        lines += [
            f"{e.kind:<16}{e.axis:<{width}}{e.unit or '(metric)':<24}{e.elements:>12,}{e.bytes:>14,}"
            for e in self.unit_events + self.other_events
        ]
        return "\n".join([*lines, f"{'units, in all':<{width + 40}}{self.elements:>12,}{self.bytes:>14,}"])


_LOGS: list[CollectiveLog] = []


@contextmanager
def record() -> Iterator[CollectiveLog]:
    """Record the collectives of eager steps that run inside the `with` block.

    A compiled step records nothing: its collectives are in its graph. In a simulation each collective is recorded
    once, for all ranks.

    Yields:
        A `CollectiveLog`, filled as the collectives run. `print(log)` is a table.

    Example:
        >>> import fzero, torch
        >>> with fzero.collectives.record() as log:
        ...     _ = fzero.mesh(dp=2).spmd(fzero.collectives.psum)(torch.ones(3))
        >>> log.other_events
        [CollectiveEvent(kind='all_reduce', axis='dp', elements=6, dtype=torch.float32, unit='')]
    """
    log = CollectiveLog()
    _LOGS.append(log)
    try:
        yield log
    finally:
        _LOGS.remove(log)


def add(
    kind: str,
    binding: Binding,
    numel_in: int,
    numel_out: int,
    dtype: torch.dtype,
    unit: str,
) -> None:
    """Add a collective to every open recorder. It took `numel_in` elements on a rank, and returned `numel_out`."""
    if not kind or not binding.axis or not _LOGS:
        return
    full = {
        "all_gather": binding.size * numel_in,
        "reduce_scatter": binding.size * numel_out,
        "all_reduce": 2 * numel_in,
    }
    elements = full.get(kind, numel_in) // binding.mapped  # all_to_all, ppermute and broadcast send one buffer
    if not elements:  # an empty buffer is not sent
        return
    for log in _LOGS:
        log.events.append(CollectiveEvent(kind=kind, axis=binding.axis, elements=elements, dtype=dtype, unit=unit))
