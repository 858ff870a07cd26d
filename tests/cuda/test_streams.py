"""Laws of streams: torch's CUDA sanitizer finds no race."""

import pytest

from tests.cuda.lane import facts

TASKS = ("dense", "experts, capacity", "pipeline", "offload, host update", "offload, device update")


@pytest.mark.parametrize("task", TASKS)
def test_the_sanitizer_finds_no_race(task):
    """It ends the process where a stream reads or writes what another may be writing."""
    assert len(facts(task, "fx", 0, 1, 3, sanitizer=True)) == 3
