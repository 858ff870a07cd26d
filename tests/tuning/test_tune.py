"""tune: rows are plans, the best is that of trying all, few blocks say what many take."""

import csv
import functools
import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.tuning import CPU, H100, Configuration, ConfigurationTable
from fzero.tuning.machines._machine import _CONSTANTS
from fzero.tuning.machines._named_machines import MACHINES
from fzero.tuning.search import ConfigurationPlanner
from tests.helpers import cases, either, examples
from tests.tuning.spaces import make_step, plan_once

STAGES = either((2, 3), (0, 1, 2, 3))
SPACE: dict[str, Any] = {
    "world_size": 4,
    "global_batch": 256,
    "micro_batches": (8, 64),
    "machine": CPU,
    "stages": STAGES,
    "depth": either(2, 3),
}


@functools.cache
def try_all() -> ConfigurationTable:
    """Try all of it, at the first use: not while tests are collected."""
    return fzero.tune(lambda c: plan_once(c), **SPACE, memory=1e12, offload=(0.0, 1.0))


@functools.cache
def peaks() -> list[int]:
    return sorted({r.peak_bytes for r in try_all().rows})


def test_a_row_is_the_plan_of_its_configuration():
    assert len(try_all().rows) == len(STAGES) * 2 * 3 * 2 and not try_all().skipped
    for row in try_all().rows[:: either(20, 1)]:
        plan = plan_once(row.config)
        assert row.peak_bytes == plan.peak_bytes and row.in_full
        assert row.device_bytes == {k: n for k in row.device_bytes if (n := plan.live_of(k)[plan.peak_at])}
        assert row.traffic_bytes == (
            {"dp": sum(c.bytes * c.times for c in plan.collectives)} if plan.collectives else {}
        )
        assert row.host_bytes == plan.peak_of("host") and row.flops == plan.flops
        assert row.config.global_batch == 256 and row.config.accumulation == 64 // row.config.micro_batch


@examples(8, 60)
@given(share=st.floats(0, 1.2), at=st.deferred(lambda: st.sampled_from(peaks())))
def test_the_best_row_equals_that_of_an_exhaustive_search(share, at):
    """It does so at any budget, also one that a row just meets; what is skipped would not have fitted."""
    for budget in (at, share * peaks()[-1] + 1):
        table = fzero.tune(lambda c: plan_once(c), **SPACE, memory=budget, offload=(0.0, 1.0))
        fits = [r for r in try_all().rows if r.peak_bytes <= budget]
        assert {r.config for r in table.fitting} == {r.config for r in fits}
        assert {s.config for s in table.skipped} | {r.config for r in table.rows} == {r.config for r in try_all().rows}
        if fits:
            assert table.best().row == min(fits, key=lambda r: (r.seconds, r.peak_bytes))
        else:
            with pytest.raises(ValueError, match="no configuration fits"):
                table.best()
        for skipped in table.skipped:
            assert skipped.config.holds_no_less_than(skipped.smaller)


def test_a_search_skips_rows_that_cannot_fit():
    """Where the leanest of all stages do not fit, no other micro-batch and no less of remat is planned."""
    table = fzero.tune(lambda c: plan_once(c), **SPACE, memory=1000)
    assert {(r.config.micro_batch, r.config.remat) for r in table.rows} == {(8, True)}
    assert {s.config.micro_batch for s in table.skipped} == {8, 64}


def test_min_peak_bytes_bound_the_peaks_of_configurations_that_hold_no_less():
    for a in try_all().rows:
        assert a.min_peak_bytes <= a.peak_bytes
        for b in try_all().rows:
            assert a.peak_bytes >= b.min_peak_bytes or not a.config.holds_no_less_than(b.config), (a.config, b.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage,remat,depth",
    cases(((3, True, 15),), ((1, False, 18), (1, True, 15), (3, False, 40))),
)
def test_a_deep_step_is_extrapolated_from_few_blocks(stage, remat, depth):
    config = Configuration(stage, 8, 8, remat, ranks=4, depth=depth)
    row, plan = ConfigurationPlanner(make_step, CPU)(config), fzero.plan(*make_step(config), hardware=CPU.as_hardware())
    assert not row.in_full
    assert row.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.0005)
    assert row.traffic_bytes == {"dp": sum(c.bytes * c.times for c in plan.collectives)}
    assert row.flops == plan.flops


@pytest.mark.slow
def test_the_three_fastest_rows_are_planned_in_full():
    asked = {**SPACE, "stages": (2,), "remat": (False, True), "depth": 18}
    table = fzero.tune(make_step, **asked, memory=1e12)
    assert [r.in_full for r in table.fitting[:3]] == [True] * 3
    rough = sum(not r.in_full for r in table.rows)
    assert rough >= 1 and f"{rough} rows (~) are extrapolated from two models" in str(table) and " ~" in str(table)


@pytest.mark.slow
def test_a_table_does_not_depend_on_the_number_of_workers():
    asked = {**SPACE, "stages": (2, 3), "remat": (False,), "micro_batches": (64,), "memory": 1e12}
    tables = [fzero.tune(make_step, **asked, workers=n) for n in (1, 2)]
    assert str(tables[0]) == str(tables[1]) and tables[0].to_json() == tables[1].to_json()


def test_a_table_prints_its_rows_budget_and_frontier():
    table = fzero.tune(lambda c: plan_once(c), **SPACE, memory=40e6, margin=0.1)
    said = str(table)
    assert f"of {len(table.rows) + len(table.skipped)} configurations fit" in said and "less a margin" in said
    assert "too much" in said and "seconds are estimates" in said
    flat = said.replace("\n", " ")
    assert all(f"{c.name} {c.value} ({c.source})" in flat for c in table.machine.constants())
    best = table.best()
    assert str(best) in said.replace("\n", " ") and best.config is best.row.config
    read = ConfigurationTable.from_json(table.to_json())
    assert read.best() == best and read.to_csv() == table.to_csv()
    assert "Infinity" not in table.to_json() and json.loads(table.to_json())["best"]["reason"] == best.reason
    records = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert len(records) == len(table.rows) and float(records[0]["seconds"]) == best.row.seconds
    assert sum(float(r["over_bytes"]) == 0 for r in records) == len(table.fitting)
    assert "<pre>" in table._repr_html_() and repr(table).startswith("ConfigurationTable(")
    for one, other in zip(table.frontier, table.frontier[1:], strict=False):
        assert one.seconds < other.seconds and one.peak_bytes > other.peak_bytes


def test_the_reason_of_the_best_row_names_the_memory_that_the_next_faster_lacks():
    of = {
        r.config.remat: r
        for r in try_all().rows
        if (r.config.stage, r.config.micro_batch, r.config.offload) == (2, 64, 0)
    }
    small, large, huge = (
        replace(r, seconds=s, device_bytes={"activations": n, "gradients": 5e8})
        for r, s, n in zip(of.values(), (3.0, 2.0, 1.0), (1e9, 2e9, 4e9), strict=True)
    )
    table = replace(try_all(), rows=(huge, small, large), budget_bytes=2e9)
    assert table.best().row == small and table.frontier == [huge, large, small]
    said = f"Of 2 faster configurations that do not fit, the smallest, {large.config}, is 500.0 MB too large: "
    said += "it holds 2.0 GB of activations"
    assert table.best().reason == said
    assert replace(table, budget_bytes=1e10).best().reason == "No planned configuration is faster"


def test_a_table_of_plans_draws_a_picture(tmp_path):
    try_all().plot(tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000


@pytest.mark.slow
def test_updates_on_the_host_take_the_time_of_its_memory_and_link():
    """An update on the host waits for its memory and its link; one on the device for neither."""

    def row(offload: float, **changed: float) -> Any:
        machine = replace(H100, **changed)
        asked = {**SPACE, "machine": machine, "stages": (2,), "micro_batches": (64,), "remat": (False,), "depth": 1}
        table = fzero.tune(make_step, **asked, memory=1e12, offload=(offload,))
        (actual,) = table.rows
        assert actual.seconds == fzero.plan(*make_step(actual.config), hardware=machine.as_hardware()).seconds
        return actual

    usual, there = row(1.0), row(0.0)
    state = there.device_bytes["optimizer state"]
    assert usual.device_bytes.get("optimizer state", 0) < 0.1 * state and usual.host_bytes >= state
    slow = H100.host_memory_bandwidth / 1000
    longer = row(1.0, host_memory_bandwidth=slow).seconds - row(1.0, host_memory_bandwidth=2 * slow).seconds
    # a share of the host reads and writes at least the state, which takes as much longer as it is slower
    assert longer >= 2 * state / (2 * slow / H100.ranks) > 10 * usual.seconds
    fewer = row(1.0, host_memory_bandwidth=slow / 2, ranks=4).seconds  # half of the devices share half of the memory
    assert fewer == pytest.approx(row(1.0, host_memory_bandwidth=slow).seconds, rel=0.01)
    assert row(1.0, host_link_bandwidth=H100.host_link_bandwidth / 1000).seconds > 2 * usual.seconds
    assert (
        row(0.0, host_memory_bandwidth=slow, host_link_bandwidth=H100.host_link_bandwidth / 1000).seconds
        == there.seconds
    )


def test_a_card_keeps_a_margin_and_a_machine_its_own():
    asked = {**SPACE, "machine": "H100", "stages": (3,), "remat": (True,), "micro_batches": (64,)}
    tables = [fzero.tune(lambda c: plan_once(c), **asked, **more) for more in ({"memory": 80e9}, {})]
    assert [t.budget_bytes for t in tables] == [0.93 * 80e9, H100.device_bytes]


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown machine": ({"machine": "h1000"}, ValueError, r"machine='h1000' is unknown: expected .*h100"),
    "no machine": ({"machine": 3}, TypeError, r"machine=3: expected a fzero.tuning.Machine"),
    "a batch that does not divide": (
        {"global_batch": 258},
        ValueError,
        r"global_batch=258 does not divide over world_size=4 ranks: the nearest that do are 256 and 260",
    ),
    "a small batch": ({"global_batch": 3}, ValueError, r"global_batch=3 does not divide .* are 4"),
    "a micro-batch that does not divide": (
        {"micro_batches": (1, 3)},
        ValueError,
        r"micro_batches=\(1, 3\): 3 does not divide the 64 samples of a rank, .*; 1, 2, 4, 8, 16, 32, 64 do",
    ),
    "a stage": (
        {"stages": (1, 9)},
        ValueError,
        rf"stages=\(1, 9\): 9 is not allowed: expected ints from 0 to {STAGES[-1]}",
    ),
    "a true stage": ({"stages": (True,)}, ValueError, r"stages=\(True,\): True is not allowed"),
    "a dtype": (
        {"precision": ("fp8",)},
        ValueError,
        r"precision=\('fp8',\): 'fp8' is not allowed: expected names of 'float32', 'bfloat16'",
    ),
    "a word alone": ({"precision": "bfloat16"}, ValueError, r"precision='bfloat16': expected a tuple"),
    "a remat": ({"remat": (1,)}, ValueError, r"remat=\(1,\): 1 is not allowed"),
    "a ratio": (
        {"offload": (0, 1.5)},
        ValueError,
        r"offload=\(0, 1.5\): 1.5 is not allowed: expected ratios from 0 to 1",
    ),
    "an ep that does not divide": (
        {"ep": (3,)},
        ValueError,
        r"ep=\(3,\): 3 is not allowed: expected ints that divide world_size=4",
    ),
    "twice": ({"stages": (1, 1)}, ValueError, r"stages=\(1, 1\): a value occurs twice"),
    "no ranks": ({"world_size": 0}, ValueError, r"world_size=0: expected an int, at least 1"),
    "no depth": ({"depth": 0}, ValueError, r"depth=0: expected an int"),
    "no memory": ({"memory": "80GB"}, ValueError, r"memory='80GB': expected a number of bytes above 0"),
    "all margin": ({"margin": 1}, ValueError, r"margin=1: expected a share"),
    "a link of no axis": (
        {"axis_bandwidths": {3: 1e9}},
        ValueError,
        r"axis_bandwidths=\{3: 1000000000.0\}: expected bytes a second",
    ),
    "a link of no speed": (
        {"axis_bandwidths": {"dp": 0}},
        ValueError,
        r"axis_bandwidths=\{'dp': 0\}: expected bytes a second",
    ),
    "no workers": ({"workers": 0}, ValueError, r"workers=0: expected an int"),
    "no function": ({"make_step": 3}, TypeError, r"make_step=3: expected a function \(configuration\)"),
    "no step": (
        {"make_step": lambda c: c.stage},
        TypeError,
        r"make_step\(stage 3, micro-batch 1 x 64, bfloat16, remat\) returned int: expected \(step, \*args\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_tune_are_refused(name):
    options, error, message = BAD[name]
    asked: dict[str, Any] = {"make_step": make_step, **SPACE, "micro_batches": None} | options
    with pytest.raises(error, match=message):
        fzero.tune(**asked)


def test_a_budget_that_nothing_fits_says_what_to_change():
    table = fzero.tune(lambda c: plan_once(c), **{**SPACE, "stages": (1, 2)}, memory=1000, remat=(False,))
    least = min(r.peak_bytes for r in table.rows)
    with pytest.raises(
        ValueError, match=rf"no configuration fits 1.0 kB: the smallest, stage 2, .* takes {least / 1e6:.1f} MB"
    ):
        table.best()
    with pytest.raises(ValueError, match=r"of parameters.*Try stage 3, or remat=True, or .*offload .*or more ranks"):
        table.best()
    assert "nothing fits" in str(table) and json.loads(table.to_json())["best"] is None


def test_an_error_in_a_planned_step_names_its_configuration():
    def broken(config: Configuration) -> Any:
        return (lambda x: x.sum().item()), torch.empty(3, device="meta")

    with pytest.raises(ValueError, match="has no mesh") as error:
        fzero.tune(broken, **SPACE)
    assert "while planning stage 3, micro-batch 8 x 8" in error.value.__notes__[0]


def test_json_that_holds_no_table_is_refused():
    for text in ("{}", "[]", "nothing", '{"rows": [1]}'):
        with pytest.raises(ValueError, match=r"expected the JSON of a table of fzero.tune"):
            ConfigurationTable.from_json(text)


# Plans for a GPU without one.


def test_a_plan_for_a_gpu_has_no_buffers_of_gloo():
    config = Configuration(3, 8, 8, ranks=4)
    ours, theirs = plan_once(config), fzero.plan(*make_step(config))
    labels = [{r.label for r in plan.ranges} for plan in (ours, theirs)]
    assert "the ranks' parts" in labels[1] and "the ranks' parts" not in labels[0]
    assert ours.flops == theirs.flops and ours.peak_bytes <= theirs.peak_bytes and ours.seconds < theirs.seconds
    assert ours.argument_bytes == theirs.argument_bytes


def test_unknown_hardware_is_refused():
    with pytest.raises(ValueError, match=r'hardware=.tpu.: expected "cpu" or "cuda"'):
        fzero.plan(*make_step(Configuration(3, 8, 8, ranks=4)), hardware="tpu")


@pytest.mark.slow
def test_collectives_between_machines_are_slower_and_more_ranks_take_longer():
    at = H100.as_hardware()
    times = []
    for ranks in (8, 16, 1024):
        args = make_step(Configuration(3, 1, 1, ranks=ranks))
        times.append(fzero.plan(*args, hardware=at).seconds)
    assert times[0] < times[1] < times[2]
    near = at._replace(ranks_per_machine=math.inf)
    assert fzero.plan(*make_step(Configuration(3, 1, 1, ranks=16)), hardware=near).seconds < times[1]


def test_links_are_given_by_axis():
    asked = {**SPACE, "memory": 1e12, "stages": (2,), "remat": (False,), "micro_batches": (64,)}
    rows = {}
    for name, links in {"none": None, "slow": {"dp": 1e6}, "other": {"tp": 1e6}}.items():
        table = fzero.tune(make_step, **asked, axis_bandwidths=links)
        rows[name] = table.rows[0]
        assert ("no collective runs along tp" in str(table)) == (name == "other")
        assert ("collectives along dp 0.001 GB/s (as given)" in str(table).replace("\n", " ")) == (name == "slow")
        assert ConfigurationTable.from_json(table.to_json()) == table
    moved = rows["slow"].traffic_bytes["dp"]
    assert rows["other"].seconds == rows["none"].seconds and rows["slow"].seconds > 0.7 * moved / 1e6


def test_each_constant_has_its_source():
    for machine in MACHINES.values():
        measured = [name for name in _CONSTANTS if getattr(machine, name)]
        assert len(machine.constants()) == len(measured) >= 12
        assert all(c.source != "as given" for c in machine.constants())
        sources = {c.name: c.source for c in replace(machine, flops=1e12).constants()}
        assert [name for name, source in sources.items() if source == "as given"] == ["products of half precision"]


def test_attention_planned_on_a_cpu_counts_as_on_a_gpu():
    q = torch.empty(2, 4, 8, 16, device="meta")
    plan = fzero.plan(lambda q: torch.func.grad(lambda q: _attend(q).sum())(q), q)
    assert plan.flops == (4 + 10) * 2 * 4 * 8 * 8 * 16


def _attend(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_float32_products_take_longer_in_the_cost_model():
    config, at = (
        Configuration(1, 8, 8, precision="float32", ranks=4),
        H100.as_hardware()._replace(flops=1e9, product_flops=0.0),
    )
    slow, fast = (fzero.plan(*make_step(config), hardware=at._replace(float32_slowdown=slow)) for slow in (2.0, 1.0))
    assert slow.seconds == pytest.approx(2 * fast.seconds, rel=0.01)
    half = fzero.plan(*make_step(replace(config, precision="bfloat16")), hardware=at._replace(float32_slowdown=2.0))
    assert half.seconds == pytest.approx(fast.seconds, rel=0.01)
