"""Train the example GPT with parameters and gradients sent by codecs, and compare losses with bytes moved.

python benchmarks/wire.py [--write]

500 steps of examples/train_gpt.py's model, data and optimizer on 4 simulated ranks, stage 3, float32, with the default
backend. `--write` keeps the table in wire.md and the curves in docs/wire.png; about a quarter of an hour.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.report import publish, table

ROOT = pathlib.Path(__file__).parents[1]
STEPS, GOAL, LAST = 500, 0.01, 20
CODECS = ["", "int8", "int8 int8", "int8 int4", "float8 float8"]
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def run(codecs: str, out: str, *words: str) -> str:
    """Run the example, and return what it printed."""
    given = ["--codecs", *codecs.split()] if codecs else []
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--stage", "3", "--out", out, *given, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=out).stdout


def curve(codecs: str) -> list[float]:
    """Train, and return the loss of each step."""
    with tempfile.TemporaryDirectory() as out:
        run(codecs, out, "--steps", str(STEPS), "--every", "0", "--backend", "inductor")
        rows = [json.loads(line) for line in (pathlib.Path(out) / "log.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]


def plan(codecs: str) -> tuple[float, float]:
    """Return the bytes that a step's collectives move, and the peak of a rank, in bytes."""
    with tempfile.TemporaryDirectory() as out:
        text = run(codecs, out, "--plan")
    moved, peak = re.search(r"collectives move ([\d.]+) (\w+)", text), re.search(r"peak ([\d.]+) (\w+)", text)
    assert moved and peak
    return float(moved[1]) * UNITS[moved[2]], float(peak[1]) * UNITS[peak[2]]


def apart(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves, each step's as the mean of the last 20."""
    sums = [torch.tensor(x).unfold(0, LAST, 1).mean(1) for x in (losses, reference)]
    return ((sums[0] - sums[1]).abs() / sums[1]).max().item()


def main() -> None:
    """Train, print and plot."""
    curves, plans = {x: curve(x) for x in CODECS}, {x: plan(x) for x in CODECS}
    exact = sum(curves[""][-LAST:]) / LAST
    rows = []
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for codecs, losses in curves.items():
        end, (moved, peak) = sum(losses[-LAST:]) / LAST, plans[codecs]
        off = (end - exact) / exact
        gather, reduce = [*codecs.split(), "float32", "float32"][:2] if codecs else ("float32", "float32")
        shares = [f"{moved / plans[''][0]:.2f}", f"{peak / plans[''][1]:.2f}"]
        largest = f"{apart(losses, curves['']):.2%}"
        rows.append([gather, reduce, *shares, f"{end:.4f}", f"{off:+.2%}", largest, "met" if off <= GOAL else "missed"])
        smooth = torch.tensor(losses).unfold(0, LAST, 1).mean(1)
        axes.plot(torch.arange(LAST, STEPS + 1) * moved / 1e9, smooth, label=f"{gather}, {reduce}")
    axes.set(xlabel="gigabytes that collectives moved", ylabel="loss, nats per byte", title="what a step's bytes buy")
    axes.legend(title="parameters, gradients")
    if "--write" in sys.argv:
        figure.savefig(ROOT / "docs" / "wire.png", dpi=100, bbox_inches="tight")
    parts = [
        f"Bytes moved and the peak are a plan's, beside float32's. The loss at the end is the mean of the last {LAST} "
        f"of {STEPS} steps; the largest difference is that of such means anywhere on the curve. The goal: a loss at "
        "the end at most 1% above float32's.",
        table(
            ["parameters", "gradients", "bytes", "peak", "loss at the end", "beside float32", "largest", "goal"], rows
        ),
    ]
    publish(__file__, "python benchmarks/wire.py", parts, "--write" in sys.argv)


if __name__ == "__main__":
    main()
