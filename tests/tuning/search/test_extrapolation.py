"""Models of few blocks say what many take, or that they do not know."""

import operator
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.tuning import H100, Configuration, TableRow
from fzero.tuning._row import OperationKey, PlanSummary, ScheduleCost
from fzero.tuning.models import ModelShape, ModelStep
from fzero.tuning.search._configuration_planner import ConfigurationPlanner
from fzero.tuning.search._extrapolation import extrapolate_line
from fzero.tuning.search._search import _BUDGET_TOLERANCE, refine
from tests.helpers import examples

SETTINGS = (("prefetch", 0),)
LOGITS = 1000.0


def summary(held: dict[str, float], blocks: int, **more: float) -> PlanSummary:
    """Make up a summary of a model: operations with the bytes that are alive there."""
    peak = max(held.values(), default=0.0)
    schedules = {SETTINGS: ScheduleCost(peak, more.get("seconds", blocks))}
    kinds = {(name,): {"activations": n} for name, n in held.items()}
    return PlanSummary(kinds, {"dp": 7.0 * blocks}, 3.0, more.get("flops", 5.0 * blocks), schedules)


def lines(blocks: int, slopes: dict[str, float], steps: dict[str, int]) -> dict[str, float]:
    """Return bytes that grow by a slope with each block, and once by the logits: from a number of blocks on."""
    return {name: 100.0 + slope * blocks + LOGITS * (blocks >= steps[name]) for name, slope in slopes.items()}


@examples(60, 300)
@given(data=st.data(), count=st.integers(1, 4), step=st.integers(1, 2), deep=st.integers(20, 80))
def test_an_extrapolated_row_equals_the_fully_planned_one(data, count, step, deep):
    """Each operation may come to lie within the logits, from some number of blocks on."""
    names = "abcd"[:count]
    slopes = {name: data.draw(st.sampled_from((0.0, 1.0, 10.0))) for name in names}
    jumps = {name: data.draw(st.sampled_from((0, 5, 6))) for name in names}
    summaries = {n: summary(lines(n, slopes, jumps), n) for n in (4, 4 + step, 4 + 2 * step)}
    row = extrapolate_line(summaries, deep)
    if row is not None:
        assert sum(row.at_peak.values()) == pytest.approx(max(lines(deep, slopes, jumps).values()))
        assert row.flops == 5.0 * deep and row.traffic_bytes == {"dp": 7.0 * deep}
    elif step == 1:
        assert any(jumps.values())  # lines alone are always extrapolated


def test_an_operation_within_the_logits_in_one_model_alone_proves_nothing():
    """Of a tied model of 80 blocks, models of 4 and 5 blocks told 283.7 GB, and a third 54.8."""
    models = {n: summary(lines(n, {"gather": 1.0, "loss": 2.0}, {"gather": 5, "loss": 0}), n) for n in (4, 5, 6, 7)}
    assert extrapolate_line({n: models[n] for n in (4, 5, 6)}, 80) is None
    row = extrapolate_line({n: models[n] for n in (5, 6, 7)}, 80)
    assert row is not None and sum(row.at_peak.values()) == 100 + 2 * 80 + LOGITS


def test_a_small_operation_off_its_line_is_left_out():
    models = {n: summary({"loss": 1000.0 + 10 * n, "bucket": 10.0 + (n == 5)}, n) for n in (4, 5, 6)}
    assert extrapolate_line(models, 80) == summary({"loss": 1800.0, "bucket": 10.0}, 80)
    models = {n: summary({"loss": 1000.0 + 10 * n, "bucket": 10.0 + 50 * (n == 5)}, n) for n in (4, 5, 6)}
    assert extrapolate_line(models, 80) is None  # by its largest growth it would be the peak
    models = {n: summary({"loss": 1000.0 + 10 * n, "bucket": 10.0 + 5 * (n == 5)}, n) for n in (4, 5, 6)}
    row = extrapolate_line(models, 80)
    assert row is not None and [*row.device_bytes] == [("loss",)]


def test_an_operation_known_by_its_number_counts_only_on_a_line():
    def models(bytes_of_number: Callable[[int], float]) -> dict[int, PlanSummary]:
        return {
            n: replace(summary({"loss": 1000.0 + 10 * n}, n), device_bytes=bytes_of(n, bytes_of_number(n)))
            for n in (4, 5, 6)
        }

    def bytes_of(n: int, numbered: float) -> dict[OperationKey, dict[str, float]]:
        return {("loss", "peak"): {"activations": 1000.0 + 10 * n}, ("loss", -2): {"activations": numbered}}

    steep = extrapolate_line(models(lambda n: 900.0 + 20 * n), 80)
    assert steep is not None and sum(steep.at_peak.values()) == 900.0 + 20 * 80
    uneven = extrapolate_line(models(lambda n: 900.0 + 50 * (n == 5)), 80)
    assert uneven is not None and sum(uneven.at_peak.values()) == 1000.0 + 10 * 80


@pytest.mark.parametrize("what", ["seconds", "flops"])
def test_extrapolation_requires_all_figures_on_a_line(what):
    models = {n: summary({"loss": 10.0 * n}, n, **{what: 100.0 + n}) for n in (4, 5, 6)}
    assert extrapolate_line(models, 80) is not None
    models[5] = summary({"loss": 50.0}, 5, **{what: 103.0})
    assert extrapolate_line(models, 80) is None


def test_a_peak_at_an_operation_that_another_model_lacks_proves_nothing():
    models = {n: summary({"loss": 10.0 * n, **({"more": 500.0} if n == 6 else {})}, n) for n in (4, 5, 6)}
    assert extrapolate_line(models, 80) is None


@pytest.mark.slow
def test_a_tied_model_of_many_blocks_takes_what_its_plan_says():
    shape = ModelShape("tied", 512, 24, 8, 2048, 4096, tied=True, norm="rms", biases="")
    planner = ConfigurationPlanner(ModelStep(shape, 128, False), H100)
    row = planner(Configuration(3, 2, 1, True, ranks=32, depth=24))
    assert row.peak_bytes == pytest.approx(planner(row).peak_bytes, rel=0.001)


# Which rows are planned in full.


def row(name: int, peak: float, seconds: float, in_full: bool = False) -> TableRow:
    return TableRow(Configuration(3, name, 1), {"activations": peak}, {}, seconds, 0.0, 1.0, in_full, {})


def refine_rows(
    rows: list[TableRow], actual: dict[int, float], budget: float = 100.0
) -> tuple[list[TableRow], list[int]]:
    """Refine rows whose full plans hold other bytes. Return the rows, and which were planned in full."""
    asked: list[int] = []

    def start(request: Any) -> Future[TableRow]:
        asked.append(request.config.micro_batch)
        future: Future[TableRow] = Future()
        peak = actual.get(request.config.micro_batch, request.peak_bytes)
        future.set_result(replace(request, device_bytes={"activations": peak}, in_full=True))
        return future

    return refine(rows, start, budget), asked


def test_no_row_is_refused_where_its_extrapolation_nearly_fits():
    """The fastest row is 4% above the budget by its extrapolation, and below it by its plan."""
    rows, asked = refine_rows([row(1, 104.0, 1.0), row(2, 50.0, 2.0)], {1: 99.0})
    assert asked == [1, 2] or asked == [2, 1]
    assert min([r for r in rows if r.peak_bytes <= 100], key=operator.attrgetter("seconds")).config.micro_batch == 1
    far = row(3, _BUDGET_TOLERANCE * 100 + 1, 0.5)
    assert refine_rows([far, row(2, 50.0, 2.0)], {})[1] == [2]


def test_no_row_is_reported_to_fit_before_it_is_planned_in_full():
    rows, asked = refine_rows([row(1, 500.0, 1.0), row(2, 300.0, 2.0)], {2: 55.0})
    assert asked == [2] and [r.peak_bytes for r in rows] == [500.0, 55.0]
    assert refine_rows([row(1, 500.0, 1.0)], {})[1] == [1]


def test_the_three_fastest_rows_that_fit_are_planned_in_full():
    rows = [row(n, 10.0, float(n)) for n in range(1, 6)]
    assert sorted(refine_rows(rows, {})[1]) == [1, 2, 3]
    assert sorted(refine_rows(rows, {2: 200.0})[1]) == [1, 2, 3, 4]  # the second does not fit after all
