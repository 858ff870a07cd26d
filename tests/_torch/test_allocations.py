"""The allocator's events: their sum is what was alive, and a profiler of the user's is left alone."""

import pytest
import torch

from fzero._torch import allocations, is_profiling


def test_the_peak_is_the_most_that_is_alive_at_once():
    survivor = torch.ones(1000)
    with allocations() as memory:
        a = torch.empty(100_000)
        b = a + a
        del a
        c = torch.empty(50_000)
    assert memory.peak == 800_000 and survivor.sum() == 1000
    with allocations() as memory:
        del b, c
    assert memory.peak == 0


def test_allocations_of_a_backward_pass_are_counted():
    x = torch.ones(1000, 100, requires_grad=True)
    with allocations() as memory:
        x.exp().sum().backward()
    assert memory.peak is not None and 800_000 <= memory.peak < 820_000


def test_an_exception_ends_the_record_of_allocations():
    with pytest.raises(ZeroDivisionError), allocations():
        raise ZeroDivisionError
    assert not is_profiling()


def test_the_users_profiler_goes_on():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        with allocations() as memory:
            torch.ones(10)
        assert is_profiling()
    assert memory.peak is None and any(e.key == "aten::ones" for e in profile.key_averages())
