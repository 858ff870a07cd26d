"""Compiling: each segment once on a machine, by ranks and workers; and steps that run meanwhile."""

import gc
import io
import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx import Graph, GraphModule, Interpreter

import fzero
import fzero._torch.compiler as compiler
import fzero._torch.compiler_process as compiler_process
from fzero import _torch, optim
from fzero.graph.ir import is_input
from fzero.graph.run import _auto_backend, _backends, _segment_compiler, _workers
from fzero.graph.run._segment import _graph_key
from fzero.graph.run._segment_compiler import Code, CompileError, can_load, compile_all, is_compiled, segment_name
from fzero.graph.run._workers import Workers, _spare_cores
from tests.graph.helpers import bitwise, code_of, needs_compiler
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def codes(count: int) -> list[Code]:
    """Make segments, the later the longer."""

    def grown(i: int) -> Any:
        def f(x: torch.Tensor) -> list[torch.Tensor]:
            for _ in range(i):
                x = x + 1
            return [x]

        return f

    return [code_of(grown(i + 1), torch.ones(2)) for i in range(count)]


def run_as_it_is(code: Code) -> Any:
    return lambda args: GraphModule({}, code.graph).forward(*args)


# By several processes.


def test_no_two_processes_compile_one_segment_and_each_gets_all():
    all_codes, doing, got, order = codes(6), set(), [[], []], []

    def one(code: Code) -> Any:
        assert code.name not in doing
        doing.add(code.name)
        order.append(code.name)
        time.sleep(0.02)
        doing.remove(code.name)
        return run_as_it_is(code)

    def process(i: int) -> None:
        got[i] += [code.name for code, _ in compile_all(all_codes, one)]

    threads = [threading.Thread(target=process, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(got[0]) == sorted(got[1]) == sorted(code.name for code in all_codes)
    assert set(order[:2]) == {all_codes[-1].name, all_codes[-2].name}  # the longest first, one each


def test_segments_that_another_process_compiles_are_awaited_last():
    all_codes = codes(3)
    lock = FileLock(_segment_compiler._marker_file(all_codes[2], "lock"), thread_local=False)
    lock.acquire()
    threading.Timer(0.2, lock.release).start()
    held = []

    def one(code: Code) -> Any:
        held.append((code.name, lock.is_locked))
        return run_as_it_is(code)

    assert [code for code, _ in compile_all(all_codes, one)] == [all_codes[1], all_codes[0], all_codes[2]]
    assert held == [(all_codes[1].name, True), (all_codes[0].name, True), (all_codes[2].name, False)]


def test_without_patience_or_locks_a_process_compiles_alone(monkeypatch):
    all_codes = codes(2)
    monkeypatch.setattr(_segment_compiler, "_MAX_LOCK_SECONDS", 0.01)
    with FileLock(_segment_compiler._marker_file(all_codes[0], "lock")):
        assert len(list(compile_all(all_codes, run_as_it_is))) == 2

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    assert len(list(compile_all(all_codes, run_as_it_is))) == 2


@pytest.mark.parametrize("folder", ["/proc/self/nope", "a file"])
def test_a_cache_folder_that_cannot_be_made_is_named(folder, monkeypatch, tmp_path):
    if folder == "a file":
        (tmp_path / "fzero").touch()
    else:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    code = codes(1)[0]
    assert not is_compiled(code)
    assert len(list(compile_all([code], run_as_it_is))) == 1

    def fail(*args: Any) -> Any:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(_segment_compiler, "inductor", fail)
    with pytest.raises(RuntimeError, match=r'a segment .* could not compile it: .*backend="fx"'):
        _segment_compiler.compile_and_mark(code)
    monkeypatch.setattr(_segment_compiler, "inductor", lambda *args: list)
    assert _segment_compiler.compile_and_mark(code) is list


def test_an_error_while_compiling_releases_the_lock():
    all_codes = codes(1)

    def fail(code: Code) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        list(compile_all(all_codes, fail))
    assert len(list(compile_all(all_codes, run_as_it_is))) == 1


def test_a_graph_is_the_same_in_another_process():
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a, b = torch.split(torch.clamp(x, -math.inf, 2.5), [1, 2])
        z = torch.full((3,), math.nan, dtype=torch.float64).to(torch.bfloat16)
        return [a.sum((0, 1), keepdim=True), torch.stack([b.to(torch.float16).max(1)[0], b[:, 0]]), z, y.argmax()]

    code = code_of(f, torch.ones(3, 4).t().contiguous().t(), torch.ones(2, dtype=torch.int64))
    (make,) = _torch.unpickle_graphs(_torch.pickle_graphs([(code.graph, code.stand_ins, code.outputs)]))
    graph, stand_ins, outputs = make()
    for node, x in zip([n for n in graph.nodes if is_input(n)], stand_ins, strict=True):
        node.meta["val"] = x
    assert segment_name(_graph_key(graph)) == code.name
    for there, here in ((stand_ins, code.stand_ins), (outputs, code.outputs)):
        assert [(x.shape, x.stride(), x.dtype, x.device) for x in there] == [
            (x.shape, x.stride(), x.dtype, x.device) for x in here
        ]


@pytest.fixture
def other_settings():
    """All that tells apart what is compiled, beside the code."""
    before = compiler_process._read_settings()
    matmul = {"fp32_precision": "ieee", **dict.fromkeys(compiler_process._MATMUL[1:], False)}
    compiler_process._apply_settings(compiler_process._Settings(2, torch.float64, matmul, True, True))
    yield
    compiler_process._apply_settings(before)


@pytest.mark.slow
@needs_compiler
def test_segments_that_a_worker_compiled_are_loaded(other_settings, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # an empty one takes longer: headers, too
    number = float(time.time_ns() % 10**6)  # that nobody has compiled
    good = code_of(lambda x: [x * number + 1], torch.ones(64, dtype=torch.float32))
    bad = Graph()
    x = bad.placeholder("x")
    for _ in range(5):  # longer, so that it is compiled first
        x = bad.call_function(torch.ops.aten.mm.default, (x, 3))
    bad.output((x,))
    workers = _workers.start_workers([Code(bad, good.stand_ins, [], "bad"), good], 1)
    for _ in range(600):
        if workers.are_done():
            break
        time.sleep(0.1)
    workers.stop()
    assert is_compiled(good) and not is_compiled(Code(bad, good.stand_ins, [], "bad"))
    counters.clear()
    (runs,) = [runs for _, runs in compile_all([good], _segment_compiler.compile_and_mark)]
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, dict(counters["inductor"])
    assert (runs([torch.ones(64, dtype=torch.float32)])[0] == number + 1).all()


def test_a_compile_worker_runs_in_a_process_of_its_own():
    """A worker is silent, so that one that fails at once would pass for one that has compiled everything."""
    workers = _workers.start_workers([], 1)
    (worker,) = workers.processes
    assert worker.wait(60) == 0
    workers.stop()


@pytest.mark.slow
def test_a_compile_worker_ends_with_its_parent():
    workers = _workers.start_workers(codes(1), 2)
    assert len(workers.processes) == 2 and not workers.are_done()
    workers.stop()
    assert workers.are_done()
    (alone,) = _workers.start_workers(codes(60), 1).processes  # more than it compiles in the time
    time.sleep(0.1)
    assert alone.stdin is not None
    alone.stdin.close()
    try:
        assert alone.wait(30) == 0
    finally:
        alone.kill()


def test_no_worker_is_started_in_vain(monkeypatch):
    monkeypatch.setattr(_workers, "compile_threads", lambda: 8)
    monkeypatch.setattr(_workers.os, "sched_getaffinity", lambda pid: range(6))
    for ranks, spare in (("1", 5), ("2", 2), ("4", 0), ("16", 0), ("", 5), ("0", 5)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert _spare_cores() == spare
    monkeypatch.setattr(_workers, "compile_threads", lambda: 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert _spare_cores() == 1
    monkeypatch.setattr(_workers, "pickle_graphs", lambda graphs: 1 / 0)  # what cannot be pickled
    assert _workers.start_workers(codes(1), 2) == Workers()


class Pretended:
    """Stands in the place of workers and Inductor: segments are ready when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch, ready: int = 0) -> None:
        self.ready, self.compiled = ready, []
        patch.setattr(_backends, "start_workers", lambda codes, count, nice: self)
        patch.setattr(_backends, "is_compiled", lambda code: len(self.compiled) < self.ready)
        patch.setattr(_auto_backend, "is_compiled", lambda code: len(self.compiled) < self.ready)
        patch.setattr(_auto_backend, "compile_and_mark", self.compile)
        patch.setattr(_auto_backend, "can_load", lambda code: True)

    def compile(self, code: Code) -> Any:
        self.compiled.append(code.name)
        return lambda args: Interpreter(GraphModule({}, code.graph)).run(*args)

    def are_done(self) -> bool:
        return False

    def stop(self) -> None:
        self.stopped = True


def train(step: Any, jitted: Any, steps: Sequence[int]) -> None:
    opt = optim.adamw(1e-2)
    eager, fast = step.init(mlp_params(), opt), jitted.init(mlp_params(), opt)
    for i in steps:
        batch = step.mesh.split(mlp_batch(12, seed=i))
        *eager, loss = step(*eager, batch)
        *fast, other = jitted(*fast, batch)
        bitwise((eager, loss), (fast, other))


def make_both(k: int = 3) -> Any:
    step = fzero.shard(train_step_for(mlp_loss, optim.adamw(1e-2), micro_batches=k), stage=3, mesh=fzero.mesh(dp=2))
    return step, fzero.jit(step, backend="auto")


def executable_of(jitted: Any) -> Any:
    (entry,) = jitted._entries.values()
    return entry.executable


def test_a_step_runs_uncompiled_until_all_its_segments_are_compiled(monkeypatch):
    pretended = Pretended(monkeypatch)
    step, jitted = make_both()
    train(step, jitted, range(2))
    auto = executable_of(jitted).function
    assert auto.compiled is None and not pretended.compiled
    pretended.ready = 2
    train(step, jitted, range(1))
    assert auto.compiled is None and len(pretended.compiled) == 2
    pretended.ready = 1000
    train(step, jitted, range(2))
    assert auto.compiled is not None
    assert len(pretended.compiled) == executable_of(jitted).distinct == len(auto.loaded) > 2


@pytest.mark.parametrize("warm", [True, False])
def test_the_garbage_collector_pauses_while_segments_load_and_not_while_they_compile(monkeypatch, warm):
    states = set()

    def run_uncompiled(codes: Any, one: Any) -> Any:
        for code in codes:
            states.add(gc.isenabled())
            yield code, lambda args, graph=code.graph: Interpreter(GraphModule({}, graph)).run(*args)

    Pretended(monkeypatch)
    monkeypatch.setattr(_backends, "start_workers", lambda codes, count: Workers(()))
    monkeypatch.setattr(_backends, "is_compiled", lambda code: warm)
    monkeypatch.setattr(_auto_backend, "is_compiled", lambda code: warm)
    monkeypatch.setattr(_backends, "compile_all", run_uncompiled)
    step, _ = make_both()
    train(step, fzero.jit(step), range(1))
    assert states == {not warm} and gc.isenabled()


def test_no_segment_is_loaded_before_inductor_is_imported(monkeypatch):
    """Its import takes seconds, which no step waits for."""
    Pretended(monkeypatch, 1000)
    there = threading.Event()
    thread = threading.Thread(target=there.wait, daemon=True)
    thread.start()
    monkeypatch.setattr(_auto_backend, "can_load", can_load)
    for name in ("start_import", "start_cpu_probe"):
        monkeypatch.setattr(_segment_compiler, name, lambda: thread)
    step, jitted = make_both()
    train(step, jitted, range(2))
    assert not executable_of(jitted).function.loaded
    there.set()
    thread.join()
    train(step, jitted, range(1))
    assert executable_of(jitted).function.loaded


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_only_code_for_the_cpu_waits_for_its_vector_instructions(device, monkeypatch):
    """On a processor with AMX they take four new processes that import torch, and no kernel of a GPU uses them."""
    probes = []

    class Probe(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            probes.append("waited")

        def is_alive(self) -> bool:
            return True

    monkeypatch.setattr(compiler, "start_cpu_probe", Probe)
    monkeypatch.setattr(_segment_compiler, "start_cpu_probe", Probe)
    monkeypatch.setattr(compiler, "_compile_with", lambda *args: None)
    there = threading.Thread(target=lambda: None)
    monkeypatch.setattr(_segment_compiler, "start_import", lambda: there)
    mode = compiler._stand_in_mode()
    with mode:
        x = torch.empty(2, device=device)
    compiler._compile(lambda x: (x,), [x], mode)
    assert probes == ["waited"] * (device == "cpu")
    code = Code(Graph(), [x], [], "")
    assert can_load(code) == (device == "cuda") == (not code.on_cpu)


@pytest.mark.parametrize("device, expected", (("cpu", "start_cpu_probe"), ("meta", "start_import")))
def test_a_first_call_starts_the_import_that_its_device_needs(device, expected, monkeypatch):
    started = []
    for name in ("start_cpu_probe", "start_import"):
        monkeypatch.setattr(_torch, name, lambda name=name: started.append(name))
    step = fzero.shard(train_step_for(mlp_loss, optim.sgd(0.1)), stage=3, mesh=fzero.mesh(dp=2, device=device))
    jitted = fzero.jit(step)
    monkeypatch.setattr(type(jitted), "_find_entry", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jitted(*step.init(mlp_params(), optim.sgd(0.1)), step.mesh.split(mlp_batch(4)))
    assert started == [expected]


def test_ready_segments_are_loaded_for_half_a_second_at_most(monkeypatch):
    Pretended(monkeypatch, 1000)
    clock = itertools.count(0, 0.3)
    monkeypatch.setattr(_auto_backend, "time", type("", (), {"monotonic": staticmethod(lambda: next(clock))}))
    step, jitted = make_both()
    train(step, jitted, range(1))
    assert len(executable_of(jitted).function.loaded) == 1


def test_a_step_whose_last_segment_cannot_be_compiled_still_switches_to_compiled_code(monkeypatch):
    pretended = Pretended(monkeypatch, 1000)

    def fail_last(code: Code) -> Any:
        if len(pretended.compiled) == last:
            raise CompileError("a segment", "no")
        return pretended.compile(code)

    monkeypatch.setattr(_auto_backend, "compile_and_mark", fail_last)
    step, jitted = make_both()
    last = -1  # none, to count them
    train(step, jitted, range(1))
    last = len(pretended.compiled) - 1
    pretended.compiled.clear()
    step, jitted = make_both()
    train(step, jitted, range(3))
    assert len(pretended.compiled) == last
    assert executable_of(jitted).function.compiled.uncompiled == 1


@pytest.mark.slow
def test_segments_that_workers_left_are_compiled_in_this_process(monkeypatch):
    pretended = Pretended(monkeypatch)
    pretended.are_done = lambda: True
    step, jitted = make_both()
    train(step, jitted, range(2))
    assert executable_of(jitted).function.compiled is not None


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_compilation_is_a_bar_on_a_terminal_and_a_line_in_a_file(monkeypatch, terminal):
    out = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **kw: Console(file=out, force_terminal=terminal, width=80))
    monkeypatch.setattr(_segment_compiler, "_QUIET_SECONDS", 0.0)
    results = []
    for item in _segment_compiler.progress(range(3), 3):
        results.append(item)
        time.sleep(0.15)
    assert results == [0, 1, 2]
    assert "fzero.jit compiles" in out.getvalue() and ("2/3" in out.getvalue()) == terminal
    if not terminal:
        (line,) = out.getvalue().splitlines()
        assert line.startswith("fzero.jit compiles 3 segments before the first step") and 'backend="auto"' in line


@pytest.mark.parametrize("terminal", [False, True])
def test_quick_compilations_and_other_ranks_show_no_bar(monkeypatch, terminal):
    out = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **kw: Console(file=out, force_terminal=terminal))
    assert list(_segment_compiler.progress(range(3), 3)) == [0, 1, 2] and "compiles" not in out.getvalue()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(_segment_compiler, "_QUIET_SECONDS", 0.0)
    assert list(_segment_compiler.progress(range(3), 3)) == [0, 1, 2] and out.getvalue() == ""
