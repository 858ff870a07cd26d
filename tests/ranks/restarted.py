"""What torchrun restarts: a rank that dies before the mesh is made, then one that dies in training; then all train."""

import os
import signal

import torch

import fzero
from fzero import optim
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    print(line + "\n", end="", flush=True)  # in one piece: the ranks write into one pipe


def main() -> None:
    torch.set_num_threads(1)
    generation, last = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"] == "1"
    if generation == 0 and last:
        die()  # while rank 0 waits for it
    mesh = fzero.mesh(dp=-1, timeout=60)
    opt = optim.adam(1e-2)
    step = fzero.shard(train_step_for(mlp_loss, opt), stage=3, mesh=mesh)
    state = step.init(mlp_params(), opt)
    # ranks compare their graphs through the store, where generation 1 leaves those of another batch
    jitted, size = fzero.jit(step, backend="fx"), 4 if generation == 2 else 6
    *state, _ = jitted(*state, mesh.split(mlp_batch(size)))
    if generation == 1 and last:
        die()  # while rank 0 goes on
    *state, loss = jitted(*state, mesh.split(mlp_batch(size, seed=1)))
    say(f"rank {mesh.rank} in generation {generation}: {loss.item():.12f}")
    torch.distributed.destroy_process_group()
    again = fzero.mesh(dp=1, tp=2, timeout=60)  # the same processes meet once more
    total = again.spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index("tp"), ("dp", "tp")))()
    say(f"rank {again.rank} once more: {total.item()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
