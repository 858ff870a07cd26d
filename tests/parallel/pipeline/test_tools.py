"""What looks at a step, or feeds it, takes a pipelined one: layouts, bytes, nonfinite, profile, data, metrics."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from tests.checkpoint.states import same_bits
from tests.helpers import ALL_STAGES, LEAST, cases
from tests.parallel.pipeline.model import OPT, block, make_batch, make_loss, make_params, make_step, train_plainly


def made(
    mesh: fzero.ranks.Mesh, loss: fzero.parallel.pipeline.Pipeline, params: Any, stage: int = 2, opt: Any = OPT
) -> tuple[Any, list[Any], Any]:
    step = fzero.shard(make_step(loss, opt), stage, mesh, split=loss.split)
    return step, [*step.init(loss.stack(params, mesh), opt)], mesh.split(make_batch(16), step.data_axes)


def test_a_table_of_layouts_names_the_blocks():
    loss = make_loss(4, depth=5)
    _, state, _ = made(fzero.mesh(dp=2, pp=2), loss, make_params(5), 3)
    rows = {x.path: x for x in fzero.sharding.layouts(state).leaves}
    layout = "unit 'blocks.1' over dp=2, stacked over pp=2 (blocks.1, blocks.4): 15 of 30 elements"
    assert rows["0.blocks.1.w"].layout == rows["1.1.mu.blocks.1.w"].layout == layout
    assert "(blocks.2, none)" in rows["0.blocks.2.w"].layout and "(" not in rows["0.table"].layout


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_a_rank_holds_its_own_blocks_in_bytes(stage):
    """It has idle places: 3 of each rank, for 5 blocks."""
    loss, params = make_loss(4, depth=5), make_params(5)
    step, (params, state), _ = made(fzero.mesh(dp=2, pp=2), loss, params, stage, optim.sgd(0.1, momentum=0.9))
    blocks, table, scale = 3 * (25 + 5) * 8, 35 * 8, 8
    whole, sharded = blocks + table + scale, blocks // 2 + 9 * 8 + scale  # 36 of the table's elements on 4 ranks
    assert step.state_bytes(params) == (sharded if stage == 3 else whole)
    assert step.state_bytes(state) - 8 == (whole if stage == 0 else sharded)  # a count


@pytest.mark.slow
@pytest.mark.parametrize("simulate", cases(["lockstep"], ["vmap"]))
def test_a_nonfinite_leaf_is_named_by_the_blocks_number(simulate):
    mesh, params = fzero.mesh(dp=2, pp=2, simulate=simulate), make_params(5)
    loss = make_loss(4, schedule="interleaved", stages_per_rank=2, depth=5)
    params["blocks"][4]["w"][1, 1] = float("nan")  # of the last rank
    step, state, batch = made(mesh, loss, params, 3)
    result = fzero.observe.nonfinite(fzero.jit(step) if simulate == "vmap" else step)(*state, batch)
    assert result.origin is not None and result.origin.leaf == "argument 0, leaf 'blocks.4.w'"
    assert any("'blocks.4.w'" in place for place in result.results)

    def breaks(p: Any, x: torch.Tensor, index: int) -> torch.Tensor:
        return block(p, x) + (0 * (x - 100).log() if index == 1 else 0)

    loss = make_loss(4, depth=4, block=breaks)
    step, state, batch = made(mesh, loss, make_params(4))
    result = fzero.observe.nonfinite(step)(*state, batch)  # by messages and sums from the first stage to all results
    assert result.origin is not None and result.origin.operation == "log" and result.origin.ranks == (0, 2)


@pytest.mark.slow
def test_a_jitted_pipeline_is_profiled():
    loss = make_loss(2)
    step, state, batch = made(fzero.mesh(dp=1, pp=2), loss, make_params(4))
    result = fzero.profile(fzero.jit(step, backend="fx", **LEAST), *state, batch, steps=1, warmup=1)
    assert any("block" in line.function for line in result.lines)


@pytest.mark.slow
def test_a_pipeline_trains_on_numbered_batches():
    examples = [{name: x[i] for name, x in make_batch(32).items()} for i in range(32)]
    loss, params, losses = make_loss(4), make_params(4), []
    for mesh in (fzero.mesh(dp=2), fzero.mesh(dp=2, pp=2), fzero.mesh(pp=2, dp=2, simulate="lockstep")):
        step, state, _ = made(mesh, loss, params)
        rows: list[Any] = []
        data = fzero.data.batches(examples, mesh, global_batch=16, seed=1, axis=step.data_axes)
        with fzero.observe.log(rows.append, every=1, mesh=mesh) as log:
            for i, batch in data.steps(0, 3):
                *state, value = step(*state, batch)
                log(i, {"loss": value})
        losses.append([values["loss"] for ((_, values),) in rows])
    assert len(losses[0]) == 3
    for actual in losses[1:]:
        assert actual == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_state_saved_in_memory_loads_into_another_pipeline(simulate, tmp_path):
    params, memory = make_params(5), str(tmp_path)
    loss, other = make_loss(4, depth=5), make_loss(4, schedule="interleaved", stages_per_rank=2, depth=5)
    step, state, _ = made(fzero.mesh(dp=2, pp=2, simulate=simulate), loss, params, 3)
    runs = fzero.checkpoint.checkpoints(tmp_path / "disk", step.mesh, memory=memory)
    runs.save_in_memory(7, {"state": state, "step": 7}).wait()
    to, like, _ = made(fzero.mesh(pp=2, dp=1, simulate=simulate), other, tree.map(torch.zeros_like, params), 1)
    result = fzero.checkpoint.checkpoints(tmp_path / "disk", to.mesh, memory=memory).restore({"state": like, "step": 0})
    assert result["step"] == 7
    for one, two in zip(result["state"], state, strict=True):
        assert same_bits(other.unstack(to.gather(one), to.mesh), loss.unstack(step.gather(two), step.mesh))


def test_trees_are_stacked_and_unstacked_in_a_state():
    """A state of training without a pipeline goes into one by hand, too, and comes back."""
    loss, params = make_loss(4, schedule="zbv", stages_per_rank=2, depth=5), make_params(5)
    dense, _ = train_plainly(loss, params, 8)
    opt = optim.adam(0.1)
    state = opt.init(dense)._replace(mu=dense)
    mesh = fzero.mesh(dp=2, pp=2)
    step, (_, like), _ = made(mesh, loss, params, 3, opt)
    sharded = step.partition(loss.stack(state, mesh), like=like)
    assert same_bits(loss.unstack(step.gather(sharded), mesh), state)
    assert loss.unstack((), mesh) == () and loss.stack(((), 3), mesh) == ((), 3)
