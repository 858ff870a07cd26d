"""The collector of cycles is held off while a step is planned, and is then as it was."""

import gc

import pytest
import torch

import fzero
from fzero.graph._collector import held_off


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was_after_the_last(on):
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        first, second = held_off(), held_off()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # threads may leave in any order
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


def test_a_step_that_fails_leaves_it_on():
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        raise KeyError("a fault")

    with pytest.raises(KeyError):
        fzero.jit(step, backend="fx").plan(torch.ones(2))
    assert seen == [False] and gc.isenabled()
