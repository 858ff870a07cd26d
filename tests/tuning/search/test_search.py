"""The search: on any number of processes the same is planned and skipped, none of them waits, and rows are kept."""

import concurrent.futures
import os
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.tuning import CPU, H100, Configuration, SkippedConfiguration, TableRow
from fzero.tuning._search_space import REMATS, TuneOptions, make_search_space
from fzero.tuning.search import _plan_workers, _row_cache, _search, search_rows, sort_results
from tests.helpers import examples
from tests.tuning.spaces import plan_once

SPACE = make_search_space(TuneOptions(4, 64, (0, 1, 2, 3), (1, 4), REMATS, ("bfloat16", "float32"), (0.0, 1.0)))


def row(config: Configuration) -> TableRow:
    """Make up a row, of a configuration that surely holds no less than another no fewer bytes."""
    held = (4 - config.stage) * (1 + config.micro_batch) * (4 - REMATS.index(config.remat)) * (2 - config.offload)
    wide = 2 if config.precision == "float32" else 1
    return TableRow(config, {"parameters": held * wide}, {"dp": 1.0}, 1.0, 0.0, 1.0, True, {})


def test_two_ways_to_recompute_are_compared_in_memory_only_if_one_surely_holds_less():
    """Products of all blocks, or every second block: which is smaller depends on the model."""
    usual = Configuration(3, 1, 1)
    results = {
        (a, b) for a in REMATS for b in REMATS if replace(usual, remat=a).holds_no_less_than(replace(usual, remat=b))
    }
    assert results == {(a, b) for a in REMATS for b in REMATS if a == b or a is False or b is True}


class Processes:
    """Processes whose tasks end in any order: each time someone waits, one of those that run does."""

    def __init__(self, workers: int, draw: Any, monkeypatch: Any) -> None:
        self.workers, self.draw = workers, draw
        self.running: dict[Future[TableRow], Configuration] = {}
        self.started: list[Configuration] = []
        self.idle = 0
        monkeypatch.setattr(_search, "wait", self.wait)

    def start(self, config: Configuration) -> Future[TableRow]:
        future: Future[TableRow] = Future()
        self.running[future] = config
        self.started.append(config)
        assert len(self.running) <= self.workers
        return future

    def wait(self, running: Any, return_when: str) -> None:
        assert return_when == concurrent.futures.FIRST_COMPLETED
        self.idle += self.workers - len(self.running)
        if self.running:
            future = [*self.running][self.draw(st.integers(0, len(self.running) - 1))]
            future.set_result(row(self.running.pop(future)))


@pytest.mark.slow
@examples(8, 100)
@given(budget=st.floats(0, 200), workers=st.integers(2, 6), data=st.data())
def test_the_rows_that_a_search_plans_do_not_depend_on_the_number_of_workers(budget, workers, data):
    with pytest.MonkeyPatch.context() as patch:
        one = Processes(1, lambda _: 0, patch)
        alone = [*search_rows(SPACE, one.start, 1, budget)]
        many = Processes(workers, data.draw, patch)
        results = [*search_rows(SPACE, many.start, workers, budget)]
    assert sorted(map(str, [x.config for x in alone])) == sorted(map(str, SPACE))
    assert sort_results(SPACE, results, budget) == sort_results(SPACE, alone, budget)
    rows, skipped = sort_results(SPACE, results, budget)
    assert {r.config for r in rows} == {*one.started} <= {*many.started}
    assert {r.config for r in rows} | {s.config for s in skipped} == {*SPACE}
    for s in skipped:
        assert row(s.smaller).min_peak_bytes > budget and s.config.holds_no_less_than(s.smaller)
        assert row(s.config).min_peak_bytes > budget and s.smaller in one.started
    left = len([*SPACE]) - len(many.started) - len(skipped)
    assert many.idle <= workers * workers or left == 0  # but for the last tasks, none waits


def test_a_row_that_is_skipped_while_planned_is_left_out():
    with pytest.MonkeyPatch.context() as patch:
        many = Processes(8, lambda _: 0, patch)
        results = [*search_rows(SPACE, many.start, 8, 1.0)]  # nothing fits
    assert len(many.started) > sum(isinstance(x, TableRow) for x in results) == 2  # the leanest of both precisions
    assert all(isinstance(x, TableRow) or x.smaller.stage == 3 for x in results)


def without_threads() -> None:
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


def test_where_a_fork_computes_no_gradients_this_process_plans(monkeypatch, caplog):
    """After a backward pass on a build of torch for GPUs, autograd's threads are lost in the fork."""
    monkeypatch.setattr(_plan_workers, "_check_threads", without_threads)
    with _plan_workers.open_pool(3, lambda value: (value, os.getpid())) as start:
        assert [start(i).result() for i in range(4)] == [(i, os.getpid()) for i in range(4)]
    assert "workers=3: this process has computed gradients" in caplog.text
    monkeypatch.undo()
    if not _plan_workers._can_fork():  # a build of torch for GPUs, and this process has computed gradients
        return
    with _plan_workers.open_pool(2, lambda value: (value, os.getpid())) as start:
        value, process = start(5).result()
    assert value == 5 and process != os.getpid()


def test_a_cached_result_needs_no_process(monkeypatch):
    monkeypatch.setattr(_plan_workers, "_check_threads", without_threads)  # a process would say so
    run = {1: "run"}.__getitem__
    with _plan_workers.open_pool(1, run, {2: "known"}.get) as start:
        assert [start(i).result() for i in (2, 1, 2)] == ["known", "run", "known"]
    monkeypatch.setattr(_plan_workers, "_process_pool", None)
    with _plan_workers.open_pool(3, run, {2: "known"}.get) as start:
        assert start(2).result() == "known"


@pytest.mark.slow
def test_a_second_table_starts_no_process(monkeypatch, cache):
    make_step = Counted()
    table, _ = tune_and_count(make_step)
    monkeypatch.setattr(_plan_workers, "_process_pool", None)
    again, made = tune_and_count(make_step, workers=2)
    assert again == table and not made


def test_whether_a_fork_can_differentiate_does_not_depend_on_the_grad_mode():
    with torch.no_grad():
        _plan_workers._check_threads()


def test_an_error_in_a_worker_ends_the_search():
    def start(config: Configuration) -> Future[TableRow]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(search_rows(SPACE, start, 2, 1.0))
    assert SkippedConfiguration(*[Configuration(1, 1, 1)] * 2).config.ranks == 1


# Rows that are kept.


@dataclass
class Counted:
    """A function that makes steps, and counts how often it is asked."""

    cache_key: str = "counted"
    made: list[Configuration] = field(default_factory=list)

    def __call__(self, config: Configuration) -> Any:
        self.made.append(config)
        return plan_once(config)


ASKED: dict[str, Any] = {"world_size": 4, "global_batch": 256, "micro_batches": (8,), "stages": (2, 3), "memory": 1e12}


def tune_and_count(make_step: Any, **asked: Any) -> tuple[fzero.tuning.ConfigurationTable, int]:
    """Tune, and say how many steps were made for it."""
    before = len(make_step.made)
    table = fzero.tune(make_step, **{"machine": CPU, "remat": (False,), **ASKED, **asked})
    return table, len(make_step.made) - before


def test_a_search_plans_each_row_once():
    make_step = Counted()
    first, made = tune_and_count(make_step, stages=(2,), depth=15)
    again, none = tune_and_count(make_step, stages=(2,), depth=15)
    assert made >= 3 + 1 and none == 0 and again == first and str(again) == str(first)
    assert all(r.in_full for r in again.rows)
    assert tune_and_count(make_step, stages=(2,), depth=15, cache=False) == (first, made)


@pytest.mark.parametrize(
    "what",
    ["the step", "the machine", "a link", "the configuration", "the code of fzero", "torch", "a file that is cut off"],
)
def test_a_cached_row_is_planned_anew_when_its_inputs_change(what, monkeypatch, cache):
    make_step = Counted()
    first, made = tune_and_count(make_step)
    asked: dict[str, Any] = {}
    if what == "the step":
        make_step.cache_key = "another"
    elif what == "the machine":
        asked["machine"] = replace(CPU, flops=1e10)
    elif what == "a link":
        asked["axis_bandwidths"] = {"dp": 1e9}
    elif what == "the configuration":
        asked["precision"] = ("float32",)
    elif what == "the code of fzero":
        monkeypatch.setattr(_row_cache, "_hash_source", lambda: "changed")
    elif what == "torch":
        monkeypatch.setattr("torch.version.__version__", "9.0")
    else:
        for path in (cache / "fzero" / "rows").iterdir():
            path.write_text(path.read_text()[:50])
    again, second = tune_and_count(make_step, **asked)
    assert second == made == 2
    assert (again == first) == (what in ("the step", "the code of fzero", "torch", "a file that is cut off"))
    assert tune_and_count(make_step, **asked) == (again, 0)


def test_a_cached_row_does_not_depend_on_the_memory_budget():
    make_step = Counted()
    tune_and_count(make_step)
    table, made = tune_and_count(make_step, memory=1.0)
    assert made == 0 and not table.fitting


def test_a_step_without_a_cache_key_is_planned_each_time(cache):
    made: list[Any] = []
    for _ in range(2):
        fzero.tune(lambda c: made.append(c) or plan_once(c), **ASKED, machine=CPU, remat=(False,))
    assert len(made) == 4 and not (cache / "fzero").exists()


def test_a_folder_that_cannot_be_written_keeps_nothing(cache):
    (cache / "fzero").write_text("a file, where a folder should be")
    make_step = Counted()
    assert tune_and_count(make_step)[1] == tune_and_count(make_step)[1] == 2


def test_the_code_of_fzero_is_part_of_the_key():
    assert len(_row_cache._hash_source()) == 64
    assert _row_cache.RowCache("a", H100)._path(Configuration(1, 1, 1)).suffix == ".json"
