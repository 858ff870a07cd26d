"""check: the tests that mirror a change, and no more than fit into its time."""

import pathlib
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.check import Deadline, mirrored, ordered, warnings
from tests.helpers import examples
from tests.mutants.changes import never
from tests.mutants.mutant import Mutant

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("fzero/graph/_any_length.py", ["tests/graph/test_any_length.py"]),
        (
            "fzero/optim/_precision.py",
            ["tests/sharding/test_coded.py", "tests/test_masters_as_shards.py", "tests/test_precision.py"],
        ),
        ("fzero/_donated.py", ["tests/graph/trace/test_donation.py", "tests/test_remedies.py"]),
        ("tests/test_errors.py", ["tests/test_errors.py"]),
        ("docs/jit.md", ["tests/docs/test_docs.py::test_a_page_runs_and_prints_what_it_shows[jit]"]),
        ("tests/helpers.py", []),
        ("Makefile", []),
        ("benchmarks/lengths.py", []),
        ("benchmarks/lengths.md", []),
        ("docs/glossary.md", []),
    ],
)
def test_a_file_has_the_tests_of_its_name_or_of_its_faults(file, expected):
    assert mirrored(file) == expected
    assert all((ROOT / test.split("::")[0]).exists() for test in expected)


def test_what_has_neither_has_the_tests_of_its_folder(tmp_path):
    for name in ("tests/a/test_b.py", "tests/a/test_c.py", "tests/d/test_e.py", "fzero/a/_f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    fault = Mutant("a fault", "a/_g.py", "g", (never("A"),), ("tests/d/test_e.py", "-k", "x"))
    assert mirrored("fzero/a/_b.py", tmp_path, [fault]) == ["tests/a/test_b.py"]
    assert mirrored("fzero/a/_g.py", tmp_path, [fault]) == ["tests/d/test_e.py"]
    assert mirrored("fzero/a/_f.py", tmp_path, [fault]) == ["tests/a/test_b.py", "tests/a/test_c.py"]
    assert mirrored("fzero/f.py", tmp_path, [fault]) == []


def test_changed_tests_run_first_and_those_of_the_whole_project_last():
    found = ordered(["fzero/graph/_any_length.py", "tests/test_errors.py"])
    assert found[:3] == ["tests/test_errors.py", "tests/graph/test_any_length.py", "tests/test_structure.py"]
    assert {test.split("::")[0] for test in found[3:]} == {"tests/docs/test_docs.py"} and len(found) > 5
    of_page = ordered(["docs/jit.md", "tests/docs/test_docs.py"])
    assert of_page == ["tests/docs/test_docs.py", "tests/test_structure.py"], "a file and its tests are the same tests"


def test_a_changed_file_whose_tests_were_left_out_is_named():
    files = ["fzero/graph/_any_length.py", "tests/test_errors.py"]
    assert warnings(files, []) == [] == warnings(files, ["tests/test_optim.py::test_a"])
    of_file, of_all = warnings(files, ["tests/test_structure.py::test_a", "tests/graph/test_any_length.py::test_b[1]"])
    assert of_file.startswith("warning: not all tests of fzero/graph/_any_length.py have run")
    assert of_file.endswith("python -m pytest -n0 tests/graph/test_any_length.py")
    assert of_all.startswith("warning: not all tests of the whole project have run")


def test_nearly_every_file_has_tests():
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "fzero").rglob("*.py") if p.name != "__init__.py"]
    without = [file for file in files if not mirrored(file)]
    assert len(without) < len(files) / 20, without


class Item(NamedTuple):
    """In the place of a test of pytest."""

    nodeid: str


def test_each_file_has_a_share_of_the_time(monkeypatch):
    """Three files share 30 s: the first takes 20, the second none, so the last has the 10 that are left."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline: Any = Deadline(30)
    items = [Item(f"{file}::{i}") for file in "abc" for i in range(3)]
    deadline.pytest_collection_finish(SimpleNamespace(items=items))
    seconds = {"a": 20.0, "b": 0.0, "c": 6.0}
    for item in items:
        if deadline.pytest_runtest_protocol(item) is None:
            now += seconds[item.nodeid[0]]
    assert deadline.left == ["a::1", "a::2", "c::2"]


def test_a_law_tries_few_examples(monkeypatch):
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "check")
    assert [examples(few, 100).max_examples for few in (2, 50)] == [2, 5]
