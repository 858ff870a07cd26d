"""What is loaded is what was saved, bit for bit, whatever the layouts of both are."""

import math
import os

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.checkpoint import _tensor_bytes
from fzero.checkpoint.layout import ChunkRange, local_tree, runs
from tests.checkpoint.states import LAYOUTS, Layout, fill, params_of, same_bits, shard_step, state_in, whole_of
from tests.helpers import cases, examples
from tests.optim.table import EACH


@examples(8, 40)
@given(params=params_of(), source=LAYOUTS, target=LAYOUTS, seed=st.integers(0, 99))
def test_a_checkpoint_of_any_layout_loads_into_any_layout(tmp_path_factory, params, source, target, seed):
    path = tmp_path_factory.mktemp("saved")
    step, state = state_in(source, params)
    state, whole = fill(step, state, seed)
    fzero.save(path, state, step.mesh)
    other, like = state_in(target, params)
    assert same_bits(whole_of(other, fzero.load(path, like=like, mesh=other.mesh)), whole)


@examples(4, 15)
@given(params=params_of(), layout=LAYOUTS)
def test_an_unsharded_tree_is_read_from_any_layout_and_into_any(tmp_path_factory, params, layout):
    step, state = state_in(layout, params)
    state, whole = fill(step, state)
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    fzero.save(one, state, step.mesh)
    plain = fzero.load(one, like=tree.map(lambda x: torch.ones_like(x) if isinstance(x, torch.Tensor) else x, whole))
    assert same_bits(plain, whole)
    fzero.save(other, plain)
    _, like = state_in(layout, params)
    assert same_bits(whole_of(step, fzero.load(other, like=like, mesh=step.mesh)), whole)
    for path, leaf in fzero.checkpoint.leaves(one).items():
        assert fzero.checkpoint.leaves(other)[path].shape == leaf.shape
        assert same_bits(fzero.checkpoint.read(one, path), fzero.checkpoint.read(other, path))


@examples(15, 60)
@given(params=params_of(), layout=LAYOUTS)
def test_all_ranks_together_write_each_leaf_once(params, layout):
    step, state = state_in(layout, params)
    mine = local_tree("state", state, step.mesh)
    tree_layout = mine.layout
    bits = [torch.zeros(leaf.shape, dtype=torch.int64) for leaf in tree_layout.leaves]
    for rank in range(tree_layout.ranks):
        at = 0
        for piece in tree_layout.owned_pieces(rank):
            x = bits[piece.leaf]
            for dim, (offset, size) in enumerate(piece.range.chunk):
                x = x.narrow(dim, offset, size)
            flat = x.reshape(-1).clone()
            flat[piece.range.start : piece.range.stop] += 1
            x.copy_(flat.view(x.shape))
            size = tree_layout.leaves[piece.leaf].dtype.itemsize
            assert at % size == 0, "not aligned"
            at += piece.numel * size
        assert at == tree_layout.starts(rank)[-1]
        # of each group a rank writes its part, rounded up once for the shards and once for their replicas
        assert at <= sum(
            tree_layout.itemsize(g)
            * (-(-tree_layout.offsets[g][-1] // (tree_layout.ranks // math.prod(s.size for s in group.split))) + 2)
            for g, group in enumerate(tree_layout.groups)
        )
    assert all(x.eq(1).all() for x in bits)


@pytest.mark.slow
@examples(8, 30)
@given(params=params_of(), source=LAYOUTS, target=LAYOUTS)
def test_the_writers_of_a_range_are_the_ranks_that_write_some_of_it(params, source, target):
    saved, mine = [
        local_tree("state", s, step.mesh).layout for step, s in (state_in(x, params) for x in (source, target))
    ]
    for rank in range(mine.ranks):
        for piece in mine.local_pieces(rank):
            i = saved.leaf_index[mine.leaves[piece.leaf].path]
            results = [(r, at, run) for r, at, here in saved.writers(i, piece.range) for run in runs(here, piece.range)]
            wanted = []
            for r in range(saved.ranks):
                at = {g: saved.starts(r)[g] for g in range(len(saved.groups))}
                for other in saved.owned_pieces(r):
                    if other.leaf == i:
                        wanted += [(r, at[other.group], run) for run in runs(other.range, piece.range)]
                    at[other.group] += other.numel * saved.leaves[other.leaf].dtype.itemsize
            assert sorted(results) == sorted(wanted)


def test_a_checkpoint_takes_the_bytes_of_its_state(tmp_path):
    """No padding, nothing twice, and of a replicated leaf each rank writes its part."""
    step, state = state_in(Layout({"dp": 4}, 1), {"w": torch.zeros(1 << 12), "b": torch.zeros(3)})
    fzero.save(tmp_path, state, step.mesh)
    sizes = [os.path.getsize(tmp_path / name) for name in sorted(os.listdir(tmp_path)) if "safetensors" in name]
    whole = sum(x.nbytes for x in tree.tensors(whole_of(step, state)))
    assert len(sizes) == 4 and max(sizes) - min(sizes) < 256 and whole < sum(sizes) < whole + 4 * 800


OPTIMIZERS = EACH | {
    "momentum": optim.sgd(0.1, momentum=0.9),
    "chain": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(0.1, 2, 9))),
    "loss scale": optim.dynamic_loss_scale(optim.adam(0.1)),
    "masters": optim.master_weights(optim.adamw(0.1), fzero.Precision(param=torch.bfloat16)),
    "average": optim.chain(optim.adam(0.1), optim.params_ema(0.9)),
}


@pytest.mark.parametrize("name", cases([*OPTIMIZERS][::2], OPTIMIZERS))
def test_training_resumed_in_another_layout_equals_uninterrupted_training(name, tmp_path):
    opt = OPTIMIZERS[name]
    for source, target in ((Layout({"dp": 4}, 3), Layout({"dp": 3}, 1)), (Layout({"dp": 2}, 0), Layout({"dp": 5}, 3))):
        params = {"h": [{"w": torch.randn(5, 7), "b": torch.randn(7)} for _ in range(2)], "v": torch.randn(3)}
        step, state = state_in(source, params, opt)
        _, state = fill(step, state)
        state = {
            **state,
            **{
                k: step.partition(state[k], like=v)
                for k, v in state_in(source, params, opt)[1].items()
                if k in ("params", "opt_state")
            },
        }
        fzero.save(tmp_path / str(source.stage), state, step.mesh)
        other, like = state_in(target, params, opt)
        loaded = fzero.load(tmp_path / str(source.stage), like=like, mesh=other.mesh)
        assert same_bits(whole_of(other, loaded), whole_of(step, state))


@example(shape=(4, 6), dims=(1, 0))
@given(shape=st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple), dims=st.permutations([0, 1]).map(tuple))
def test_leaves_of_any_strides_are_saved_and_loaded(tmp_path_factory, shape, dims):
    """A leaf that is a transpose, or conjugated, is saved and loaded as its elements."""
    path = tmp_path_factory.mktemp("strided")
    x = torch.randn(shape, dtype=torch.complex64).transpose(*dims).conj()
    fzero.save(path, {"x": x})
    like = torch.zeros(shape, dtype=torch.complex64).transpose(*dims)
    assert torch.equal(fzero.load(path, like={"x": like})["x"], x) and torch.equal(like, x)


def test_large_leaves_cross_pages_and_are_copied_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(_tensor_bytes, "_CHUNK_BYTES", 1 << 10)
    x = torch.randn(1500, 1400).t()
    fzero.save(tmp_path, {"x": x, "y": torch.arange(1 << 20)}, fzero.mesh(dp=3))
    like = {"x": torch.empty(1500, 1400).t(), "y": torch.zeros(1 << 20, dtype=torch.int64)}
    loaded = fzero.load(tmp_path, like=like)
    assert torch.equal(loaded["x"], x) and torch.equal(loaded["y"], torch.arange(1 << 20))


def test_tied_leaves_stay_tied_and_are_stored_once(tmp_path):
    layout, w = Layout({"dp": 3}, 3), torch.randn(8)
    step, state = state_in(layout, {"a": w, "b": {"c": w}, "d": torch.randn(2)})
    fzero.save(tmp_path, state, step.mesh)
    saved = fzero.checkpoint.leaves(tmp_path)
    assert saved["params.a"] is saved["params.b.c"]
    untied = fzero.load(tmp_path, like={"params": {"a": w * 0, "b": {"c": w * 0}, "d": torch.zeros(2)}}, partial=True)
    assert torch.equal(untied["params"]["a"], w) and torch.equal(untied["params"]["b"]["c"], w)
    fzero.save(tmp_path, untied)
    tied = torch.zeros(8)
    with pytest.raises(
        fzero.errors.CheckpointError, match=r"'params.a' and 'params.b.c' are one tensor in the tree, and two"
    ):
        fzero.load(tmp_path, like={"params": {"a": tied, "b": {"c": tied}, "d": torch.zeros(2)}})


def test_a_load_into_meta_boxes_zeroes_the_padding(tmp_path):
    fzero.save(tmp_path, {"params": {"w": torch.ones(5)}})
    step = shard_step(Layout({"dp": 4}, 3))
    like, _ = step.init({"w": torch.empty(5, device="meta")}, optim.sgd(0.1))
    loaded = fzero.load(tmp_path, like={"params": like}, mesh=step.mesh)
    assert loaded["params"]["w"].data.tolist() == [[1, 1], [1, 1], [1, 0], [0, 0]]


def test_an_empty_range_has_no_writers():
    tree_layout = local_tree("state", {"w": torch.empty(0), "s": torch.ones(())}, None).layout
    assert not list(tree_layout.writers(0, ChunkRange(((0, 0),), 0, 0)))
    assert [at for _, at, _ in tree_layout.writers(1, ChunkRange((), 0, 1))] == [0]
