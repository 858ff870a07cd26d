"""A box has the shape, dtype, device and number of elements of its full leaf, at every stage."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import is_box
from tests.checkpoint.states import Layout, params_of, state_in
from tests.helpers import examples


@examples(17, 100)
@given(params_of(), st.integers(0, 3), st.integers(1, 4), st.sampled_from([None, "dp"]))
def test_a_box_has_the_shape_and_numel_of_the_full_leaf(params, stage, n, split):
    layout = Layout({"dp": n, "tp": 2} if split else {"dp": n}, stage, split, split=split is not None)
    _, state = state_in(layout, params)
    paths, whole, _ = tree.flatten_with_paths(params)
    places = tree.flatten(state["params"], is_box)[0]
    for path, x, box in zip(paths, whole, places, strict=True):
        if isinstance(x, torch.Tensor) and hasattr(box, "index"):
            assert (box.shape, box.ndim, box.dtype, box.numel()) == (x.shape, x.ndim, x.dtype, x.numel()), path
    distinct = {id(x): x for x in tree.tensors(params)}
    assert tree.numel(state["params"]) == tree.numel(params) == sum(x.numel() for x in distinct.values())


def test_the_box_of_a_moment_has_its_own_dtype_and_device():
    opt = optim.master_weights(optim.adam(0.1), fzero.Precision(param=torch.bfloat16))
    step = fzero.shard(lambda p, s, x: (p, s), 3, fzero.mesh(dp=2))
    params, state = step.init({"w": torch.ones(3, 2)}, opt)
    (moment,) = [x for x in tree.flatten(optim.master_params(params, state), is_box)[0] if is_box(x)]
    assert (params["w"].dtype, moment.dtype, moment.device) == (torch.bfloat16, torch.float32, torch.device("cpu"))


def test_reading_the_shape_or_dtype_of_a_donated_box_raises():
    step = fzero.jit(fzero.shard(lambda p, s, x: (tree.map(lambda y: y + 1, p), s), 3, fzero.mesh(dp=2)), backend="fx")
    params, state = step.init({"w": torch.ones(3, 2)}, optim.sgd(0.1))
    step(params, state, step.mesh.split(torch.ones(2)))
    for ask in (lambda x: x.shape, lambda x: x.dtype, lambda x: x.numel(), lambda x: x.full_numel()):
        with pytest.raises(fzero.errors.DonatedError):
            ask(params["w"])


def test_a_box_in_a_box_has_a_text():
    assert repr(fzero.PerRank(fzero.PerRank(torch.zeros(2)))) == "PerRank(PerRank(float32 [2]))"
