"""The law of laws: training with parts of layers on any mesh, at any stage, is dense training of the same batch."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import assert_equivalent, assert_trees_close
from tests.helpers import ALL_STAGES, cases, examples, train_step_for
from tests.parallel.tensor.model import OPT, SPLIT, TIED, batch_of, loss_for, params_of, plain_loss

BATCHES = [batch_of(seed=i) for i in range(2)]
MESHES = st.sampled_from(
    [
        fzero.mesh(dp=1, tp=2),
        fzero.mesh(dp=1, tp=4),
        fzero.mesh(dp=2, tp=2),
        fzero.mesh(tp=2, dp=2),
        fzero.mesh(dp=1, tp=2, simulate="lockstep"),
        fzero.mesh(dp=2, tp=2, simulate="lockstep"),
    ]
)


@examples(2, 12)
@given(MESHES, st.integers(0, 3), st.integers(1, 2), st.booleans(), st.booleans(), st.booleans())
def test_tensor_parallel_training_on_any_mesh_equals_dense(mesh, stage, micro, sequence, remat, tied):
    """It has a global clip, micro-batches, remat, tied embeddings, and a residual stream split or not: to 1e-12."""
    params = params_of(tied)
    mine, plain = (train_step_for(f, OPT, micro_batches=micro) for f in (loss_for(sequence, remat), plain_loss))
    options: Any = {"split": TIED if tied else SPLIT, "axis": "dp"}
    assert_equivalent(mine, params, OPT, BATCHES, (stage,), meshes=[mesh], **options)
    for batch in BATCHES:  # and the function without axes is the plain one
        actual, expected = (step(params, OPT.init(params), batch) for step in (mine, plain))
        assert_trees_close(actual, expected)


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
@pytest.mark.parametrize("mesh", [fzero.mesh(dp=2, tp=2), fzero.mesh(dp=1, tp=2, simulate="lockstep")], ids=repr)
def test_adafactor_on_parts_of_leaves_is_adafactor_on_whole_leaves(mesh, stage):
    opt = optim.adafactor(1e-2, eps=1e-3, weight_decay=0.1, mask=lambda p: tree.map(lambda x: x.ndim > 1, p))
    mine, params = train_step_for(loss_for(False, False), opt), params_of(False)
    assert_equivalent(mine, params, opt, BATCHES, (stage,), meshes=[mesh], split=SPLIT, axis="dp")
    step = fzero.shard(mine, stage, mesh, split=SPLIT, axis="dp")
    rows = step.gather(step.init(params, opt)[1]).rows  # a checkpoint of it loads on any mesh
    assert {tuple(x.shape) for x in tree.tensors(rows)} == {tuple(x.shape) for x in tree.tensors(opt.init(params).rows)}


@pytest.mark.slow
def test_a_plan_names_the_layers_whose_activations_are_summed():
    """It does not name the loss, which is a number."""
    mesh, params = fzero.mesh(dp=2, tp=2), params_of(False)
    step = fzero.shard(train_step_for(loss_for(False, False), OPT), 2, mesh, axis="dp", split=SPLIT)
    plan = fzero.plan(step, *step.init(params, OPT), mesh.split(BATCHES[0], "dp"))
    results = {(c.unit, c.axis) for c in plan.collectives if c.kind == "all_reduce" and c.elements > 2 * 10}
    assert {("blocks.0", "tp"), ("blocks.1", "tp")} <= results, results
    assert "(metric)" in {c.unit for c in plan.collectives if c.elements <= 2}  # an all_reduce counts twice
