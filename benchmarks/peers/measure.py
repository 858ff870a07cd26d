"""Measure systems on these ranks: each row's memory and wire alone, then its time in rounds that interleave a stage's.

torchrun --nproc-per-node 2 -m benchmarks.peers.measure OUT.json [options]

The rows of stage 0 live in one process group at once, then those of stages 1 and 2, then those of stage 3. A round lets
each run a few steps, one after the other, and each round begins with another. So a slow moment of the machine falls on
all. There are two peaks, by a counting allocator (benchmarks/allocator.py), of the rank that holds most, above what it
held before the model was built: that of a steady step, the least of 5; and that of the whole life, from before the
model was built until the third step ended.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache

import fzero
from benchmarks.allocator import held_bytes, most_bytes, restart
from benchmarks.peers.gpt import CONFIGS, Config
from benchmarks.peers.options import choose, measured_options
from benchmarks.peers.row import Row
from benchmarks.peers.systems import Setup, System, Train
from benchmarks.peers.wire import Wire
from fzero import tree

__all__ = ["measure"]

WARM, MEASURED, BATCHES = 2, 5, 4


class Runner:
    """A system that was built, and its batches."""

    def __init__(self, train: Train, batches: list[torch.Tensor]) -> None:
        self.train = train
        self.batches = batches
        self.steps = 0

    def __call__(self) -> torch.Tensor:
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        return self.train(batch)


def state_bytes(system: System, config: Config, ranks: int) -> int:
    """Return what a rank holds between steps, by ZeRO's formula for float32 and Adam."""
    psi = sum([x.numel() for x in tree.tensors(config.params())])
    if system.name == "FSDP2" or system.stage == 3:
        return 12 * psi // ranks
    return 12 * psi if system.stage == 0 else 4 * psi + 8 * psi // ranks


def settle() -> None:
    """Wait until nobody frees any more: gloo's threads do it late."""
    gc.collect()
    dist.barrier()
    time.sleep(0.1)
    dist.barrier()


def over_ranks(value: float) -> float:
    """Return the largest of the ranks' values."""
    x = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def alone(system: System, row: Row, setup: Setup, measured: int = MEASURED) -> Runner:
    """Build a system, and measure what does not need the others; the peak is the least of so many steps'."""
    batches = setup.config.batches(setup.micro_batches, setup.mesh.rank, BATCHES)
    settle()
    before, start = held_bytes(), time.perf_counter()
    restart()
    with fresh_cache(), shared_cache():
        runner = Runner(system.build(setup), batches)
        row.losses.append(mean(runner()))
    row.build = over_ranks(time.perf_counter() - start)
    row.losses += [mean(runner()) for _ in range(WARM)]
    row.life = int(over_ranks(most_bytes() - before))
    peaks = []
    for _ in range(measured):
        settle()
        restart()
        loss = runner()
        peaks.append(most_bytes() - before)
        row.losses.append(mean(loss))
    row.peak = int(over_ranks(min(peaks)))
    with Wire() as wire:
        runner()
    row.sent, row.collectives = wire.bytes, round(wire.collectives)
    return runner


@contextmanager
def shared_cache() -> Iterator[None]:
    """Give all ranks one empty folder for what Inductor compiles, as the ranks of a machine have."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    before = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder[0])
    try:
        yield
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def mean(loss: torch.Tensor) -> float:
    """Return the mean of a loss over the ranks."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def together(runners: dict[str, Runner], rows: dict[str, Row], rounds: int, steps: int) -> None:
    """Time all in interleaved rounds; each round begins with another."""
    keys = list(runners)
    for i in range(rounds + 1):
        start = i * max(1, len(keys) // (rounds + 1)) % len(keys)
        for key in keys[start:] + keys[:start]:
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                runners[key]()
            used = torch.tensor(time.process_time() - used, dtype=torch.float64)
            dist.barrier()
            if i:  # the first round warms up
                rows[key].seconds.append(over_ranks(time.perf_counter() - begun) / steps)
                dist.all_reduce(used)
                rows[key].processor.append(used.item() / steps)


def measure(model: str, micro_batches: int, systems: list[System], mesh: fzero.ranks.Mesh, rounds: int) -> list[Row]:
    """Measure these systems on one model."""
    rows: list[Row] = []
    for stages in ((0,), (1, 2), (3,)):  # each by itself: what else lives in a process slows it
        mine = [s for s in systems if s.stage in stages]
        rows += measure_together(model, micro_batches, mine, mesh, rounds) if mine else []
        gc.collect()
    return rows


def measure_together(
    model: str, micro_batches: int, systems: list[System], mesh: fzero.ranks.Mesh, rounds: int
) -> list[Row]:
    """Measure the memory of each of these systems by itself, and their time in turns."""
    config, rows, runners = CONFIGS[model], {}, {}
    for system in systems:
        row = Row(
            *(system.name, system.stage, system.variant, model, micro_batches, mesh.size),
            state=state_bytes(system, config, mesh.size),
        )
        rows[system.key] = row
        runners[system.key] = alone(system, row, Setup(config, micro_batches, mesh))
        if mesh.rank == 0:
            shown = f"peak {row.peak / 1e6:.2f} MB, whole life {row.life / 1e6:.2f} MB, "
            shown += f"first step {row.build:.1f} s, {row.collectives} collectives"
            print(f"{model} x{micro_batches}, {mesh.size} ranks, {system.key}: {shown}", file=sys.stderr, flush=True)
    together(runners, rows, rounds, steps=2)
    return list(rows.values())


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    measured_options(parser)
    args = parser.parse_args()
    systems = choose(args.systems, args.eager_peers)
    torch.set_num_threads(1)
    mesh = fzero.mesh(simulate=False, dp=-1)
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for k in args.micro_batches:
            rows += [asdict(row) for row in measure(model, k, systems, mesh, args.rounds)]
            gc.collect()
            if mesh.rank == 0:
                args.out.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
