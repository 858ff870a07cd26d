"""Find a link between two ranks that carries nothing, while both still reach rank 0. Pure state, standard library only.

The system tells a rank's heartbeat which connections have data that nobody acknowledges. Rank 0's heartbeat finds the
rank at the other end, and the two heartbeats send each other datagrams along the link. If none comes back, it is cut.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Link", "LinkEnds", "LinkWatch"]

_SILENCE_DIVISOR = 4  # the part of the limit without an acknowledgment after which a link's other end is sought
_MAX_LINKS = 4  # links that a datagram names
_QUESTION_SHARE = 0.5  # the part of the limit for which a question stays open


class Link(NamedTuple):
    """A connection, from one of its ends.

    Attributes:
        address: this end's address.
        port: this end's port.
        peer_address: the other end's address.
        peer_port: the other end's port.
    """

    address: str
    port: int
    peer_address: str
    peer_port: int

    def reversed(self) -> "Link":
        """Return the connection from its other end."""
        return Link(self.peer_address, self.peer_port, self.address, self.port)


@dataclass
class LinkEnds:
    """Rank 0's record of the ranks at the other ends of silent links.

    Attributes:
        limit_seconds: a rank is lost after this many seconds.
    """

    limit_seconds: float
    _questions: dict[Link, tuple[int, float]] = field(default_factory=dict)  # the rank that asks, and when
    _owners: dict[Link, int] = field(default_factory=dict)  # the rank at the other end

    def hear(self, rank: int, sought: Iterable[Sequence[Any]], owned: Iterable[Sequence[Any]], now: float) -> None:
        """Take in which links a rank asks for, each from its own end, and which asked ones are its own."""
        for link in sought:
            self._questions[Link(*link)] = (rank, now)
        for link in owned:
            self._owners[Link(*link).reversed()] = rank
        open_seconds = self.limit_seconds * _QUESTION_SHARE
        self._questions = {k: v for k, v in self._questions.items() if now - v[1] < open_seconds}
        self._owners = {k: v for k, v in self._owners.items() if k in self._questions}

    def questions(self, rank: int) -> list[Link]:
        """Return the links that other ranks ask for, from the end that is sought."""
        open_questions = [k for k, (asker, _) in self._questions.items() if asker != rank and k not in self._owners]
        return [k.reversed() for k in open_questions[:_MAX_LINKS]]

    def answers(self, rank: int) -> list[tuple[Link, int]]:
        """Return the links that a rank has asked for, and the rank at the other end of each."""
        return [
            (k, self._owners[k]) for k, (asker, _) in self._questions.items() if asker == rank and k in self._owners
        ]


@dataclass
class LinkWatch:
    """One rank's watch over its silent links.

    Attributes:
        limit_seconds: a rank is lost after this many seconds.
        silent: the links whose data nobody acknowledges, and for how many seconds.
    """

    limit_seconds: float
    silent: Mapping[Link, float] = field(default_factory=dict)
    _peers: dict[Link, tuple[int, int]] = field(default_factory=dict)  # the rank at the other end, its heartbeat's port
    _echoed: dict[Link, float] = field(default_factory=dict)  # when a datagram last came back, or the first was due

    def sought(self) -> list[Link]:
        """Return the links whose other ends are to be found."""
        return [k for k, seconds in self.silent.items() if seconds > self.limit_seconds / _SILENCE_DIVISOR][:_MAX_LINKS]

    def find(self, link: Sequence[Any], rank: int, port: int, now: float) -> None:
        """Take in which rank is at the other end of a link, and the port of its heartbeat."""
        key = Link(*link)
        self._peers[key] = (rank, port)
        self._echoed.setdefault(key, now)

    def probes(self) -> list[tuple[Link, int]]:
        """Return the links along which to send a datagram, and the port to which it goes."""
        self._peers = {k: v for k, v in self._peers.items() if k in self.silent}
        self._echoed = {k: v for k, v in self._echoed.items() if k in self._peers}
        return [(k, port) for k, (_, port) in self._peers.items()]

    def hear_echo(self, link: Sequence[Any], now: float) -> None:
        """Take in that a datagram came back."""
        key = Link(*link)
        if key in self._echoed:
            self._echoed[key] = now

    def cut(self, now: float) -> tuple[int, float]:
        """Return the rank to which nothing has passed for longest, and for how many seconds; (-1, 0.0) for none."""
        cuts = [(r, self.silent[k]) for k, (r, _) in self._peers.items() if k in self.silent and self._is_cut(k, now)]
        return max(cuts, key=lambda x: x[1], default=(-1, 0.0))

    def _is_cut(self, link: Link, now: float) -> bool:
        return now - self._echoed[link] > self.limit_seconds / _SILENCE_DIVISOR
