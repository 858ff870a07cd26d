"""Units in fewer bits: what a codec sends, and that its numbers are the same at every stage, on any ranks."""

import itertools
import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import codecs, optim, tree
from fzero.codecs import Codec, pack
from fzero.parallel import experts
from fzero.sharding.elements._block_ranges import UnitRange, block_range
from fzero.sharding.maps._coded_rows import encode_range, range_magnitudes
from fzero.testing import assert_trees_close, stages, trees, world_sizes
from tests.helpers import ALL_STAGES, LEAST, cases, examples, train_step_for
from tests.precision_steps import step_of, wide_norm
from tests.tiny_gpt import gpt_loss, gpt_params

INT8, INT4 = codecs.int8(16), codecs.int4(16)
SOME = [*[make(block=16) for make in codecs.CODECS.values()], codecs.float8("e5m2", 16)]
OPT = optim.sgd(1.0)


def unit(sizes: list[int], seed: int) -> torch.Tensor:
    return torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))


@examples(40, 400)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    block=st.integers(2, 9),
    n=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@example([5, 8], 4, 3, 0)
@example([1], 4, 8, 0)
def test_ranges_have_the_blocks_of_the_unit(sizes, block, n, seed):
    """The magnitudes of all ranks' ranges together are those of each leaf, and so are the codes."""
    x, codec = unit(sizes, seed), Codec("int8", block)
    leaves = x.split(sizes)
    expected = torch.cat([codec.encode(leaf).magnitudes for leaf in leaves])
    payload = torch.cat([codec.encode(leaf).payload for leaf in leaves])
    k = -(-x.numel() // n)
    ranges = [block_range(sizes, block, r * k, r * k + k) for r in range(n)]
    padded = torch.cat([x, torch.full((n * k - x.numel(),), 9e9)])  # padding may hold anything
    parts = [padded[r * k : r * k + k] for r in range(n)]
    magnitudes = torch.stack(
        [range_magnitudes(part, y.as_lists(), len(expected), block) for part, y in zip(parts, ranges, strict=True)]
    ).amax(0)
    assert torch.equal(magnitudes, expected)
    codes = [encode_range(part, magnitudes, y.as_lists(), codec.key, 1) for part, y in zip(parts, ranges, strict=True)]
    assert torch.equal(torch.cat(codes)[: x.numel()], payload)
    for part, y in zip(parts, ranges, strict=True):
        assert UnitRange.from_lists(y.as_lists()) == y
        back, real = y.from_blocks(y.to_blocks(part, block)), sum(p.size for p in y.parts)
        assert torch.equal(back[:real], part[:real]) and not back[real:].any()


def sum_squares(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A sum of squares, so that the gradient shows the values that the loss saw."""
    return sum([(leaf.to(torch.float64) ** 2).sum() for leaf in tree.tensors(params)], torch.zeros(())) * x.mean()


def train(precision: Any, params: Any, stage: int, mesh: Any, batch: Any, **options: Any) -> Any:
    backend, loss, axis = options.pop("backend", None), options.pop("loss", sum_squares), options.pop("axis", None)
    step = fzero.shard(step_of(OPT, loss, precision=precision, **options), stage=stage, mesh=mesh, axis=axis)
    state = step.init(params, OPT)
    run = fzero.jit(step, backend=backend) if backend else step
    *state, value = run(*state, mesh.split(batch))
    return step.gather(state[0]), value


@examples(8, 80)
@given(
    params=trees(dtypes=[torch.float32, torch.float64, torch.bfloat16]),
    codec=st.sampled_from(SOME),
    stage=stages(),
    n=world_sizes(),
    k=st.integers(1, 3),
    lockstep=st.booleans(),
    gather=st.booleans(),
    jit=st.sampled_from([False, False, True]),
)
def test_the_loss_sees_rounded_parameters_at_every_stage(params, codec, stage, n, k, lockstep, gather, jit):
    """The value, and the gradient at the rounded parameters, are those of a program that rounds each leaf."""
    params = tree.map(lambda x: x.to(torch.float32), params)
    precision = fzero.Precision(torch.float32, gather=codec)
    loss = sum_squares if gather else lambda p, x: sum_squares(fzero.gather(p), x)
    mesh = fzero.mesh(simulate="lockstep" if lockstep else "vmap", dp=n)
    backend = "fx" if jit and not lockstep else None
    options: Any = {"loss": loss, "gather": gather, "micro_batches": k, "backend": backend}
    new, value = train(precision, params, stage, mesh, torch.ones(n * k), **options)
    rounded = tree.map(codec.round, params)
    assert_trees_close(value, sum_squares(rounded, torch.ones(())), rtol=1e-6)
    assert_trees_close(new, tree.map(lambda p, r: p - 2 * r, params, rounded), rtol=1e-5)


def test_an_unsharded_program_rounds_by_the_policys_codec():
    params = {"w": torch.randn(33), "b": torch.randn(3).to(torch.float64)}
    for precision, others in [(fzero.Precision(torch.float32, gather=INT4), torch.float64), (None, None)]:
        grads = fzero.value_and_grad(sum_squares, precision=precision)(
            {"w": params["w"]} if others else params, torch.ones(1)
        )[1]
        assert torch.equal(grads["w"], 2 * (INT4.round(params["w"]) if others else params["w"]))


def test_leaves_in_full_precision_are_sent_as_they_are():
    """`full` names them, if they have another dtype than the parameters."""
    precision = fzero.Precision(torch.bfloat16, gather=INT8, reduce=INT4, full=wide_norm)
    opt = optim.master_weights(optim.sgd(1.0), precision)
    params = {"w": torch.randn(64), "n": torch.randn(64)}
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(step_of(opt, sum_squares, precision=precision), stage=3, mesh=mesh)
    state = step.init(params, opt)
    with fzero.collectives.record() as log:
        *state, _ = step(*state, mesh.split(torch.ones(2)))
    new = step.gather(state[0])
    assert_trees_close(new["n"], -params["n"], rtol=1e-6)
    assert {(e.kind, e.dtype) for e in log.unit_events if e.unit == "n"} == {
        ("all_gather", torch.float32),
        ("reduce_scatter", torch.float32),
    }
    assert {(e.kind, e.dtype) for e in log.unit_events if e.unit == "w"} == {
        ("all_reduce", torch.float32),
        ("all_gather", torch.uint8),
        ("all_to_all", torch.uint8),
    }


def products(params: Any, x: Any) -> torch.Tensor:
    """A loss whose gradient on a rank is the rank's part of the batch."""
    pairs = zip(tree.tensors(params), x, strict=True)
    return sum([(p * y[0]).sum() for p, y in pairs], torch.zeros(()))


def values_like(params: Any, n: int, seed: int = 0) -> list[torch.Tensor]:
    """Values `[n, *shape]` for each leaf."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn((n, *p.shape), generator=g) for p in tree.tensors(params)]


def sum_by_codec(codec: Codec, xs: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' values `[n, *shape]` by a codec, written out: one scale for a block of all ranks."""
    largest = codec.code_kind.largest
    blocks = codec.to_blocks(xs.reshape(len(xs), -1))
    scales = (blocks.abs().amax((0, 2), keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    if codec.code_kind.is_float:
        scales = torch.exp2(scales.double().log2().ceil()).float()
    codes = blocks / scales
    codes = (
        codes.clamp(-largest, largest).to(codec.code_kind.dtype).float() if codec.code_kind.is_float else codes.round()
    )
    return (codes.sum(0, keepdim=True) * scales).flatten()[: xs[0].numel()].view(xs.shape[1:])


@examples(10, 100)
@given(
    params=trees(dtypes=[torch.float32]),
    codec=st.sampled_from(SOME),
    stage=stages(),
    n=world_sizes(),
    lockstep=st.booleans(),
    seed=st.integers(0, 99),
    jit=st.sampled_from([False, False, True]),
)
def test_coded_sums_equal_sums_of_decoded_values_bit_for_bit(params, codec, stage, n, lockstep, seed, jit):
    batch = values_like(params, n, seed)
    mesh = fzero.mesh(simulate="lockstep" if lockstep else "vmap", dp=n)
    precision = fzero.Precision(torch.float32, reduce=codec)
    zeros = tree.map(torch.zeros_like, params)
    options: Any = {"loss": products, "reduce": "sum", "backend": "fx" if jit and not lockstep else None}
    new, _ = train(precision, zeros, stage, mesh, batch, **options)
    expected = [-(y[0] if n == 1 else sum_by_codec(codec, y)) for y in batch]
    assert_trees_close(tree.tensors(new), expected, rtol=0.0)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("codec", [INT8, INT4])
def test_the_sum_of_the_largest_codes_is_exact(codec, n):
    """At stage 0 sums of integer codes are sent in as few bytes as hold them."""
    params = {"w": torch.zeros(20)}
    batch = [torch.full((n, 20), codec.code_kind.largest) * torch.tensor([1.0, -1.0]).repeat(10)]
    for stage in ALL_STAGES:
        precision = fzero.Precision(torch.float32, reduce=codec)
        options: Any = {"loss": products, "reduce": "sum"}
        new, _ = train(precision, params, stage, fzero.mesh(dp=n), batch, **options)
        assert_trees_close(new["w"], -batch[0].sum(0), rtol=0.0)


def test_stochastic_sums_are_equal_at_every_stage():
    params = {"w": torch.zeros(333), "b": torch.zeros(5)}
    batch = values_like(params, 4)
    precision = fzero.Precision(torch.float32, reduce=codecs.int4(16, "stochastic"))
    options: Any = {"loss": products, "reduce": "sum"}
    first, *rest = [train(precision, params, s, fzero.mesh(dp=4), batch, **options)[0] for s in range(4)]
    for other in rest:
        assert_trees_close(other, first, rtol=0.0)
    error = -first["w"] - batch[0].sum(0)
    assert 0 < error.abs().max() < 4 * batch[0].abs().max() / 7


SIZES = [{"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 1, "b": 3}, {"a": 2, "b": 2, "c": 2}]


@examples(10, 100)
@given(
    params=trees(dtypes=[torch.float32]),
    codec=st.sampled_from(SOME),
    sizes=st.sampled_from(SIZES),
    order=st.integers(0, 5),
    stage=stages(),
    lockstep=st.booleans(),
    seed=st.integers(0, 99),
)
@example({"w": torch.linspace(-3, 3, 333)}, INT8, SIZES[3], 5, 3, True, 0)
def test_units_over_several_axes_in_any_order_have_the_numbers_of_one_axis(
    params, codec, sizes, order, stage, lockstep, seed
):
    """A unit is rounded once, and sums of integer codes are exact, whichever axes they pass."""
    n = math.prod(sizes.values())
    orders = [*itertools.permutations(sizes)]
    axis = orders[order % len(orders)]
    mesh = fzero.mesh(simulate="lockstep" if lockstep else "vmap", **sizes)
    batch = values_like(params, n, seed)
    for settings in ({"gather": codec}, {"reduce": codec}):
        precision = fzero.Precision(torch.float32, **settings)
        options: Any = {"loss": products, "reduce": "sum"}
        one, _ = train(precision, params, stage, fzero.mesh(dp=n), batch, **options)
        several, _ = train(precision, params, stage, mesh, batch, axis=axis, **options)
        exact = "reduce" in settings and not codec.code_kind.is_float
        assert_trees_close(several, one, rtol=0.0 if exact else 1e-6)


def test_copies_along_a_replica_axis_are_added_as_they_are():
    params = {"w": torch.randn(333)}
    batch = values_like(params, 4)
    precision = fzero.Precision(torch.float32, reduce=INT8)
    mesh = fzero.mesh(replica=2, shard=2)
    step = fzero.shard(step_of(OPT, products, precision=precision, reduce="sum"), stage=3, mesh=mesh, over="shard")
    state = step.init(params, OPT)
    *state, _ = step(*state, mesh.split(batch))
    parts = [sum_by_codec(INT8, batch[0][i : i + 2]) for i in (0, 2)]
    assert_trees_close(step.gather(state[0])["w"], params["w"] - (parts[0] + parts[1]), rtol=1e-6)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_parts_along_another_axis_are_summed_by_codes_at_every_stage(simulate):
    """Experts lie along "ep": at stage 0 their gradients are summed over "dp" alone, and by codes, too."""
    precision = fzero.Precision(torch.float32, reduce=INT8)
    params = {"experts": {"w": torch.zeros(2, 33)}, "c": torch.zeros(5)}
    g = torch.Generator().manual_seed(0)
    batch = {"w": torch.randn((4, 33), generator=g), "c": torch.randn((4, 5), generator=g)}

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return (params["experts"]["w"][0] * batch["w"][0]).sum() + (params["c"] * batch["c"][0]).sum()

    mesh = fzero.mesh(simulate=simulate, dp=2, ep=2)
    new = []
    for stage in ALL_STAGES:
        step = fzero.shard(
            step_of(OPT, loss, precision=precision, reduce="sum"),
            stage,
            mesh,
            split=experts.split_rule("experts", axis="ep"),
        )
        state = step.init(params, OPT)
        *state, _ = step(*state, mesh.split(batch))
        new.append(step.gather(state[0]))
    expected = torch.stack(
        [sum_by_codec(INT8, batch["w"][[e, e + 2]]) for e in (0, 1)]
    )  # rank (d, e) has sample 2 d + e
    for tree_ in new:
        assert_trees_close(tree_["experts"]["w"], -expected, rtol=0.0)
        assert_trees_close(tree_["c"], new[0]["c"], rtol=1e-6)


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_an_overflow_in_coded_gradients_on_one_rank_skips_the_step(stage, simulate):
    precision = fzero.Precision(torch.float16, gather=INT8, reduce=INT4)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.sgd(0.1), precision), 4.0)
    mesh = fzero.mesh(simulate=simulate, dp=2)
    step = fzero.shard(step_of(opt, products, scaled=True, precision=precision), stage=stage, mesh=mesh)
    state = step.init({"w": torch.ones(40)}, opt)
    good = [torch.randn(2, 40)]
    bad = [good[0].clone()]
    bad[0][1, 17] = torch.inf
    *state, _ = step(*state, mesh.split(bad))
    assert state[1].skipped == 1 and torch.equal(step.gather(state[0])["w"].float(), torch.ones(40))
    *state, _ = step(*state, mesh.split(good))
    assert state[1].skipped == 1 and not torch.equal(step.gather(state[0])["w"].float(), torch.ones(40))


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_second_derivatives_with_codecs_are_exact(stage):
    """A codec changes values alone: the derivative of a coded gradient is that of the exact sum, at rounded leaves."""
    params, x = {"w": torch.randn(20)}, torch.randn(4, 20)
    precision = fzero.Precision(torch.float32, gather=INT8, reduce=INT8)

    def train_step(params: Any, x: Any) -> Any:
        def squares(params: Any) -> Any:
            def cubes(p: Any) -> Any:
                return (p["w"] ** 3 * x).sum()

            grads = fzero.value_and_grad(cubes, precision=precision)(params)[1]
            return (fzero.gather(grads)["w"] ** 2).sum()

        grads = fzero.value_and_grad(squares)(params)[1]
        return tree.map(torch.add, params, grads)  # no new parameters: a gradient in their place is refused

    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(dp=4))
    new = step.gather(step(step.partition(params), step.mesh.split(x)))
    rounded = INT8.round(params["w"])
    of_cubes = sum_by_codec(INT8, 3 * rounded**2 * x / 4)
    assert_trees_close(new["w"], params["w"] + 2 * of_cubes * 6 * rounded * x.mean(0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_codes_take_few_bytes_on_the_wire(k):
    """A gather by int8 takes at most 0.27 of float32's bytes, and a sum by int4 at most 0.15; the plan counts them."""
    params, n = gpt_params(width=64, vocab=32), 4
    mesh, tokens = fzero.mesh(dp=n), torch.zeros(n * k, 9, dtype=torch.int64)
    moved = {}
    for name, settings in [("exact", {}), ("coded", {"gather": codecs.int8(), "reduce": codecs.int4()})]:
        precision = fzero.Precision(torch.float32, **settings)
        step = fzero.shard(train_step_for(gpt_loss, OPT, precision=precision, micro_batches=k), stage=3, mesh=mesh)
        state = step.init(params, OPT)
        with fzero.collectives.record() as log:
            step(*state, mesh.split(tokens))
        plan = fzero.plan(
            fzero.jit(step, backend="fx", **{**LEAST, "max_reuse_bytes": float("inf")}), *state, mesh.split(tokens)
        )
        units = [c for c in plan.collectives if c.unit != "(metric)"]
        moved[name] = log.bytes
        if k == 1:
            assert sum(c.bytes for c in units) == log.bytes
        if name == "coded":
            of_gathers = sum(e.bytes for e in log.unit_events if e.kind == "all_gather")
            maxima = sum(e.bytes for e in log.unit_events if e.kind == "all_reduce") / 2  # half of them for sums
            of_sums = sum(e.bytes for e in log.unit_events if e.kind == "all_to_all")
            assert of_gathers + maxima <= 0.27 * moved["exact"] / 2
            assert of_sums + maxima <= 0.15 * moved["exact"] / 2
            assert log.count("reduce_scatter") == 0


def deep(width: int = 128, depth: int = 6) -> Any:
    g = torch.Generator().manual_seed(0)
    return {"blocks": [{"w": torch.randn(width, width, generator=g) / width**0.5} for _ in range(depth)]}


def deep_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"])
    return (x**2).mean()


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_plan_frees_and_gathers_codes_again(k):
    """At stage 3 the peak is that of exact gathers, up to the codes, and gathers start ahead of their use."""
    params, n = deep(), 4
    peaks, gathers = {}, {}
    unit = 4 * 128 * 128
    for name, settings in [("exact", {}), ("coded", {"gather": codecs.int8(), "reduce": codecs.int4()})]:
        precision = fzero.Precision(torch.float32, **settings)
        step = fzero.shard(train_step_for(deep_loss, OPT, precision=precision, micro_batches=k), stage=3)
        state = step.init(params, OPT)
        batch = torch.zeros(n * k, 128)
        plan = fzero.plan(step, *state, batch, world_size=n)
        peaks[name] = plan.peak_bytes
        gathers[name] = sum(c.elements for c in plan.collectives if c.kind == "all_gather")
    assert gathers["coded"] == gathers["exact"]
    assert peaks["coded"] <= peaks["exact"] + unit


@pytest.mark.parametrize("k", [1, 3])
def test_between_hosts_pass_codes_of_parameters_once_a_step_and_sums_of_codes(k):
    """Over the hosts go a byte an element of a host's part, and a byte for each sum of two codes of 4 bits."""
    precision = fzero.Precision(torch.float32, gather=INT8, reduce=INT4)
    mesh, params = fzero.mesh(host=2, dp=2), {"blocks": [{"w": torch.randn(16, 16)} for _ in range(3)]}
    train_step = train_step_for(deep_loss, OPT, precision=precision, micro_batches=k)
    step = fzero.shard(train_step, stage=3, mesh=mesh, axis=("dp", "host"))
    args = [*step.init(params, OPT), mesh.split(torch.randn(4 * k, 16))]
    total = Counter[tuple[str, str]]()
    for c in fzero.plan(fzero.jit(step, backend="fx", max_reuse_bytes=0), *args).collectives:
        total[c.kind, c.axis] += c.bytes * c.times
    elements, blocks = 3 * 256, 3 * 16
    assert total["all_gather", "host"] == elements / 2
    assert total["all_to_all", "dp"] == k * elements / 2
    assert total["all_to_all", "host"] == k * elements / 2
    assert total["all_reduce", "host"] == (1 + k) * 2 * 4 * blocks
    assert not {"reduce_scatter", "psum_scatter"} & {kind for kind, _ in total}


@pytest.mark.parametrize("codec", [INT8, codecs.float8(block=16)])
def test_sums_over_a_further_axis_count_as_those_of_their_unit(codec):
    precision = fzero.Precision(torch.float32, reduce=codec)
    mesh, params = fzero.mesh(host=2, dp=3), {"w": torch.zeros(24)}
    step = fzero.shard(step_of(OPT, products, precision=precision), 3, mesh, axis=("dp", "host"))
    state = step.init(params, OPT)
    with fzero.collectives.record() as log:
        step(*state, mesh.split(values_like(params, 6)))
    assert [(e.kind, e.elements) for e in log.events if not e.unit] == [("all_reduce", 2)]  # the loss


@pytest.mark.slow
def test_a_compiled_step_with_codecs_equals_the_eager_one():
    """Inductor on integers, where no sum rounds, so that codes are equal; with rounding at random."""
    params = {"w": torch.zeros(8, 40), "b": torch.zeros(7)}
    g = torch.Generator().manual_seed(0)
    batch = [torch.randint(-9, 10, (4, *p.shape), generator=g).float() for p in tree.tensors(params)]
    precision = fzero.Precision(torch.float32, gather=INT8, reduce=codecs.int4(16, "stochastic"))
    run = partial(train, precision, params, 3, fzero.mesh(dp=4), batch, loss=products, reduce="sum")
    assert_trees_close(run(backend="inductor")[0], run()[0], rtol=0.0)


def test_codes_are_packed_two_in_a_byte():
    codes = torch.tensor([1, -1, 7, -7, 3], dtype=torch.int8)
    assert pack(INT4.code_kind, codes).tolist() == [0xF1, 0x97, 0x03]


@pytest.mark.parametrize(
    "settings,error,text",
    [
        ({"gather": torch.bfloat16}, TypeError, "a dtype is param="),
        ({"gather": codecs.int8(rounding="stochastic")}, ValueError, "rounds at random"),
        ({"reduce": "int4"}, TypeError, "reduce='int4': expected a floating-point dtype.*, or a codec"),
        ({"reduce": codecs.int4}, TypeError, "or a codec, such as fzero.codecs.int4()"),
    ],
)
def test_the_error_of_a_policy_names_its_wrong_codec(settings, error, text):
    with pytest.raises(error, match=text):
        fzero.Precision(torch.float32, **settings)
