"""`make gpu` without a GPU: each part at toy size, the budget of time, parts that fail, the report, the status."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu import checks, kernels, memory, offload, peers, speeds
from benchmarks.gpu.case import RANKS, Case, LeftOutError, Result, Setting
from benchmarks.gpu.report import draw, exit_status, text_of, write
from benchmarks.gpu.run import ROOT, Outcome, Part, compile_all, run_parts
from benchmarks.gpu.worker import run_cases, try_case, world
from benchmarks.one_rank import alone
from tests.distributed.launch import free_port, python, rank_variables


@pytest.fixture
def one_of_eight() -> Iterator[Setting]:
    with alone(dp=RANKS) as mesh:
        yield Setting(mesh, False, True, False, ("eager", "fx"))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    for name, value in rank_variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, str(value))
    with world(needs_all_ranks=True) as mesh:
        yield Setting(mesh, True, True, False, ("eager", "fx"))


def rows_of(module: Any, setting: Setting, *names: str) -> list[dict[str, Any]]:
    cases = {case.name: case for case in module.cases(setting)}
    results = [try_case("a part", cases[name]) for name in names]
    assert [r.outcome for r in results] == ["ok"] * len(names), results
    return [row for r in results for row in r.rows]


@pytest.mark.slow
def test_the_checks_of_make_gpu_pass_on_a_cpu(one_process):
    names = [
        "stage 3, fx, float32",
        "stage 1, eager, float64, 4 simulated ranks",
        "stage 3, fx, float32, offload, host update",
    ]
    rows = rows_of(checks, one_process, *names)
    assert all(row["difference"] < row["allowed"] for row in rows)
    assert len(checks.cases(one_process)) == 18


def test_a_wrong_number_is_a_failed_check(one_process, monkeypatch):
    monkeypatch.setattr(
        checks,
        "train_plainly",
        lambda c, dtype: checks.train(c._replace(batch=8), checks.Way(0, "eager"), one_process.mesh),
    )
    case = next(c for c in checks.cases(one_process) if c.name == "stage 0, eager, float32")
    assert try_case("checks", case).outcome == "wrong"


@pytest.mark.slow
def test_memory_falls_with_the_stage_and_stays_above_the_formula(one_of_eight):
    names = [f"bert-large, stage {stage}, fx" for stage in (0, 3)]
    rows = rows_of(memory, one_of_eight, *names)
    peaks = [row["requested MB"] for row in rows]
    assert peaks == sorted(peaks, reverse=True) and peaks[1] < peaks[0] / 2
    assert all(row["formula MB"] < row["requested MB"] for row in rows)
    assert rows[1]["formula MB"] == pytest.approx(rows[0]["formula MB"] / RANKS, rel=0.05, abs=0.06)


@pytest.mark.slow
def test_peers_offload_and_kernels_give_rows(one_of_eight):
    for row in rows_of(peers, one_of_eight, "fzero-3-fx", "FSDP2-3-reshard", "DDP-0"):
        assert row["ms a step"] > 0
    whole, none = rows_of(offload, one_of_eight, "ratio 1", "ratio 0")
    assert whole["host plan MB"] > 0 == none["host plan MB"] and whole["plan MB"] < none["plan MB"]
    functions = {row["function"] for row in rows_of(kernels, one_of_eight, "eager step, by function")}
    assert {"attend", "feed", "embed", "head_loss"} <= functions


def test_the_table_of_speeds_has_the_measurements_of_calibrate(one_process):
    assert any(row["source"].startswith("measured") for row in rows_of(speeds, one_process, "fzero calibrate"))


def test_a_benchmark_case_that_fails_is_a_row_and_later_cases_run():
    def fails() -> list[dict[str, Any]]:
        raise ValueError("a reason\nand more")

    def leaves_out() -> list[dict[str, Any]]:
        raise LeftOutError("it is not installed")

    def has_no_room() -> list[dict[str, Any]]:
        raise torch.OutOfMemoryError("20 GB")

    cases = [
        Case("a", fails, True),
        Case("b", leaves_out),
        Case("c", has_no_room),
        Case("d", lambda: [{"holds": False}]),
    ]
    result = ends_of(cases, seconds=60)
    assert [(r["outcome"], r["reason"]) for r in result] == [
        ("failed", "ValueError: a reason"),
        ("left out", "it is not installed"),
        ("left out", "the card has too little memory: 20 GB"),
        ("wrong", ""),
    ]


def test_a_case_for_which_no_time_is_left_is_left_out():
    def sleeps() -> list[dict[str, Any]]:
        time.sleep(0.6)
        return []

    result = ends_of([Case(name, sleeps) for name in "abc"], seconds=2.5)
    assert [r["reason"] for r in result] == ["", "no time was left", "no time was left"]


def ends_of(cases: list[Case], seconds: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    assert run_cases("a part", cases, events.append, 0, seconds)
    return [event["end"] for event in events if "end" in event]


# Workers that need no torch: they write what a worker writes, and then end as their part's name says.
SCRIPT = """
import json, os, sys, time
part, out, skip = sys.argv[1], sys.argv[2], int(sys.argv[3])
def say(**event):
    with open(out, "a") as file: print(json.dumps(event), file=file)
say(cases=[["a", True], ["b", True], ["c", False]], card="a card") if part != "unborn" else sys.exit("no such module")
for i in range(skip, 3):
    say(start=i)
    if part == "dies" and i == 1: sys.exit("an illegal access")
    if part == "hangs" and i == 1: time.sleep(60)
    say(end=dict(part=part, case="abc"[i], outcome="ok", rows=[{"ms a step": 1.5}], is_check=i < 2))
if part == "lingers": time.sleep(60)
"""


def stubs(
    part: str, out: pathlib.Path, seconds: float, log: pathlib.Path, more: Sequence[str]
) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        command = [sys.executable, "-c", SCRIPT, part, str(out), more[-1]]
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def outcome_of(*parts: str, seconds: float = 60.0) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = pathlib.Path(folder)
        logs.joinpath("lives.jsonl").write_text("of an earlier run\n")
        return run_parts([Part(x, 1) for x in parts], seconds, stubs, said.append, lambda outcome: None, logs), said


def test_a_process_that_dies_costs_one_case():
    outcome, said = outcome_of("dies", "lives", "unborn")
    results = {(r.part, r.case): (r.outcome, r.reason) for r in outcome.results}
    assert results["dies", "b"] == ("failed", "its process died: an illegal access")
    assert results["unborn", "the part"] == ("failed", "it did not begin: no such module")
    assert [x for name, x in results.items() if name not in (("dies", "b"), ("unborn", "the part"))] == [("ok", "")] * 5
    assert outcome.card == "a card" and "2 of 3: b: failed" in said[2]
    assert exit_status(outcome, rehearse=False) == 1


def test_a_case_that_hangs_costs_half_of_its_parts_time_and_a_part_no_more_than_its_share(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.run.GRACE", 0.2)
    monkeypatch.setattr("benchmarks.gpu.run.LEAST", 0.5)
    start = time.monotonic()
    outcome, _ = outcome_of("hangs", "lives", seconds=4.0)
    assert time.monotonic() - start < 20  # and not the 60 of the part
    reason = "stopped, since it took half of the time that its part had left"
    assert [(r.outcome, r.reason) for r in outcome.results[:3]] == [("ok", ""), ("left out", reason), ("ok", "")]
    assert [r.outcome for r in outcome.results[3:]] == ["ok"] * 3
    assert exit_status(outcome, rehearse=False) == 0
    monkeypatch.setattr("benchmarks.gpu.run.MOST", 2.0)
    outcome, _ = outcome_of("hangs", seconds=2.0)
    reasons = ["", "stopped, since its time was over", "no time was left"]
    assert [r.reason for r in outcome.results] == reasons
    start = time.monotonic()
    lingering, _ = outcome_of("lingers")
    assert time.monotonic() - start < 20 and [r.outcome for r in lingering.results] == ["ok"] * 3
    late, _ = outcome_of("lives", seconds=0.1)
    assert [(r.case, r.reason) for r in late.results] == [("the part", "no time was left")]


def test_many_processes_compile_at_once_each_its_share_of_a_part(tmp_path):
    """A part that compiles has a process even where there are fewer than parts, and none outlives its time."""
    script = "import sys, time; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:])); time.sleep(float(sys.argv[3]))"

    def start(
        part: str, out: pathlib.Path, seconds: float, log: pathlib.Path, more: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        naps = "60" if part == "hangs" else "0"
        return subprocess.Popen([sys.executable, "-c", script, str(out), part, naps, *more], start_new_session=True)

    said: list[str] = []
    parts = [Part("many", 1, 3), Part("hangs", 1, 1), Part("plain", 1)]
    begin = time.monotonic()
    compile_all(parts, 4, 8.0, start, said.append, tmp_path)
    assert time.monotonic() - begin < 30
    assert said[0] == "compile: up to 8 s, 4 processes" and said[1].endswith("1 processes were not done")
    texts = {path.read_text() for path in tmp_path.iterdir()}
    assert texts == {*[f"many 0 --compile {i} 3" for i in range(3)], "hangs 60 --compile 0 1"}
    compile_all(parts, 1, 0.1, start, said.append, tmp_path)
    assert "2 processes" in said[2]


def test_each_case_that_compiles_is_run_once_by_the_processes_that_compile(one_of_eight):
    setting = one_of_eight._replace(backends=("eager", "fx", "inductor"), only_compiles=True)
    for module, n in ((checks, 5), (memory, 4), (peers, 8), (offload, 8), (kernels, 1)):
        names = [case.name for case in module.cases(setting) if case.compiles]
        assert len(names) == n and all("fx" not in name and "eager" not in name for name in names)
    assert setting.meter().rounds == 1


def test_the_exit_status_of_make_gpu_is_that_of_its_checks():
    def status(*results: Result, rehearse: bool = False) -> int:
        return exit_status(Outcome("", [*results], 1.0), rehearse)

    good, bad = Result("checks", "a", "ok", is_check=True), Result("checks", "b", "wrong", is_check=True)
    assert status(good) == 0 and status(good, bad) == 1
    assert status(Result("checks", "a", "left out")) == 1  # no check was made
    error = Result("peers", "DeepSpeed-3", "failed", "an error")
    assert status(good, error) == 0 and status(good, error, rehearse=True) == 1
    assert status(good, Result("checks", "c", "failed", is_check=True)) == 1


def report_rows() -> list[Result]:
    def result(part: str, case: str, **row: Any) -> Result:
        return Result(part, case, "ok", rows=[row])

    steps = {3: 9000.0, 0: 12000.0}
    memory_rows = [
        result(
            "memory",
            f"vit-g, stage {s}, fx",
            **{"plan MB": x, "requested MB": x, "allocated MB": x, "published MB": 20208},
        )
        for s, x in steps.items()
        if s
    ] + [result("memory", "vit-g, stage 0, fx", **{"plan MB": 12e3, "requested MB": 12e3, "allocated MB": 12e3})]
    peer_rows = [
        result("peers", "fzero-3-inductor", **{"ms a step": 8.0, "allocated MB": 10.0}),
        result("peers", "FSDP2-3-reshard-compile", **{"ms a step": 10.0, "allocated MB": 8.0}),
        Result("peers", "DeepSpeed-3", "left out", "deepspeed is not installed"),
    ]
    offload_rows = [result("offload", f"ratio {r}", ratio=r, **{"ms a step": 10.0 + 10 * r}) for r in (0.0, 0.5, 1.0)]
    return [*memory_rows, *peer_rows, *offload_rows]


def test_the_report_of_a_gpu_run_lists_cases_that_ran_and_those_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "gpu.md"
    write(Outcome("1 x a card", report_rows(), 12.3), path, "make gpu", ["A note."], is_last=True)
    text = path.read_text()
    for line in (
        "`make gpu`, on 1 x a card.",
        "A note.",
        "| vit-g: the peak falls with the stage, MB | 12,000.0 ≥ 9,000.0 | met |",
        "| vit-g, stage 3: below DeepSpeed's, MB | 9,000 beside 20,208 | met |",
        "| time: fzero-3 / FSDP2-3-reshard | 0.80 | met |",
        "| peak: fzero-3 / FSDP2-3-reshard | 1.25 | missed |",
        "| DeepSpeed-3 |  |  | left out: deepspeed is not installed |",
        "![",
    ):
        assert line in text, text
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_a_gpu_run_without_results_has_a_report(tmp_path):
    pytest.importorskip("matplotlib")
    assert "no card" in text_of(Outcome("", [], 0.0), "make gpu", "", [])
    draw([], tmp_path / "gpu.png")


def test_without_a_gpu_the_benchmark_exits_and_advises_rehearse():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = python("-m", "benchmarks.gpu")
    assert done.returncode == 2 and "sees no GPU" in done.stderr and "--rehearse" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_rehearsal_of_the_gpu_benchmark_writes_its_report(ranks, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "--backends", "eager", "fx", "--gpus", str(ranks)]
    command += ["--out", str(tmp_path / "gpu.md")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    text = (tmp_path / "gpu.md").read_text()
    assert "failed" not in done.stdout and all(f"## {p.capitalize()}" in text for p in ("checks", "kernels"))
