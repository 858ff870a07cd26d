"""Plan the models of docs/planner.md, print its table, and draw its picture.

python docs/_planner.py        (some minutes on one core)
"""

import pathlib
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import track

import fzero
from fzero import tuning

DOCS = pathlib.Path(__file__).parent
MIB = 2**20
# A model, its ranks, samples of a rank, the length, and what was published of DeepSpeed by stage, in MB
CASES = {
    "ViT-G/14": ("vit-g-14", 8, 16, 224, (42251, 20201, 21152, 20208)),
    "BERT-large": ("bert-large", 4, 64, 128, (15853, 13509, 13499, 14237)),
}
KINDS = ("parameters", "optimizer state", "gradients", "activations", "gathered", "buffers")
# What is planned: whether attention is written out, and whether cheap operations run again, as fzero.jit may choose
WAYS = ((True, False), (True, "auto"), (False, "auto"))
KEPT, USUAL, _ = WAYS


def planned(case: str, stage: int, way: tuple[bool, Any]) -> fzero.graph.Plan:
    """Plan a step in float16 with float32 masters, with a clip by the global norm, for GPUs."""
    model, ranks, samples, length, _ = CASES[case]
    explicit, recompute = way
    make_step = tuning.model_step(model, length=length, explicit=explicit)
    config = tuning.Configuration(stage, samples, 1, precision="float16", ranks=ranks)
    step, *args = make_step(config)
    return fzero.plan(fzero.jit(step, recompute=recompute), *args, hardware="cuda")


def draw(plans: dict[Any, fzero.graph.Plan]) -> Figure:
    """Draw what each plan holds at its peak, beside what was published."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(CASES)), CASES, strict=True):
        bottom = [0.0] * 4
        for kind in KINDS:
            peaks = [plans[case, stage, USUAL] for stage in range(4)]
            live = [plan.live_of(kind)[plan.peak_at] / MIB for plan in peaks]
            axes.bar(range(4), live, 0.4, bottom, label=kind)
            bottom = [a + b for a, b in zip(bottom, live, strict=True)]
        again = [plans[case, stage, KEPT].peak_bytes / MIB - n for stage, n in enumerate(bottom)]
        axes.bar(range(4), again, 0.4, bottom, fill=False, edgecolor="0.5", linestyle="--", label="recompute=False")
        axes.bar([x + 0.35 for x in range(4)], CASES[case][-1], 0.25, color="0.6", label="DeepSpeed, as published")
        axes.set(title=case, xlabel="stage", ylabel="a rank, MB of 2^20", xticks=range(4))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def main() -> None:
    """Plan all, and print the rows."""
    torch.set_num_threads(1)
    asked = [(case, stage, way) for case in CASES for way in WAYS for stage in range(4)]
    plans: dict[Any, fzero.graph.Plan] = {key: planned(*key) for key in track(asked, "planning")}
    for case in CASES:
        for stage in range(4):
            ours = [f"{plans[case, stage, way].peak_bytes / MIB:,.0f}" for way in WAYS]
            print(f"| {case}, stage {stage} | {CASES[case][-1][stage]:,} | {' | '.join(ours)} |", flush=True)
    draw(plans).savefig(DOCS / "planner-stages.png", dpi=110)


if __name__ == "__main__":
    main()
