"""Laws of recast: no step holds the wide copies of all gradients, whatever waits for their norm."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

import fzero
from fzero import optim, tree
from fzero.graph._candidates import PEAK_TOLERANCE, ScheduleOptions, candidates
from fzero.graph._pass_manager import PassContext
from fzero.graph.ir import LATE, node_stand_ins
from fzero.graph.passes import recast, schedule
from fzero.graph.passes.scheduling._node_roles import node_roles
from fzero.graph.planning.memory._live_ranges import live_ranges
from tests.graph.graphs import Builder, aten, bits, run
from tests.helpers import cases, examples

HALF = fzero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
LAYERS, WIDTH = 4, 96


def make_clipped(sizes: Sequence[int], joined: bool = True, beside: int = 0, scaled: bool = False) -> Graph:
    """The update of a leaf of each size, by half-precision gradients that are reduced and scaled by their norm.

    And the tanh of `beside` more values, summed. With `scaled`, gradients are divided by a loss scale.
    """
    shapes = [(2 * n,) for n in sizes] + [(n,) for n in sizes] + ([(beside,)] if beside else [])
    b = Builder(2, shapes, [{}] * len(shapes), False)
    grads, params = b.inputs[: len(sizes)], b.inputs[len(sizes) : 2 * len(sizes)]
    others = [b(aten.sum.default, b(aten.tanh.default, x)) for x in b.inputs[2 * len(sizes) :]]
    half = [b.reduce_scatter(b.cast(x, torch.bfloat16)) for x in grads]
    wide = [b.cast(x, torch.float32) for x in half]
    wide = [b(aten.div.Tensor, b(aten.mul.Tensor, x, scale_of(b)), 8.0) for x in wide] if scaled else wide
    square = functools.reduce(
        lambda x, y: b(aten.add.Tensor, x, y), [b(aten.sum.default, b(aten.mul.Tensor, x, x)) for x in wide]
    )
    norm = b.all_reduce(square) if joined else square
    new = [b(aten.sub.Tensor, p, b(aten.mul.Tensor, x, norm)) for p, x in zip(params, wide, strict=True)]
    return b.done([*new, *others])


def scale_of(b: Builder) -> Any:
    return b(aten.full.default, [], 2.0)


def wide_alive(graph: Graph, scaled: bool) -> int:
    """Return how many casts to float32, or what they are scaled to, are alive at most at a time."""
    nodes, last = list(graph.nodes), aten.div.Tensor if scaled else aten._to_copy.default
    at = [i for i, n in enumerate(nodes) if n.target is last and node_stand_ins(n)[0].dtype == torch.float32]
    results = [r for r in live_ranges(graph) if r.start in at]
    return max(sum(r.start <= i <= r.stop for r in results) for i in range(len(nodes)))


@examples(10, 40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_recast_keeps_one_wide_copy_alive_at_a_time(sizes, scaled):
    graph = make_clipped(sizes, scaled=scaled)
    assert wide_alive(schedule(graph), scaled) == len(sizes)
    result = schedule(recast(graph, 1))
    assert wide_alive(result, scaled) == 1
    args = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in [*[2 * n for n in sizes], *sizes]]
    assert [bits(x) for x in run(result, args, 2)] == [bits(x) for x in run(graph, args, 2)]


def test_casts_that_wait_for_no_collective_are_not_repeated():
    graph = recast(make_clipped([5, 5], joined=False), 1)
    assert not any(LATE in n.meta for n in graph.nodes)


def test_recast_leaves_small_values_and_results_alone():
    assert not any(LATE in n.meta for n in recast(make_clipped([5, 5]), 21).nodes)
    assert sum(LATE in n.meta for n in recast(make_clipped([5, 6]), 21).nodes) == 1
    b = Builder(2, [(4,)], [{}], False)
    wide = b.cast(b.cast(b.inputs[0], torch.bfloat16), torch.float32)
    out = b(aten.mul.Tensor, wide, b.all_reduce(b(aten.sum.default, wide)))
    assert not any(LATE in n.meta for n in recast(b.done([out, wide]), 1).nodes)


def test_recast_leaves_narrow_copies_alone():
    b = Builder(2, [(40,)], [{}], False)
    half = b.cast(b.inputs[0], torch.bfloat16)
    norm = b.all_reduce(b(aten.sum.default, half))
    assert not any(LATE in n.meta for n in recast(b.done([b(aten.mul.Tensor, half, norm)]), 1).nodes)


def test_recast_leaves_a_product_of_two_values_alone():
    b = Builder(2, [(40,), (40,)], [{}, {}], False)
    product = b(aten.mul.Tensor, *[b.cast(b.cast(x, torch.bfloat16), torch.float32) for x in b.inputs])
    norm = b.all_reduce(b(aten.sum.default, product))
    assert not any(LATE in n.meta for n in recast(b.done([b(aten.mul.Tensor, product, norm)]), 1).nodes)


def test_recast_leaves_a_cast_of_a_constant_alone():
    b = Builder(2, [(40,)], [{}], False)
    constant = b.graph.call_function(aten._to_copy.default, (1,), {"dtype": torch.float32})
    constant.meta = {"val": b.inputs[0].meta["val"]}
    assert not any(
        LATE in n.meta for n in recast(b.done([b(aten.mul.Tensor, constant, b.all_reduce(constant))]), 1).nodes
    )


def layers() -> Any:
    with torch.device("meta"):
        return {
            "layers": [
                {"up": torch.zeros(WIDTH, 4 * WIDTH), "down": torch.zeros(4 * WIDTH, WIDTH)} for _ in range(LAYERS)
            ]
        }


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
    return x.float().square().mean()


def train_step_of(loss_fn: Any, clip: bool, precision: fzero.Precision = HALF) -> tuple[Any, Any]:
    adamw = optim.adamw(1e-3)
    opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), adamw) if clip else adamw, precision)

    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        value, grads = fzero.value_and_grad(loss_fn, precision=precision)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step, opt


@functools.cache
def make_plan(stage: Any, ranks: int, clip: bool, **options: Any) -> fzero.graph.Plan:
    train_step, opt = train_step_of(loss, clip)
    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(dp=2))
    params, state = step.init(layers(), opt)
    with torch.device("meta"):
        x = torch.zeros(4, WIDTH, dtype=torch.bfloat16)
    return fzero.plan(fzero.jit(step, **options), params, state, step.mesh.split(x), world_size=ranks)


@pytest.mark.parametrize("ranks,stage", cases([(2, 2), (4096, 3)], itertools.product((2, 4, 8, 32, 256, 4096), (2, 3))))
def test_a_clip_costs_one_unit_beside_the_gradients_that_wait(stage, ranks):
    """The half-precision shards of all units wait for the norm; their copies in float32 do not."""
    numel = tree.numel(layers())
    waiting, unit = 2 * (numel - numel // LAYERS) / ranks, 4 * numel / LAYERS / ranks
    without, clipped = make_plan(stage, ranks, False), make_plan(stage, ranks, True)
    assert clipped.peak_bytes <= PEAK_TOLERANCE * (without.peak_bytes + waiting)
    if ranks >= 8:  # what waits is then less than what the backward pass holds
        assert clipped.peak_bytes <= PEAK_TOLERANCE * (without.peak_bytes + unit)


@pytest.mark.slow
def test_recast_is_kept_where_the_peak_is_smaller():
    few, many = make_plan(2, 2, True), make_plan(2, 256, True)
    assert few.settings["recast"] is True
    assert few.peak_bytes < 0.95 * make_plan(2, 2, True, recast=False).peak_bytes
    assert "recast" not in many.settings and many.peak_bytes == make_plan(2, 256, True, recast=False).peak_bytes
    assert "recast" not in make_plan(2, 2, False).settings


def test_recast_is_forced_by_its_option():
    asked, free = make_plan(2, 16, True, recast=True), make_plan(2, 16, True)
    assert asked.settings["recast"] is True and all("recast" in x.settings for x in asked.rejected)
    assert "recast" not in free.settings  # another is faster, and within 3%


@pytest.mark.parametrize("beside,tried", [(1, True), (200_000, False)])
def test_recast_is_a_candidate_where_it_lowers_the_peak(beside, tried):
    """It is none if the peak is that of another value."""
    result = candidates(make_clipped([9000, 9000, 9000], beside=beside), PassContext(), ScheduleOptions())
    assert {c.pass_settings.recast for c in result} == ({False, True} if tried else {False})


def test_new_states_do_not_wait_until_all_gradients_are_known_to_be_finite():
    """With a loss scale an update is chosen when the last gradient is there: gradients wait, and not what they make."""
    policy = fzero.Precision(param=torch.float16)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.adamw(1e-3), policy))

    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        take = fzero.scaled_value_and_grad(loss, optim.loss_scale(opt_state).scale, precision=policy)
        value, grads = take(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    step = fzero.shard(train_step, stage=2, mesh=fzero.mesh(dp=2))
    params, state = step.init(layers(), opt)
    x = step.mesh.split(torch.zeros(4, WIDTH, dtype=torch.float16, device="meta"))
    plan = fzero.plan(step, params, state, x)
    shard, unit = 4 * tree.numel(layers()) / 2, 4 * tree.numel(layers()) / LAYERS / 2
    # new moments and masters are as much as three gradients
    assert plan.added_bytes <= PEAK_TOLERANCE * (shard + 3 * unit)


@pytest.mark.parametrize("large", [False, True])
def test_recast_computes_values_late_if_that_keeps_fewer_bytes_alive(large):
    b = Builder(2, [(40,), (20,)], [{}, {}], False)
    x, y = b.inputs
    mine = b.reduce_scatter(x)
    product = b(aten.add.Tensor, y, 1.0) if large else b(aten.sum.default, mine)
    product = b(aten.mul.Tensor, product, mine) if large else b(aten.mul.Tensor, product, 2)
    tanh = b(aten.tanh.default, product)
    flag = b.all_reduce(b(aten.sum.default, mine))
    graph = b.done([b(aten.mul.Tensor, product, flag), b(aten.mul.Tensor, tanh, flag)])
    assert ({product, tanh} <= node_roles(graph).late) is large


def test_values_that_share_only_a_scalar_are_recast_separately():
    b = Builder(2, [(40,), (40,), (80,)], [{}, {}, {}], False)
    x, y, z = b.inputs
    mine, other = b.reduce_scatter(x), b.reduce_scatter(z)
    flag = b.all_reduce(b(aten.sum.default, b(aten.mul.Tensor, mine, 2)))
    number = b(aten.mul.Tensor, b(aten.sum.default, b(aten.mul.Tensor, mine, 3)), 2)
    grows = b(aten.mul.Tensor, y, number)
    shrinks = b(aten.slice.Tensor, b(aten.mul.Tensor, other, number), 0, 0, 3)
    shrinks = b(aten.neg.default, shrinks)
    graph = b.done([b(aten.mul.Tensor, grows, flag), b(aten.mul.Tensor, shrinks, flag)])
    assert grows in node_roles(graph).late and shrinks not in node_roles(graph).late


# DeepSpeed's pull request 2079.

EXPERTS, DEEP, DIM = 16, 32, 4096
GROUP = 178_956_971  # DeepSpeed's elements of a group


def mixture() -> Any:
    """A base of 6.7 billion parameters, with 16 experts in every second layer: 41 billion."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="meta")

    def layer(i: int) -> Any:
        dense = {"qkv": zeros(DIM, 3 * DIM), "out": zeros(DIM, DIM)}
        if i % 2:
            return {**dense, "experts": {"up": zeros(EXPERTS, DIM, 4 * DIM), "down": zeros(EXPERTS, 4 * DIM, DIM)}}
        return {**dense, "up": zeros(DIM, 4 * DIM), "down": zeros(4 * DIM, DIM)}

    return {"embed": zeros(50304, DIM), "layers": [layer(i) for i in range(DEEP)]}


def mixture_loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Each rank gives its own tokens to its expert: what is sent would be small beside the states."""
    y = params["embed"][tokens]
    for layer in params["layers"]:
        q, k, v = (y @ layer["qkv"]).chunk(3, -1)
        y = y + torch.softmax(q @ k.transpose(-1, -2), -1) @ v @ layer["out"]
        if "experts" in layer:
            h = torch.tanh(torch.bmm(y.view(1, -1, DIM), layer["experts"]["up"]))
            y = y + torch.bmm(h, layer["experts"]["down"]).view(y.shape)
        else:
            y = y + torch.tanh(y @ layer["up"]) @ layer["down"]
    return y.float().square().mean()


def of_the_pull_request(clip: bool, recast: Any) -> fzero.graph.Plan:
    def split(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        return {"ep": 0} if "experts" in path else None

    train_step, opt = train_step_of(mixture_loss, clip)
    mesh, params = fzero.mesh(dp=2, ep=EXPERTS), mixture()
    rule = fzero.sharding.by_size(params, 2 * 10**7, GROUP, split=split)
    step = fzero.shard(train_step, stage=2, mesh=mesh, axis=("dp", "ep"), split=split, units=rule)
    params, state = step.init(params, opt)
    tokens = mesh.split(torch.zeros(32, 32, dtype=torch.long, device="meta"))
    return fzero.plan(fzero.jit(step, recast=recast), params, state, tokens)


@pytest.mark.slow
def test_recast_lowers_the_peak_of_the_pull_request_as_its_table_says():
    """32 ranks have 35.2 GB before and 30.7 after on paper; it measured 31.3, and was out of memory before."""
    without, before, after = (of_the_pull_request(*how) for how in ((False, False), (True, False), (True, "auto")))
    assert math.isclose(before.argument_bytes, 27.9e9, rel_tol=0.01)
    assert [round(x.peak_bytes / 1e9, 1) for x in (without, before, after)] == [28.8, 33.8, 31.4]
