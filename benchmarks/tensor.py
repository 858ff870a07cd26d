"""Compare tensor parallelism with torch's parallelize_module, alone and with FSDP2: time, memory, bytes, and losses.

python benchmarks/tensor.py [--write] [--rounds 9] [--configs toy] [--systems fzero-0 torch]

One Llama of transformers, untouched, the same weights and data. On 2 gloo processes tp=2, and ZeRO is at stage 0; on 4
dp=2 x tp=2, at stage 3, beside FSDP2 on a mesh of two axes. A round lets each system take one step, one after the
other. Memory is by the allocator's own events. `--write` keeps tensor.md.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import tensor_systems
from benchmarks.moe import goals_table, launch, load, times_table
from benchmarks.peers.report import Verdict
from benchmarks.peers.row import Row, quartiles
from benchmarks.report import publish

__all__ = ["check_losses", "goals"]

RANKS = {2: ["fzero-0", "torch-0"], 4: ["fzero-3", "torch+FSDP2"]}


def check_losses(rows: list[Row]) -> None:
    """Check that all systems train the same model on the same batches.

    Raises:
        ValueError: if the losses of one differ from the first one's. Names it.
    """
    for row in rows:
        # a mean over ranks: torch's are of each rank's own batch
        apart = max(abs(a / b - 1) for a, b in zip(row.losses, rows[0].losses, strict=True))
        if apart > 1e-3:
            raise ValueError(f"{row.system} {row.stage} {row.variant}: losses are {apart:.0e} from {rows[0].system}'s")


def goals(rows: list[Row]) -> list[Verdict]:
    """Compare fzero's compiled rows with torch's, each with the best one that cuts the sequence or not, as it does."""
    verdicts = []
    for sequence in (False, True):
        mine = [r for r in rows if ("sequence" in r.variant) == sequence]
        theirs = [r for r in mine if r.system != "fzero"]
        for ours in [r for r in mine if r.system == "fzero" and "inductor" in r.variant]:
            if not theirs:
                continue
            what = "sequence cut" if sequence else "whole"
            where, best = f"{ours.ranks} ranks", min(theirs, key=lambda r: r.median)
            ratios = [a / b for a, b in zip(ours.seconds, best.seconds, strict=True)]
            peak = ours.peak / min(r.peak for r in theirs)
            verdicts.append(Verdict(where, f"time: {what} / {best.system}", median(ratios), 1.0, quartiles(ratios)))
            verdicts.append(Verdict(where, f"peak: {what} / {best.system}", peak, 0.8))
            sent = ours.sent / min(r.sent for r in theirs)
            verdicts.append(Verdict(where, f"sent: {what} / {best.system}", sent, 1.0))
    return verdicts


def measure(ranks: int, name: str, rounds: int, systems: list[str]) -> list[Row]:
    """Measure systems on processes."""
    chosen = [key for key in tensor_systems.SYSTEMS if key.startswith(tuple(RANKS[ranks]))]
    chosen = [key for key in chosen if key.startswith(tuple(systems))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words: Any = ["--config", name, "--rounds", str(rounds), "--systems", *chosen]
        launch(ranks, "benchmarks/measure.py", "benchmarks.tensor_systems", str(out), *words)
        return [Row(**row) for row in json.loads(out.read_text())]


def compare(ranks: int, name: str, rounds: int, systems: list[str]) -> list[str]:
    """Measure the systems on one model, and return what to print."""
    c, before = tensor_systems.CONFIGS[name], load()
    rows = measure(ranks, name, rounds, systems)
    check_losses(rows)
    said = (
        f"A Llama of width {c.width}, {c.layers} layers, MLPs of {c.hidden}; {c.batch} x {c.context} tokens. The load "
    )
    said += f"was {before} before and {load()} after."
    return [f"## {name}, {ranks} ranks", said, times_table(rows), goals_table(goals(rows))]


def main() -> None:
    """Launch the measurements, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tensor.md")
    parser.add_argument("--rounds", type=int, default=9, help="of one timed step of each row; default 9")
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--configs", nargs="+", choices=tensor_systems.CONFIGS, default=["state", "tokens"])
    parser.add_argument("--systems", nargs="+", default=[""], help="rows whose name begins so")
    args = parser.parse_args()
    parts = [f"float32, AdamW, tp=2, no clip. Medians and quartiles of {args.rounds} rounds."]
    for ranks in args.ranks:
        for name in args.configs:
            parts += compare(ranks, name, args.rounds, args.systems)
    publish(__file__, "python benchmarks/tensor.py", parts, args.write)


if __name__ == "__main__":
    main()
