"""A heartbeat: a small process beside each rank that reports over UDP to rank 0's that its rank lives.

    python -I -S _beats.py CONFIG

It is a process and no thread, so that it beats while its rank compiles, waits in a collective, or is stopped. Datagrams
need no connection: each that arrives counts, however many are lost. It ends with its rank.

The rank writes its activity into shared memory (`RECORD`), and lines to this process: "broken TEXT", "raised" and
"bye REASON". This process writes lines of JSON to the rank: its port, the verdict, and notices.
"""

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import Any, NamedTuple

__all__ = ["RECORD", "HeartbeatConfig", "main"]

if __name__ == "__main__":  # without the package, which needs torch
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from _cut_links import Link, LinkEnds, LinkWatch  # pyright: ignore
    from _failure_detector import (  # pyright: ignore
        GONE,
        Activity,
        FailureDetector,
        LostRank,
        ProcessClock,
        RankZeroDetector,
        show_activities,
    )
    from _stragglers import Pace, Stragglers  # pyright: ignore
    from _system import ProcessMonitor  # pyright: ignore
else:
    from fzero._liveness._cut_links import Link, LinkEnds, LinkWatch
    from fzero._liveness._failure_detector import (
        GONE,
        Activity,
        FailureDetector,
        LostRank,
        ProcessClock,
        RankZeroDetector,
        show_activities,
    )
    from fzero._liveness._stragglers import Pace, Stragglers
    from fzero._liveness._system import ProcessMonitor

# how many activities the rank has had, its step, whether it waits, seconds of work in steps and between, text
RECORD = struct.Struct("<qq?dd200s")
_LINGER_BEATS = 30  # with which a heartbeat whose rank has ended makes sure that rank 0's knows it
_URGENT_SECONDS = 0.1  # between beats while there is something to say
_BUSY_SHARE = 0.05  # the share of a processor above which a rank is busy
_BUSY_SECONDS = 0.02  # of a processor beyond that share: two ticks of the clock that counts them
_MAX_DATAGRAM_BYTES = 8192


class HeartbeatConfig(NamedTuple):
    """The settings of a heartbeat, which its rank gives it.

    Attributes:
        rank: its rank.
        size: the number of ranks.
        host: the name of its host.
        world_secret: a text that only this world's datagrams have.
        address: rank 0's name or address.
        port: rank 0's port; 0 for rank 0 itself, which takes a free one.
        limit_seconds: a rank is lost after this many seconds without a heartbeat.
        stall_seconds: the ranks hang after this many seconds in which no rank gets on.
        activity_fd: the file descriptor of the activity's memory.
    """

    rank: int
    size: int
    host: str
    world_secret: str
    address: str
    port: int
    limit_seconds: float
    stall_seconds: float
    activity_fd: int


class _Process:
    """The rank's process as the system sees it, and the activity that it publishes."""

    def __init__(self, config: HeartbeatConfig) -> None:
        self._config = config
        self.pid = os.getppid()
        self._memory = mmap.mmap(config.activity_fd, RECORD.size, prot=mmap.PROT_READ)
        self._system = ProcessMonitor(self.pid, config.stall_seconds)
        self._state = ""  # the process's, as the system names it
        self.links = LinkWatch(config.limit_seconds)
        self._count, self._since, self._ended_at = -1, 0.0, 0.0
        self._uses: deque[tuple[float, float]] = deque()  # when, and the seconds used until then
        self._is_new = True  # whether the system has not been asked at this activity
        self._sample_is_complete = False
        self.end, self.reason, self.broken = "", "", ""

    def activity(self, now: float) -> Activity:
        """Return what the rank does. The system is asked once the rank stays at its activity."""
        count, step, waiting, *work, text = RECORD.unpack(self._memory[:])
        if not self.end and os.getppid() != self.pid:
            self.end = "died"
        if self.end:
            self._ended_at = self._ended_at or now
        idle = 0.0
        if count != self._count:
            self._count, self._since, self._state, self._is_new = count, now, "", True
            self._uses.clear()
            self.links.silent = {}
        elif not self.end:
            idle = self._idle_seconds(now)
        process = self.end or ("stopped" if self._state in ("T", "t") else "runs")
        words = text.rstrip(b"\0").decode(errors="ignore")
        since = self._ended_at or self._since
        return Activity(
            host=self._config.host,
            process=process,
            step=step,
            text=words,
            waiting=waiting,
            seconds=now - since,
            idle=idle,
            count=count,
            reason=self.reason,
            broken=self.broken,
            work=(work[0], work[1]),
            is_known=self._sample_is_complete,
            cut=self.links.cut(now),
        )

    def _idle_seconds(self, now: float) -> float:
        """Return for how long the rank used at most the share `_BUSY_SHARE` at its activity."""
        self._state, used_seconds, self._sample_is_complete, self.links.silent = self._system.sample(now)
        if self._state == "D":
            return 0.0
        begin = self._since if self._is_new else now
        self._is_new = False
        if not self._uses or now - self._uses[-1][0] >= self._config.limit_seconds / 20:
            self._uses.append((begin, used_seconds))
        while self._uses and used_seconds - self._uses[0][1] > _BUSY_SHARE * (now - self._uses[0][0]) + _BUSY_SECONDS:
            self._uses.popleft()
        return now - self._uses[0][0] if self._uses else 0.0

    def owned_links(self, links: list[Link]) -> list[Link]:
        """Return which of the links are the rank's."""
        own_links = self._system.links() if links else set[Link]()
        return [link for link in links if link in own_links]


class _Heartbeat:
    """One heartbeat: its socket, its rank's process, and its failure detector."""

    def __init__(self, config: HeartbeatConfig) -> None:
        """Open the socket, and on rank 0 bind it to a free port, which is told to the trainer."""
        self.config, self.process = config, _Process(config)
        self.is_finished = False
        self.period = min(max(config.limit_seconds / 30, 0.05), 2.0)
        self.clock = ProcessClock(time.monotonic(), 2 * self.period)
        where = socket.getaddrinfo(config.address, config.port or None, type=socket.SOCK_DGRAM)[0]
        self.socket = socket.socket(where[0], socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.rank_zero_address: Any = where[4]
        self.activity = Activity()
        self.rank_zero = RankZeroDetector(config.limit_seconds, config.address)  # used on the other ranks
        self.detector = FailureDetector(config.size, config.limit_seconds, config.stall_seconds)
        self.addresses: dict[int, Any] = {}
        self.ranks_with_verdict: set[int] = set()  # the ranks that know the verdict
        self.verdict: LostRank | None = None
        self.verdict_at = 0.0
        self.raised = False
        self.is_heard = config.rank == 0  # or it is settled that rank 0's does not hear it
        self.places = ""  # what the other ranks do, as text
        self.stragglers = Stragglers()
        self.link_ends = LinkEnds(config.limit_seconds)
        self.link_queries: list[Link] = []  # links of other ranks, which this rank may have the other end of
        if config.rank == 0:
            self.socket.bind(("", 0))
            _send_to_rank(port=self.socket.getsockname()[1])

    def run(self) -> None:
        """Beat until the rank has ended."""
        ready = [self.socket, 0]
        next_beat, ended_at, last_beats = 0.0, None, 0
        while not self.is_finished:
            wait = max(min(next_beat - time.monotonic(), self.period), 0.0)
            if self.read_sources(ready, wait):
                next_beat = 0.0
            now = self.clock.tick(time.monotonic())
            if time.monotonic() >= next_beat:
                self.beat(now)
                last_beats += bool(self.process.end)
                next_beat = time.monotonic() + self.pause()
            self.send_verdict(now)
            self.end_rank(now)
            self.report_if_heard(now)
            if self.process.end:
                ended_at = now if ended_at is None else ended_at
                self.is_finished = last_beats > _LINGER_BEATS or self.is_known(ended_at)

    def read_sources(self, ready: list[Any], wait: float) -> bool:
        """Wait for datagrams and for lines of the rank, and take them in. Return whether the rank said anything."""
        sources = select.select(ready, [], [], wait)[0]
        for source in sources:
            if source != 0:
                self.receive()
            elif not self.read_lines():
                ready.remove(0)
        return 0 in sources

    def pause(self) -> float:
        """Return the seconds until the next beat: few while there is something to say."""
        ending = self.process.end or self.process.broken or self.verdict
        is_urgent = ending or not self.is_heard or self.process.links.probes()
        return min(_URGENT_SECONDS, self.period) if is_urgent else self.period

    def report_if_heard(self, now: float) -> None:
        """Report to the rank, once, whether rank 0's heartbeat hears this one."""
        if self.is_heard or (self.rank_zero.echoed is None and now <= self.config.limit_seconds):
            return
        self.is_heard = True
        if self.rank_zero.echoed is not None:
            _send_to_rank(known=True)
        else:
            _send_to_rank(notice=f"no heartbeat of rank {self.config.rank} reaches rank 0 at {self.config.address}")

    def is_known(self, ended_at: float) -> bool:
        """Return whether all who have to know that this rank has ended know it."""
        if self.config.rank:
            return (self.rank_zero.echoed or 0.0) > ended_at
        other_processes = {r for r, p in self.detector.activities.items() if r and p.process not in GONE}
        return not other_processes or (self.verdict is not None and other_processes <= self.ranks_with_verdict)

    def read_lines(self) -> bool:
        """Read what the rank says. Return whether it can still say something."""
        data = os.read(0, 65536).decode(errors="replace")
        for line in data.splitlines():
            word, _, remaining_text = line.partition(" ")
            if word == "broken":
                self.process.broken = self.process.broken or remaining_text
            elif word == "raised":
                self.raised = True
            elif word == "bye":
                self.process.end, self.process.reason = "failed" if remaining_text else "ended", remaining_text
        if not data and not self.process.end:
            self.process.end = "died"
        return bool(data)

    def beat(self, now: float) -> None:
        """Say that the rank lives; rank 0 to itself."""
        activity, links = self.process.activity(now), self.process.links
        self.activity = activity
        if self.config.rank == 0:
            self.detector.hear(0, activity, None, now)
            self.link_ends.hear(0, links.sought(), self.process.owned_links(self.link_ends.questions(0)), now)
            self.find_ends(self.ends_for(0), now)
            other_processes = {r: p for r, p in self.detector.activities.items() if r}
            self.places = show_activities(other_processes)  # once a beat: it grows with the number of ranks
            paces = {r: Pace(p.step, p.work) for r, p in self.detector.activities.items()}
            if self.stragglers.compare(paces, {r: p.host for r, p in self.detector.activities.items()}):
                _send_to_rank(stragglers=self.stragglers.slow_ranks)
            if self.process.end:
                for rank in self.addresses:  # so that no rank takes the silence that follows for a loss
                    self.reply(rank, 0.0, now)
        else:
            message = {"rank": self.config.rank, "sent": now, "echo": self.rank_zero.heard, "activity": activity}
            message |= {"sought": links.sought(), "owned": self.process.owned_links(self.link_queries)}
            self.send({**message, "knows": self.verdict is not None}, self.rank_zero_address)
        for link, port in links.probes():
            address_prefix = "::ffff:" * (self.socket.family == socket.AF_INET6 and ":" not in link.peer_address)
            self.send({"probe": link}, (address_prefix + link.peer_address, port))

    def ends_for(self, rank: int) -> list[tuple[Link, int, int]]:
        """Return the links whose ends a rank seeks: of each the rank at the other end, and its heartbeat's port."""
        own_end = {0: self.socket.getsockname()}
        return [(link, r, {**own_end, **self.addresses}[r][1]) for link, r in self.link_ends.answers(rank)]

    def find_ends(self, ends: list[Any], now: float) -> None:
        """Take in which ranks are at the other ends of links."""
        for link, rank, port in ends:
            self.process.links.find(link, rank, port, now)

    def send(self, message: dict[str, Any], address: Any) -> None:
        """Send a datagram. One that cannot be sent now is lost, like any other."""
        with contextlib.suppress(OSError):
            self.socket.sendto(json.dumps({"secret": self.config.world_secret, **message}).encode(), address)

    def receive(self) -> None:
        """Take in all datagrams that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, address = self.socket.recvfrom(_MAX_DATAGRAM_BYTES)
                    message = json.loads(data)
                    if message["secret"] == self.config.world_secret:
                        self.on_message(message, address)
                except (ValueError, KeyError, TypeError, ConnectionError):  # not of this world, or an echo of an error
                    continue

    def on_message(self, message: dict[str, Any], address: Any) -> None:
        """Take in a beat of another rank, and reply; or a reply of rank 0; or a datagram along a silent link."""
        now = self.clock.tick(time.monotonic())
        if "probe" in message:
            self.send({"probed": message["probe"]}, address)
        elif "probed" in message:
            self.process.links.hear_echo(message["probed"], now)
        elif self.config.rank:
            self.rank_zero.hear(message, now)
            self.link_queries = [Link(*link) for link in message["link_queries"]]
            self.find_ends(message["link_ends"], now)
        else:
            self.on_beat(message, address, now)

    def on_beat(self, message: dict[str, Any], address: Any, now: float) -> None:
        """Take in a beat of another rank, and reply."""
        rank = message["rank"]
        self.addresses[rank] = address
        if not self.detector.activities:
            self.beat(now)  # the first reply has rank 0's activity
        self.detector.hear(rank, Activity(*message["activity"]), message["echo"], now)
        self.link_ends.hear(rank, message["sought"], message["owned"], now)
        if message["knows"]:
            self.ranks_with_verdict.add(rank)
        self.reply(rank, message["sent"], now)

    def reply(self, rank: int, echo: float, now: float) -> None:
        """Send rank 0's activity, the verdict, and an echo."""
        message = {"sent": now, "echo": echo, "activity": self.detector.activities[0], "places": self.places}
        message |= {"link_queries": self.link_ends.questions(rank), "link_ends": self.ends_for(rank)}
        self.send({**message, "verdict": self.detector.verdict}, self.addresses[rank])

    def send_verdict(self, now: float) -> None:
        """Send the verdict to the rank, once there is one; rank 0's heartbeat also sends it to the others."""
        if self.config.rank == 0:
            verdict = self.detector.detect(now)
        else:
            verdict = self.rank_zero.detect(now, self.process.broken, self.activity)
        if verdict is not None and self.verdict is None:
            self.verdict, self.verdict_at = verdict, now
            _send_to_rank(verdict=verdict)
            for rank in self.addresses:  # rank 0's has those of all others, and the others' have none
                self.reply(rank, 0.0, now)

    def end_rank(self, now: float) -> None:
        """Kill the rank if it knows the verdict, and neither raises the error nor works, or works without end."""
        if self.verdict is None or self.raised or self.process.end:
            return
        activity, seconds = self.process.activity(now), now - self.verdict_at
        works_long = activity.seconds - seconds > 2 * self.config.stall_seconds
        is_endless = self.verdict.rank == self.config.rank and works_long
        quiet = seconds if is_endless else min(activity.idle, seconds)
        if activity.process == "stopped" or quiet > max(self.config.limit_seconds / 2, 2.0):
            text = f"fzero: rank {self.config.rank} is killed, since it did not leave {activity}: {self.verdict}\n"
            os.write(2, text.encode())
            if os.getppid() == self.process.pid:  # else it has ended, and another process may have its number
                os.kill(self.process.pid, signal.SIGKILL)


def _send_to_rank(**message: Any) -> None:
    """Write a line to the rank."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(message) + "\n").encode())


def main() -> None:
    """Beat for the rank that started this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a launcher's; this process ends after its rank
        signal.signal(number, signal.SIG_IGN)
    _Heartbeat(HeartbeatConfig(*json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
