"""A run that loses a process and goes on from memory, with the numbers of a run that lost none.

    python elastic.py                                                      # 4 simulated ranks; then 3 are left
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 elastic.py   # rank 1 is killed, and started again
    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 99 --rdzv-backend c10d --rdzv-endpoint HOST:29500 elastic.py

The last command runs on each host. When a host is lost, the others go on with fewer ranks and the same global batch.
Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all hosts, so that a host may join later (docs/survive.md says why).
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import data, elastic, optim, random

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=24, help="examples of a step, over all ranks")
parser.add_argument("--micro", type=int, default=2, help="examples of a micro-batch of a rank")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--every", type=int, default=5, help="steps between two copies of the state in memory")
parser.add_argument("--lose", default="1:33", help="RANK:STEP, where a process is lost once; '' for none")
parser.add_argument("--out", type=Path, default=Path("runs/elastic"), help="the folder of the run")
args = parser.parse_args()
opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(1e-2, 5, args.steps)))


class Killed(Exception):
    """The end of a simulated rank."""


def examples() -> torch.Tensor:
    return torch.randn(480, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def init_params() -> Any:
    g = torch.Generator().manual_seed(0)
    sizes = {"up": (8, 64), "down": (64, 1)}
    return {k: torch.randn(n, generator=g, dtype=torch.float64) / n[0] ** 0.5 for k, n in sizes.items()}


def loss_fn(params: Any, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    y = torch.tanh((x + 0.01 * noise) @ params["up"]) @ params["down"]
    return (y.squeeze(-1) - torch.sin(x).sum(-1)).square().mean()


def lose_once(mesh: fzero.ranks.Mesh, step: int) -> None:
    """Lose a process here, at the first visit."""
    rank, at = map(int, args.lose.split(":")) if args.lose else (-1, -1)
    flag = args.out / "lost"
    if step != at or flag.exists() or not (mesh.simulated or mesh.rank == rank):
        return
    flag.parent.mkdir(parents=True, exist_ok=True)
    flag.touch()
    print(f"rank {rank} dies in step {step}", flush=True)
    if mesh.simulated:
        raise Killed
    os.kill(os.getpid(), signal.SIGKILL)


def train(run: elastic.ElasticRun) -> Any:
    """Train on the ranks of this start, from the step that was kept last."""
    mesh, plan = run.mesh, run.batch_plan

    def train_step(params: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        key, use = random.split(key)
        noise = random.normal(use, (8,), dtype=torch.float64)
        gradients = fzero.value_and_grad(loss_fn, micro_batches=plan.accumulation, batch_argnums=1)
        loss, grads = gradients(params, batch, noise)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, key, loss

    step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
    jitted = fzero.jit(step, backend="fx")
    state = run.restore((*step.init(init_params, opt), random.key(7)))
    if mesh.rank == 0:
        print(f"{mesh.size} ranks with {plan.accumulation} micro-batches each, from step {run.step}", flush=True)
    batches = data.batches(examples(), mesh, global_batch=args.batch)
    for i, batch in batches.steps(run.step, run.steps):
        *state, loss = jitted(*state, batch)
        lose_once(mesh, i)
        run.save(i + 1, tuple(state))
        if mesh.rank == 0 and (i + 1) % 20 == 0:
            print(f"step {i + 1}: loss {loss.item():.10f}", flush=True)
    return step.gather(state[0])


def start(ranks: int) -> Any:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    sizes: dict[str, Any] = {"global_batch": args.batch, "micro_batch": args.micro, "dp": -1, "simulated_ranks": ranks}
    return elastic.run(train, args.out, steps=args.steps, copy_every=args.every, save_every=20, memory=memory, **sizes)


try:
    params = start(ranks=4)
except Killed:  # in place of torchrun
    params = start(ranks=3)
if params is not None and os.environ.get("RANK", "0") == "0":
    print(f"sum of the parameters: {sum(x.sum().item() for x in params.values()):.10f}")
