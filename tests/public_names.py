"""The names that the pages of `docs/api` list, and what each of them needs."""

import functools
import importlib
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

from tests.docs.pages import GUIDES, TUTORIAL
from tests.sources import ROOT

# what the pages list: names, and modules of which they show all public names
ON_PAGES = [
    listed
    for page in sorted(ROOT.glob("docs/api/*.md"))
    for listed in re.findall(r"^::: (fzero[\w.]*)$", page.read_text(), re.MULTILINE)
]
OF_PLUGS = tuple(listed for listed in ON_PAGES if listed.startswith("fzero.plugs."))  # whose libraries load for seconds
OF_FZERO = tuple(listed for listed in ON_PAGES if listed not in OF_PLUGS)

WITHOUT_BOUNDARY = ("tree", "testing")  # short walks, and what shows what it tested
STRATEGIES = {f"fzero.testing.{name}" for name in ("optimizers", "stages", "trees", "world_sizes")}


@functools.cache
def public_names(pages: tuple[str, ...]) -> Mapping[str, Any]:
    """Find the objects that lines of the pages list, by their names; of a module, all in its `__all__`."""
    names = {}
    for listed in pages:
        try:
            module = importlib.import_module(listed)
        except ModuleNotFoundError:
            module, _, name = listed.rpartition(".")
            names[listed] = getattr(importlib.import_module(module), name)
        else:
            names |= {f"{listed}.{name}": getattr(module, name) for name in module.__all__}
    return {name: value for name, value in names.items() if not inspect.ismodule(value)}


def on_pages(package: str) -> set[str]:
    """Return the names of a package that the pages describe: in a line, by names within, or as a name of another."""
    module = importlib.import_module(package)
    ids = {id(x) for x in public_names(OF_FZERO).values()}
    return {
        name
        for name in [*module.__all__, *getattr(module, "INTERNAL", ())]
        if any(f"{listed}.".startswith(f"{package}.{name}.") for listed in ON_PAGES) or id(getattr(module, name)) in ids
    }


def undocumented(names: Mapping[str, Any]) -> list[str]:
    """List the functions and classes without a docstring whose first line is a sentence."""
    results = []
    for name, value in names.items():
        doc = inspect.getdoc(value) or ""
        is_named = callable(value) and not isinstance(value, types.GenericAlias)
        if is_named and (len(doc.split()) <= 3 or not doc.split("\n")[0].endswith((".", ":"))):
            results.append(name)
    return results


def without_example(names: Mapping[str, Any]) -> list[str]:
    """List the functions whose docstrings have no example, but for the walks of trees and strategies of hypothesis."""
    return [
        name
        for name, value in names.items()
        if inspect.isfunction(value) and ">>>" not in (inspect.getdoc(value) or "")
        if not name.startswith("fzero.tree.") and name not in STRATEGIES
    ]


def without_boundary(names: Mapping[str, Any]) -> list[str]:
    """List the functions whose errors have no hints: `@api_boundary` sets `__wrapped__`."""
    return [
        name
        for name, value in names.items()
        if inspect.isfunction(value)
        and not hasattr(value, "__wrapped__")
        and name.rpartition(".")[0].removeprefix("fzero.") not in WITHOUT_BOUNDARY
    ]


def without_guide(names: Mapping[str, Any]) -> list[str]:
    """List the functions whose names no guide, no page of the tutorial and not the README has."""
    guides = "\n".join([page.read_text() for page in [*TUTORIAL, *GUIDES, ROOT / "README.md"]])
    words = set(re.findall(r"\w+", guides))
    return [name for name, value in names.items() if inspect.isfunction(value) and name.rpartition(".")[2] not in words]


def missing_parts(names: Mapping[str, Any]) -> list[str]:
    """Return a line for each public name that lacks something: all at once, so that one run of the tests says it."""
    parts = {
        "begin the docstring with a sentence": undocumented(names),
        "add an example that runs to the docstring": without_example(names),
        "add @api_boundary or @torch_hints": without_boundary(names),
        "say in a guide of docs/ what it is for": without_guide(names),
    }
    return [f"{name}: {remedy}" for remedy, missing in parts.items() for name in missing]
