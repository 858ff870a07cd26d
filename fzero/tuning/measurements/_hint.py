"""Hints of a watched step, and those on ranks that are slower than the others, from their heartbeats."""

from typing import NamedTuple

from fzero._liveness import current_heartbeat

__all__ = ["Hint", "straggler_hints"]


class Hint(NamedTuple):
    """A difference between measurement and plan, and its remedy.

    Attributes:
        name: the cause: "outside the step", "workspaces", "fragmentation", "out of room", "between steps", "slow",
            "straggler".
        text: the observation, and the remedy.
    """

    name: str
    text: str

    @property
    def key(self) -> str:
        """The key by which a hint is reported once: its name, and for a straggler its rank."""
        return self.text.partition(" works ")[0] if self.name == "straggler" else self.name

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def straggler_hints() -> list[Hint]:
    """Name the ranks that work longer than the others; none without heartbeats, and on other ranks than rank 0."""
    heartbeat = current_heartbeat()
    return [] if heartbeat is None else [Hint("straggler", str(x)) for x in heartbeat.stragglers]
