"""Print the planned and the measured peak of a jitted step on 2 real processes: models, stages, backends.

torchrun --nproc-per-node 2 benchmarks/jit_memory.py [MODEL ...] [--write]

Measured: the step's arguments, and the most that a counting allocator (benchmarks/allocator.py) holds above them while
the step runs, of the rank that holds more. gloo's threads sometimes keep a collective's copy a moment longer than its
wait; that is a race and no plan, so of 5 steps the least is compared with the plan, and the median is shown beside it.
`--write` keeps the tables in jit_memory.md. The first run compiles: some minutes.
"""

import itertools
import pathlib
import statistics
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.allocator import peak_bytes
from benchmarks.models import MODELS
from benchmarks.report import publish, table
from fzero import optim
from tests.helpers import train_step_for

STEPS, BACKENDS, MB = 5, ("fx", "inductor"), 1e6
B_ADDS = 62 * MB  # what stage 3 of model B may add to its arguments


class Row(NamedTuple):
    """One measured step, in bytes."""

    model: str
    micro_batches: int
    backend: str
    stage: int
    arguments: int
    plan: int
    least: int
    median: int
    buffer: int  # of the largest collective

    @property
    def good(self) -> bool:
        """Whether fx is within 2% of the plan, Inductor at most 3% and one bucket above it."""
        if self.backend == "fx":
            return abs(self.least / self.plan - 1) <= 0.02
        return self.least <= 1.03 * self.plan + self.buffer

    @property
    def cells(self) -> list[Any]:
        """The row of the table."""
        sizes = [self.plan, self.least, self.median]
        added = [self.plan - self.arguments, self.least - self.arguments, self.buffer]
        return [
            *(self.model, self.micro_batches, self.backend, self.stage),
            *(f"{x / MB:,.2f}" for x in sizes),
            f"{self.least / self.plan:.4f}",
            *(f"{x / MB:,.2f}" for x in added),
            "met" if self.good else "missed",
        ]


HEAD = ["model", "micro-batches", "backend", "stage", "plan", "least", "median", "least / plan", "plan adds"]
HEAD += ["least adds", "largest buffer", "goal"]


def measure(name: str, micro_batches: int, backend: str, stage: int, mesh: fzero.ranks.Mesh) -> Row:
    """Run a few steps and measure each."""
    torch.manual_seed(0)
    loss, params, batch = MODELS[name][0]()
    opt, batch = optim.adamw(1e-3), mesh.local(batch)
    train_step = train_step_for(loss, opt, micro_batches=micro_batches)
    step = fzero.jit(fzero.shard(train_step, stage=stage, mesh=mesh, check=False), backend=backend)
    state = [*step.init(params, opt)]
    del params
    plan = step.plan(*state, batch)

    def run() -> None:
        state[:] = step(*state, batch)[:2]

    run()  # compiles
    measured = []
    for _ in range(STEPS):
        dist.barrier()
        measured.append(plan.argument_bytes + peak_bytes(run))
    ranks: list[Any] = [None] * mesh.size
    dist.all_gather_object(ranks, (min(measured), int(statistics.median(measured))))
    buffer = max(c.bytes // (2 if c.kind == "all_reduce" else 1) for c in plan.collectives)
    least, median = (max(values) for values in zip(*ranks, strict=True))
    return Row(name, micro_batches, backend, stage, plan.argument_bytes, plan.peak_bytes, least, median, buffer)


def summary(rows: list[Row]) -> list[list[Any]]:
    """Judge the goals that no row shows alone."""
    results = []
    for (model, k, backend), group in itertools.groupby(rows, lambda r: r[:3]):
        stages = list(group)
        for what in ("plan", "least"):
            peaks = [getattr(r, what) for r in stages]
            good = all(b <= a for a, b in itertools.pairwise(peaks))
            shown = " ≥ ".join(f"{x / MB:,.2f}" for x in peaks)
            results.append(
                [
                    f"{model}, {k} micro-batches, {backend}: {what}, stages 0 to {len(fzero.zero.STAGES) - 1}",
                    shown,
                    good,
                ]
            )
        if (model, k, backend) == ("B", 1, "fx"):
            added = stages[-1].least - stages[-1].arguments
            results.append(["B, stage 3, fx: added, at most 62", f"{added / MB:,.2f}", added <= B_ADDS])
    return [[what, shown, "met" if good else "missed"] for what, shown, good in results]


def report(rows: list[Row], command: str, write: bool) -> None:
    """Print the tables."""
    parts = [
        "2 ranks, AdamW, float32; in MB (1e6 bytes), of the rank that holds more. The goal: on fx `least` within 2% of "
        "the plan, with Inductor at most 3% and the largest collective's buffer above it.",
        table(HEAD, [r.cells for r in rows]),
        "Peaks fall with the stage; stage 3 of B adds little. In conv one unit is four fifths of all parameters: on "
        "two ranks to gather it, beside its shard and gloo's copy, takes more than stage 3 saves.",
        table(["what", "MB", "goal"], summary(rows)),
    ]
    publish(__file__, command, parts, write)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    mesh = fzero.mesh(simulate=False, dp=2)
    names = [x for x in sys.argv[1:] if not x.startswith("-")]
    rows = []
    for name in names or MODELS:
        for k, backend, stage in itertools.product(MODELS[name][1], BACKENDS, range(len(fzero.zero.STAGES))):
            rows.append(measure(name, k, backend, stage, mesh))
            if mesh.rank == 0:
                print(rows[-1], file=sys.stderr, flush=True)
    if mesh.rank == 0:
        command = " ".join(["torchrun --nproc-per-node 2 benchmarks/jit_memory.py", *names])
        report(rows, command, "--write" in sys.argv)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
