"""Reductions that go on from one turn of a loop to the next. On processes: tests/distributed/jit_cases.py."""

import operator
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.graph import _absent, _choose
from fzero.graph._pipeline import Choice, Given, Pipeline
from fzero.graph.ir import is_carried, is_collective, is_input, is_reduction, is_wait, results
from fzero.graph.loops import Loop, loop_of
from fzero.graph.plan._liveness import live_bytes, live_ranges, most_in_a_turn, peak_bytes, ranges_of_a_turn
from tests.helpers import train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params

ADAMW = optim.adamw(1e-3)


def entry(train_step: Any, stage: int, ranks: int = 2, vocab: int = 37, **knobs: Any) -> Any:
    """Trace a step of one rank of a world that is not at hand."""
    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(dp=2), check=False)
    args = (*step.init(gpt_params(width=16, layers=2, vocab=vocab), ADAMW), step.mesh.split(torch.randint(37, (8, 9))))
    args = _absent.as_one_rank_holds(args, {"dp": ranks}, stacked=True)
    jitted = fzero.jit(step._on(_absent.absent((("dp", ranks),))), **knobs)
    jitted.plan(*args)
    (found,) = jitted._entries.values()
    return found


def plain() -> Any:
    return train_step_for(gpt_loss, ADAMW, micro_batches=4)


def loops(graph: Any) -> list[Loop]:
    return [loop for n in graph.nodes if (loop := loop_of(n))]


def scheduled(traced: Any, in_flight: int, across_turns: bool = True, bucket_bytes: int = 0) -> Any:
    choice = Choice(False, 0, bucket_bytes, 0, in_flight, across_turns)
    return Pipeline(traced, Given()).scheduled(choice)


@pytest.mark.parametrize("in_flight", [1, 2, 9])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_turn_waits_before_it_starts_as_many(stage, in_flight):
    graph = scheduled(entry(plain(), stage).traced.graph, in_flight)
    (loop,) = loops(graph)
    nodes = list(loop.body.nodes)
    pending = [n for n in nodes if is_carried(n)]
    reductions = [n for n in nodes if is_reduction(n)]
    assert loop.carried == len(pending) == min(in_flight, len(reductions)) and all(is_input(p) for p in pending)
    assert results(loop.body)[-loop.carried :] == reductions[-loop.carried :]  # nobody waits for them in this turn
    for i, p in enumerate(pending):
        (wait,) = p.users
        assert is_wait(wait) and p.meta["carried"] is reductions[len(reductions) - loop.carried + i]
        assert nodes.index(wait) < nodes.index(reductions[i]), "one too many is on its way"
    assert len([n for n in graph.nodes if is_wait(n) and is_carried(n.all_input_nodes[0])]) == loop.carried


def test_a_bucket_is_carried_whole():
    graph = scheduled(entry(plain(), 2).traced.graph, 1, bucket_bytes=1 << 20)
    (loop,) = loops(graph)
    starts = {n.all_input_nodes[0] for n in results(loop.body)[-loop.carried :]}
    assert loop.carried > 1 and len(starts) == 1 and all(n.target is operator.getitem for n in starts.pop().users)


def test_the_same_collectives_run_as_often():
    traced = entry(plain(), 3).traced.graph
    (one,), (other,) = [loops(scheduled(traced, 1, across)) for across in (False, True)]
    names = [[n.name for n in loop.body.nodes if is_collective(n)] for loop in (one, other)]
    assert names[0] == names[1] and (one.carried, other.carried) == (0, 1)


def test_a_plan_counts_what_is_on_its_way():
    """The operand, and the shard that arrives, from the turn's end to the next one's wait."""
    traced = entry(plain(), 2).traced.graph
    graph = scheduled(traced, 1)
    (loop,) = loops(graph)
    nodes = list(loop.body.nodes)
    pending = next(n for n in nodes if is_carried(n))
    (wait,) = pending.users
    started = pending.meta["carried"]
    full = sum(a.meta["val"].numel() * 4 for a in started.all_input_nodes)
    on_the_way = [r for r in ranges_of_a_turn(loop) if r.start == nodes.index(pending)]
    assert sorted((r.bytes, r.stop >= nodes.index(wait)) for r in on_the_way) == [(full // 2, True), (full, True)]
    last = [r for r in ranges_of_a_turn(loop) if r.start == nodes.index(started)]
    assert [(r.bytes, r.stop) for r in last] == [(full // 2, len(nodes) - 1)]
    packed = max((r for r in ranges_of_a_turn(loop) if r.bytes == full), key=lambda r: r.start)
    assert nodes.index(pending) < packed.start < nodes.index(started) and packed.stop == len(nodes) - 1
    assert most_in_a_turn(loop) >= most_in_a_turn(loops(scheduled(traced, 1, False))[0])
    assert peak_bytes(graph) == max(live_bytes(live_ranges(graph), len(graph.nodes)))


@pytest.mark.parametrize("ranks", [3, 8])
def test_with_more_ranks_their_parts_are_counted_too(ranks):
    graph = scheduled(entry(plain(), 2, ranks=ranks).traced.graph, 1)
    (loop,) = loops(graph)
    pending = next(n for n in loop.body.nodes if is_carried(n))
    shard = pending.meta["val"].numel() * 4
    held = [r.bytes for r in ranges_of_a_turn(loop) if r.start == list(loop.body.nodes).index(pending)]
    assert sorted(held) == sorted([shard, ranks * shard + (ranks - 2) * shard])


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_reduced_behind_the_loop_is_not_carried(stage):
    assert [loop.carried for loop in loops(scheduled(entry(plain(), stage).traced.graph, 1))] == [0]


def test_a_reduced_gradient_that_is_used_otherwise_is_waited_for_in_its_turn():
    traced = entry(plain(), 2).traced.graph
    (node,) = [n for n in traced.nodes if loop_of(n)]
    body = loop_of(node).body  # type: ignore[union-attr]
    *_, last = [n for n in body.nodes if is_wait(n)]
    output = next(n for n in body.nodes if n.op == "output")
    output.args = ((*results(body), last),)  # as a row: what a user sees of each micro-batch
    node.meta["val"] = (*node.meta["val"], last.meta["val"].new_empty((4, *last.meta["val"].shape)))
    assert [loop.carried for loop in loops(scheduled(traced, 1))] == [0]


def test_the_faster_of_those_that_fit_is_kept():
    """A large embedding, whose gradient is the last, has nothing in its own turn to go on beside."""
    lean, fast = [entry(plain(), 2, vocab=20_000, memory_budget=budget).plan for budget in (None, 10**9)]
    assert fast.settings["across_turns"] and "across_turns" not in lean.settings
    without = {k: v for k, v in fast.settings.items() if k != "across_turns"}
    (twin,) = [r for r in fast.rejected if r.settings == without]
    assert fast.seconds < twin.seconds and fast.peak_bytes > twin.peak_bytes


def test_nothing_is_carried_where_nothing_may_be_on_its_way():
    assert "across_turns" not in str(entry(plain(), 2, memory_budget=10**9, in_flight=0).plan.rejected)


def test_schedules_that_carry_nothing_are_no_candidates():
    found = entry(train_step_for(gpt_loss, ADAMW), 2, memory_budget=10**9)
    assert not any("across_turns" in r.settings for r in found.plan.rejected)
    assert _choose._carries(scheduled(entry(plain(), 2).traced.graph, 1))
