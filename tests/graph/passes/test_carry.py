"""Reductions that go on from one iteration of a loop to the next. On processes: tests/distributed/schedule_cases.py."""

import functools
import itertools
import operator
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.graph import _candidates
from fzero.graph._pass_manager import PassContext, PassManager, PassSettings
from fzero.graph._schedule_options import ScheduleOptions
from fzero.graph.ir import copy_graph, graph_results, is_carried, is_collective, is_input, is_reduce_collective, is_wait
from fzero.graph.loop._loop import Loop, node_loop
from fzero.graph.passes import _carry
from fzero.graph.planning import _clocks, _hardware
from fzero.graph.planning.memory._live_ranges import (
    iteration_peak_bytes,
    iteration_ranges,
    live_bytes,
    live_ranges,
    peak_bytes,
)
from tests.graph.helpers import entry_of, plan_of
from tests.helpers import cases, train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params

ADAMW = optim.adamw(1e-3)


@functools.cache
def entry(stage: int, vocab: int = 37, world: Any = (("dp", 2),), micro_batches: int = 4) -> Any:
    """Trace a step of one rank of a world that is not at hand."""
    over = "shard" if len(world) > 1 else None
    mesh = fzero.mesh(**{axis: 2 for axis, _ in world})
    step = train_step_for(gpt_loss, ADAMW, micro_batches=micro_batches)
    step = fzero.shard(step, stage=stage, mesh=mesh, over=over, check=False)
    tokens = torch.randint(37, (4 * mesh.size, 9))
    args = (*step.init(gpt_params(width=16, layers=2, vocab=vocab), ADAMW), mesh.split(tokens))
    return entry_of(step, *args, world_size=dict(world))


def loops(graph: Any) -> list[Loop]:
    return [loop for n in graph.nodes if (loop := node_loop(n))]


def schedule_carry(traced: Any, in_flight: int, across_iterations: bool = True, bucket_bytes: int = 0) -> Any:
    settings = PassSettings(
        recompute=False,
        max_reuse_bytes=0,
        bucket_bytes=bucket_bytes,
        in_flight=in_flight,
        across_iterations=across_iterations,
    )
    return PassManager(traced, PassContext()).schedule_with(settings)


@pytest.mark.parametrize("stage,in_flight", cases([(2, 1), (2, 9)], itertools.product((2, 3), (1, 2, 9))))
def test_a_carried_reduction_is_awaited_before_the_next_iteration_starts_its_own(stage, in_flight):
    graph = schedule_carry(entry(stage).traced.graph, in_flight)
    (loop,) = loops(graph)
    nodes = list(loop.body.nodes)
    pending = [n for n in nodes if is_carried(n)]
    reductions = [n for n in nodes if is_reduce_collective(n)]
    assert loop.carried_count == len(pending) == min(in_flight, len(reductions)) and all(is_input(p) for p in pending)
    # nobody waits for them in this iteration
    assert graph_results(loop.body)[-loop.carried_count :] == reductions[-loop.carried_count :]
    for i, p in enumerate(pending):
        (wait,) = p.users
        assert is_wait(wait) and p.meta["carried"] is reductions[len(reductions) - loop.carried_count + i]
        assert nodes.index(wait) < nodes.index(reductions[i]), "one too many is on its way"
    assert len([n for n in graph.nodes if is_wait(n) and is_carried(n.all_input_nodes[0])]) == loop.carried_count


def test_all_reductions_of_a_bucket_are_carried_together():
    graph = schedule_carry(entry(2).traced.graph, 1, bucket_bytes=1 << 20)
    (loop,) = loops(graph)
    starts = {n.all_input_nodes[0] for n in graph_results(loop.body)[-loop.carried_count :]}
    assert loop.carried_count > 1 and len(starts) == 1 and all(n.target is operator.getitem for n in starts.pop().users)


@pytest.mark.slow
def test_carrying_reductions_keeps_the_number_of_collectives():
    traced = entry(3).traced.graph
    (one,), (other,) = [loops(schedule_carry(traced, 1, across)) for across in (False, True)]
    names = [[n.name for n in loop.body.nodes if is_collective(n)] for loop in (one, other)]
    assert names[0] == names[1] and (one.carried_count, other.carried_count) == (0, 1)


def test_a_plan_counts_reductions_in_flight():
    """The operand, and the shard that arrives, from the iteration's end to the next one's wait."""
    traced = entry(2).traced.graph
    graph = schedule_carry(traced, 1)
    (loop,) = loops(graph)
    nodes = list(loop.body.nodes)
    pending = next(n for n in nodes if is_carried(n))
    (wait,) = pending.users
    started = pending.meta["carried"]
    full = sum(a.meta["val"].numel() * 4 for a in started.all_input_nodes)
    on_the_way = [r for r in iteration_ranges(loop) if r.start == nodes.index(pending)]
    assert sorted((r.bytes, r.stop >= nodes.index(wait)) for r in on_the_way) == [(full // 2, True), (full, True)]
    last = [r for r in iteration_ranges(loop) if r.start == nodes.index(started)]
    assert [(r.bytes, r.stop) for r in last] == [(full // 2, len(nodes) - 1)]
    packed = max((r for r in iteration_ranges(loop) if r.bytes == full), key=lambda r: r.start)
    assert nodes.index(pending) < packed.start < nodes.index(started) and packed.stop == len(nodes) - 1
    assert iteration_peak_bytes(loop) >= iteration_peak_bytes(loops(schedule_carry(traced, 1, False))[0])
    assert peak_bytes(graph) == max(live_bytes(live_ranges(graph), len(graph.nodes)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_plan_of_a_carried_reduction_counts_the_parts_of_all_ranks(ranks):
    graph = schedule_carry(entry(2, world=(("dp", ranks),)).traced.graph, 1)
    (loop,) = loops(graph)
    pending = next(n for n in loop.body.nodes if is_carried(n))
    shard = pending.meta["val"].numel() * 4
    held = [r.bytes for r in iteration_ranges(loop) if r.start == list(loop.body.nodes).index(pending)]
    assert sorted(held) == sorted([shard, ranks * shard + (ranks - 2) * shard])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_reduction_behind_the_loop_is_not_carried(stage):
    assert [loop.carried_count for loop in loops(schedule_carry(entry(stage).traced.graph, 1))] == [0]


def test_sums_over_replicas_follow_the_loop():
    graph = schedule_carry(entry(3, world=(("replica", 2), ("shard", 2))).traced.graph, 1)
    (loop,) = loops(graph)
    kinds = [
        {str(n.target).split(".")[1] for n in nodes if is_reduce_collective(n)}
        for nodes in (loop.body.nodes, graph.nodes)
    ]
    assert loop.carried_count == 1 and kinds == [{"reduce_scatter_tensor"}, {"all_reduce_"}]


def show_as_row(body: Any, chain: Any) -> Any:
    """Show a user the reduced gradient of each micro-batch."""
    return chain.wait


def scale_gradient(body: Any, chain: Any) -> None:
    """Scale a reduced gradient before it is added."""
    with body.inserting_before(chain.add):
        double = body.call_function(torch.ops.aten.mul.Tensor, (chain.add.args[1], 2.0))
    double.meta = dict(chain.add.args[1].meta)
    chain.add.args = (chain.add.args[0], double)


def show_sum_before(body: Any, chain: Any) -> Any:
    """Show a user the sum before each micro-batch."""
    with body.inserting_before(chain.add):
        product = body.call_function(torch.ops.aten.mul.Tensor, (chain.add.args[0], 2.0))
    product.meta = dict(chain.add.args[0].meta)
    return product


@pytest.mark.parametrize("change", [show_as_row, scale_gradient, show_sum_before])
def test_a_reduced_gradient_with_another_reader_is_not_carried(change):
    graph = schedule_carry(entry(2).traced.graph, 1, across_iterations=False)
    (node,) = [n for n in graph.nodes if node_loop(n)]
    loop: Any = node_loop(node)
    *_, start = [n for n in loop.body.nodes if is_reduce_collective(n)]
    (chain,) = _carry._list_chains(start, loop.body, loop)
    assert [loop.carried_count for loop in loops(_carry.carry(graph, 1))] == [1]
    if (row := change(loop.body, chain)) is not None:
        output = next(n for n in loop.body.nodes if n.op == "output")
        output.args = ((*graph_results(loop.body), row),)
        node.meta["val"] = (*node.meta["val"], row.meta["val"].new_empty((4, *row.meta["val"].shape)))
    assert [loop.carried_count for loop in loops(_carry.carry(graph, 1))] == [0]


@pytest.mark.slow
def test_of_the_carried_schedules_that_fit_the_fastest_is_chosen():
    """A large embedding, whose gradient is the last, has no computation left in its own iteration to run beside."""
    lean, fast = [plan_of(entry(2, vocab=20_000), memory_budget=budget) for budget in (None, 10**9)]
    assert fast.settings["across_iterations"] and "across_iterations" not in lean.settings
    without = {k: v for k, v in fast.settings.items() if k != "across_iterations"}
    (twin,) = [r for r in fast.rejected if r.settings == without]
    assert fast.seconds < twin.seconds and fast.peak_bytes > twin.peak_bytes


def test_a_carried_schedule_fits_a_budget_of_its_peak_and_not_one_byte_less():
    peak = plan_of(entry(2, vocab=20_000), memory_budget=10**9).peak_bytes
    fits, lean = [plan_of(entry(2, vocab=20_000), memory_budget=peak - less) for less in (0, 1)]
    assert fits.peak_bytes == peak and fits.settings["across_iterations"] and lean.peak_bytes < peak


def test_the_cost_model_charges_a_carried_reduction(monkeypatch):
    traced = entry(2, vocab=20_000).traced.graph
    slow_link = _hardware.HARDWARE["cpu"]._replace(link_bandwidth=1e5)  # the step is hardly anything but messages
    monkeypatch.setitem(_hardware.HARDWARE, "cpu", slow_link)
    carried, waited = [_clocks.estimate_seconds(schedule_carry(traced, 1, across_iterations=x)) for x in (True, False)]
    assert carried == pytest.approx(waited, rel=0.05)


def test_no_reduction_is_carried_without_reductions_in_flight():
    assert "across_iterations" not in str(plan_of(entry(2), memory_budget=10**9, in_flight=0).rejected)


@pytest.mark.slow
def test_schedules_that_carry_nothing_are_no_candidates():
    result = plan_of(entry(2, micro_batches=1), memory_budget=10**9)
    assert not any("across_iterations" in r.settings for r in result.rejected)
    assert _candidates._carries_reductions(schedule_carry(entry(2).traced.graph, 1))


def test_reductions_are_tried_in_flight_also_where_all_are_within_a_loop():
    graph = copy_graph(entry(2).traced.graph)
    for reduction in [n for n in graph.nodes if is_reduce_collective(n)]:  # that of the loss, outside the loop
        for wait in list(reduction.users):
            wait.replace_all_uses_with(reduction.all_input_nodes[0])
            graph.erase_node(wait)
        graph.erase_node(reduction)
    options = ScheduleOptions(
        prefetch=0,
        bucket_bytes=0,
        max_reuse_bytes=0,
        recompute=False,
        recast=False,
        across_iterations=False,
        send_early=False,
    )
    tried = _candidates.candidates(graph, PassContext(), options)
    assert {c.pass_settings.in_flight for c in tried} == {0, 1} and loops(graph)
