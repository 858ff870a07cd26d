"""The process of a heartbeat: what it sees of its rank, and when it ends it."""

import os
import signal
import types
from typing import Any

import pytest

from fzero._liveness import _beats
from fzero._liveness._beats import RECORD, HeartbeatConfig, _Heartbeat, _Process
from fzero._liveness._cut_links import Link
from fzero._liveness._failure_detector import Activity, LostRank
from fzero._liveness._system import _Usage

LINK = Link("10.0.0.2", 1000, "10.0.0.3", 2000)


@pytest.fixture
def monitor(monkeypatch):
    """A rank's processes as the system would show them: the state, the seconds used, and whether that is all."""
    monitor = types.SimpleNamespace(use=_Usage("S", 0.0, True), file=os.memfd_create("activity"))
    os.truncate(monitor.file, RECORD.size)
    monkeypatch.setattr(_beats.ProcessMonitor, "sample", lambda self, now: monitor.use)
    yield monitor
    os.close(monitor.file)


def process(monitor: Any) -> _Process:
    return _Process(HeartbeatConfig(1, 2, "h", "t", "localhost", 1, 60.0, 300.0, monitor.file))


def write(monitor: Any, count: int, step: int, waiting: bool, text: str) -> None:
    os.pwrite(monitor.file, RECORD.pack(count, step, waiting, 0.0, 0.0, text.encode()), 0)


def test_a_rank_is_idle_for_as_long_as_it_neither_goes_on_nor_works(monitor):
    rank = process(monitor)
    write(monitor, 1, 7, True, "psum at a.py:3")
    for now in range(100):
        activity = rank.activity(float(now))
        assert (activity.idle, activity.seconds, activity.is_known) == (now, now, now > 0)
    assert str(rank.activity(100.0)) == "in step 7, waiting in psum at a.py:3"
    write(monitor, 2, 7, False, "work")
    assert rank.activity(101.0).idle == 0.0
    assert rank.activity(131.0).idle == 30.0


def test_a_rank_that_works_is_not_idle(monitor):
    rank = process(monitor)
    write(monitor, 1, 7, False, "compiles")
    for now in range(0, 1000, 2):
        monitor.use = _Usage("S", now * 0.5, True)
        assert rank.activity(float(now)).idle < 20
    monitor.use = _Usage("S", 1000 * 0.5 + 0.01 * 500, True)  # a thread that logs is not work
    for now in range(1000, 1500, 2):
        rank.activity(float(now))
    assert rank.activity(1500.0).idle > 300


def test_an_activity_says_where_the_system_knows_only_a_part_of_its_use(monitor):
    rank = process(monitor)
    for now in range(3):
        monitor.use = _Usage("S", 0.0, now < 2)
        assert rank.activity(float(now)).is_known == (now == 1)  # at a new place, the system is not asked


def test_a_beat_carries_a_cut_link_until_the_rank_moves_on(monitor):
    rank = process(monitor)
    rank.activity(0.0)
    monitor.use = _Usage("S", 0.0, True, {LINK: 40.0})
    rank.activity(40.0)
    rank.links.find(LINK, 5, 99, 0.0)
    assert rank.activity(41.0).cut == (5, 40.0)
    write(monitor, 1, 7, True, "the next place")
    assert rank.activity(42.0).cut == (-1, 0.0)


def test_a_rank_that_waits_for_a_disk_is_not_idle(monitor):
    rank = process(monitor)
    rank.activity(0.0)
    monitor.use = _Usage("D", 0.0, True)
    assert rank.activity(1000.0).idle == 0.0
    monitor.use = _Usage("T", 0.0, True)
    assert rank.activity(1001.0).process == "stopped"


def heartbeat(activity: Activity, verdict: LostRank | None, raised: bool) -> _Heartbeat:
    heartbeat = object.__new__(_Heartbeat)
    heartbeat.config, heartbeat.verdict, heartbeat.verdict_at, heartbeat.raised = (
        HeartbeatConfig(1, 2, "h", "t", "localhost", 1, 60.0, 300.0, 0),
        verdict,
        100.0,
        raised,
    )
    heartbeat.process = types.SimpleNamespace(pid=os.getppid(), end="", activity=lambda now: activity)  # pyright: ignore
    return heartbeat


LOST = LostRank(0, "h", "reason", "seen", "")


@pytest.mark.parametrize(
    "activity,verdict,raised,now,is_killed",
    [
        (Activity(idle=50.0), LOST, False, 140.0, True),
        (Activity(idle=50.0), LOST, False, 120.0, False),  # not long enough since the verdict
        (Activity(idle=20.0), LOST, False, 200.0, False),  # it works: it writes its files, for instance
        (Activity(idle=50.0), LOST, True, 140.0, False),
        (Activity(idle=50.0), None, False, 140.0, False),
        (Activity(seconds=650.0), LOST._replace(rank=1), False, 140.0, True),  # it is the one that works without end
        (Activity(seconds=650.0), LOST, False, 140.0, False),
        (Activity(seconds=500.0), LOST._replace(rank=1), False, 140.0, False),
        (Activity(process="stopped"), LOST, False, 101.0, True),  # else it would go on later, without the others
    ],
)
def test_a_rank_that_does_not_leave_its_wait_is_killed(monkeypatch, activity, verdict, raised, now, is_killed):
    killed = []
    monkeypatch.setattr(_beats.os, "kill", lambda *what: killed.append(what))
    heartbeat(activity, verdict, raised).end_rank(now)
    assert killed == ([(os.getppid(), signal.SIGKILL)] if is_killed else [])
