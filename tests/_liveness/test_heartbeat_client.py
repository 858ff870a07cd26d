"""A rank's end of its heartbeat: the error that it makes of a broken connection, and a machine without heartbeats."""

import pickle
import sys
import time

import pytest
import torch

import fzero
from fzero import errors
from fzero._liveness import _heartbeat_client, publish_step, start_heartbeat
from fzero._liveness._beats import RECORD
from fzero._liveness._failure_detector import LostRank

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer")


@pytest.fixture
def heartbeats():
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    heartbeats = [start_heartbeat(store, rank, 2, "localhost", 5.0) for rank in range(2)]
    yield heartbeats
    for heartbeat in heartbeats:
        assert heartbeat is not None
        heartbeat.stop()
        heartbeat._process.wait(10)


def test_a_broken_connection_is_explained_by_the_rank_that_is_gone(heartbeats):
    first, second = heartbeats
    second.wait_until_known()
    second.begin_step("train_step")
    assert first.find_lost_rank_error(ValueError("gloo/transport")) is None  # of the user's own
    second.stop()
    lost = first.find_lost_rank_error(BROKEN)
    assert isinstance(lost, errors.LostRankError) and (lost.rank, lost.seen) == (1, "in step 1, train_step")
    assert lost.reason == "its script ended while others wait for it"
    assert (
        first.find_lost_rank_error(OSError("a file of a later save")) is lost
    )  # what fails later fails for this reason
    assert first.find_lost_rank_error(lost) is None


def test_seconds_of_work_within_and_between_steps_leave_waits_out(heartbeats):
    heartbeat, pauses = heartbeats[0], []
    for place in ("step", "wait", "between"):
        begin = time.perf_counter()
        if place == "step":
            heartbeat.begin_step("train_step")
        elif place == "wait":
            heartbeat.publish("psum", waiting=True)
        else:
            heartbeat.publish("work")
            heartbeat.end_step()
        time.sleep(0.2)
        pauses.append(time.perf_counter() - begin)
    heartbeat.publish("the end")
    in_steps, between = RECORD.unpack(heartbeat._activity[:])[3:5]
    assert 0.2 <= in_steps < pauses[0] + 0.15 and between >= 0.2


@pytest.mark.parametrize("waiting", [False, True])
def test_after_a_caught_error_time_counts_as_between_steps(heartbeats, monkeypatch, waiting):
    """The activity at the error stays published, for a verdict."""
    heartbeat = heartbeats[0]
    monkeypatch.setattr(_heartbeat_client, "_CURRENT", [heartbeat])
    with pytest.raises(ValueError, match="a bad batch"), publish_step("train_step"):
        heartbeat.publish("psum", waiting=waiting)
        raise ValueError("a bad batch")
    assert RECORD.unpack(heartbeat._activity[:])[5].rstrip(b"\0") == b"psum"
    time.sleep(0.2)
    with publish_step("train_step"):
        in_steps, between = RECORD.unpack(heartbeat._activity[:])[3:5]
        assert in_steps < 0.15 and between >= 0.2


def test_a_restarted_rank_counts_the_steps_of_its_run(heartbeats, tmp_path, monkeypatch):
    """Those before its checkpoint, too; a part of a step is none."""
    first, second = heartbeats
    second.wait_until_known()
    with fzero.checkpoint.checkpoints(tmp_path) as runs:
        runs.save(120, {"w": torch.ones(3)})
    monkeypatch.setattr(_heartbeat_client, "_CURRENT", [second])
    fzero.checkpoint.checkpoints(tmp_path).restore({"w": torch.zeros(3)})
    with publish_step("train_step"), publish_step("the outer step", is_own=False):
        second.stop()
    lost = first.find_lost_rank_error(BROKEN)
    assert lost.seen in ("in step 121, the outer step", "in step 121, between steps")  # when its heartbeat looks


def test_without_its_heartbeat_process_a_rank_explains_no_broken_connection(heartbeats):
    heartbeats[1]._process.kill()
    start = time.monotonic()
    assert heartbeats[1].find_lost_rank_error(BROKEN) is None
    assert time.monotonic() - start < 5  # it would wait for 11 s


def test_without_a_python_to_run_there_are_no_heartbeats(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "")
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    assert [start_heartbeat(store, rank, 2, "localhost", 5.0) for rank in range(2)] == [None, None]
    assert "no heartbeats: rank 0's could not start" in caplog.text


def test_the_error_can_be_sent_to_another_process():
    error = errors.LostRankError(LostRank(3, "host", "it raised ValueError: x", "in step 2, work", "rank 0"))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and (copy.rank, copy.host) == (3, "host")
    assert str(error).startswith(
        "rank 3 (host) is lost: it raised ValueError: x; last seen in step 2, work; the others"
    )
