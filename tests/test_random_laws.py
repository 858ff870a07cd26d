"""Laws on random examples: a run prints its seed, which repeats it."""

import re

from hypothesis import settings

from tests.distributed.launch import python

# derandomize: hypothesis sets it where it sees a machine of continuous integration, and the seed would not count
LAW = """
from hypothesis import given, settings, strategies as st

@settings(derandomize=False, database=None)
@given(st.integers(0, 10**9))
def test_a_law(n): print("drawn", n); assert n < LIMIT
"""


def run(path, *words):
    return python("-m", "tests.laws", "-n0", "-s", "-p", "no:cacheprovider", *words, str(path))


def test_a_seed_repeats_the_examples_of_laws_and_another_seed_does_not(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]")
    law = tmp_path / "test_law.py"
    law.write_text(LAW.replace("LIMIT", "10"))
    options = ("-c", str(tmp_path / "pytest.ini"))
    first = run(law, *options)
    (seed,) = re.findall(r"^laws: seed (\d+)$", first.stdout, re.MULTILINE)
    assert first.returncode == 1 and f"make laws ARGS='--seed {seed}'" in first.stdout, (
        "a failure says how to repeat it"
    )
    law.write_text(LAW.replace("LIMIT", "10**10"))
    again, other = (run(law, *options, "--seed", x) for x in (seed, "8"))
    drawn = [re.findall(r"drawn (\d+)", done.stdout) for done in (first, again, other)]
    assert drawn[0][:2] == drawn[1][:2] != drawn[2][:2]
    assert again.returncode == 0 and "make laws" not in again.stdout


def test_random_laws_keep_no_examples_of_earlier_runs():
    profile = settings.get_profile("random")
    assert not profile.derandomize and profile.database is None and settings.get_profile("fzero").derandomize


def test_a_run_of_laws_leaves_other_tests_out():
    done = run("tests/codecs/test_codecs.py", "-q", "--collect-only")
    assert "test_the_error_of_rounding_is_within_the_codecs_bound" in done.stdout
    assert "test_float8_is_torchs_own" not in done.stdout and "deselected" in done.stdout
