"""Judge the measured rows, and write the table and the picture.

python -m benchmarks.peers.report ROWS.json ... [--write]
"""

import argparse
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.gpt import CONFIGS
from benchmarks.peers.row import Row, quartiles
from benchmarks.report import machine, table

__all__ = ["check_losses", "verdicts", "write"]

RESULTS = Path(__file__).parents[1] / "results"
COLORS = {"fzero": "tab:blue", "DDP": "tab:gray", "ZeroRedundancyOptimizer": "tab:olive"}
COLORS |= {"FSDP2": "tab:orange", "DeepSpeed": "tab:red"}
MARKERS = defaultdict(lambda: "o", fx="s", eager="D", compile="^")
ABOUT = {
    name: f"{name} is a GPT of width {c.width}, {c.layers} layers, and {c.batch} x {c.context} tokens a rank and "
    "micro-batch, in float32."
    for name, c in CONFIGS.items()
}
HEAD = ["system", "stage", "variant", "ms a step", "quartiles", "peak MB", "whole life MB", "above state"]
HEAD += ["sent MB", "collectives", "first step s"]


class Verdict(NamedTuple):
    """A goal, and what was measured.

    Attributes:
        where: the model and the ranks.
        goal: what is compared.
        ratio: of fzero's Inductor row to a peer's best.
        limit: what the ratio is not to exceed.
        spread: the quartiles of the ratio over the rounds, in each of which both were timed; of a time only.
    """

    where: str
    goal: str
    ratio: float
    limit: float
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.ratio <= self.limit

    @property
    def said(self) -> str:
        """Say whether the goal is met. A difference below the spread is none."""
        if not self.met and self.spread is not None and self.spread[0] <= self.limit:
            return "within the spread"
        return "met" if self.met else "missed"


class Group:
    """The rows of one model, number of micro-batches, and number of ranks."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        first = rows[0]
        plural = "es" if first.micro_batches > 1 else ""
        self.name = f"{first.model}, {first.micro_batches} micro-batch{plural}, {first.ranks} ranks"
        self.model, self.micro_batches = first.model, first.micro_batches

    def fastest(self, system: str, stage: int, variant: str = "") -> Row | None:
        """Return the fastest of the system's rows of this stage, whose variant begins so."""
        rows = [r for r in self.rows if r.system == system and r.stage == stage and r.variant.startswith(variant)]
        return min(rows, key=lambda r: r.median, default=None)

    def best(self, what: Callable[[Row], float], system: str, stage: int, variant: str = "") -> float:
        """Return the least of the system's rows of this stage, whose variant begins so; nan if there is none."""
        rows = [r for r in self.rows if r.system == system and r.stage == stage and r.variant.startswith(variant)]
        return min([what(r) for r in rows], default=math.nan)


def peak(row: Row) -> float:
    """Return bytes."""
    return row.peak


def above(row: Row) -> float:
    """Return bytes above ZeRO's formula for the state."""
    return row.peak - row.state


def life(row: Row) -> float:
    """Return bytes, the most from before the model was built; nan if that was not measured."""
    return row.life or math.nan


def seconds(row: Row) -> float:
    """Return the median time of a step."""
    return row.median


def groups(rows: Iterable[Row]) -> Iterator[Group]:
    """Yield the rows that are compared with each other."""

    def key(row: Row) -> Any:
        return row.model, row.micro_batches, row.ranks

    for _, mine in itertools.groupby(sorted(rows, key=key), key):
        yield Group(list(mine))


def check_losses(rows: Iterable[Row]) -> None:
    """Check that all systems trained alike.

    Raises:
        ValueError: if the losses of a row are not those of the others. Names both.
    """
    for group in groups(rows):
        first = group.rows[0]
        for row in group.rows[1:]:
            for step, (a, b) in enumerate(zip(first.losses, row.losses, strict=True)):
                if not math.isclose(a, b, rel_tol=2e-4):
                    raise ValueError(
                        f"{group.name}: at step {step} {row.system}-{row.stage}-{row.variant} has loss {b}, and "
                        f"{first.system}-{first.stage}-{first.variant} {a}: they do not train the same model"
                    )


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Compare the jitted step (Inductor) with the best that each peer offers: each goal, on each model."""
    verdicts = []
    for g in groups(rows):

        def ours(what: Callable[[Row], float], stage: int, g: Group = g) -> float:
            return g.best(what, "fzero", stage, "inductor")

        fsdp3, fsdp2 = ("FSDP2", 3, "reshard"), ("FSDP2", 2, "keep")
        zero1, ddp = ("ZeroRedundancyOptimizer", 1), ("DDP", 0)
        goals: list[tuple[str, Callable[[Row], float], int, tuple[Any, ...], float]] = [
            ("peak: stage 3 / FSDP2", peak, 3, fsdp3, 0.8 if g.model == "B" else 0.9),
            ("peak: stage 2 / FSDP2 (keep)", peak, 2, fsdp2, 1.0),
            ("whole life: stage 3 / FSDP2", life, 3, fsdp3, 0.75),
            ("whole life: stage 2 / FSDP2 (keep)", life, 2, fsdp2, 0.75),
            ("peak: stage 2 / DeepSpeed ZeRO-2", peak, 2, ("DeepSpeed", 2), 1.0),
            ("peak: stage 1 / ZeroRedundancyOptimizer", peak, 1, zero1, 1.0),
            ("peak: stage 1 / DeepSpeed ZeRO-1", peak, 1, ("DeepSpeed", 1), 1.0),
            ("peak: stage 0 / DDP", peak, 0, ddp, 1.0),
            ("time: stage 3 / FSDP2", seconds, 3, fsdp3, 0.75),
            ("time: stage 3 / DeepSpeed ZeRO-3", seconds, 3, ("DeepSpeed", 3), 0.6),
            ("time: stage 2 / FSDP2 (keep)", seconds, 2, fsdp2, 0.85),
            ("time: stage 2 / DeepSpeed ZeRO-2", seconds, 2, ("DeepSpeed", 2), 1.0),
            ("time: stage 1 / ZeroRedundancyOptimizer", seconds, 1, zero1, 1.0),
            ("time: stage 1 / DeepSpeed ZeRO-1", seconds, 1, ("DeepSpeed", 1), 1.0),
            ("time: stage 0 / DDP", seconds, 0, ddp, 1.05),
        ]
        if g.model == "B":
            goals.insert(1, ("above state: stage 3 / FSDP2", above, 3, fsdp3, 0.65))
        for name, f, i, peer, limit in goals:
            spread = _spread(g.fastest("fzero", i, "inductor"), g.fastest(*peer)) if f is seconds else None
            verdicts.append(Verdict(g.name, name, ours(f, i) / g.best(f, *peer), limit, spread))
        for stage in (1, 2, 3):
            ratio = ours(peak, stage) / ours(peak, stage - 1)
            verdicts.append(Verdict(g.name, f"peak: stage {stage} / stage {stage - 1}", ratio, 1.0))
        rows = [g.fastest("fzero", i, "inductor") for i in (2, 1)]
        ratio = ours(seconds, 2) / ours(seconds, 1)
        verdicts.append(Verdict(g.name, "time: stage 2 / stage 1", ratio, 1.05, _spread(*rows)))
    return [v for v in verdicts if not math.isnan(v.ratio)]


def _spread(ours: Row | None, theirs: Row | None) -> tuple[float, float] | None:
    """Return the quartiles of the ratio of two rows' times, round by round."""
    if ours is None or theirs is None:
        return None
    return quartiles([a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)])


def cells(row: Row) -> list[str]:
    """Return the row of the table."""
    spread = " to ".join([f"{x * 1e3:,.1f}" for x in row.quartiles])
    return [
        *(row.system, str(row.stage), row.variant, f"{row.median * 1e3:,.1f}", spread),
        *(f"{row.peak / 1e6:,.2f}", f"{row.life / 1e6:,.2f}" if row.life else ""),
        *(f"{(row.peak - row.state) / 1e6:,.2f}", f"{row.sent / 1e6:,.2f}"),
        *(f"{row.collectives:,}", f"{row.build:.1f}"),
    ]


def _show(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f"{spread[0]:.3f} to {spread[1]:.3f}"


def picture(rows: list[Row], path: Path) -> None:
    """Draw time against peak, one dot a row."""
    from matplotlib.figure import Figure

    panels = list(groups(rows))
    columns = min(2, len(panels))  # so that a page's width shows them readably
    down = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.9 * down), layout="constrained")
    for i, group in enumerate(panels):
        axes = figure.add_subplot(down, columns, i + 1)
        for row in group.rows:
            at = row.peak / 1e6, row.median * 1e3
            marker = MARKERS["compile" if row.variant.endswith("-compile") else row.variant]
            axes.plot(*at, marker, color=COLORS[row.system], markersize=13, markeredgecolor="white")
            axes.annotate(str(row.stage), at, size=9, color="white", ha="center", va="center_baseline")
        axes.set(title=group.name, xlabel="peak of a rank, MB", ylabel="ms a step", xlim=(0, None), ylim=(0, None))
    for name, color in COLORS.items():
        figure.axes[0].plot([], [], "o", color=color, label=name)
    figure.axes[0].legend(fontsize=9, loc="lower left")
    figure.suptitle(
        "One dot a row, with its stage in it. fzero: circle Inductor, square fx, diamond eager.\n"
        "Triangle: a peer with torch.compile"
    )
    figure.savefig(path, dpi=110)


def write(rows: list[Row], command: str, folder: Path | None) -> None:
    """Print the tables, and with a folder keep them there."""
    judged = verdicts(rows)
    met, within = [sum(v.said == what for v in judged) for what in ("met", "within the spread")]
    parts = [
        "# Against the peers",
        f"Measured by `{command}`, on {machine()}, {deepspeed()}.",
        " ".join([ABOUT[name] for name in dict.fromkeys(r.model for r in rows) if name in ABOUT]),
        "A step's time is the median of interleaved rounds. The systems of stage 0, of stages 1 and 2, and of stage 3 "
        "are measured apart. A step's peak is the least of 5 steps by a counting allocator, from before the model is "
        "built, of the rank that holds most. `whole life` is the most from then until the third step ended: the making "
        "of the model and compilation are in it. `above state` is the peak less parameters and moments, which ZeRO's "
        "formula tells. `sent` are the full buffers of collectives; an all_reduce counts twice. Where new parameters "
        "arrive in their leaves, `collectives` counts rank 0's messages. `first step` is with compilation. All rows "
        "train alike: their losses agree within 2e-4.",
        "fzero's variants are the backends of `fzero.jit`, or the step as it is (`eager`); FSDP2's are "
        "`reshard_after_forward` (`reshard`) or not (`keep`), with torch.compile where it says so. DDP, "
        "ZeroRedundancyOptimizer and FSDP2 have torch's fused AdamW; DeepSpeed has `torch_adam`, not fused, and "
        "buckets of 1e6 elements.",
        f"![time against peak](peers.png)\n\n## Goals: {met} of {len(judged)} met, {within} within the spread",
        "A ratio of fzero's Inductor row to the peer's best of that stage; met if it is not above the goal. Of times "
        "the quartiles of the rounds' ratios are there, too: where the goal lies between them, no difference was "
        "shown. The ratio is that of the medians, so it may lie outside these quartiles."
        if judged
        else "Only fzero's Inductor rows are judged, and there are none.",
        table(
            ["model", "what", "ratio", "quartiles", "goal", ""],
            [[v.where, v.goal, f"{v.ratio:.3f}", _show(v.spread), f"{v.limit:g}", v.said] for v in judged],
        ),
    ]
    for group in groups(rows):
        parts += [f"## {group.name}", table(HEAD, [cells(r) for r in group.rows])]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if folder is not None:
        folder.mkdir(exist_ok=True)
        (folder / "peers.md").write_text(text)
        (folder / "peers.json").write_text(json.dumps([r.__dict__ for r in rows], indent=1) + "\n")
        picture(rows, folder / "peers.png")


def deepspeed() -> str:
    """Name DeepSpeed's version; the other peers are torch's."""
    try:
        return f"deepspeed {version('deepspeed')}"
    except PackageNotFoundError:
        return "no deepspeed"


def main() -> None:
    """Read the rows, check and judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results/")
    parser.add_argument("--command", default="make bench")
    args = parser.parse_args()
    rows = [Row(**row) for path in args.rows for row in json.loads(path.read_text())]
    check_losses(rows)
    write(rows, args.command, RESULTS if args.write else None)


if __name__ == "__main__":
    sys.exit(main())
