"""check: the tests that mirror a change, and no more than fit into its time."""

import pathlib

import pytest

from tests.check import list_mirrors, order_tests, warnings, whole_project
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
            [
                "tests/optim/test_optim.py",
                "tests/optim/test_optim_laws.py",
                "tests/sharding/maps/test_coded.py",
                "tests/test_masters_as_shards.py",
                "tests/test_precision.py",
            ],
        ),
        ("fzero/parallel/schedules/_greedy.py", ["tests/parallel/schedules/test_schedules.py"]),
        ("fzero/graph/passes/_recast.py", ["tests/graph/passes/test_recast.py", "tests/graph/test_passes.py"]),
        (
            "fzero/collectives/_moves.py",
            [
                "tests/collectives/test_moves.py",
                "tests/collectives/test_collectives.py",
                "tests/sharding/test_partition_and_gather.py",
                "tests/errors/test_programs.py",
            ],
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
    assert list_mirrors(file) == expected
    assert all((ROOT / test.split("::")[0]).exists() for test in expected)


def test_a_file_without_tests_of_its_own_or_of_faults_has_those_of_its_folder(tmp_path):
    names = ("tests/a/test_b.py", "tests/a/test_c.py", "tests/d/test_e.py", "tests/distributed/test_h.py")
    for name in (*names, "tests/i/test_i.py", "fzero/a/_f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    b, c, e, h = names
    faults = [Mutant("a fault", f"a/_{x}.py", "g", (never("A"),), (t, "-k", "x")) for x in "bg" for t in (e, h)]
    faults.append(Mutant("a fault", "i/_k.py", "g", (never("A"),), (h,)))
    results = {
        x: list_mirrors(f"fzero/{x}.py", tmp_path, faults) for x in ("a/_b", "a/_g", "a/_f", "f", "i/_k", "i/_l")
    }
    assert results["a/_b"] == [b, e] and results["a/_g"] == [e], "tests on processes are left out"
    assert results["a/_f"] == [b, c] and results["f"] == []
    assert results["i/_k"] == results["i/_l"] == ["tests/i/test_i.py"], "a file with the folder's name is always run"


def test_changed_tests_run_first_and_those_of_the_whole_project_last():
    changed, mirror, *of_all = order_tests(["fzero/graph/_any_length.py", "tests/test_errors.py"])
    assert (changed, mirror) == ("tests/test_errors.py", "tests/graph/test_any_length.py")
    assert of_all == whole_project() and of_all[0] == "tests/test_structure.py" and len(of_all) > 2
    of_page = order_tests(["docs/jit.md", "tests/docs/test_docs.py"])
    assert of_page == ["tests/docs/test_docs.py", "tests/test_structure.py"], "a file and its tests are the same tests"
    assert list_mirrors("fzero/optim/__init__.py") == [], "the tests of the structure check what a folder shows"


def test_a_changed_file_whose_tests_were_left_out_is_named():
    files = ["fzero/graph/_any_length.py", "tests/test_errors.py"]
    assert warnings(files, []) == [] == warnings(files, ["tests/test_optim.py::test_a"])
    (of_file,) = warnings(files, ["tests/graph/test_any_length.py::test_b[1]"])
    assert of_file.startswith("warning: not all tests of fzero/graph/_any_length.py have run")
    assert of_file.endswith("python -m pytest -n0 tests/graph/test_any_length.py")


def test_nearly_every_file_has_tests():
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "fzero").rglob("*.py") if p.name != "__init__.py"]
    without = [file for file in files if not list_mirrors(file)]
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
