"""Laws of streams: no race, no block freed early, every collective awaited, and most hidden behind products."""

import pytest

from tests.cuda.processes import measure_task

TASKS = (
    *("dense", "experts, capacity", "pipeline", "offload, host update", "offload, device update"),
    *("sequences, ring", "sequences, all_to_all", "sequences, ring, masked", "dense, codes", "dense, hosts first"),
    *("tensor", "tensor, parts of tokens"),
    *("sequences, ring, capped", "sequences, all_to_all, capped", "pipeline, sequences"),
)


@pytest.mark.parametrize("task", TASKS)
def test_the_sanitizer_finds_no_race(task):
    """It ends the process where a stream reads or writes what another may be writing."""
    assert len(measure_task(task, "fx", 0, 1, 3, sanitizer=True)) == 3


@pytest.mark.parametrize("backend", ("eager", "fx", "inductor"))
@pytest.mark.parametrize("task", TASKS)
def test_each_collective_is_awaited_and_no_block_is_freed_before(task, backend):
    for stage, step in measure_task(task, backend).items():
        assert step["early_frees"] == [], f"stage {stage}"
        assert None not in [products for _, products, _ in step["collectives"]], f"stage {stage}"


@pytest.mark.parametrize(("model", "backend"), [("gpt-1.5b", "fx"), ("bert-large", "fx"), ("bert-large", "inductor")])
def test_gathers_and_reductions_of_a_deep_model_run_beside_products(model, backend):
    """At stage 3 the first gather has nothing to hide behind, nor has the last reduction; few others stand bare."""
    collectives = measure_task(model, backend, lazy=True)[3]["collectives"]
    gathers = [products for name, products, _ in collectives if name.startswith("all_gather")]
    reductions = [products for name, products, _ in collectives if name.startswith("reduce_scatter")]
    assert sum(products > 0 for products in gathers) >= 0.93 * len(gathers)
    assert all(products > 0 for products in reductions[:-1])
