"""offload_ratio: what it finds fits, one part less does not, and that is what trying every ratio finds."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import tuning
from fzero.testing import world_sizes
from fzero.tuning.offload._ratio import _first_fit
from tests.helpers import either, examples
from tests.tuning.steps import maker, plan_step

PARTS = 5
WAYS = st.sampled_from([(2, False, "host"), (3, True, "host"), (1, True, "device"), (0, False, "host")])


def find_by_hand(peaks: list[int], budget: float) -> int | None:
    """Return the first that fits, trying all."""
    return next((k for k, peak in enumerate(peaks) if peak <= budget), None)


falling = st.lists(st.integers(0, 10**6), min_size=2, max_size=300).map(lambda x: sorted(x, reverse=True))


@given(peaks=falling, budget=st.integers(-1, 10**6 + 1))
@example([5, 5, 5, 1], 4)
@example([9, 1, 1, 1], 1)
@example([2, 1], 1)
def test_the_search_for_a_ratio_finds_the_least_that_fits(peaks, budget):
    asked: list[int] = []
    result = _first_fit(lambda k: asked.append(k) or peaks[k], budget, len(peaks) - 1)
    assert result == find_by_hand(peaks, budget)
    assert len(set(asked)) == len(asked) <= 5 + 2 * math.log2(len(peaks))


@given(a=st.integers(1, 10**12), b=st.integers(0, 10**9), parts=st.integers(1, 10**5), share=st.floats(0, 1))
def test_the_search_for_a_ratio_on_a_line_plans_at_most_five_steps(a, b, parts, share):
    asked: list[int] = []
    peaks = [a * parts + b, b]
    _first_fit(lambda k: asked.append(k) or a * (parts - k) + b, peaks[1] + share * (peaks[0] - peaks[1]), parts)
    assert len(asked) <= 5


@pytest.mark.slow
@examples(0, 4)
@given(way=WAYS, n=world_sizes(8), share=st.floats(0, 1.1))
@example((2, False, "host"), 8, 0.0)
def test_the_offload_ratio_equals_that_of_an_exhaustive_search(way, n, share):
    """Of plans, at every world size; a larger budget never asks for more."""

    def plan_at(ratio: float) -> fzero.graph.Plan:
        return plan_step(ratio, *way, world_size=n)

    peaks = [plan_at(k / PARTS).peak_bytes for k in range(PARTS + 1)]
    assert peaks == sorted(peaks, reverse=True), peaks
    budget = peaks[-1] + share * (peaks[0] - peaks[-1])
    result = tuning.offload_ratio(plan_at, budget, parts=PARTS)
    k = round(result.ratio * PARTS)
    assert result.ratio == k / PARTS and k == find_by_hand(peaks, budget)
    assert result.plan is plan_at(result.ratio) and result.plan.peak_bytes <= budget
    assert k == 0 or peaks[k - 1] > budget
    more = tuning.offload_ratio(plan_at, budget + (peaks[0] - peaks[-1]) / 4, parts=PARTS)
    assert more.ratio <= result.ratio
    for t in result.tried:
        plan = plan_at(t.ratio)
        assert (t.device_bytes, t.host_bytes) == (plan.peak_of("device"), plan.peak_of("host"))
        assert t.down_bytes + t.up_bytes == sum([x.bytes * x.times for x in plan.transfers])
    assert [t.ratio for t in result.tried] == sorted({t.ratio for t in result.tried} | {result.ratio})


@pytest.mark.slow
def test_a_step_and_its_arguments_are_planned_for_any_world():
    at = {n: [plan_step(r, world_size=n).peak_bytes for r in (0, 1)] for n in (2, 8)}
    for n in either((8,), (2, 8)):
        none, all_ = at[n]
        asked: dict[str, Any] = {} if n == 2 else {"world_size": n}
        result = fzero.tuning.offload_ratio(maker(), (none + all_) / 2, **asked)
        assert abs(result.ratio - 0.5) < 0.02 and len(result.tried) <= 10
        assert result.plan.argument_bytes < at[2][0]
    assert at[8][0] < at[2][0]


@pytest.mark.slow
def test_a_jitted_step_keeps_its_schedule_options():
    def make_step(ratio: float) -> Any:
        step, *args = maker(stage=3)(ratio)
        return fzero.jit(step, backend="fx", prefetch=0), *args

    budget = (plan_step(0, 3).peak_bytes + plan_step(1, 3).peak_bytes) / 2
    assert fzero.tuning.offload_ratio(make_step, budget, parts=4).plan.settings["prefetch"] == 0


def test_a_ratio_prints_its_trials():
    none, all_ = plan_step(0.0).peak_bytes, plan_step(1.0).peak_bytes
    result = fzero.tuning.offload_ratio(lambda r: plan_step(r), all_ + 1, parts=PARTS)
    assert str(result).splitlines()[0] == f"ratio 1 fits {all_ / 1e3:.1f} kB of the device"
    assert re.search(rf"\n +0 .* {(none - all_ - 1) / 1e3:.1f} kB too much\n", str(result))
    assert str(result).endswith("smallest that fits") and "<pre>" in result._repr_html_()
    assert repr(result).startswith("OffloadRatio(1: ")
    loose = fzero.tuning.offload_ratio(lambda r: plan_step(r), none)
    assert loose.ratio == 0 and len(loose.tried) == 1


ALL = plan_step(1.0).peak_bytes
HOST = plan_step(1.0).peak_of("host")
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no function": ({"make_step": 3}, TypeError, r"make_step=3: expected a function \(ratio\)"),
    "no step": ({"make_step": lambda r: r}, TypeError, r"make_step\(0\) returned float: expected \(step, \*args\)"),
    "arguments alone": (
        {"make_step": lambda r: (torch.ones(1), 2)},
        TypeError,
        r"make_step\(0\) returned \(Tensor, int\): expected \(step, \*args\), the arguments of fzero.plan, or a "
        r"fzero.graph.Plan",
    ),
    "a plan of one world": ({"world_size": 8}, ValueError, r"world_size=8: make_step\(0\) returned a plan"),
    "no parts": ({"parts": 0}, ValueError, r"parts=0: expected an int, at least 1"),
    "true parts": ({"parts": True}, ValueError, r"parts=True: expected an int"),
    "too small": (
        {"memory_budget": ALL - 7},
        ValueError,
        rf"with all of the state on the host the device still holds {ALL:,} bytes at its peak, 7 more .* of parameters"
        r".*fzero.remat, more ranks, more micro-batches.*docs/trouble.md#out-of-memory",
    ),
    "no offload": (
        {"make_step": lambda r: plan_step(0.0), "memory_budget": 1000},
        ValueError,
        r"the peak at a ratio of 0, too: does make_step pass its argument to optim.offload\?",
    ),
    "too small a host": (
        {"memory_budget": ALL, "host_budget": HOST - 5, "parts": 1},
        ValueError,
        rf"at the smallest ratio that fits the device, 1, the host holds {HOST:,} bytes for each rank, 5 more than",
    ),
}
for _value in (0, -1.0, None, True, "75 GB", math.inf, math.nan):
    BAD[f"a budget of {_value!r}"] = (
        {"memory_budget": _value},
        ValueError,
        rf"memory_budget={re.escape(repr(_value))}: expected a number of bytes above 0, such as 75e9",
    )
BAD["a host's budget of 0"] = ({"host_budget": 0}, ValueError, r"host_budget=0: expected a number of bytes above 0")


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_offload_ratio_are_refused(name):
    options, error, message = BAD[name]
    asked: dict[str, Any] = {"make_step": lambda r: plan_step(r), "memory_budget": 10**9} | options
    with pytest.raises(error, match=message):
        fzero.tuning.offload_ratio(**asked)


def test_a_state_that_just_fits_on_the_host_is_accepted():
    assert fzero.tuning.offload_ratio(lambda r: plan_step(r), ALL, host_budget=HOST, parts=1).ratio == 1
