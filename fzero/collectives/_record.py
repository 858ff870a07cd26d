"""A recorder of collectives: what a step sends, in elements and bytes.

Elements are those of the full padded buffer of each collective; an all_reduce counts twice, since it is a
reduce_scatter and an all_gather. What crosses a link is (n - 1) / n of that.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fzero.axes import Binding

__all__ = ["Event", "Log", "record"]


class Event(NamedTuple):
    """One collective: its kind, axis, elements (an all_reduce counted twice), wire dtype, and unit ("": a user's).

    One over two axes has both as its axis: "dp,ep".
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
class Log:
    """The collectives that ran, in `order`."""

    order: list[Event] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """Those that move units of parameters or gradients."""
        return [e for e in self.order if e.unit]

    @property
    def metrics(self) -> list[Event]:
        """All others: losses, norms, a user's own."""
        return [e for e in self.order if not e.unit]

    @property
    def elements(self) -> int:
        """Elements that the units' collectives moved."""
        return sum(e.elements for e in self.events)

    @property
    def bytes(self) -> int:
        """Bytes that the units' collectives moved."""
        return sum(e.bytes for e in self.events)

    def count(self, kind: str) -> int:
        """Count the units' collectives of a kind: "all_gather", "reduce_scatter" or "all_reduce"."""
        return Counter(e.kind for e in self.events)[kind]

    def __str__(self) -> str:
        wide = max([8, *[len(e.axis) + 1 for e in self.order]])
        lines = [f"{'collective':<16}{'axis':<{wide}}{'unit':<24}{'elements':>12}{'bytes':>14}"]
        lines += [
            f"{e.kind:<16}{e.axis:<{wide}}{e.unit or '(metric)':<24}{e.elements:>12,}{e.bytes:>14,}"
            for e in self.events + self.metrics
        ]
        return "\n".join([*lines, f"{'units, in all':<{wide + 40}}{self.elements:>12,}{self.bytes:>14,}"])


_LOGS: list[Log] = []


@contextmanager
def record() -> Iterator[Log]:
    """Record the collectives of eager steps that run inside the `with` block.

    A compiled step records nothing: its collectives are in its graph. In a simulation each collective is recorded
    once, for all ranks.

    Yields:
        A `Log`, filled as the collectives run. `print(log)` is a table.

    Example:
        >>> import fzero, torch
        >>> with fzero.collectives.record() as log:
        ...     _ = fzero.mesh(dp=2).spmd(fzero.collectives.psum)(torch.ones(3))
        >>> log.metrics
        [Event(kind='all_reduce', axis='dp', elements=6, dtype=torch.float32, unit='')]
    """
    log = Log()
    _LOGS.append(log)
    try:
        yield log
    finally:
        _LOGS.remove(log)


def add(
    kind: str,
    binding: Binding,
    sent: int,
    received: int,
    dtype: torch.dtype,
    unit: str,
) -> None:
    """Note in every open recorder that a collective ran that took `sent` and gave `received` elements on a rank."""
    if not kind or not binding.axis or not _LOGS:
        return
    full = {"all_gather": binding.size * sent, "reduce_scatter": binding.size * received, "all_reduce": 2 * sent}
    elements = full.get(kind, sent) // binding.mapped  # all_to_all, ppermute, broadcast: one buffer
    for log in _LOGS if elements else ():  # an empty buffer is not sent
        log.order.append(Event(kind, binding.axis, elements, dtype, unit))
