"""watch: what a step took beside its plan, to the byte on a CPU; a GPU's counters; hints that name the cause."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tuning
from fzero._torch import is_profiling
from fzero.tuning import CPU, StepMeasurement
from fzero.tuning.measurements._measurement import find_hints
from fzero.tuning.measurements._meter import Measurement, make_meter


def watch(*args: Any, **asked: Any) -> Any:
    return fzero.tuning.watch(*args, **{"print_fn": None, **asked})


def make_trained(**asked: Any) -> tuple[tuple[Any, ...], Any]:
    """Make a jitted step on two simulated ranks, and its arguments; its loss function wastes what it is asked to."""
    opt = optim.adam(1e-3)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["h"]:
            x = torch.tanh(x @ p["w"])
        return x.square().mean()

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    mesh = fzero.mesh(dp=2)
    step = fzero.jit(fzero.shard(train_step, stage=3, mesh=mesh), backend="fx")
    torch.manual_seed(0)
    params, opt_state = step.init({"h": [{"w": torch.randn(64, 64) / 8} for _ in range(3)]}, opt)
    watched = watch(step, **asked)
    return (params, opt_state, mesh.split(torch.randn(32, 64))), watched


def run(watched: Any, args: tuple[Any, ...], calls: int) -> list[float]:
    params, opt_state, x = args
    losses = []
    for _ in range(calls):
        params, opt_state, loss = watched(params, opt_state, x)
        losses.append(float(loss))
    return losses


def test_a_watched_step_has_the_planned_peak_and_unchanged_results():
    said: list[str] = []
    args, watched = make_trained(print_fn=said.append, every=3)
    again, plain = make_trained()
    assert run(watched, args, 5) == run(plain.step, again, 5)
    assert watched.stage == 3 and watched.traces == 1 and "WatchedStep(Jitted(" in repr(watched)
    assert watched.last.step == 3 and not watched.last.has_compilation and watched.last.plan == watched.plans()[0]
    assert watched.last.peak_bytes == pytest.approx(watched.last.plan.peak_bytes, rel=0.01)
    assert [line.split(":")[0] for line in said] == ["step 1", "step 3"] and not watched.hints


def test_watch_logs_each_call_once_in_order(tmp_path):
    rows: list[Any] = []
    path = tmp_path / "watch.jsonl"
    args, watched = make_trained(every=4, first=100)
    watched = watch(watched.step, rows.extend, fzero.observe.jsonl(path), every=4, first=100)
    with watched:
        run(watched, args, 7)
    assert [step for step, _ in rows] == [*range(100, 107)]
    measured = [step for step, row in rows if "memory/peak_bytes" in row]
    assert measured == [101, 104]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step, _ in rows]
    assert all(line["time/seconds"] > 0 and line["memory/planned_bytes"] > 0 for line in lines)
    assert "time/planned" not in lines[0]


def test_a_call_of_other_shapes_has_its_own_plan():
    args, watched = make_trained(every=1)
    run(watched, args, 3)
    watched.flush()
    assert watched.last.step == 2
    wide = (*make_trained()[0][:2], watched.mesh.split(torch.randn(256, 64)))
    run(watched, wide, 2)
    watched.flush()
    assert watched.traces == 2 and watched.last.step == 4
    small, large = watched.plans()
    assert watched.last.plan is large and large.peak_bytes > small.peak_bytes
    run(watched, make_trained()[0], 1)
    watched.flush()
    assert watched.last.plan is small  # the first one's, again


def test_a_step_that_was_compiled_before_is_measured_at_once():
    args, plain = make_trained()
    run(plain.step, args, 1)
    watched = watch(plain.step)
    run(watched, make_trained()[0], 1)
    watched.flush()
    assert watched.last.step == 0 and not watched.last.has_compilation


def test_watch_reports_memory_outside_of_the_graph():
    """A step that holds more than its plan, since its memory is not its own, as a kernel's workspace is not."""
    x = torch.ones(512, 512)
    step = fzero.jit(lambda x: torch.tanh(x) @ x, backend="fx")
    inner, wasted = type(step).__call__, []

    class Wasteful(type(step)):
        def __call__(self, *args: Any) -> Any:
            wasted[:] = [torch.empty(4 << 20)]
            wasted.clear()
            return inner(self, *args)

    wasteful = Wasteful(step.step, step.options)
    watched = watch(wasteful)
    for _ in range(3):
        watched(x)
    assert [h.name for h in watched.hints] == ["workspaces"]
    assert watched.last.peak_bytes == (16 << 20) + (1 << 20)


def test_planned_seconds_are_those_of_the_machine_that_is_named():
    args, watched = make_trained(machine=CPU)
    run(watched, args, 3)
    slow = watch(watched.step, machine=replace(CPU, flops=1e5, memory_bandwidth=1e6))
    run(slow, make_trained()[0], 3)
    assert watched.last.plan.seconds == watched.plans(CPU.as_hardware())[0].seconds
    assert slow.last.plan.seconds > 100 * watched.last.plan.seconds
    assert "time/planned" in slow.last.scalars() and f"(plan {slow.last.plan.seconds:,.2f} s)" in str(slow.last)


def test_ranks_in_lockstep_have_no_plan():
    mesh = fzero.mesh(dp=2, simulate="lockstep")
    step = fzero.jit(fzero.shard(lambda params, x: (params, fzero.collectives.psum(x)), stage=0, mesh=mesh))
    watched = watch(step, print_fn=None, every=1)
    for _ in range(2):
        watched(torch.ones(2), mesh.split(torch.ones(4)))
    watched.flush()
    assert watched.last is None and not watched.hints


def test_watch_raises_the_errors_of_the_step():
    watched = watch(fzero.jit(lambda x: x @ x, backend="fx"), print_fn=None, every=1)
    watched(torch.ones(3, 3))
    with pytest.raises(RuntimeError):
        watched(torch.ones(3, 2))
    watched(torch.ones(3, 3))
    assert not is_profiling()


def planned_peaks(*, expandable_segments: bool) -> SimpleNamespace:
    return SimpleNamespace(reserved_bytes=10_100_000_000 if expandable_segments else 10_900_000_000)


PLAN: Any = SimpleNamespace(
    peak_bytes=10_000_000_000,
    argument_bytes=4_000_000_000,
    added_bytes=6_000_000_000,
    seconds=1.0,
    workspace_bytes=0,
    device_type="cuda",
    allocator_peaks=planned_peaks,
)

WITH_WORKSPACE: Any = SimpleNamespace(**{**vars(PLAN), "workspace_bytes": 1_000_000_000})


def reading(
    seconds: float = 1.0, idle_seconds: float = 0.0, first: bool = False, plan: Any = PLAN, **measurement: Any
) -> StepMeasurement:
    usual = {"added_bytes": 6_000_000_000, "before_bytes": 4_000_000_000, "reserved_bytes": 10_200_000_000}
    return StepMeasurement(
        3,
        Measurement(lambda: seconds, lambda: idle_seconds, lambda: True, **{**usual, **measurement}),
        plan,
        True,
        first,
    )


CASES: dict[str, tuple[list[StepMeasurement], list[str]]] = {
    "all as planned": ([reading()], []),
    "a little more": ([reading(added_bytes=6_300_000_000)], []),
    "a second copy": ([reading(before_bytes=5_000_000_000, reserved_bytes=11_000_000_000)], ["outside the step"]),
    "workspaces": ([reading(added_bytes=7_000_000_000, reserved_bytes=11_000_000_000)], ["workspaces"]),
    "both": (
        [reading(added_bytes=7_000_000_000, before_bytes=5_000_000_000, reserved_bytes=12_000_000_000)],
        ["outside the step", "workspaces"],
    ),
    "a planned workspace": ([reading(before_bytes=5_000_000_000, reserved_bytes=11e9, plan=WITH_WORKSPACE)], []),
    "a planned workspace, taken in this step": (
        [reading(added_bytes=7_000_000_000, reserved_bytes=11e9, plan=WITH_WORKSPACE)],
        [],
    ),
    "less than planned": ([reading(added_bytes=3_000_000_000, reserved_bytes=7_100_000_000)], []),
    "fragmentation": ([reading(reserved_bytes=11_200_000_000)], ["fragmentation"]),
    "no room": ([reading(retries=1), reading(retries=3)], ["out of room"]),
    "no room long ago": ([reading(retries=3), reading(retries=3)], []),
    "slow batches": ([reading(idle_seconds=0.2)] * 3, ["between steps"]),
    "one call tells no usual time": ([reading(idle_seconds=0.2), reading(idle_seconds=0.2)], []),
    "one slow batch": ([reading(idle_seconds=5.0), reading(), reading()], []),
    "slow": ([reading(1.5), reading(1.5), reading()], ["slow"]),
    "compiled": ([reading(90.0, 9.0, first=True), reading()], []),
    "no plan": ([reading(plan=None)], []),
    "a CPU, which knows neither": ([reading(before_bytes=None, reserved_bytes=None)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hint_of_watch_names_the_cause(name):
    measurements, names = CASES[name]
    assert [h.name for h in find_hints(measurements)] == names


def test_hints_of_watch_have_figures_and_a_remedy():
    said = " ".join(map(str, find_hints([reading(reserved_bytes=11_200_000_000)])))
    assert said.startswith("fragmentation: the allocator holds 11.2 GB, 12% above plan, of which 1.2 GB")
    assert "by the plan the step alone reserves 10.9 GB, or 10.1 GB with expandable segments" in said
    assert "expandable_segments" in said
    said = str(find_hints([reading(before_bytes=5_500_000_000, reserved_bytes=None)])[0])
    assert "peak 15% above plan: 1.5 GB are held besides the step's arguments" in said


def test_watch_prints_each_hint_once():
    said: list[str] = []
    x = torch.ones(8, 8)
    watched = watch(fzero.jit(lambda x: x @ x, backend="fx"), every=1, print_fn=said.append, machine=CPU)
    for _ in range(30):
        watched(x)
    assert sum(line.startswith("step") for line in said) >= 20
    assert sum("slow:" in line for line in said) <= 1 and sum("between steps:" in line for line in said) <= 1


# A GPU's counters.


GPU: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))


class Stream:
    """A GPU that is always some events behind: each takes a second of its time."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.done = 0
        self.log: list[str] = []

    def event(self, device: torch.device, enable_timing: bool) -> Any:
        stream = self

        class Event:
            at = -1

            def record(self, on: Any) -> None:
                self.at = len(stream.events)
                stream.events.append(self)

            def query(self) -> bool:
                return stream.done > self.at

            def synchronize(self) -> None:
                stream.log.append("synchronize")
                stream.done = max(stream.done, self.at + 1)

            def elapsed_time(self, other: Any) -> float:
                assert self.query() and other.query(), "Both events must be completed before calculating elapsed time."
                return 1000.0 * (other.at - self.at)

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    stream, stats = Stream(), {"allocated_bytes.all.peak": 70, "reserved_bytes.all.peak": 90, "num_alloc_retries": 2}
    monkeypatch.setattr(torch, "Event", stream.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: stream.log.append("reset"))
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: stats)
    return stream


def test_a_gpus_counters_are_read_around_the_call_and_its_events_when_they_are_over(gpu):
    meter = make_meter([torch.ones(2), GPU])
    out, one = meter(lambda: gpu.log.append("call") or 7, True)
    assert out == 7 and gpu.log == ["reset", "call"]
    assert (one.added_bytes, one.before_bytes, one.reserved_bytes, one.retries) == (30, 40, 90, 2)
    _, two = meter(lambda: None, False)
    assert two.added_bytes is None and gpu.log == ["reset", "call"] and not one.is_over()
    gpu.done = 2
    assert one.is_over() and not two.is_over() and one.seconds() == 1.0 and one.idle_seconds() == 0.0
    assert two.seconds() == 1.0 and two.idle_seconds() == 1.0


def test_watch_does_not_wait_for_the_device(gpu, monkeypatch):
    monkeypatch.setattr("fzero.tuning.measurements._watch.make_meter", lambda tensors: make_meter([GPU]))
    rows: list[Any] = []
    x = torch.ones(4, 4)
    watched = watch(fzero.jit(lambda x: x @ x, backend="fx"), rows.extend, every=2)
    for _ in range(6):
        watched(x)
    assert not rows and "synchronize" not in gpu.log
    gpu.done = 8  # four calls have ended
    watched(x)
    assert [step for step, _ in rows] == []  # the last that is due, call 6, has not
    gpu.done = 100
    watched(x)
    assert [step for step, _ in rows] == [*range(7)]
    watched.flush()
    assert [step for step, _ in rows] == [*range(8)] and watched.last.measurement.before_bytes == 40


STEP = fzero.jit(lambda x: x)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a step that is not jitted": (
        (lambda x: x,),
        {},
        TypeError,
        r"expected a jitted step, fzero.tuning.watch\(fzero.jit",
    ),
    "a writer that is none": ((STEP, "runs"), {}, TypeError, "writer 'runs': expected a function of rows"),
    "no calls": ((STEP,), {"every": 0}, ValueError, "every=0: expected a number of calls"),
    "a true call": ((STEP,), {"every": True}, ValueError, "every=True"),
    "before the first": ((STEP,), {"first": -1}, ValueError, "first=-1"),
    "no such machine": ((STEP,), {"machine": "tpu"}, ValueError, "machine='tpu' is unknown"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_watch_are_refused(name):
    args, asked, error, message = BAD[name]
    with pytest.raises(error, match=message):
        tuning.watch(*args, **asked)
