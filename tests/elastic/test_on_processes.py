"""Elastic runs under torchrun: a killed rank and a lost host are gone on without, from memory, and a host joins."""

import os
import shutil
import signal
from typing import Any

import pytest
import torch

import fzero
from tests.distributed.launch import free_port
from tests.elastic.agents import PATIENCE, agent, events, lose, starts, wait_for
from tests.elastic.helpers import GLOBAL_BATCH, final, train

pytestmark = pytest.mark.slow


def test_a_killed_rank_is_started_again_and_goes_on_from_memory(tmp_path):
    with agent(tmp_path, "--standalone", "--nproc-per-node=2", dies="1:forward:5") as process:
        assert process.wait(PATIENCE) == 0, (tmp_path / "out.host").read_text()[-3000:]
    assert starts(tmp_path) == [[0, 1, 2, 3, 4], [4, 5, 6, 7]], "step 4 was in memory, of which nothing is on disk"
    result = torch.load(tmp_path / "end.pt")
    (tmp_path / "other").mkdir()
    options: dict[str, Any] = {"memory": str(tmp_path / "other"), "global_batch": GLOBAL_BATCH, "micro_batch": 1}
    simulated: Any = fzero.elastic.run(train, tmp_path / "more", steps=8, dp=2, simulate="lockstep", **options)
    for name, x in final().items():
        torch.testing.assert_close(result[name], x, rtol=1e-12, atol=1e-12)
        assert torch.equal(result[name], simulated[name]), "two ranks have one order of sums"
    assert not list((tmp_path / "memory").rglob("*.safetensors")), "the run is on disk to its end"


def test_ranks_that_cannot_share_the_batch_wait_and_give_the_memory_of_their_hosts(tmp_path):
    """Three hosts train; all are ended, and one is lost. Of three hosts two can share the batch in larger parts."""
    options = ("--standalone", "--nproc-per-node=3")
    with agent(tmp_path, *options, host="host%", slow=0.3, steps=30) as process:
        wait_for(tmp_path, lambda log: any(e.get("step", 0) >= 5 for e in log))
        lose(process)
    shutil.rmtree(tmp_path / "memory" / "fzero" / "host1")
    with agent(tmp_path, *options, host="host%", micro=6, steps=30) as process:
        assert process.wait(PATIENCE) == 0, (tmp_path / "out.host%").read_text()[-3000:]
    assert [e["rank"] for e in events(tmp_path) if "spare" in e] == [2]
    first, second = starts(tmp_path)
    assert second == [*range(second[0], 30)] and first[-1] - 2 <= second[0] <= first[-1] + 1, "from memory, not anew"
    assert "rank 2 is a spare: 2 of 3 ranks share the global batch equally" in (tmp_path / "out.host%").read_text()
    for name, x in final(30).items():
        torch.testing.assert_close(torch.load(tmp_path / "end.pt")[name], x, rtol=1e-12, atol=1e-12)


def test_ranks_leave_after_the_next_saved_step_on_sigterm(tmp_path):
    """torchrun sends it when a host joins, and a cluster before it takes a host away."""
    with agent(tmp_path, "--standalone", "--nproc-per-node=2", slow=0.3, steps=12) as process:
        wait_for(tmp_path, lambda log: any(e.get("step", 0) >= 4 for e in log))
        for pid in [e["pid"] for e in events(tmp_path) if "pid" in e]:
            os.kill(pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, (tmp_path / "out.host").read_text()[-3000:]
    first, second = starts(tmp_path)
    assert first + second == [*range(12)] and second[0] % 2 == 0, "no step is done again"


def test_training_goes_on_without_a_lost_host_which_joins_again(tmp_path):
    rendezvous = ("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=elastic")
    times = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = (*rendezvous, f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    is_host, joins = [("--rdzv-conf", f"{times},is_host={flag}") for flag in ("true", "false")]  # of torchrun's store
    script = {"steps": 80, "slow": 0.3}
    with agent(tmp_path, *options, *is_host, host="a", **script) as first:
        with agent(tmp_path, *options, *joins, host="b", **script) as second:
            wait_for(tmp_path, lambda log: any(e.get("step", 0) >= 5 for e in log))
            lose(second)
            shutil.rmtree(tmp_path / "memory" / "fzero" / "b")
            wait_for(tmp_path, lambda log: any(e.get("size") == 1 for e in log))
            lost = events(tmp_path)
        wait_for(tmp_path, lambda log: any("step" in e for e in log[len(lost) :]))
        with agent(tmp_path, *options, *joins, host="b", **script) as third:
            wait_for(tmp_path, lambda log: any(e.get("size") == 2 for e in log[len(lost) :]))
            (tmp_path / "hurry").touch()
            assert first.wait(PATIENCE) == third.wait(PATIENCE) == 0, (tmp_path / "out.a").read_text()[-3000:]
    both, alone, again = starts(tmp_path)
    assert both[0] == 0 and len(both) - 2 <= alone[0] <= len(both), "at most two steps are done again"
    assert again == [*range(alone[-1] + 1, 80)], "a host joins after a step that is kept"
    result = torch.load(tmp_path / "end.pt")
    for name, x in final(80).items():
        torch.testing.assert_close(result[name], x, rtol=1e-12, atol=1e-12)
