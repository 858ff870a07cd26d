"""Bad input of a pipeline is an error that names it, on every rank, and before anything is trained wrong."""

import re
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.parallel.pipeline.model import (
    block,
    first,
    last,
    make_batch,
    make_loss,
    make_params,
    train_on,
    train_plainly,
)


def raises(kind: Any, text: str) -> Any:
    return pytest.raises(kind, match=re.escape(text))


def test_arguments_of_pipeline_are_checked():
    for options, kind, said in (
        ({"micro_batches": 0}, ValueError, "micro_batches=0: expected an int, at least 1"),
        ({"micro_batches": True}, ValueError, "micro_batches=True"),
        ({"stages_per_rank": 0}, ValueError, "stages_per_rank=0"),
        ({"block": None}, TypeError, "block is None: expected a function"),
        ({"schedule": 3}, TypeError, "schedule=3: expected the name of a schedule, or a table"),
        (
            {"depth": (5, -1)},
            ValueError,
            "depth=(5, -1): expected the number of blocks, an int, at least 1",
        ),
        ({"depth": (2.0, 2)}, ValueError, "depth=(2.0, 2)"),
        ({"depth": 0}, ValueError, "depth=0"),
        ({"depth": True}, ValueError, "depth=True"),
    ):
        with raises(kind, said):
            make_loss(**{"micro_batches": 2, **options})


def test_a_schedule_table_for_other_counts_is_refused():
    table = fzero.parallel.schedules.schedule("1f1b", 2, 4)
    with raises(ValueError, "micro_batches=8, but the schedule '1f1b' has 4"):
        make_loss(8, schedule=table)
    loss = make_loss(4, schedule=table)
    with raises(ValueError, "the schedule '1f1b' is for 2 ranks, but the axis 'pp' has 4"):
        loss.stack(make_params(4), fzero.mesh(pp=4))


def test_a_wrong_table_is_refused_before_anything_runs():
    good = fzero.parallel.schedules.schedule("1f1b", 2, 4)
    missing = fzero.parallel.schedules.PipelineSchedule((good.rows[0][1:], good.rows[1]), good.rank_of_stage, "cut")
    with raises(ValueError, "0F0, the forward pass of stage 0 for micro-batch 0, is missing on rank 0"):
        make_loss(4, schedule=missing)


def test_an_unknown_schedule_is_refused():
    with raises(ValueError, "'2f2b'"):
        make_loss(4, schedule="2f2b")  # before any mesh


def test_the_error_of_a_pipeline_names_a_wrong_depth():
    with raises(ValueError, "5 blocks on 2 stages: some stages have one more than others. Confirm this with depth=5"):
        make_loss(4).stack(make_params(5), fzero.mesh(pp=2))
    with raises(ValueError, "depth=6, but the parameters have 5 blocks"):
        make_loss(4, depth=6).stack(make_params(5), fzero.mesh(pp=2))
    with raises(ValueError, "expected a number for each of the 2 stages"):
        make_loss(4, depth=(1, 2, 2)).stack(make_params(5), fzero.mesh(pp=2))


@pytest.mark.parametrize("mesh", [None, fzero.mesh(dp=2)])
def test_unstacking_takes_the_mesh_since_stacked_blocks_look_like_blocks(mesh):
    params, pipeline_mesh = make_params(5), fzero.mesh(pp=2)
    loss = make_loss(4, depth=(2, 3))
    stacked = loss.stack(params, pipeline_mesh)
    with raises(TypeError, "missing 1 required positional argument: 'mesh'"):
        loss.unstack(stacked)  # pyright: ignore[reportCallIssue]
    with raises(ValueError, f"mesh={mesh} and 3 blocks, but the model has 5: pass the mesh for which they were"):
        loss.unstack(stacked, mesh)
    assert len(loss.unstack(stacked, pipeline_mesh)["blocks"]) == len(loss.unstack(params, mesh)["blocks"]) == 5


def test_parameters_without_blocks_or_with_different_blocks_are_refused():
    with raises(ValueError, "a list of blocks at 'blocks', but got dict of ['table']"):
        make_loss(4).stack({"table": torch.ones(1)}, fzero.mesh(pp=2))
    with raises(ValueError, "a list of blocks at 'blocks', but got list"):
        make_loss(4).stack([torch.ones(1)], fzero.mesh(pp=2))
    params = make_params(4)
    params["blocks"][2] = {"w": torch.ones(5, 6, dtype=torch.float64), "b": torch.ones(5, dtype=torch.float64)}
    with raises(ValueError, "blocks[2] leaf 'w' is float64 [5, 6], but in blocks[0] it is float64 [5, 5]"):
        make_loss(4).stack(params, fzero.mesh(pp=2))
    params["blocks"][1] = {"w": torch.ones(5, 5)}
    with raises(ValueError, "blocks[1] is not like blocks[0]"):
        make_loss(4).stack(params, fzero.mesh(pp=2))


def test_a_parameter_that_several_blocks_share_is_refused():
    """Stacked by rank it would be several, each trained on its own."""
    params = make_params(4)
    params["blocks"][2]["w"] = params["blocks"][1]["w"]
    with raises(ValueError, "leaves 'blocks.1.w' and 'blocks.2.w' are tied, one parameter: blocks are stacked by rank"):
        make_loss(4).stack(params, fzero.mesh(pp=2))
    whole = make_loss(4).stack(params)["blocks"]  # without ranks it stays one
    assert whole[2]["w"] is whole[1]["w"] is params["blocks"][1]["w"]
    params = make_params(4)
    params["mix"] = {"w": params["blocks"][3]["w"]}
    with raises(ValueError, "leaves 'blocks.3.w' and 'mix.w' are tied"):
        make_loss(4).stack(params, fzero.mesh(pp=2))
    params = make_params(4)
    params["blocks"] = [{**p, "again": p["b"]} for p in params["blocks"]]
    loss = make_loss(2, block=lambda p, x: x + torch.tanh(x @ p["w"] + p["b"]) * p["again"])
    assert_trees_close(train_on(fzero.mesh(pp=2), 1, loss, params, 4), train_plainly(loss, params, 4), 1e-9)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_parameters_stacked_for_another_mesh_are_refused(simulate):
    mesh = fzero.mesh(pp=2, simulate=simulate)
    loss = make_loss(2, depth=4)
    step = fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), 0, mesh, split=loss.split)
    params, _ = step.init(loss.stack(make_params(4), fzero.mesh(pp=2)), optim.sgd(0.1))
    wrong = {**params, "blocks": params["blocks"][:1]}
    with raises(ValueError, "the parameters have 1 stacked blocks a rank, but 4 blocks on 2 ranks take 2"):
        step(wrong, make_batch(4))


def test_unstacked_parameters_are_refused():
    loss, mesh = make_loss(2), fzero.mesh(pp=2)
    step = fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), 0, mesh, split=loss.split)
    with raises(ValueError, "leaf 'blocks.0.w' is float64 [5, 5], but blocks are stacked by rank, [2, ...]: pass"):
        step.init(make_params(4), optim.sgd(0.1))
    with raises(ValueError, "they were stacked for another mesh, or not at all"):
        other = make_loss(2, depth=6)
        fzero.shard(step.train_step, 0, mesh, split=other.split).init(loss.stack(make_params(4), mesh), optim.sgd(0.1))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_pipeline_without_its_split_rule_is_refused(simulate, stage):
    """Every rank would have the blocks of all, and run those of the first."""
    mesh, loss = fzero.mesh(dp=2, pp=2, simulate=simulate), make_loss(2)
    step = fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), stage, mesh, axis=("dp", "pp"))
    for wrong_params, shape in ((loss.stack(make_params(4), mesh), "[2, 5"), (make_params(2), "[5")):
        params, _ = step.init(wrong_params, optim.sgd(0.1))
        with raises(ValueError, f" is float64 {shape}") as error:
            step(params, mesh.split(make_batch(8), "dp"))
        assert "fzero.shard(..., split=loss.split)" in str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_stacked_for_another_schedule_are_refused(stage):
    """Their shapes are the same, and a step would train the blocks in another order."""
    mesh = fzero.mesh(dp=2, pp=2)
    steps = [
        fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), stage, mesh, split=loss.split)
        for loss in (make_loss(2), make_loss(2, schedule="interleaved", stages_per_rank=2))
    ]
    params, state = steps[0].init(make_loss(2).stack(make_params(4), mesh), optim.sgd(0.1))
    said = (
        "the list 'blocks', which was stacked with the items [[0, 1], [2, 3]] on the ranks along 'pp', and this step "
    )
    with raises(ValueError, said + "expects the items [[0, 2], [1, 3]] there: unstack it with the loss"):
        steps[1](params, mesh.split(make_batch(8), "dp"))
    with raises(ValueError, "argument 1, leaf 'mu.blocks.0.w' is of the list 'blocks'"):
        mine, _ = steps[1].init(
            make_loss(2, schedule="interleaved", stages_per_rank=2).stack(make_params(4), mesh), optim.sgd(0.1)
        )
        _, moments = steps[0].init(make_loss(2).stack(make_params(4), mesh), optim.adam(0.1))
        steps[1](mine, moments)
    assert state is not None


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_batch_that_differs_between_stages_is_refused(simulate):
    """The first stage would see tokens of one batch, and the last one targets of another."""
    mesh, loss = fzero.mesh(dp=2, pp=2, simulate=simulate), make_loss(2)
    step = fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), 1, mesh, split=loss.split)
    params, _ = step.init(loss.stack(make_params(4), mesh), optim.sgd(0.1))
    said = "the batch, leaf 'tokens' differs by rank along 'pp', whose ranks share one batch: "
    with raises(ValueError, said + "split it over the other axes, mesh.split(batch, ('dp',))"):
        step(params, mesh.split(make_batch(16)))
    alone = fzero.mesh(pp=2, simulate=simulate)
    step = fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), 1, alone, split=loss.split)
    params, _ = step.init(loss.stack(make_params(4), alone), optim.sgd(0.1))
    with raises(ValueError, said + "do not split it"):
        step(params, alone.split(make_batch(16)))


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_batch_that_the_micro_batches_do_not_divide_is_refused(simulate):
    with raises(
        ValueError, "the batch leaf 'tokens' is [3]: dimension 0 of a rank's part must divide by micro_batches=2"
    ):
        train_on(fzero.mesh(dp=2, pp=2, simulate=simulate), 1, make_loss(2), make_params(4), 6)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_blocks_that_change_the_shape_of_a_message_are_refused(simulate):
    def narrower(p: Any, x: torch.Tensor) -> torch.Tensor:
        return block(p, x)[..., :4]

    mesh = fzero.mesh(pp=2, simulate=simulate)
    with raises(TypeError, "block returned float64 [2, 4] for an input float64 [2, 5]"):
        train_on(mesh, 1, make_loss(2, block=narrower), make_params(4), 4)
    with raises(TypeError, "first returned int64 [2]: expected a tree of floating-point tensors"):
        train_on(mesh, 1, make_loss(2, first=lambda rest, batch: batch["tokens"]), make_params(4), 4)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_last_function_without_total_and_weight_is_refused(simulate):
    mesh = fzero.mesh(pp=2, simulate=simulate)
    with raises(TypeError, "last(rest, x, batch) must return (total, weight)"):
        train_on(mesh, 1, make_loss(2, last=lambda rest, x, batch: x), make_params(4), 4)
    with raises(TypeError, "it returned NoneType"):
        train_on(mesh, 1, make_loss(2, last=lambda rest, x, batch: None), make_params(4), 4)


def test_a_mesh_without_the_pipelines_axis_has_no_schedule():
    with raises(ValueError, "has no axis 'pp', along which stages lie"):
        make_loss(2).schedule(fzero.mesh(dp=2))


def test_a_rank_that_raises_in_its_stage_ends_the_others():
    def stops(p: Any, x: torch.Tensor, index: int, batch: Any) -> torch.Tensor:
        if index == 3 and batch["tokens"][0] == make_batch(8)["tokens"][6]:
            raise RuntimeError("planted")
        return block(p, x)

    mesh = fzero.mesh(pp=4, simulate="lockstep")
    with raises(RuntimeError, "planted") as error:
        train_on(mesh, 1, make_loss(8, block=stops), make_params(4), 8)
    assert "rank 3 of 4 raised this" in "".join(error.value.__notes__)


def test_a_step_of_the_mean_over_the_data_alone_is_refused():
    """The pipeline's axis is one of the axes of the mean: without it blocks' gradients would be added to no loss."""
    loss = make_loss(2)
    mesh = fzero.mesh(dp=2, pp=2, simulate="lockstep")
    step = fzero.shard(fzero.value_and_grad(loss, reduce="weighted"), 1, mesh, axis="dp", split=loss.split)
    params, _ = step.init(loss.stack(make_params(4), mesh), optim.sgd(0.1))
    with raises(ValueError, "axis=('dp', 'pp')"):
        step(params, mesh.split(make_batch(8), "dp"))


def test_an_unweighted_mean_of_a_weighted_pipeline_is_refused():
    loss = make_loss(2)
    mesh = fzero.mesh(pp=2, simulate="lockstep")
    step = fzero.shard(fzero.value_and_grad(loss), 1, mesh, split=loss.split)
    params, _ = step.init(loss.stack(make_params(4), mesh), optim.sgd(0.1))
    with raises(TypeError, 'reduce="weighted"'):
        step(params, make_batch(8))


def test_differentiating_a_pipelined_loss_twice_is_refused():
    loss, params, batch = make_loss(2), make_params(2), make_batch(4)

    def program() -> Any:
        mine = int(fzero.axes.axis_index("pp").item())
        own = {"blocks": [fzero.tree.map(lambda w: w[None], params["blocks"][mine])]}
        _, pull = torch.func.vjp(lambda t: loss({**params, **own, "table": t}, batch)[0], params["table"])
        one = torch.ones((), dtype=torch.float64)
        pull(one, retain_graph=True)
        with raises(RuntimeError, "differentiate it once, or call it again"):
            pull(one)
        return fzero.collectives.psum(one, "pp")

    fzero.mesh(pp=2, simulate="lockstep").spmd(program)()


assert first and last
