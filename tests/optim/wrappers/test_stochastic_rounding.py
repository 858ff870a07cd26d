"""Stochastic rounding: unbiased, from the draws of an element on any layout, and without master weights."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, random, tree
from fzero.optim.wrappers._stochastic_rounding import _round_tree
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, either, examples
from tests.optim.helpers import normal
from tests.zero.helpers import RULES

BFLOAT16 = fzero.Precision(param=torch.bfloat16, full=lambda path, leaf: "norm" in path)


def like(x: Any) -> Any:
    return tree.map(lambda t: t.to(torch.bfloat16), x)


def test_stochastic_rounding_gives_a_neighbour_whose_mean_is_the_value():
    x, n = normal((64,), 0, torch.float32), either(1500, 4000)
    draws = torch.stack([_round_tree(x, like(x), random.key(seed)).float() for seed in range(n)])
    lower, upper = draws.amin(0), draws.amax(0)
    last_bit = torch.nextafter(lower.to(torch.bfloat16), torch.tensor(9.0, dtype=torch.bfloat16)).float() - lower
    assert torch.equal(upper - lower, last_bit), "two neighbours, and both occur"
    assert (lower <= x).all() and (x <= upper).all()
    error = (draws.double().mean(0) - x) / last_bit
    assert error.abs().max() < 5 * 0.5 / n**0.5, "five standard deviations"
    assert abs(error.mean()) < 5 * 0.5 / (64 * n) ** 0.5


def test_stochastic_rounding_keeps_values_that_bfloat16_holds():
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), float("nan")])
    largest = torch.finfo(torch.bfloat16).max
    expected = torch.tensor([0.0, -0.0, 1.0, -3.5, largest, -largest, float("nan")])
    for seed in range(9):
        assert_trees_close(_round_tree(x, like(x), random.key(seed)).float(), expected, 0.0)


def test_small_updates_add_up_under_stochastic_rounding():
    """A thousand updates of an eighth of the last bit: rounding to the nearest would lose each."""
    opt, params = optim.stochastic_rounding(optim.sgd(2.0**-11), BFLOAT16, random.key(0)), {"w": torch.ones(2000)}
    state, params = opt.init(params), BFLOAT16.cast(params)
    for _ in range(200):
        updates, state = opt.update({"w": torch.ones(2000)}, state, params)
        params = optim.apply_updates(params, updates)
    assert params["w"].dtype == torch.bfloat16
    assert params["w"].double().mean() == pytest.approx(1 - 200 * 2.0**-11, abs=1.7e-3), "four deviations"


def step_of(opt: Any) -> Any:
    """A train step whose gradients are functions of the elements: without a sum over ranks, numbers are exact."""

    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        grads = tree.map(lambda p: 0.1 * p.float() + 0.01, params)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def start(params: Any, opt: Any) -> Any:
    state = opt.init(params)
    return opt.precision.cast(params), state


SHAPES = [(), (0,), (1,), (7,), (30, 20), (3, 256), (2, 5, 30)]


@examples(3, 200)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    rule=st.sampled_from([None, *sorted(RULES)]),
    n=st.integers(1, 8),
    stage=st.integers(0, 3),
    moments=st.sampled_from([None, "int8"]),
)
@example([(30, 20), (), (0,), (7,)], "one unit", 7, 3, "int8")
@example([(1,), (7,), (2, 5, 30)], None, 4, 2, None)
def test_stochastic_rounding_does_not_depend_on_the_layout(shapes, rule, n, stage, moments):
    leaves = [normal(shape, i, torch.float32) for i, shape in enumerate(shapes)]
    rest = {str(i): x for i, x in enumerate(leaves)}  # of which two are tied to the first
    params = {"first": leaves[:2], "norm": normal((9,), 9, torch.float32), "rest": rest}
    opt = optim.stochastic_rounding(optim.adamw(1e-2, moments=moments), BFLOAT16, random.key(3))
    step = fzero.shard(step_of(opt), stage, fzero.mesh(dp=n), units=rule and RULES[rule])
    expected, state = start(params, opt), step.init(params, opt)
    for _ in range(3):
        expected = step_of(opt)(*expected, torch.ones(840))
        state = step(*state, step.mesh.split(torch.ones(840)))
    assert_trees_close(step.gather(state), expected, 0.0)


@pytest.mark.parametrize("dims", [{"w": 0, "e": 1}, {"w": 1, "e": 2}, {"w": 0}], ids=str)
def test_parts_of_split_leaves_have_the_draws_of_the_whole(dims):
    params = {"w": normal((8, 6), 0, torch.float32), "e": normal((3, 4, 2), 1, torch.float32), "b": torch.ones(5)}
    opt = optim.stochastic_rounding(optim.sgd(0.1), BFLOAT16, random.key(3))

    def split(path: str, leaf: torch.Tensor) -> Any:
        return {"tp": dims[path]} if path in dims else None

    step = fzero.shard(step_of(opt), 3, fzero.mesh(dp=3, tp=2), axis="dp", split=split, units=RULES["one unit"])
    state = step(*step.init(params, opt), step.mesh.split(torch.ones(6)))
    assert_trees_close(step.gather(state), step_of(opt)(*start(params, opt), torch.ones(6)), 0.0)


def test_a_jitted_step_with_stochastic_rounding_equals_the_eager_one():
    params = {"w": normal((30, 20), 0, torch.float32), "norm": torch.ones(30)}
    opt = optim.stochastic_rounding(optim.adamw(1e-2), BFLOAT16, random.key(3))
    step = fzero.shard(step_of(opt), 3, fzero.mesh(dp=3))
    jitted = fzero.jit(step, backend="fx", **LEAST)
    eager, fast = step.init(params, opt), jitted.init(params, opt)
    for _ in range(2):
        eager, fast = step(*eager, step.mesh.split(torch.ones(3))), jitted(*fast, step.mesh.split(torch.ones(3)))
    assert jitted.traces == 1
    assert_trees_close(fast, eager, 0.0)


def test_stochastic_rounding_draws_anew_for_each_step_and_leaf():
    x = {"a": torch.full((999,), 1.001), "b": torch.full((999,), 1.001)}
    opt = optim.stochastic_rounding(optim.sgd(0.0), BFLOAT16, random.key(0))
    first = _round_tree(x, like(x), random.key(0))
    assert not torch.equal(first["a"], first["b"])
    _, state = opt.update(x, opt.init(x), like(x))
    assert not torch.equal(_round_tree(x, like(x), state.key)["a"], first["a"])
    tied = {"a": x["a"], "b": x["a"]}
    rounded = _round_tree(tied, {"a": like(x)["a"], "b": like(x)["a"]}, random.key(0))
    assert rounded["a"] is rounded["b"]


@pytest.mark.parametrize(
    "precision,message",
    [
        (fzero.Precision(param=torch.float16), "param=torch.float16, master=torch.float32: expected torch.bfloat16"),
        (torch.bfloat16, "precision=torch.bfloat16: expected a policy"),
    ],
)
def test_stochastic_rounding_refuses_other_precision_policies(precision, message):
    with pytest.raises((TypeError, ValueError), match=message):
        optim.stochastic_rounding(optim.sgd(0.1), precision, random.key(0))
