"""Split sequences beside other axes, offload and checkpoints: still training with whole sequences."""

import itertools
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases, train_step_for
from tests.parallel.context.model import (
    OPT,
    assert_trains_as_whole,
    batch_of,
    expert_loss,
    expert_params,
    loss_for,
    params_of,
)

EXPERT_CASES = itertools.product(
    [({"dp": 1, "cp": 2, "ep": 2}, "ep"), ({"ep": 2, "cp": 2, "dp": 2}, "ep"), ({"dp": 2, "cp": 2}, "cp")],
    ["ring", None],
    ["batch", "sequence"],
    [0, 2, 3],
    ["vmap", "lockstep"],
)
FEW_EXPERTS = [
    (({"dp": 1, "cp": 2, "ep": 2}, "ep"), "ring", "sequence", 3, "vmap"),
    (({"dp": 2, "cp": 2}, "cp"), None, "batch", 2, "lockstep"),
]


@pytest.mark.parametrize("axes,method,over,stage,simulate", cases(FEW_EXPERTS, EXPERT_CASES))
def test_experts_may_lie_along_their_own_axis_or_that_of_tokens(axes, method, over, stage, simulate):
    """The balance loss of each sequence is that of whole ones."""
    sizes, axis = axes
    mesh = fzero.mesh(**sizes, simulate=simulate)
    train_step = train_step_for(expert_loss(method, axis, over), OPT)
    step = fzero.shard(train_step, stage=stage, mesh=mesh, split=moe.split_rule("experts", axis=axis))
    assert_trains_as_whole(train_step, expert_params(), step, [batch_of(i, True) for i in range(2)])


@pytest.mark.parametrize("jit", [False, True])
def test_a_capacity_of_a_sequence_that_no_rank_holds_is_refused(jit):
    """Its queues are those of whole sequences; else other choices would be dropped on each mesh."""

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = params["embed"][batch["tokens"]]
        routing = moe.route(x @ params["router"], 2)
        return moe.layer(lambda p, r, linear: linear(r, p["up"]), params["experts"], x, routing, capacity=1.0).mean()

    mesh = fzero.mesh(dp=1, cp=2)
    step = fzero.shard(train_step_for(loss_fn, OPT), stage=3, mesh=mesh)
    step = fzero.jit(step, backend="fx") if jit else step
    with pytest.raises(ValueError, match=r"capacity=1\.0 counts the choices of a whole sequence.*over 'cp'.*=None"):
        step(*step.init(expert_params(), OPT), context.split(mesh, batch_of(0)))


# Checkpoints and offload.


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_do_not_depend_on_how_sequences_were_split(tmp_path, stage):
    """Saved at cp=4, read at any other, and trained on: whole sequences throughout."""
    train_step = train_step_for(loss_for(causal=True), OPT)
    batches = [batch_of(i) for i in range(2)]
    params = params_of()
    expected = params, OPT.init(params)
    for batch in batches:
        *expected, wanted = train_step(*expected, batch)
    mesh = fzero.mesh(dp=1, cp=4)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    *state, _ = step(*step.init(params, OPT), context.split(mesh, batches[0]))
    fzero.checkpoint.save(tmp_path / "files", tuple(state), mesh)
    for axes, other in (({"dp": 1, "cp": 1}, 3), ({"dp": 2, "cp": 2}, 2), ({"cp": 2}, 0), ({"dp": 4}, 1)):
        other_mesh = fzero.mesh(**axes)
        resumed = fzero.shard(train_step, stage=other, mesh=other_mesh)
        zeros = tree.map(torch.zeros_like, params)
        state = fzero.checkpoint.load(tmp_path / "files", resumed.init(zeros, OPT), other_mesh)
        *state, loss = resumed(
            *state, context.split(other_mesh, batches[1]) if "cp" in axes else other_mesh.split(batches[1])
        )
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        assert_trees_close(resumed.gather(tuple(state)), tuple(expected), rtol=1e-11)
    like = params, OPT.init(params)
    whole = fzero.checkpoint.load(tmp_path / "files", like)
    *state, loss = train_step(*whole, batches[1])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("ratio,stage,jit", [(0.4, 3, True), (1, 2, False)])
def test_a_step_with_optimizer_state_in_host_memory_is_exact(ratio, stage, jit):
    opt = optim.offload(OPT, ratio)
    train_step = train_step_for(loss_for(causal=True), opt)
    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(dp=2, cp=2))
    plain = train_step_for(loss_for(causal=True), OPT)
    run = fzero.jit(step, backend="fx", **LEAST) if jit else step
    params, batches = params_of(), [batch_of(i) for i in range(2)]
    state, expected = step.init(params, opt), (params, OPT.init(params))
    for batch in batches:
        *state, loss = run(*state, context.split(step.mesh, batch))
        *expected, wanted = plain(*expected, batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    assert_trees_close(step.gather(state[0]), expected[0], rtol=1e-11)
