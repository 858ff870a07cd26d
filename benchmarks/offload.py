"""Time a jitted step by the ratio of offload beside the step without it, on 2 real processes.

torchrun --nproc-per-node 2 benchmarks/offload.py [--write] [--rounds 15] [--width 512] [--layers 4]

Both memories are one here, so nothing is saved; what is seen is that offload costs no more than its copies. All ways
run in one process a rank, in rounds that begin with another each time. A round also copies as many bytes as each way's
plan moves, piece by piece. The goal: the median of what a step takes above the one without offload and above these
copies is at most 2% of the step. `--write` keeps offload.md; five minutes on an idle machine.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from fzero import optim
from tests.helpers import train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params

WARM, GOAL, MB = 2, 0.02, 1e6
HALF = fzero.Precision(param=torch.bfloat16, grad=torch.bfloat16)
OPTIONS: dict[str, dict[str, Any]] = {
    "without": {"ratio": 0},
    "ratio 0.1": {"ratio": 0.1},
    "ratio 0.4": {"ratio": 0.4},
    "ratio 1": {"ratio": 1.0},
    "ratio 1, on the device": {"ratio": 1.0, "update_on": "device"},
    "ratio 1, a step late": {"ratio": 1.0, "delay": 1},
    "ratio 1, parameters too": {"ratio": 1.0, "params": True},
}


class Way(NamedTuple):
    """A way to train: what runs a step, what copies as many bytes as its plan moves, and the plan."""

    run: Callable[[], Any]
    copy: Callable[[], None]
    plan: fzero.graph.Plan


def way(options: dict[str, Any], stage: Any, mesh: fzero.ranks.Mesh, width: int, layers: int) -> Way:
    """Make a way; all train the same model on the same batch."""
    torch.manual_seed(0)
    pair = optim.offload(optim.master_weights(optim.adamw(1e-3), HALF), **options)
    opt = optim.chain(optim.clip_by_global_norm(1.0), pair)
    train_step = train_step_for(gpt_loss, opt, precision=HALF)
    step = fzero.jit(fzero.shard(train_step, stage=stage, mesh=mesh, check=False))
    state = [*step.init(gpt_params(width, layers, vocab=256, context=64), opt)]
    batch = mesh.local(torch.randint(256, (4, 65)))
    plan = step.plan(*state, batch)
    pieces = [
        (torch.zeros(t.bytes, dtype=torch.uint8), torch.zeros(t.bytes, dtype=torch.uint8)) for t in plan.transfers
    ]

    def run() -> Any:
        *state[:], loss = step(*state, batch)
        return loss

    def copy() -> None:
        for x, y in pieces:
            y.copy_(x)

    return Way(run, copy, plan)


def time_call(f: Callable[[], Any]) -> float:
    """Return the seconds that a call takes after all ranks have come to it."""
    dist.barrier()
    begun = time.perf_counter()
    f()
    return time.perf_counter() - begun


def measure(ways: dict[str, Way], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each way's steps, and of its copies, in each round."""
    names = list(ways)
    steps, copies = ({name: list[float]() for name in names} for _ in range(2))
    for i in range(WARM + rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            steps[name].append(time_call(ways[name].run))
            copies[name].append(time_call(ways[name].copy))
    return {k: x[WARM:] for k, x in steps.items()}, {k: x[WARM:] for k, x in copies.items()}


def show(xs: Sequence[float], unit: str) -> str:
    """Show a median and its quartiles."""
    low, middle, high = statistics.quantiles(xs, n=4)
    return f"{middle:{unit}} ({low:{unit}} to {high:{unit}})"


def rows_of(stage: int, ways: dict[str, Way], rounds: int) -> list[list[str]]:
    """Measure the ways of a stage."""
    steps, copies = measure(ways, rounds)
    rows = []
    for name, seconds in steps.items():
        base, moved = steps["without"], sum(t.bytes * t.times for t in ways[name].plan.transfers)
        above = [s - b - c for s, b, c in zip(seconds, base, copies[name], strict=True)]
        is_good = statistics.median(above) <= GOAL * statistics.median(base)
        peaks = [f"{ways[name].plan.peak_of(space) / MB:,.1f}" for space in ("device", "host")]
        rows.append(
            [
                *(str(stage), name, show([1e3 * s for s in seconds], ",.0f")),
                show([s / b for s, b in zip(seconds, base, strict=True)], ".3f"),
                show([1e3 * c for c in copies[name]], ",.1f"),
                *(f"{moved / MB:,.1f}", *peaks, "" if name == "without" else "met" if is_good else "missed"),
            ]
        )
    return rows


HEAD = ["stage", "offload", "step, ms", "ratio to without", "copies alone, ms", "moved, MB", "device peak, MB"]
HEAD += ["host peak, MB", "goal"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    for name, default in (("rounds", 15), ("width", 512), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    mesh, rows = fzero.mesh(simulate=False, dp=2), []
    for stage in (2, 3):
        names = [name for name in OPTIONS if stage == 3 or "params" not in OPTIONS[name]]
        ways = {name: way(OPTIONS[name], stage, mesh, asked.width, asked.layers) for name in names}
        rows += rows_of(stage, ways, asked.rounds)
    if mesh.rank == 0:
        parts = [
            "2 ranks of one thread; a GPT in bfloat16, AdamW with float32 masters behind a clip by the global norm. "
            "Medians with quartiles; ratios and the goal are of values of one round. Peaks are a rank's plan.",
            table(HEAD, rows),
        ]
        publish(__file__, "torchrun --nproc-per-node 2 benchmarks/offload.py", parts, asked.write)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
