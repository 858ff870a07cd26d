"""Compare expert parallelism with DeepSpeed's MoE layer and with FSDP2: time, memory, bytes, and whose numbers move.

python benchmarks/moe.py [--write] [--rounds 9] [--configs toy] [--systems fzero-0 DeepSpeed]

One GPT of mixtures, the same weights and data. Two gloo processes are timed: a round lets each system take one step,
one after the other. Memory is by the allocator's own events. Gradients and their norm are compared with the model
without ranks, on 1, 2 and 4 processes, first. DeepSpeed comes with `pip install -e '.[bench]'`; it is left out where
it is not installed. `--write` keeps moe.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import moe_numbers, moe_systems
from benchmarks.moe_numbers import CASES, Numbers, apart
from benchmarks.peers.report import Verdict
from benchmarks.peers.row import Row, quartiles
from benchmarks.report import publish, table

__all__ = ["check_numbers", "goals", "numbers_table", "times_table"]

ROOT = Path(__file__).parents[1]
NUMBERS_SAID = (
    "Largest relative errors: of a leaf's gradient, and of a rank's norm. Dense is fzero's loss without ranks, so "
    "where tokens are dropped DeepSpeed's rule, which is another, is to be compared with its own numbers on one rank."
)
HEAD = ["system", "stage", "variant", "ms a step", "quartiles", "peak MB", "at rest MB", "above rest MB", "sent MB"]


def cells(row: Row) -> list[str]:
    """Return the row of the table."""
    spread = " to ".join([f"{x * 1e3:,.0f}" for x in row.quartiles])
    sizes = [row.peak, row.state, row.peak - row.state, row.sent]
    name = [row.system, str(row.stage), row.variant, f"{row.median * 1e3:,.0f}", spread]
    return [*name, *[f"{x / 1e6:,.1f}" for x in sizes]]


def times_table(rows: list[Row]) -> str:
    """Return time, memory and bytes of each system."""
    return table(HEAD, [cells(row) for row in rows])


def goals(rows: list[Row]) -> list[Verdict]:
    """Compare fzero's compiled rows with DeepSpeed's of the same stage, and with the least peak of any peer."""
    ours = [r for r in rows if (r.system, r.variant) == ("fzero", "inductor")]
    least = min((r.peak for r in rows if r.system != "fzero"), default=0)
    verdicts = []
    for row in ours:
        if least:
            verdicts.append(Verdict("2 ranks", f"peak: stage {row.stage} / best peer", row.peak / least, 0.75))
        theirs = [r for r in rows if (r.system, r.stage) == ("DeepSpeed", row.stage)]
        if theirs:
            least_of_stage = min(r.peak for r in theirs)
            verdicts.append(_time(row, min(theirs, key=lambda r: r.median)))
            verdicts.append(Verdict("2 ranks", f"peak: stage {row.stage} / DeepSpeed", row.peak / least_of_stage, 0.75))
    return verdicts


def _time(ours: Row, theirs: Row) -> Verdict:
    """Compare times: the median of the rounds' ratios, and their quartiles."""
    ratios = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return Verdict("2 ranks", f"time: stage {ours.stage} / DeepSpeed", median(ratios), 1.0, quartiles(ratios))


def check_numbers(results: dict[int, dict[Any, Numbers]]) -> None:
    """Check that all systems compute the dense model's gradients, where no token is dropped and no loss is a rank's.

    Raises:
        ValueError: if a system does not. Names it and the number of ranks.
    """
    wanted = moe_numbers.dense(CASES["all seated"])
    for ranks, mine in results.items():
        for (name, case), numbers in mine.items():
            far = apart(numbers, wanted)[0]
            if case == "all seated" and far > 1e-4:
                raise ValueError(f"{name} on {ranks} ranks: gradients are {far:.0e} from the dense model's, not 1e-4")


def goals_table(verdicts: list[Verdict]) -> str:
    """Return the goals and whether they are met."""

    def spread(v: Verdict) -> str:
        return "" if v.spread is None else f"{v.spread[0]:.2f} to {v.spread[1]:.2f}"

    rows = [[v.goal, f"{v.ratio:.3f}", spread(v), f"{v.limit}", v.said] for v in verdicts]
    return table(["goal", "ratio", "quartiles of the rounds' ratios", "limit", ""], rows)


def numbers_table(results: dict[int, dict[Any, Numbers]]) -> str:
    """Return how far each system's gradients and norm lie from the dense model's, and from its own on one rank."""
    wanted = {case: moe_numbers.dense(config) for case, config in CASES.items()}
    rows = []
    for name, case in results[min(results)]:
        for ranks, mine in results.items():
            numbers, own = mine[name, case], results[min(results)][name, case]
            far = [*apart(numbers, wanted[case]), *apart(numbers, own)]
            rows.append([name, case, ranks, *[f"{x:.0e}" for x in far]])
    head = ["system", "case", "ranks", "gradients / dense", "norm / dense"]
    return table([*head, "gradients / own on one rank", "norm / own on one rank"], rows)


def launch(ranks: int, *words: str) -> None:
    """Run a script of this folder on processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def numbers_of(ranks: int, folder: str) -> dict[Any, Numbers]:
    out = f"{folder}/{ranks}.pt"
    launch(ranks, "benchmarks/moe_numbers.py", out)
    return {key: Numbers(*x) for key, x in torch.load(out).items()}


def times_of(options: list[str], folder: str) -> list[Row]:
    out = Path(folder) / "rows.json"
    launch(2, "benchmarks/measure.py", "benchmarks.moe_systems", str(out), *options)
    return [Row(**row) for row in json.loads(out.read_text())]


def compare(name: str, options: list[str], folder: str) -> list[str]:
    """Measure the systems on one model, and return what to print."""
    c, before = moe_systems.CONFIGS[name], load()
    rows = times_of(["--config", name, *options], folder)
    said = f"A GPT of width {c.width}, {c.layers} layers of {c.experts} experts of {c.hidden}, capacity {c.capacity}, "
    said += f"clip {c.clip}; {c.batch} x {c.context} tokens a rank. The load was {before} before and {load()} after."
    return [f"## {name}", said, times_table(rows), goals_table(goals(rows))]


def load() -> str:
    """Return the machine's load of the last minutes."""
    return ", ".join(f"{x:.1f}" for x in os.getloadavg())


def main() -> None:
    """Launch the measurements, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write moe.md")
    parser.add_argument("--rounds", type=int, default=9, help="of one timed step of each row; default 9")
    parser.add_argument("--configs", nargs="+", choices=moe_systems.CONFIGS, default=["state", "tokens"])
    parser.add_argument("--systems", nargs="+", default=[""], help="rows whose name begins so")
    parser.add_argument("--no-numbers", action="store_true", help="leave out the comparison of gradients")
    args = parser.parse_args()
    parts = [f"float32, AdamW, ep=2 of 2 ranks, k = 2. Medians and quartiles of {args.rounds} rounds."]
    with tempfile.TemporaryDirectory() as folder:
        numbers = {} if args.no_numbers else {n: numbers_of(n, folder) for n in (1, 2, 4)}
        check_numbers(numbers)
        for name in args.configs:
            parts += compare(name, ["--rounds", str(args.rounds), "--systems", *args.systems], folder)
    if not moe_systems.has_deepspeed():
        parts.append("DeepSpeed is not installed here: its rows are left out.")
    if numbers:
        parts += ["## Numbers", NUMBERS_SAID, numbers_table(numbers)]
    publish(__file__, "python benchmarks/moe.py", parts, args.write)


if __name__ == "__main__":
    main()
