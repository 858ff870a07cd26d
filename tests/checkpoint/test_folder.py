"""A run's folder of checkpoints: the newest whole one, what is kept, and saves beside the training."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.checkpoint import __main__ as command
from fzero.checkpoint import _files
from fzero.checkpoint.layout import MANIFEST
from tests.checkpoint.helpers import memory_in
from tests.checkpoint.states import Layout, fill, same_bits, state_in, whole_of
from tests.distributed.launch import world


def numbered_state(i: int) -> dict[str, Any]:
    return {"w": torch.full((5,), float(i)), "step": i}


NEWEST = [(1, None, [6]), (3, None, [4, 5, 6]), (2, 3, [0, 3, 5, 6]), (9, 1, [*range(7)])]


@pytest.mark.parametrize("keep,every,steps", NEWEST)
def test_a_run_keeps_its_newest_checkpoints_and_every_nth(keep, every, steps, tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path, keep=keep, keep_every=every)
    for i in range(7):
        runs.save(i, numbered_state(i))
    runs.wait()
    assert runs.steps() == steps and sorted(os.listdir(tmp_path)) == [f"step-{i:08d}" for i in steps]
    assert runs.restore(numbered_state(99))["step"] == 6


def test_old_checkpoints_stay_until_a_newer_one_is_committed(tmp_path, monkeypatch):
    runs, lists = fzero.checkpoint.checkpoints(tmp_path, keep=1), []
    runs.save(1, numbered_state(1)).wait()
    put = _files.LocalFolder.put

    def looking(files: Any, name: str, data: bytes) -> None:
        lists.append(runs.steps())
        put(files, name, data)

    monkeypatch.setattr(_files.LocalFolder, "put", looking)
    runs.save(2, numbered_state(2)).wait()
    assert lists == [[1]] and runs.steps() == [2]


def test_without_a_checkpoint_restore_returns_like(tmp_path):
    state = numbered_state(0)
    assert fzero.checkpoint.checkpoints(tmp_path / "none").restore(state) is state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_stops_a_save_and_removes_nothing(bad, dtype, tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path, keep=1)
    runs.save(1, numbered_state(1), finite={"loss": torch.tensor(1.0, dtype=dtype), "norm": 0.5, "steps": 3}).wait()
    message = rf"finite leaf 'loss' is {bad} after step 2, so the checkpoint is not saved.*#nan-on-one-rank"
    with pytest.raises(FloatingPointError, match=message):
        runs.save(2, numbered_state(2), finite={"norm": 0.5, "loss": torch.tensor(bad, dtype=dtype)})
    with pytest.raises(FloatingPointError, match=f"finite is {bad}"):
        runs.save(2, numbered_state(2), finite=bad)
    with pytest.raises(FloatingPointError, match="finite is False"):
        runs.save(2, numbered_state(2), finite=optim.all_finite(torch.tensor([1.0, bad], dtype=dtype)))
    with pytest.raises(TypeError, match=r"finite leaf 'each' is PerRank\(.*: expected one number that is equal on all"):
        runs.save(2, numbered_state(2), finite={"each": fzero.PerRank(torch.ones(2))})
    runs.wait()
    assert runs.steps() == [1] and runs.restore(numbered_state(0))["step"] == 1


@pytest.mark.parametrize("memory", [False, True])
def test_reading_a_missing_run_folder_does_not_create_it(memory, tmp_path):
    shared = memory_in(tmp_path) if memory else None
    with fzero.checkpoint.checkpoints(tmp_path / "typo", memory=shared) as runs:
        assert runs.steps() == [] and runs.restore(numbered_state(3))["step"] == 3
    assert not (tmp_path / "typo").exists()
    with pytest.raises(ValueError, match=r"memory='/dev/shmm' is not a folder: expected one of shared memory, such as"):
        fzero.checkpoint.checkpoints(tmp_path / "typo", memory="/dev/shmm")


def spoil(path: Any, how: str) -> None:
    names = sorted(os.listdir(path))
    data = next(n for n in names if n.endswith(".safetensors"))
    if how == "no manifest":
        (path / MANIFEST).unlink()
    elif how == "a torn manifest":
        (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-9])
    elif how == "no data":
        (path / data).unlink()
    elif how == "short data":
        (path / data).write_bytes((path / data).read_bytes()[:-1])
    else:
        content = bytearray((path / data).read_bytes())
        content[-1] ^= 1
        (path / data).write_bytes(content)


@pytest.mark.parametrize("how", ["no manifest", "a torn manifest", "no data", "short data", "a flipped bit"])
def test_incomplete_checkpoints_are_skipped(how, tmp_path, caplog):
    runs = fzero.checkpoint.checkpoints(tmp_path, keep=9)
    for i in (8, 9, 10):
        runs.save(i, numbered_state(i)).wait()
    spoil(tmp_path / "step-00000010", how)
    with caplog.at_level(logging.WARNING, logger="fzero"):
        assert tree.map(lambda x: x, runs.restore(numbered_state(0)))["step"] == 9
    assert "skipped: " in caplog.text and "step-00000010" in caplog.text
    spoil(tmp_path / "step-00000009", "a flipped bit")
    loaded = runs.restore(numbered_state(0))
    assert loaded["step"] == 8 and loaded["w"].tolist() == [8.0] * 5


def test_restore_raises_if_all_checkpoints_are_damaged(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    runs.save(1, numbered_state(1)).wait()
    spoil(tmp_path / "step-00000001", "a flipped bit")
    with pytest.raises(fzero.errors.CheckpointError, match=r"no checkpoint is whole: .*safetensors is damaged"):
        runs.restore(numbered_state(0))


def test_restoring_another_tree_raises_and_skips_to_no_older_checkpoint(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    runs.save(1, {"w": torch.zeros(3), "step": 1}).wait()
    runs.save(2, numbered_state(2)).wait()
    with pytest.raises(fzero.errors.CheckpointError, match=r"'w' is float32 \[5\] there, and float32 \[3\] here"):
        runs.restore({"w": torch.zeros(3), "step": 0})


def test_the_next_save_removes_temporary_files_of_killed_saves(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path, keep=2)
    runs.save(1, numbered_state(1)).wait()
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "0123456789abcdef-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000009").mkdir()  # newer: it may be under way
    (tmp_path / "notes.txt").write_text("mine")
    runs.save(4, numbered_state(4)).wait()
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000001", "step-00000004", "step-00000009"]


# In the background.


def test_a_save_holds_the_values_at_the_call(tmp_path, monkeypatch):
    gate = threading.Event()
    write = _files.LocalFolder.write

    def waiting(files: Any, name: str, parts: Any) -> None:
        assert gate.wait(10)
        write(files, name, parts)

    monkeypatch.setattr(_files.LocalFolder, "write", waiting)
    step, state = state_in(Layout({"dp": 3}, 3), {"w": torch.zeros(7, 3), "n": torch.arange(5)})
    state, whole = fill(step, state)
    runs = fzero.checkpoint.checkpoints(tmp_path, step.mesh)
    saving = runs.save(1, state)
    with torch.no_grad():
        for x in tree.tensors(state):
            x.zero_()
    assert not saving.done() and "under way" in repr(saving) and runs.steps() == []
    assert not any(t.daemon for t in threading.enumerate() if "fzero.save" in t.name), "a script's end would end it"
    gate.set()
    runs.wait()
    assert saving.done() and "committed" in repr(saving)
    assert same_bits(whole_of(step, runs.restore(state)), whole)


def test_a_saved_tree_may_be_donated_at_once(tmp_path):
    """Nobody holds on to it, in the background or after a save."""
    f = fzero.jit(lambda s: tree.map(lambda x: x + 1, s), donate=0, backend="fx")
    state = {"w": torch.zeros(5), "v": torch.zeros(3).t()}
    runs = fzero.checkpoint.checkpoints(tmp_path, keep=99)
    for i in range(4):
        runs.save(i, state, background=i % 2 == 0)
        state = f(state)
    runs.wait()
    for i in range(4):
        assert fzero.checkpoint.read(tmp_path / f"step-{i:08d}", "w").tolist() == [float(i)] * 5


def test_the_next_save_or_the_end_raises_the_error_of_a_failed_background_save(tmp_path, monkeypatch):
    def raise_error(*args: Any) -> None:
        raise OSError(5, "planted")

    text = r"nothing was saved to '.*step-0000000\d': rank 0: OSError: \[Errno 5\] planted"
    with monkeypatch.context() as patch:
        patch.setattr(_files.LocalFolder, "write", raise_error)
        runs = fzero.checkpoint.checkpoints(tmp_path)
        runs.save(1, numbered_state(1))
        with pytest.raises(fzero.errors.CheckpointError, match=text):
            runs.save(2, numbered_state(2))
        with pytest.raises(fzero.errors.CheckpointError, match=text), fzero.checkpoint.checkpoints(tmp_path) as runs:
            saving = runs.save(3, numbered_state(3))
        assert saving.done() and "failed" in repr(saving)
    runs.save(4, numbered_state(4))
    runs.wait()
    assert runs.steps() == [4]


def test_background_saves_reuse_their_host_buffers(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    places = set()
    for i in range(3):
        runs.save(i, numbered_state(i)).wait()
        places.add(runs._staging.reserve(1).data_ptr())
    assert len(places) == 1


@pytest.mark.slow
def test_a_script_that_ends_waits_for_its_save(tmp_path):
    script = f"""
import time, torch, fzero
from fzero.checkpoint import __main__ as command
from fzero.checkpoint import _files
write = _files.LocalFolder.write
_files.LocalFolder.write = lambda *args: (time.sleep(0.5), write(*args))
fzero.checkpoint.checkpoints({str(tmp_path)!r}).save(1, {{"w": torch.ones(3)}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert fzero.checkpoint.checkpoints(tmp_path).steps() == [1]


def test_restore_prefers_the_copy_in_memory_to_the_one_on_disk(tmp_path):
    root, memory = tmp_path / "runs", memory_in(tmp_path)
    runs = fzero.checkpoint.checkpoints(root, memory=memory)
    runs.save(2, numbered_state(2))
    for i in (3, 4, 5):
        runs.save_in_memory(i, numbered_state(i))
    runs.wait()
    again = fzero.checkpoint.checkpoints(root, memory=memory)  # after the death of the process
    assert again.newest() == 5 and again.restore(numbered_state(0))["w"].tolist() == [5.0] * 5
    (step,) = (tmp_path / "memory").rglob("step-*")
    assert step.name == "step-00000005" and again.steps() == [2]
    again.save(6, numbered_state(6)).wait()
    assert again.newest() == 6 and again.restore(numbered_state(0))["step"] == 6
    spoil(step, "a flipped bit")
    spoil(root / "step-00000006", "no data")
    assert again.restore(numbered_state(0))["step"] == 2
    shutil.rmtree(root)  # another run has another memory
    assert fzero.checkpoint.checkpoints(root, memory=memory).newest() is None
    with pytest.raises(
        ValueError, match=r"save_in_memory needs a folder of shared memory: fzero.checkpoint.checkpoints\(..., memory="
    ):
        fzero.checkpoint.checkpoints(root).save_in_memory(1, {})


def test_two_processes_do_not_save_to_one_folder(tmp_path):
    with _files.LocalFolder(str(tmp_path)).exclusive():
        start = time.monotonic()
        with pytest.raises(
            fzero.errors.CheckpointError, match=r"another process saves here: give each process its own folder"
        ):
            fzero.save(tmp_path, numbered_state(1))
        assert time.monotonic() - start < 5
    fzero.save(tmp_path, numbered_state(1))


def test_rank_0_keeps_its_store_open_until_all_ranks_have_committed(tmp_path):
    """Without torchrun rank 0 keeps it; the last rank looks rarely."""
    script = f"""
import time, torch, fzero
from fzero.checkpoint import _agree
mesh = fzero.mesh(dp=2)
_agree._POLL_SECONDS = mesh.rank or 0.001
fzero.save({str(tmp_path)!r}, {{"w": torch.ones(3)}}, mesh)
print("committed")
"""
    done = world(2, "-c", script)
    assert done.returncode == 0 and done.stdout.count("committed") == 2, done.stderr[-2000:]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_options_of_a_checkpoint_folder_must_be_ints(wrong, tmp_path):
    for name in ("keep", "keep_every"):
        with pytest.raises(ValueError, match=f"{name}=.*: expected a number of .*, an int, at least 1"):
            fzero.checkpoint.checkpoints(tmp_path, **{name: wrong})
    if wrong not in (0, True):
        with pytest.raises(ValueError, match=r"step=.*: expected the number of the step, .* an int from 0 to"):
            fzero.checkpoint.checkpoints(tmp_path).save(wrong, {})


@pytest.mark.parametrize("how", ["save", "save_in_memory"])
def test_a_save_copies_plain_values_at_the_call(how, tmp_path, monkeypatch):
    gate, write = threading.Event(), _files.LocalFolder.write

    def late(*args: Any) -> None:
        gate.wait(20)
        write(*args)

    monkeypatch.setattr(_files.LocalFolder, "write", late)
    runs = fzero.checkpoint.checkpoints(tmp_path / "run", memory=memory_in(tmp_path))
    state = {"w": torch.zeros(2), "at": {"epoch": 1, "seen": [1]}}
    saving = getattr(runs, how)(1, state)
    state["at"]["epoch"] = 2
    state["at"]["seen"].append(2)
    gate.set()
    saving.wait()
    assert runs.restore({"w": torch.ones(2), "at": None})["at"] == {"epoch": 1, "seen": [1]}


def test_damage_in_memory_is_not_taken_for_a_new_run(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path / "run", memory=memory_in(tmp_path))
    runs.save_in_memory(5, numbered_state(5)).wait()
    (data,) = (tmp_path / "memory").rglob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(fzero.errors.CheckpointError, match=r"no checkpoint is whole: .* is damaged"):
        runs.restore(numbered_state(0))
    runs.save(4, numbered_state(4)).wait()
    assert runs.restore(numbered_state(0))["step"] == 4


def test_removing_a_link_to_a_checkpoint_keeps_the_checkpoint(tmp_path):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "run"
    fzero.save(elsewhere, numbered_state(1))
    root.mkdir()
    (root / "step-00000001").symlink_to(elsewhere)
    runs = fzero.checkpoint.checkpoints(root, keep=1)
    assert runs.restore(numbered_state(0))["step"] == 1
    runs.save(2, numbered_state(2)).wait()
    assert runs.steps() == [2] and fzero.load(elsewhere, numbered_state(0))["step"] == 1


def test_a_save_over_an_open_checkpoint_does_not_disturb_its_readers(tmp_path, monkeypatch):
    fzero.save(tmp_path, numbered_state(1))
    read, saved = _files.LocalFolder.read_into, []

    def after_another(*args: Any) -> None:
        if not saved:
            saved.append(True)
            fzero.save(tmp_path, numbered_state(2))
        read(*args)

    monkeypatch.setattr(_files.LocalFolder, "read_into", after_another)
    assert fzero.load(tmp_path, numbered_state(0))["w"].tolist() == [2.0] * 5


def test_a_run_that_goes_back_gets_a_notice_of_the_newer_steps(tmp_path, caplog):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    for step in (5, 9, 6):
        runs.save(step, numbered_state(step)).wait()
    assert [r.message.split(": ")[1] for r in caplog.records] == [f"{str(tmp_path)!r} holds step 9, and saves step 6"]


def test_a_background_save_that_fails_is_logged_even_if_nobody_waits(tmp_path, caplog, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    runs = fzero.checkpoint.checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(_files.LocalFolder, "write", full)
        saving = runs.save(1, numbered_state(1))
        while not saving.done():
            time.sleep(0.01)
    assert any("nothing was saved" in r.message and "No space left" in r.message for r in caplog.records)
    with pytest.raises(fzero.errors.CheckpointError, match="No space left"):
        runs.wait()


def test_of_two_checkpoints_of_a_step_the_one_in_memory_is_restored(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path / "run", memory=memory_in(tmp_path))
    runs.save(5, {"w": torch.zeros(1)}).wait()
    runs.save_in_memory(5, {"w": torch.ones(1)}).wait()
    assert runs.restore({"w": torch.zeros(1)})["w"] == 1


def test_memory_holds_one_step_of_a_run_that_was_rolled_back(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path / "run", memory=memory_in(tmp_path))
    for step in (5, 7, 3):
        runs.save_in_memory(step, numbered_state(step)).wait()
    assert len(list((tmp_path / "memory").rglob("manifest.json"))) == 1
    assert runs.restore(numbered_state(0))["step"] == 3


def test_a_copy_of_a_run_has_memory_of_its_own(tmp_path):
    runs = fzero.checkpoint.checkpoints(tmp_path / "run", memory=memory_in(tmp_path))
    runs.save(1, numbered_state(1)).wait()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    runs.save_in_memory(2, numbered_state(2)).wait()
    copy = fzero.checkpoint.checkpoints(tmp_path / "copy", memory=memory_in(tmp_path))
    assert copy.restore(numbered_state(0))["step"] == 1
    copy.save_in_memory(3, numbered_state(3)).wait()
    assert runs.restore(numbered_state(0))["step"] == 2


def test_removal_begins_with_the_manifest(tmp_path, monkeypatch):
    runs = fzero.checkpoint.checkpoints(tmp_path, keep=1)
    runs.save(1, numbered_state(1)).wait()
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)  # a kill
    runs.save(2, numbered_state(2)).wait()
    assert runs.steps() == [2] and os.path.isdir(tmp_path / "step-00000001")


def test_files_that_cannot_be_removed_do_not_fail_a_save(tmp_path, monkeypatch, caplog):
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_files.LocalFolder, "remove", refuse)
    fzero.save(tmp_path, numbered_state(1))
    assert fzero.load(tmp_path, numbered_state(0))["step"] == 1
    assert any("older files could not be removed" in r.message for r in caplog.records)


def test_a_process_that_was_forked_during_a_save_does_not_keep_its_lock(tmp_path):
    ready, go = os.pipe(), os.pipe()
    with _files.files_at(tmp_path).exclusive():
        child = os.fork()
        if child == 0:
            os.write(ready[1], b".")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    fzero.save(tmp_path, numbered_state(1))
    os.write(go[1], b".")
    os.waitpid(child, 0)


def test_checkpoints_that_are_removed_meanwhile_are_no_damage(tmp_path, monkeypatch, capsys):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    for step in (1, 2):
        runs.save(step, numbered_state(step)).wait()

    def remove_then_verify(path: str, progress: Any) -> int:
        if path.endswith("1"):
            shutil.rmtree(path)
        return fzero.checkpoint.verify(path, progress)

    monkeypatch.setattr(command, "verify", remove_then_verify)
    assert command.main(["verify", str(tmp_path)]) == 0
    assert "removed meanwhile" in capsys.readouterr().out
