"""The pages of docs/: their Python runs and prints what they say, tutorials end in a comparison, links lead somewhere.

The ```python blocks of a page run in order in one namespace. The ```text block right after one shows what it prints,
`...` standing for anything. A block titled as a file is also written, and a ```sh block that launches it is run.
Not run: ```python {.notest}, and blocks of other languages.
"""

import contextlib
import doctest
import importlib.util
import inspect
import io
import pathlib
import re

import pytest
import torch

import fzero
from fzero.parallel.schedules._named_schedules import NAMES
from tests.distributed.launch import world as processes
from tests.docs.pages import DOCS, GUIDES, PAGES, REFERENCE, ROOT, TUTORIAL, Block, blocks
from tests.docs.sentences import WRITTEN, long_items, one_line_a_sentence

# each takes the processor 2 to 25 seconds, and other tests plan, train on these axes and run the plugs
SLOW = ("planner_step", "planner_runs", "pipeline", "pipeline_models", "trainer", "lightning", "offload", "schedules")
SLOW += ("4_axes", "5_jit", "6_testing", "7_pipelines", "moe", "context", "local_sgd", "accelerate")


def check_output(page: pathlib.Path, block: Block, printed: str) -> None:
    printed = re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE)
    same = doctest.OutputChecker().check_output(block.output, printed, doctest.ELLIPSIS)
    assert same, f"{page}:{block.line} prints\n{printed}\nand shows\n{block.output}"


def run(page: pathlib.Path, block: Block, names: dict) -> str:
    code = compile("\n" * block.line + block.body, str(page), "exec")  # errors name the page's line
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def launch(command: str) -> str:
    match = re.fullmatch(r"torchrun --nproc-per-node (\d+) (\S+)", command.strip())
    assert match is not None, command
    done = processes(int(match[1]), "-W", "error", match[2], cwd=pathlib.Path.cwd())
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def world(tmp_path, monkeypatch):
    """An empty folder to work in; torch is left as it was."""
    monkeypatch.chdir(tmp_path)
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(dtype)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's word for one process
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.stem)
        for p in [*TUTORIAL, *GUIDES]
        if any(b.runs for b in blocks(p))
    ],
)
def test_a_page_runs_and_prints_what_it_shows(page, world):
    names: dict = {"__name__": "__main__"}
    files = set()
    for block in blocks(page):
        if block.runs:
            # compiling takes long, and no page is about it
            fast = block._replace(body=block.body.replace("fzero.jit(step)", 'fzero.jit(step, backend="fx")'))
            check_output(page, block, run(page, fast, names))
            if block.file:
                pathlib.Path(block.file).write_text(block.body)
                files.add(block.file)
        elif block.language == "sh" and block.body.startswith("torchrun") and block.body.split()[-1] in files:
            check_output(page, block, launch(block.body))


def test_the_set_ups_of_pages_are_the_readmes_example():
    """A reader pastes one, collapsed at the head of a page, and then any block below."""
    set_ups = [
        re.findall(r"<details markdown.*?```python\n(.*?)```.*?</details>", p.read_text(), re.DOTALL) for p in GUIDES
    ]
    (set_up,) = {text for texts in set_ups for text in texts}
    readme = re.sub(r" +#.*", "", (ROOT / "README.md").read_text())
    assert set_up.partition("mesh = ")[0] in readme and sum(map(len, set_ups)) >= 10


def test_no_recipe_imports_a_private_file():
    """A contributor writes what the `__init__` of a package lists; `_torch` and `_tracebacks` are open to all."""
    imports = re.findall(r"^(?:from|import) fzero\.([\w.]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    private = [module for module in imports if re.search(r"(^|\.)_", module)]
    assert len(imports) > 6 and {module.split(".")[0] for module in private} == {"_torch", "_tracebacks"}


def test_the_faults_of_the_collective_recipe_find_their_places():
    page = ROOT / "CONTRIBUTING.md"
    code, rows = (next(b for b in blocks(page) if word in b.body) for word in ("MIRROR = ", "faults = "))
    names: dict = {}
    run(page, rows, names)
    result, sender = (fault.plant(code.body) for fault in names["faults"])
    printed = run(page, code._replace(body=result.replace("preverse", "preverse_with_fault")), {})
    assert re.findall(r"\d", printed) == ["0", "1", "2"] != re.findall(r"\d", code.output)
    assert "_local" in sender and "binding.size - 1 - binding.rank" not in sender


def test_the_case_of_the_recipe_of_a_pass_catches_its_fault():
    code, case, row = (
        next(b for b in blocks(ROOT / "CONTRIBUTING.md") if word in b.body)
        for word in ("def drop_ones", "def test_a_product", "rows = File")
    )
    names: dict = {"torch": torch}
    run(DOCS, row, names)
    run(DOCS, code._replace(body=names["rows"][0].plant(code.body)), names)
    with pytest.raises(AssertionError):
        run(DOCS, case, names)


@pytest.mark.parametrize("page", TUTORIAL, ids=lambda p: p.stem)
def test_a_tutorial_ends_in_a_comparison(page):
    last = [b for b in blocks(page) if b.runs][-1]
    comparisons = r"assert torch\.allclose\(|assert_close\(|assert_equivalent\(|assert_trees_close\("
    assert re.search(comparisons, last.body), f"{page}:{last.line} does not compare with unsharded training"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text):
        assert (page.parent / target).exists(), f"{page} links to {target}"


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose with more than 30 words; a link counts as its text."""
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^\s*\|.*$|^#.*$|<!--.*?-->", "", prose, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", re.sub(r"\]\([^)]*\)", "]", prose))
    results = [x for paragraph in paragraphs for x in re.split(r"(?<=[.!?])(?:\*\*)?\s+", " ".join(paragraph.split()))]
    return [sentence for sentence in results if len(sentence.split()) > 30]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_every_sentence_has_at_most_30_words(page):
    assert long_sentences(page.read_text()) == []


def test_a_long_sentence_of_prose_is_found_and_one_of_code_is_not():
    words = "word " * 31
    assert len(long_sentences(f"Short. A [{words}](page.md) in a link.\n\n- {words}.\n")) == 2
    assert not long_sentences(f"```python\n{words}\n```\n\n| {words} |\n\n# {words}\n")


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_every_sentence_has_a_line_of_its_own(page):
    text = page.read_text()
    assert one_line_a_sentence(text) == text, "`make format` breaks the lines, by `python -m tests.docs.sentences`"


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_item_of_a_list_has_at_most_two_sentences(page):
    assert long_items(page.read_text()) == [], "make it a paragraph with a heading, a table, or several items"


def test_lines_of_prose_are_broken_at_sentences_and_other_lines_stay():
    page = "# A. B\n\n- **Label.** One `a. b` two,\n  three. Four!\n  five. fzero (six.) Seven\n- Eight\n\n"
    broken = "# A. B\n\n- **Label.** One `a. b` two, three.\n  Four! five.\n  fzero (six.)\n  Seven\n- Eight\n\n"
    code = "```text\nA. B\n- C. D\n```\n| E. F |\n::: fzero\n    options: G. H\n\n1. I.\n"
    assert one_line_a_sentence(page + code) == broken + code
    assert long_items(page + code) == ["**Label.** One `a. b` two, three."]


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        on_site = page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name.lower()
        assert f": {on_site}\n" in nav, f"mkdocs.yml: {page.name} is not in nav"


def list_described() -> set[str]:
    """Return the names that the reference describes, each with its module; of a module that it names, all."""
    results = set()
    for page in REFERENCE:
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError:
                results.add(name)
            else:
                results |= {f"{name}.{x}" for x in module.__all__}
    return results


def test_every_name_of_the_top_level_is_in_the_reference():
    names = {f"fzero.{x}" for x in fzero.__all__ if not inspect.ismodule(getattr(fzero, x))}
    assert names - list_described() == set(), "docs/api/fzero.md: add a line `::: NAME` for each"


def first_cells(page: str, header: str) -> list[str]:
    """Return the first cells of a page's table, without backticks."""
    table = (DOCS / page).read_text().partition(f"| {header} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


def test_every_named_schedule_is_in_the_table_of_its_page():
    assert first_cells("schedules.md", "name") == [f'"{name}"' for name in NAMES], (
        'docs/schedules.md, "Which schedule to use": a row for each schedule, in the order of NAMES'
    )


def test_every_name_that_a_guide_uses_is_in_the_reference():
    names, missing = list_described(), set()
    for page in [*TUTORIAL, *GUIDES, ROOT / "README.md"]:
        for name in re.findall(r"\bfzero(?:\.[a-z]\w*)+\.\w+", page.read_text()):
            module, _, last = name.rpartition(".")
            try:
                there = getattr(importlib.import_module(module), last, None)
            except ModuleNotFoundError:
                continue  # an attribute of a class
            if callable(there) and name not in names and not last.startswith("_"):
                missing.add(name)
    assert missing == set(), "docs/api: add a line `::: NAME` for each"


def test_every_name_of_the_unreleased_changes_exists():
    text = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].partition("\n## [")[0]
    text = re.sub(r"^\| [^|]*\|", "", text, flags=re.MULTILINE)  # names of the last release
    results = [name.removeprefix("fzero.") for name in re.findall(r"`((?:\w+\.)+\w+)", text)]
    names = {f"fzero.{name}" for name in results if name.partition(".")[0] in {*fzero.__all__, "testing"}}
    assert len(names) > 50 and not {name for name in names if not exists(name)}, "CHANGELOG.md: only names that exist"
    assert exists("fzero.optim.adamw") and not exists("fzero.optim.whole") and not exists("fzero.nowhere.adamw")


def exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), last) or bool(importlib.util.find_spec(name))
    except ModuleNotFoundError:
        return False


def test_the_picture_of_the_packages_has_every_package_and_no_circle():
    spec = importlib.util.spec_from_file_location("diagrams", DOCS / "_diagrams.py")
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    imports, folder = diagrams.imports(), diagrams.FZERO
    packages = {name for name in imports if name != "parallel" and folder.joinpath(*name.split(".")).is_dir()}
    packages |= {name for name in imports if name in diagrams.CAPTIONS}
    drawn, page = (DOCS / "packages.svg").read_text(), (DOCS / "architecture.md").read_text()
    assert packages == set(diagrams.CAPTIONS)
    for package in packages:
        assert f">{package}<" in drawn, f"python docs/_diagrams.py draws {package}"
        path = package.replace(".", "/")
        assert f"`{path}/`" in page or f"`{path}.py`" in page, f"docs/architecture.md: a row for {package}"
    arrows = {package: others & packages for package, others in imports.items() if package in packages}
    levels = diagrams.layers(arrows)
    assert all(levels[package] > levels[other] for package in arrows for other in arrows[package])
