"""A pipeline's blocks are saved by their own names: any mesh, schedule and stage reads what any other wrote."""

import os
import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fzero
from fzero import optim, tree
from fzero.checkpoint.layout import local_tree
from fzero.sharding._stacked_items import subtree_prefix
from fzero.testing import assert_trees_close
from tests.checkpoint.helpers import body_of, write_manifest
from tests.checkpoint.states import same_bits
from tests.helpers import examples
from tests.parallel.pipeline.model import OPT, fill, make_batch, make_loss, make_params, make_step, train_plainly
from tests.parallel.schedules.named import NAMED


class Placed(NamedTuple):
    """Where a training state of a pipeline lies."""

    axes: dict[str, int]
    stage: int
    schedule: str
    simulate: str

    @property
    def mesh(self) -> fzero.ranks.Mesh:
        return fzero.mesh(simulate=self.simulate, **self.axes)

    def loss(self, depth: int, **options: Any) -> fzero.parallel.pipeline.Pipeline:
        ranks, stages = self.axes.get("pp", 1), NAMED[self.schedule]
        counts = [0] * (ranks * stages - 1) + [depth] if depth < ranks * stages else None
        return make_loss(4, schedule=self.schedule, stages_per_rank=stages, depth=counts or depth, **options)

    def sharded(self, loss: fzero.parallel.pipeline.Pipeline, opt: Any = OPT) -> Any:
        axes = tuple([name for name in self.axes if name != "tp"])
        return fzero.shard(make_step(loss, opt), self.stage, self.mesh, axis=axes, split=loss.split)


AXES = st.one_of(
    st.builds(lambda pp: {"pp": pp}, st.integers(1, 4)),
    st.builds(lambda dp, pp: {"dp": dp, "pp": pp}, st.integers(1, 3), st.integers(1, 3)),
    st.builds(lambda dp, pp: {"pp": pp, "dp": dp}, st.integers(1, 2), st.integers(2, 3)),
    st.builds(lambda pp: {"pp": pp, "tp": 2}, st.integers(1, 2)),
    st.builds(lambda dp: {"dp": dp}, st.integers(1, 3)),  # no pipeline
)
PLACED = st.builds(
    Placed, AXES, st.integers(0, 3), st.sampled_from(sorted(NAMED)), st.sampled_from(["vmap", "lockstep"])
)


def tp(path: str, x: torch.Tensor) -> dict[str, int] | None:
    """Split the matrices of blocks, rows of even number, where there is tensor parallelism."""
    return {"tp": 0} if path.endswith(".even") and "tp" in fzero.axes.axis_names() else None


def params_in(depth: int, tied: bool) -> dict[str, Any]:
    """Parameters whose blocks have a leaf that tensor parallelism may split, and maybe one that is there twice."""
    params = make_params(depth, torch.float32)
    for i, p in enumerate(params["blocks"]):
        p["even"] = torch.full((4, 3), float(i), dtype=torch.bfloat16)
        p["again"] = p["b"] if tied else p["b"] + i
    return params


def meta(values: Any) -> Any:
    return tree.map(lambda x: x.to("meta"), values)


def dense_state(params: Any, opt: Any = OPT) -> dict[str, Any]:
    cast = opt.precision.cast(params) if opt.precision else params
    return fill({"params": cast, "opt_state": opt.init(params), "step": 3})


def like_in(
    placed: Placed, loss: fzero.parallel.pipeline.Pipeline, params: Any, opt: Any = OPT
) -> tuple[Any, dict[str, Any]]:
    step = placed.sharded(loss, opt)
    p, s = step.init(loss.stack(meta(params), step.mesh), opt)
    return step, {"params": p, "opt_state": s, "step": 0}


def whole_of(step: Any, loss: fzero.parallel.pipeline.Pipeline, state: dict[str, Any]) -> dict[str, Any]:
    parts = {k: loss.unstack(step.gather(state[k]), step.mesh) for k in ("params", "opt_state")}
    return {**state, **parts}


@pytest.mark.slow
@examples(3, 20)
@given(st.integers(2, 6), PLACED, PLACED, st.booleans(), st.sampled_from(["adamw", "masters", "none", "offload"]))
def test_a_checkpoint_of_a_pipeline_loads_into_any_other_pipeline(tmp_path_factory, depth, source, target, tied, name):
    """Bit for bit the state of training without a pipeline, and on the disk under the same names."""
    folder = tmp_path_factory.mktemp("saved")
    policy = fzero.Precision(param=torch.bfloat16, full=lambda path, leaf: name == "none" or path.endswith("b"))
    # of leaves that need no masters there is None
    opt = optim.master_weights(OPT, policy) if name in ("masters", "none") else OPT
    params = params_in(depth, tied)
    dense = dense_state(params, opt)
    opt = optim.offload(opt, 0.4, update_on="device") if name == "offload" else opt  # shards in two pieces
    fzero.save(folder / "dense", dense)

    for n, (placed, before) in enumerate(((source, "dense"), (target, "0"))):
        loss = placed.loss(depth, split=tp)
        step, like = like_in(placed, loss, params, opt)
        loaded = fzero.load(folder / before, like=like, mesh=step.mesh)
        assert same_bits(whole_of(step, loss, loaded), dense)
        fzero.save(folder / str(n), loaded, step.mesh)
        there = fzero.checkpoint.leaves(folder / str(n))
        assert {p: x[1:] for p, x in there.items()} == {
            p: x[1:] for p, x in fzero.checkpoint.leaves(folder / "dense").items()
        }
        assert fzero.checkpoint.verify(folder / str(n)) > 0
        last = f"params.blocks.{depth - 1}.w"
        assert same_bits(fzero.checkpoint.read(folder / str(n), last), dense["params"]["blocks"][-1]["w"])
    zeros = tree.map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0, dense)
    assert same_bits(fzero.load(folder / "1", like=zeros), dense)


@examples(6, 30)
@given(st.integers(2, 6), PLACED, st.booleans())
def test_all_ranks_together_write_each_block_once(depth, placed, tied):
    """No rank writes an idle slot; each rank's file is as long as its header says."""
    loss = placed.loss(depth, split=tp)
    step, state = like_in(placed, loss, params_in(depth, tied))
    layout = local_tree("state", state, step.mesh).layout
    times = [torch.zeros(leaf.shape, dtype=torch.int64) for leaf in layout.leaves]
    for rank in range(layout.ranks):
        written = 0
        for piece in layout.owned_pieces(rank):
            x = times[piece.leaf]
            for dim, (offset, size) in enumerate(piece.range.chunk):
                x = x.narrow(dim, offset, size)
            flat = x.reshape(-1).clone()
            flat[piece.range.start : piece.range.stop] += 1
            x.copy_(flat.view(x.shape))
            written += piece.numel * layout.leaves[piece.leaf].dtype.itemsize
        assert written == layout.starts(rank)[-1]
    assert all(x.eq(1).all() for x in times)


def test_a_rank_reads_the_blocks_of_its_stages_alone():
    placed = Placed({"dp": 2, "pp": 3}, 3, "1f1b", "vmap")
    loss = placed.loss(7)
    step, state = like_in(placed, loss, make_params(7))
    held = local_tree("state", state, step.mesh)

    def blocks(pieces: Any) -> set[int]:
        paths = [held.layout.leaves[piece.leaf].path for piece in pieces]
        return {int(m[1]) for path in paths if (m := re.search(r"blocks\.(\d)", path))}

    rows = loss.placement(step.mesh, 7).blocks
    for r, row in enumerate(rows):
        mine = {b for b in row if b is not None}
        column = {rows[1][i] for i, b in enumerate(row) if b is None}
        for pieces, others in ((held.layout.local_pieces, column), (held.layout.owned_pieces, set())):
            assert blocks([x for rank in (r, r + 3) for x in pieces(rank)]) == mine | others  # dp shares them


def test_idle_places_of_a_pipeline_are_loaded_with_copies_of_a_block():
    """Where one program is that of all ranks, a block runs on them: what it makes must be finite."""
    placed = Placed({"pp": 2}, 0, "1f1b", "vmap")
    loss, params = placed.loss(3), make_params(3)
    step, state = like_in(placed, loss, params)
    idle = [row.index(None) for row in loss.placement(2, 3).blocks if None in row]
    assert idle
    fzero.save("memory://idle", {"params": params})
    loaded = fzero.load("memory://idle", like={"params": state["params"]}, mesh=step.mesh)
    stacked = loss.stack(params, step.mesh)
    assert same_bits(step.gather(loaded["params"]), stacked)


def test_training_resumed_in_another_pipeline_equals_uninterrupted_training(tmp_path):
    params = make_params(5)
    expected = train_plainly(make_loss(4, depth=5), params, 16, steps=4)[0]
    for i, placed in enumerate(
        (
            Placed({"dp": 2, "pp": 2}, 2, "1f1b", "lockstep"),
            Placed({"pp": 2, "dp": 2}, 3, "interleaved", "vmap"),
            Placed({"dp": 4}, 1, "1f1b", "vmap"),
            Placed({"pp": 3}, 0, "zb", "lockstep"),
        )
    ):
        loss = placed.loss(5)
        step = placed.sharded(loss)
        with fzero.checkpoint.checkpoints(tmp_path, step.mesh) as runs:
            p, s = step.init(loss.stack(params, step.mesh), OPT)
            state = runs.restore({"params": p, "opt_state": s, "step": 0})
            assert state["step"] == i
            batch = make_batch(16, i)
            batch = step.mesh.split(batch, "dp") if "dp" in placed.axes else batch
            p, s, _ = step(state["params"], state["opt_state"], batch)
            runs.save(i + 1, {"params": p, "opt_state": s, "step": i + 1})
        assert runs.steps()[-1] == i + 1
    assert_trees_close(loss.unstack(step.gather(p), step.mesh), expected, 1e-9)


def test_a_state_that_is_stacked_without_boxes_is_not_taken_for_blocks(tmp_path):
    """The error lists the leaves, since nothing says which blocks are among them."""
    loss, mesh = make_loss(4), fzero.mesh(pp=2)
    fzero.save(tmp_path, loss.stack(make_params(4), mesh))
    with pytest.raises(
        fzero.errors.CheckpointError, match=r"leaf 'blocks.0.b' is float64 \[2, 5\] there, and float64 \[5\] here"
    ):
        fzero.load(tmp_path, like=make_params(4))
    placed = Placed({"pp": 2}, 3, "1f1b", "vmap")
    step, state = like_in(placed, loss, make_params(4))
    with pytest.raises(fzero.errors.CheckpointError, match=r"float64 \[2, 5\] there"):
        fzero.load(tmp_path, like=state["params"], mesh=step.mesh)


def test_a_list_with_the_same_ending_is_not_the_list_of_blocks():
    assert subtree_prefix("opt_state.mu.blocks.0.w", "blocks.0.w") == "opt_state.mu."
    assert subtree_prefix("opt_state.subblocks.0.w", "blocks.0.w") is None


def test_a_stacked_list_without_its_tree_is_refused(tmp_path):
    placed = Placed({"pp": 2}, 3, "1f1b", "vmap")
    step, state = like_in(placed, make_loss(4), make_params(4))
    text = r"leaf '0.w' is the parameter 'blocks.0.w' of the list 'blocks', which is stacked by rank: expected a tree"
    with pytest.raises(ValueError, match=text):
        fzero.save(tmp_path, state["params"]["blocks"], step.mesh)


def test_a_manifest_tells_versions_apart(tmp_path):
    """A checkpoint without a pipeline is read by programs that know of none."""
    mesh = fzero.mesh(dp=2)
    fzero.save(tmp_path / "dense", mesh.spmd(fzero.partition)(make_params(2)), mesh)
    assert b'"version":1,' in (tmp_path / "dense" / "manifest.json").read_bytes()
    placed = Placed({"pp": 2}, 3, "1f1b", "vmap")
    step, state = like_in(placed, make_loss(4), make_params(4))
    state = {"params": step.partition(make_loss(4).stack(make_params(4), step.mesh))}
    fzero.save(tmp_path / "piped", state, step.mesh)
    assert b'"version":2,' in (tmp_path / "piped" / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("at", "copies", "said"),
    [
        ([["pp", 2]], [], "a group is held by ranks that do not exist"),
        ([["xx", 0]], [], "a group is sharded along an unknown axis"),
        ([["pp", 0]], [9], "a group has a copy of a leaf that does not exist"),
        ([["pp", 0]], [0], "a leaf is in no group, or in several"),
    ],
)
def test_an_inconsistent_manifest_of_a_pipeline_is_reported_as_damaged(tmp_path, at, copies, said):
    placed = Placed({"pp": 2}, 3, "1f1b", "vmap")
    step, _ = like_in(placed, make_loss(4), make_params(4))
    fzero.save(tmp_path, {"params": step.partition(make_loss(4).stack(make_params(4), step.mesh))}, step.mesh)
    body = body_of(tmp_path)
    body["groups"][0][4:] = [at, copies]
    write_manifest(tmp_path, body)
    with pytest.raises(fzero.errors.CheckpointError, match=said):
        fzero.checkpoint.leaves(tmp_path)


def test_a_pipeline_writes_the_hugging_face_files_of_the_whole_model(tmp_path):
    """They are equal to the byte, and in the order of the model."""
    params = fill(make_params(12, torch.float32))
    fzero.checkpoint.hf.write(tmp_path / "dense", params, name=lambda path: f"model.{path}")
    for n, placed in enumerate(
        (Placed({"dp": 2, "pp": 3}, 3, "interleaved", "vmap"), Placed({"pp": 2}, 0, "zbv", "lockstep"))
    ):
        loss = placed.loss(12)
        step, like = like_in(placed, loss, params)
        read = fzero.checkpoint.hf.read(
            tmp_path / "dense", like["params"], step.mesh, name=lambda path: f"model.{path}"
        )
        assert same_bits(loss.unstack(step.gather(read), step.mesh), params)
        fzero.checkpoint.hf.write(tmp_path / str(n), read, step.mesh, name=lambda path: f"model.{path}")
        (name,) = os.listdir(tmp_path / str(n))
        assert (tmp_path / str(n) / name).read_bytes() == (tmp_path / "dense" / name).read_bytes()


def test_a_pipeline_writes_the_dcp_folder_of_the_whole_model(tmp_path):
    params = fill(make_params(5, torch.float32))
    placed = Placed({"dp": 2, "pp": 2}, 2, "interleaved", "vmap")
    loss = placed.loss(5)
    step, _ = like_in(placed, loss, params)
    fzero.checkpoint.dcp.save(tmp_path / "dcp", {"model": step.partition(loss.stack(params, step.mesh))}, step.mesh)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file")
    assert same_bits(torch.load(tmp_path / "file")["model"], params)
    other = Placed({"pp": 3}, 3, "1f1b", "vmap")
    loss = other.loss(5)
    step, like = like_in(other, loss, params)
    loaded = fzero.checkpoint.dcp.load(tmp_path / "dcp", {"model": like["params"]}, step.mesh)
    assert same_bits(loss.unstack(step.gather(loaded["model"]), step.mesh), params)
