"""torchrun starts workers again when one has died: they meet one another, not the dead."""

import re
import subprocess
import sys

import pytest

from fzero import optim
from tests.distributed.launch import ROOT, environment, free_port
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


def torchrun(*options: str) -> tuple[str, str, int]:
    """Run restarted.py on two processes. They take some seconds; four minutes are a hang."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2", "--max-restarts=3"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "-m", "tests.ranks.restarted"], cwd=ROOT, env=environment(), **pipes)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.terminate()  # and torchrun its workers
    return out, err, process.returncode


def unsharded_loss() -> float:
    opt = optim.adam(1e-2)
    step, params = train_step_for(mlp_loss, opt), mlp_params()
    state, loss = (params, opt.init(params)), None
    for i in range(2):
        *state, loss = step(*state, mlp_batch(4, seed=i))
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["--standalone", "--master-port"], ids=lambda x: x.strip("-"))
def test_ranks_that_die_are_started_again_and_train(rendezvous):
    out, err, code = torchrun(rendezvous if rendezvous == "--standalone" else f"{rendezvous}={free_port()}")
    assert code == 0, out + err[-3000:]
    matches = re.findall(r"rank (\d) in generation (\d): (\S+)", out)
    assert sorted([(r, g) for r, g, _ in matches]) == [("0", "2"), ("1", "2")], out
    assert [float(loss) for _, _, loss in matches] == [pytest.approx(unsharded_loss(), abs=1e-11)] * 2
    assert all(f"rank {r} once more: 1\n" in out for r in range(2))
