"""What is communicated and what is held: exactly ZeRO's formulas (arXiv:1910.02054, section 7), plus padding."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding import Shard
from fzero.sharding._boxes import is_box
from fzero.testing import trees, world_sizes
from tests.helpers import ALL_STAGES, cases, collectives_of, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params


def sizes(params: Any, n: int) -> tuple[int, int]:
    """Elements of a tree, without padding and with it."""
    boxes = fzero.mesh(dp=n).spmd(fzero.partition)(params)
    shards = [x for x in tree.flatten(boxes, is_box)[0] if isinstance(x, Shard)]
    return sum(x.spec.numel for x in shards), sum(x.spec.shard_numel * n for x in shards)


def expected_elements(stage: int, k: int, exact: int, padded: int) -> int:
    """Elements of a step with k micro-batches, by the words of the stage; an all_reduce needs no padding."""
    gathers, scatters, reduces = collectives_of(fzero.zero.STAGES[stage], k)
    return (gathers + scatters) * padded + 2 * reduces * exact


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_elements_of_the_first_stages_are_zeros(k):
    """The paper's volumes: 2Ψ, 2Ψ, (k + 1)Ψ, 2kΨ."""
    assert [expected_elements(stage, k, 1, 1) for stage in range(4)] == [2, 2, k + 1, 2 * k]


SOME = [("gpt", 3, 1), ("odd sizes", 8, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("model,n,k", cases(SOME, itertools.product(("gpt", "odd sizes"), (1, 2, 3, 8), (1, 4))))
def test_the_elements_that_each_stage_moves_are_those_of_the_table(model, n, k):
    if model == "gpt":
        params, loss, batch = gpt_params(), gpt_loss, torch.zeros(n * k, 9, dtype=torch.int64)
    else:
        params, loss, batch = mlp_params(torch.float32), mlp_loss, mlp_batch(n * k, dtype=torch.float32)
    opt, mesh = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)), fzero.mesh(dp=n)
    exact, padded = sizes(params, n)
    for stage in ALL_STAGES:
        step = fzero.shard(train_step_for(loss, opt, micro_batches=k), stage=stage, mesh=mesh)
        state = step.init(params, opt)
        with fzero.collectives.record() as log:
            step(*state, mesh.split(batch))
        units = len({e.unit for e in log.unit_events})
        assert log.elements == expected_elements(stage, k, exact, padded)
        assert log.bytes == 4 * log.elements
        assert {e.elements for e in log.other_events} == {2}  # the loss, and the norm where it is sharded
        gathers, scatters, reduces = (log.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
        of_unit = collectives_of(fzero.zero.STAGES[stage], k)
        assert (gathers, scatters, reduces) == tuple(units * count for count in of_unit)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("model", ["gpt", "odd sizes"])
def test_the_state_bytes_of_each_stage_are_those_of_the_table(model, n):
    """float32 Adam: p = 4, s = 8 bytes an element, and the 8 bytes of the count."""
    params = gpt_params() if model == "gpt" else mlp_params(torch.float32)
    exact, padded = sizes(params, n)
    step_for = train_step_for(mlp_loss, optim.adam(1e-3))
    for stage, row in enumerate(fzero.zero.STAGES):
        step = fzero.shard(step_for, stage=stage, mesh=fzero.mesh(dp=n))
        held = [padded // n if layout == "sharded" else exact for layout in (row.params, row.opt_state)]
        assert step.state_bytes(*step.init(params, optim.adam(1e-3))) == 4 * held[0] + 8 * held[1] + 8


@pytest.mark.slow
@examples(25, 50)
@given(trees(), world_sizes(), st.sampled_from(ALL_STAGES))
def test_state_bytes_count_the_shards_of_any_tree(params, n, stage):
    exact, padded = sizes(params, n)
    step = fzero.shard(train_step_for(mlp_loss, optim.sgd(0.1)), stage=stage, mesh=fzero.mesh(dp=n))
    sharded, _ = step.init(params, optim.sgd(0.1))
    assert step.state_bytes(sharded) == 8 * (padded // n if fzero.zero.STAGES[stage].shards_params else exact)


def test_padding_is_less_than_a_rank_a_unit():
    for n in range(1, 9):
        exact, padded = sizes(mlp_params(), n)
        assert exact <= padded < exact + 4 * n


def test_the_log_prints_as_a_table():
    with fzero.collectives.record() as log, fzero.collectives.record() as inner:
        fzero.mesh(dp=2).spmd(lambda p: fzero.reduce_scatter(p, like=fzero.partition(p)))({"w": torch.ones(3)})
    assert str(log) == str(inner)
    assert "reduce_scatter  dp      w                                  4            16" in str(log)


def test_nothing_is_recorded_after_the_block():
    with fzero.collectives.record() as log:
        pass
    fzero.mesh(dp=2).spmd(fzero.collectives.psum)(torch.ones(3))
    assert not log.other_events
