"""Lengths: code that serves all lengths computes what code for one does, and is used only where that is the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

import fzero
from fzero import _torch, optim
from fzero._torch import compiler
from fzero.graph._polynomials import Polynomial, _fit_polynomial
from fzero.graph._schedule_options import ScheduleOptions
from fzero.graph.run import _lengths, _segment_compiler, _template
from fzero.graph.run._lengths import Lengths, for_all_lengths
from fzero.graph.run._segment import _graph_key
from fzero.graph.run._segment_compiler import Code, segment_name
from tests.graph.helpers import needs_compiler
from tests.graph.run.helpers import (
    STEPS,
    in_inductors_place,
    interpret,
    tokens,
    tokens_loss,
    tokens_params,
    trace_graph,
)
from tests.helpers import examples, needs_symbols, train_step_for


@pytest.fixture(autouse=True)
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lengths, "worker_count", lambda cold: 0)


@examples(60, 400)
@given(
    p=st.builds(Polynomial, st.integers(-9, 99), st.integers(0, 40), st.integers(0, 9)),
    lengths=st.lists(st.integers(2, 500), min_size=3, max_size=3, unique=True),
)
def test_three_lengths_determine_a_polynomial_and_two_a_line(p, lengths):
    result = _fit_polynomial(lengths, [p.at(n) for n in lengths])
    assert result is not None and [result.at(n) for n in lengths] == [p.at(n) for n in lengths]
    line = p._replace(square=0)
    result = _fit_polynomial(lengths[:2], [line.at(n) for n in lengths[:2]])
    assert result is not None and [result.at(n) for n in lengths[:2]] == [line.at(n) for n in lengths[:2]]


def test_multiples_and_squares_of_the_length_are_preferred_to_lines():
    assert _fit_polynomial([64, 72], [64 * 64, 72 * 72]) == Polynomial(0, 0, 1)
    assert _fit_polynomial([64, 72], [256, 288]) == Polynomial(0, 4)
    assert _fit_polynomial([64, 72], [63, 71]) == Polynomial(-1, 1)
    assert _fit_polynomial([64, 72], [5, 5]) == Polynomial(5)
    assert _fit_polynomial([64, 72], [10, 11]) is None  # rounded up to another multiple
    assert _fit_polynomial([64, 72, 80], [3, 7, 5]) is None


def shapes(*sizes: Sequence[int]) -> Any:
    return tuple(tuple(s) for s in sizes)


def test_a_call_whose_shapes_differ_in_one_size_has_a_length():
    cache = Lengths()
    assert cache.call_length(shapes((4, 64), (4, 64), (7,))) is None  # whatever it is
    assert cache.call_length(shapes((4, 64), (4, 64), (7,))) is None
    assert cache.call_length(shapes((4, 72), (4, 72), (7,))) == 72 and cache.first_length == 64
    assert cache.call_length(shapes((4, 72), (4, 64), (7,))) is None
    assert cache.call_length(shapes((8, 64), (8, 64), (7,))) is None  # another size changes
    assert cache.call_length(shapes((4, 80), (4, 96), (7,))) is None
    assert cache.call_length(shapes((4, 80), (4, 80))) is None
    assert cache.call_length(shapes((4, 80), (4, 80), (7,))) == 80


def run_uncompiled(gm: GraphModule, arguments: Any, forms: Any, length: int) -> Any:
    """Run the operations, in Inductor's place, with their numbers at the length that is given."""

    def run(args: list[Any]) -> list[Any]:
        at, *mine = args
        args.clear()
        input_forms, output_forms = forms(at)
        assert [(tuple(x.shape), x.stride()) for x in mine] == [(tuple(s), tuple(t)) for s, t, *_ in input_forms]
        out = list(compiler._AtLength(gm, arguments(at)).run(*mine))
        assert [(tuple(x.shape), x.stride()) for x in out] == [(tuple(s), tuple(t)) for s, t, *_ in output_forms]
        return out

    return run, lambda length: True


STEPS |= {
    f"{name}, backward": lambda x, w, f=f: torch.func.grad(lambda y: (f(y, w) ** 2).sum())(x) / 99
    for name, f in STEPS.items()
}


def code_at(names: Sequence[str], length: int) -> tuple[Code, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(length)
    args = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, length, 8), (8, 8))]

    def f(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        for name in names:
            x = STEPS[name](x, w)
        return [x]

    graph = trace_graph(f, args)
    stand_ins = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    output_forms = [n.meta["val"] for n in fzero.graph.ir.graph_results(graph)]
    return Code(graph, stand_ins, output_forms, segment_name(_graph_key(graph))), args


@pytest.mark.slow
@examples(4, 200)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    lengths=st.lists(st.integers(5, 40), min_size=5, max_size=5, unique=True),
)
def test_a_segment_at_any_length_equals_its_own_operations(names, lengths):
    """From the fourth length on nothing is compiled anew: three tell all numbers."""
    cache, count = Lengths(), 0

    def count_calls(*args: Any) -> Any:
        nonlocal count
        count += 1
        return run_uncompiled(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_template, "inductor_for_lengths", count_calls)
        for i, length in enumerate(lengths):
            code, args = code_at(names, length)
            actual = for_all_lengths([code], cache, shapes(*[x.shape for x in args]), None)
            assert (code.name in actual) == (i > 0) and count <= 2
            if actual:
                expected = GraphModule({}, code.graph).forward(*args)
                (got,) = actual[code.name]([*args])
                torch.testing.assert_close(got, expected[0], rtol=1e-10, atol=1e-10)


def test_compiled_code_runs_only_for_lengths_that_its_guards_allow(monkeypatch):
    monkeypatch.setattr(_template, "inductor_for_lengths", lambda *args: (run_uncompiled(*args)[0], lambda n: n == 9))
    cache, results = Lengths(), []
    for length in (7, 9, 11, 9):
        code, args = code_at(["attention"], length)
        results.append(code.name in for_all_lengths([code], cache, shapes(*[x.shape for x in args]), None))
    assert results == [False, True, False, True]


def test_a_step_that_branches_on_the_length_is_compiled_for_each(monkeypatch):
    monkeypatch.setattr(_template, "inductor_for_lengths", run_uncompiled)
    STEPS["branching"] = lambda x, w: x * 2 if x.shape[1] < 20 else x * 3
    try:
        cache, results = Lengths(), []
        for length in (10, 12, 14, 30, 32):
            code, args = code_at(["branching"], length)
            runs = for_all_lengths([code], cache, shapes(*[x.shape for x in args]), None)
            results.append(code.name in runs)
            if runs:
                (got,) = runs[code.name]([*args])
                assert torch.equal(got, args[0] * (2 if length < 20 else 3))
        assert results[:3] == [False, True, True]
    finally:
        del STEPS["branching"]


def train(backend: str, lengths: Sequence[int], **options: Any) -> tuple[Any, Any]:
    opt = optim.adamw(1e-2)
    step = fzero.shard(train_step_for(tokens_loss, opt), 3, fzero.mesh(dp=2))
    run, state, losses = fzero.jit(step, backend=backend, **options), step.init(tokens_params(), opt), []  # pyright: ignore
    for length in lengths:
        *state, loss = run(*state, step.mesh.split(tokens(length)))
        losses.append(loss)
    return [*losses, step.gather(state[0])], run


class Counted:
    """Counts what Inductor is given, for one length and for all."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.one, self.all = 0, 0
        in_one, in_all = _segment_compiler.inductor, _template.inductor_for_lengths

        def one(*args: Any) -> Any:
            self.one += 1
            return in_one(*args)

        def many(*args: Any) -> Any:
            self.all += 1
            return in_all(*args)

        patch.setattr(_segment_compiler, "inductor", one)
        patch.setattr(_template, "inductor_for_lengths", many)


@needs_symbols
@needs_compiler
def test_one_compiled_segment_serves_all_lengths():
    cache, runs = Lengths(), None
    for i, length in enumerate((7, 16, 33, 9)):
        code, args = code_at(["attention, backward", "shifted"], length)
        result = for_all_lengths([code], cache, shapes(*[x.shape for x in args]), None)
        if i == 0:
            continue
        (got,) = result[code.name]([*args])
        torch.testing.assert_close(got, GraphModule({}, code.graph).forward(*args)[0], rtol=1e-9, atol=1e-9)
        ((template, one, _),) = cache.templates[next(iter(cache.templates))]
        assert runs in (None, one) and template.length == 16
        runs = one


@needs_compiler
@pytest.mark.slow
def test_after_the_second_length_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr("fzero.graph.run._workers._spare_cores", lambda: 0)
    counted = Counted(monkeypatch)
    (*losses, params), run = train("inductor", (12, 16), strict=True)
    one, many = counted.one, counted.all
    assert many >= 2
    lengths = (12, 16, 20, 9, 33, 16)
    (*losses, params), run = train("inductor", lengths, strict=True)
    assert counted.one <= 2 * one and counted.all == 2 * many and run.traces == 3
    (*expected, whole), _ = train("fx", lengths)
    torch.testing.assert_close(losses, expected, rtol=1e-8, atol=0)
    fzero.testing.assert_trees_close(params, whole, 1e-6)


@pytest.mark.slow
@needs_symbols
def test_two_planned_lengths_are_compiled_for_all_at_once(monkeypatch):
    in_inductors_place(monkeypatch, interpret)
    monkeypatch.setattr(_template, "inductor_for_lengths", run_uncompiled)
    opt = optim.adamw(1e-2)
    step = fzero.shard(train_step_for(tokens_loss, opt), 3, fzero.mesh(dp=2))
    run, state = fzero.jit(step), step.init(tokens_params(), opt)
    for length in (12, 40):
        run.plan(*state, step.mesh.split(tokens(length)))
    counted, losses = Counted(monkeypatch), []
    for length in (12, 16, 40, 20, 12):
        *state, loss = run(*state, step.mesh.split(tokens(length)))
        losses.append(loss)
    assert counted.one == 0 < counted.all
    (*expected, _), _ = train("fx", (12, 16, 40, 20, 12))
    fzero.testing.assert_trees_close(losses, expected)


@pytest.mark.slow
def test_dynamic_false_compiles_for_each_length(monkeypatch):
    in_inductors_place(monkeypatch, interpret)
    counted = Counted(monkeypatch)
    for dynamic, many in ((False, 0), (True, 1)):
        monkeypatch.setattr(_template, "inductor_for_lengths", run_uncompiled)
        counted = Counted(monkeypatch)
        train("inductor", (12, 16, 20), dynamic=dynamic)
        assert min(counted.all, 1) == many
    with pytest.raises(ValueError, match="dynamic=1: expected True or False"):
        fzero.jit(lambda x: x, dynamic=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_later_length_has_the_schedule_of_the_first_but_not_against_a_budget(monkeypatch):
    _, run = train("fx", (12, 40))
    first, later = run._entries.values()
    assert first.options.schedule_options.prefetch == "auto"
    assert (
        later.options.schedule_options == ScheduleOptions.of(first.best.settings)
        and later.best.settings == first.best.settings
    )
    _, run = train("fx", (12, 40), memory_budget=1e9)
    assert [e.options.schedule_options.prefetch for e in run._entries.values()] == ["auto", "auto"]


@pytest.mark.slow
@needs_symbols
def test_code_that_inductor_cannot_compile_for_all_lengths_is_compiled_for_each(monkeypatch):
    in_inductors_place(monkeypatch, interpret)

    def fail(*args: Any) -> Any:
        raise RuntimeError("symbols")

    monkeypatch.setattr(_template, "inductor_for_lengths", fail)
    counted = Counted(monkeypatch)
    actual, run = train("inductor", (12, 16, 20), strict=True)
    expected, _ = train("fx", (12, 16, 20))
    fzero.testing.assert_trees_close(actual, expected)
    assert counted.one > 0 and all(not e.executable.uncompiled for e in run._entries.values())
    assert counted.all < counted.one  # a template that failed is not tried again


def test_a_plan_for_other_ranks_counts_as_no_second_length(monkeypatch):
    opt = optim.sgd(0.1)
    step = fzero.shard(train_step_for(tokens_loss, opt), 3, fzero.mesh(dp=2))
    run, args = fzero.jit(step, backend="fx"), step.init(tokens_params(), opt)
    fzero.plan(run, *args, step.mesh.split(tokens(12)), world_size=4)
    assert run._lengths.first is None


def test_padding_by_concatenation_equals_torchs_pad():
    x = torch.arange(24.0).view(2, 3, 4)
    for pad in ([1, 2], [0, 1, 2, 0], [-1, 2, 0, -1], [0, 0, 1, 1, 0, 3], [-1, -2]):
        assert torch.equal(compiler.pad_constant(x, pad, 7), F.pad(x, pad, value=7))
    assert torch.equal(compiler.pad_constant(x.long(), [0, 1], -100.0), F.pad(x.long(), [0, 1], value=-100))
    assert _torch.have_equal_strides(compiler.pad_constant(x, [0, 0]), x)
