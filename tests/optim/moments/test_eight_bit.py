"""Moments in 8 bits: the code of bitsandbytes, numbers that depend on no layout, full leaves, state and checkpoints."""

import json
import math
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero._torch import set_fused
from fzero.optim.moments import _eight_bit
from fzero.optim.moments._eight_bit import _dynamic_values
from fzero.sharding import block_shape
from fzero.testing import assert_trees_close
from tests.helpers import either, examples, train_step_for
from tests.optim.helpers import normal
from tests.zero.helpers import RULES

CODE = json.loads((pathlib.Path(__file__).parents[1] / "fixtures" / "dynamic_code.json").read_text())
EVERY = optim.Moments("int8", full=lambda path, leaf: False)  # also the moments of small leaves

signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def spread_numbers(blocks: int, signed: bool, seed: int = 0) -> torch.Tensor:
    """Blocks `[blocks, 256]` of numbers of eight orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, 256, generator=g) * 10 ** (-8 * torch.rand(blocks, 256, generator=g))
    return x if signed else x.abs()


def encode(x: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    return _eight_bit.encode(x, scales, _eight_bit.dynamic_code(signed, x.device))


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    return _eight_bit.decode(codes, scales, _eight_bit.dynamic_code(signed, codes.device))


@signs
def test_the_256_values_of_eight_bit_codes_are_those_of_bitsandbytes(signed):
    expected = torch.tensor(CODE["signed" if signed else "unsigned"])
    assert expected.shape == (256,)
    torch.testing.assert_close(torch.tensor(_dynamic_values(signed)), expected, rtol=3e-7, atol=0)


@signs
def test_eight_bit_rounding_is_that_of_bitsandbytes(signed):
    """`bitsandbytes/backends/default/ops.py`, which its CUDA kernel agrees with: by the middles of the values."""
    x, values = spread_numbers(either(300, 2000), signed), torch.tensor(CODE["signed" if signed else "unsigned"])
    absmax = x.abs().amax(1, keepdim=True)
    scaled = (x * (1.0 / absmax)).clamp(-1, 1)
    middles = (values[:-1] + values[1:]) / 2
    expected = torch.bucketize(scaled, middles, out_int32=True)
    codes = encode(x, absmax, signed)
    # fzero divides, and does not multiply by the reciprocal, so a number at a middle may differ by its last bit
    at_middle = torch.isclose(scaled[..., None], middles, rtol=3e-7, atol=0).any(-1)
    assert at_middle.float().mean() < 1e-4
    assert torch.equal(codes[~at_middle].int(), expected[~at_middle])


@signs
def test_each_value_of_an_eight_bit_code_has_its_own_byte(signed):
    values = torch.tensor(_dynamic_values(signed))
    codes = encode(values, torch.ones(()), signed)
    assert torch.equal(codes.int(), torch.arange(256, dtype=torch.int32))
    assert torch.equal(decode(codes, torch.ones(()), signed), values)


@signs
def test_eight_bit_rounding_takes_the_nearest_value(signed):
    x, scale = spread_numbers(20, signed), torch.tensor(4.0)
    error = (decode(encode(x, scale, signed), scale, signed) - x).abs()
    values = torch.tensor(_dynamic_values(signed)) * scale
    nearest = (x[..., None] - values).abs().amin(-1)
    torch.testing.assert_close(error, nearest, rtol=2e-4, atol=0)  # near a middle the other value is as near


@signs
def test_table_look_ups_of_eight_bit_codes_equal_the_arithmetic_of_compiled_code(signed):
    """They do so next to midpoints, and for infinities, nan and denormal numbers."""
    middles = torch.tensor(_eight_bit._midpoints(signed)[:-1])
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (-9.0, 9.0)]
    every = torch.arange(0, 0x3F900000, either(3001, 37), dtype=torch.int32).view(torch.float32)  # from 0 to 1.1
    special = torch.tensor([math.inf, math.nan, 1e-40, -0.0])
    x = torch.cat([middles, *beside, every, -every if signed else every, special])
    bytes_of = torch.arange(256, dtype=torch.uint8)
    with set_fused(True):
        expected, values = encode(x, torch.ones(()), signed), decode(bytes_of, torch.ones(()), signed)
    assert torch.equal(encode(x, torch.ones(()), signed), expected)
    assert torch.equal(decode(bytes_of, torch.ones(()), signed), values)


def test_an_eight_bit_block_of_zeros_decodes_to_zeros():
    codes = encode(torch.zeros(3), torch.zeros(()), signed=True)
    assert torch.equal(decode(codes, torch.tensor(1.0), signed=True), torch.zeros(3))


# The numbers of an update.


def unpack(moment: optim.EightBit, like: torch.Tensor, signed: bool) -> torch.Tensor:
    """A moment in float32, by the definition, one block after the other."""
    codes, scales = moment.codes.reshape(-1), moment.scales.reshape(-1)
    values = torch.tensor(_dynamic_values(signed))
    parts = [values[c.long()] * s for c, s in zip(codes.split(256), scales, strict=True)]
    return torch.cat(parts).view(like.shape)


def test_an_eight_bit_update_is_adams_on_the_rounded_moments():
    w, g = normal((30, 40), 0, torch.float32), normal((30, 40), 1, torch.float32)
    exact, opt = optim.adamw(1e-2), optim.adamw(1e-2, moments=EVERY)
    _, state = opt.update(g, opt.init(w), w)
    rounded = (
        optim.adamw(1e-2)
        .init(w)
        ._replace(count=state.count, mu=unpack(state.mu, w, True), nu=unpack(state.nu, w, False))
    )
    assert rounded.mu.lt(0).any(), "signs are kept"
    updates, new = opt.update(-2 * g, state, w)
    expected, full = exact.update(-2 * g, rounded, w)
    assert torch.equal(updates, expected)
    for moment, signed, x in [(new.mu, True, full.mu), (new.nu, False, full.nu)]:
        blocks = x.view(-1).split(256)
        assert torch.equal(moment.scales, torch.stack([b.abs().max() for b in blocks]))
        codes = [encode(b, b.abs().max(), signed) for b in blocks]
        assert torch.equal(moment.codes.view(-1), torch.cat(codes))


def test_full_leaves_have_the_numbers_of_float32():
    params = {"w": normal((64, 64), 0, torch.float32), "norm": normal((5000,), 1, torch.float32), "s": torch.ones(())}
    params["small"] = normal((9, 9), 2, torch.float32)
    exact, opt = optim.adamw(1e-2), optim.adamw(1e-2, moments="int8")
    expected, actual, states = params, params, (exact.init(params), opt.init(params))
    for seed in range(4):
        grads = tree.map(lambda p, seed=seed: normal(p.shape, 10 + seed, torch.float32), params)
        u, full = exact.update(grads, states[0], expected)
        v, packed = opt.update(grads, states[1], actual)
        expected, actual, states = optim.apply_updates(expected, u), optim.apply_updates(actual, v), (full, packed)
    for name in ("norm", "s", "small"):
        assert torch.equal(actual[name], expected[name]), name
        assert torch.equal(states[1].mu.scales[name], states[0].mu[name]), name
    assert not torch.equal(actual["w"], expected["w"])
    assert_trees_close(actual["w"], expected["w"], 2e-2)


def test_a_rule_chooses_the_leaves_with_full_moments():
    params = {"a": torch.ones(3, 300), "b": torch.ones(3, 256), "c": torch.ones(2)}
    state = optim.adam(1e-2, moments=optim.Moments("int8", full=lambda path, leaf: path == "a")).init(params)
    assert tree.map(lambda x: tuple(x.shape), state.nu.scales) == {"a": (3, 300), "b": (3, 1), "c": (1,)}
    assert {x.dtype for x in tree.tensors(state.mu.codes)} == {torch.uint8}
    assert {x.dtype for x in tree.tensors(state.mu.scales)} == {torch.float32}


@pytest.mark.parametrize("moments,error", [("int4", ValueError), (8, TypeError)])
def test_an_unknown_kind_of_moments_is_refused(moments, error):
    with pytest.raises(error, match=f"moments={moments!r}: expected"):
        optim.adamw(1e-3, moments=moments)


# The law: numbers depend on no layout.

SHAPES = [(), (0,), (1,), (7,), (256,), (700,), (3, 100), (3, 256), (2, 2, 300), (0, 5), (512, 2)]


def params_of_shapes(shapes: list[tuple[int, ...]], seed: int) -> dict[str, Any]:
    leaves = [normal(shape, seed + i, torch.float32) for i, shape in enumerate(shapes)]
    return {"first": leaves[:2], "blocks": [{"x": x} for x in leaves[2:]]}


def some_are_full(path: str, leaf: torch.Tensor) -> bool:
    return leaf.numel() % 5 == 0


def step_of(opt: Any) -> Any:
    """A train step whose gradients are functions of the elements: without a sum over ranks, numbers are exact."""

    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        grads = tree.map(lambda p: (p * math.sin(3.0) + 0.1 * state.count).to(p.dtype) ** 3, params)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def train(step: Any, state: Any, split: Any = lambda x: x) -> Any:
    for _ in range(3):
        state = step(*state, split(torch.ones(840)))
    return state


@examples(3, 300)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    rule=st.sampled_from([None, *sorted(RULES)]),
    full=st.sampled_from([EVERY, optim.Moments("int8", full=some_are_full)]),
    n=st.integers(1, 8),
    stage=st.integers(0, 3),
    seed=st.integers(0, 99),
    fused=st.booleans(),
)
@example([(700,), (), (0,), (3, 100)], "one unit", EVERY, 7, 3, 0, True)
@example([(1,), (7,)], "one unit", EVERY, 8, 2, 0, False)
@example([(2, 2, 300), (7,), (3, 256)], "one unit", optim.Moments("int8", full=some_are_full), 5, 1, 1, True)
def test_eight_bit_training_does_not_depend_on_the_layout(shapes, rule, full, n, stage, seed, fused):
    """Every bit is equal on any number of ranks, at any stage, in any units, of sizes that do not divide.

    It is also equal in the form that a compiler gets.
    """
    params, opt = params_of_shapes(shapes, seed), optim.adamw(1e-2, moments=full)
    step = fzero.shard(step_of(opt), stage, fzero.mesh(dp=n), units=rule and RULES[rule])
    expected = train(step_of(opt), (params, opt.init(params)))
    with set_fused(fused):
        actual = step.gather(train(step, step.init(params, opt), split=step.mesh.split))
    assert_trees_close(actual, expected, 0.0)


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    return sum([(p * p).sum() * x.mean() + p.sum() for p in tree.tensors(params)], torch.zeros(()))


# Bytes, jit, checkpoints.


def mean_of_products(params: Any, x: torch.Tensor) -> torch.Tensor:
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"])
    return x.square().mean()


def big_params() -> dict[str, Any]:
    return {"w": [normal((64, 80), i, torch.float32) for i in range(2)], "norm": normal((30,), 5, torch.float32)}


def test_eight_bit_moments_take_two_bytes_an_element():
    params, opt = big_params(), optim.adamw(1e-2, moments="int8")
    step = fzero.shard(train_step_for(loss_of, opt), 3, fzero.mesh(dp=4))
    _, state = step.init(params, opt)
    elements = 2 * 64 * 80
    scales = 2 * 4 * elements // 256 + 2 * 5 * 30  # the norm has full moments, and bytes that are not used
    assert fzero.zero.state_bytes(state, step.mesh) - 8 == pytest.approx((2 * elements + scales) / 4, abs=16)


@pytest.mark.slow
def test_a_plan_holds_one_unit_in_float32():
    """Of 6 bytes an element that a rank saves between steps, its peak keeps 5: a twelfth of the moments is widened."""
    params = {"blocks": [{"w": normal((128, 128), i, torch.float32)} for i in range(12)]}
    peaks = []
    for opt in (optim.adamw(1e-2), optim.adamw(1e-2, moments="int8")):
        opt = optim.chain(optim.clip_by_global_norm(1.0), opt)  # so that both hold all gradients before the update
        step = fzero.shard(train_step_for(mean_of_products, opt), 3, fzero.mesh(dp=2))
        jitted = fzero.jit(step, prefetch=0, in_flight=0, recompute=False)
        peaks.append(fzero.plan(jitted, *step.init(params, opt), step.mesh.split(torch.ones(8, 128))).peak_bytes)
    tables = 2 * (65536 + 2 * 1024)
    assert peaks[0] - peaks[1] > 12 * 128 * 128 / 2 * 5 - 2 * tables


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_jitted_eight_bit_step_equals_the_eager_one(backend):
    params, opt = big_params(), optim.adamw(1e-2, moments="int8")
    step = fzero.shard(train_step_for(loss_of, opt), 3, fzero.mesh(dp=3))
    jitted = fzero.jit(step, backend=backend)
    eager, fast = step.init(params, opt), jitted.init(params, opt)
    for _ in range(2):
        batch = step.mesh.split(torch.ones(6))
        eager, fast = step(*eager[:2], batch), jitted(*fast[:2], batch)
    assert_trees_close(fast, eager, 0.0 if backend == "fx" else None)


@pytest.mark.parametrize("before,after", [((3, 4), (3, 3)), ((3, 4), (0, 1)), ((1, 2), (3, 5))])
def test_a_checkpoint_resumes_on_another_layout(tmp_path, before, after):
    params, opt = big_params(), optim.adamw(1e-2, moments="int8")
    steps = [fzero.shard(train_step_for(loss_of, opt), stage, fzero.mesh(dp=n)) for stage, n in (before, after)]
    state = steps[0].init(params, opt)
    state = steps[0](*state, steps[0].mesh.split(torch.ones(60)))[:2]
    fzero.checkpoint.save(tmp_path / "c", state, mesh=steps[0].mesh)
    loaded = fzero.checkpoint.load(tmp_path / "c", steps[1].init(params, opt), mesh=steps[1].mesh)
    assert_trees_close(steps[1].gather(loaded), steps[0].gather(state), 0.0)


def step_without_count(opt: Any) -> Any:
    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        updates, state = opt.update(tree.map(lambda p: (0.3 * p) ** 3, params), state, params)
        return optim.apply_updates(params, updates), state

    return step


KINDS = {
    "adamw": lambda moments: optim.adamw(1e-2, moments=moments),
    "lion": lambda moments: optim.chain(optim.clip(1.0), optim.lion(1e-2, moments=moments)),
    "muon": lambda moments: optim.muon(1e-2, fallback=optim.adam(1e-2, moments=moments), moments=moments),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_states_convert_between_kinds_of_moments(name, stage):
    params, exact, small = big_params(), KINDS[name](None), KINDS[name]("int8")
    step = fzero.shard(step_without_count(exact), stage, fzero.mesh(dp=3))
    likes = [step.init(params, opt)[1] for opt in (exact, small)]
    _, state = step(step.init(params, exact)[0], likes[0], step.mesh.split(torch.ones(3)))
    convert = step.mesh.spmd(optim.convert_moments)
    packed = convert(state, likes[1])
    assert tree.flatten(packed)[1] == tree.flatten(likes[1])[1]
    back = convert(packed, likes[0])
    pairs = zip(floats(back), floats(state), strict=True)
    errors = [(x - y).abs().max() / y.abs().max() for x, y in pairs]
    assert 0 < max(errors) < 0.08, "half of the widest gap between values, relative to the largest"
    again = convert(packed, likes[1])
    assert_trees_close(again, packed, 0.0)
    with pytest.raises(TypeError, match=r"opt_state holds moments .* optim.convert_moments"):
        other = fzero.shard(step_without_count(small), stage, step.mesh)
        other(step.init(params, exact)[0], state, step.mesh.split(torch.ones(3)))
    with pytest.raises(TypeError, match=r"opt_state holds moments in 8 bits, and the optimizer stores them in the par"):
        step(step.init(params, exact)[0], packed, step.mesh.split(torch.ones(3)))


def test_a_converted_moment_has_the_bytes_of_its_own_code():
    w, exact = normal((64, 80), 0, torch.float32), optim.adamw(1e-2)
    _, state = exact.update(w, exact.init(w), w)
    new = optim.convert_moments(state, optim.adamw(1e-2, moments="int8").init(w))
    for moment, full, signed in [(new.mu, state.mu, True), (new.nu, state.nu, False)]:
        assert_trees_close(unpack(moment, w, signed), full, 0.01)


def test_states_of_other_optimizers_do_not_convert():
    params = big_params()
    with pytest.raises(ValueError, match="trees differ in structure"):
        optim.convert_moments(optim.adamw(1e-2).init(params), optim.lion(1e-2, moments="int8").init(params))


def floats(state: Any) -> list[torch.Tensor]:
    return [x for x in tree.tensors(state) if x.is_floating_point() and x.ndim and x.abs().max() > 0]


# Leaves that an axis splits.


@pytest.mark.parametrize("dims", [{"w": 1}, {"w": 0, "e": 0}, {"w": 1, "e": 1}], ids=str)
def test_eight_bit_moments_of_split_leaves_equal_those_of_whole_leaves(dims):
    params = {"w": normal((8, 1024), 0, torch.float32), "e": normal((4, 128, 2), 1, torch.float32)}
    opt = optim.adamw(1e-2, moments=optim.Moments("int8", full=lambda path, leaf: dims.get(path) != 0 and path == "e"))

    def split(path: str, leaf: torch.Tensor) -> Any:
        return {"tp": dims[path]} if path in dims else None

    assert block_shape((8, 1024)) == (8, 4) and block_shape((4, 128, 2)) == (4,)
    step = fzero.shard(step_of(opt), 3, fzero.mesh(dp=3, tp=2), axis="dp", split=split)
    state = train(step, step.init(params, opt), split=step.mesh.split)
    assert_trees_close(step.gather(state), train(step_of(opt), (params, opt.init(params))), 0.0)


def test_a_split_that_cuts_eight_bit_blocks_is_refused():
    opt = optim.adamw(1e-2, moments=EVERY)
    step = fzero.shard(
        train_step_for(loss_of, opt), 3, fzero.mesh(dp=2, tp=2), axis="dp", split=lambda path, leaf: {"tp": 1}
    )
    with pytest.raises(ValueError, match=r"leaf 'w' is \[5, 256\], and tp=2 splits its dimension 1 .* cut blocks"):
        step.init({"w": torch.ones(5, 256)}, opt)
