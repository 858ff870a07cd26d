"""Bounds: no plan is faster or smaller; a search by them finds the best row, and says what it left out."""

import contextlib
import io
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import tuning
from fzero.tuning import Configuration, ConfigurationTable, SkippedConfiguration, TableRow
from fzero.tuning._search_space import REMATS, TuneOptions, make_search_space
from fzero.tuning.command import run
from fzero.tuning.models import Bounds, ModelStep, largest_sizes, powers_of_two, usable_sizes
from fzero.tuning.search import ConfigurationPlanner, UnplannedConfiguration, search_by_bounds
from tests.helpers import cases, examples
from tests.tuning.helpers import TINY

# only what the bounds count takes time
MACHINE = replace(
    tuning.H100, launch_seconds=1e-12, latency_seconds=1e-12, hop_seconds=1e-12, network_hop_seconds=1e-12
)
ONE = Configuration(1, 2, 1, ranks=2, depth=2)
PIPELINE = Configuration(1, 1, 4, ranks=1, pp=2, depth=4)
CODED: dict[str, Any] = {"moments": "int8", "gather": "int8", "reduce": "int4", "chunked_loss": True}
# the model, the configuration, and the least share of the planned seconds that the bound is
PLANS = [
    ("causal", replace(ONE, stage=3, remat=True), 0.97),
    ("causal", replace(ONE, remat="matmuls", tp=2), 0.97),
    ("causal", replace(PIPELINE, remat=True), 0.85),
    ("experts", replace(ONE, ep=2), 0.0),
]
MORE = [
    ("causal", ONE, 0.97),
    ("causal", replace(ONE, stage=3, remat=True, compiled=True), 0.97),
    ("causal", replace(ONE, stage=2, accumulation=2, remat="every-2"), 0.97),
    ("causal", replace(ONE, cp=2), 0.97),
    ("causal", replace(ONE, precision="float32"), 0.97),
    ("causal", replace(ONE, stage=3, ranks=16, host=2, remat=True), 0.97),
    ("causal", replace(ONE, stage=2, ranks=16, host=2, tp=2), 0.9),
    ("causal", replace(ONE, stage=2, offload=0.5), 0.9),
    ("causal", replace(ONE, stage=3, float8="rowwise"), 0.95),
    ("causal", replace(ONE, stage=2, **CODED), 0.95),
    ("causal", replace(PIPELINE, schedule="zb"), 0.85),
    ("causal", replace(PIPELINE, schedule="gpipe"), 0.85),
    ("causal", replace(PIPELINE, pp=4, depth=6), 0.8),
    ("causal", replace(PIPELINE, schedule="interleaved", remat=True), 0.85),
    ("gpt2", replace(ONE, stage=0), 0.9),
    ("masked", replace(ONE, stage=2, remat=True), 0.9),
    ("image", replace(ONE, stage=3), 0.5),
    ("experts", replace(ONE, stage=3, remat=True), 0.0),
]


@pytest.mark.parametrize("name,config,share", cases(PLANS[1:3], [*PLANS, *MORE]), ids=str)
def test_no_plan_is_faster_or_smaller_than_its_bounds(name, config, share):
    make_step = ModelStep(TINY[name], 16, False)
    bounds, row = make_step.bounds(config, MACHINE), ConfigurationPlanner(make_step, MACHINE)(config)
    assert share * row.seconds <= bounds.seconds <= row.seconds
    assert 0.15 * row.peak_bytes <= bounds.bytes <= row.peak_bytes


SPACE = make_search_space(TuneOptions(4, 64, (1, 2, 3), (1, 4), REMATS, ("bfloat16",), (0.0,)))


class Planner:
    """Makes up rows whose seconds and bytes are factors above their bounds."""

    def __init__(self, data: Any) -> None:
        self.rows = {
            c: TableRow(c, {"parameters": held}, {}, seconds, 0.0, 1.0, True, {})
            for c, held, seconds in draw_costs(data)
        }
        self.started: list[Configuration] = []
        factors = data.draw(st.lists(st.floats(0.3, 1.0), min_size=len(self.rows), max_size=len(self.rows)))
        self.bounds = {
            c: Bounds(x * row.seconds, x * row.peak_bytes)
            for x, (c, row) in zip(factors, self.rows.items(), strict=True)
        }

    def start(self, config: Configuration) -> Future[TableRow]:
        future: Future[TableRow] = Future()
        future.set_result(self.rows[config])
        self.started.append(config)
        return future


def draw_costs(data: Any) -> list[tuple[Configuration, float, float]]:
    """Draw the bytes and the seconds of each configuration; one that surely holds no less has no fewer bytes."""

    def held(c: Configuration) -> float:
        return (4 - c.stage) * (1 + c.micro_batch) * (4 - REMATS.index(c.remat))

    return [(c, held(c), data.draw(st.floats(1, 9))) for c in SPACE]


@examples(30, 300)
@given(budget=st.floats(0, 120), max_rows=st.integers(1, 30), data=st.data())
def test_a_search_by_bounds_finds_the_best_or_says_how_fast_it_may_be(budget, max_rows, data):
    planner = Planner(data)
    results = [*search_by_bounds(SPACE, planner.start, budget, planner.bounds.__getitem__, max_rows)]
    assert sorted(str(x.config) for x in results if x.config in planner.started) == sorted(map(str, planner.started))
    assert {x.config for x in results} == {*SPACE}, "each configuration has a result"
    rows = [x for x in results if isinstance(x, TableRow)]
    skipped = [x for x in results if isinstance(x, SkippedConfiguration)]
    unplanned = tuple(x for x in results if isinstance(x, UnplannedConfiguration))
    assert len(rows) <= max(max_rows, 1)
    table = ConfigurationTable(tuple(rows), tuple(skipped), tuning.H100, None, budget, unplanned)
    for x in skipped:
        assert planner.rows[x.smaller].peak_bytes > budget and x.config.holds_no_less_than(x.smaller)
    fits = [r for r in planner.rows.values() if r.peak_bytes <= budget]
    if not fits:
        assert not table.fitting
        return
    best = min(fits, key=lambda r: r.seconds)
    assert any(x.config == best.config for x in (*table.fitting, *table.left_out)) or (
        table.fitting[0].seconds == best.seconds
    )
    if len(rows) < max_rows:
        assert table.fitting[0].seconds == best.seconds and not table.left_out


def test_a_search_by_bounds_needs_a_model_by_name():
    with pytest.raises(ValueError, match=r"max_rows=3: only models by name, from fzero.tuning.model_step, have bounds"):
        fzero.tune(lambda c: None, world_size=2, global_batch=2, machine="h100", max_rows=3)


def command(*words: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run([*words, "--workers", "1"])
    return code, out.getvalue(), errors.getvalue()


def test_the_command_searches_all_sizes_of_an_axis(tmp_path, monkeypatch):
    monkeypatch.setitem(tuning.models._presets.PRESETS, "tiny", replace(TINY["causal"], depth=1))
    words = ["plan", "tiny", "--world", "4", "--batch", "2", "--length", "16", "--stages", "1", "--remat", "no"]
    code, text, _ = command(*words, "--tp", "auto", "--pp", "auto", "--rows", "1", "--json", str(tmp_path / "table"))
    table = ConfigurationTable.from_json((tmp_path / "table").read_text())
    # two heads of keys and values, one block, and two samples for at most two data-parallel ranks
    assert {c.tp for c in (x.config for x in (*table.rows, *table.unplanned))} == {2}
    assert code == 0 and len(table.rows) == 1
    assert f"1 of {1 + len(table.unplanned)} configurations fit" in text
    assert len(table.left_out) == text.count("left out: ")
    assert ConfigurationTable.from_json(table.to_json()) == table


def test_axis_sizes_that_cannot_be_searched_are_refused(monkeypatch):
    monkeypatch.setitem(tuning.models._presets.PRESETS, "tiny", replace(TINY["causal"], depth=1))
    sizes = ["--world", "8", "--batch", "3", "--length", "16"]
    code, _, error = command("plan", "tiny", *sizes, "--tp", "auto")
    assert (
        code == 2 and "--batch 3: no sizes of the axes leave data-parallel ranks of --world 8 that divide it" in error
    )
    code, _, error = command("plan", "tests.tuning.spaces:make_step", *sizes, "--tp", "auto")
    assert code == 2 and "--tp auto: only models by name say what divides them" in error


@pytest.mark.parametrize("words", [("--rows", "0"), ("--rows", "few"), ("--tp", "many")])
def test_the_command_refuses_options_that_are_no_counts(words, capsys):
    with pytest.raises(SystemExit):
        run(["plan", "gpt2", *words])
    assert f"argument {words[0]}: '{words[1]}': expected" in capsys.readouterr().err


def test_the_sizes_of_axes_divide_what_they_split():
    shape = replace(TINY["causal"], heads=24, kv_heads=24, mlp=96)
    assert largest_sizes(shape, 48, 8, 5) == {"cp": 8, "tp": 8, "pp": 5}
    assert largest_sizes(replace(shape, kv_heads=4), 30, 8, 5) == {"cp": 1, "tp": 4, "pp": 5}
    assert largest_sizes(TINY["image"], 16, 2, 5) == {"cp": 1, "tp": 2, "pp": 5}
    assert [powers_of_two(n) for n in (1, 5, 8)] == [(1,), (1, 2, 4), (1, 2, 4, 8)]
    # 16 ranks and 4 samples: at least 4 ranks share each sample
    assert usable_sizes({"tp": (1, 2, 4), "pp": (1, 2)}, 16, 4) == {"tp": (2, 4), "pp": (1, 2)}
