"""Checkpoints of torch.distributed.checkpoint: what is written is read there and here, bit for bit, in all layouts."""

import functools
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import PerRank
from tests.checkpoint.states import Layout, fill, same_bits, shard_step, state_in, whole_of
from tests.helpers import cases

LAYOUTS = {
    "whole": Layout({"dp": 1}, 0),
    "stage 3": Layout({"dp": 4}, 3),
    "stage 1": Layout({"dp": 3}, 1),
    "hybrid": Layout({"replica": 2, "shard": 3}, 3, "shard"),
    "tensor parallel": Layout({"dp": 3, "tp": 2}, 3, "dp", split=True),
    "two axes": Layout({"a": 2, "b": 2}, 2),
}
PARAMS: dict[str, Any] = {
    "blocks": [{"tp": torch.zeros(4, 3, 8), "b": torch.zeros(5), "s": torch.zeros(())} for _ in range(2)],
    "empty": torch.zeros(3, 0),
    "half": torch.zeros(3, 5, 2, dtype=torch.bfloat16),
    "mask": torch.zeros(7, dtype=torch.bool),
}
PARAMS["head"] = PARAMS["blocks"][0]["b"]


def torch_saved(path: Path, values: Any) -> Path:
    """Save with torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(values, checkpoint_id=path, no_dist=True)
    return path


def torch_loaded(path: Path, values: Any) -> Any:
    """Load with torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(values, checkpoint_id=path, no_dist=True)
    return values


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    """A function that returns a state that a layout saved, and it whole."""

    @functools.cache
    def save(name: str) -> tuple[Path, Any]:
        step, state = state_in(LAYOUTS[name], PARAMS)
        state, whole = fill(step, state)
        path = tmp_path_factory.mktemp("saved") / "dcp"
        fzero.checkpoint.dcp.save(path, state, step.mesh)
        return path, whole

    return save


@pytest.mark.parametrize("source", cases([*LAYOUTS][::3], LAYOUTS))
def test_a_dcp_folder_of_any_layout_loads_into_any_layout(source, saved):
    path, whole = saved(source)
    for layout in LAYOUTS.values():
        step, like = state_in(layout, PARAMS)
        loaded = fzero.checkpoint.dcp.load(path, like=like, mesh=step.mesh)
        assert same_bits(whole_of(step, loaded), whole), layout


@pytest.mark.parametrize("source", LAYOUTS)
def test_torch_distributed_checkpoint_reads_each_leaf_unsharded(source, saved, tmp_path):
    path, whole = saved(source)
    dcp_to_torch_save(path, tmp_path / "all.pt")
    result = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same_bits(result["params"], whole["params"])
    assert same_bits({k: result[k] for k in ("key", "step", "data")}, {k: whole[k] for k in ("key", "step", "data")})
    flat = dict(zip(*tree.flatten_with_paths({"params": whole["params"]})[:2], strict=True))
    like = {"params": tree.map(torch.zeros_like, whole["params"]), "step": 0, "data": {"epoch": 0, "files": [""]}}
    mine = torch_loaded(path, like)
    assert same_bits(dict(zip(*tree.flatten_with_paths({"params": mine["params"]})[:2], strict=True)), flat)
    assert mine["step"] == 3 and mine["data"] == {"epoch": 1, "files": ["a"]}


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_dcp_folders_of_torch_are_read_into_boxes(layout, tmp_path):
    values = {"model": module().state_dict(), "epoch": 4, "lists": [{"a": [1, 2]}, {"a": []}], "seen": {"x": (1, 2.5)}}
    torch_saved(tmp_path / "torch", values)
    step = shard_step(layout)
    like, _ = step.init(tree.map(torch.zeros_like, dict(values["model"])), optim.sgd(0.1))
    loaded = fzero.checkpoint.dcp.load(
        tmp_path / "torch",
        like={"net": like, "epoch": 0, "lists": [], "seen": {}},
        mesh=step.mesh,
        name=lambda path: path.replace("net.", "model."),
    )
    assert same_bits(step.gather(loaded.pop("net")), dict(values.pop("model"))) and loaded == values


def test_a_name_function_maps_paths_in_save_and_load(tmp_path):
    step = shard_step(LAYOUTS["stage 3"])
    whole = dict(module().named_parameters())
    params, _ = step.init(tree.map(torch.clone, whole), optim.sgd(0.1))
    fzero.checkpoint.dcp.save(
        tmp_path / "a", {"p": params}, step.mesh, name=lambda path: path.replace("p.", "model.", 1)
    )
    other = torch_loaded(tmp_path / "a", {"model": tree.map(torch.zeros_like, whole)})
    assert same_bits(other["model"], whole)
    with pytest.raises(ValueError, match=r"leaves 'p.0.weight' and 'p.0.bias' have one name, 'x': expected a name for"):
        fzero.checkpoint.dcp.save(tmp_path / "b", {"p": params}, step.mesh, name=lambda path: "x")


def test_dcp_save_writes_each_element_once(saved):
    """What several ranks hold is one rank's, and a leaf of d dimensions is 2 d - 1 chunks of each rank at most."""
    for name in ("stage 1", "hybrid", "tensor parallel"):
        path, whole = saved(name)
        metadata = torch_dcp.FileSystemReader(path).read_metadata()
        for leaf, x in zip(*tree.flatten_with_paths(whole["params"])[:2], strict=True):
            there = metadata.state_dict_metadata[f"params.{leaf}"]
            assert sum(c.sizes.numel() for c in there.chunks) == x.numel(), leaf
            assert len(there.chunks) <= max(2 * x.ndim - 1, 1) * LAYOUTS[name].mesh.size, leaf


def test_dcp_saves_and_loads_leaves_of_any_strides(tmp_path):
    x = torch.randn(4, 3, dtype=torch.complex64).t().conj()
    mesh = fzero.mesh(dp=2)
    rows = PerRank(torch.randn(3, 2, 4).permute(1, 2, 0))
    fzero.checkpoint.dcp.save(tmp_path / "a", {"x": x, "rows": rows}, mesh)
    like = torch.zeros(4, 3, dtype=torch.complex64).t(), PerRank(torch.zeros(3, 2, 4).permute(1, 2, 0))
    loaded = fzero.checkpoint.dcp.load(tmp_path / "a", like={"x": like[0], "rows": like[1]}, mesh=mesh)
    assert torch.equal(loaded["x"], x) and torch.equal(like[0], x) and torch.equal(loaded["rows"].value, rows.value)


def test_dcp_load_allocates_memory_for_meta_leaves(tmp_path):
    fzero.checkpoint.dcp.save(tmp_path / "a", {"w": torch.arange(5.0)})
    step = shard_step(Layout({"dp": 4}, 3))
    like, _ = step.init({"w": torch.empty(5, device="meta")}, optim.sgd(0.1))
    assert fzero.checkpoint.dcp.load(tmp_path / "a", like=like, mesh=step.mesh)["w"].data.tolist() == [
        [0, 1],
        [2, 3],
        [4, 0],
        [0, 0],
    ]


def assert_refused(text: str, f: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(fzero.errors.CheckpointError, match=text):
        f(*args, **options)


def test_a_tree_that_differs_is_refused_before_anything_is_read(tmp_path):
    fzero.checkpoint.dcp.save(tmp_path / "a", {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1), "v": 1})
    like = {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.int32), "c": 5, "d": torch.zeros(()), "e": 0}
    assert_refused(
        r"/a' is of another tree: leaf 'a' is float32 \[2\] there, and float32 \[3\] here; leaf 'b' is float32 \[3\] "
        r"there, and int32 \[3\] here; it has no leaf 'd' \(float32 \[\]\); and 3 more$",
        fzero.checkpoint.dcp.load,
        tmp_path / "a",
        like,
    )
    like = {"a": torch.zeros(2)}
    text = r"the tree has no leaf 'b' \(float32 \[3\]\); .*'v' \(a value\); give partial=True to leave leaves out$"
    assert_refused(text, fzero.checkpoint.dcp.load, tmp_path / "a", like)
    assert like["a"].sum() == 0 and fzero.checkpoint.dcp.load(tmp_path / "a", like, partial=True)["a"].sum() == 2


def test_a_folder_that_holds_a_checkpoint_is_left_as_it_is(tmp_path):
    values = {"w": torch.ones(2)}
    fzero.checkpoint.dcp.save(tmp_path / "a", values)
    assert_refused(
        r"/a' holds a checkpoint \(.metadata\): save to a folder of",
        fzero.checkpoint.dcp.save,
        tmp_path / "a",
        {"w": 1},
    )
    assert torch.equal(fzero.checkpoint.dcp.load(tmp_path / "a", {"w": torch.zeros(2)})["w"], values["w"])
    fzero.save(tmp_path / "b", values)
    assert_refused(r"/b' holds a checkpoint \(manifest.json\)", fzero.checkpoint.dcp.save, tmp_path / "b", values)


def test_a_killed_dcp_save_leaves_no_checkpoint_and_can_be_repeated(tmp_path, monkeypatch):
    """DCP renames its metadata into place at the end."""
    writer = torch_dcp.FileSystemWriter
    with monkeypatch.context() as patch:
        patch.setattr(writer, "finish", lambda *args, **options: 1 / 0)
        assert_refused(
            r"nothing was saved to .*/a': rank 0: ZeroDivisionError",
            fzero.checkpoint.dcp.save,
            tmp_path / "a",
            {"w": 1},
        )
    assert os.listdir(tmp_path / "a")
    assert_refused(
        r"/a' is not a checkpoint of DCP: it has no file .metadata$",
        fzero.checkpoint.dcp.load,
        tmp_path / "a",
        {"w": 1},
    )
    fzero.checkpoint.dcp.save(tmp_path / "a", {"w": torch.ones(2)})
    assert fzero.checkpoint.dcp.load(tmp_path / "a", {"w": torch.zeros(2)})["w"].sum() == 2


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_dcp_load_runs_no_code_from_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch_saved(tmp_path / "value", {"w": torch.ones(1), "v": Evil()})
    like = {"w": torch.zeros(1), "v": 0}
    assert_refused(
        r"could not be read: rank 0: value 'v' is not plain data", fzero.checkpoint.dcp.load, tmp_path / "value", like
    )
    metadata = torch_dcp.FileSystemReader(tmp_path / "value").read_metadata()
    metadata.planner_data = Evil()
    (tmp_path / "value" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(
        r"damaged, or not DCP's: it asks for posix.mkdir, which", fzero.checkpoint.dcp.load, tmp_path / "value", like
    )
    assert not os.path.exists("ran")


def test_a_leaf_of_which_a_part_is_missing_is_refused(tmp_path):
    fzero.checkpoint.dcp.save(tmp_path / "a", {"w": torch.ones(6)}, None)
    metadata = torch_dcp.FileSystemReader(tmp_path / "a").read_metadata()
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([5])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(
        "lacks a part of leaf 'w', or has a part twice",
        fzero.checkpoint.dcp.load,
        tmp_path / "a",
        {"w": torch.zeros(6)},
    )


def test_dcp_save_takes_paths_of_a_file_system_only():
    for f in (fzero.checkpoint.dcp.save, fzero.checkpoint.dcp.load):
        with pytest.raises(ValueError, match=r"path='s3://b/c' is a URL: expected a local folder"):
            f("s3://b/c", {})
