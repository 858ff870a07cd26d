"""The structure of the code: imports run one way, public names are documented, files stay small."""

import ast
import functools
import importlib
import pathlib
import re
from importlib.util import find_spec

import pytest

import fzero
from tests.cuda.faults import FAULTS
from tests.mutants import MUTANTS
from tests.mutants.places import Place, symbols, tree_of
from tests.public_names import OF_FZERO, missing_parts, on_pages, public_names
from tests.sources import imports_of, nodes_of, python_files, text_of

ROOT = pathlib.Path(fzero.__file__).parent
FILES = python_files("fzero")

# From the lowest up: a package, or a file beside the packages, imports only from layers below its own.
LAYERS = [
    ["_torch", "_notice", "_format", "_registry", "_arguments", "_dtypes"],
    ["_names", "_call_hints"],
    ["_liveness", "_report"],
    ["_tracebacks"],
    ["_donated"],
    ["tree", "parallel.schedules"],
    ["axes"],
    ["collectives", "random"],
    ["codecs"],
    ["sharding"],
    ["ranks"],
    ["optim", "graph", "data"],
    ["observe"],
    ["transforms"],
    ["parallel.pipeline", "parallel.tensor", "parallel.experts", "parallel.context"],
    ["zero"],
    ["checkpoint"],
    ["local_sgd"],
    ["elastic"],
    ["nn"],
    ["tuning"],
    ["errors"],
    ["plugs"],
    ["testing", "examples", "__main__"],
]
# Files that other packages may import: namespaces of their own, and files that are imported only when they are used.
OPEN = {
    "axes.lockstep",
    "checkpoint.dcp",
    "checkpoint.hf",
    "collectives.gloo",
    "graph.loop",
    "parallel.experts.transformers",
    "tuning.command",
}
TOP = [
    "PerRank",
    "Precision",
    "evaluate",
    "gather",
    "jit",
    "load",
    "mesh",
    "partition",
    "pipeline",
    "plan",
    "predict",
    "profile",
    "reduce_scatter",
    "remat",
    "save",
    "scaled_value_and_grad",
    "shard",
    "tune",
    "value_and_grad",
]
PACKAGES = [
    "axes",
    "checkpoint",
    "codecs",
    "collectives",
    "data",
    "elastic",
    "errors",
    "graph",
    "local_sgd",
    "nn",
    "observe",
    "optim",
    "parallel",
    "plugs",
    "random",
    "ranks",
    "sharding",
    "transforms",
    "tree",
    "tuning",
    "zero",
]


@functools.cache
def module_of(path: pathlib.Path) -> str:
    """Return the name that a file is imported by, without `fzero.`: an `__init__` by its folder's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return the package of a module: a folder or a file of `fzero/`, or a folder of `fzero/parallel/`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "parallel" else 1])


def layer_of(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if package_of(module) in layer)


@functools.cache
def imports(path: pathlib.Path) -> list[str]:
    """List the modules of fzero that a file imports, or imports names from."""
    results = []
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fzero":
            for alias in node.names:
                inner = ROOT.parent.joinpath(*node.module.split("."), alias.name)
                deep = (inner / "__init__.py").is_file() or inner.with_suffix(".py").is_file()
                results.append(f"{node.module}.{alias.name}" if deep else node.module)
        elif isinstance(node, ast.Import):
            results += [alias.name for alias in node.names if alias.name.startswith("fzero.")]
    return [name.removeprefix("fzero.") for name in results if name != "fzero"]


INSIDE = [
    path
    for path in FILES
    if path.relative_to(ROOT) not in (pathlib.Path("__init__.py"), pathlib.Path("parallel/__init__.py"))
]


def test_imports_run_one_way():
    for path in INSIDE:
        module = module_of(path)
        for imported in imports(path):
            is_below = package_of(imported) == package_of(module) or layer_of(imported) < layer_of(module)
            assert is_below, f"{module} imports {imported}"


# The rooms of a package and the files beside them, the lowest first; its other files lie above them.
ROOMS = {
    "checkpoint": [["_error"], ["_object_store"], ["_files"], ["layout"]],
    "graph": [
        ["_collector", "_polynomials", "ir"],
        ["loop"],
        ["planning", "trace"],
        ["passes"],
        ["run"],
    ],
    "nn": [
        ["_float8", "_linear_cross_entropy", "_module_writes"],
        ["_copy", "_lazy_logits", "_module_checks", "_remat_blocks"],
        ["_apply", "_context", "_functional", "_matmul_precision"],
        ["split"],
    ],
    "optim": [
        ["checks"],
        ["_hyperparams", "_offload_plan", "_precision", "_schedules"],
        ["_base", "moments"],
        ["_norms"],
        ["clipping", "matrices", "wrappers"],
    ],
    "sharding": [["_spec", "_stacked_items"], ["_boxes", "_pieces"], ["units"], ["elements"], ["maps"]],
    "tuning": [
        ["_search_space", "machines", "long_runs"],
        ["_row", "_configured_step", "models", "measurements"],
        ["offload", "search"],
        ["exports"],
    ],
}

WITHOUT_FACE = {"graph.passes"}  # whose room of schedules is imported by itself


def room_of(module: str) -> int:
    """Return the position of a module's room in `ROOMS`."""
    package, _, rest = module.partition(".")
    rooms = ROOMS[package]
    return next((i for i, room in enumerate(rooms) if rest.partition(".")[0] in room), len(rooms))


def rooms_imported(package: str) -> list[tuple[str, str]]:
    """List each module of a package with each module of the package that it imports."""
    modules = {module_of(path): path for path in INSIDE if module_of(path).split(".")[0] == package}
    return [(module, name) for module, path in modules.items() for name in imports(path) if name in modules]


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_of_a_package_import_one_way(package):
    for module, imported in rooms_imported(package):
        assert room_of(imported) <= room_of(module), f"{module} imports {imported}"


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_is_imported_by_its_face(package):
    for module, imported in rooms_imported(package):
        room = imported.rpartition(".")[0]
        is_within = imported.count(".") > 1 and room not in WITHOUT_FACE
        assert not is_within or module.startswith(f"{room}.") or module == room, (
            f"{module} imports {imported}: import from its folder, whose __init__ lists the name"
        )


def test_a_folder_has_few_files():
    for folder in {path.parent for path in FILES} - {ROOT / "_torch"}:
        assert len([*folder.glob("*.py")]) <= 16, f"{folder}: make a room of files of one idea"


def test_other_packages_are_imported_by_their_public_names():
    """A package's `__init__` lists all that others may use; the files of `_torch` are open to all."""
    for path in INSIDE:
        module = module_of(path)
        for imported in imports(path):
            if package_of(imported) not in (package_of(module), "_torch"):
                is_open = imported == package_of(imported) or imported in OPEN
                assert is_open, f"{module} imports {imported}: import from its package"


@functools.cache
def listed_names(path: pathlib.Path, name: str = "__all__") -> list[str]:
    """Return a list of names in a file: its `__all__`, or its `INTERNAL`."""
    for node in nodes_of(path, ast.Assign):
        if ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return []


# The packages, each with its `__init__`. A folder within a package needs no list, since no other package imports it.
INITS = {
    module_of(path): path
    for path in INSIDE
    if path.name == "__init__.py" and package_of(module_of(path)) == module_of(path) != "_torch"
}


@pytest.mark.parametrize("package", INITS)
def test_a_package_lists_its_names(package):
    """A name that it imports is in one of its two lists, and no name is in both."""
    path, module = INITS[package], importlib.import_module(f"fzero.{package}")
    names = [*listed_names(path), *listed_names(path, "INTERNAL")]
    imported = {
        alias.asname or alias.name
        for node in tree_of(text_of(path)).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fzero")
        for alias in node.names
    }
    assert listed_names(path) and sorted(names) == sorted({*names})
    for listed in (listed_names(path), listed_names(path, "INTERNAL")):
        assert listed == sorted(listed, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    files = [name for name in names if find_spec(f"fzero.{package}.{name}")]  # imported at their first use
    assert imported - {"missing_names"} <= {*names} and all(name in files or hasattr(module, name) for name in names)


def test_a_private_file_lists_what_other_files_import():
    listed = {
        f"fzero.{module_of(p)}": listed_names(p) for p in INSIDE if p.name.startswith("_") and p.stem != "__init__"
    }
    for path in FILES:
        for node in nodes_of(path, ast.ImportFrom):
            if node.module in listed:
                left_out = {alias.name for alias in node.names} - {*listed[node.module]}
                assert not left_out, f"{path} imports {left_out}: list it in the __all__ of {node.module}"


CODE = r"```python\n.*?```|`[^`\n]+`"
CONTRIBUTING = (ROOT.parent / "CONTRIBUTING.md").read_text()
CONTRIBUTED = {word for code in re.findall(CODE, CONTRIBUTING, re.DOTALL) for word in re.findall(r"\w+", code)}


IN_RECIPES = {
    (package, name)
    for package, names in re.findall(r"^from fzero\.([\w.]+) import (.*)$", CONTRIBUTING, re.MULTILINE)
    for name in re.findall(r"\w+", names)
}


def is_named_elsewhere(place: Place) -> bool:
    """Return whether a name is an entry point's, an operation's, which graphs show, or one that contributors write."""
    name, decorators = getattr(place.node, "name", ""), getattr(place.node, "decorator_list", [])
    is_operation = any("OneNode" in ast.unparse(d) for d in decorators)
    return name == "main" or is_operation or name in CONTRIBUTED


@functools.cache
def attributes_read() -> set[tuple[str, str]]:
    """Return the attributes that fzero reads, each with the last word before it, as in `schedules.NAMES`."""
    nodes = [node for path in FILES for node in nodes_of(path, ast.Attribute)]
    words = {ast.Name: "id", ast.Attribute: "attr"}
    return {(getattr(node.value, words.get(type(node.value), ""), ""), node.attr) for node in nodes}


def test_a_name_that_only_its_file_uses_has_an_underscore():
    """The others have none: another file imports them, or they are listed by a module that a user imports."""
    imported = {
        (node.module, alias.name)
        for path in FILES
        for node in nodes_of(path, ast.ImportFrom)
        if node.module
        for alias in node.names
    }
    read = attributes_read()
    for path in FILES:
        module = module_of(path)
        is_public = not any(part.startswith("_") for part in module.split("."))
        for name, places in symbols(tree_of(text_of(path))).items():
            if path.name == "__init__.py" or "." in name or name.startswith("__") or is_named_elsewhere(places[0]):
                continue
            listed = is_public and name in listed_names(path)
            used = (f"fzero.{module}", name) in imported or (module.rpartition(".")[2], name) in read
            assert name.startswith("_") or used or listed, f"{path}: only this file uses {name}: call it _{name}"
            assert not (name.startswith("_") and used), f"{path}: another file uses {name}: drop its underscore"


def test_the_top_level_has_few_names_and_the_packages():
    assert sorted(fzero.__all__) == sorted(TOP + PACKAGES)


def test_one_makers_devices_are_used_in_one_folder():
    """Elsewhere `torch.accelerator` serves the GPUs of all makers."""
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != "_torch":
            assert "torch.cuda" not in text_of(path), path


def test_private_torch_is_used_in_one_folder():
    for path in FILES:
        if path.parent != ROOT / "_torch":
            text = text_of(path)
            for private in ("torch._", "torch.utils._", "_functorch", "_subclasses"):
                assert private not in text, f"{path}: {private}"


@pytest.mark.parametrize("package", INITS)
def test_public_names_are_those_on_the_pages(package):
    """A module is public if it has a page, or a page has a name within it."""
    module, documented = importlib.import_module(f"fzero.{package}"), on_pages(f"fzero.{package}")
    left_out, internal = {*module.__all__} - documented, documented - {*module.__all__}
    assert not left_out, f"docs/api lacks {left_out}: `make format` writes the lines, or list them in INTERNAL"
    assert not internal, f"docs/api has {internal}, so it is public: list it in __all__"


INTERNAL = [(package, name) for package, path in INITS.items() for name in listed_names(path, "INTERNAL")]


def test_internal_names_are_used_by_other_packages():
    used = set()
    for path in FILES:
        for node in nodes_of(path, ast.ImportFrom):
            if node.module and package_of(module_of(path)) != node.module[6:]:
                used |= {(node.module[6:], alias.name) for alias in node.names}
                used |= {tuple(node.module[6:].rsplit(".", 1))}
    used |= attributes_read() | IN_RECIPES
    unused = [
        f"fzero.{package}.{name}"
        for package, name in INTERNAL
        if not {(package, name), (package.rpartition(".")[2], name)} & used
    ]
    assert not unused, "no other package uses it: take it out of the __init__"


def test_readers_are_shown_public_names():
    root = ROOT.parent
    examples = [*root.glob("examples/**/*.py"), *root.glob("examples/*.ipynb")]
    for page in [root / "README.md", *root.glob("docs/**/*.md"), *examples]:
        text = page.read_text()
        read = set(re.findall(r"\b(\w+)\.(?=(\w+))", text))  # pairs may overlap, as in `a.b.c`
        for package, imported in re.findall(r"from fzero\.([\w.]+) import (.*)", text):
            read |= {(package, name) for name in re.findall(r"\w+", imported)}
        for package, name in INTERNAL:
            assert not read & {(package, name), (package.rpartition(".")[2], name)}, (
                f"{page}: {package}.{name} is internal"
            )


def test_public_names_are_documented():
    """Those of the plugs, which need other libraries, have such tests in `tests/plugs`."""
    names = public_names(OF_FZERO)
    assert not missing_parts(names), "\n".join(missing_parts(names))


def test_a_file_is_one_idea():
    for limit, folder in [(500, "fzero"), (600, "tests")]:
        for path in python_files(folder):
            count = len(text_of(path).splitlines())
            assert count <= limit, f"{path}: {count} lines of at most {limit}: move one idea into a file of its own"


def titles(text: str) -> list[str]:
    """List the section titles of a file: comments of one line that begin it, between empty lines."""
    return re.findall(r"(?<=\n\n)# .*(?=\n\n)", text)


def test_a_file_has_few_sections():
    for path in FILES:
        result = titles(text_of(path))
        assert len(result) <= 2, f"{path}: move a section to a file of its own, or leave out its title: {result}"
    assert titles("a = 1\n\n# One.\n\nb = 2\n\n# of b\nc = 3\n") == ["# One."]
    for path in python_files():
        assert not re.search(r"^ *# ?[-=#]{3}", text_of(path), re.MULTILINE), f"{path}: a title is a plain comment"


def test_a_private_file_has_a_name_of_its_own():
    """A traceback, or an editor's tab, then says which one it is. Public files are named by their packages."""
    results: dict[str, list[str]] = {}
    for path in FILES:
        if path.name.startswith("_") and not path.name.startswith("__"):
            results.setdefault(path.name, []).append(module_of(path))
    assert {name: modules for name, modules in results.items() if len(modules) > 1} == {}


def test_a_statement_over_several_lines_is_one_assignment_with_its_comment_above():
    for path in FILES:
        text = text_of(path)
        for node in nodes_of(path, ast.Assign):
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                assert node.lineno == node.end_lineno, f"{path}:{node.lineno}: assign one value a line"
        late = re.search(r"^ *[\])}]+  # (?!pyright|noqa).*", text, re.MULTILINE)
        assert not late, f"{path}: put the comment above the statement: {late}"


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring, without its example and its tables."""
    prose = re.sub(r"^\s*\|.*\|$", "", re.split(r"^\s*Example:$", text, flags=re.MULTILINE)[0], flags=re.MULTILINE)
    # an empty line ends a sentence, as does the next entry of Args, Raises or Attributes
    parts = re.split(r"\n\s*\n|\n(?=\s*[\w*`]+(?: \(.*?\))?:(?:\s|$))", prose)
    return [" ".join(x.split()) for part in parts for x in re.split(r"(?<=[.!?])\s+", part)]


def test_a_docstring_is_in_plain_sentences():
    for path in FILES:
        for node in [n for kind in (ast.Module, ast.ClassDef, ast.FunctionDef) for n in nodes_of(path, kind)]:
            if doc := ast.get_docstring(node):
                where = f"{path}:{getattr(node, 'lineno', 1)}"
                assert not doc.startswith("Tell "), f"{where}: say what is returned"
                for sentence in sentences(doc):
                    assert len(sentence.split()) <= 30, f"{where}: cut it in two: {sentence}"


def test_mutants_still_find_their_lines():
    """Where one does not, the error says which symbol, or which place in it, the file does not have any more."""
    for file in sorted({m.file for m in MUTANTS}):
        text = (ROOT / file).read_text()
        for mutant in [m for m in MUTANTS if m.file == file]:
            assert mutant.plant(text) != text
    for fault in FAULTS.values():
        text = (ROOT / fault.file).read_text()
        assert fault.change.plant(text, fault.symbol) != text, fault


def test_a_class_has_a_name_of_its_own():
    """The underscore of a private class is not a difference: a reader who says the name must mean one class."""
    results: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(path, ast.ClassDef):
            results.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in results.items() if len(files) > 1} == {}


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass or a NamedTuple."""
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list) or "NamedTuple" in map(
        ast.unparse, node.bases
    )


def test_a_wide_record_is_built_by_keyword():
    """By position two fields of one type may be swapped, and no type is wrong."""
    records = {node.name for path in FILES for node in nodes_of(path, ast.ClassDef) if is_record(node)}
    for path in python_files("fzero", "examples"):
        for call in nodes_of(path, ast.Call):
            name = ast.unparse(call.func).rpartition(".")[2]
            is_wide = name in records and len(call.args) > 4
            assert not is_wide, f"{path}:{call.lineno} gives {name} {len(call.args)} arguments by position: name them"


def test_a_word_of_the_glossary_is_defined_once():
    rows = re.findall(r"^\| (\*\*.+?) \|", (ROOT.parent / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word.lower() for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row)]
    assert len(words) > 70 and sorted(words) == sorted({*words})


PAGES = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *sorted((ROOT.parent / "docs").rglob("*.md"))]
SCRIPTS = [path.relative_to(ROOT.parent).as_posix() for path in python_files()]
FOREIGN = {"train.py", "zero_to_fp32.py"}  # the reader's script, and DeepSpeed's


def missing_scripts(text: str) -> set[str]:
    """Return the names of Python files in a page's text that no file of the repository ends with.

    In a code block only paths from the repository's root count: the reader makes the other files. In a row of
    architecture.md's table a short name is that of a file in the row's package.
    """
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    names = {*re.findall(r"(?<![\w/.*-])(?:\.\./)*([\w/-]+\.py)\b", prose)} - FOREIGN
    names |= {*re.findall(r"(?<![\w/.*-])((?:fzero|tests|examples|benchmarks)/[\w/-]+\.py)\b", text)}
    missing = {name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in SCRIPTS)}
    for package, row in re.findall(r"^\| `([\w/]+/)` \|(.*)$", prose, re.MULTILINE):
        short = [name for name in re.findall(r"`(_\w+\.py)`", row) if f"fzero/{package}{name}" not in SCRIPTS]
        missing |= {f"fzero/{package}{name}" for name in short}
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT.parent)))
def test_the_scripts_that_a_page_names_exist(page):
    assert not missing_scripts(page.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "the file `_axis.py` binds it",
        "[the mesh](../fzero/ranks/_meshes.py)",
        "see axes/_spmd.py",
        "```sh\npython examples/gone.py\n```",
        "| `axes/` | An axis is bound. | `_spmd.py` |",
    ],
)
def test_a_script_that_is_gone_is_found_by_any_name(text):
    page = (ROOT.parent / "docs/architecture.md").read_text()
    assert len(missing_scripts(f"{page}\n{text}\n")) == 1
    assert not missing_scripts("see `_scope.py`, `axes/_scope.py` and [it](../fzero/axes/_scope.py), run by train.py")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_files_that_a_page_names_exist(page):
    """A name in capitals that a page places in a file is made there."""
    text = (ROOT.parent / page).read_text()
    paths = re.findall(r"`((?:fzero|tests|examples|benchmarks|docs)/[\w/.]+)`", text) + re.findall(
        r"\]\((?!http)([\w/.]+)", text
    )
    here = (ROOT.parent / page).parent
    missing = [p for p in paths if not (ROOT.parent / p).exists() and not (here / p).exists()]
    assert paths and not missing, missing
    for name, path in re.findall(r"`([A-Z_]{4,})` in \[?`([\w/.]+\.py)`", text):
        assert re.search(rf"^{name}\b.*= ", (ROOT.parent / path).read_text(), re.MULTILINE), f"{name} is not in {path}"


def test_no_test_module_is_imported():
    """Code that several test modules share lies in a module beside them, such as a folder's `helpers.py`."""
    tests = ROOT.parent / "tests"
    for path in python_files("tests", "benchmarks"):
        for node in imports_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                itself = ".".join(path.relative_to(tests.parent).with_suffix("").parts)
                modules = [node.module, *[f"{node.module}.{alias.name}" for alias in node.names]]
                shared = [m for m in modules if m.rpartition(".")[2].startswith("test_") and m != itself]
                shared = [m for m in shared if tests.parent.joinpath(*m.split(".")).with_suffix(".py").is_file()]
                assert not shared, f"{path} imports {shared}"


ALIASES = {"command", "moe", "plug", "tp"}  # short names of public modules, and of a `__main__`


def renamed_modules(path: pathlib.Path) -> list[str]:
    """List a file's imports of a module of fzero under another word than its own."""
    renamed = []
    for node in imports_of(path):
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name, alias in [(f"{prefix}{x.name}", x.asname) for x in node.names if x.asname]:
            module = ROOT.parent.joinpath(*name.split("."))
            is_module = module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
            if name.startswith("fzero.") and is_module and alias not in (module.name, *ALIASES):
                renamed.append(f"{name} as {alias}")
    return renamed


def test_a_module_is_imported_by_its_own_name(tmp_path):
    for path in python_files():
        assert not renamed_modules(path), path
    script = tmp_path / "script.py"
    script.write_text("import fzero.graph.ir._nodes as nodes\nfrom fzero.optim import _adam as a, adamw as b")
    assert {*renamed_modules(script)} == {"fzero.graph.ir._nodes as nodes", "fzero.optim._adam as a"}


def test_names_of_tests_have_articles_and_subjects():
    names = re.findall(r"^def (test_\w+)", "\n".join(map(text_of, python_files("tests"))), re.MULTILINE)
    assert not [name for name in names if re.search(r"_a_(?!one|once|uni|use|eu|ufunc)[aeiou]", name)]
    riddle = r"what_is|^test_(it|its|they|their|what|so|something)_|_(is|are)_(told|said)(_|$)|_ones_own"
    assert not [name for name in names if re.search(riddle, name)], "a noun in place of 'what', 'it', 'one' and 'they'"
    turns = [name for name in names if re.search(r"_turns?(_|$)", name) and "_in_turn" not in name]
    assert not turns, "an iteration of a loop is called iteration"
