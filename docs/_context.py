"""Draw which rank computes which part of causal attention: docs/context.md shows it.

python docs/_context.py
"""

import pathlib

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import fzero
from fzero.parallel import context

DOCS = pathlib.Path(__file__).parent
RANKS, TOKENS = 4, 16  # two tokens a part


def draw() -> Figure:
    """Draw the queries and keys of one sequence, coloured by the rank that holds the queries."""
    part = TOKENS // (2 * RANKS)
    positions = fzero.mesh(cp=RANKS).spmd(lambda: fzero.PerRank(context.positions(2 * part)))().value.tolist()
    holder = [next(rank for rank in range(RANKS) if i in positions[rank]) for i in range(TOKENS)]
    cells = [[holder[i] if j <= i else float("nan") for j in range(TOKENS)] for i in range(TOKENS)]
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    colours = ["tab:blue", "tab:orange", "tab:green", "tab:red"]
    axes.imshow(cells, cmap=ListedColormap(colours), vmin=0, vmax=RANKS - 1)
    axes.set_xticks([i - 0.5 for i in range(0, TOKENS + 1, part)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(0, TOKENS + 1, part)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.set(xlabel="tokens attended to", ylabel="tokens that attend", xticks=[], yticks=[])
    for rank, colour in enumerate(colours):
        pairs = sum(i + 1 for i in range(TOKENS) if holder[i] == rank)
        axes.plot(
            [], [], "s", color=colour, label=f"rank {rank}: parts {rank} and {2 * RANKS - 1 - rank}, {pairs} pairs"
        )
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set_title(f"One sequence over cp={RANKS}", fontsize=10)
    return figure


if __name__ == "__main__":
    draw().savefig(DOCS / "context.png", dpi=120)
