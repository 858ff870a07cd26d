"""Train the example GPT in float32, bfloat16 and float16 from one start, and compare the loss curves.

python benchmarks/precision.py [--write]

200 steps of examples/train_gpt.py's model, data and optimizer on 4 simulated ranks, stage 2, 2 micro-batches; half
precision with float32 masters, norms and sums of gradients, and a dynamic loss scale. `--write` keeps the table in
precision.md and the curves in docs/precision.png; a few minutes.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.report import publish, table

ROOT = pathlib.Path(__file__).parents[1]
STEPS, GOAL, LAST = 200, 0.01, 20


def curve(precision: str) -> list[float]:
    """Train, and return the loss of each step."""
    with tempfile.TemporaryDirectory() as out:
        words = f"--steps {STEPS} --accumulate 2 --stage 2 --precision {precision} --backend inductor --out {out}"
        subprocess.run([sys.executable, str(ROOT / "examples" / "train_gpt.py"), *words.split()], check=True)
        return [json.loads(line)["loss"] for line in (pathlib.Path(out) / "log.jsonl").read_text().splitlines()]


def apart(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves, each step's as the mean of the last 20."""
    sums = [torch.tensor(x).unfold(0, LAST, 1).mean(1) for x in (losses, reference)]
    return ((sums[0] - sums[1]).abs() / sums[1]).max().item()


def main() -> None:
    """Train, print and plot."""
    curves = {name: curve(name) for name in ("float32", "bfloat16", "float16")}
    rows = []
    for name, losses in curves.items():
        end, largest = sum(losses[-LAST:]) / LAST, apart(losses, curves["float32"])
        rows.append([name, f"{end:.4f}", f"{largest:.2%}", "met" if largest <= GOAL else "missed"])
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for i, (name, losses) in enumerate(curves.items()):
        axes.plot(losses, label=name, linewidth=5 - 2 * i, alpha=0.7)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="one start, three precisions")
    axes.legend()
    if "--write" in sys.argv:
        figure.savefig(ROOT / "docs" / "precision.png", dpi=100, bbox_inches="tight")
    parts = [
        f"The loss at the end is the mean of the last {LAST} of {STEPS} steps; the largest difference is that of such "
        "means anywhere on the curve, relative to float32's. The goal: at most 1%.",
        table(["precision", "loss at the end", "largest difference", "goal"], rows),
    ]
    publish(__file__, "python benchmarks/precision.py", parts, "--write" in sys.argv)


if __name__ == "__main__":
    main()
