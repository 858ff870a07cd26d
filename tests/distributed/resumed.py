"""A script that trains a pipeline with checkpoints, and goes on where another one was killed; see test_gloo.py.

torchrun tests/distributed/resumed.py FOLDER STEPS PP SCHEDULE STAGE KILLED
"""

import os
import signal
import sys
from typing import Any

import torch

import fzero
from tests.parallel.pipeline.model import OPT, block, make_batch, make_loss, make_params, make_step

BATCH, DEPTH = 16, 5


def main(folder: str, steps: int, pp: int, schedule: str, stage: int, killed: int) -> None:
    """Train up to `steps`; in that of number `killed` the last rank is killed in the midst of its stage."""
    mesh, now = fzero.mesh(dp=-1, pp=pp), 0

    def dying(p: Any, x: torch.Tensor, batch: Any) -> torch.Tensor:
        # the third micro-batch of four, while others wait for what it sends
        third = torch.equal(batch["tokens"], make_batch(BATCH, now)["tokens"].chunk(4)[2])
        if now == killed and mesh.rank == mesh.size - 1 and third:
            os.kill(os.getpid(), signal.SIGKILL)
        return block(p, x)

    stages = 2 if schedule == "interleaved" else 1
    loss = make_loss(4, schedule=schedule, stages_per_rank=stages, depth=DEPTH, block=dying if killed >= 0 else block)
    sharded = fzero.shard(make_step(loss), stage, mesh, split=loss.split)
    step: Any = sharded if killed >= 0 else fzero.jit(sharded, backend="fx")
    with fzero.checkpoint.checkpoints(folder, mesh, keep=9) as runs:
        meta = fzero.tree.map(lambda x: x.to("meta"), make_params(DEPTH))
        params, opt_state = sharded.init(loss.stack(make_params(DEPTH) if runs.newest() is None else meta, mesh), OPT)
        state = runs.restore({"params": params, "opt_state": opt_state, "step": 0})
        print(f"rank {mesh.rank}: begins at {state['step']}", flush=True)
        for now in range(state["step"], steps):
            batch = mesh.split(make_batch(BATCH, now), "dp")
            params, opt_state, _ = step(state["params"], state["opt_state"], batch)
            state = {"params": params, "opt_state": opt_state, "step": now + 1}
            runs.save(now + 1, state, background=killed < 0)  # of the one that dies it is known what was saved
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, folder, steps, pp, schedule, stage, killed = sys.argv
    main(folder, int(steps), int(pp), schedule, int(stage), int(killed))
