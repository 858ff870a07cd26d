"""Real processes on gloo run the cases of modules.

`cases.py` compares with unsharded training. `jit_cases.py`, `schedule_cases.py` and `compiler_cases.py` compare jitted
steps with eager ones. `axes_cases.py` has several axes, and `training_cases.py` half precision and what goes with it.
`expert_cases.py` has experts, `pipeline_cases.py` stages, `tensor_cases.py` tensor parallelism, `context_cases.py`
context parallelism, and `local_cases.py` replicas that train apart.
"""

import time

import pytest
import torch

import fzero
from fzero.testing import assert_trees_close
from tests.distributed import all_cases, cases, pipeline_cases, resumed
from tests.distributed.all_cases import MODULES, quick
from tests.distributed.launch import python, torchrun, world
from tests.parallel.pipeline.model import make_loss, make_params, train_plainly

JIT = ("schedules", "compilers", "jit")
TWO = ("core", "training", "checkpoint", "experts", "pipeline", "tensor", "context", *JIT)
FOUR = ("axes", "local")


@pytest.mark.parametrize("ranks,modules", [(2, TWO), (4, FOUR)])
def test_cases_of_small_modules_hold_on_processes(ranks, modules):
    """All modules in one world, since each world warms up for itself."""
    check(ranks, all_cases.__name__, [f"{name}.{case}" for name in modules for case in quick(name)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,ranks",
    [*((name, 2) for name in TWO), *((name, 4) for name in TWO), *((name, 4) for name in FOUR)],
)
def test_cases_of_one_module_hold_on_processes(name, ranks):
    check(ranks, MODULES[name].__name__, quick(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,ranks",
    [("core", 2), *((name, 2) for name in JIT), ("axes", 4), ("pipeline", 2), ("pipeline", 4), ("tensor", 2)],
)
def test_slow_cases_hold_on_processes(name, ranks):
    check(ranks, MODULES[name].__name__, list(MODULES[name].SLOW))


def check(ranks: int, module: str, names: list[str]) -> None:
    done = world(ranks, "-m", module, *names)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    for rank in range(ranks):
        for name in names:
            assert f"rank {rank}: {name}: ok" in done.stdout


def test_torchrun_starts_a_world():
    done = torchrun(2, "-m", cases.__name__, "messages_in_flight_arrive_where_they_belong")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert all(f"rank {rank}: messages_in_flight_arrive_where_they_belong: ok" in done.stdout for rank in range(2))


def test_a_rank_that_raises_in_its_stage_ends_the_others_in_time():
    begin = time.monotonic()
    done = world(2, "-m", pipeline_cases.__name__, "dies", timeout=100)
    assert done.returncode != 0 and time.monotonic() - begin < 60
    assert "planted in a stage" in done.stderr.split("rank 1 ended with 1:\n")[1]
    assert "rank 0 ended with 1" in done.stderr


@pytest.mark.slow
def test_a_pipeline_that_is_killed_goes_on_as_another(tmp_path):
    """It has other ranks along its axis, another schedule and stage, and the numbers of no pipeline."""
    runs = ((6, 2, "1f1b", 2, 3), (5, 2, "interleaved", 3, -1), (6, 1, "gpipe", 1, -1))
    for begins, (steps, pp, schedule, stage, killed) in zip((0, 3, 5), runs, strict=True):
        words = map(str, (tmp_path, steps, pp, schedule, stage, killed))
        done = world(2, "-m", resumed.__name__, *words, timeout=100)
        assert (done.returncode != 0) == (killed >= 0), done.stderr[-4000:]
        assert all(f"rank {rank}: begins at {begins}" in done.stdout for rank in range(2)), done.stdout
    expected, _ = train_plainly(make_loss(4), make_params(resumed.DEPTH), resumed.BATCH, steps=6)
    like = fzero.tree.map(torch.zeros_like, {"params": expected})
    actual = fzero.load(tmp_path / "step-00000006", like=like, partial=True)
    assert_trees_close(actual["params"], expected, 1e-9)


def test_a_failing_case_on_processes_fails_its_test():
    """An error on one rank ends the run with an error, and is shown with its rank."""
    done = world(2, "-m", cases.__name__, "broken")
    assert done.returncode != 0
    assert "RuntimeError: planted" in done.stderr.split("rank 1 ended with 1:\n")[1]


def test_a_test_process_that_hangs_is_ended_with_its_stack():
    done = world(2, "-c", "import os, time\nif os.environ['RANK'] == '1': time.sleep(99)", timeout=5)
    assert done.returncode == 1 and "Timeout" in done.stderr and 'File "<string>", line 2 in <module>' in done.stderr


def test_a_forked_test_process_behaves_as_a_fresh_python():
    script = "import os, sys; print(sys.argv, os.environ['PLACE'], 'RANK' in os.environ, input()); sys.exit('over')"
    done = python("-c", script, "--word", read="hello\n", PLACE=3)
    assert done == (1, "['-c', '--word'] 3 False hello\n", "over\n")
    assert "Deprecation" in python("-W", "error", "-c", "import warnings; warnings.warn('', DeprecationWarning)").stderr
