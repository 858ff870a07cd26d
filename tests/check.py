"""Check a change while it is made: lint and types of the changed files, and the tests that mirror them. `make check`.

A file `fzero/a/_b.py` has its tests in `tests/a/test_b.py`, in those that are named after its folder and in those that
catch the faults planted in it (`tests/mutants`), or else in all of `tests/a/`; an `__init__.py` has no mirror. Tests on
real processes are left out where there are others. Code that tests of a folder share has those of its tests that import
it. Changed files of tests run first, then the mirrors. 30 seconds are shared by these files, so that some tests of each
run: a file's tests stop when its share is over, and what it saves goes to the later files. Last, and always, run the
tests of the structure and of the reference. Laws try few examples. A warning names each file whose tests were left out:
`make test` runs all.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = 30.0
TYPED = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"])


def list_changed(base: str) -> list[str]:
    """List the files that differ from a revision, those that git does not know yet among them."""
    commands = (["diff", "--name-only", "--diff-filter=d", base], ["ls-files", "--others", "--exclude-standard"])
    results = [
        subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True, check=True).stdout for c in commands
    ]
    return sorted({line for text in results for line in text.splitlines()})


def list_mirrors(file: str, root: pathlib.Path = ROOT, faults: Iterable[Mutant] = MUTANTS) -> list[str]:
    """List the tests of a file; none of a file without any."""
    path = pathlib.PurePosixPath(file)
    if path.suffix == ".md" and path.parts[0] in ("docs", "CONTRIBUTING.md"):
        runs = "```python\n" in (root / file).read_text()
        return [f"tests/docs/test_docs.py::test_a_page_runs_and_prints_what_it_shows[{path.stem}]"] if runs else []
    if path.suffix != ".py" or path.parts[0] not in ("fzero", "tests"):
        return []
    if path.parts[0] == "tests":
        if path.stem.startswith("test_") or len(path.parts) == 2:
            return [file] if path.stem.startswith("test_") else []
        readers = sorted((root / path.parent).rglob("test_*.py"))
        module = ".".join(path.with_suffix("").parts)
        return [str(x.relative_to(root)) for x in readers if f"from {module} import" in x.read_text()]
    within, name = path.relative_to("fzero"), path.stem.removeprefix("_")
    if path.stem == "__init__":
        return []
    folder = root / "tests" / within.parent
    own = folder / f"test_{name}.py"
    catching = [root / test for m in faults if m.file == str(within) for test in m.tests[:1]]
    results = [x for x in (own, *_laws_of(folder), *catching) if x.is_file()]
    if own not in results and not catching and within.parent.name:
        results += sorted(folder.glob("test_*.py"))
    results = [x for x in results if x.parent.name != "distributed"] or results
    return [str(x.relative_to(root)) for x in dict.fromkeys(results)]


def _laws_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """List the tests that are named after a folder, in it or beside it: laws of tables such as the collectives'."""
    named = [*folder.glob(f"test_{folder.name}*.py"), *folder.glob("test_laws.py")]
    return sorted(named) + sorted(folder.parent.glob(f"test_{folder.name}.py"))


def whole_project() -> list[str]:
    """List the tests that any change may break: of the structure, and the quick ones of the reference."""
    pages = "tests/docs/test_docs.py"
    quick = re.findall(r"^def (test_(?:every|links)_\w+)", (ROOT / pages).read_text(), re.MULTILINE)
    return ["tests/test_structure.py", *[f"{pages}::{name}" for name in quick]]


def order_tests(files: Iterable[str]) -> list[str]:
    """List the tests of changed files: those that changed, the mirrors, those of the whole project."""
    tests = [test for file in files for test in list_mirrors(file)]
    own = [test for test in tests if test in files]
    selection = dict.fromkeys([*own, *tests, *whole_project()])
    return [test for test in selection if test in own or test.split("::")[0] not in own]


def warnings(files: Iterable[str], left: Sequence[str]) -> list[str]:
    """Tell of which changed files some tests were left out, and how to run them."""
    messages = []
    for file in files:
        skipped = [test for test in list_mirrors(file) if any(item.startswith(test) for item in left)]
        if skipped:
            messages.append(f"warning: not all tests of {file} have run: python -m pytest -n0 {' '.join(skipped)}")
    return messages


class Deadline:
    """A plugin of pytest that shares a time among the files of tests; pages run also if they are slow.

    Attributes:
        seconds: the time for all files but those of `always`.
        always: the files and tests that run whatever they take.
        left: the tests that were not run.
    """

    def __init__(self, seconds: float, always: Sequence[str] = ()) -> None:
        self.seconds = seconds
        self.always = tuple(always)
        self.left: list[str] = []
        self._files: list[str] = []  # whose tests have not begun, in their order
        self._until = self._until_next = 0.0  # by time.monotonic(), from the first test that is not `always` run

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run a page that has changed, also if it is one of those that otherwise only `make test-all` runs."""
        for item in items:
            if "test_a_page_runs" in item.nodeid:
                item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn which files there are, without those whose tests are all slow."""
        self._files = [*dict.fromkeys([_file_of(item) for item in session.items if not self._always_runs(item)])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test when the share of its file is over: pytest then tears down what earlier tests have set up."""
        if self._always_runs(item):
            return
        now, file = time.monotonic(), _file_of(item)
        self._until = self._until or now + self.seconds
        if file in self._files:
            self._until_next = now + (self._until - now) / len(self._files)
            self._files.remove(file)
        if now >= self._until_next:
            self.left.append(item.nodeid)
            pytest.skip("the share of its file is over")

    def _always_runs(self, item: pytest.Item) -> bool:
        return item.nodeid.startswith(self.always)


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def lint_and_types(files: Iterable[str]) -> list[subprocess.Popen[bytes]]:
    """Start ruff and pyright on files of Python."""
    python = [f for f in files if f.endswith(".py")]
    run = [sys.executable, "-m"]
    commands = [[*run, "ruff", "check", *python], [*run, "ruff", "format", "--check", *python]]
    typed = [f for f in python if f.startswith(TYPED)]
    commands += [[*run, "pyright", *typed]] if typed else []
    return [subprocess.Popen(command, cwd=ROOT) for command in commands] if python else []


def main() -> int:
    """Check what has changed; returns 0 if nothing is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the revision that the change begins from")
    asked = parser.parse_args()
    files = list_changed(asked.base)
    if not files:
        print("nothing has changed")
        return 0
    started = lint_and_types(files)
    os.environ["HYPOTHESIS_PROFILE"] = "check"  # few examples
    selection, deadline = order_tests(files), Deadline(SECONDS, whole_project())
    print("tests:", *selection, sep="\n  ")
    code = pytest.main(["-q", "-n0", "--maxfail=10", "--show-capture=no", *selection], plugins=[deadline])
    failed = code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # all may be slow ones
    wrong = [p.args for p in started if p.wait()]
    if deadline.left:
        print(f"{len(deadline.left)} tests were left out, since {SECONDS:g} s had passed: make test runs them")
    for warning in warnings(files, deadline.left):
        print(warning)
    for command in wrong:
        print(f"error: {shlex.join(map(str, command))}: its complaints stand above the tests")  # pyright: ignore
    if not any(map(list_mirrors, files)):
        print("no test mirrors these files: make test runs all")
    return int(failed or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
