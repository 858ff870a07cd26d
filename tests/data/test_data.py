"""Batches by number: the same on any mesh, each example once an epoch, from any step on; and evaluation over them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import data, optim
from tests.helpers import examples


class Squares(torch.utils.data.Dataset):
    """Examples that say which they are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        assert 0 <= i < self.length
        return {"x": torch.tensor([float(i), float(i) ** 2]), "i": i}


@st.composite
def cases(draw: Any) -> tuple[int, int, int, int]:
    """Ranks, a global batch, the length of a data set, a seed."""
    n = draw(st.integers(1, 8))
    batch = n * draw(st.integers(1, 3))
    return n, batch, draw(st.integers(batch, 5 * batch)), draw(st.integers(0, 2**40))


def rows(batch: Any) -> list[int]:
    return batch.value["i"].flatten().tolist()


@given(cases(), st.booleans(), st.integers(0, 12))
def test_a_batch_is_a_function_of_its_number(case, shuffle, i):
    n, batch, length, seed = case
    one = data.batches(Squares(length), fzero.mesh(dp=1), global_batch=batch, seed=seed, shuffle=shuffle)
    many = data.batches(Squares(length), fzero.mesh(dp=n), global_batch=batch, seed=seed, shuffle=shuffle)
    assert rows(one[i]) == rows(many[i]) == one.indices(i) == many.indices(i)
    assert many[i].value["x"].shape == (n, batch // n, 2)
    assert many[i].value["x"][..., 0].flatten().tolist() == many.indices(i)
    started = [(j, rows(x)) for j, x in many.steps(i, i + 3)]
    assert started == [(j, many.indices(j)) for j in range(i, i + 3)]


@given(cases(), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_each_example_at_most_once(case, shuffle, epoch):
    _, batch, length, seed = case
    result = data.batches(Squares(length), fzero.mesh(dp=1), global_batch=batch, seed=seed, shuffle=shuffle)
    assert result.per_epoch == length // batch
    indices = [j for i in range(epoch * result.per_epoch, (epoch + 1) * result.per_epoch) for j in result.indices(i)]
    assert len(set(indices)) == len(indices) == result.per_epoch * batch
    if not shuffle:
        assert indices == list(range(len(indices)))


def test_orders_differ_by_epoch_and_seed():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        result = data.batches(range(50), fzero.mesh(dp=1), global_batch=50, seed=seed)
        return tuple(result.indices(epoch))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    assert order(1, 1) == order(1, 1)


def test_the_dropped_examples_of_epochs_differ():
    result = data.batches(range(5), fzero.mesh(dp=2), global_batch=4)
    assert len({(set(range(5)) - set(result.indices(i))).pop() for i in range(20)}) > 1


def test_ranks_along_other_axes_load_the_same_examples():
    mesh = fzero.mesh(dp=2, tp=3)
    batch = data.batches(Squares(8), mesh, global_batch=4, axis="dp", shuffle=False)[1]
    assert batch.axes == ("dp",) and batch.value["i"].tolist() == [[4, 5], [6, 7]]


def test_workers_load_the_same_and_nobody_draws_from_the_users_generator():
    result = data.batches(Squares(9), fzero.mesh(dp=2), global_batch=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    alone = [rows(x) for _, x in result.steps(0, 4)]
    ahead = data.batches(Squares(9), fzero.mesh(dp=2), global_batch=4, num_workers=2)
    assert [rows(x) for _, x in ahead.steps(0, 4)] == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_a_collate_function_makes_batches_of_examples():
    words = ["a", "bcd", "ef", "g"]

    def collate(examples: list[str]) -> torch.Tensor:
        return torch.tensor([len(x) for x in examples])

    result = data.batches(words, fzero.mesh(dp=2), global_batch=4, shuffle=False, collate=collate)
    assert result[0].value.tolist() == [[1, 3], [2, 1]]
    assert repr(result) == "Batches(4 examples, 4 a batch, 1 batches an epoch, in order)"


@given(cases())
def test_an_evaluation_pass_has_each_example_once(case):
    n, batch, length, _ = case
    results = list(data.epoch(Squares(length - batch + 1), fzero.mesh(dp=n), global_batch=batch))
    assert {len(rows(x)) for x, _ in results} == {batch}
    assert [i for x, real in results for i in rows(x)[: int(real)]] == list(range(length - batch + 1))


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda m: data.batches(iter([1]), m, global_batch=2), TypeError, "no length or no examples by index"),
    (lambda m: data.batches([1, 2], m, global_batch=4), ValueError, "exceeds the data set's 2 examples"),
    (lambda m: data.batches([1, 2, 3], m, global_batch=3), ValueError, r"not a multiple of the 2 ranks .*: use 2$"),
    (lambda m: data.batches([1, 2], m, global_batch=0), ValueError, "expected a number of examples"),
    (lambda m: data.batches([1, 2], m, global_batch=True), ValueError, "expected a number of examples"),
    (
        lambda m: data.batches([1, 2], m, global_batch=2, sampler=1),
        TypeError,
        "sampler= is no option of fzero.data: use seed= and shuffle=",
    ),
    (lambda m: data.batches([1, 2], 2, global_batch=2), TypeError, "expected a mesh, such as fzero.mesh returns"),
    (lambda m: data.batches([1, 2], m, global_batch=2).steps(-1), ValueError, "expected numbers of steps"),
    (lambda m: data.batches([1, 2], m, global_batch=2)[-1], IndexError, "batch numbers are 0 or more"),
    (lambda m: next(data.batches(["a", "b"], m, global_batch=2).steps()), TypeError, "leaf '0' is '[ab]'"),
    (lambda m: data.mean([]), ValueError, "there are no batches"),
    (lambda m: data.mean([(torch.ones(()), torch.zeros(()))]), ValueError, "add up to 0"),
]


@pytest.mark.parametrize("call,error,text", WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments_of_data_functions_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(fzero.mesh(dp=2))


W = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


def errors(params: Any, batch: Any) -> Any:
    return {"error": (batch["x"] @ params["w"]).abs().sum(1), "big": batch["x"][:, 0] > 3}


def step_on(stage: int, n: int, **options: Any) -> Any:
    step: Any = fzero.shard(lambda p, s, x: (p, s), stage, fzero.mesh(dp=n, **options))
    return step, step.init({"w": W.clone()}, optim.sgd(0.1))[0]


@pytest.mark.slow
@examples(20, 100)
@given(cases(), st.integers(0, 3), st.booleans())
def test_a_mean_over_ranks_is_the_mean_over_examples(case, stage, weighted):
    n, batch, length, _ = case
    step, params = step_on(stage, n)

    def f(params: Any, batch: Any) -> Any:
        values = errors(params, batch)
        return (values, batch["i"] % 3 + 1) if weighted else values

    program = fzero.evaluate(step, f, weighted=weighted)
    result = data.mean(program(*x) for x in on(params, length, step, batch))
    whole = torch.utils.data.default_collate([Squares(length)[i] for i in range(length)])
    weights = (whole["i"] % 3 + 1).double() if weighted else torch.ones(length).double()
    for name, values in errors({"w": W}, whole).items():
        wanted = values.double().sum() / weights.sum()
        assert result[name] == pytest.approx(wanted.item(), rel=1e-5)


def on(params: Any, length: int, step: Any, batch: int) -> list[tuple[Any, ...]]:
    return [(params, *pair) for pair in data.epoch(Squares(length), step.mesh, global_batch=batch)]


@pytest.mark.parametrize("stage", [*[pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)], 2, 3])
@pytest.mark.parametrize("options", [{}, {"simulate": "lockstep"}], ids=["vmap", "lockstep"])
def test_predictions_come_in_the_order_of_the_examples(stage, options):
    step, params = step_on(stage, 3, **options)
    program = fzero.predict(step, lambda params, batch: {"y": batch["x"] @ params["w"], "i": batch["i"]})
    results = [program(p, x) for p, x, _ in on(params, 8, step, 6)]
    i, y = [torch.cat([x[name] for x in results])[:8] for name in "iy"]
    assert i.tolist() == list(range(8))
    torch.testing.assert_close(y, torch.stack([Squares(8)[j]["x"] for j in range(8)]) @ W)


def test_an_evaluation_may_gather_parameters_block_by_block():
    step, params = step_on(3, 2)

    def f(params: Any, batch: Any) -> Any:
        assert fzero.sharding._boxes.is_box(params["w"])
        return errors(fzero.gather(params), batch)["error"]

    assert data.mean(fzero.evaluate(step, f, gather=False)(*x) for x in on(params, 5, step, 2)) > 0


def test_evaluation_can_be_jitted():
    step, params = step_on(3, 2)
    program = fzero.evaluate(step, errors)
    jitted = fzero.jit(program, backend="fx")
    batches = on(params, 5, step, 4)
    assert data.mean(jitted(*x) for x in batches) == data.mean(program(*x) for x in batches)


def test_half_precision_is_summed_in_float32():
    step, params = step_on(1, 2)
    program = fzero.evaluate(step, lambda params, batch: torch.ones(len(batch["i"]), dtype=torch.bfloat16))
    sums, weight = program(*on(params, 1000, step, 1000)[0])
    assert sums.dtype == weight.dtype == torch.float32 and sums == weight == 1000


NO_EXAMPLES: list[tuple[Any, Any, str]] = [
    (fzero.evaluate, lambda p, x: x["x"], r"evaluate: <lambda> returns value as .*one value per example"),
    (fzero.evaluate, lambda p, x: {"loss": x["i"].float().mean()}, r"returns value\['?loss'?\]? as|returns .*loss"),
    (fzero.evaluate, lambda p, x: {}, "returns no tensor: return a tree"),
    (fzero.predict, lambda p, x: (x["x"], x["x"][:1]), "returns"),
    (fzero.predict, lambda p, x: 1.0, "returns"),
]


@pytest.mark.parametrize("make,f,text", NO_EXAMPLES)
def test_an_evaluation_whose_results_are_not_per_example_is_refused(make, f, text):
    step, params = step_on(3, 2)
    params, batch, real = on(params, 4, step, 4)[0]
    with pytest.raises(ValueError, match=text):
        make(step, f)(*((params, batch, real) if make is fzero.evaluate else (params, batch)))
