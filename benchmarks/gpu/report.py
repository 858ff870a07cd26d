"""The report: tables of each part's rows, what the numbers say together, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Result, Values
from benchmarks.gpu.memory import PUBLISHED
from benchmarks.gpu.run import Outcome
from benchmarks.report import table

__all__ = ["exit_status", "text_of", "write"]

ABOUT = {
    "checks": (
        "Sharded training beside plain training on the CPU. `difference` is the largest of the parameters and "
        "losses after 5 steps, each leaf's of its largest value."
    ),
    "memory": (
        "Adam in bfloat16 with float32 masters. `plan` is `Plan.peak_bytes` and `Plan.workspace_bytes`. "
        "`requested`, `allocated` and `reserved` are the caching allocator's peaks of tensors, blocks and segments "
        "in a steady step. A check holds if at most 1.05 of the plan is requested. `planned ms` is the cost "
        "model's."
    ),
    "peers": (
        "A GPT of 100 million parameters, 16 x 1024 tokens a rank, AdamW in bfloat16 with float32 masters. DDP has "
        "one rank where the others do not exist, and plain torch always."
    ),
    "offload": (
        "1.1 billion parameters at stage 3, AdamW in bfloat16 with float32 masters. `ratio` is the host's share of "
        "the optimizer's state."
    ),
    "speeds": (
        "What `fzero calibrate` measures and stores for `fzero plan --machine calibrated`; here nothing is stored."
    ),
    "kernels": (
        "A step at stage 3. The first rows are `fzero.profile`'s of the jitted step. The others are an eager "
        "step's: the time of the kernels that each function of the model starts."
    ),
}


def exit_status(outcome: Outcome, rehearse: bool) -> int:
    """Return 1 if a check failed or none was made; in a rehearsal also if any case failed."""
    results = outcome.results
    bad = [r for r in results if r.is_failed_check or (rehearse and r.outcome == "failed")]
    checked = [r for r in results if r.part == "checks"]
    return int(bool(bad) or (bool(checked) and not any(r.outcome == "ok" for r in checked)))


def text_of(outcome: Outcome, command: str, picture: str, notes: Sequence[str]) -> str:
    """Return the report as Markdown.

    Args:
        outcome: the results so far.
        command: what was run.
        picture: the name of the picture's file; "" for none.
        notes: sentences that come first.
    """
    results = outcome.results
    counts = {name: sum(r.outcome == name for r in results) for name in ("ok", "wrong", "failed", "left out")}
    shown = ", ".join([f"{n} {name}" for name, n in counts.items()])
    parts = ["# gpu", f"`{command}`, on {outcome.card or 'no card'}.", *notes]
    parts.append(f"{len(results)} cases in {outcome.seconds:.0f} s: {shown}. MB are 1e6 bytes.")
    if picture:
        parts.append(f"![Peaks beside plans, times beside the peers', and times by the ratio of offload]({picture})")
    if said := verdicts(results):
        parts += ["## Together", table(["what", "value", "goal"], said)]
    for name in dict.fromkeys(r.part for r in results):
        parts += [f"## {name.capitalize()}", *filter(None, [ABOUT.get(name)])]
        parts += tables([r for r in results if r.part == name])
    return "\n\n".join(parts) + "\n"


def tables(results: Sequence[Result]) -> list[str]:
    """Return a table for each set of columns; errors and what was left out stand in the last column of the first."""
    parts: list[str] = []
    groups: dict[tuple[str, ...], list[Result]] = {}
    for r in results:
        titles = tuple(dict.fromkeys(key for row in r.rows for key in row))
        groups.setdefault(titles, []).append(r)
    without = groups.pop((), [])
    merged = merge(groups)
    for i, (titles, group) in enumerate(merged or [((), [])]):
        rows = [r for r in results if r in group or (i == 0 and r in without)]
        parts.append(table(["case", *titles, "outcome"], [line for r in rows for line in lines_of(r, titles)]))
    return parts


def merge(groups: dict[tuple[str, ...], list[Result]]) -> list[tuple[tuple[str, ...], list[Result]]]:
    """Join sets of columns of which one is part of the other."""
    merged: list[tuple[tuple[str, ...], list[Result]]] = []
    for titles, group in sorted(groups.items(), key=lambda item: -len(item[0])):
        for larger, others in merged:
            if {*titles} <= {*larger}:
                others += group
                break
        else:
            merged.append((titles, [*group]))
    return merged


def lines_of(result: Result, titles: Sequence[str]) -> list[list[str]]:
    """Return the lines of a result, one a row."""
    outcome = f"{result.outcome}: {result.reason}".removesuffix(": ").replace("|", "/")
    name = result.case.replace("|", "/")
    rows: list[Values] = result.rows or [{}]
    return [[name, *[show(row.get(title, "")) for title in titles], outcome] for row in rows]


def show(value: Any) -> str:
    """Show a value of a table."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def verdicts(results: Sequence[Result]) -> list[list[str]]:
    """Judge what several rows say together."""
    rows = {(r.part, r.case): r.rows[0] for r in results if len(r.rows) == 1}
    parts = []
    for model in ("bert-large", "vit-g"):
        steps = {
            int(c.split("stage ")[1][0]): row
            for (p, c), row in rows.items()
            if p == "memory" and model in c and "stage" in c
        }
        peaks = [steps[stage]["requested MB"] for stage in sorted(steps)]
        if len(peaks) > 1:
            is_good = peaks == sorted(peaks, reverse=True)
            parts.append([f"{model}: the peak falls with the stage, MB", " ≥ ".join(map(show, peaks)), word(is_good)])
        for stage, row in steps.items():
            if "published MB" in row:
                limit = PUBLISHED[model, stage]
                text = f"{row['allocated MB']:,.0f} beside {limit:,}"
                parts.append(
                    [f"{model}, stage {stage}: below DeepSpeed's, MB", text, word(row["allocated MB"] <= limit)]
                )
    parts += [
        v
        for ours, peer in (
            ("fzero-3", "FSDP2-3-reshard"),
            ("fzero-2", "FSDP2-2-keep"),
            ("fzero-0", "DDP-0"),
            ("fzero-0", "plain-torch-0"),
        )
        for v in ratios(rows, ours, peer)
    ]
    full, none = rows.get(("offload", "ratio 1")), rows.get(("offload", "ratio 0"))
    if full and none:
        times = {row["ratio"]: row["ms a step"] for (p, c), row in rows.items() if p == "offload" and "," not in c}
        text = ", ".join([f"{ratio:g}: {full['ms a step'] / ms:.2f}" for ratio, ms in sorted(times.items())])
        parts.append(["times as fast as with all state on the host, by ratio", text, ""])
    return parts


def ratios(rows: dict[tuple[str, str], Values], ours: str, peer: str) -> list[list[str]]:
    """Compare fzero's default backend with a peer's best row: time, and memory on a GPU."""
    mine = [row for (p, c), row in rows.items() if p == "peers" and c in (f"{ours}-inductor", f"{ours}-fx")][:1]
    theirs = [row for (p, c), row in rows.items() if p == "peers" and c.startswith(peer)]
    parts = []
    for what, title in (("ms a step", "time"), ("allocated MB", "peak")):
        values = [row[what] for row in theirs if what in row]
        if mine and values and what in mine[0]:
            ratio = mine[0][what] / min(values)
            parts.append([f"{title}: {ours} / {peer}", f"{ratio:.2f}", word(ratio <= 1.0)])
    return parts


def word(is_good: bool) -> str:
    """Say whether a goal is met."""
    return "met" if is_good else "missed"


def write(outcome: Outcome, path: Path, command: str, notes: Sequence[str], is_last: bool) -> None:
    """Write the report, and at the end its picture beside it. Nothing is lost if the run is stopped before."""
    picture, more = "", []
    if is_last:
        try:
            draw(outcome.results, path.with_suffix(".png"))
            picture = path.with_suffix(".png").name
        except ImportError:
            more = ["There is no picture, since matplotlib is not installed."]
    part = path.with_suffix(".part")
    part.write_text(text_of(outcome, command, picture, [*notes, *more]))
    part.replace(path)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw peaks beside plans, the times of the peers, and the times by the ratio of offload."""
    from matplotlib.figure import Figure

    rows = {(r.part, r.case): r.rows[0] for r in results if len(r.rows) == 1}
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    memory, times, offload = figure.subplots(1, 3)
    steps = {c: row for (p, c), row in rows.items() if p == "memory" and "plan MB" in row}
    for i, name in enumerate(("plan MB", "requested MB", "reserved MB")):
        values = [row.get(name, 0) / 1e3 for row in steps.values()]
        memory.barh([y + 0.27 * i for y in range(len(steps))], values, 0.25, label=name.removesuffix(" MB"))
    memory.set_yticks([y + 0.27 for y in range(len(steps))], [c.rpartition(",")[0] for c in steps], fontsize=8)
    memory.invert_yaxis()
    times.invert_yaxis()
    memory.set(title="peak of a rank's step", xlabel="GB")
    systems = {c: row["ms a step"] for (p, c), row in rows.items() if p == "peers"}
    colours = ["tab:blue" if c.startswith("fzero") else "tab:gray" for c in systems]
    times.barh(list(systems), list(systems.values()), color=colours)
    times.tick_params(axis="y", labelsize=8)
    times.set(title="a step of a GPT", xlabel="ms")
    host = sorted((row["ratio"], row["ms a step"]) for (p, c), row in rows.items() if p == "offload" and "," not in c)
    if host:
        offload.plot(*zip(*host, strict=True), "o-", label="updated on the host")
    for (p, c), row in rows.items():
        if p == "offload" and "," in c:
            offload.plot(row["ratio"], row["ms a step"], "s", label=c)
    offload.set(title="a step by the host's share of the state", xlabel="ratio", ylabel="ms", ylim=(0, None))
    for axes in (memory, offload):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3 if axes is memory else 2)
    figure.savefig(path, dpi=110)
