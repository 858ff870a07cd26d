"""check: the tests that mirror a change, and no more than fit into its time."""

import pathlib

import pytest

from tests.check import mirrored, ordered, warnings, whole_project
from tests.distributed.launch import python
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
        (
            "tests/parallel/pipeline/model.py",
            [
                f"tests/parallel/pipeline/test_{x}.py"
                for x in ("axes", "equivalence", "errors", "outputs", "plan", "tools")
            ],
        ),
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
    changed, mirror, *of_all = ordered(["fzero/graph/_any_length.py", "tests/test_errors.py"])
    assert (changed, mirror) == ("tests/test_errors.py", "tests/graph/test_any_length.py")
    assert of_all == whole_project() and of_all[0] == "tests/test_structure.py" and len(of_all) > 2
    of_page = ordered(["docs/jit.md", "tests/docs/test_docs.py"])
    assert of_page == ["tests/docs/test_docs.py", "tests/test_structure.py"], "a file and its tests are the same tests"
    assert mirrored("fzero/optim/__init__.py") == [], "the tests of the structure check what a folder shows"


def test_a_changed_file_whose_tests_were_left_out_is_named():
    files = ["fzero/graph/_any_length.py", "tests/test_errors.py"]
    assert warnings(files, []) == [] == warnings(files, ["tests/test_optim.py::test_a"])
    (of_file,) = warnings(files, ["tests/graph/test_any_length.py::test_b[1]"])
    assert of_file.startswith("warning: not all tests of fzero/graph/_any_length.py have run")
    assert of_file.endswith("python -m pytest -n0 tests/graph/test_any_length.py")


def test_nearly_every_file_has_tests():
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "fzero").rglob("*.py") if p.name != "__init__.py"]
    without = [file for file in files if not mirrored(file)]
    assert len(without) < len(files) / 20, without


TESTS = """
import time
import pytest

@pytest.fixture(scope="module")
def torn_down(): yield; print("down", __name__)

@pytest.mark.parametrize("i", range(3))
def test(i, torn_down): time.sleep(SECONDS)
"""


def test_each_file_has_a_share_of_the_time_and_some_always_run(tmp_path):
    """Three files share 3 s: one test of the first takes 2, the second none, so the last has the rest."""
    for name, seconds in {"0": 1.1, "a": 2.0, "b": 0.0, "c": 0.3}.items():
        (tmp_path / f"test_{name}.py").write_text(TESTS.replace("SECONDS", str(seconds)))
    (tmp_path / "pytest.ini").write_text("[pytest]")
    script = f"""
import pytest
from tests.check import Deadline
deadline = Deadline(3, ["test_0.py"])
code = pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-c", {str(tmp_path / "pytest.ini")!r}, {str(tmp_path)!r}],
    plugins=[deadline])
print(code, *deadline.left)
"""
    done = python("-c", script)
    assert done.stdout.splitlines()[-1] == "0 test_a.py::test[1] test_a.py::test[2]", done.stdout
    assert done.stdout.count("down test_") == 4 and "error" not in done.stdout


def test_a_law_tries_few_examples(monkeypatch):
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "check")
    assert [examples(few, 100).max_examples for few in (2, 50)] == [2, 5]
