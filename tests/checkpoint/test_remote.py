"""Checkpoints in an object store, by fsspec: here the one that lives in this process's memory."""

import fsspec
import pytest
import torch

import fzero
from fzero.checkpoint import _files
from tests.checkpoint.states import Layout, fill, same_bits, state_in, whole_of

PARAMS = {"w": torch.zeros(9, 5), "b": torch.zeros(4), "n": torch.zeros(3, dtype=torch.int64)}


@pytest.fixture
def root(request):
    yield f"memory://{request.node.name}"
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_a_remote_checkpoint_of_any_layout_loads_into_any_layout(root):
    step, state = state_in(Layout({"dp": 3}, 3), PARAMS)
    state, whole = fill(step, state)
    fzero.save(f"{root}/saved/", state, step.mesh)
    for layout in (Layout({"dp": 2}, 1), Layout({"dp": 4}, 3), Layout({"dp": 3}, 3)):
        other, like = state_in(layout, PARAMS)
        assert same_bits(whole_of(other, fzero.load(f"{root}/saved", like=like, mesh=other.mesh)), whole)
    assert fzero.checkpoint.verify(f"{root}/saved") > sum(x.nbytes for x in PARAMS.values())


def test_a_folder_of_checkpoints_works_on_an_object_store(root):
    with fzero.checkpoint.checkpoints(root, keep=2, keep_every=3) as runs:
        assert runs.newest() is None and runs.steps() == []
        for i in range(6):
            runs.save(i, {"w": torch.full((3,), float(i)), "step": i})
    assert runs.steps() == [0, 3, 4, 5] and runs.newest() == 5
    assert runs.restore({"w": torch.zeros(3), "step": 0})["step"] == 5


def test_a_remote_save_commits_by_one_put_of_its_manifest(root, monkeypatch):
    fzero.save(root, {"w": torch.zeros(3)})

    def raise_error(*args: object) -> None:
        raise OSError(5, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(_files.Remote, "put", raise_error)
        with pytest.raises(
            fzero.errors.CheckpointError, match=r"nothing was saved to 'memory://.*': rank 0: OSError: "
        ):
            fzero.save(root, {"w": torch.ones(3)})
    assert fzero.load(root, like={"w": torch.ones(3)})["w"].sum() == 0
    fzero.save(root, {"w": torch.ones(3)})
    assert fzero.load(root, like={"w": torch.zeros(3)})["w"].sum() == 3
    assert len([n for n in fsspec.filesystem("memory").find(root.removeprefix("memory:/")) if "safetensors" in n]) == 1


@pytest.mark.parametrize("how", ["missing", "short", "changed"])
def test_a_damaged_remote_checkpoint_is_refused(how, root):
    fzero.save(root, {"w": torch.zeros(300)})
    store = fsspec.filesystem("memory")
    (name,) = [n for n in store.find(root.removeprefix("memory:/")) if "safetensors" in n]
    content = store.cat_file(name)
    store.rm_file(name)
    if how != "missing":
        store.pipe_file(name, content[:-1] if how == "short" else content[:-1] + b"\1")
    for use in (lambda: fzero.load(root, like={"w": torch.zeros(300)}), lambda: fzero.checkpoint.verify(root)):
        with pytest.raises(fzero.errors.CheckpointError, match=r"is missing|is damaged|bytes of"):
            use()


def test_a_store_that_is_not_known_is_an_error_in_words():
    with pytest.raises(fzero.errors.CheckpointError, match=r"'nothing://x': Protocol not known: nothing"):
        fzero.load("nothing://x", like={})


def test_loading_from_an_empty_object_store_is_refused(root):
    with pytest.raises(
        fzero.errors.CheckpointError, match=r"'memory://.*' is not a checkpoint: it has no file manifest.json"
    ):
        fzero.load(root, like={})
