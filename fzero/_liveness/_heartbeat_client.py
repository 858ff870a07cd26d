"""This rank's end of its heartbeat: it publishes what the rank does, and learns which rank is lost."""

import contextlib
import json
import logging
import mmap
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fzero._liveness import _beats
from fzero._liveness._beats import RECORD, HeartbeatConfig
from fzero._liveness._failure_detector import FIRST_MESH, LostRank
from fzero._liveness._stragglers import Straggler
from fzero._notice import trouble_link
from fzero._torch.release import is_connection_error, release_waits

__all__ = [
    "HeartbeatClient",
    "LostRankError",
    "current_heartbeat",
    "find_lost_rank_error",
    "publish_step",
    "register_heartbeat",
    "resume_at",
    "start_heartbeat",
]

# a rank without a heartbeat is lost after this part of the timeout: 50 s of 300, so it is named in 60
_LIMIT_DIVISOR = 6
_KNOWN_SECONDS = 10.0  # seconds in which a rank's heartbeat reaches rank 0's
_VERDICT_SECONDS = 10.0  # beyond the limit in which a verdict arrives
_log = logging.getLogger("fzero")


class LostRankError(RuntimeError):
    """Another rank is gone, cannot be reached, or does not go on; every rank that still lives raises this error.

    Attributes:
        rank: the lost rank; the lowest if several are lost at once.
        host: the name of its host.
        reason: what happened to it.
        seen: what it was last seen doing: step, collective and line.
        places: what the other ranks do, as text.
    """

    def __init__(self, verdict: LostRank) -> None:
        super().__init__(verdict)
        self.rank, self.host, self.reason, self.seen, self.places = verdict

    def __str__(self) -> str:
        return f"{self.args[0]}{trouble_link('a-lost-rank')}"


LostRankError.__module__ = "fzero.errors"  # where a pickle finds it


class HeartbeatClient:
    """The end of a heartbeat in its rank.

    The process `_beats.py` beats. This object writes the rank's activity into memory that the process reads, and a
    thread waits for what the process says.

    Attributes:
        limit_seconds: a rank is lost after this many seconds without a heartbeat.
        port: the port of rank 0's heartbeat; 0 if it could not start.
        lost: the error that names the lost rank, once there is one.
        stragglers: on rank 0, the ranks that are slow.
    """

    def __init__(self, config: HeartbeatConfig, store: Any) -> None:
        """Start the heartbeat's process, and read on rank 0 the port at which the others reach it."""
        self._store = store
        self.limit_seconds, self.port = config.limit_seconds, config.port
        self.lost: LostRankError | None = None
        self._count, self._step, self._owner = 0, 0, os.getpid()
        self._is_waiting, self._in_step, self._since = False, False, time.perf_counter()
        self._step_seconds, self._between_seconds = 0.0, 0.0
        self.stragglers: list[Straggler] = []
        self._verdict_event, self._known_event = threading.Event(), threading.Event()
        with _shared_memory() as file:
            self._activity = mmap.mmap(file, RECORD.size)
            words = json.dumps(config._replace(activity_fd=file))
            command = [sys.executable, "-I", "-S", str(pathlib.Path(_beats.__file__)), words]
            self._process = subprocess.Popen(command, stdin=-1, stdout=-1, pass_fds=[file])
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        if config.rank == 0:
            self.port = json.loads(self._stdout.readline() or '{"port": 0}')["port"]
            self._known_event.set()
        threading.Thread(target=self._listen, daemon=True, name="fzero heartbeat").start()
        self.publish(FIRST_MESH, waiting=True)

    def publish(self, text: str, waiting: bool = False) -> None:
        """Publish what this rank does now, and whether it waits for other ranks there."""
        self._count += 1
        self._count_time()
        self._is_waiting = waiting
        work = (self._step_seconds, self._between_seconds)
        self._activity[:] = RECORD.pack(self._count, self._step, waiting, *work, text.encode())

    def _count_time(self) -> None:
        """Count the time since the last call as work within or between steps, unless this rank waited."""
        since, self._since = self._since, time.perf_counter()
        if self._in_step and not self._is_waiting:
            self._step_seconds += self._since - since
        elif not self._is_waiting:
            self._between_seconds += self._since - since

    def wait_until_known(self) -> None:
        """Wait until rank 0's heartbeat knows this one, which takes a moment where heartbeats can pass."""
        self._known_event.wait(_KNOWN_SECONDS)

    def resume(self, step: int) -> None:
        """Publish that the run goes on from a checkpoint, after so many steps."""
        self._step = step
        self.publish("work")

    def begin_step(self, name: str, is_own: bool = True) -> None:
        """Publish that a step begins; or a part of the last one, if it is not a step of its own."""
        self._step += is_own
        self.publish(name)
        self._in_step = True

    def end_step(self) -> None:
        """Publish that a step has ended."""
        self.publish("between steps")
        self._in_step = False

    def leave_step(self) -> None:
        """Count the time from now on as between steps. A verdict still says what the rank did as an error came."""
        self._count_time()
        self._in_step, self._is_waiting = False, False

    def find_lost_rank_error(self, error: BaseException) -> LostRankError | None:
        """Return the error that names the lost rank, if `error` comes from a connection to it.

        It waits for the verdict, which the heartbeats of all ranks find together.
        """
        if isinstance(error, LostRankError) or os.getpid() != self._owner:
            return None
        if self.lost is None and is_connection_error(error):
            self._send(f"broken {' '.join(str(error).split())[:200]}")
            self._verdict_event.wait(self.limit_seconds + _VERDICT_SECONDS)
        if self.lost is not None and isinstance(error, RuntimeError | OSError):
            self._send("raised")
            return self.lost
        return None

    def stop(self) -> None:
        """Say how this rank ends, and end the heartbeat."""
        if os.getpid() != self._owner:  # a fork of the rank ends
            return
        error = getattr(sys, "last_value", None)
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        self._send(f"bye {' '.join(reason.split())[:200]}")
        with contextlib.suppress(OSError):
            self._stdin.close()
        if _CURRENT[-1:] == [self]:
            _CURRENT.clear()

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the heartbeat has ended
            self._stdin.write(f"{line}\n".encode())
            self._stdin.flush()

    def _listen(self) -> None:
        """Take in what the heartbeat says, until it ends."""
        with self._stdout:
            for line in self._stdout:
                message: dict[str, Any] = json.loads(line)
                if "notice" in message:
                    _log.warning("%s", message["notice"])
                elif "known" in message:
                    self._known_event.set()
                elif "stragglers" in message:
                    self.stragglers = [Straggler(*x) for x in message["stragglers"]]
                elif self.lost is None:
                    self.lost = LostRankError(LostRank(*message["verdict"]))
                    _log.error("%s", self.lost)
                    self._verdict_event.set()
                    release_waits(self._store)
        self._process.wait()
        self._verdict_event.set()  # nobody would set them
        self._known_event.set()


@contextmanager
def _shared_memory() -> Iterator[int]:
    """Open a file for the memory that a rank shares with its heartbeat."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fzero-activity")
        try:
            os.truncate(file, RECORD.size)
            yield file
        finally:
            os.close(file)
    else:
        with tempfile.TemporaryFile() as f:
            f.truncate(RECORD.size)
            yield f.fileno()


_CURRENT: list[HeartbeatClient] = []  # at most one: that of the default process group


def current_heartbeat() -> HeartbeatClient | None:
    """Return the heartbeat of this process's world; None without one, as in a simulation."""
    return _CURRENT[0] if _CURRENT else None


def start_heartbeat(store: Any, rank: int, size: int, address: str, timeout: float) -> HeartbeatClient | None:
    """Start the heartbeat of a rank. The ranks find rank 0's by the store. Without rank 0's there are none.

    Args:
        store: a store that only this world uses.
        rank: this process's rank.
        size: the number of ranks.
        address: rank 0's name or address; "" for the name of rank 0's host.
        timeout: a silent rank is lost after a part of it, by `_LIMIT_DIVISOR`, and ranks that are all idle hang after
            as long. Where the system does not tell what they use, that takes all of it. Endless work at one place takes
            twice as long.
    """
    key, can_start = "fzero/heartbeat", bool(sys.executable)  # a program that embeds Python has none
    host, limit = socket.gethostname(), timeout / _LIMIT_DIVISOR
    config = partial(
        HeartbeatConfig, rank=rank, size=size, host=host, limit_seconds=limit, stall_seconds=timeout, activity_fd=0
    )
    if rank == 0:
        secret, where = secrets.token_hex(8), address or host
        heartbeat = HeartbeatClient(config(world_secret=secret, address=where, port=0), store) if can_start else None
        port = 0 if heartbeat is None else heartbeat.port
        store.set(key, json.dumps([secret, where, port]))
        if port == 0:
            _log.warning("no heartbeats: rank 0's could not start, so lost ranks are found by torch's timeouts alone")
        return heartbeat if port else None
    secret, where, port = json.loads(store.get(key))
    return HeartbeatClient(config(world_secret=secret, address=where, port=port), store) if can_start and port else None


def register_heartbeat(heartbeat: HeartbeatClient, group: Any) -> None:
    """Keep a heartbeat until its process group or this process ends."""
    heartbeat.wait_until_known()
    heartbeat.publish("work")
    _CURRENT[:] = [heartbeat]
    weakref.finalize(group, heartbeat.stop)


def find_lost_rank_error(error: BaseException | None) -> LostRankError | None:
    """Return the error that names the lost rank, if an error comes from a connection to it; see the method."""
    heartbeat = current_heartbeat()
    return None if heartbeat is None or error is None else heartbeat.find_lost_rank_error(error)


@contextmanager
def _publish_step(heartbeat: HeartbeatClient, name: str, is_own: bool) -> Iterator[None]:
    heartbeat.begin_step(name, is_own)
    try:
        yield
    except BaseException:
        heartbeat.leave_step()
        raise
    heartbeat.end_step()


_NOTHING = contextlib.nullcontext()


def publish_step(name: str, is_own: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context that publishes that this rank runs a step, or a part of the last one."""
    heartbeat = current_heartbeat()
    return _NOTHING if heartbeat is None else _publish_step(heartbeat, name, is_own)


def resume_at(step: int) -> None:
    """Count this rank's steps from those that its run did before, as its checkpoint says."""
    heartbeat = current_heartbeat()
    if heartbeat is not None:
        heartbeat.resume(step)
