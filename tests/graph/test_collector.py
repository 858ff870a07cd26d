"""Python's collector of cycles is paused while a graph is made, and left as it was."""

import gc

import pytest
import torch

import fzero
from fzero.graph._collector import pause_collector


def test_a_step_is_traced_without_the_collector():
    records = []

    def step(x: torch.Tensor) -> torch.Tensor:
        records.append(gc.isenabled())
        return x + 1

    fzero.jit(step, backend="fx").plan(torch.ones(2))
    assert records == [False] and gc.isenabled()


def test_the_collector_runs_again_after_an_error():
    def step(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="the step's own"):
        fzero.jit(step, backend="fx").plan(torch.ones(2))
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with pause_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_that_overlap_end_with_the_collector_on():
    first, second = pause_collector(), pause_collector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()
