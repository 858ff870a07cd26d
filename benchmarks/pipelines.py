"""Compare pipelines with torch.distributed.pipelining and DeepSpeed's PipelineEngine: time, memory by rank, and bytes.

python benchmarks/pipelines.py [--write] [--rounds 7] [--configs toy] [--pp 4] [--systems fzero-1f1b torch]

One GPT, the same weights and data, on four gloo processes: a pipeline of four ranks, and two pipelines of two. A round
lets each system take one step, one after the other. Memory is by the allocator's own events, of the rank that holds the
most. Each system's loss and gradients are first compared with the whole model's. DeepSpeed comes with
`pip install -e '.[bench]'`; it is left out where it is not installed. `--write` keeps pipelines.md.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.moe import goals_table, launch, load
from benchmarks.peers.report import Verdict
from benchmarks.peers.row import quartiles
from benchmarks.pipelines_measure import PipelineRow
from benchmarks.pipelines_systems import CONFIGS, has_deepspeed
from benchmarks.report import publish, table

__all__ = ["check_numbers", "goals", "rows_table"]

RANKS = 4
TIME, PEAK = 1.0, 0.8  # the goals: fzero's share of the best peer's
HEAD = ["system", "schedule", "stage", "variant", "ms a step", "quartiles", "processor ms", "fullest rank MB"]
HEAD += ["by rank MB", "at rest MB", "messages MB", "collectives MB", "gradients / whole model"]


def check_numbers(rows: list[PipelineRow]) -> None:
    """Check that all systems train the whole model.

    Raises:
        ValueError: if the loss or a gradient of one lies apart from the whole model's. Names it.
    """
    for row in rows:
        limit = 1e-4 if row.system == "DeepSpeed" else 1e-10  # DeepSpeed's are compared in float32
        if max(row.loss_off, row.grads_off) > limit:
            what = f"{row.system} {row.schedule} {row.stage} {row.variant}"
            raise ValueError(
                f"{what}: gradients are {row.grads_off:.0e} from the whole model's, the loss {row.loss_off:.0e}"
            )


def rows_table(rows: list[PipelineRow]) -> str:
    """Return what was measured of each system."""
    return table(HEAD, [cells(row) for row in rows])


def cells(row: PipelineRow) -> list[str]:
    """Return a row of the table."""
    spread = " to ".join([f"{x * 1e3:,.0f}" for x in row.quartiles])
    name = [row.system, row.schedule, str(row.stage), row.variant, f"{row.median * 1e3:,.0f}", spread]
    by_rank = ", ".join([f"{x / 1e6:.0f}" for x in row.peaks])
    bytes_of = [f"{x / 1e6:.1f}" for x in (row.state, max(row.messages), max(row.collectives_sent))]
    return [
        *name,
        f"{median(row.processor) * 1e3:,.0f}",
        f"{row.peak / 1e6:.1f}",
        by_rank,
        *bytes_of,
        f"{row.grads_off:.0e}",
    ]


def goals(rows: list[PipelineRow]) -> list[Verdict]:
    """Compare fzero's compiled rows with the peers' of the same schedule: the quickest, and the least of memory."""
    verdicts = []
    for ours in [r for r in rows if (r.system, r.variant) == ("fzero", "inductor")]:
        theirs = [r for r in rows if r.system != "fzero" and r.schedule == ours.schedule]
        if theirs:
            best, least = min(theirs, key=lambda r: r.median), min(theirs, key=lambda r: r.peak)
            ratios = [a / b for a, b in zip(ours.seconds, best.seconds, strict=True)]
            mine, where = f"{ours.schedule}, stage {ours.stage}", f"{ours.ranks} ranks"
            verdicts.append(Verdict(where, f"time: {mine} / {_name(best)}", median(ratios), TIME, quartiles(ratios)))
            verdicts.append(Verdict(where, f"peak: {mine} / {_name(least)}", ours.peak / least.peak, PEAK))
    return verdicts


def _name(row: PipelineRow) -> str:
    return " ".join([row.system, str(row.stage), *([row.variant] if row.variant else [])])


def measure(name: str, pp: int, options: list[str]) -> list[PipelineRow]:
    """Measure the systems on processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        launch(RANKS, "benchmarks/pipelines_measure.py", str(out), "--pp", str(pp), "--config", name, *options)
        return [PipelineRow(**row) for row in json.loads(out.read_text())]


def compare(name: str, pp: int, options: list[str]) -> list[str]:
    """Measure the systems on one model and mesh, and return what to print."""
    c, before = CONFIGS[name], load()
    rows = measure(name, pp, options)
    check_numbers(rows)
    said = f"A GPT of width {c.width}, {c.layers} layers; {c.micro_batches} micro-batches of {c.batch} x {c.context} "
    said += f"tokens go through each pipeline. The load was {before} before and {load()} after."
    return [f"## {name}, dp={RANKS // pp} x pp={pp}", said, rows_table(rows), goals_table(goals(rows))]


def main() -> None:
    """Launch the measurements, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write pipelines.md")
    parser.add_argument("--rounds", type=int, default=7, help="of one timed step of each row; default 7")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=["activations", "state"])
    parser.add_argument("--pp", type=int, nargs="+", choices=(2, 4), default=[4, 2])
    parser.add_argument("--systems", nargs="+", default=[""], help="rows whose name begins so")
    args = parser.parse_args()
    options: list[Any] = ["--rounds", str(args.rounds), "--systems", *args.systems]
    parts = [f"float32, AdamW, no clip, four processes of one thread. Medians and quartiles of {args.rounds} rounds."]
    for name in args.configs:
        for pp in args.pp:
            parts += compare(name, pp, options)
    if not has_deepspeed():
        parts.append("DeepSpeed is not installed here: its rows are left out.")
    publish(__file__, "python benchmarks/pipelines.py", parts, args.write)


if __name__ == "__main__":
    main()
