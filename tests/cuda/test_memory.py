"""Laws of memory: the caching allocator's peak is the plan's, and it reserves little more."""

import json
import sys

import pytest

from fzero.graph.planning.memory._caching_allocator import simulate_allocator
from tests.cuda.processes import measure_task, run
from tests.cuda.steps import LLAMA, MIXTRAL

MODELS = [("gpt-1.5b", "fx"), ("bert-large", "fx"), ("bert-large", "inductor"), ("vit-g", "fx")]
MODELS += [(LLAMA, "fx"), (MIXTRAL, "fx")]
MORE_RESERVED = {"gpt-1.5b": 1.06, "bert-large": 1.051, LLAMA: 1.072, MIXTRAL: 1.069}  # of the peak, in "fx"
STAGES = {LLAMA: (1, 2, 3), MIXTRAL: (0, 1, 2, 3)}  # on 64 ranks; Llama's stage 0 fits into no card


def models(model: str, backend: str, expandable: bool = False) -> dict:
    if model in STAGES:
        return measure_task(model, backend, *STAGES[model], ranks=64, lazy=True, expandable=expandable)
    return measure_task(model, backend, lazy=True, expandable=expandable)


def planned_bytes(step: dict) -> int:
    return step["plan"] + step["workspace"]


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_the_memory_that_a_step_requests_is_its_plans(model, backend):
    for stage, step in models(model, backend).items():
        assert step["requested"] == pytest.approx(planned_bytes(step), rel=0.005), f"stage {stage}"


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_the_peak_is_the_plans_by_the_simulated_allocator(model, backend, expandable):
    for stage, step in models(model, backend, expandable).items():
        assert step["peak"] == pytest.approx(step["planned"]["allocated_bytes"], rel=0.006), f"stage {stage}"


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_a_plan_tells_the_reserved_bytes(model, backend, expandable):
    """A hole of 57 MB among Llama's arguments, which no plan knows, holds a buffer that else takes new memory.

    Inductor's kernels allocate in another order than the plan's operations.
    """
    for stage, step in models(model, backend, expandable).items():
        rel = 0.12 if (model, stage, expandable) == (LLAMA, 3, True) else 0.07 if backend == "inductor" else 0.05
        assert step["reserved"] == pytest.approx(step["planned"]["reserved_bytes"], rel=rel), f"stage {stage}"


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_a_higher_stage_peaks_no_higher(model, backend):
    peaks = [step["peak"] for _, step in sorted(models(model, backend).items())]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_a_steady_step_asks_the_driver_for_no_memory(model, backend):
    for stage, step in models(model, backend).items():
        assert "malloc" not in step["counts"], f"stage {stage}"
        assert "free" not in step["counts"], f"stage {stage}"


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_with_expandable_segments_no_block_is_rounded_and_a_step_asks_for_no_memory(model, backend):
    for stage, step in models(model, backend, expandable=True).items():
        assert step["peak"] == pytest.approx(planned_bytes(step), rel=0.005), f"stage {stage}"
        assert "malloc" not in step["counts"], f"stage {stage}"


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_with_expandable_segments_little_more_is_reserved_than_used(model, backend, request):
    if backend == "fx" and model in MORE_RESERVED:
        reason = f"up to {max(MORE_RESERVED.values())}: free memory between blocks is too small for the next block"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    for stage, step in models(model, backend, expandable=True).items():
        assert step["reserved"] <= 1.05 * step["peak"], f"stage {stage}"


@pytest.mark.parametrize("expandable", [False, True])
def test_the_simulated_allocator_reserves_as_many_bytes_as_torchs(expandable):
    output = run([sys.executable, "-m", "tests.cuda.allocations", "60"], lazy=True, expandable=expandable)
    draws = [json.loads(line.removeprefix("FACTS ")) for line in output.splitlines() if line.startswith("FACTS ")]
    assert len(draws) == 60
    for seed, d in enumerate(draws):
        peaks = simulate_allocator(d["kept"], d["ranges"], expandable_segments=expandable)
        assert peaks == (d["allocated"], d["reserved"]), f"draw {seed}"
