"""Moments in bfloat16: rounded without bias, numbers that depend on no layout, full leaves, bytes, jit, checkpoints."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, random, tree
from fzero._torch import set_fused
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases, examples, train_step_for
from tests.optim.helpers import normal
from tests.zero.helpers import RULES

EVERY = optim.Moments("bfloat16", full=lambda path, leaf: False)  # also the moments of small leaves


# The numbers of an update.


def test_a_second_moment_decays_although_each_step_is_less_than_a_last_bit():
    """With zero gradients v falls by a thousandth a step; rounding to the nearest would never lower it."""
    w = torch.full((4000,), 1.3)
    opt = optim.scale_by_adam(b2=0.999, moments=EVERY)
    _, state = opt.update(w, opt.init(w), w)
    first = state.nu.values.double().mean()
    for _ in range(300):
        _, state = opt.update(torch.zeros_like(w), state, w)
    assert state.nu.values.dtype == torch.bfloat16
    assert state.nu.values.double().mean() / first == pytest.approx(0.999**300, rel=3e-3)


def test_a_sixteen_bit_update_is_adams_on_the_rounded_moments():
    w, g = normal((30, 40), 0, torch.float32), normal((30, 40), 1, torch.float32)
    exact, opt = optim.adamw(1e-2), optim.adamw(1e-2, moments=EVERY)
    _, state = opt.update(g, opt.init(w), w)
    wide = exact.init(w)._replace(count=state.count, mu=state.mu.values.float(), nu=state.nu.values.float())
    updates, new = opt.update(-2 * g, state, w)
    expected, full = exact.update(-2 * g, wide, w)
    assert torch.equal(updates, expected)
    for moment, x in [(new.mu, full.mu), (new.nu, full.nu)]:
        last_bit = 2.0 ** (x.abs().log2().floor() - 7)
        assert ((moment.values.float() - x).abs() < last_bit).all(), "one of the two neighbours"


def test_moments_leaves_and_steps_have_draws_of_their_own():
    value, half_way = 1 + 2.0**-8, 0.5 + 2.0**-9
    w = {"a": torch.full((999,), value), "b": torch.full((999,), value)}
    opt = optim.scale_by_adam(b1=0.5, b2=1 - half_way / value**2, moments=EVERY)
    _, state = opt.update(w, opt.init(w), w)
    up = [x > 0.502 for x in (state.mu.values["a"].float(), state.mu.values["b"].float(), state.nu.values["a"].float())]
    for i, j in [(0, 1), (0, 2)]:
        assert 0.3 < (up[i] == up[j]).float().mean() < 0.7
    _, again = opt.update(w, opt.init(w)._replace(mu=opt.init(w).mu._replace(key=random.key(7))), w)
    assert not torch.equal(again.mu.values["a"], state.mu.values["a"])
    assert state.mu.key != opt.init(w).mu.key


def test_full_leaves_have_the_numbers_of_float32():
    params = {"w": normal((64, 64), 0, torch.float32), "norm": normal((5000,), 1, torch.float32), "s": torch.ones(())}
    params["small"] = normal((9, 9), 2, torch.float32)
    exact, opt = optim.adamw(1e-2), optim.adamw(1e-2, moments="bfloat16")
    expected, actual, states = params, params, (exact.init(params), opt.init(params))
    for seed in range(4):
        grads = tree.map(lambda p, seed=seed: normal(p.shape, 10 + seed, torch.float32), params)
        u, full = exact.update(grads, states[0], expected)
        v, packed = opt.update(grads, states[1], actual)
        expected, actual, states = optim.apply_updates(expected, u), optim.apply_updates(actual, v), (full, packed)
    for name in ("norm", "s", "small"):
        assert torch.equal(actual[name], expected[name]), name
        assert torch.equal(states[1].mu.full[name], states[0].mu[name]), name
    assert states[1].mu.full["w"].shape == (64, 0)
    assert not torch.equal(actual["w"], expected["w"])
    assert_trees_close(actual["w"], expected["w"], 2e-2)


# The law: numbers depend on no layout.

SHAPES = [(), (0,), (1,), (7,), (700,), (3, 100), (2, 2, 300), (0, 5), (512, 2)]


def params_of_shapes(shapes: list[tuple[int, ...]], seed: int) -> dict[str, Any]:
    leaves = [normal(shape, seed + i, torch.float32) for i, shape in enumerate(shapes)]
    return {"first": leaves[:2], "blocks": [{"x": x} for x in leaves[2:]], "tied": leaves[:1]}


def some_are_full(path: str, leaf: torch.Tensor) -> bool:
    return leaf.numel() % 5 == 0


SOME = optim.Moments("bfloat16", full=some_are_full)


def step_of(opt: Any) -> Any:
    """A train step whose gradients are functions of the elements: without a sum over ranks, numbers are exact."""

    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        grads = tree.map(lambda p: (p * math.sin(3.0) + 0.1).to(p.dtype) ** 3, params)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def train(step: Any, state: Any, split: Any = lambda x: x) -> Any:
    for _ in range(3):
        state = step(*state, split(torch.ones(840)))
    return state


KINDS = {
    "adamw": lambda moments: optim.adamw(1e-2, moments=moments),
    "lion": lambda moments: optim.chain(optim.clip(1.0), optim.lion(1e-2, moments=moments)),
}


@examples(3, 300)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    rule=st.sampled_from([None, *sorted(RULES)]),
    full=st.sampled_from([EVERY, SOME]),
    kind=st.sampled_from(["adamw", "lion"]),
    n=st.integers(1, 8),
    stage=st.integers(0, 3),
    seed=st.integers(0, 99),
    fused=st.booleans(),
)
@example([(700,), (), (0,), (3, 100)], "one unit", EVERY, "adamw", 7, 3, 0, True)
@example([(1,), (7,)], "one unit", EVERY, "lion", 8, 2, 0, False)
@example([(2, 2, 300), (7,), (512, 2)], "one unit", SOME, "adamw", 5, 1, 1, True)
def test_sixteen_bit_training_does_not_depend_on_the_layout(shapes, rule, full, kind, n, stage, seed, fused):
    """Every bit is equal on any number of ranks, at any stage, in any units, of sizes that do not divide.

    It is also equal in the form that a compiler gets.
    """
    params, opt = params_of_shapes(shapes, seed), KINDS[kind](full)
    step = fzero.shard(step_of(opt), stage, fzero.mesh(dp=n), units=rule and RULES[rule])
    expected = train(step_of(opt), (params, opt.init(params)))
    with set_fused(fused):
        actual = step.gather(train(step, step.init(params, opt), split=step.mesh.split))
    for x, y in zip(tree.tensors(actual), tree.tensors(expected), strict=True):
        is_number = x.is_floating_point() and not x.ndim  # Adam computes it in float64, its factors' dtype
        assert_trees_close(x, y, 1e-6 if is_number else 0.0)


@pytest.mark.parametrize("dims", [{"w": 1}, {"w": 0, "e": 0}, {"w": 1, "e": 2}], ids=str)
def test_sixteen_bit_moments_of_split_leaves_equal_those_of_whole_leaves(dims):
    params = {"w": normal((8, 6), 0, torch.float32), "e": normal((4, 3, 2), 1, torch.float32)}
    opt = optim.adamw(1e-2, moments=optim.Moments("bfloat16", full=lambda path, leaf: path == "e"))

    def split(path: str, leaf: torch.Tensor) -> Any:
        return {"tp": dims[path]} if path in dims else None

    step = fzero.shard(step_of(opt), 3, fzero.mesh(dp=3, tp=2), axis="dp", split=split)
    state = train(step, step.init(params, opt), split=step.mesh.split)
    assert_trees_close(step.gather(state), train(step_of(opt), (params, opt.init(params))), 0.0)


# Bytes, jit, checkpoints.


def big_params() -> dict[str, Any]:
    return {"w": [normal((64, 80), i, torch.float32) for i in range(2)], "norm": normal((30,), 5, torch.float32)}


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    return sum([(p * p).sum() * x.mean() + p.sum() for p in tree.tensors(params)], torch.zeros(()))


def test_sixteen_bit_moments_take_four_bytes_an_element():
    params, opt = big_params(), optim.adamw(1e-2, moments="bfloat16")
    step = fzero.shard(train_step_for(loss_of, opt), 3, fzero.mesh(dp=4))
    _, state = step.init(params, opt)
    numbers = 3 * 8  # the count and two keys
    expected = (4 * 2 * 64 * 80 + 2 * (2 + 4) * 32) / 4  # the norm has full moments, and values that are not read
    assert fzero.zero.state_bytes(state, step.mesh) - numbers == expected


def test_units_without_full_leaves_communicate_nothing_in_the_update():
    params = big_params()
    for moments, messages in [(EVERY, 0), ("bfloat16", 2)]:
        opt = optim.adamw(1e-2, moments=moments)
        step = fzero.shard(step_of(opt), 3, fzero.mesh(dp=4), units=RULES["one unit"])
        state = step.init(params, opt)
        with fzero.collectives.record() as log:
            step(*state, step.mesh.split(torch.ones(4)))
        assert len(log.events) == messages


@pytest.mark.slow
def test_a_plan_holds_one_unit_in_float32():
    """Of 4 bytes an element that a rank saves between steps, its peak keeps 2.5: it updates unit by unit."""

    def mean_of_products(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params["blocks"]:
            x = torch.tanh(x @ block["w"])
        return x.square().mean()

    params = {"blocks": [{"w": normal((128, 128), i, torch.float32)} for i in range(24)]}
    peaks = []
    for opt in (optim.adamw(1e-2), optim.adamw(1e-2, moments="bfloat16")):
        opt = optim.chain(optim.clip_by_global_norm(1.0), opt)  # so that both hold all gradients before the update
        step = fzero.shard(train_step_for(mean_of_products, opt), 3, fzero.mesh(dp=2))
        jitted = fzero.jit(step, backend="fx", **LEAST)
        peaks.append(fzero.plan(jitted, *step.init(params, opt), step.mesh.split(torch.ones(8, 128))).peak_bytes)
    assert peaks[0] - peaks[1] > 2.5 * 24 * 128 * 128 / 2


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_jitted_sixteen_bit_step_equals_the_eager_one(backend):
    params, opt = big_params(), optim.adamw(1e-2, moments="bfloat16")
    step = fzero.shard(train_step_for(loss_of, opt), 3, fzero.mesh(dp=3))
    jitted = fzero.jit(step, backend=backend)
    eager, fast = step.init(params, opt), jitted.init(params, opt)
    for _ in range(2):
        batch = step.mesh.split(torch.ones(6))
        eager, fast = step(*eager[:2], batch), jitted(*fast[:2], batch)
    assert_trees_close(fast, eager, 0.0 if backend == "fx" else None)


@pytest.mark.parametrize("before,after", [((3, 4), (3, 3)), ((3, 4), (0, 1)), ((1, 2), (3, 5))])
def test_a_checkpoint_resumes_on_another_layout(tmp_path, before, after):
    params, opt = big_params(), optim.adamw(1e-2, moments="bfloat16")
    steps = [fzero.shard(step_of(opt), stage, fzero.mesh(dp=n)) for stage, n in (before, after)]
    state = steps[0](*steps[0].init(params, opt), steps[0].mesh.split(torch.ones(60)))
    fzero.checkpoint.save(tmp_path / "c", state, mesh=steps[0].mesh)
    loaded = fzero.checkpoint.load(tmp_path / "c", steps[1].init(params, opt), mesh=steps[1].mesh)
    assert_trees_close(steps[1].gather(loaded), steps[0].gather(state), 0.0)
    states = [step(*x, step.mesh.split(torch.ones(60))) for step, x in zip(steps, (state, loaded), strict=True)]
    gathered = [step.gather(x) for step, x in zip(steps, states, strict=True)]
    assert_trees_close(gathered[1], gathered[0], 0.0)


CONVERTIBLE = KINDS | {
    "muon": lambda moments: optim.muon(1e-2, fallback=optim.adam(1e-2, moments=moments), moments=moments),
}


@pytest.mark.parametrize("other,error", [(None, 2.0**-7), ("int8", 0.08)])
@pytest.mark.parametrize("name", CONVERTIBLE)
@pytest.mark.parametrize("stage", cases((3,), [0]))
def test_sixteen_bit_states_convert_to_other_kinds_of_moments(name, stage, other, error):
    params, make = big_params(), CONVERTIBLE[name]
    opts = [make(other), make("bfloat16")]
    steps = [fzero.shard(step_of(opt), stage, fzero.mesh(dp=3)) for opt in opts]
    likes = [step.init(params, opt)[1] for step, opt in zip(steps, opts, strict=True)]
    _, state = steps[0](*steps[0].init(params, opts[0]), steps[0].mesh.split(torch.ones(3)))
    convert = steps[0].mesh.spmd(optim.convert_moments)
    packed = convert(state, likes[1])
    assert tree.flatten(packed)[1] == tree.flatten(likes[1])[1]
    back = convert(packed, likes[0])
    assert_trees_close(convert(packed, likes[1]), packed, 0.0)
    plain = steps[0].init(params, make(None))[1]
    for x, y in zip(tree.tensors(convert(back, plain)), tree.tensors(convert(state, plain)), strict=True):
        assert not y.is_floating_point() or (x - y).abs().max() <= error * y.abs().max()
    kind = "in the parameters' dtypes" if other is None else "in 8 bits"
    with pytest.raises(TypeError, match=f"opt_state holds moments {kind}, and the optimizer stores them in bfloat16"):
        steps[1](steps[1].init(params, opts[1])[0], state, steps[1].mesh.split(torch.ones(3)))


def test_a_skipped_step_changes_no_part_of_a_sixteen_bit_moment():
    params = {"w": normal((64, 80), 0, torch.float32)}
    opt = optim.dynamic_loss_scale(optim.adamw(1e-2, moments="bfloat16"))
    _, state = opt.update(params, opt.init(params), params)
    _, skipped = opt.update({"w": torch.full((64, 80), math.inf)}, state, params)
    assert_trees_close(skipped.inner, state.inner, 0.0)


def test_full_leaves_are_read_within_bounds_where_a_segment_first_runs_on_zeros(monkeypatch):
    """Constants are zeros there, too. Out of bounds, threads of compiled code would end the process."""

    def zeros_on(values: Any, **options: Any) -> torch.Tensor:
        return torch.zeros_like(torch.tensor(values, **options))

    params, opt = big_params(), optim.adamw(1e-2, moments="bfloat16")
    step = fzero.shard(step_of(opt), 3, fzero.mesh(dp=2), units=RULES["one unit"])
    state, batch = step.init(params, opt), step.mesh.split(torch.ones(2))
    monkeypatch.setattr("fzero.sharding.elements._leaf_subset.tensor_on", zeros_on)
    step(*state, batch)
