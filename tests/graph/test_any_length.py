"""Any length: from the fourth length on a step is not traced, and is the step that a trace would give."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.graph import _length_formula
from fzero.graph._schedule_options import ScheduleOptions
from tests.graph.run.helpers import STEPS, tokens, tokens_loss, tokens_params
from tests.helpers import LEAST, cases, examples, mlp_batch, mlp_loss, mlp_params, needs_symbols, train_step_for

lengths_of_calls = st.lists(st.integers(5, 60), min_size=6, max_size=8, unique=True)


def inputs(length: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, length, 8), (8, 8))]


def make_one(names: Sequence[str]) -> Callable[..., Any]:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = STEPS[name](x, w)
        return x

    return f


ODD: dict[str, Callable[..., Any]] = {
    "branch": lambda x, w: x * 2 if x.shape[1] < 30 else x @ w,
    "half": lambda x, w: torch.cat([x[:, : x.shape[1] // 2] * 2, x[:, x.shape[1] // 2 :]], 1),
    "number": lambda x, w: x + torch.tensor(float(x.shape[1])),
    "fraction": lambda x, w: x * x.shape[1] ** -0.5,
    "python": lambda x, w: torch.stack([x[:, i] * i for i in range(len(x[0]))], 1),
    "chunks": lambda x, w: torch.cat([y * i for i, y in enumerate(x.chunk(4, 1))], 1),
    "window": lambda x, w: torch.cat([x[:, :25] * 3, x[:, 25:]], 1),
    "cubes": lambda x, w: x + x.new_ones(x.shape[1] ** 3).sum(),
    "table": lambda x, w: x * torch.tensor([1.0, 2.0, 3.0])[x.shape[1] % 3],
}


@needs_symbols
@examples(3, 150)
@given(names=st.lists(st.sampled_from([*STEPS, *ODD]), min_size=1, max_size=4), lengths=lengths_of_calls)
def test_a_function_jitted_for_any_length_equals_the_function(names, lengths):
    """Whatever Python does with the length: if in doubt, it is traced."""
    f = make_one(names) if not {*names} & {*ODD} else lambda x, w: _apply(names, x, w)
    run = fzero.jit(f, backend="fx")
    for length in lengths:
        torch.testing.assert_close(run(*inputs(length)), f(*inputs(length)), rtol=1e-10, atol=1e-10)
    if not {*names} & {*ODD}:
        assert run.traces == 3


def _apply(names: Sequence[str], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for name in names:
        x = (STEPS | ODD)[name](x, w)
    return x


@needs_symbols
@pytest.mark.parametrize(
    ("name", "traces"),
    cases([("branch", 4), ("half", 7), ("fraction", 7), ("window", 4), ("cubes", 7)], [("python", 7)]),
)
def test_a_length_at_which_python_branches_differently_is_traced(name, traces):
    """Three traces, and one more for the length with another outcome; seven if no formula is found."""
    lengths = (33, 40, 50, 36, 64, 17, 44)
    run = fzero.jit(ODD[name], backend="fx")
    for length in lengths:
        torch.testing.assert_close(run(*inputs(length)), ODD[name](*inputs(length)))
    assert run.traces == traces


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[:, :15].sum(1),
        lambda x: x * (2 if x.shape[1] > 15 else 3),
        lambda x: x * (2 if x.shape[1] % 8 == 0 else 3),
        lambda x: (x, x * (x.shape[1] // 8)),
    ],
)
@pytest.mark.parametrize(
    "lengths", [(5, 6, 7, 20, 30, 8), (20, 6, 7, 5, 30, 9, 10), (16, 5, 6, 7, 24, 8), (1, 5, 6, 0, 7, 20)]
)
def test_results_at_untraced_lengths_do_not_depend_on_which_were_traced(f, lengths):
    """Whatever the length is of the call that finds the formula, and whatever those are that were traced."""
    run = fzero.jit(f, backend="fx")
    for length in lengths:
        x = torch.arange(2.0 * length).view(2, length)
        fzero.testing.assert_trees_close(run(x), f(x), 0)


def test_a_traced_length_on_another_branch_is_no_sample():
    run = fzero.jit(lambda x: x.narrow(1, 1, 15 if x.shape[1] > 16 else x.shape[1] - 1) * 2, backend="fx")
    for length in (20, 6, 7, 5, 30, 9, 10):  # three shorter than the slice tell what others below it are
        assert run(torch.ones(2, length)).shape == (2, min(length - 1, 15))
    assert run.traces == 5


def test_a_step_whose_result_names_contain_the_length_is_traced_anew():
    run = fzero.jit(lambda x: {f"loss@{x.shape[0]}": x.sum()}, backend="fx")
    for length in (10, 12, 14, 16, 18):
        assert list(run(torch.ones(length))) == [f"loss@{length}"]


def test_a_cache_that_a_step_grows_with_the_length_holds_ints():
    """A table that grows, as rotary embeddings have it."""
    table = {"size": 0, "cos": torch.ones(0)}

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > table["size"]:
            table.update(size=x.shape[0], cos=torch.arange(float(x.shape[0])).cos())
        return x * 2

    run = fzero.jit(f, backend="fx")
    for length in (20, 21, 24, 30, 40, 22):
        assert torch.equal(run(torch.ones(length)), torch.full((length,), 2.0))
        assert type(table["size"]) is int


def test_a_notice_names_a_length_at_which_the_step_branches(caplog):
    caplog.set_level(logging.INFO, "fzero.jit")
    run = fzero.jit(ODD["window"], backend="fx")
    for length in (30, 33, 36, 39, 20):
        run(*inputs(length))
    text = " ".join(caplog.messages)
    assert "further lengths need no trace" in text and "otherwise for length 20 than for others" in text


@pytest.mark.slow
def test_a_step_says_why_each_length_is_traced(caplog):
    caplog.set_level(logging.INFO, "fzero.jit")
    for name, why in (("half", "no polynomial of the length"), ("python", "differ by more than sizes")):
        run = fzero.jit(ODD[name], backend="fx")
        for length in range(10, 30, 2):
            run(*inputs(length))
        (line,) = [m for m in caplog.messages if "by itself" in m]
        assert re.search(f"each length is traced by itself: .*{why}", line)
        caplog.clear()


def test_a_plain_argument_that_follows_the_length_is_traced():
    run = fzero.jit(lambda x, n: x * n, backend="fx")
    for length in (10, 12, 14, 16, 18, 20):
        x = torch.arange(float(length))
        assert torch.equal(run(x, length), x * length)
    assert run.traces == 6


def test_an_argument_with_other_strides_is_traced_anew():
    run = fzero.jit(lambda x: x.view(-1) if x.is_contiguous() else x.T.reshape(-1), backend="fx")
    for length in (10, 12, 14, 16):
        run(torch.arange(3.0 * length).view(3, length))
    assert run.traces == 3
    x = torch.arange(54.0).view(18, 3).T
    assert torch.equal(run(x), x.T.reshape(-1)) and run.traces == 4


def test_two_sizes_that_change_independently_are_traced():
    run = fzero.jit(lambda x: x + 1, backend="fx")
    for a, b in ((4, 10), (4, 12), (4, 14), (4, 16), (5, 18), (6, 20)):
        assert torch.equal(run(torch.ones(a, b)), torch.full((a, b), 2.0))
    assert run.traces == 5


def test_dynamic_false_and_a_budget_trace_each_length():
    for options in ({"dynamic": False}, {"memory_budget": 1e9}):
        run = fzero.jit(lambda x: x + 1, backend="fx", **options)  # pyright: ignore[reportArgumentType]
        for length in (10, 12, 14, 16, 18):
            run(torch.ones(length))
        assert run.traces == 5


def steps(n: int, stage: int, k: int, backend: str, **options: Any) -> tuple[Any, Any]:
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    step = fzero.shard(train_step_for(tokens_loss, opt, micro_batches=k), stage, fzero.mesh(dp=n))  # pyright: ignore
    return fzero.jit(step, backend=backend, **options), step.init(tokens_params(), opt)  # pyright: ignore


def batch(n: int, k: int, length: int) -> Any:
    return {"x": torch.randint(11, (n * k, length), generator=torch.Generator().manual_seed(length))}


@needs_symbols
@examples(0, 60)
@given(
    n=st.integers(1, 3),
    stage=st.sampled_from([0, 1, 2, 3]),
    k=st.sampled_from([1, 2, 4]),
    lengths=lengths_of_calls,
)
@example(n=2, stage=3, k=2, lengths=[9, 17, 12, 30])
def test_training_at_untraced_lengths_is_bit_for_bit_that_of_traces(n, stage, k, lengths):
    run, state = steps(n, stage, k, "fx")
    each, other = steps(n, stage, k, "fx", dynamic=False, **LEAST)
    for length in lengths:
        data = run.mesh.split(batch(n, k, length))
        *state, loss = run(*state, data)
        *other, expected = each(*other, data)
        assert torch.equal(loss, expected)
    fzero.testing.assert_trees_close(run.gather(state[0]), each.gather(other[0]), 0)
    assert run.traces < len(lengths) == each.traces


@pytest.mark.slow
@examples(0, 30)
@given(
    n=st.integers(1, 2),
    stage=st.sampled_from([0, 3]),
    k=st.sampled_from([1, 3]),
    rows=st.lists(st.integers(2, 9), min_size=6, max_size=6, unique=True),
)
@example(n=2, stage=3, k=1, rows=[2, 3, 4, 6, 5])
@example(n=1, stage=0, k=3, rows=[2, 3, 4, 6])
def test_the_length_may_be_the_examples_of_a_batch(n, stage, k, rows):
    """An iteration of a loop over micro-batches then has another part, a fraction of the length: it is traced."""
    opt = optim.adamw(1e-2)
    step = fzero.shard(train_step_for(mlp_loss, opt, micro_batches=k), stage, fzero.mesh(dp=n))  # pyright: ignore
    run, each = fzero.jit(step, backend="fx", **LEAST), fzero.jit(step, backend="fx", **LEAST, dynamic=False)
    state, other = step.init(mlp_params(), opt), step.init(mlp_params(), opt)
    for i, r in enumerate(rows):
        data = step.mesh.split(mlp_batch(n * k * r, seed=i))
        *state, loss = run(*state, data)
        *other, expected = each(*other, data)
        assert torch.equal(loss, expected)
    fzero.testing.assert_trees_close(run.gather(state[0]), each.gather(other[0]), 0)
    assert run.traces < len(rows) or k == 3


@pytest.mark.slow
@examples(0, 40)
@given(n=st.integers(1, 3), stage=st.sampled_from([0, 2, 3]), k=st.sampled_from([1, 3]), lengths=lengths_of_calls)
@example(n=2, stage=3, k=3, lengths=[9, 17, 12, 30])
def test_the_schedule_is_the_traced_one_to_the_last_number(n, stage, k, lengths):
    run, state = steps(n, stage, k, "fx")
    for length in lengths:
        run.plan(*state, run.mesh.split(batch(n, k, length)))
    for key, entry in run._entries.items():
        if entry.is_traced:
            continue
        again = run.with_options(schedule_options=ScheduleOptions.of(entry.best.settings))
        length = next(shape[-1] for shape, dtype, *_ in key.tensors if dtype == torch.int64 and len(shape) > 1)
        plan = again.plan(*state, run.mesh.split(batch(n, k, length)))
        (traced,) = again._entries.values()
        graphs = entry.best.graph, traced.best.graph
        structures = [_length_formula.graph_structure(graph) for graph in graphs]
        if structures[0] == structures[1]:  # small values are kept, not large ones
            assert _length_formula._graph_numbers(graphs[0]) == _length_formula._graph_numbers(graphs[1])
            assert plan.peak_bytes == entry.plan.peak_bytes == entry.best.peak_bytes
            assert plan.collectives == entry.plan.collectives and plan.seconds == pytest.approx(entry.plan.seconds)


def test_a_tensor_that_is_captured_anew_at_each_length_is_not_kept():
    tables = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * tables.setdefault(x.dtype, []).__len__() if not tables else x * torch.tensor([float(len(tables))])

    run = fzero.jit(step, backend="fx", **LEAST)
    for length in (10, 12, 14, 16, 18):
        run(torch.ones(length))
        tables[length] = 1
    assert run.traces == 5


@needs_symbols
def test_state_is_donated_at_an_untraced_length():
    run, state = steps(2, 3, 1, "fx")
    for length in (10, 12, 14, 16):
        *after, _ = run(*state, run.mesh.split(batch(2, 1, length)))
        with pytest.raises(fzero.errors.DonatedError):
            run(*state, run.mesh.split(batch(2, 1, length)))
        state = after
    assert run.traces == 3


@pytest.mark.slow
@needs_symbols
def test_an_untraced_length_can_be_planned_and_run_by_another_step(tmp_path):
    run, state = steps(2, 3, 1, "fx", dump=tmp_path)
    plans = [run.plan(*state, run.mesh.split(tokens(length))) for length in (10, 12, 14, 16, 18)]
    assert run.traces == 3 and len(run.plans()) == 5
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks) and len({*peaks}) == 5
    assert "traced 3 times" in repr(run)
