"""Laws of the host: a steady step waits for the device only where the wait is the meaning."""

from collections import Counter

import pytest

from tests.cuda.processes import measure_task

BACKENDS = ("eager", "fx", "inductor")
NEVER = (
    *("dense", "dense, 4 micro-batches", "experts, capacity", "experts, dropless, bfloat16", "pipeline"),
    *("sequences, ring", "sequences, all_to_all", "sequences, ring, masked", "dense, codes", "dense, hosts first"),
    *("sequences, ring, capped", "sequences, all_to_all, capped", "pipeline, sequences"),
    *("dense, moments in int8", "dense, moments in bfloat16", "dense, lamb", "dense, muon", "dense, adafactor"),
)
UNITS = 4  # of the perceptron


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", NEVER)
def test_the_host_never_waits(task, backend):
    for stage, step in measure_task(task, backend).items():
        assert step["waits"] == [], f"stage {stage}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", ["tensor", "tensor, parts of tokens"])
def test_the_host_waits_only_where_a_model_of_transformers_asks_whether_samples_are_packed(task, backend):
    """Models of transformers ask so in eager steps, and not while they are traced."""
    for stage, step in measure_task(task, backend).items():
        assert len(step["waits"]) == (backend == "eager"), f"stage {stage}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_host_update_waits_once_for_each_copy_and_only_for_copies_to_pinned_memory(backend):
    """Each unit's gradients at stages 1 to 3; each leaf's at stage 0, whose units are not packed; the clip's norm."""
    for stage, step in measure_task("offload, host update", backend).items():
        copies = step["counts"]["copy: device to pinned"]
        assert not [wait for wait in step["waits"] if "pageable" in wait]
        assert len(step["waits"]) == copies <= (UNITS if stage else 2 * UNITS) + 1, f"stage {stage}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.xfail(strict=True, reason="the state's copy back to the host is awaited in the step that made it")
def test_a_device_update_does_not_wait(backend):
    for stage, step in measure_task("offload, device update", backend).items():
        assert step["waits"] == [], f"stage {stage}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_without_drops_wait_at_most_once_a_layer_for_pinned_memory(backend):
    """Float32 rows have no kernel of torch's, so the host reads the ends of each layer's rows."""
    for stage, step in measure_task("experts, dropless", backend).items():
        assert not [wait for wait in step["waits"] if "pageable" in wait], f"stage {stage}"
        assert sum(Counter(step["waits"]).values()) <= 2, f"stage {stage}"


@pytest.mark.parametrize("task", NEVER)
@pytest.mark.parametrize("backend", ("eager", "fx"))
def test_steps_run_with_a_default_device(task, backend):
    """With `torch.set_default_device("cuda")`, as many scripts have it, the host waits as little."""
    for stage, step in measure_task(task, backend, default_device=True).items():
        assert step["waits"] == [], f"stage {stage}"


@pytest.mark.parametrize("backend", ("eager", "fx"))
@pytest.mark.parametrize("task", ["offload, host update", "offload, device update", "experts, dropless"])
def test_other_steps_run_with_a_default_device(task, backend):
    with_default, without = measure_task(task, backend, default_device=True), measure_task(task, backend)
    for stage in without:
        assert Counter(with_default[stage]["waits"]) == Counter(without[stage]["waits"]), f"stage {stage}"
