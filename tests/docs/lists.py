"""The lists of the pages that follow from the code. `python -m tests.docs.lists` writes them, as `make format` does.

| list | follows from |
|---|---|
| the lines `::: NAME` of `docs/api` | `__all__` of the packages |
| "The passes" in `docs/jit.md` | `PASSES`; a new row shows its pass's first sentence and settings |
| the options in `docs/planner.md` | those of `fzero plan` |
| the contents of `docs/trouble.md` | its headings |
| the optimizers in the reference, in the features and on the pages of the plugs | the functions of `fzero.optim` |

A list keeps its order and its words. New names follow, and names that are gone leave it.
"""

import importlib
import inspect
import pathlib
import re

from fzero.graph._pass_manager import PASSES, Pass, PassSettings
from tests.docs import options
from tests.optim.pages import pages as optimizer_pages
from tests.public_names import OF_FZERO, on_pages
from tests.sources import ROOT

REFERENCE = ROOT / "docs" / "api"
PASSES_PAGE = ROOT / "docs" / "jit.md"
TROUBLE_PAGE = ROOT / "docs" / "trouble.md"


def write_names(text: str, package: str, names: list[str]) -> str:
    """Write lines for names of a package below its last line in the first section that has one."""
    lines = text.split("\n")
    own = [i for i, line in enumerate(lines) if line.rpartition(".")[0] == f"::: {package}"]
    last = next((i for i in own if i + 1 not in own), None)
    if last is None:
        return text
    return "\n".join([*lines[: last + 1], *[f"::: {package}.{name}" for name in names], *lines[last + 1 :]])


def without_lost_names(text: str, packages: set[str]) -> str:
    """Leave out the lines of names that their packages do not have."""

    def is_lost(line: str) -> bool:
        package, _, name = line.removeprefix("::: ").rpartition(".")
        return package in packages and not hasattr(importlib.import_module(package), name)

    return "\n".join([line for line in text.split("\n") if not line.startswith("::: ") or not is_lost(line)])


def reference() -> dict[pathlib.Path, str]:
    """Write the pages of the reference."""
    texts = {path: path.read_text() for path in sorted(REFERENCE.glob("*.md"))}
    parents = {listed.rpartition(".")[0] for listed in OF_FZERO} - {""}
    packages = {name for name in parents if hasattr(importlib.import_module(name), "__path__")}
    texts = {path: without_lost_names(text, packages) for path, text in texts.items()}
    for package in sorted(packages):
        module = importlib.import_module(package)
        missing = [name for name in module.__all__ if name not in on_pages(package)]
        page = max(texts, key=lambda path: len(re.findall(rf"^::: {re.escape(package)}\.\w+$", texts[path], re.M)))
        texts[page] = write_names(texts[page], package, missing)
    return texts


def row_of(row: Pass) -> str:
    """Write a pass's row from its docstring and the settings that it reads."""
    effect = (inspect.getdoc(row.apply) or "").partition("\n")[0]
    settings = [f"`{name}`" for name in row.arguments.__code__.co_names if name in PassSettings._fields]
    return " | ".join([f"| `{row.name}`", effect, ", ".join(settings)]).rstrip() + " |"


def table_of_passes(text: str, passes: tuple[Pass, ...] = PASSES) -> str:
    """Write the table of passes, in the order of the tuple. Rows that are there keep their words."""
    before, head, rest = text.partition("| pass | effect | setting |\n| --- | --- | --- |\n")
    table, end, after = rest.partition("\n\n")
    there = {line.split("`")[1]: line for line in table.split("\n")}
    return before + head + "\n".join([there.get(row.name) or row_of(row) for row in passes]) + end + after


def anchor(heading: str) -> str:
    """Return what the site makes of a heading."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def contents(text: str) -> str:
    """Write the links to a page's headings between its marks, those of the third level below the second."""
    before, _, rest = text.partition("<!-- contents -->\n")
    _, end, after = rest.partition("<!-- /contents -->\n")
    code = re.sub(r"^```.*?^```", "", after, flags=re.MULTILINE | re.DOTALL)
    links = [
        f"{'    ' * (len(level) - 2)}- [{heading}](#{anchor(heading)})\n"
        for level, heading in re.findall(r"^(##|###) (.+)$", code, re.MULTILINE)
    ]
    return "".join([before, "<!-- contents -->\n\n", *links, "\n", end, after])


def pages() -> dict[pathlib.Path, str]:
    """Return the text of each page, with the lists as the code has them now."""
    passes = {PASSES_PAGE: table_of_passes(PASSES_PAGE.read_text())}
    trouble = {TROUBLE_PAGE: contents(TROUBLE_PAGE.read_text())}
    return reference() | passes | trouble | {options.PAGE: options.page()} | optimizer_pages()


if __name__ == "__main__":
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
