"""The plan of a loop: its memory, its collectives and its lines, over all iterations."""

import functools
import math
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero._format import format_bytes
from fzero.graph import _one_rank, _trace_agreement
from tests.graph.helpers import assert_peak_is_the_allocators, bitwise, entry_of, plan_of, train_both
from tests.graph.loops import ADAMW, unroll
from tests.helpers import ALL_STAGES, LEAST, cases, either, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.memory import peak_bytes
from tests.tiny_gpt import gpt_loss, gpt_params
from tests.zero.helpers import loss_of_tree


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_the_plans_peak_is_the_allocators_over_all_iterations(stage):
    step = fzero.jit(
        fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=5), stage=stage, mesh=fzero.mesh(dp=2)), backend="fx"
    )
    state = list(step.init(gpt_params(width=32, layers=either(1, 2)), ADAMW))
    tokens = step.mesh.split(torch.randint(37, (20, 17)))
    assert_peak_is_the_allocators(step, state, tokens, 0.005)


@functools.cache
def with_and_without_a_loop(stage: int) -> list[fzero.graph.Plan]:
    step = fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=3), stage=stage, mesh=fzero.mesh(dp=2))
    args = (*step.init(gpt_params(width=32, layers=either(1, 2)), ADAMW), step.mesh.split(torch.randint(37, (12, 17))))
    looped = fzero.plan(fzero.jit(step, backend="fx"), *args, world_size=4)
    with unroll():
        return [looped, fzero.plan(fzero.jit(step, backend="fx"), *args, world_size=4)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_loop_takes_no_more_memory_than_the_iterations_one_by_one(stage):
    looped, flat = with_and_without_a_loop(stage)
    assert looped.peak_bytes <= flat.peak_bytes and looped.flops == flat.flops


def test_the_sum_of_all_iterations_is_reduced_in_place():
    step = fzero.shard(train_step_for(loss_of_tree, ADAMW, micro_batches=3), stage=0, mesh=fzero.mesh(dp=2))
    args = (*step.init({"w": torch.ones(64)}, ADAMW), step.mesh.split({"x": torch.ones(6)}))
    plan = fzero.plan(fzero.jit(step, backend="fx", bucket_bytes=0), *args, world_size=4)
    reductions = [o.target for o in plan.operations if "all_reduce" in o.target]
    assert len(reductions) == 2 and all("all_reduce_." in target for target in reductions), reductions


def test_operations_of_a_loop_are_rows_of_the_plan():
    """An iteration's rows, those of the iterations before, and the sums, to the byte."""
    f = fzero.value_and_grad(lambda w, x: ((w * x).sum(), x * 2), has_aux=True, micro_batches=8)
    step, w, x = fzero.jit(f, backend="fx"), torch.randn(16), torch.randn(64, 16)
    step(w, x)
    plan = step.plan(w, x)
    assert plan.added_bytes == peak_bytes(lambda: step(w, x))


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_collectives_are_counted_with_their_iterations(stage):
    """Without re-gathers and buckets they are what the eager step sends, which gathers in every iteration."""
    mesh, k = fzero.mesh(dp=4), 5
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=k), stage=stage, mesh=mesh)
    args = (*step.init(mlp_params(), ADAMW), mesh.split(mlp_batch(8 * k)))
    with fzero.collectives.record() as log:
        step(*args)
    plan = fzero.plan(fzero.jit(step, backend="fx", bucket_bytes=0, max_reuse_bytes=math.inf), *args)
    planned = [(c.kind, c.unit, c.elements, c.bytes) for c in plan.collectives for _ in range(c.times)]
    planned += [x for x in planned if x[0] == "all_gather" for _ in range(k - 1) if stage == 3]
    assert sorted(planned) == sorted((e.kind, e.unit or "(metric)", e.elements, e.bytes) for e in log.events)


@pytest.mark.slow
def test_max_reuse_bytes_keeps_gathered_units_across_iterations():
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=4), stage=3, mesh=fzero.mesh(dp=2))
    traced = entry_of(step, *step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(8)), world_size=4)

    def gathers(**options: Any) -> dict[str, int]:
        plan = plan_of(traced, bucket_bytes=0, **options)
        return {c.unit: c.times for c in plan.collectives if c.kind == "all_gather"}

    units = gathers(max_reuse_bytes=math.inf)
    assert set(units.values()) == {1} and len(units) == 4
    assert gathers(memory_budget=10**9) == units
    assert set(gathers(max_reuse_bytes=0).values()) == {4}
    # a block has 56 elements of 8 bytes, the head 21, the scale is 1: with the others of an iteration, 512 to 760 bytes
    sizes = {"blocks.0": 56 * 8, "blocks.1": 56 * 8, "head": 21 * 8 + 24, "scale": 32}
    limit = sum(sizes.values()) - sizes["blocks.0"]
    assert gathers(max_reuse_bytes=limit) == {"blocks.0": 1, "blocks.1": 1, "head": 4, "scale": 4}
    assert set(gathers(max_reuse_bytes=limit - 1).values()) == {4}


@pytest.mark.slow
def test_a_unit_that_an_iteration_gathers_twice_stays_once():
    """`remat` gathers it for the forward pass, and again for the backward pass."""
    block = fzero.remat(lambda w, x: torch.tanh(x @ fzero.gather(w)["w"]))
    mesh = fzero.mesh(dp=2)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any, x: Any) -> torch.Tensor:
            for w in params:
                x = block(w, x)
            return x.square().sum()

        value, grads = fzero.value_and_grad(loss, micro_batches=3, gather=False)(params, batch)
        updates, state = ADAMW.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    step = fzero.shard(train_step, stage=3, mesh=mesh, units=lambda path, leaf: path.split(".")[0])
    params = [{"w": torch.randn(4, 4)} for _ in range(3)]
    jitted = fzero.jit(step, backend="fx", max_reuse_bytes=math.inf, bucket_bytes=0)
    bitwise(*train_both(step, jitted, params, ADAMW, [torch.randn(12, 4)]))
    args = (*step.init(params, ADAMW), mesh.split(torch.randn(12, 4)))
    plan = fzero.plan(jitted, *args, world_size=2)
    assert [c.times for c in plan.collectives if c.kind == "all_gather"] == [1, 1, 1]
    assert max(plan.live_of("gathered")) == 3 * 16 * 4
    # with the other two units of an iteration, each counted once, it still has room
    jitted = fzero.jit(step, backend="fx", max_reuse_bytes=2 * 16 * 4, bucket_bytes=0)
    plan = fzero.plan(jitted, *args, world_size=2)
    assert [c.times for c in plan.collectives if c.kind == "all_gather"] == [1, 1, 1]


def test_schedules_order_the_operations_within_loops():
    """The same settings are tried as for the iterations one by one, and gathers start ahead only where they fit."""
    looped, flat = with_and_without_a_loop(3)

    def list_peaks(plan: fzero.graph.Plan) -> dict[Any, int]:
        before = (plan.settings, plan.peak_bytes)
        return {tuple(s.values()): peak for s, peak in [before, *[r[:2] for r in plan.rejected]]}

    def ways(plan: fzero.graph.Plan) -> set[Any]:
        return {settings[-2:] for settings in list_peaks(plan)}

    assert ways(looped) == ways(flat) == {(0, 0), (0, 1), ("fitting", 0), ("fitting", 1)}
    assert looped.settings["bucket_bytes"] == flat.settings["bucket_bytes"] > 0
    leanest = min(peak for settings, peak in list_peaks(looped).items() if settings[-2:] == (0, 0))
    assert all(peak <= leanest for settings, peak in list_peaks(looped).items() if settings[-2:] == ("fitting", 0))


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), [1, 2]))
def test_sums_of_gradients_are_gradients_in_the_plan(stage):
    """At stage 1 they are whole."""
    step = fzero.shard(
        train_step_for(gpt_loss, ADAMW, micro_batches=4), stage=stage, mesh=fzero.mesh(dp=2), check=False
    )
    params = gpt_params(width=32, layers=2)
    args = (*step.init(params, ADAMW), step.mesh.split(torch.randint(37, (8, 17))))
    plan = fzero.plan(step, *args, world_size=2)
    whole = sum(4 * x.numel() for x in tree.tensors(params))
    assert max(plan.live_of("gradients")) >= (whole if stage == 1 else whole // 2)
    assert not any("full" in r.label and r.bytes > 1000 for r in plan.ranges if r.kind == "activations")


@pytest.mark.slow
def test_gathers_start_ahead_in_a_loop_as_far_as_there_is_room():
    """A budget of little more than what the schedule takes that gathers ahead everywhere leaves it as it is."""
    step = fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2), check=False)
    args = (*step.init(gpt_params(width=32, layers=3), ADAMW), step.mesh.split(torch.randint(37, (6, 17))))
    traced = entry_of(step, *args, world_size=2)

    def make_plan(**options: Any) -> fzero.graph.Plan:
        return plan_of(traced, **{**LEAST, **options})

    lean, ahead = make_plan(prefetch=0), make_plan(prefetch="fitting", memory_budget=10**9)
    unit = max(c.bytes for c in ahead.collectives)
    just = make_plan(prefetch="fitting", memory_budget=ahead.peak_bytes + unit)
    assert lean.peak_bytes < just.peak_bytes == ahead.peak_bytes
    assert just.seconds == ahead.seconds < lean.seconds


def rank_of(factor: float, **options: Any) -> Any:
    """The traced and the scheduled graph of one rank's step whose loss has a factor."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return mlp_loss(params, batch) * factor

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(6)))
    jitted = fzero.jit(
        step.on_mesh(_one_rank.planned_mesh((("dp", 2),))), backend="fx", max_reuse_bytes=0, bucket_bytes=0, **options
    )
    jitted.plan(*_one_rank.one_rank_tree(args, {"dp": 2}, all_ranks=True))
    (entry,) = jitted._entries.values()
    return entry.traced.graph, entry.best.graph


def test_the_trace_agreement_of_ranks_covers_loops():
    """Two steps that differ in the body of a loop are two, and so are two orders of its collectives."""
    orders = [{"prefetch": 0, "in_flight": 0}, {"prefetch": 2, "in_flight": 1}]
    (double, lean), (triple, _), (_, ahead) = rank_of(2.0, **orders[0]), rank_of(3.0), rank_of(2.0, **orders[1])
    differing = [a for a, b in zip(*map(_trace_agreement._node_signatures, (double, triple)), strict=True) if a != b]
    assert len(differing) > 1 and all("2.0" in a for a in differing)
    assert (
        _trace_agreement._collective_order_digest(lean)
        == _trace_agreement._collective_order_digest(rank_of(2.0, **orders[0])[1])
        != _trace_agreement._collective_order_digest(ahead)
    )


@pytest.mark.parametrize("what", ["a part", "a sum of a part"])
def test_values_gathered_from_an_iterations_part_stay_in_the_iteration(what):
    mesh = fzero.mesh(dp=2)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        all_of_it = fzero.collectives.all_gather(x if what == "a part" else x.sum(0, keepdim=True))
        return (params["w"] * all_of_it).square().sum()

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=3, mesh=mesh, check=False)
    jitted = fzero.jit(step, backend="fx", max_reuse_bytes=math.inf)
    bitwise(*train_both(step, jitted, {"w": torch.randn(4)}, ADAMW, [torch.randn(12, 4)]))
    args = (*step.init({"w": torch.randn(4)}, ADAMW), mesh.split(torch.randn(12, 4)))
    plan = fzero.plan(jitted, *args, world_size=2)
    gathers = sorted([(c.unit, c.times) for c in plan.collectives if c.kind == "all_gather"])
    assert gathers == [("w", 1), ("w", 3)]  # the parameter's, and that of what it is applied to


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_plan_does_not_grow_with_the_micro_batches(stage):
    step = [
        fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=k), stage=stage, mesh=fzero.mesh(dp=2))
        for k in (3, 48)
    ]
    few, many = [
        fzero.plan(fzero.jit(s, backend="fx"), *s.init(mlp_params(), ADAMW), s.mesh.split(mlp_batch(2 * k)))
        for s, k in zip(step, (3, 48), strict=True)
    ]
    assert [o.target.replace("48", "3") for o in many.operations] == [o.target for o in few.operations]
    assert many.added_bytes == few.added_bytes
    assert {o.times for o in many.operations} == {1, 48} and "a loop of 48 iterations" in {
        o.target for o in many.operations
    }
    assert [c.times for c in many.collectives] == [16 * c.times if c.times > 1 else 1 for c in few.collectives]
    assert (" times)" in many.details()) == any(c.times > 1 for c in many.collectives)
    reduced = [c for c in many.collectives if c.kind == "reduce_scatter"]
    moved = format_bytes(sum(c.bytes * c.times for c in reduced))
    assert f"{sum(c.times for c in reduced):>4} x reduce_scatter  {moved:>10}" in str(many) or not reduced
    moved = sum(c.bytes * c.times for c in many.collectives)
    assert f"{sum(c.times for c in many.collectives)} collectives move {moved / 1000:,.1f} kB" in str(many)


def test_a_loop_is_dumped_into_a_folder_of_its_own(tmp_path):
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(12)))
    plan = fzero.plan(fzero.jit(step, backend="fx", dump=tmp_path), *args, world_size=4)
    rows = [line.split() for line in (tmp_path / "peaks.txt").read_text().splitlines() if " schedule " in line]
    assert [row[4] for row in rows] == [f"{plan.peak_bytes:,}"]
    text = (tmp_path / "loop" / "schedule.txt").read_text()
    assert "train_step, loop" in text and "reduce_scatter_tensor" in text
    assert "reduce_scatter_tensor" not in (tmp_path / "schedule.txt").read_text()
