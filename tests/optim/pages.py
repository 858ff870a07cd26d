"""The lists of optimizers in the pages, from the functions of fzero.optim. Lists keep their order; new names follow."""

import inspect
import pathlib
import re
from collections.abc import Iterable

from fzero import optim
from fzero.plugs._param_groups import _OPTIMIZERS

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "api" / "optim.md"
FEATURES = ROOT / "docs" / "features.md"
PLUGS = [
    *[ROOT / "docs" / f"{name}.md" for name in ("trainer", "lightning", "accelerate")],
    ROOT / "fzero" / "plugs" / "accelerate.py",
]
SHOWN_WITH_THEIR_PAGES = ("OptState", "StochasticRoundingState")  # beside the functions that they belong to


def whole_optimizers() -> list[str]:
    """Names of the public functions that take a rate and return a whole optimizer, not a link of a chain."""
    functions = {name: f for name in optim.__all__ if inspect.isfunction(f := getattr(optim, name))}
    first = {name: next(iter(inspect.signature(f).parameters), None) for name, f in functions.items()}
    return [name for name in first if first[name] == "learning_rate" and not name.startswith("scale_by_")]


def merge(old: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return names in the order of a list, those that it lacks behind it."""
    wanted = [*names]
    kept = [name for name in old if name in wanted]
    return [*kept, *[name for name in wanted if name not in kept]]


def with_lines(page: str, heading: str, names: Iterable[str]) -> str:
    """Write the lines `::: fzero.optim.NAME` below a heading of the reference."""
    before, mark, rest = page.partition(f"## {heading}\n")
    section, more, after = rest.partition("\n## ")
    lines = [
        f"::: fzero.optim.{name}" for name in merge(re.findall(r"^::: fzero\.optim\.(\w+)$", section, re.M), names)
    ]
    return f"{before}{mark}\n" + "\n".join(lines) + f"\n{more}{after}"


def reference() -> str:
    """Write the page of the reference."""
    states = [x for x in optim.__all__ if x.endswith("State") and x not in SHOWN_WITH_THEIR_PAGES]
    return with_lines(with_lines(REFERENCE.read_text(), "Optimizers", whole_optimizers()), "States", states)


def features() -> str:
    """Write the sentence of the features that lists the optimizers."""

    def names(match: re.Match[str]) -> str:
        return ", ".join([f"`{name}`" for name in merge(re.findall(r"\w+", match[0]), whole_optimizers())]) + ", "

    return re.sub(r"(?<=in optax style: )(?:`\w+`, )+", names, FEATURES.read_text())


def of_plugs(text: str) -> str:
    """Write the sentence of a plug's page that lists torch's optimizers."""

    def names(match: re.Match[str]) -> str:
        *first, last = merge(re.findall(r"[A-Z]\w+", match[0]), _OPTIMIZERS)
        return f"torch's {', '.join(first)} {match[1]} {last}"

    return re.sub(r"torch's (?:[A-Z]\w+, )+[A-Z]\w+ (and|or) [A-Z]\w+", names, text)


def pages() -> dict[pathlib.Path, str]:
    """Return the text of each page, with the lists of the optimizers that there are now."""
    plugs = {path: of_plugs(path.read_text()) for path in PLUGS}
    return {REFERENCE: reference(), FEATURES: features(), **plugs}
