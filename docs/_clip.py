"""Draw what a clip costs the model of DeepSpeed's pull request 2079, by three plans: docs/plan.md shows it.

python docs/_clip.py
"""

import pathlib
import sys

from matplotlib.figure import Figure

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.graph.passes.test_recast import of_the_pull_request  # noqa: E402

WAYS = {
    "with a clip, all copies in float32 wait (recast=False)": (True, False),
    "with a clip": (True, "auto"),
    "without a clip": (False, "auto"),
}


def draw() -> Figure:
    """Draw the bytes alive over the step; with a clip the update begins where the lines fall."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes, held = figure.subplots(), 0.0
    for (name, way), colour in zip(WAYS.items(), ("tab:red", "tab:blue", "tab:grey"), strict=True):
        plan = of_the_pull_request(*way)
        turn, end = [o.phase for o in plan.operations].index("backward"), len(plan.operations)
        at = [0.3 * i / turn if i < turn else 0.3 + 0.7 * (i - turn) / (end - turn) for i in range(end)]
        axes.plot(at, [x / 1e9 for x in plan.live], label=f"{name}: {plan.peak_bytes / 1e9:.1f} GB", color=colour)
        held = plan.argument_bytes / 1e9
    axes.axhline(held, color="black", linewidth=0.8, linestyle=":")
    axes.text(0.01, held + 0.3, f"parameters, masters, moments:\n{held:.1f} GB")
    axes.axvline(0.3, color="black", linewidth=0.5)
    axes.set(xlim=(0, 1), ylabel="GB alive on a rank", xticks=[0.15, 0.65])
    axes.set_xticklabels(["forward pass", "backward pass and update"])
    axes.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    draw().savefig(DOCS / "clip.png", dpi=120)
