"""The table of stages: a further stage is a further row."""

import pytest

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import is_box
from fzero.testing import assert_trees_close
from fzero.zero import _stages
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


def test_a_stage_is_a_row_of_layouts():
    steps = [fzero.shard(lambda p, s, x: (p, s), stage=stage, mesh=fzero.mesh(dp=2)) for stage in range(4)]
    assert [step.layout.params for step in steps] == ["replicated"] * 3 + ["sharded"]
    assert [step.layout.grads for step in steps] == ["replicated", "once", "each", "each"]
    assert [step.layout.opt_state for step in steps] == ["replicated"] + ["sharded"] * 3


@pytest.mark.parametrize("n", [1, 3])
def test_a_fifth_row_of_stages_is_another_way_to_shard(n, monkeypatch):
    """Parameters in shards, and gradients whole until the last micro-batch: fewer reductions, more memory."""
    rows = (*_stages.STAGES, fzero.zero.StageLayouts(params="sharded", grads="once", opt_state="sharded"))
    monkeypatch.setattr(_stages, "STAGES", rows)
    opt, mesh, reductions = optim.adamw(1e-2), fzero.mesh(dp=n), []
    for stage in (3, 4):
        step = fzero.shard(train_step_for(mlp_loss, opt, micro_batches=3), stage, mesh)
        state, expected = step.init(mlp_params(), opt), (mlp_params(), opt.init(mlp_params()))
        for i in range(3):
            with fzero.collectives.record() as log:
                *state, _ = step(*state, mesh.split(mlp_batch(3 * n, seed=i)))
            *expected, _ = train_step_for(mlp_loss, opt)(*expected, mlp_batch(3 * n, seed=i))
        reductions.append(sum(event.kind == "reduce_scatter" for event in log.events))
        assert_trees_close(step.gather(state[0]), expected[0])
        assert all(isinstance(x, fzero.sharding.Shard | fzero.sharding.Slot) for x in tree.flatten(state[0], is_box)[0])
    assert reductions[0] == 3 * reductions[1]
    with pytest.raises(ValueError, match="stage=5: expected a stage of ZeRO, 0 to 4"):
        fzero.shard(lambda p, s, x: (p, s), 5, mesh)
