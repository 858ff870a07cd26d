import pathlib
import time
from itertools import groupby
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.observe._flame_chart import _bars, _colours, _cut_label, _row_names
from fzero.observe._lines import Span, _function_at, _mark_functions, sum_by_line
from tests.helpers import cases, mlp_batch, mlp_loss, mlp_params, train_step_for


def make_sharded(stage: int = 3, **options: Any) -> tuple[Any, list[Any]]:
    opt, mesh = optim.adam(1e-2), fzero.mesh(dp=2)
    step = fzero.shard(train_step_for(mlp_loss, opt, **options), stage=stage, mesh=mesh)
    return step, [*step.init(mlp_params(), opt), mesh.split(mlp_batch(8))]


class Slow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x + 0.1 * x.sin()
        return x @ x


def test_a_slow_loop_is_named_with_its_module():
    result = fzero.profile(Slow(), torch.ones(8, 8))
    line = next(c for c in result.lines if "sin" in c.code)
    assert (line.function, line.calls, line.backward_seconds) == ("Slow.forward", 60, 0)
    assert line.code == "x = x + 0.1 * x.sin()" and "Slow.forward" in str(result)
    assert {s.phase for s in result.spans} == {"forward"}


@pytest.mark.parametrize("backend", [None, "fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_profile_by_lines_has_the_passes_functions_and_lines_of_a_step(backend):
    step, args = make_sharded()
    result = fzero.profile(step if backend is None else fzero.jit(step, backend=backend), *args, steps=1)
    assert {s.phase for s in result.spans} == {"forward", "backward", "update"}
    layer = next(c for c in result.lines if c.code == 'x = torch.tanh(x @ block["w"] + block["b"])')
    assert layer.function == "mlp_loss" and layer.calls > 1
    assert 0 < layer.backward_seconds <= layer.seconds  # the backward pass has the line of the forward operation
    update = next(c for c in result.lines if "opt.update" in c.code)
    assert update.backward_seconds <= 0.5 * update.seconds
    assert sum(c.seconds for c in result.lines) == pytest.approx(sum(s.seconds for s in result.spans))


@pytest.mark.parametrize("micro_batches", cases((1, 4), [2]))
def test_a_profile_by_lines_separates_micro_batches(micro_batches):
    step, args = make_sharded(micro_batches=micro_batches)
    result = fzero.profile(step, *args, steps=1)
    tanh = [s.phase for s in result.spans if s.name == "aten::tanh"]
    assert set(tanh) == {"forward"} and len(tanh) % micro_batches == 0
    passes = [phase for phase, _ in groupby([s.phase for s in result.spans])]
    assert passes == micro_batches * ["forward", "backward"] + ["update"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_operation_of_a_graph_is_attributed_once(backend):
    """The spans of a loop are those of its iterations, not also the loop's."""
    step, args = make_sharded(micro_batches=4)
    step = fzero.jit(step, backend=backend)
    result = fzero.profile(step, *args, steps=1)
    names = [s.name for s in result.spans]
    assert "loop" not in names
    if backend == "fx":
        plan = fzero.plan(step, *args)
        products = [o for o in plan.operations if o.target.startswith("aten.mm.")]
        found_products = [n for n in names if n in ("aten::mm", "aten::bmm")]  # a simulation multiplies for all ranks
        assert len(found_products) == sum(o.times for o in products) > len(products)


def test_nested_spans_count_time_once():
    step, args = make_sharded()
    start = time.perf_counter()
    result = fzero.profile(step, *args, steps=1, warmup=0)
    assert 0 < sum(s.seconds for s in result.spans) < time.perf_counter() - start
    ends = [s.start + s.seconds for s in result.spans]
    assert [s.start for s in result.spans[1:]] == pytest.approx(ends[:-1])


def test_marks_name_the_function_of_each_operation_in_both_passes():
    def attend(w: torch.Tensor) -> torch.Tensor:
        return (w @ w).sum()

    w = torch.ones(4, 4, requires_grad=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler, _mark_functions("in "):
        attend(w).backward()
    marks = [e for e in profiler.events() or [] if e.name.startswith("in ")]
    products = [e.name for e in marks if "aten::mm" in [c.name for c in e.cpu_children]]
    assert products == ["in attend, forward or update", *["in attend, backward"] * 2]


def span(name: str, line: str, phase: str, start: float) -> Span:
    return Span(name, line, "f", phase, start, 1.0)


def test_spans_become_lines_and_bars():
    spans = [span("aten::mm", "a.py:1", "forward", 0), span("aten::mm", "a.py:2", "forward", 1)]
    spans += [span("aten::mm", "a.py:1", "backward", 2)]
    first, second = sum_by_line(spans)
    assert (first.line, first.seconds, first.backward_seconds, first.calls) == ("a.py:1", 2.0, 1.0, 2)
    assert second.line == "a.py:2"
    results = [(b.row, b.text, b.start, b.seconds) for b in _bars(spans)]
    assert results[:2] == [(0, "forward", 0, 2.0), (0, "backward", 2, 1.0)]
    assert results[2:4] == [(1, "f", 0, 2.0), (1, "f", 2, 1.0)]  # one function in two passes is two bars
    assert [x for x in results if x[0] == 3] == [(3, "mm", 0, 1.0), (3, "mm", 1, 1.0), (3, "mm", 2, 1.0)]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(self.linear(x))

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return scale(x.tanh())


def scale(x: torch.Tensor) -> torch.Tensor:
    return (lambda y: 2 * y)(x)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BLOCK = ("train_step", "loss", "Net", "blocks.1")


@pytest.mark.parametrize("backend", [None, "fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_modules_and_functions_nest_in_a_flame_chart(backend):
    apply, params, buffers = fzero.nn.functional(Net())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, x)[0].square().mean()

    opt, mesh = optim.adam(1e-2), fzero.mesh(dp=1)
    step = fzero.shard(train_step_for(loss, opt), stage=3, mesh=mesh)
    args = [*step.init(params, opt), mesh.split(torch.ones(4, 4))]
    result = fzero.profile(step if backend is None else fzero.jit(step, backend=backend), *args, steps=1)
    costs = {c.stack: c for c in result.stacks}
    assert set(costs) >= {BLOCK[:i] for i in range(1, 5)}
    assert not any("lambda" in name or "_activate" in name for stack in costs for name in stack)
    for stack, cost in costs.items():  # a caller costs at least as much as all that it calls
        inner = [c for c in costs.values() if c.stack[:-1] == stack]
        assert cost.seconds >= sum(c.seconds for c in inner) - 1e-9 and cost.calls >= sum(c.calls for c in inner)
        assert 0 <= cost.backward_seconds <= cost.seconds
    if backend == "inductor":
        return
    assert {(*BLOCK, "linear"), (*BLOCK, "scale")} <= set(costs)
    for name in ("linear", "scale"):  # the backward pass counts for the forward operation's module
        assert 0 < costs[*BLOCK, name].backward_seconds < costs[*BLOCK, name].seconds
    tanh = [s for s in result.spans if s.name == "aten::tanh"]
    assert [s.stack[-1] for s in tanh] == ["blocks.0", "blocks.1"]  # not _activate, a part of its module
    order = [c.stack for c in result.stacks]
    assert order.index(BLOCK[:2]) < order.index((*BLOCK[:3], "blocks.0")) < order.index(BLOCK)
    # a busy machine can stall one operation, which leaves a block below 2% of the step and out of the text
    shown = max([c for c in costs.values() if len(c.stack) >= 3], key=lambda c: c.seconds)
    line = next(row for row in str(result).splitlines() if row.split()[:1] == [shown.stack[-1]])
    assert line.startswith("  " * len(shown.stack)) and f"{shown.calls:,}" in line


def test_bars_of_modules_lie_within_those_of_their_parents():
    first = span("aten::mm", "a.py:1", "forward", 0)._replace(stack=("f", "layers.0"))
    second = first._replace(start=1, stack=("f", "layers.1"))
    alone = first._replace(start=2, stack=("f",))
    spans = [first, second, alone]
    assert _row_names(spans) == ("pass", "function", "", "line", "operation")
    results = [(b.row, b.text, b.start, b.seconds, b.function) for b in _bars(spans)]
    assert results[1:4] == [(1, "f", 0, 3.0, "f"), (2, "layers.0", 0, 1.0, "layers"), (2, "layers.1", 1, 1.0, "layers")]
    assert [x[0] for x in results[4:]] == [3, 3, 3, 4, 4, 4]  # no bar where a stack has no name
    functions = _colours(spans)[1]
    assert list(functions) == ["layers", "f"]  # equal layers have one colour
    deep = first._replace(stack=tuple("abcdefghijk"))
    assert len(_row_names([deep])) == 11


def test_the_most_expensive_functions_have_distinct_colours():
    spans = [span(f"aten::op{i}", "a.py:1", "forward", i)._replace(seconds=1.0 + i) for i in range(20)]
    passes, functions, operations = _colours(spans)
    assert set(passes) == {"forward", "backward", "update"} and list(functions) == ["f"]
    assert list(operations) == [f"op{i}" for i in range(19, 19 - len(operations), -1)]
    every = [*passes.values(), *functions.values(), *operations.values()]
    assert len(set(every)) == len(every)


def test_labels_of_a_flame_chart_are_cut_to_their_bars():
    assert _cut_label("Attention.forward", 0.5) == "Attention.forward" and _cut_label("Attention.forward", 0.01) == ""
    short = _cut_label("Attention.forward", 0.05)
    assert 4 <= len(short) < len("Attention.forward") and "Attention.forward".startswith(short[:-1])


def test_a_line_lies_in_its_innermost_function(tmp_path: pathlib.Path):
    path = tmp_path / "model.py"
    path.write_text("x = 1\nclass A:\n    def f(self):\n        def g():\n            return 1\n        return g\n")
    names = [_function_at(f"{path}:{i}") for i in range(1, 7)]
    assert names == ["", "", "A.f", "g", "g", "A.f"]
    assert _function_at("") == _function_at(f"{tmp_path}/none.py:3") == ""


def test_a_profile_shows_a_flame_chart(tmp_path: pathlib.Path):
    step, args = make_sharded(0)
    result = fzero.profile(step, *args, steps=1)
    result.plot(tmp_path / "flame.png")
    assert (tmp_path / "flame.png").read_bytes().startswith(b"\x89PNG")
    html = result._repr_html_()
    assert "the most expensive lines" in html and "data:image/png;base64," in html
    assert repr(result).startswith("Profile(train_step: ")
