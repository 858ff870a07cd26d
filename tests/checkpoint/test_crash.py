"""A save that dies at any operation on files, by a kill or a power cut, leaves the old tree or the new one."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import _files
from tests.checkpoint.states import Layout, fill, same_bits, state_in, whole_of
from tests.helpers import either


class Died(BaseException):
    """No `except Exception` sees it, as none sees a kill."""


class DyingOS:
    """The module `os`, that dies at its n-th operation which changes a file; `durable` is what a power cut leaves."""

    def __init__(self, root: Path, dies_at: int) -> None:
        self.root, self.left, self.contents, self.names = root, dies_at, dict[int, bytes](), dict[str, dict[str, int]]()
        for folder, _, _ in os.walk(root):
            self.sync_folder(folder)
            for name in os.listdir(folder):
                self.sync_file(os.path.join(folder, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Died

    def sync_folder(self, folder: str) -> None:
        entries = [e for e in os.scandir(folder) if e.is_file()]
        self.names[folder] = {e.name: e.inode() for e in entries}

    def sync_file(self, path: Any) -> None:
        if os.path.isfile(path) or isinstance(path, int):
            at = os.open(f"/proc/self/fd/{path}" if isinstance(path, int) else path, os.O_RDONLY)
            self.contents[os.fstat(at).st_ino] = os.pread(at, 1 << 30, 0)
            os.close(at)

    def writev(self, fd: int, views: Any) -> int:
        if self.left == 0:
            os.write(fd, views[0][: len(views[0]) // 2])
        self._step()
        return os.write(fd, views[0][: len(views[0]) // 2 + 1])  # a part, as a system may

    def fsync(self, fd: int) -> None:
        self._step()
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.sync_folder(path) if os.path.isdir(path) else self.sync_file(fd)

    def rename(self, one: str, other: str) -> None:
        self._step()
        os.rename(one, other)

    def unlink(self, path: str) -> None:
        self._step()
        os.unlink(path)

    def makedirs(self, path: str, **options: Any) -> None:
        self._step()
        os.makedirs(path, **options)

    def cut_power(self) -> None:
        """Leave of each folder the names, and of each file the bytes, that were made durable."""
        for folder, names in self.names.items():
            for name in [e.name for e in os.scandir(folder) if e.is_file()]:
                os.unlink(os.path.join(folder, name))
            for name, inode in names.items():
                Path(folder, name).write_bytes(self.contents.get(inode, b""))


def load_whole(path: Path, layout: Layout, like: Any) -> Any:
    step, state = state_in(layout, like)
    return whole_of(step, fzero.load(path, like=state, mesh=step.mesh))


@pytest.mark.parametrize("power", [pytest.param(False, marks=pytest.mark.slow), True], ids=["killed", "power cut"])
def test_a_save_that_dies_anywhere_leaves_the_old_tree_or_the_new_one(power, tmp_path, monkeypatch):
    layout, params = Layout({"dp": 2}, 3), {"w": torch.zeros(7, 3), "v": torch.zeros(5, dtype=torch.int64)}
    step, state = state_in(layout, params)
    (old, old_whole), (new, new_whole) = [fill(step, state, seed) for seed in (0, 1)]
    results, dies_at, stride = [], 0, either(3, 1)
    while not results or results[-1] != "finished":
        path = tmp_path / f"{dies_at}"
        fzero.save(path, old, step.mesh)
        dying = DyingOS(path, dies_at)
        monkeypatch.setattr(_files, "os", dying)
        try:
            fzero.save(path, new, step.mesh)
            results.append("finished")
        except Died:
            if power:
                dying.cut_power()
        monkeypatch.undo()
        loaded = load_whole(path, Layout({"dp": 3}, 1), params)
        is_old, is_new = same_bits(loaded, old_whole), same_bits(loaded, new_whole)
        assert is_old != is_new, f"a mixture, after death at operation {dies_at}"
        if not results or results[-1] != "finished":
            results.append("old" if is_old else "new")
        fzero.save(path, new, step.mesh)
        assert same_bits(load_whole(path, layout, params), new_whole), f"no new save, after death at {dies_at}"
        assert len([n for n in os.listdir(path) if n.endswith(".safetensors")]) == 2, "leftovers"
        dies_at += stride
    assert (
        stride * results.index("new") > 10
        and results[-1] == "finished"
        and results == sorted(results, key=["old", "new", "finished"].index)
    )


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_a_first_save_that_dies_leaves_no_checkpoint_or_a_whole_one(power, tmp_path, monkeypatch):
    tree, outcomes = {"w": torch.arange(5.0), "step": 1}, []
    for dies_at in range(30):
        path = tmp_path / f"{dies_at}"
        path.mkdir()
        dying = DyingOS(path, dies_at)
        monkeypatch.setattr(_files, "os", dying)
        try:
            fzero.save(path, tree)
        except Died:
            if power:
                dying.cut_power()
        monkeypatch.undo()
        try:
            outcomes.append(fzero.load(path, like={"w": torch.zeros(5), "step": 0})["w"].tolist() == [0, 1, 2, 3, 4])
        except fzero.errors.CheckpointError as error:
            outcomes.append("has no file manifest.json" in str(error) and "none")
    assert (
        "none" in outcomes
        and True in outcomes
        and False not in outcomes
        and outcomes == sorted(outcomes, key=str, reverse=True)
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_loses_nothing_that_was_saved(background, tmp_path, monkeypatch):
    fzero.save(tmp_path, {"w": torch.zeros(9)})
    before = sorted(os.listdir(tmp_path))

    def full(fd: int, views: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(
            fzero.errors.CheckpointError, match=r"nothing was saved to .*: rank 0: OSError: .*No space left on device"
        ):
            fzero.save(tmp_path, {"w": torch.ones(9)}, background=background).wait()
    assert sorted(os.listdir(tmp_path)) == before and fzero.load(tmp_path, like={"w": torch.ones(9)})["w"].sum() == 0


def test_a_save_checks_for_free_disk_space_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(_files.LocalFolder, "free", lambda files: 10)
    with pytest.raises(fzero.errors.CheckpointError, match=r"the save needs 36 bytes, and its disk has 10 free"):
        fzero.save(tmp_path / "new", {"w": torch.ones(9)})
    assert not (tmp_path / "new").exists()
