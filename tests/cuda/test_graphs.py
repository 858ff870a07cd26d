"""Laws of recorded steps: a call starts one graph, and hardly anything else."""

import pytest

from tests.cuda.lane import facts

CALLS = ("kernel", "product", "fill", "collective", "copy", "graph")


def calls(step: dict) -> dict[str, int]:
    return {kind: n for kind, n in step["counts"].items() if kind.startswith(CALLS)}


@pytest.mark.parametrize("backend", ("fx", "inductor"))
@pytest.mark.parametrize("task", ["dense", "dense, 4 micro-batches", "experts, capacity"])
def test_a_recorded_step_is_one_graph_and_at_most_three_other_calls(task, backend):
    for stage, step in facts(task, backend, device_graph=True).items():
        assert step["counts"]["graph"] == 1, f"stage {stage}"
        assert sum(calls(step).values()) <= 4, f"stage {stage}: {calls(step)}"
        assert step["waits"] == [], f"stage {stage}"


def test_a_step_with_host_updates_is_refused():
    with pytest.raises(AssertionError, match="device_graph=True cannot record train_step: argument 1"):
        facts("offload, host update", "fx", 3, device_graph=True)
