"""Decide from heartbeats which rank is lost. Pure state: the time is an argument, and no function waits or sends.

Rank 0's heartbeat watches all ranks by their beats; every other rank's heartbeat watches rank 0 by its replies. A beat
counts once its echo is back, so a link that is cut in one direction is noticed at both ends.

This file and `_beats.py` import only the standard library: the process of a heartbeat has no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "FIRST_MESH",
    "GONE",
    "Activity",
    "FailureDetector",
    "LostRank",
    "ProcessClock",
    "RankZeroDetector",
    "show_activities",
]

FIRST_MESH = "the first mesh"  # the activity of a rank that waits for the others there
GONE = ("ended", "failed", "died")  # how a process can be gone: normally, by an exception, or without a word
_SETTLE_SECONDS = 0.5  # after the first broken connection in which the other ranks' activities arrive
_BROKEN_LIMIT_DIVISOR = 6  # once a connection has broken, a rank is lost after this fraction of the limit
_MAX_TEXT_BYTES = 1200  # of a text of activities, so that a datagram is one packet


class ProcessClock:
    """A clock that stands still while this process does not run, so that a pause of it blames nobody."""

    def __init__(self, start: float, step: float) -> None:
        self._last, self._step, self.now = start, step, 0.0

    def tick(self, time: float) -> float:
        """Go on to a time of the system's clock, by at most one step."""
        self.now += min(max(time - self._last, 0.0), self._step)
        self._last = time
        return self.now


class Activity(NamedTuple):
    """What one rank does, as its heartbeat sees it.

    Attributes:
        host: the name of its host.
        process: "runs", "stopped", "silent", or one of `GONE`.
        step: how many steps of the run it has begun, with those before its checkpoint.
        text: what it does, such as "psum of unit 'blocks.0' at train.py:31".
        waiting: whether it waits there for other ranks.
        seconds: how long it has been there; for a process that is stopped or gone, how long that has been so.
        idle: how many seconds it has been there without using a processor, a disk or the network.
        count: how many activities it has had.
        reason: the exception of a process that failed.
        broken: the message of a connection that broke, "" if none did.
        work: how many seconds it has worked in steps and between them, without its waits.
        is_known: whether the system tells all that it uses.
        cut: the rank to which nothing has passed from it, though both reach rank 0, and for how many seconds.
    """

    host: str = "?"
    process: str = "runs"
    step: int = 0
    text: str = ""
    waiting: bool = False
    seconds: float = 0.0
    idle: float = 0.0
    count: int = 0
    reason: str = ""
    broken: str = ""
    work: tuple[float, float] = (0.0, 0.0)
    is_known: bool = False
    cut: tuple[int, float] = (-1, 0.0)

    def __str__(self) -> str:
        step = f"in step {self.step}, " if self.step else "before its first step, "
        return f"{step}{'waiting in ' if self.waiting else ''}{self.text or 'outside of fzero'}"


class LostRank(NamedTuple):
    """The verdict on a lost rank, with its reason.

    Attributes:
        rank: the lost rank.
        host: the name of its host.
        reason: what happened to it.
        seen: what it was last seen doing.
        places: what the other ranks do, as text.
    """

    rank: int
    host: str
    reason: str
    seen: str
    places: str

    def __str__(self) -> str:
        other_places = f"; the others: {self.places}" if self.places else ""
        return f"rank {self.rank} ({self.host}) is lost: {self.reason}; last seen {self.seen}{other_places}"


def _format_ranks(ranks: list[int]) -> str:
    """Format sorted ranks: "ranks 0, 2-4"."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    texts = [str(x[0]) if len(x) == 1 else f"{x[0]}-{x[-1]}" for x in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def show_activities(activities: Mapping[int, Activity]) -> str:
    """Format the activities of ranks, equal ones together, in at most `_MAX_TEXT_BYTES` characters."""
    groups: dict[str, list[int]] = {}
    for rank, activity in sorted(activities.items()):
        process = "" if activity.process == "runs" else f" ({activity.process})"
        groups.setdefault(f"{activity}{process}", []).append(rank)
    text = ""
    for count, (activity, ranks) in enumerate(groups.items()):
        hosts = list(dict.fromkeys(activities[r].host for r in ranks))
        where = f"({hosts[0]})" if len(hosts) == 1 else f"({len(hosts)} hosts)"
        longest = max(activities[r].seconds for r in ranks)
        entry_text = f"{'; ' if text else ''}{_format_ranks(ranks)} {where} {activity} for {longest:.0f} s"
        if len(text) + len(entry_text) > _MAX_TEXT_BYTES:
            return f"{text}; and {len(groups) - count} more places"
        text += entry_text
    return text


@dataclass
class FailureDetector:
    """Rank 0's detector of lost ranks.

    Attributes:
        size: the number of ranks.
        limit_seconds: a rank is lost after this time without an echo; the ranks hang if all are idle for as long.
        stall_seconds: they hang after this idle time if the system does not tell all that they use. A rank that works
            at one place while the others wait for it is lost after twice the time.
        activities: what each rank that was heard does.
        echoed: when the newest reply was sent whose echo a rank has returned.
        verdict: the first verdict; there is no second one.
    """

    size: int
    limit_seconds: float
    stall_seconds: float
    activities: dict[int, Activity] = field(default_factory=dict)
    echoed: dict[int, float] = field(default_factory=dict)
    verdict: LostRank | None = None
    _broken_at: float | None = None
    _stopped_at: dict[int, float] = field(default_factory=dict)

    def hear(self, rank: int, activity: Activity, echo: float | None, now: float) -> None:
        """Take in a beat. Its first beat counts as an echo, since no reply came before it."""
        self.activities[rank] = activity
        newest = now if rank == 0 or rank not in self.echoed else echo or 0.0
        self.echoed[rank] = max(self.echoed.get(rank, 0.0), newest)
        if activity.broken and self._broken_at is None:
            self._broken_at = now
        if activity.process != "stopped":
            self._stopped_at.pop(rank, None)
        else:
            self._stopped_at.setdefault(rank, now)

    def detect(self, now: float) -> LostRank | None:
        """Return the verdict, if there is one by now."""
        if self.verdict is None:
            for rank, reason in self._find_lost(now):
                activity = self.activities.get(rank, _UNKNOWN)
                other_processes = {r: self._mark_silent(r, p, now) for r, p in self.activities.items() if r != rank}
                self.verdict = LostRank(
                    rank=rank,
                    host=activity.host,
                    reason=reason,
                    seen=str(activity),
                    places=show_activities(other_processes),
                )
                break
        return self.verdict

    def _mark_silent(self, rank: int, activity: Activity, now: float) -> Activity:
        silent = now - self.echoed[rank]
        is_silent = activity.process not in GONE and silent > self.limit_seconds / (2 * _BROKEN_LIMIT_DIVISOR)
        return activity._replace(process="silent", seconds=activity.seconds + silent) if is_silent else activity

    def _find_lost(self, now: float) -> Iterator[tuple[int, str]]:
        """Yield lost ranks, and why, the surest first."""
        alive = {r: p for r, p in self.activities.items() if p.process not in GONE}
        connection_error = next((p.broken for p in self.activities.values() if p.broken), "")
        gone = {r: p for r, p in self.activities.items() if p.process in GONE}
        is_missed = self._broken_at is not None and now - self._broken_at > _SETTLE_SECONDS
        is_awaited = any(p.waiting and p.idle > self.limit_seconds for p in alive.values())
        for process in reversed(GONE):
            # others may go on among themselves after a rank has ended, so a long wait alone does not mean it
            if is_missed or (is_awaited and process != "ended"):
                yield from ((r, _how_gone(p)) for r, p in gone.items() if p.process == process)
        limit = self.limit_seconds / _BROKEN_LIMIT_DIVISOR if connection_error else self.limit_seconds
        for rank in alive:
            silent = now - self.echoed[rank]
            if silent > limit:
                yield rank, f"no heartbeat came through for {silent:.0f} s"
            if now - self._stopped_at.get(rank, now) > limit:
                yield rank, f"its process has been stopped (SIGSTOP) for {now - self._stopped_at[rank]:.0f} s"
        if self._broken_at is not None and now - self._broken_at > self.limit_seconds:
            rank = next(r for r, p in self.activities.items() if p.broken)
            yield rank, f"a connection of it broke, though every rank answers ({connection_error})"
        yield from self._find_cut(alive)
        if any(p.waiting for p in alive.values()) and all(p.process != "stopped" for p in alive.values()):
            yield from self._find_hanging(alive)

    def _find_cut(self, alive: Mapping[int, Activity]) -> Iterator[tuple[int, str]]:
        """Yield the rank at most ends of links that carry nothing, though all ranks answer."""
        cuts = {r: p.cut for r, p in alive.items() if p.cut[1] > self.limit_seconds / 2}
        ends = [end for r, link in cuts.items() for end in (r, link[0])]
        if any(seconds > self.limit_seconds for _, seconds in cuts.values()):
            rank = max(ends, key=lambda r: (ends.count(r), r))
            other = next(link[0] if r == rank else r for r, link in cuts.items() if rank in (r, link[0]))
            seconds = max(seconds for _, seconds in cuts.values())
            between = f"between it and rank {other} ({self._host(other)})"
            yield rank, f"nothing has come through {between} for {seconds:.0f} s, though both reach rank 0's host"

    def _host(self, rank: int) -> str:
        return self.activities[rank].host if rank in self.activities else "?"

    def _find_hanging(self, alive: Mapping[int, Activity]) -> Iterator[tuple[int, str]]:
        """Yield the rank that the others wait for, if none gets on; or that works at one place without end."""
        rank = min(alive, key=lambda r: (alive[r].waiting, alive[r].step, alive[r].count))
        verdict = "the others wait for it" if not alive[rank].waiting else "the ranks wait for one another"
        if all(p.idle > (self.limit_seconds if p.is_known else self.stall_seconds) for p in alive.values()):
            yield from ((r, "no heartbeat of it has ever come") for r in range(self.size) if r not in self.activities)
            yield rank, f"it has not gone on for {alive[rank].idle:.0f} s, and {verdict}"
        if all(p.seconds > 2 * self.stall_seconds for p in alive.values()):
            yield rank, f"it has worked at one place for {alive[rank].seconds:.0f} s, and {verdict}"


def _how_gone(activity: Activity) -> str:
    texts = {
        "ended": "its script ended while others wait for it",
        "failed": f"it raised {activity.reason}",
        "died": "its process died without a word (killed, out of memory, or crashed)",
    }
    return texts[activity.process]


_UNKNOWN = Activity()


@dataclass
class RankZeroDetector:
    """Another rank's detector of the loss of rank 0.

    Attributes:
        limit_seconds: rank 0 is lost after this many seconds without an echo.
        address: the name or address of its host.
        echoed: when the newest beat was sent that rank 0 has echoed; None before the first.
        heard: the time of rank 0's newest reply, by rank 0's clock, to be echoed.
        activity: what rank 0 does.
        places: what the other ranks do, as text.
        verdict: rank 0's verdict, or this detector's own.
    """

    limit_seconds: float
    address: str = "?"
    echoed: float | None = None
    heard: float | None = None
    activity: Activity = _UNKNOWN
    places: str = ""
    verdict: LostRank | None = None

    def hear(self, reply: Mapping[str, Any], now: float) -> None:
        """Take in a reply of rank 0."""
        self.heard = max(self.heard or 0.0, reply["sent"])
        self.echoed = max(self.echoed or 0.0, reply["echo"])
        self.activity, self.places = Activity(*reply["activity"]), reply["places"]
        if reply["verdict"] and self.verdict is None:
            self.verdict = LostRank(*reply["verdict"])

    def detect(self, now: float, broken: str, own: Activity = _UNKNOWN) -> LostRank | None:
        """Return the verdict, if there is one by now.

        Args:
            now: the time, in seconds.
            broken: the message of a broken connection, "" if none broke.
            own: what this rank does.
        """
        if self.verdict is None and self.echoed is None and own.text == FIRST_MESH and own.idle > self.limit_seconds:
            self.verdict = LostRank(
                rank=0,
                host=self.address,
                reason="no heartbeat of it has ever come",
                seen=str(self.activity),
                places="",
            )
        if self.verdict is None and self.echoed is not None:
            silent = now - self.echoed
            limit = self.limit_seconds / _BROKEN_LIMIT_DIVISOR if broken else self.limit_seconds
            if self.activity.process in GONE and broken:
                self.verdict = self._blame_rank_0(_how_gone(self.activity))
            elif self.activity.process not in GONE and silent > limit:
                self.verdict = self._blame_rank_0(f"no heartbeat came through for {silent:.0f} s")
        return self.verdict

    def _blame_rank_0(self, reason: str) -> LostRank:
        return LostRank(rank=0, host=self.activity.host, reason=reason, seen=str(self.activity), places=self.places)
