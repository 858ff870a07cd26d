"""Draw the pictures of docs/architecture.md: `python docs/_diagrams.py` writes docs/packages.svg and docs/way.svg.

The first shows the packages of fzero/ and their imports, as the code has them now. The second is the way of one
parameter, in words that stand here.
"""

import ast
import pathlib
from collections import defaultdict
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

DOCS = pathlib.Path(__file__).parent
FZERO = DOCS.parent / "fzero"
INK, PAPER, SHADE = "#24292f", "#ffffff", "#eef2f7"

# what stands under a package's name
CAPTIONS = {
    "_torch": "private torch APIs",
    "_liveness": "who is lost",
    "tree": "flatten, map, paths",
    "parallel.schedules": "who does what when",
    "axes": "what an axis name is bound to",
    "collectives": "linear maps over ranks",
    "random": "draws by key",
    "codecs": "tensors in fewer bits",
    "sharding": "units, and boxes of shards",
    "ranks": "where ranks are",
    "optim": "(init, update) pairs",
    "graph": "one scheduled graph",
    "data": "batches by number",
    "observe": "metrics, profiles, nans",
    "transforms": "gather, gradients, remat",
    "parallel.pipeline": "a loss on many ranks",
    "parallel.experts": "route, dispatch, balance",
    "parallel.tensor": "parts of layers",
    "parallel.context": "parts of sequences",
    "zero": "ZeRO 0 to 3",
    "checkpoint": "save and load any layout",
    "local_sgd": "average seldom",
    "elastic": "ranks come and go",
    "tuning": "what fits, what it costs",
    "nn": "modules as functions",
    "plugs": "loops of others, sharded",
    "testing": "laws for your step",
}

# the way of one parameter at stage 3, jitted: a package, and what happens there
WAY = [
    ("zero", "a leaf is made,\nsharded, freed"),
    ("sharding", "its shard waits\nin a Shard box"),
    ("graph", "trace, passes,\nplan: once"),
    ("collectives", "all_gather:\nfull leaf"),
    ("transforms", "loss, backward:\nits gradient"),
    ("collectives", "reduce_scatter:\ngradient shard"),
    ("optim", "update of the\nshard, in place"),
]


def package_of(module: str) -> str:
    """Return the package of a module, without `fzero.`: a folder, a file, or a folder of `parallel`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "parallel" else 1])


def imports() -> dict[str, set[str]]:
    """Return for each package the packages that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(FZERO.rglob("*.py")):
        package = package_of(".".join(path.relative_to(FZERO).with_suffix("").parts).removesuffix(".__init__"))
        if package == "__init__":
            continue
        found[package] |= set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fzero":
                deep = node.module not in ("fzero", "fzero.parallel")
                names = [node.module or ""] if deep else [f"{node.module}.{alias.name}" for alias in node.names]
                found[package] |= {package_of(name.removeprefix("fzero.")) for name in names} - {package}
    return dict(found)


def layers(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Return the layer of each package: one above the highest that it imports."""
    levels: dict[str, int] = {}

    def level(package: str) -> int:
        if package not in levels:
            levels[package] = 1 + max([level(other) for other in arrows[package]], default=-1)
        return levels[package]

    for package in arrows:
        level(package)
    return levels


def needed(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """List the arrows that do not follow from others: where a package imports one that its imports do not reach."""

    def reach(package: str) -> set[str]:
        return set().union(*[{other} | reach(other) for other in arrows[package]])

    return [
        (package, other)
        for package, others in arrows.items()
        for other in others
        if not any(other in reach(between) for between in others)
    ]


def box(axes: Any, x: float, y: float, width: float, height: float, title: str, caption: str) -> None:
    """Draw a package."""
    shape = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.08", fc=SHADE, ec=INK, lw=1)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + 0.68 * height, title, ha="center", va="center", weight="bold", color=INK, size=10)
    axes.text(x + width / 2, y + 0.3 * height, caption, ha="center", va="center", color=INK, size=7.5)


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    """Return an empty figure, a unit an inch, and its axes."""
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def arrow(axes: Any, start: tuple[float, float], stop: tuple[float, float]) -> None:
    """Draw an arrow."""
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=8, color=INK, lw=0.7, alpha=0.6))


def draw_packages() -> Figure:
    """Draw the packages, layer by layer, and the imports between them."""
    arrows = {package: others for package, others in imports().items() if package in CAPTIONS}
    arrows = {package: others & set(CAPTIONS) for package, others in arrows.items()}
    levels = layers(arrows)
    rows = [sorted(package for package in levels if levels[package] == i) for i in range(max(levels.values()) + 1)]
    wide, high, gap = 2.0, 0.62, 0.42
    width = max(len(row) for row in rows) * (wide + 0.4) + 0.4
    figure, axes = canvas(width, len(rows) * (high + gap) + gap)
    places = {}
    for i, row in enumerate(rows):
        left = (width - len(row) * wide - (len(row) - 1) * 0.4) / 2
        for j, package in enumerate(row):
            places[package] = (left + j * (wide + 0.4), gap + i * (high + gap))
    for package, other in needed(arrows):
        (x, y), (u, v) = places[package], places[other]
        arrow(axes, (x + wide / 2, y), (u + wide / 2, v + high))
    for package, (x, y) in places.items():
        box(axes, x, y, wide, high, package, CAPTIONS[package])
    return figure


def draw_way() -> Figure:
    """Draw the way of one parameter."""
    wide, high, gap = 1.35, 0.95, 0.28
    width = len(WAY) * (wide + gap) + gap
    figure, axes = canvas(width, high + 0.9)
    lefts = [gap + i * (wide + gap) for i in range(len(WAY))]
    for x, (package, caption) in zip(lefts, WAY, strict=True):
        box(axes, x, 0.55, wide, high, package, caption)
    for x in lefts[1:]:
        arrow(axes, (x - gap, 0.55 + high / 2), (x, 0.55 + high / 2))
    first, last = lefts[3] + wide / 2, lefts[-1] + wide / 2
    axes.plot([first, first, last, last], [0.5, 0.25, 0.25, 0.5], color=INK, lw=0.9, alpha=0.6)
    axes.text((first + last) / 2, 0.08, "each step", ha="center", color=INK, size=8)
    return figure


def draw_idea() -> Figure:
    """Draw the three trees of training on four ranks, by stage: replicated, or each rank's quarter."""
    trees, ranks, size, gap, wide = ("parameters", "gradients", "optimizer state"), 4, 0.5, 0.1, 2.9
    notes = (
        "as DDP",
        "each rank updates its quarter",
        "gradients arrive as quarters",
        "parameters are gathered, unit by unit",
    )
    figure, axes = canvas(0.95 + 3 * wide + 3.3, 4 * 0.8 + 0.75)
    for column, tree in enumerate(trees):
        center = 0.95 + column * wide + (ranks * (size + gap) - gap) / 2
        axes.text(center, 3.55, tree, ha="center", weight="bold", color=INK, size=10)
    for stage, note in enumerate(notes):
        bottom = (3 - stage) * 0.8 + 0.15
        axes.text(0.1, bottom + size / 2, f"stage {stage}", va="center", weight="bold", color=INK, size=10)
        axes.text(0.95 + 3 * wide, bottom + size / 2, note, va="center", color=INK, size=9)
        for column in range(3):
            for rank in range(ranks):
                left = 0.95 + column * wide + rank * (size + gap)
                sharded = stage > (2, 1, 0)[column]
                axes.add_patch(Rectangle((left, bottom), size, size, fc=SHADE, ec=INK, lw=0.8))
                low, part = (1 - (rank + 1) / ranks, 1 / ranks) if sharded else (0.0, 1.0)
                fill = Rectangle((left, bottom + low * size), size, part * size, fc=INK, alpha=0.65, lw=0)
                axes.add_patch(fill)
    return figure


def main() -> None:
    """Write the pictures."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fzero", "font.family": "sans-serif"}):
        for name, figure in (("packages", draw_packages()), ("way", draw_way()), ("idea", draw_idea())):
            figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
