"""Collectives over one rank are dropped, as in a step that shares its experts among all its ranks."""

from collections import Counter

import pytest
import torch

import fzero
from fzero.graph.ir import aten, is_collective
from fzero.graph.ir._storages import storages
from fzero.graph.passes import drop_lone_collectives
from fzero.graph.planning.memory._live_ranges import live_ranges, peak_bytes
from fzero.parallel.experts import split_rule
from tests.graph.graphs import Builder, bits, run
from tests.helpers import ALL_STAGES, cases, train_step_for
from tests.parallel.experts.model import OPT, batch_of, loss_for, params_of


def test_a_gathered_unit_lies_in_the_argument():
    b = Builder(1, [(16,), (1, 4)], [{}, {}], False)
    shard, x = b.inputs
    y = b(aten.mm.default, x, b(aten.t.default, b.fit(b.gather(shard), (4, 4))))
    before = b.done([y, b.reduce_scatter(b.flat(b(aten.mul.Tensor, y, 0.5)))])
    after = drop_lone_collectives(before, ["g"])
    assert sum(is_collective(n) for n in after.nodes) == 0  # the sum's operand is the graph's own, so it is a result
    assert peak_bytes(after) <= peak_bytes(before) - 32 and not [r for r in live_ranges(after) if r.kind == "gathered"]
    assert next(storages(after).indices[n][0] for n in after.nodes if n.target is aten.view.default) == 0
    args = [torch.arange(16.0), torch.ones(1, 4)]
    assert [bits(x) for x in run(after, args, 1)] == [bits(x) for x in run(before, args, 1)]


def test_collectives_over_several_ranks_and_those_that_hold_a_result_stay():
    b = Builder(1, [(4,)], [{}], False)
    (x,) = b.inputs
    gather, apart = b.gather(x, "drop_lone_collectives"), b.all_reduce(x, "others")
    graph = b.done([b(aten.view.default, gather, [2, 2]), b(aten.mul.Tensor, apart, 2), b(aten.mul.Tensor, gather, 2)])
    assert sum(is_collective(n) for n in drop_lone_collectives(graph, ["drop_lone_collectives"]).nodes) == 2
    assert drop_lone_collectives(graph, []) is graph


def test_two_results_of_one_operand_have_memory_of_their_own():
    b = Builder(1, [(4,)], [{}], False)
    y = b(aten.mul.Tensor, b.inputs[0], 2)
    before = b.done([b.gather(y), b.all_reduce(y)])
    after = drop_lone_collectives(before, ["g"])
    assert sum(is_collective(n) for n in after.nodes) == 1
    first, second = (x.data_ptr() for x in run(after, [torch.ones(4)], 1))
    assert first != second


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_plan_over_one_rank_has_no_collectives(stage):
    mesh = fzero.mesh(dp=1)
    step = fzero.shard(train_step_for(lambda p, x: (x @ p["w"]).square().mean(), OPT), stage, mesh)
    args = (*step.init({"w": torch.ones(4, 3)}, OPT), mesh.split(torch.ones(8, 4)))
    assert not fzero.plan(fzero.jit(step), *args).collectives
    assert fzero.plan(fzero.jit(step), *args, world_size=2).collectives


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), [0]))
def test_experts_that_no_other_rank_has_are_not_sent(stage):
    mesh = fzero.mesh(dp=1, ep=2)
    step = fzero.shard(train_step_for(loss_for(), OPT), stage=stage, mesh=mesh, split=split_rule("experts"))
    args = (*step.init(params_of(), OPT), mesh.split(batch_of(4)))
    over = Counter(c.axis for c in fzero.plan(fzero.jit(step, recompute=False), *args).collectives)
    assert over["dp"] == 0 and over["ep"] and over["dp,ep"]
