"""Real processes: torchrun with gloo runs `cases.py`, each of whose cases compares with unsharded training, and
`jit_cases.py`, whose cases compare jitted steps with eager ones; `axes_cases.py` has several axes,
`training_cases.py` half precision and what goes with it."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.distributed import axes_cases, cases, jit_cases, training_cases

ROOT = pathlib.Path(__file__).parents[2]


def launch(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


MODULES = {"core": cases, "jit": jit_cases, "axes": axes_cases, "training": training_cases}
SLOW = [pytest.param(name, 4, marks=pytest.mark.slow, id=f"{name}-4") for name in ("core", "jit", "training")]


@pytest.mark.parametrize("name,ranks", [("core", 2), ("jit", 2), ("training", 2), ("axes", 4), *SLOW])
def test_gloo_processes(name, ranks):
    module = MODULES[name]
    check(ranks, module.__name__, [case for case in module.CASES if case not in getattr(module, "SLOW", ())])


@pytest.mark.slow
@pytest.mark.parametrize("name,ranks", [("core", 2), ("axes", 4)])
def test_slow_cases(name, ranks):
    check(ranks, MODULES[name].__name__, list(MODULES[name].SLOW))


def check(ranks: int, module: str, names: list[str]) -> None:
    done = launch(ranks, "-m", module, *names)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    for rank in range(ranks):
        for name in names:
            assert f"rank {rank}: {name}: ok" in done.stdout


def test_a_failing_case_fails_the_run():
    """The harness itself: an error on one rank ends the run with an error."""
    done = launch(2, "-m", "tests.distributed.cases", "broken")
    assert done.returncode != 0 and "planted" in done.stderr
