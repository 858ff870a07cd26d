"""Plan runs that others published, and write what is predicted beside what they measured.

python -m benchmarks.published [--write] [--all] [--workers 2]

The held half of the runs is planned, and all runs whose memory was measured; with `--all` the fitted half too. Each
run is planned as it ran: its model, ranks, micro-batch, accumulation and remat, with bfloat16 sums of gradients where
the run had them, in one schedule: gathers ahead as far as memory is free, and one reduction in flight, as FSDP does.
fzero.jit would choose among some ten. A row is planned for its own ranks and batch: no plan is shared. Rows go through
the cache of `fzero.tune`, so a second call takes seconds.
"""

import argparse
import math
import pathlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.progress import track

from benchmarks.published.runs import CARDS, GIB, Run, runs
from benchmarks.report import publish, table
from fzero import Precision, jit
from fzero.tuning import Configuration, TableRow
from fzero.tuning._table_views import format_remat
from fzero.tuning.models import ModelStep
from fzero.tuning.search import ConfigurationPlanner, RowCache, open_pool

FILE = pathlib.Path(__file__).parents[1] / "published.py"  # whose suffix becomes .md


@dataclass(frozen=True)
class PublishedConfiguration(Configuration):
    """A configuration whose gradients may be summed over ranks in bfloat16; over micro-batches they are in float32."""

    bfloat16_sums: bool = False

    @property
    def policy(self) -> Precision:
        policy = Configuration.policy.__get__(self)
        return replace(policy, reduce=torch.bfloat16, grad=torch.float32) if self.bfloat16_sums else policy


@dataclass(frozen=True)
class PublishedStep(ModelStep):
    """Makes the step of a published run, in the schedule that all of them are planned in."""

    bfloat16_sums: bool = False
    recompute: bool = False

    def __call__(self, config: Configuration) -> Any:
        fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
        step, *args = super().__call__(PublishedConfiguration(**fields, bfloat16_sums=self.bfloat16_sums))
        d, bytes_each = self.shape.width, config.policy.param.itemsize
        unit = bytes_each * max(4 * d * d + 2 * d * self.shape.mlp, d * self.shape.vocab)
        schedule = {
            "prefetch": "fitting",
            "in_flight": int(not self.recompute),
            "recompute": self.recompute,
            "max_reuse_bytes": unit // 8,
        }
        return jit(step, **schedule), *args


WAYS = ("as it ran", "recompute", "chunked loss", "chunked loss, recompute")  # from what the run did to the leanest


def plan_run(run: Run, way: str) -> TableRow:
    """Plan a run."""
    make_step = PublishedStep(run.shape, run.length, False, run.bfloat16_sums, "recompute" in way)
    machine = CARDS[run.card]
    planner = ConfigurationPlanner(make_step, machine, RowCache(make_step.cache_key, machine))
    return planner(replace(run.config, chunked_loss="chunked" in way))


@dataclass(frozen=True)
class Result:
    """A run with its plans: as it ran, and in the first way in which fzero says that it fits."""

    run: Run
    row: TableRow
    way: str
    fitting: TableRow

    @property
    def tokens(self) -> float:
        """The predicted tokens a second of one card."""
        c = self.run.config
        return c.global_batch * self.run.length / c.world / self.row.seconds

    @property
    def error(self) -> float:
        """How far the predicted speed is off, as a share of the measured one."""
        return self.tokens / self.run.tokens - 1

    @property
    def fits(self) -> bool:
        """Whether the leanest plan fits the card."""
        return self.fitting.peak_bytes <= CARDS[self.run.card].device_bytes


def result(run: Run) -> Result:
    """Plan a run as it ran, and, as long as it does not fit, in leaner ways."""
    torch.set_num_threads(1)
    rows = {}
    for way in WAYS:
        rows[way] = plan_run(run, way)
        if rows[way].peak_bytes <= CARDS[run.card].device_bytes:
            break
    last = [*rows][-1]
    return Result(run, rows[WAYS[0]], last, rows[last])


def speed_lines(results: Sequence[Result]) -> list[list[str]]:
    """Tabulate the errors in speed: by card and half, then by model."""
    timed = [r for r in results if not math.isnan(r.run.tokens)]
    groups: dict[str, list[Result]] = {}
    for r in timed:
        half = "held" if r.run.is_held else "fitted"
        if r.run.family == "llm-foundry":
            groups.setdefault(f"{r.run.card}, {half} half", []).append(r)
            groups.setdefault(f"all cards, {half} half", []).append(r)
        else:
            groups.setdefault(f"{r.run.family}, {r.run.note}: no constant was fitted", []).append(r)
    for r in timed:
        if r.run.is_held and r.run.family == "llm-foundry":
            groups.setdefault(f"{r.run.shape.name}, held half", []).append(r)
    return [[name, *_errors(rows)] for name, rows in sorted(groups.items(), key=lambda x: ("mpt" in x[0], x[0]))]


def _errors(rows: Sequence[Result]) -> list[str]:
    errors = [r.error for r in rows]
    order = spearman([r.tokens for r in rows], [r.run.tokens for r in rows]) if len(rows) > 2 else None
    sizes = [abs(e) for e in errors]
    shares = [f"{sum(e <= limit for e in sizes) / len(sizes):.0%}" for limit in (0.1, 0.25)]
    median = f"{statistics.median(sizes):.1%}"
    return [
        str(len(rows)),
        median,
        f"{statistics.median(errors):+.1%}",
        *shares,
        f"{max(sizes):.0%}",
        f"{order:.3f}" if order else "-",
    ]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's coefficient of two lists without ties."""
    ranks = [[sorted(x).index(v) for v in x] for x in (a, b)]
    return statistics.correlation(*ranks)


def memory_lines(results: Sequence[Result]) -> list[list[str]]:
    """List the runs whose memory was measured."""
    return [
        [
            f"{r.run.family}, {r.run.shape.name}, stage {r.run.config.stage}, {r.run.config.ranks} ranks {r.run.note}",
            f"{r.run.memory / GIB:.1f}",
            f"{r.row.peak_bytes / GIB:.1f}",
            f"{r.row.peak_bytes / r.run.memory - 1:+.1%}",
            "as it ran" if r.way == WAYS[0] else f"{r.way}: {r.fitting.peak_bytes / GIB:.1f}",
        ]
        for r in results
        if not math.isnan(r.run.memory)
    ]


def run_line(r: Result) -> list[str]:
    """Write the row of a run."""
    c = r.run.config
    remat = format_remat(c)
    fits = r.way if r.fits else f"no: {(r.fitting.peak_bytes - CARDS[r.run.card].device_bytes) / 1e9:.1f} GB too much"
    speeds = (
        [f"{r.run.tokens:,.0f}", f"{r.tokens:,.0f}", f"{r.error:+.0%}"]
        if not math.isnan(r.run.tokens)
        else ["-", f"{r.tokens:,.0f}", "-"]
    )
    settings = [
        r.run.shape.name,
        f"{c.world} x {r.run.card}",
        f"{r.run.length:,}",
        f"{c.micro_batch} x {c.accumulation}",
        c.stage,
        remat,
    ]
    return [*map(str, settings), *speeds, f"{r.row.peak_bytes / 1e9:.1f}", fits, "held" if r.run.is_held else ""]


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Draw predicted against measured speed, the held half filled."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, card in enumerate(CARDS):
        for is_held in (True, False):
            some = [
                r for r in results if r.run.card == card and r.run.is_held == is_held and not math.isnan(r.run.tokens)
            ]
            style: dict[str, Any] = {"s": 14, "edgecolors": f"C{i}", "facecolors": f"C{i}" if is_held else "none"}
            label = f"{card}, {'held' if is_held else 'fitted'}"
            if some:
                left.scatter([r.run.tokens for r in some], [r.tokens for r in some], label=label, **style)
                right.scatter([r.run.config.world for r in some], [r.error * 100 for r in some], **style)
    ends = [3e2, 3e5]
    left.plot(ends, ends, color="0.6", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="tokens a second of a card, measured", ylabel="predicted")
    left.legend(fontsize=7)
    right.axhline(0, color="0.6", linewidth=0.8)
    right.set(xscale="log", xlabel="cards", ylabel="predicted speed, % off")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Plan all runs, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/published.md and its picture")
    parser.add_argument("--workers", type=int, default=2, help="processes to plan on")
    parser.add_argument("--all", action="store_true", help="plan the fitted half too")
    args = parser.parse_args()
    wanted, left = runs()
    wanted = [r for r in wanted if args.all or r.is_held or not math.isnan(r.memory)]
    with open_pool(args.workers, result) as start:
        futures = [start(run) for run in wanted]
        results = [future.result() for future in track(futures, "planning")]
    write(results, left, args.write)


def write(results: Sequence[Result], left: Sequence[str], keep: bool) -> None:
    """Print the tables, and keep them."""
    from benchmarks.published.text import parts

    timed = ["runs", "median error", "bias", "within 10%", "within 25%", "largest", "Spearman"]
    tables = {
        "speed": table(["", *timed], speed_lines(results)),
        "memory": table(["run", "GiB measured", "GiB planned as it ran", "error", "fits"], memory_lines(results)),
        "runs": table(
            [
                "model",
                "cards",
                "length",
                "batch",
                "stage",
                "remat",
                "tokens/s",
                "predicted",
                "error",
                "GB planned",
                "fits",
                "",
            ],
            [run_line(r) for r in results],
        ),
    }
    if keep:
        draw(results, FILE.with_suffix(".png"))
    publish(str(FILE), "python -m benchmarks.published --write", parts(results, tables, left, CARDS), keep)


if __name__ == "__main__":
    main()
