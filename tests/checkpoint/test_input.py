"""What is given to a save or a load and cannot be right: the error names the leaf, or the argument, and what to do."""

import collections
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.checkpoint._differences import differences
from fzero.checkpoint._export_file import export
from fzero.sharding._boxes import PerRank
from tests.checkpoint.states import Layout, shard_step, state_in
from tests.helpers import ALL_STAGES

PARAMS = {"a": torch.zeros(4), "b": {"c": torch.zeros(3, 2)}, "n": torch.zeros(2, dtype=torch.int64)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    fzero.save(path, {**PARAMS, "step": 3})
    return path


def test_the_error_of_a_load_names_the_first_three_leaves_that_differ(saved):
    like = {"a": torch.zeros(5), "b": {"d": torch.zeros(3, 2)}, "n": torch.zeros(2), "step": 0, "e": torch.zeros(1)}
    with pytest.raises(fzero.errors.CheckpointError) as error:
        fzero.load(saved, like=like)
    assert str(error.value).split(" is of another tree: ")[1] == (
        "leaf 'a' is float32 [4] there, and float32 [5] here; it has no leaf 'b.d' (float32 [3, 2]); leaf 'n' is int64 "
        "[2] there, and float32 [2] here; and 2 more; see docs/trouble.md#a-checkpoint-that-does-not-load"
    )


def test_a_partial_load_reads_the_leaves_of_like_alone(saved):
    part = {"b": {"c": torch.ones(3, 2)}}
    with pytest.raises(fzero.errors.CheckpointError, match=r"no leaf 'a' \(float32 \[4\]\); .*; give partial=True"):
        fzero.load(saved, like=part)
    assert part["b"]["c"].sum() == 6, "written into before all was checked"
    assert fzero.load(saved, like=part, partial=True)["b"]["c"].sum() == 0
    with pytest.raises(fzero.errors.CheckpointError, match=r"it has no leaf 'x'"):
        fzero.load(saved, like={"x": torch.zeros(1)}, partial=True)


def test_a_saved_number_does_not_load_into_a_tensor(saved):
    with pytest.raises(fzero.errors.CheckpointError, match=r"leaf 'step' is a value there, and int64 \[\] here"):
        fzero.load(saved, like={**PARAMS, "step": torch.tensor(0)})


@pytest.mark.parametrize("name", [b"bytes", "nothing", "file", "file/x"])
def test_loading_from_a_path_without_a_checkpoint_is_refused(name, tmp_path):
    (tmp_path / "file").write_text("mine")
    path = name if isinstance(name, bytes) else tmp_path / name
    if isinstance(path, bytes):
        with pytest.raises(TypeError, match=r"path=b'.*': expected the path of a folder, or a URL"):
            fzero.load(path, like={})
        return
    with pytest.raises(fzero.errors.CheckpointError, match=r"is not a checkpoint: it has no file manifest.json"):
        fzero.load(path, like={})
    if "file" in str(path):
        with pytest.raises(fzero.errors.CheckpointError, match=r"is a file, or lies below one: expected a folder"):
            fzero.save(path, {"w": torch.zeros(1)})
        assert (tmp_path / "file").read_text() == "mine"


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "an object": ({"a": {"b": object()}}, TypeError, r"leaf 'a.b' is '<object .* which a checkpoint cannot hold"),
    "a set": ({"a": {1, 2}}, TypeError, r"leaf 'a' is '\{1, 2\}' of type set"),
    "complex": ({"a": 1j}, TypeError, r"leaf 'a' is '1j' of type complex"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, TypeError, r"leaf 'a' is a Tensor: expected a dense tensor"),
    "one path": (
        {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
        ValueError,
        r"two leaves of the path 'a.b': a dot in a key",
    ),
    "a dtype": (
        {"a": torch.zeros(2, dtype=torch.float8_e4m3fnuz)},
        TypeError,
        r"leaf 'a' has dtype torch.float8_e4m3fnuz",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_leaves_that_a_checkpoint_cannot_hold_are_named(name, tmp_path):
    values, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        fzero.save(tmp_path / "new", values)
    assert not (tmp_path / "new").exists()


def test_a_box_needs_the_mesh_that_it_was_cut_for(tmp_path):
    step, state = state_in(Layout({"dp": 2}, 3), PARAMS)
    with pytest.raises(ValueError, match=r"the tree leaf 'params.a' is in a box: give the mesh"):
        fzero.save(tmp_path, state)
    with pytest.raises(ValueError, match=r"the tree leaf 'params.a' was sharded for dp=2, and this mesh has dp=3"):
        fzero.save(tmp_path, state, fzero.mesh(dp=3))
    with pytest.raises(ValueError, match=r"has only part of unit 'b', without leaf|is not in this tree"):
        whole = {"b": {"c": torch.zeros(3), "d": torch.zeros(2)}}
        fzero.save(tmp_path, {"c": state_in(Layout({"dp": 2}, 3), whole)[1]["params"]["b"]["c"]}, step.mesh)


def test_donated_tensors_are_neither_saved_nor_loaded_into(saved, tmp_path):
    x = tree.map(torch.clone, PARAMS)
    fzero.jit(lambda x: tree.map(lambda y: y + 1, x), donate=0, backend="fx")(x)
    with pytest.raises(fzero.errors.DonatedError):
        fzero.save(tmp_path, x)
    with pytest.raises(fzero.errors.DonatedError):
        fzero.load(saved, like={**x, "step": 0})


def test_per_rank_values_load_on_the_same_number_of_ranks_only(tmp_path):
    mesh = fzero.mesh(dp=3)
    boxed = {"seen": mesh.split(torch.arange(6)), "w": torch.ones(2)}
    fzero.save(tmp_path, boxed, mesh)
    like = {"seen": mesh.split(torch.zeros(6, dtype=torch.int64)), "w": torch.zeros(2)}
    assert fzero.load(tmp_path, like=like, mesh=mesh)["seen"].value.tolist() == [[0, 1], [2, 3], [4, 5]]
    other = fzero.mesh(dp=2)
    like = {"seen": PerRank(torch.zeros(2, 2, dtype=torch.int64)), "w": torch.zeros(2)}
    with pytest.raises(fzero.errors.CheckpointError, match=r"'seen' is a PerRank value, int64 \[3, 2\] there"):
        fzero.load(tmp_path, like=like, mesh=other)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_per_rank_values_of_one_axis_are_saved_and_loaded(simulate, tmp_path):
    mesh = fzero.mesh(a=2, b=3, simulate=simulate)
    for axes, n in (("a", 2), ("b", 3), (None, 6)):
        box = PerRank({"x": torch.arange(n * 4).view(n, 2, 2), "y": torch.arange(n)}, axes)
        fzero.save(tmp_path, {"v": box}, mesh)
        like = PerRank({"x": torch.zeros(n, 2, 2, dtype=torch.int64), "y": torch.zeros(n, dtype=torch.int64)}, axes)
        loaded = fzero.load(tmp_path, like={"v": like}, mesh=mesh)["v"]
        assert torch.equal(loaded.value["x"], box.value["x"]) and torch.equal(loaded.value["y"], box.value["y"])


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_per_rank_values_of_one_axis_do_not_load_on_another_axis(simulate, tmp_path):
    mesh = fzero.mesh(a=2, b=2, c=1, simulate=simulate)
    rows = torch.arange(4).view(2, 2)
    fzero.save(tmp_path, {"v": PerRank(rows, "a")}, mesh)
    message = r"'v' is a PerRank value that differs along \('a',\) there, and along \('b',\) here: .*PerRank\(x, \('a',"
    with pytest.raises(fzero.errors.CheckpointError, match=message):
        fzero.load(tmp_path, like={"v": PerRank(torch.zeros_like(rows), "b")}, mesh=mesh)
    same = fzero.load(tmp_path, like={"v": PerRank(torch.zeros_like(rows), ("a", "c"))}, mesh=mesh)["v"]
    assert torch.equal(same.value, rows)
    plain = fzero.load(tmp_path, like={"v": torch.zeros_like(rows)}, mesh=mesh)["v"]  # all rows, on every rank
    assert torch.equal(plain, rows)
    every = torch.arange(4)
    fzero.save(tmp_path, {"v": PerRank(every)}, mesh)
    other = fzero.mesh(data=4, simulate=simulate)
    assert torch.equal(fzero.load(tmp_path, like={"v": PerRank(torch.zeros(4).long())}, mesh=other)["v"].value, every)


def test_plain_values_load_as_the_checkpoint_has_them(tmp_path):
    Point = collections.namedtuple("Point", "x name")
    values = {"point": Point(1.5, "a"), "data": {"files": ["a", "b"], "n": None}, "big": 2**80, "t": (1, True)}
    values["most"] = float("inf")
    fzero.save(tmp_path, values)
    like = {"point": Point(0.0, ""), "data": None, "big": 0, "t": (0, False), "most": 0.0}
    assert fzero.load(tmp_path, like=like) == values
    assert fzero.checkpoint.read(tmp_path, "data") == values["data"]


def test_the_error_of_a_load_names_a_leaf_that_the_checkpoint_lacks(saved):
    with pytest.raises(
        fzero.errors.CheckpointError, match=r"has no leaf 'x': it has 4 leaves, such as 'a', 'b.c', 'n'"
    ):
        fzero.checkpoint.read(saved, "x")


def test_a_load_allocates_memory_for_meta_tensors(tmp_path):
    opt = optim.adamw(1e-3)
    for stage in ALL_STAGES:
        step = shard_step(Layout({"dp": 2}, stage))
        state = step.init(PARAMS | {"n": torch.zeros(3)}, opt)
        fzero.save(tmp_path, state, step.mesh)
        like = step.init(tree.map(lambda x: x.to("meta"), PARAMS | {"n": torch.zeros(3)}), opt)
        loaded = fzero.load(tmp_path, like=like, mesh=step.mesh)
        assert not any(x.is_meta for x in tree.tensors(loaded))
        for x, y in zip(tree.tensors(loaded), tree.tensors(state), strict=True):
            assert torch.equal(x, y)


def test_a_box_that_was_overwritten_has_no_origin(tmp_path):
    """A load is an in-place write: what a shard was cut from is not its whole any more."""
    fzero.save(tmp_path, {"w": torch.ones(4)})
    mesh = fzero.mesh(dp=1)
    whole = torch.zeros(4)
    version = whole._version
    fzero.load(tmp_path, like={"w": whole}, mesh=mesh)
    assert whole._version > version


def test_meta_tensors_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match=r"the tree leaf 'b.c' is on the meta device, and has no values to save"):
        fzero.save(tmp_path, {"a": torch.zeros(2), "b": {"c": torch.zeros(2, device="meta")}})


@pytest.mark.parametrize("step", [-1, 10**15, True, 1.0])
def test_a_step_number_outside_its_range_is_refused(step, tmp_path):
    with pytest.raises(ValueError, match=r"expected the number of the step, .*an int from 0 to 999,999,999,999,999$"):
        fzero.checkpoint.checkpoints(tmp_path).save(step, {"a": torch.zeros(2)})


def test_the_greatest_step_number_is_listed_as_the_newest(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    runs.save(10**15 - 1, {"a": torch.zeros(2)}).wait()
    assert runs.newest() == 10**15 - 1


def test_a_leaf_with_the_path_of_a_part_of_a_box_is_refused(tmp_path):
    mesh = fzero.mesh(dp=2)
    values = {"a": mesh.local({"b": torch.zeros(2, 1)}), "a.b": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"two leaves of the path 'a.b'"):
        fzero.save(tmp_path, values, mesh)


class Nameless:
    """A node of a tree whose children have no names."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


torch.utils._pytree.register_pytree_node(Nameless, lambda x: (list(x.parts), None), lambda xs, _: Nameless(*xs))


def test_children_of_a_pytree_node_without_names_are_numbered_within_it(tmp_path):
    one, two = torch.ones(2), torch.ones(2) * 2
    values = {"z": Nameless(one, {"k": two}), "a": two + 1}
    assert tree.flatten_with_paths(values)[0] == ["z.0", "z.1.k", "a"]
    fzero.save(tmp_path, values)
    like = {"a": torch.zeros(2), "z": Nameless(torch.zeros(2), {"k": torch.zeros(2)})}  # in another order
    loaded = fzero.load(tmp_path, like=like)
    assert torch.equal(loaded["a"], two + 1) and torch.equal(loaded["z"].parts[0], one)
    assert torch.equal(fzero.load(tmp_path, like={"a": torch.zeros(2)}, partial=True)["a"], two + 1)


def test_plain_values_load_without_the_tensors_beside_them(tmp_path):
    fzero.save(tmp_path, {"w": torch.zeros(2), "step": 7, "at": {"epoch": 3, "seen": [1, 2]}})
    assert fzero.load(tmp_path, like={"step": 0}, partial=True) == {"step": 7}
    assert fzero.load(tmp_path, like={"at": {"epoch": 0}}, partial=True)["at"] == {"epoch": 3, "seen": [1, 2]}
    with pytest.raises(fzero.errors.CheckpointError, match="it has no leaf 'best' "):
        fzero.load(tmp_path, like={"step": 0, "best": 0.0}, partial=True)
    with pytest.raises(fzero.errors.CheckpointError, match="the tree has no leaf 'w'"):
        fzero.load(tmp_path, like={"step": 0})


def test_the_error_for_a_tree_of_a_single_value_says_single_value(tmp_path):
    fzero.save(tmp_path, {"step": 7})
    with pytest.raises(fzero.errors.CheckpointError, match=r"it has no leaf 'w' .*; the tree has no single value"):
        fzero.load(tmp_path, like={"w": torch.zeros(2), "step": 0})


def test_a_key_within_a_saved_dict_of_values_can_be_read(tmp_path):
    fzero.save(tmp_path, {"w": torch.zeros(2), "loader": {"at": {"epoch": 3}, "a.b": 4}})
    for path, value in (("loader.at.epoch", 3), ("loader.a.b", 4), ("loader.at", {"epoch": 3})):
        assert fzero.checkpoint.read(tmp_path, path) == value
    with pytest.raises(fzero.errors.CheckpointError, match="no leaf 'loaded': it has 2 leaves, such as 'loader'"):
        fzero.checkpoint.read(tmp_path, "loaded")
    with pytest.raises(fzero.errors.CheckpointError, match=r"no leaf 'loader.at.no'"):
        fzero.checkpoint.read(tmp_path, "loader.at.no")
    fzero.save(tmp_path, {"step": 7})
    assert fzero.checkpoint.read(tmp_path, "step") == 7


def test_a_path_that_begins_with_a_tilde_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fzero.save("~/x", {"w": torch.zeros(2)})
    assert (tmp_path / "x" / "manifest.json").exists()


@pytest.mark.parametrize("options", [{}, {"as_torch": True}])
def test_an_export_into_its_own_checkpoint_is_refused(options, saved):
    name = "manifest.json" if options else "a.safetensors"
    with pytest.raises(fzero.errors.CheckpointError, match="lies in the checkpoint's own folder: write it elsewhere"):
        export(saved, saved / name, **options)
    assert fzero.checkpoint.verify(saved)


def test_two_leaves_with_one_dcp_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"have one name, 'v.a.b'"):
        fzero.checkpoint.dcp.save(tmp_path, {"w": torch.zeros(2), "v": {"a.b": 1, "a": {"b": 2}}})


def test_differences_of_integers_are_exact(tmp_path):
    for name, x in (("one", 2**60), ("other", 2**60 + 1)):
        fzero.save(tmp_path / name, {"n": torch.tensor([5, x])})
    (actual,) = differences(tmp_path / "one", tmp_path / "other")
    assert (actual.count, actual.largest) == (1, 1.0)
