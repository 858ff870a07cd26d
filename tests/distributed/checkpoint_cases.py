"""Cases of checkpoints that every rank of a world runs; see test_gloo.py."""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.fsdp import fully_shard

import fzero
from fzero import optim, tree
from fzero.checkpoint import _files, _save, _shared_memory
from fzero.checkpoint._error import DamagedError
from fzero.checkpoint.layout import PAGE_BYTES
from tests.checkpoint.states import Layout, fill, same_bits, state_in, whole_of
from tests.distributed.harness import Cases, into, run
from tests.helpers import ALL_STAGES, LEAST, either, mlp_batch, mlp_loss, mlp_params, train_step_for

CASES: Cases = {}
case = into(CASES)
OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


@contextmanager
def folder(mesh: fzero.ranks.Mesh) -> Iterator[Path]:
    """A folder that all ranks share, for a while."""
    shared = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(shared)
    yield Path(shared[0])
    torch.distributed.barrier()
    if mesh.rank == 0:
        shutil.rmtree(shared[0])


class OnProcesses(Layout):
    """A layout on the world's processes."""

    @property
    def mesh(self) -> fzero.ranks.Mesh:
        return fzero.mesh(**self.axes)


PARAMS = {"h": [{"w": torch.zeros(4, 3, 2), "b": torch.zeros(5)} for _ in range(2)], "n": torch.zeros(3).bool()}
PARAMS["head"] = PARAMS["h"][0]["b"]


@case
def what_processes_save_any_layout_loads_and_the_reverse(mesh: fzero.ranks.Mesh) -> None:
    with folder(mesh) as path:
        for stage in either((1, 3), (0, 1, 3)):
            step, state = state_in(OnProcesses({"dp": mesh.size}, stage), PARAMS)
            state, whole = fill(step, state, stage)
            fzero.save(path / "processes", state, step.mesh)
            for there in (
                Layout({"dp": 3}, 3),
                Layout({"dp": mesh.size}, 1),
                Layout({"dp": 2, "tp": 2}, 3, "dp", True),
            ):
                other, like = state_in(there, PARAMS)
                loaded = fzero.load(path / "processes", like=like, mesh=other.mesh)
                assert same_bits(whole_of(other, loaded), whole)
                if mesh.rank == 0:
                    fzero.save(path / "simulated", loaded, other.mesh)
                torch.distributed.barrier()
                _, like = state_in(OnProcesses({"dp": mesh.size}, stage), PARAMS)
                assert same_bits(fzero.load(path / "simulated", like=like, mesh=mesh), state)


@case
def a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(mesh: fzero.ranks.Mesh) -> None:
    """Bitwise, jitted with donation, saved in the background while the next steps overwrite what is saved."""

    def go_on(step: Any, state: Any, steps: range, runs: Any = None) -> Any:
        for i in steps:
            if runs is not None:
                runs.save(i, state)
            params, opt_state, _ = step(state["params"], state["opt_state"], mesh.split(mlp_batch(4 * mesh.size, i)))
            state = {"params": params, "opt_state": opt_state, "step": i + 1}
        return state

    def slow(files: Any, name: str, parts: Any, write: Any = _files.LocalFolder.write) -> None:
        time.sleep(0.05)
        write(files, name, parts)

    for stage, other in either(((1, 3),), ((3, 2), (1, 3), (2, 2))):
        with folder(mesh) as path, pytest.MonkeyPatch.context() as patch:
            patch.setattr(_files.LocalFolder, "write", slow)
            sharded = [fzero.shard(train_step_for(mlp_loss, OPT), stage=s, mesh=mesh) for s in (stage, other)]
            one, two = [fzero.jit(s, backend="fx", **LEAST) for s in sharded]
            with fzero.checkpoint.checkpoints(path, mesh, keep=2, keep_every=3) as runs:
                params, opt_state = one.init(mlp_params(), OPT)
                whole = go_on(one, {"params": params, "opt_state": opt_state, "step": 0}, range(6), runs)
            assert runs.steps() == [0, 3, 4, 5]
            torch.distributed.barrier()
            if mesh.rank == 0:
                shutil.rmtree(path / "step-00000005"), shutil.rmtree(path / "step-00000004")
            torch.distributed.barrier()
            params, opt_state = two.init(mlp_params(), OPT)
            state = fzero.checkpoint.checkpoints(path, mesh).restore(
                {"params": params, "opt_state": opt_state, "step": 0}
            )
            assert state["step"] == 3
            state = go_on(two, state, range(3, 6))
            for name in ("params", "opt_state"):
                assert same_bits(one.gather(whole[name]), two.gather(state[name])), (stage, other, name)


@case
def resume_takes_no_initialisation(mesh: fzero.ranks.Mesh) -> None:
    """The state to load into has no memory before; leaves of a unit lie side by side after."""
    with folder(mesh) as path:
        for stage in either((2, 3), ALL_STAGES):
            step = fzero.shard(train_step_for(mlp_loss, OPT), stage=stage, mesh=mesh)
            state = step.init(mlp_params(), OPT)
            fzero.save(path, state, mesh)
            meta = step.init(tree.map(lambda x: x.to("meta"), mlp_params()), OPT)
            loaded = fzero.load(path, like=meta, mesh=mesh)
            assert same_bits(loaded, state)
            if stage in (1, 2):
                one, other = [x["blocks"][0] for x in (state[0], loaded[0])]
                assert other["w"].untyped_storage().nbytes() == one["w"].untyped_storage().nbytes() > one["w"].nbytes
            batch = mesh.split(mlp_batch(2 * mesh.size))
            assert same_bits(step(*loaded, batch), step(*state, batch))


@case
def a_rank_reads_and_writes_its_own_bytes(mesh: fzero.ranks.Mesh) -> None:
    moved = {"read": 0, "written": 0}

    def count_bytes(files: Any, name: str, at: int, views: Any, read: Any = _files.LocalFolder.read_into) -> None:
        moved["read"] += sum(len(v) for v in views)
        read(files, name, at, views)

    def writing(files: Any, name: str, parts: Any, write: Any = _files.LocalFolder.write) -> None:
        def tell() -> Iterator[Any]:
            for part in parts:
                moved["written"] += sum(len(v) for v in part)
                yield part

        write(files, name, tell())

    with folder(mesh) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files.LocalFolder, "read_into", count_bytes)
        patch.setattr(_files.LocalFolder, "write", writing)
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh)
        params = {f"w{i}": torch.ones(1 << 18) for i in range(16)}
        state = step.init(params, OPT)
        fzero.save(path, state, mesh)
        fzero.load(path, like=state, mesh=mesh)
        own = step.state_bytes(*state)
        assert own <= moved["written"] < own + 8192
        assert moved["read"] <= moved["written"] + PAGE_BYTES, (
            "its own file, and the page of rank 0's that has the count"
        )


def assert_refused(text: str, f: Any, *args: Any, **options: Any) -> None:
    start = time.monotonic()
    with pytest.raises(fzero.errors.CheckpointError) as error:
        f(*args, **options)
    assert re.search(text, str(error.value)), str(error.value)
    assert time.monotonic() - start < 20


@case
def what_goes_wrong_on_one_rank_is_an_error_on_all(mesh: fzero.ranks.Mesh) -> None:
    last = mesh.size - 1

    def raise_error(*args: Any) -> None:
        raise OSError(5, "planted")

    def slow(*args: Any) -> None:
        time.sleep(4)
        raise OSError(5, "late")

    with folder(mesh) as path:
        tree_, other = {"w": torch.zeros(8)}, {"w": torch.ones(8)}
        fzero.save(path, tree_, mesh)
        for background in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if mesh.rank == last:
                    patch.setattr(_files.os, "writev", raise_error)
                text = rf"nothing was saved to '{path}': rank {last}: OSError: \[Errno 5\] planted$"
                assert_refused(text, lambda b: fzero.save(path, other, mesh, background=b).wait(), background)
        with pytest.MonkeyPatch.context() as patch:
            if mesh.rank == last:
                patch.setattr(_files.os, "writev", slow)
            assert_refused(rf"rank {last} did not report within 1 s", fzero.save, path, other, mesh, timeout=1)
        torch.distributed.barrier()
        mine: Any = {"w": torch.ones(8 + (mesh.rank == last))}
        assert_refused(
            rf"than rank 0: leaf 'w' is F32 \[8\] on rank 0 and F32 \[9\] on rank {last}", fzero.save, path, mine, mesh
        )
        assert_refused(rf"True' on rank {last}$", fzero.save, path / str(mesh.rank == last), other, mesh)
        best: Any = {**other, "best": float(mesh.rank == last)}
        assert_refused(rf"value 'best' is 0.0 on rank 0 and 1.0 on rank {last}$", fzero.save, path, best, mesh)
        more = best if mesh.rank == last else other
        assert_refused(rf"value 'best' is missing on rank 0 and 1.0 on rank {last}$", fzero.save, path, more, mesh)
        mine = {"w": object()} if mesh.rank == last else other
        if mesh.rank == last:
            with pytest.raises(TypeError, match=r"the tree leaf 'w' is '<object .* which a checkpoint cannot hold"):
                fzero.save(path, mine, mesh)
        else:
            assert_refused(
                rf"rank {last} failed: TypeError: the tree leaf 'w' is '<object", fzero.save, path, mine, mesh
            )
        assert fzero.load(path, like=other, mesh=mesh)["w"].sum() == 0, "the old one is gone"
        like = {"w": torch.ones(8 if mesh.rank == last else 9)}
        assert_refused(r"leaf 'w' is float32 \[8\] there, and float32 \[9\] here", fzero.load, path, like, mesh)


@case
def damage_that_one_rank_sees_is_damage_to_all(mesh: fzero.ranks.Mesh) -> None:
    """All ranks go back to the checkpoint before."""
    with folder(mesh) as path:
        step, state = state_in(OnProcesses({"dp": mesh.size}, 3), {"w": torch.zeros(65)})
        (old, whole), (new, _) = [fill(step, state, seed) for seed in (0, 1)]
        old, new, whole = [{k: x[k] for k in ("params",)} for x in (old, new, whole)]  # what others read nothing of
        state = {"params": state["params"]}
        runs = fzero.checkpoint.checkpoints(path, mesh)
        for i, saved in enumerate((old, new)):
            runs.save(i, saved).wait()
        if mesh.rank == 0:
            name = next(n for n in os.listdir(path / "step-00000001") if f"{mesh.size - 1:05d}-of" in n)
            content = bytearray((path / "step-00000001" / name).read_bytes())
            content[-2] ^= 4
            (path / "step-00000001" / name).write_bytes(content)
        torch.distributed.barrier()
        with pytest.raises(DamagedError, match=f"{mesh.size - 1:05d}-of-.* is damaged: bytes 0 to"):
            fzero.load(path / "step-00000001", like=state, mesh=mesh)
        assert same_bits(whole_of(step, runs.restore(like=state)), whole)


@case
def memory_outlives_a_host(mesh: fzero.ranks.Mesh) -> None:
    """Each rank is on a host of its own; one host after the other loses its memory, and others hold its part."""
    with folder(mesh) as path, pytest.MonkeyPatch.context() as patch:
        step, state = state_in(OnProcesses({"dp": mesh.size}, 3), PARAMS)
        saved = [fill(step, state, seed) for seed in range(4)]
        for hosts in (mesh.size, 1):
            patch.setattr(_shared_memory, "_host_name", lambda hosts=hosts: f"host{mesh.rank % hosts}")
            root, memory = path / f"disk{hosts}", path / f"memory{hosts}"
            memory.mkdir(exist_ok=True)
            runs = fzero.checkpoint.checkpoints(root, mesh, memory=str(memory), timeout=20)
            runs.save(1, saved[0][0])
            runs.save_in_memory(2, saved[1][0])
            runs.save_in_memory(3, saved[2][0])
            runs.wait()
            torch.distributed.barrier()  # each host lets go of its own old ones
            parts = [p.name for p in memory.rglob("*.safetensors")]
            assert len(parts) == (2 * mesh.size if hosts > 1 else mesh.size), "each part, and a copy elsewhere"
            torch.distributed.barrier()
            assert runs.newest() == 3 and same_bits(whole_of(step, runs.restore(state)), saved[2][1])
            for lost in range(hosts if hosts > 1 else 0):
                torch.distributed.barrier()
                if mesh.rank == 0:
                    shutil.rmtree(memory / "fzero" / f"host{lost}")
                torch.distributed.barrier()
                other = fzero.checkpoint.checkpoints(root, mesh, memory=str(memory), timeout=20)
                assert other.newest() == 3
                _, like = state_in(OnProcesses({"dp": mesh.size}, 1), PARAMS)
                assert same_bits(whole_of(step, other.restore(state)), saved[2][1])
                assert same_bits(whole_of(step, other.restore(like)), saved[2][1])
                other.save_in_memory(3, saved[2][0], background=False)
            torch.distributed.barrier()
            if mesh.rank == 0:
                shutil.rmtree(memory)
            torch.distributed.barrier()
            assert runs.newest() == 1 and same_bits(whole_of(step, runs.restore(state)), saved[0][1])
            runs.save_in_memory(0, saved[3][0]).wait()
            assert runs.newest() == 1, "the newer one is on the disk"


@case
def a_folder_of_hugging_face_is_read_and_written_by_each_rank_for_itself(mesh: fzero.ranks.Mesh) -> None:
    moved = {"read": 0, "written": 0}

    def reading(files: Any, name: str, at: int, views: Any, original: Any = _files.LocalFolder.read_into) -> None:
        moved["read"] += sum(len(v) for v in views)
        original(files, name, at, views)

    def writing(fd: int, view: Any, at: int, original: Any = os.pwrite) -> int:
        moved["written"] += len(view)
        time.sleep(0.01 * mesh.rank)  # the last rank is late, and rank 0 waits
        return original(fd, view, at)

    with folder(mesh) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", writing)
        for stage, max_file in ((0, 1 << 30), (3, 64), (3, 1 << 30)):
            step, state = state_in(OnProcesses({"dp": mesh.size}, stage), PARAMS)
            state, whole = fill(step, state, stage)
            moved["written"] = 0
            fzero.checkpoint.hf.write(path, state["params"], mesh, max_file=max_file)
            total = sum(x.nbytes for x in {id(x): x for x in tree.tensors(whole["params"])}.values())
            assert moved["written"] <= total / mesh.size + 16
            for there in (Layout({"dp": 2, "tp": 2}, 3, "dp", True), OnProcesses({"dp": mesh.size}, 3)):
                other, like = state_in(there, PARAMS)
                loaded = fzero.checkpoint.hf.read(path, like["params"], other.mesh)
                assert same_bits(other.gather(loaded), whole["params"])
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh)
        like = step.partition({f"w{i}": torch.ones(1 << 12) for i in range(4)})
        fzero.checkpoint.hf.write(path, like, mesh)
        with pytest.MonkeyPatch.context() as counting:
            counting.setattr(_files.LocalFolder, "read_into", reading)
            fzero.checkpoint.hf.read(path, like, mesh)
        assert moved["read"] < step.state_bytes(like) + 1024


@case
def a_write_for_hugging_face_that_fails_on_one_rank_fails_on_all(mesh: fzero.ranks.Mesh) -> None:
    last = mesh.size - 1

    def raise_error(*args: Any) -> None:
        raise OSError(5, "planted")

    with folder(mesh) as path:
        fzero.checkpoint.hf.write(path, {"w": torch.zeros(8)}, mesh)
        torch.distributed.barrier()
        before = sorted(os.listdir(path))
        with pytest.MonkeyPatch.context() as patch:
            if mesh.rank == last:
                patch.setattr(os, "pwrite", raise_error)
                with pytest.raises(OSError, match="planted"):
                    fzero.checkpoint.hf.write(path, {"w": torch.ones(8)}, mesh)
            else:
                assert_refused(
                    rf"rank {last} failed: OSError: .*planted",
                    fzero.checkpoint.hf.write,
                    path,
                    {"w": torch.ones(8)},
                    mesh,
                )
        torch.distributed.barrier()
        assert sorted(os.listdir(path)) == before
        assert fzero.checkpoint.hf.read(path, {"w": torch.ones(8)}, mesh)["w"].sum() == 0, "the old one is gone"
        mine: Any = {"w": torch.ones(8 + (mesh.rank == last))}
        assert_refused(rf"rank {last} has another tree, or another folder", fzero.checkpoint.hf.write, path, mine, mesh)
        like = {"w": torch.ones(9 if mesh.rank == last else 8)}
        assert_refused(
            r"tensor 'w' is float32 \[8\] there, and leaf 'w' is float32 \[9\]",
            fzero.checkpoint.hf.read,
            path,
            like,
            mesh,
        )


def fully_sharded(mesh: fzero.ranks.Mesh, seed: int) -> torch.nn.Module:
    """A module as FSDP2 shards it: its parameters are DTensors, and 5 and 3 rows do not divide by the ranks."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    for layer in (*module, module):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh.device_mesh)
    return module


def full(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() for name, x in module.state_dict().items()}


@case
def what_fsdp2_saves_fzero_loads_and_the_reverse(mesh: fzero.ranks.Mesh) -> None:
    module = fully_sharded(mesh, 0)
    whole = full(module)
    for stage in (0, 1, 3):
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=stage, mesh=mesh)
        with folder(mesh) as path:
            torch.distributed.checkpoint.save({"model": module.state_dict(), "epoch": 3}, checkpoint_id=path / "fsdp2")
            params, _ = step.init(tree.map(torch.zeros_like, whole), OPT)
            loaded = fzero.checkpoint.dcp.load(path / "fsdp2", like={"model": params, "epoch": 0}, mesh=mesh)
            assert same_bits(step.gather(loaded["model"]), whole) and loaded["epoch"] == 3

            fzero.checkpoint.dcp.save(path / "fzero", loaded, mesh)
            other = fully_sharded(mesh, 1)
            assert not same_bits(full(other), whole)
            state = {"model": other.state_dict(), "epoch": 0}
            torch.distributed.checkpoint.load(state, checkpoint_id=path / "fzero")
            other.load_state_dict(state["model"])
            assert same_bits(full(other), whole) and state["epoch"] == 3


@case
def a_call_that_fails_on_one_rank_is_an_error_on_all(mesh: fzero.ranks.Mesh) -> None:
    last = mesh.size - 1
    with folder(mesh) as path:
        values = {"w": torch.ones(8)}
        mine = {"w": torch.ones(8 + (mesh.rank == last))}
        assert_refused(rf"rank {last} has another tree", fzero.checkpoint.dcp.save, path / "a", mine, mesh)
        assert not (path / "a").exists()
        fzero.checkpoint.dcp.save(path / "a", values, mesh)
        torch.distributed.barrier()
        assert_refused(r"/a' holds a checkpoint \(.metadata\)", fzero.checkpoint.dcp.save, path / "a", values, mesh)
        assert_refused(
            r"leaf 'w' is float32 \[8\] there, and float32 \[9\] here",
            fzero.checkpoint.dcp.load,
            path / "a",
            mine,
            mesh,
        )
        with pytest.MonkeyPatch.context() as patch:
            if mesh.rank == last:
                patch.setattr(torch, "load", lambda *args, **options: 1 / 0)
            text = rf"/a' could not be read: rank {last}: ZeroDivisionError: division by zero$"
            assert_refused(text, fzero.checkpoint.dcp.load, path / "a", values, mesh)


@case
def what_keeps_rank_0_from_a_folder_is_told_to_all_at_once(mesh: fzero.ranks.Mesh) -> None:
    with folder(mesh) as path:
        lock = open(path / ".lock", "wb") if mesh.rank == 0 else None  # noqa: SIM115  held while others try
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        with pytest.raises(fzero.errors.CheckpointError, match="another process saves here"):
            fzero.save(path, {"w": torch.ones(3)}, mesh)
        assert time.monotonic() - start < 15
        if lock is not None:
            lock.close()
        torch.distributed.barrier()
        fzero.save(path, {"w": torch.ones(3)}, mesh)


@case
def a_plain_leaf_that_differs_by_rank_is_refused(mesh: fzero.ranks.Mesh) -> None:
    with folder(mesh) as path:
        values = {"w": torch.ones(3), "noise": torch.full((8,), mesh.rank), "key": torch.zeros(2)}
        with pytest.raises(
            ValueError, match=r"'noise' is a plain tensor, .* differs between ranks 0 and 1: box .* mesh.local"
        ):
            fzero.save(path, values, mesh)
        values["noise"] = mesh.local(values["noise"])
        fzero.save(path, values, mesh)


@case
def ranks_that_read_different_things_are_refused(mesh: fzero.ranks.Mesh) -> None:
    x, y = torch.zeros(4), torch.ones(4)
    with folder(mesh) as path:
        fzero.save(path / "run", {"a": x, "b": y}, mesh)
        fzero.checkpoint.hf.write(path / "hf", {"a": x, "b": y}, mesh)
        fzero.checkpoint.dcp.save(path / "dcp", {"a": x, "b": y}, mesh)
        if mesh.rank == 0:
            fzero.save(path / "other", {"a": y, "b": x})
        torch.distributed.barrier()
        mine = "ab"[mesh.rank % 2]
        match = "has another tree, or other names, than rank 0"
        with pytest.raises(fzero.errors.CheckpointError, match=match):
            fzero.load(path / "run", {mine: torch.zeros(4)}, mesh, partial=True)
        for read in (fzero.checkpoint.hf.read, fzero.checkpoint.dcp.load):
            where = path / ("hf" if read is fzero.checkpoint.hf.read else "dcp")
            with pytest.raises(fzero.errors.CheckpointError, match=match):
                read(where, {"w": torch.zeros(4)}, mesh, name=lambda path: mine, partial=True)
        if mesh.rank == 0:
            fzero.checkpoint.hf.write(path / "other hf", {"a": y, "b": x, "c": x.clone()})
        torch.distributed.barrier()
        with pytest.raises(fzero.errors.CheckpointError, match="the ranks see different files"):
            fzero.checkpoint.hf.read(
                path / ("hf" if mesh.rank == 0 else "other hf"), {"a": x.clone()}, mesh, partial=True
            )
        with pytest.raises(fzero.errors.CheckpointError, match="the ranks see different manifests"):
            fzero.load(path / ("run" if mesh.rank == 0 else "other"), {"a": torch.zeros(4), "b": torch.zeros(4)}, mesh)


@case
def a_rank_without_memory_for_its_copy_leaves_nobody_waiting(mesh: fzero.ranks.Mesh) -> None:
    def none_left(*args: Any) -> Any:
        raise MemoryError("not enough memory")

    with folder(mesh) as path, pytest.MonkeyPatch.context() as patched:
        if mesh.rank == mesh.size - 1:
            patched.setattr(_save.StagingBuffer, "reserve", none_left)
        with pytest.raises((fzero.errors.CheckpointError, MemoryError), match="not enough memory"):
            fzero.save(path, {"w": torch.zeros(4)}, mesh, background=True)


if __name__ == "__main__":
    run(CASES)
