"""Compare the order of measured times with that of the cost model: the rows of the peers' benchmark, planned.

python benchmarks/order.py [--ranks 2] [--write]

The times are those in results/peers.json, of fzero's rows. The seconds are those of plans on meta tensors, by the
constants that a plan assumes of a CPU; nothing runs. Spearman's coefficient compares the two orders. `--write` keeps
order.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks.peers.gpt import CONFIGS, gpt_loss
from benchmarks.report import publish, table
from fzero import optim, tree
from tests.helpers import train_step_for

__all__ = ["spearman"]

GOAL = 0.9


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Spearman's coefficient of two lists of numbers: the correlation of their ranks, equal ones' the mean."""
    return correlation(_ranks(xs), _ranks(ys))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum([(y < x) + 0.5 * (y == x) for y in values]) for x in values]


def planned_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of a row's step by its plan."""
    config, opt = CONFIGS[row["model"]], optim.adamw(1e-3)
    mesh = fzero.mesh(dp=row["ranks"])
    step = fzero.shard(train_step_for(gpt_loss, opt, micro_batches=row["micro_batches"]), row["stage"], mesh)
    with torch.device("meta"):
        params = tree.map(lambda x: x.to("meta"), config.params())
        state = step.init(params, opt)
        shape = (row["ranks"] * row["micro_batches"] * config.batch, config.context + 1)
        tokens = mesh.split(torch.zeros(shape, dtype=torch.int64))
    return fzero.plan(fzero.jit(step, backend=row["variant"]), *state, tokens).seconds


def main() -> None:
    """Plan the rows, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write order.md")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="rows of so many ranks; default 2")
    args = parser.parse_args()
    rows = json.loads((Path(__file__).parent / "results" / "peers.json").read_text())
    rows = [r for r in rows if r["system"] == "fzero" and r["variant"] != "eager" and r["ranks"] == args.ranks]
    measured, told = [median(r["seconds"]) for r in rows], [planned_seconds(r) for r in rows]
    cells = [
        [r["model"], r["micro_batches"], r["stage"], r["variant"], f"{a * 1e3:,.0f}", f"{b * 1e3:,.0f}", f"{a / b:.2f}"]
        for r, a, b in zip(rows, measured, told, strict=True)
    ]
    correlation = spearman(measured, told)
    parts = [
        f"fzero's rows of [results/peers.md](results/peers.md) on {args.ranks} ranks, and their plans. Spearman's "
        f"coefficient of the two orders is {correlation:.3f}; the goal is {GOAL}: "
        f"{'met' if correlation >= GOAL else 'missed'}.",
        table(["model", "micro-batches", "stage", "variant", "measured ms", "by the model ms", "ratio"], cells),
    ]
    publish(__file__, "python benchmarks/order.py", parts, args.write)


if __name__ == "__main__":
    main()
