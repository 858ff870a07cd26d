"""Laws of memory: the caching allocator's peak is the plan's, and it reserves little more."""

import pytest

from tests.cuda.processes import facts
from tests.cuda.steps import LLAMA, MIXTRAL

MODELS = [("gpt-1.5b", "fx"), ("bert-large", "fx"), ("bert-large", "inductor"), ("vit-g", "fx")]
MODELS += [(LLAMA, "fx"), (MIXTRAL, "fx")]
MORE_RESERVED = {"gpt-1.5b": 1.06, "bert-large": 1.051, LLAMA: 1.072, MIXTRAL: 1.069}  # of the peak, in "fx"
STAGES = {LLAMA: (1, 2, 3), MIXTRAL: (0, 1, 2, 3)}  # on 64 ranks; Llama's stage 0 fits into no card


def models(model: str, backend: str, expandable: bool = False) -> dict:
    if model in STAGES:
        return facts(model, backend, *STAGES[model], ranks=64, lazy=True, expandable=expandable)
    return facts(model, backend, lazy=True, expandable=expandable)


def planned(step: dict) -> int:
    return step["plan"] + step["workspace"]


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_what_a_step_requests_is_its_plan(model, backend):
    for stage, step in models(model, backend).items():
        assert step["requested"] == pytest.approx(planned(step), rel=0.005), f"stage {stage}"


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_the_peak_is_the_plans(model, backend, request):
    if model == "gpt-1.5b":
        reason = "blocks of 10 MB and more are rounded up to 2 MB each, 1.7% in all at stage 0; a plan counts none"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    for stage, step in models(model, backend).items():
        assert step["peak"] == pytest.approx(planned(step), rel=0.005), f"stage {stage}"


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
def test_with_expandable_segments_the_peak_is_the_plans_and_a_step_asks_for_no_memory(model, backend):
    for stage, step in models(model, backend, expandable=True).items():
        assert step["peak"] == pytest.approx(planned(step), rel=0.005), f"stage {stage}"
        assert "malloc" not in step["counts"], f"stage {stage}"


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_with_expandable_segments_little_more_is_reserved_than_used(model, backend, request):
    if backend == "fx" and model in MORE_RESERVED:
        reason = f"up to {max(MORE_RESERVED.values())}: free memory between blocks is too small for the next block"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    for stage, step in models(model, backend, expandable=True).items():
        assert step["reserved"] <= 1.05 * step["peak"], f"stage {stage}"
