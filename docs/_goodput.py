"""Draw the picture of docs/planner_runs.md: goodput against the time between saves.

python docs/_goodput.py
"""

import pathlib

from matplotlib.figure import Figure

from fzero import tuning

MTBF = 54 * 86400 * 16384 / 466  # of a device, as in the paper of Llama 3
STEP = 6.3  # seconds


def draw() -> Figure:
    """Draw a line with quartiles for each restart time."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for minutes in (2, 5, 10, 20):
        what_fails = tuning.Reliability(MTBF, save=4, commit=60, restart=60 * minutes)
        result = tuning.goodput(STEP, 16384, what_fails, days=54)
        times = [every / 60 for every in result.by_interval]
        low, median, high = zip(*result.by_interval.values(), strict=True)
        (line,) = axes.plot(times, median, marker="o", label=f"restart of {minutes} minutes")
        axes.fill_between(times, low, high, alpha=0.25, color=line.get_color())
    axes.axvline(result.formula / 60, color="0.5", linestyle="--", label="Daly's formula")
    axes.axhline(0.9, color="0.5", linestyle=":", label="Llama 3's paper: above")
    axes.set(
        xscale="log",
        xlabel="minutes between saves, each of which stops the steps for 4 s",
        ylabel="goodput",
        title="16,384 devices, a failure each 2.8 hours, 54 days",
    )
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    figure.legend(loc="outside right upper")
    return figure


if __name__ == "__main__":
    draw().savefig(pathlib.Path(__file__).with_name("goodput.png"), dpi=110)
