"""A short form of `make faults`: training on real processes that are killed, starved and damaged goes on."""

import json

import pytest

from tests.distributed.launch import python


@pytest.mark.slow
def test_injected_faults_lose_no_committed_checkpoint():
    done = python("-m", "tests.faults", "--cycles", "13", "--json")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["cycles"] == 13 and min(result["faults"].values()) > 0
    assert (result["hangs"], result["wrong"], result["bitwise"]) == (0, [], True)
    assert result["resumed"] >= 3 and result["reached"] > 15
