"""A lost host on a link of this machine: both sides name the other in time. `make faults` draws the other faults."""

import json
import sys
from typing import Any

import pytest

from tests.distributed.launch import python
from tests.faults import __main__ as command
from tests.faults import disks
from tests.faults.hosts import missing

LACKS = missing()
# in a process of its own: a build of torch for GPUs computes no gradient in a fork of one that has computed some
SCRIPT = """
import json, sys
from tests.faults.on_hosts import Case, run_case

run = run_case(Case(**json.loads(sys.argv[1])), float(sys.argv[2]))
print(json.dumps([run.wrong, run.seconds]))
"""
SLOW = ("rank polls", "host disk full", "host disk read-only", "host disk slow", "host clock stepped")


def seconds_of(patience: float, **case: Any) -> float | None:
    """Run a case that must go right; return after how many seconds the last rank named a lost one."""
    done = python("-c", SCRIPT, json.dumps(case), str(patience))
    assert done.returncode == 0, done.stderr[-4000:]
    wrong, seconds = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(wrong)
    return seconds


@pytest.mark.skipif(bool(LACKS), reason=f"hosts need {LACKS}, which this machine lacks")
@pytest.mark.parametrize(
    "kind,ranks",
    [
        ("link cut, backward", 1),
        ("a link of three cut", 1),
        *[pytest.param(x, 2, marks=pytest.mark.slow) for x in ("one direction cut", "1 MB/s", "link cut, first mesh")],
    ],
)
def test_both_sides_of_a_cut_link_name_a_rank_of_the_other_host(kind, ranks):
    """In three seconds, a sixth of the timeout; 12 s allow for a busy machine. A link that is slow is not lost."""
    patience = 12.0 if "mesh" not in kind else 30.0
    seconds = seconds_of(patience, kind=kind, ranks=ranks, timeout=18.0)
    assert seconds is None or 1.5 < seconds < patience


@pytest.mark.skipif(bool(LACKS), reason=f"hosts need {LACKS}, which this machine lacks")
@pytest.mark.parametrize("kind", ["rank out of memory", *[pytest.param(x, marks=pytest.mark.slow) for x in SLOW]])
def test_a_rank_that_fails_or_a_disk_that_breaks_is_named(kind):
    seconds_of(20.0, kind=kind, ranks=1)


def test_the_faults_command_lists_faults_that_need_more_rights(monkeypatch, capsys):
    monkeypatch.setattr(command, "missing", lambda: "the rights of root")
    monkeypatch.setattr(disks, "no_disk", lambda: "the rights to mount a file system")
    monkeypatch.setattr(sys, "argv", ["faults", "--cycles", "0", "--only", "link cut"])
    assert command.main() == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this machine lacks the rights of root: link cut, first step, link cut, forward" in said
    assert "lacks the rights to mount a file system: the disk is full, the disk is read-only" in said
