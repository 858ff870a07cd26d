"""Print the eager peak of a step above its inputs, by stage and micro-batches, on real processes.

torchrun --nproc-per-node 2 benchmarks/eager_peak.py

By the allocator's events, in units: one unit is a block's parameters. gloo frees its buffers late, more so when cores
are short, so the least of several runs is taken; tests/transforms/test_memory.py has the figures of simulated ranks.
"""

import pathlib
import sys
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from fzero import optim
from tests.memory import peak_bytes

LAYERS, WIDTH = 32, 256


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Run an MLP."""
    for p in params["blocks"]:
        x = torch.tanh(x @ p["w"])
    return x.square().mean()


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh, opt = fzero.mesh(dp=-1), optim.sgd(0.1)
    params = {"blocks": [{"w": torch.randn(WIDTH, WIDTH) / 16} for _ in range(LAYERS)]}
    batch = mesh.split(torch.ones(mesh.size * 4, WIDTH))
    for k in (1, 4):
        for stage in range(len(fzero.zero.STAGES)):

            def train_step(params: Any, opt_state: Any, batch: Any, k: int = k) -> Any:
                loss, grads = fzero.value_and_grad(loss_fn, micro_batches=k)(params, batch)
                return *fzero.transforms.step(opt)(params, grads, opt_state), loss

            step = fzero.shard(train_step, stage=stage, mesh=mesh, check=False)
            state = step.init(params, opt)
            peak = min(peak_bytes(lambda step=step, state=state: step(*state, batch)) for _ in range(7))
            if mesh.rank == 0:
                units = peak / (WIDTH * WIDTH * 4)
                print(f"{mesh}, {LAYERS} units, {k} micro-batches, stage {stage}: {units:.1f} units", flush=True)
    if not mesh.simulated:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
