"""Laws of recorded steps: a call starts one graph, and hardly anything else."""

import pytest

from tests.cuda.processes import measure_task

CALLS = ("kernel", "product", "fill", "collective", "copy", "graph")


def calls(step: dict) -> dict[str, int]:
    return {kind: n for kind, n in step["counts"].items() if kind.startswith(CALLS)}


@pytest.mark.parametrize("backend", ("fx", "inductor"))
@pytest.mark.parametrize("task", ["dense", "dense, 4 micro-batches", "experts, capacity"])
def test_a_recorded_step_is_one_graph_and_at_most_three_other_calls(task, backend):
    for stage, step in measure_task(task, backend, device_graph=True).items():
        assert step["counts"]["graph"] == 1, f"stage {stage}"
        assert sum(calls(step).values()) <= 4, f"stage {stage}: {calls(step)}"
        assert step["waits"] == [], f"stage {stage}"


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("offload, host update", "argument 1, unit '.*', on the host lies on cpu"),
        ("experts, dropless", "to_host.default at .*steps.py:.* moves a value to or from host memory"),
    ],
)
def test_a_step_that_needs_the_host_is_refused(task, reason):
    with pytest.raises(AssertionError, match=f"device_graph=True cannot record .*{reason}"):
        measure_task(task, "fx", 3, device_graph=True)
