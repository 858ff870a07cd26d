"""Leaves that share memory, in what is saved and in what is read into."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.checkpoint._read_memory import _overlapping_indices
from tests.checkpoint.states import Layout, fill, same_bits, shard_step, whole_of
from tests.helpers import examples

VIEWS: dict[str, Any] = {
    "a column": lambda x: x[:, 0],
    "the next column": lambda x: x[:, 1],
    "rows": lambda x: x[:2],
    "later rows": lambda x: x[2:],
    "flat": lambda x: x.view(-1),
    "transposed": lambda x: x.T,
    "every other": lambda x: x.view(-1)[::2],
    "the others": lambda x: x.view(-1)[1::2],
    "bytes": lambda x: x.view(torch.uint8)[3],
    "none": lambda x: x[:0],
    "another": lambda x: torch.zeros(3),
}


@given(st.lists(st.sampled_from(sorted(VIEWS)), max_size=5))
def test_tensors_overlap_if_an_element_has_the_same_address(names):
    x = torch.zeros(4, 3)
    views = [VIEWS[name](x) for name in names]
    first, expected = dict[int, int](), set[int]()
    for i, view in enumerate(views):
        addresses = {
            at + byte
            for at in (view.data_ptr() + view.element_size() * offsets_of(view)).tolist()
            for byte in range(view.element_size())
        }
        expected |= {i} if any(a in first for a in addresses) else set()
        first |= dict.fromkeys(addresses, i)
    assert _overlapping_indices(views) == expected


def offsets_of(x: torch.Tensor) -> torch.Tensor:
    grid = torch.zeros(x.shape, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        grid = grid + (torch.arange(size) * stride).view(-1, *[1] * (x.ndim - d - 1))
    return grid.reshape(-1)


def test_an_expanded_tensor_overlaps_with_itself():
    assert _overlapping_indices([torch.zeros(3), torch.zeros(1).expand(3), torch.zeros(1).expand(1, 1)]) == {1}


@pytest.mark.parametrize("name", ["flat", "rows", "transposed", "every other"])
def test_leaves_that_share_memory_are_loaded_apart(name, tmp_path):
    x = torch.arange(12.0).view(4, 3)
    saved = {"a": x + 100, "b": VIEWS[name](x).clone()}
    fzero.save(tmp_path, saved)
    into = torch.zeros(4, 3)
    loaded = fzero.load(tmp_path, like={"a": into, "b": VIEWS[name](into)})
    assert same_bits(loaded, saved) and loaded["a"] is into


def test_columns_of_one_matrix_are_loaded_in_place(tmp_path):
    saved = {"a": torch.arange(4.0), "b": -torch.arange(4.0)}
    fzero.save(tmp_path, saved)
    into = torch.zeros(4, 3)
    loaded = fzero.load(tmp_path, like={"a": into[:, 0], "b": into[:, 2]})
    assert same_bits(loaded, saved) and torch.equal(into[:, 2], saved["b"])


def test_an_expanded_leaf_gets_memory_of_its_own(tmp_path):
    fzero.save(tmp_path, {"a": torch.arange(3.0)})
    assert fzero.load(tmp_path, like={"a": torch.zeros(1).expand(3)})["a"].tolist() == [0, 1, 2]


@examples(6, 12)
@given(st.integers(0, 3), st.integers(1, 4))
def test_averages_that_start_as_the_parameters_are_loaded_apart(tmp_path_factory, stage, n):
    path = tmp_path_factory.mktemp("saved")
    step = shard_step(Layout({"dp": n}, stage))
    params, _ = step.init({"w": torch.zeros(5), "b": [torch.zeros(2, 3)]}, optim.sgd(0.1))
    state, whole = fill(step, {"params": params, "opt_state": step.partition(step.gather(params))}, seed=1)
    fzero.save(path, state, step.mesh)
    average = params if stage == 3 else fzero.tree.map(lambda x: x.view(-1).view(x.shape), params)
    loaded = fzero.load(path, like={"params": params, "opt_state": average}, mesh=step.mesh)
    assert same_bits(whole_of(step, loaded), whole)


def test_per_rank_values_that_share_memory_are_loaded_apart(tmp_path):
    mesh, x = fzero.mesh(dp=2), torch.zeros(2, 3)
    fzero.save(tmp_path, {"a": mesh.local(x + 1), "b": mesh.local(x + 2)}, mesh)
    loaded = fzero.load(tmp_path, like={"a": mesh.local(x), "b": mesh.local(x)}, mesh=mesh)
    assert (loaded["a"].value.unique().item(), loaded["b"].value.unique().item()) == (1, 2)
