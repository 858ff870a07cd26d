"""A rank that is lost: the others raise an error that names it, in time; a slow one is waited for."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.launch import ROOT, environment, free_port, rank_variables, world

SCRIPT = "tests/_liveness/lost.py"
LOST = r"LostRankError: rank 1 \(\S+\) is lost: "
SEEN = r"; last seen in step 5, between steps; the others: ranks? 0.* \(\S+\) in step 6, waiting in "


@pytest.mark.parametrize(
    "what,timeout,reason,wait",
    [
        ("killed", 300, r"its process died without a word \(killed, out of memory, or crashed\)", "gather of unit 'w'"),
        ("jitted, killed", 300, r"its process died without a word .*", "all_gather at lost.py:"),
    ],
)
def test_a_rank_that_is_gone_is_named_at_once(what, timeout, reason, wait):
    start = time.monotonic()
    done = world(3, SCRIPT, what, str(timeout))
    assert time.monotonic() - start < 48  # less than the limit, 50 s, on a busy machine
    errors = re.findall(f"^.*{LOST}{reason}{SEEN}{wait}.*$", done.stderr, re.MULTILINE)
    assert len(errors) == 2, done
    assert "done" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "what,reason",
    [("raises", "it raised ValueError: planted"), ("ends", "its script ended while others wait for it")],
)
def test_a_lost_rank_error_says_how_the_script_of_the_rank_ended(what, reason):
    """The ranks are real processes: a forked one skips the end of the interpreter."""
    port = free_port()
    command = [sys.executable, SCRIPT, what, "300"]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=environment(**rank_variables(r, 2, port)), stderr=-1, text=True)
        for r in range(2)
    ]
    err, _ = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert ranks[0].returncode == 1
    assert re.search(f"LostRankError.*{LOST.removeprefix('LostRankError: ')}{reason}{SEEN}gather of unit 'w'", err), err


@pytest.mark.parametrize("what", ["hangs", "polls"])
def test_a_rank_that_hangs_is_named_after_the_limit(what):
    """It is named, too, if it wakes up now and then to look for a file that never comes."""
    start = time.monotonic()
    done = world(2, SCRIPT, f"jitted, {what}", "30")
    assert 5 < time.monotonic() - start < 48
    text = f"{LOST}it has not gone on for .* s, and the others wait for it{SEEN}all_gather at lost.py"
    assert re.search(text, done.stderr), done
    assert float(re.findall("not gone on for (.*?) s", done.stderr)[0]) < 10
    assert "fzero: rank 1 is killed, since it did not leave in step 5, between steps" in done.stderr


@pytest.mark.slow
def test_a_rank_that_works_without_end_is_named_after_twice_the_timeout():
    start = time.monotonic()
    done = world(2, SCRIPT, "jitted, spins", "8")
    assert 16 < time.monotonic() - start < 120  # a busy machine may take long to start
    assert re.search(f"{LOST}it has worked at one place for 1. s, and the others wait for it{SEEN}", done.stderr), done


@pytest.mark.slow
def test_ranks_that_call_different_collectives_are_named_after_the_limit():
    done = world(2, SCRIPT, "calls another", "30")
    text = r"it has not gone on for .* s, and the ranks wait for one another; last seen in step 5, waiting in psum"
    assert re.search(text, done.stderr), done
    assert float(re.findall("not gone on for (.*?) s", done.stderr)[0]) < 10


def test_a_rank_that_is_stopped_is_named_after_the_limit_and_ended():
    done = world(2, SCRIPT, "stopped", "10")
    assert re.search(rf"{LOST}its process has been stopped \(SIGSTOP\) for . s{SEEN}", done.stderr), done
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout.split()[-1]), signal.SIGCONT)


@pytest.mark.parametrize("what", ["computes", pytest.param("child", marks=pytest.mark.slow)])
def test_a_slow_rank_is_waited_for(what):
    """It is at one place for twice the limit of a lost rank: it computes, or a process of it does."""
    done = world(2, SCRIPT, what, "10")
    assert done.stdout == "done\n" * 2 and "lost" not in done.stderr, done
