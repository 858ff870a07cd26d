"""Metrics: every step is written, once in n steps, by rank 0; and what the writers write."""

import json
import logging
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import observe
from fzero._notice import warn_once


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.closed = False

    def __call__(self, rows: observe.Rows) -> None:
        self.calls.append(rows)

    def close(self) -> None:
        self.closed = True


def without_rate(rows: Any) -> list[Any]:
    return [(i, {k: v for k, v in row.items() if k != "steps/s"}) for i, row in rows]


@given(st.integers(0, 9), st.integers(1, 4))
def test_every_logged_step_is_written_once(steps, every):
    writer = Kept()
    with observe.log(writer, every=every) as log:
        for i in range(steps):
            mixed = {"loss": torch.tensor(i / 2), "a": {"n": torch.tensor([i]), "ok": torch.tensor(i > 2)}, "lr": 0.5}
            log(i, mixed)
            assert len(writer.calls) == i // every
    rows = [row for call in writer.calls for row in call]
    assert without_rate(rows) == [(i, {"loss": i / 2, "a.n": i, "a.ok": i > 2, "lr": 0.5}) for i in range(steps)]
    assert all(type(row["a.n"]) is int for _, row in rows) and writer.closed
    rates = [row["steps/s"] for call in writer.calls for _, row in call if "steps/s" in row]
    assert len(rates) == max(len(writer.calls) - (every == 1 or steps == 1), 0) and all(rate > 0 for rate in rates)


def test_a_log_waits_for_no_tensor_between_its_writes(monkeypatch):
    """Tensors are read in one copy, and only when all are written."""
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.numel()) or tolist(x))
    log = observe.log(Kept(), every=4)
    for i in range(5):
        assert not reads
        log(i, {"loss": torch.tensor(1.0), "norm": torch.tensor(2.0)})
    assert reads == [8]


def test_a_steps_metrics_may_come_in_parts():
    writer = Kept()
    with observe.log(writer, every=1) as log:
        log(1, {"loss": 1.0})
        log(2, {"loss": 2.0})
        log(2, {"test loss": torch.tensor(3.0)})
    assert [without_rate(x) for x in writer.calls] == [[(1, {"loss": 1.0})], [(2, {"loss": 2.0, "test loss": 3.0})]]


def test_metrics_of_a_step_hold_no_graph():
    x = torch.ones((), requires_grad=True)
    log = observe.log(Kept(), every=2)
    log(0, {"loss": x * 2})
    assert not log._pending[0][1]["loss"].requires_grad


def test_a_metric_named_steps_per_second_is_not_overwritten():
    writer = Kept()
    with observe.log(writer, every=2) as log:
        for i in range(2):
            log(i, {"steps/s": 7.0})
    assert writer.calls[0][1][1]["steps/s"] == 7.0


def test_metrics_held_back_are_written_after_an_error():
    writer = Kept()
    with pytest.raises(RuntimeError), observe.log(writer) as log:
        log(0, {"loss": 1.0})
        raise RuntimeError
    assert writer.calls == [[(0, {"loss": 1.0})]] and writer.closed


def test_each_nonfinite_metric_is_reported_once(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fzero"), observe.log(every=2) as log:
        for i in range(6):
            log(i + 1, {"loss": torch.tensor(math.nan if i > 2 else 1.0), "norm": math.inf if i > 0 else 1.0, "lr": i})
    texts = [r.message.split(":")[1] for r in caplog.records]
    assert texts == [
        " the metric 'norm' is inf at step 2 of the log (reported once)",
        " the metric 'loss' is nan at step 4 of the log (reported once)",
    ]


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: observe.log(every=0), ValueError, "every=0: expected a number of steps"),
    (lambda: observe.log("runs"), TypeError, "writer 'runs': expected a function of rows"),
    (lambda: observe.log()(0, torch.ones(())), TypeError, "metrics need names"),
    (lambda: observe.log()(0, {"x": torch.ones(2)}), TypeError, "the metric 'x' is .*expected one number"),
    (lambda: observe.log()(0, {"x": "a"}), TypeError, "the metric 'x' is .*expected one number"),
    (
        lambda: observe.log()(0, {"x": fzero.mesh(dp=2).split(torch.ones(2))}),
        TypeError,
        r"'x' differs by rank: average it in the step by fzero.collectives.pmean\(x\)",
    ),
]


@pytest.mark.parametrize("call,error,text", WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments_of_log_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_json_lines_log_continues_a_resumed_run(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    write = observe.jsonl(path)
    write([(i, {"loss": float(i)}) for i in range(3)])
    write([(3, {"loss": math.nan})])
    with open(path, "a") as f:
        f.write('{"step": 4, "lo')
    again = observe.jsonl(path)
    again([(2, {"loss": 7.0})])
    again([(3, {"loss": math.inf})])
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert results == [{"step": i, "loss": x} for i, x in [(0, 0.0), (1, 1.0), (2, 7.0), (3, None)]]
    assert [p.name for p in path.parent.iterdir()] == ["run.jsonl"]


def test_progress_prints_lines_into_a_file(capsys):
    write = observe.progress(total=9)
    write([(1, {"loss": 1.0}), (2, {"loss": 0.123456, "n": 3})])
    write.close()
    assert capsys.readouterr().out == "step 2 of 9: loss 0.1235, n 3\n"


def test_progress_draws_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    write = observe.progress(total=9)
    write([(2, {"loss": 0.5})])
    write([(9, {"loss": 0.25})])
    write.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "9/9" in shown and "loss 0.25" in shown


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for first in (0, 2):
        with observe.log(observe.tensorboard(tmp_path), every=2) as log:
            for i in range(first, 4):
                log(i, {"loss": torch.tensor(i + first / 10)})
    result = EventAccumulator(str(tmp_path))
    result.Reload()
    assert {e.step: round(e.value, 3) for e in result.Scalars("loss")} == {0: 0, 1: 1, 2: 2.2, 3: 3.2}
    events = [e for path in tmp_path.iterdir() for e in EventFileLoader(str(path)).Load()]
    assert sorted(e.step for e in events if e.HasField("session_log")) == [0, 2], "by which other readers hide"
