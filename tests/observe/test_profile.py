import json
import pathlib
import threading
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.observe._profile import _operation_kind
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


def make_jitted(backend: str) -> tuple[Any, list[Any]]:
    opt, mesh = optim.adam(1e-2), fzero.mesh(dp=2)
    step = fzero.jit(fzero.shard(train_step_for(mlp_loss, opt), stage=3, mesh=mesh), backend=backend)
    return step, [*step.init(mlp_params(), opt), mesh.split(mlp_batch(8))]


def test_the_kinds_of_a_profile_add_up_to_the_step():
    step, args = make_jitted("fx")
    result = fzero.profile(step, *args, steps=3)
    assert sum(c.seconds for c in result.kinds) == pytest.approx(result.profiled_seconds)
    assert all(c.seconds > 0 for c in result.kinds if c.name in ("compute", "copies", "Python"))
    assert all(c.seconds == 0 for c in result.kinds if c.name in ("compiled", "collectives", "waits"))
    assert 0 < result.seconds < 10 * result.profiled_seconds
    for kind in result.kinds[:-1]:
        mine = [c for c in result.operations if c.kind == kind.name]
        assert kind.seconds == pytest.approx(sum(c.seconds for c in mine))
        assert kind.calls == pytest.approx(sum(c.calls for c in mine))
    seconds = [c.seconds for c in result.operations]
    assert seconds == sorted(seconds, reverse=True)


def test_a_profile_counts_the_calls_of_one_step():
    result = fzero.profile(lambda x, y: torch.cat([x @ y, x @ x, x]).sin(), torch.ones(8, 8), torch.ones(8, 8), steps=4)
    calls = {c.name: c.calls for c in result.operations}
    assert (calls["aten::mm"], calls["aten::cat"], calls["aten::sin"]) == (2, 1, 1)
    assert "aten::clone" not in calls  # the copies of the arguments are not the step's


def test_ranges_that_a_user_marks_are_no_operations_of_a_profile():
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("mine"):
            return x.sin()

    result = fzero.profile(step, torch.ones(3), steps=2)
    mine = next(c for c in result.operations if c.name == "mine")
    assert mine.kind == "Python" and result.kinds[-1].seconds >= mine.seconds > 0
    assert result.kinds[0].calls == 1  # the sine


def test_a_profile_counts_only_threads_of_the_step():
    """Two threads at once would make a step longer than it is."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            torch.ones(64, 64).cos()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        result = fzero.profile(lambda x: [x.sin() for _ in range(200)], torch.ones(3), steps=2)
    finally:
        stop.set()
        thread.join()
    assert {c.name for c in result.operations} == {"aten::sin"}


def test_profile_does_not_donate_the_callers_arguments():
    step, args = make_jitted("fx")
    before = [x.clone() for x in fzero.tree.tensors(args)]
    fzero.profile(step, *args)
    assert all(torch.equal(x, y) for x, y in zip(fzero.tree.tensors(args), before, strict=True))
    step(*args)


def test_a_profile_shows_compiled_kernels():
    result = fzero.profile(fzero.jit(lambda x: (x.sin() * 2, x.cos()), backend="inductor"), torch.ones(4096))
    compiled = next(c for c in result.kinds if c.name == "compiled")
    assert compiled.calls >= 1 and compiled.seconds > 0  # our mark, and Inductor's own


def test_a_trace_is_written(tmp_path: pathlib.Path):
    path = tmp_path / "step.json"
    fzero.profile(torch.sin, torch.ones(3), steps=2, trace=path)
    names = [e.get("name") for e in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::sin") == 2 and names.count("fzero.profile: step") >= 2


def test_a_profile_prints_a_table():
    text = str(fzero.profile(torch.sin, torch.ones(3)))
    assert text.startswith("sin: ") and "ms a step" in text
    for name in ("compute", "collectives", "waits", "copies", "Python", "sin"):
        assert f"\n  {name} " in text


@pytest.mark.parametrize(
    "name,kind",
    [
        ("aten::mm", "compute"),
        ("aten::copy_", "copies"),
        ("_c10d_functional::all_gather_into_tensor", "collectives"),
        ("c10d::allreduce_", "collectives"),
        ("gloo:all_reduce", "collectives"),
        ("_c10d_functional::wait_tensor", "waits"),
        ("fzero::segment", "compiled"),
    ],
)
def test_every_operation_of_a_profile_has_a_kind(name, kind):
    assert _operation_kind(name) == kind


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 1.5}, {"warmup": -1}, {"steps": True}])
def test_the_error_of_profile_names_its_wrong_option(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}=.*expected an int, at least"):
        fzero.profile(torch.sin, torch.ones(3), **options)


def test_profile_refuses_compiled_steps_and_a_running_profiler(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="there is no folder"):
        fzero.profile(torch.sin, torch.ones(3), trace=tmp_path / "none" / "trace.json")
    step = fzero.shard(lambda p, s, b: (p, s), stage=0, mesh=fzero.mesh(dp=2, simulate="lockstep"))
    with pytest.raises(ValueError, match="lockstep"):
        fzero.profile(step, {}, {}, torch.ones(2))
    with torch.profiler.profile(acc_events=True), pytest.raises(RuntimeError, match="runs already"):
        fzero.profile(torch.sin, torch.ones(3))


def test_profile_keeps_requires_grad_of_arguments():
    def step(x: torch.Tensor) -> None:
        x.square().sum().backward()

    assert fzero.profile(step, torch.ones(3, requires_grad=True), steps=1).seconds > 0


def test_profile_raises_the_errors_of_the_step():
    with pytest.raises(ZeroDivisionError):
        fzero.profile(lambda x: 1 // 0, torch.ones(3))
