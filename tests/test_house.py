"""The house: imports run one way, public names are documented, files stay small."""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

import fzero
from tests.mutants import MUTANTS

ROOT = pathlib.Path(fzero.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the ground up: a folder, or a file that lies flat, imports only from the floors below its own.
FLOORS = [
    ["_torch", "_notice", "_notebook", "_donated"],
    ["tree", "_tracebacks", "schedules"],
    ["axes"],
    ["collectives", "random"],
    ["layout"],
    ["ranks", "precision", "units"],
    ["optim", "graph", "data", "metrics"],
    ["profiling", "debug"],
    ["init"],
    ["transforms"],
    ["pipelines"],
    ["stages", "moe", "tp"],
    ["checkpoint", "tuning"],
    ["hf", "dcp"],
    ["nn"],
    ["testing", "__main__"],
]


def floor(module: str) -> int:
    name = module.split(".")[1]
    return next(i for i, row in enumerate(FLOORS) if name in row)


def imports(path: pathlib.Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fzero":
            deep = node.module != "fzero"
            found += [node.module] if deep else [f"fzero.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    module = "fzero." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if module == "fzero.__init__":
        return
    for imported in imports(path):
        same_package = imported.split(".")[1] == module.split(".")[1]
        assert same_package or floor(imported) < floor(module), f"{module} imports {imported}"


def test_private_torch_is_used_in_one_folder():
    for path in FILES:
        if path.parent != ROOT / "_torch":
            text = path.read_text()
            for private in ("torch._", "torch.utils._", "_functorch", "_subclasses"):
                assert private not in text, f"{path}: {private}"


def public() -> list[tuple[str, object]]:
    names = []
    folders = (
        "checkpoint",
        "data",
        "metrics",
        "moe",
        "moe.transformers",
        "tp",
        "hf",
        "dcp",
        "debug",
        "optim",
        "optim.schedules",
        "transforms",
        "nn",
        "pipelines",
        "random",
        "testing",
        "tree",
        "tuning",
        "units",
    )
    modules = ("fzero", *[f"fzero.{name}" for name in folders])
    for module in modules:
        m = importlib.import_module(module)
        names += [(f"{module}.{name}", getattr(m, name)) for name in m.__all__]
    return [(name, x) for name, x in names if not inspect.ismodule(x)]


@pytest.mark.parametrize("name,x", public(), ids=lambda x: x if isinstance(x, str) else "")
def test_public_names_are_documented(name, x):
    if callable(x) and not name.endswith(".Schedule"):
        doc = inspect.getdoc(x) or ""
        assert len(doc.split()) > 3, f"{name} has no docstring"
        assert doc.split("\n")[0].endswith((".", ":")), f"{name}: the first line is a sentence"


def test_public_functions_have_an_example():
    without = [
        name
        for name, x in public()
        if inspect.isfunction(x) and ">>>" not in (inspect.getdoc(x) or "") and not name.startswith("fzero.tree.")
    ]
    strategies = {f"fzero.testing.{name}" for name in ("optimizers", "stages", "trees", "world_sizes")}
    assert set(without) <= strategies, without


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_idea(path):
    assert len(path.read_text().splitlines()) <= 500


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring, without its example and its tables."""
    prose = re.sub(r"^\s*\|.*\|$", "", re.split(r"^\s*Example:$", text, flags=re.MULTILINE)[0], flags=re.MULTILINE)
    # an empty line ends a sentence, as does the next entry of Args, Raises or Attributes
    parts = re.split(r"\n\s*\n|\n(?=\s*[\w*`]+(?: \(.*?\))?:(?:\s|$))", prose)
    return [" ".join(x.split()) for part in parts for x in re.split(r"(?<=[.!?])\s+", part)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_docstring_is_in_plain_sentences(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            where = f"{path}:{getattr(node, 'lineno', 1)}"
            assert not doc.startswith("Tell "), f"{where}: say what is returned"
            for sentence in sentences(doc):
                assert len(sentence.split()) <= 30, f"{where}: cut it in two: {sentence}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_still_finds_its_line(mutant):
    assert mutant.planted(text := (ROOT / mutant.file).read_text()) != text


def test_a_class_has_a_name_of_its_own():
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_only_so_many_private_modules_are_imported_from_other_folders():
    """The number may fall, and is to become 0: then a folder's `__init__` shows all that others may use."""
    found = []
    for path in FILES:
        folder = path.relative_to(ROOT).parts[0]
        for module in imports(path):
            _, *parts = module.split(".")
            private = any(part.startswith("_") for part in parts[1:])
            found += [f"{path.relative_to(ROOT)}: {module}"] if private and parts[0] != folder else []
    assert len(found) <= 119, found


def test_a_word_of_the_glossary_is_defined_once():
    rows = re.findall(r"^\| (\*\*.+?) \|", (ROOT.parent / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row)]
    assert len(words) > 70 and sorted(words) == sorted({*words})


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_files_that_a_page_names_exist(page):
    """And a name in capitals, said to be in a file, is made there."""
    text = (ROOT.parent / page).read_text()
    paths = re.findall(r"`((?:fzero|tests|examples|benchmarks|docs)/[\w/.]+)`", text) + re.findall(
        r"\]\((?!http)([\w/.]+)", text
    )
    here = (ROOT.parent / page).parent
    missing = [p for p in paths if not (ROOT.parent / p).exists() and not (here / p).exists()]
    assert paths and not missing, missing
    for name, path in re.findall(r"`([A-Z_]{4,})` in \[?`([\w/.]+\.py)`", text):
        assert re.search(rf"^{name}\b.*= ", (ROOT.parent / path).read_text(), re.MULTILINE), f"{name} is not in {path}"
