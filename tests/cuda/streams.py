"""Laws of streams, read from a log: what collectives hide behind, and what is freed while a stream may still use it."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.cuda.log import Event

COMPUTE = "(nil)"  # the default stream, on which fzero computes
WORK = ("kernel", "product")


class Collective(NamedTuple):
    """A collective on its own stream.

    Attributes:
        name: as in the log.
        products: the products that the compute stream was given after the collective was issued and before it had to
            wait for it; None if it never waited.
        bytes: of a rank's piece.
    """

    name: str
    products: int | None
    bytes: int


class _Clock:
    """The work of each stream that each stream, and the host, has waited for."""

    def __init__(self) -> None:
        self.recorded: dict[int, tuple[str, int]] = {}  # each event's stream, and its place in the log
        self.awaited: dict[tuple[str, str], int] = {}  # by who waits and for whom

    def see(self, place: int, e: Event) -> None:
        """Follow one event."""
        if e.kind == "record event":
            self.recorded[e.bytes] = (e.stream, place)
        elif e.kind == "wait event" and e.bytes in self.recorded:
            stream, until = self.recorded[e.bytes]
            self._advance(e.stream, stream, until)
        elif e.kind in ("event wait", "event done") and int(e.stream, 16) in self.recorded:
            stream, until = self.recorded[int(e.stream, 16)]
            self._advance("host", stream, until)
        elif e.kind == "stream wait":
            self._advance("host", e.stream, place)

    def _advance(self, who: str, stream: str, until: int) -> None:
        self.awaited[who, stream] = max(until, self.awaited.get((who, stream), -1))

    def has_waited(self, who: str, stream: str, place: int) -> bool:
        """Return whether someone has waited for all work that a stream was given up to a place of the log."""
        return stream == who or self.awaited.get((who, stream), -1) > place


def collectives(events: Sequence[Event]) -> list[Collective]:
    """List a step's collectives in the order of their issue."""
    clock, products = _Clock(), 0
    issued = [i for i, e in enumerate(events) if e.kind == "collective"]
    start: dict[int, int] = {}
    hidden: dict[int, int] = {}
    for i, e in enumerate(events):
        clock.see(i, e)
        products += e.kind == "product"
        if e.kind == "collective":
            start[i] = products
        for j in list(start):
            if clock.has_waited(COMPUTE, events[j].stream, j):
                hidden[j] = products - start.pop(j)
    return [Collective(events[i].name, hidden.get(i), events[i].bytes) for i in issued]


def early_frees(events: Sequence[Event]) -> list[str]:
    """Name what may still use each block that went back to the allocator too early.

    The allocator gives a block to the next who asks on the compute stream. So the compute stream, or the host, must
    have waited for all other streams that use it, unless the allocator itself records an event on them as it takes the
    block back (`Tensor.record_stream`).
    """
    clock, results = _Clock(), []
    uses: dict[int, list[tuple[int, str]]] = {}
    for i, e in enumerate(events):
        clock.see(i, e)
        if e.kind == "touch" and e.stream != COMPUTE:
            uses.setdefault(e.bytes, []).append((i, e.stream))
        elif e.kind == "take block":
            uses.pop(e.bytes, None)
        elif e.kind == "free block":
            is_guarded = i + 1 < len(events) and events[i + 1].kind == "record event"
            for place, stream in [] if is_guarded else uses.pop(e.bytes, []):
                if not any(clock.has_waited(who, stream, place) for who in (COMPUTE, "host")):
                    results.append(_user(events, place))
    return results


def _user(events: Sequence[Event], place: int) -> str:
    """Name the collective or the copy to which a touch belongs."""
    return next(e.name for e in reversed(events[:place]) if e.kind in ("collective", "copy"))
