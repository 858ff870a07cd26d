"""Train at stage 3 on two hosts with a slow link between them, and compare orders of axes with FSDP2.

python benchmarks/hosts.py [--rate 20e6] [--rounds 7] [--write]

Each host is a network namespace of this machine (Linux, root), with two ranks. A step's bytes between the hosts are
those that the device of the first host sent. All systems run in one world, in turns. `--write` keeps hosts.md.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, quartiles, table
from fzero import codecs, optim
from tests.faults.hosts import Hosts, Rule, missing

HOSTS, PER_HOST, LAYERS, WIDTH, BATCH = 2, 2, 8, 256, 32
Step = Callable[[torch.Tensor], Any]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CODES = fzero.Precision(torch.float32, gather=codecs.int8(), reduce=codecs.int4())


def by_fzero(axis: tuple[str, ...], k: int, precision: fzero.Precision | None = None) -> Step:
    """Make a jitted step at stage 3."""
    apply, params, buffers = fzero.nn.functional(Model())
    opt = optim.adamw(1e-3)

    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        loss_fn = lambda p, x: apply(p, buffers, x)[0].square().mean()  # noqa: E731
        loss, grads = fzero.value_and_grad(loss_fn, micro_batches=k, precision=precision)(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    mesh = fzero.mesh(host=HOSTS, dp=PER_HOST)
    step = fzero.shard(train_step, stage=3, mesh=mesh, axis=axis)
    state, run = [*step.init(params, opt)], fzero.jit(step)

    def train(x: torch.Tensor) -> float:
        *state[:], loss = run(*state, mesh.split(x))
        return float(loss)

    return train


def by_fsdp2(reshard: bool | int, k: int) -> Step:
    """Make a step of FSDP2, uncompiled. An integer for `reshard` keeps shards within a host for the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, ranks = Model(), HOSTS * PER_HOST
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)

    def train(x: torch.Tensor) -> float:
        total = 0.0
        for part in x.chunk(ranks)[dist.get_rank()].chunk(k):
            loss = model(part).square().mean() / k
            loss.backward()
            total += float(loss.detach())
        opt.step()
        opt.zero_grad()
        return total

    return train


SYSTEMS: dict[str, Callable[[int], Step]] = {
    "fzero": lambda k: by_fzero(("host", "dp"), k),
    'fzero, axis=("dp", "host")': lambda k: by_fzero(("dp", "host"), k),
    "fzero, int8 and int4": lambda k: by_fzero(("host", "dp"), k, CODES),
    'fzero, axis=("dp", "host"), int8 and int4': lambda k: by_fzero(("dp", "host"), k, CODES),
    "FSDP2": lambda k: by_fsdp2(True, k),
    f"FSDP2, reshard_after_forward={PER_HOST}": lambda k: by_fsdp2(PER_HOST, k),
}


def sent_bytes() -> int:
    """Return the bytes that this host's device has sent to other hosts."""
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("fz0:"))


def work(k: int, rounds: int, out: str) -> None:
    """Run the systems in turns, as one rank; rank 0 writes seconds and bytes of each."""
    fzero.mesh(host=HOSTS, dp=PER_HOST)
    batch = torch.randn(BATCH * k, WIDTH, generator=torch.Generator().manual_seed(1))
    steps = {name: make(k) for name, make in SYSTEMS.items()}
    rows: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name in [*steps][:: 1 if i % 2 else -1]:
            dist.barrier()
            begin, before = time.perf_counter(), sent_bytes()
            steps[name](batch)
            dist.barrier()
            if i >= 2:  # the first two compile and warm up
                rows[name].append((time.perf_counter() - begin, sent_bytes() - before))
    if dist.get_rank() == 0:
        pathlib.Path(out).write_text(json.dumps(rows))
    dist.barrier()


def measure(k: int, rate: float, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Start the ranks on the hosts, and return the seconds and the bytes of each step of each system."""
    with Hosts(HOSTS) as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.set(Rule(rate=rate))
        out, world = f"{folder}/rows.json", HOSTS * PER_HOST
        ranks = []
        for rank in range(world):
            host, local = divmod(rank, PER_HOST)
            variables = {
                **{"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": PER_HOST},
                **{"GROUP_RANK": host, "MASTER_ADDR": hosts.address(0), "MASTER_PORT": 29411, "OMP_NUM_THREADS": 1},
            }
            command = [sys.executable, __file__, "--work", out, "--micro-batches", str(k), "--rounds", str(rounds)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "fz0", **{n: str(v) for n, v in variables.items()}}
            ranks.append(subprocess.Popen(command, env=environment, preexec_fn=lambda host=host: hosts.enter(host)))
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return json.loads(pathlib.Path(out).read_text())


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20e6, help="bytes a second between the hosts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.micro_batches[0], args.rounds, args.work)
    if lacks := missing():
        sys.exit(f"this machine has no {lacks}, which hosts need")
    size = 4 * sum(p.numel() for p in Model().parameters())
    rows = []
    for k in args.micro_batches:
        result = measure(k, args.rate, args.rounds)
        peer = statistics.median([seconds for seconds, _ in result["FSDP2"]])
        for name, steps in result.items():
            seconds, sent = [s for s, _ in steps], statistics.median([b for _, b in steps])
            ratio = f"{statistics.median(seconds) / peer:.2f}"
            rows.append((k, f"`{name}`", f"{sent / size:.2f}", quartiles(seconds), ratio))
    head = ["micro-batches", "system", "bytes from host to host / bytes of the model", "seconds a step", "/ FSDP2"]
    about = (
        f"{LAYERS} blocks of width {WIDTH}, {size / 1e6:.1f} MB in float32, stage 3, on {HOSTS} hosts of {PER_HOST} "
        f"ranks, with {args.rate / 1e6:.0f} MB a second from host to host. All systems ran in one world, in turns. "
        "fzero is jitted in its default backend; int8 and int4 are the codecs of its parameters and gradients. FSDP2 "
        "is not compiled, which costs it little here: the link decides."
    )
    publish(__file__, "python benchmarks/hosts.py", [about, table(head, rows)], args.write)


if __name__ == "__main__":
    main()
