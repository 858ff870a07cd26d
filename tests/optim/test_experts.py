"""Clipping by expert: each expert's norm, over all leaves of its layer, on any layout."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.parallel import experts as moe
from fzero.testing import assert_equivalent
from tests.helpers import either, examples, train_step_for
from tests.parallel.experts.model import batch_of, experts_params, loss_for, params_of

OPT = optim.chain(optim.clip_by_expert(0.02), optim.adamw(1e-2, eps=1e-3))
MESHES = [
    fzero.mesh(dp=3),
    fzero.mesh(ep=2),
    fzero.mesh(dp=2, ep=2),
    fzero.mesh(dp=2, ep=2, simulate="lockstep"),
    *either([], [fzero.mesh(dp=8), fzero.mesh(dp=16), fzero.mesh(dp=4, ep=4), fzero.mesh(dp=8, simulate="lockstep")]),
]


def two_layers() -> dict:
    return {"layers": [{"experts": experts_params(4, seed)} for seed in range(2)], "head": torch.ones(3) * 9}


@settings(max_examples=20)
@given(st.sampled_from([0.1, 3.0, 5.0, 99.0]), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_each_expert_of_each_layer_has_its_own_norm(limit, dtype):
    grads = tree.map(lambda x: x.to(dtype), two_layers())
    clipped = optim.clip_by_expert(limit).update(grads, ())[0]
    assert torch.equal(clipped["head"], grads["head"])
    for before, after in zip(grads["layers"], clipped["layers"], strict=True):
        for e in range(4):
            mine = torch.cat([x[e].flatten() for x in before["experts"].values()]).double()
            scale = min(1.0, limit / mine.norm().item())
            for name, x in before["experts"].items():
                tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(after["experts"][name][e], x[e] * scale, rtol=tolerance, atol=1e-7)


@examples(3, 12)
@given(st.sampled_from(MESHES), st.integers(0, 3), st.sampled_from([None, 0.5]), st.booleans())
def test_clip_by_expert_on_any_mesh_equals_dense_training(mesh, stage, capacity, one_unit):
    """Rows of an expert are sharded anywhere: by dp, by ep, in a unit with other leaves, or with each leaf a unit."""
    units = (
        (lambda path, leaf: "all" if "experts" not in path else "experts") if one_unit else (lambda path, leaf: path)
    )
    train_step = train_step_for(loss_for(2, capacity), OPT)
    batches = [batch_of(either(12, 48), seed=i) for i in range(2)]
    options = {"meshes": [mesh], "split": moe.split_rule("experts"), "units": units}
    assert_equivalent(train_step, params_of(), OPT, batches, (stage,), **options)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("n,shape", [(8, (2, 1)), (16, (2, 65)), (5, (2, 3))])
def test_padding_that_is_longer_than_a_shard_is_of_no_expert(simulate, n, shape):
    """Ranks beyond the last element hold nothing but padding, which no number may come from."""
    grads = {"experts": torch.arange(1.0, 1 + 2 * shape[1]).view(shape), "rest": torch.full((3,), 9.0)}

    def program() -> Any:
        return fzero.gather(optim.clip_by_expert(1.0).update(fzero.partition(grads), ())[0])

    expected = optim.clip_by_expert(1.0).update(grads, ())[0]
    got = fzero.mesh(dp=n, simulate=simulate).spmd(program)()
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-6, atol=0), got, expected)


def test_clip_by_expert_works_beside_tensor_parallel_leaves():
    """The norm of a leaf that is split along another dimension is summed over its ranks."""
    grads = two_layers()
    expected = optim.clip_by_expert(1.0).update(grads, ())[0]
    dims = {"up": 2, "bias": 1, "down": 1}

    def split(path, leaf):
        return {"ep": 0, "tp": dims[path.split(".")[-1]]} if "experts" in path else None

    def train_step(params, opt_state, batch):
        return (
            tree.map(torch.clone, optim.clip_by_expert(1.0).update(params, ())[0]),  # a step returns no updates
            opt_state,
            fzero.collectives.pmean(batch.sum(), ("dp", "ep")),
        )

    mesh = fzero.mesh(dp=2, ep=2, tp=2)
    for stage in (1, 3):
        step = fzero.shard(train_step, stage=stage, mesh=mesh, axis=("dp", "ep"), split=split)
        state = step.init(grads, optim.sgd(0.1))
        got = step.gather(step(*state, mesh.split(torch.ones(4), ("dp", "ep")))[0])
        tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=0), got, expected)


def test_a_clip_by_expert_takes_one_psum_for_each_set_of_axes():
    mesh = fzero.mesh(dp=2)
    with fzero.collectives.record() as log:
        mesh.spmd(lambda g: optim.clip_by_expert(1.0).update(fzero.partition(g), ())[0]["head"])(two_layers())
    assert [e.elements for e in log.other_events] == [2 * 2 * 3 * 4]  # of two layers' three leaves; it counts twice


def test_the_error_of_clip_by_expert_names_its_wrong_argument():
    with pytest.raises(ValueError, match="max_norm=0"):
        optim.clip_by_expert(0)
    with pytest.raises(ValueError, match=r"leaves of 'experts' have 2 and 3 experts"):
        optim.clip_by_expert(1.0).update({"experts": {"a": torch.ones(2), "b": torch.ones(3)}}, ())
    with pytest.raises(ValueError, match=r"leaf 'experts.a' has no dimension of experts"):
        optim.clip_by_expert(1.0).update({"experts": {"a": torch.ones(())}}, ())


def test_clip_by_expert_refuses_names_without_stacked_experts():
    """A wrong name would clip nothing, and a list of experts row by row, without a word."""
    grads = two_layers()
    for names in ("exprts", ("a", "b")):
        with pytest.raises(ValueError, match=r"names=.*: no leaf's path has such a part, .*'layers.0.experts.\w+', "):
            optim.clip_by_expert(1.0, names).update(grads, ())
    for names in ((), "layers.experts", (1,), 5):
        with pytest.raises(ValueError, match=r"names=.*: expected parts of the paths of experts, .*without a dot"):
            optim.clip_by_expert(1.0, names)
    listed = {"experts": [{"up": torch.ones(3, 3)}, {"up": torch.ones(3, 3)}]}
    for update in (
        lambda: optim.clip_by_expert(1.0).update(listed, ()),
        lambda: fzero.mesh(dp=2).spmd(lambda: optim.clip_by_expert(1.0).update(fzero.partition(listed), ()))(),
    ):
        with pytest.raises(ValueError, match=r"leaf 'experts.0.up' is of one expert in a list, .*: stack the experts"):
            update()


@pytest.mark.parametrize("sharded", [False, True])
def test_leaves_of_experts_without_a_dimension_are_refused_and_empty_ones_pass(sharded):
    """Those without a dimension are refused by name, with a box or without; empty ones pass."""

    def clip_on_ranks(tree_of: Any) -> Any:
        def program() -> Any:
            clip = optim.clip_by_expert(1.0)
            return fzero.gather(clip.update(fzero.partition(tree_of), ())[0])

        return fzero.mesh(dp=2).spmd(program)() if sharded else optim.clip_by_expert(1.0).update(tree_of, ())[0]

    with pytest.raises(ValueError, match=r"leaf 'experts.s' has no dimension of experts"):
        clip_on_ranks({"experts": {"a": torch.ones(3, 3), "s": torch.tensor(1.0)}})
    out = clip_on_ranks(
        {"experts": {"a": 9 * torch.ones(3, 4), "s": torch.zeros(3, 0)}, "none": {"experts": torch.ones(0, 3)}}
    )
    torch.testing.assert_close(out["experts"]["a"], torch.full((3, 4), 0.5))
    assert out["experts"]["s"].shape == (3, 0) and out["none"]["experts"].shape == (0, 3)
