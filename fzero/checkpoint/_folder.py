"""The checkpoints of a run in one folder: background saves, the removal of old ones, and a restore of the newest."""

import hashlib
import math
import os
import re
import secrets
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch

from fzero import tree
from fzero._arguments import check_int, check_path
from fzero._liveness import resume_at
from fzero._names import missing_members
from fzero._notice import trouble_link, warn_once
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import all_or_none
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._load import load_files
from fzero.checkpoint._save import TIMEOUT, SaveHandle, StagingBuffer, start_save
from fzero.checkpoint._shared_memory import Hosts, SharedMemory
from fzero.checkpoint.layout import MANIFEST, Manifest, read_manifest
from fzero.ranks import Mesh, all_gather_numbers, all_gather_texts, is_leader
from fzero.sharding import is_box
from fzero.tree import Tree

__all__ = ["Checkpoints", "checkpoints", "read_complete", "step_name", "step_numbers"]

_MAX_DIGITS = 15  # of a step's number


@api_boundary
def checkpoints(
    root: StrPath,
    mesh: Mesh | None = None,
    *,
    keep: int = 3,
    keep_every: int | None = None,
    memory: str | None = None,
    copies: int = 1,
    timeout: float = TIMEOUT,
) -> "Checkpoints":
    """Keep a run's checkpoints in a folder, one for each saved step: `root/step-00000100` and so on.

    Args:
        root: the folder, or a URL that fsspec supports. The first save makes it.
        mesh: the ranks; None for trees without boxes in one process.
        keep: how many of the newest checkpoints to keep.
        keep_every: also keep each checkpoint whose step is a multiple of this number.
        memory: a folder of shared memory, such as `"/dev/shm"`, for `save_in_memory`. All ranks must then call
            this function.
        copies: how many other hosts hold a copy of each rank's part. So many hosts may be lost at once.
        timeout: how long a save waits for another rank, in seconds.

    Returns:
        `Checkpoints`, with `save`, `save_in_memory`, `restore` and `wait`.

    Raises:
        ValueError: if `keep` or `keep_every` is below 1, `copies` is below 0, or `memory` is not a folder.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> for start in ("a first run", "the same after a kill"):
        ...     runs = fzero.checkpoint.checkpoints(folder, keep=2)
        ...     state = runs.restore(like={"w": torch.zeros(2), "step": 0})
        ...     for i in range(state["step"], state["step"] + 3):
        ...         state = {"w": state["w"] + 1, "step": i + 1}
        ...         saving = runs.save(i + 1, state)
        ...     runs.wait()
        >>> runs.steps(), state
        ([5, 6], {'w': tensor([6., 6.]), 'step': 6})
    """
    for name, n in (("keep", keep), ("keep_every", keep_every)):
        if n is not None:
            check_int(name, n, 1, "a number of checkpoints" if name == "keep" else "a number of steps")
    check_int("copies", copies, 0, "a number of copies")
    if memory is not None:
        check_path("memory", memory, "a folder of shared memory, such as '/dev/shm'")
    if memory is not None and not os.path.isdir(memory):  # made on the disk, it would not be memory
        raise ValueError(f'memory={memory!r} is not a folder: expected one of shared memory, such as "/dev/shm"')
    files = files_at(root, "root", "fzero.checkpoint.checkpoints(root, mesh)")
    return Checkpoints(
        files=files, mesh=mesh, keep=keep, keep_every=keep_every, timeout=timeout, memory=memory, copies=copies
    )


def _check_finite(step: int, values: Any) -> None:
    """Check that metrics are finite, and flags true."""
    paths, leaves, _ = tree.flatten_with_paths(values, is_box)
    for path, x in zip(paths, leaves, strict=True):
        name = tree.leaf_name("finite", path)
        if not (isinstance(x, int | float) or (isinstance(x, torch.Tensor) and x.numel() == 1)):
            raise TypeError(f"save: {name} is {tree.show(x)}: expected one number that is equal on all ranks")
        number = x.item() if isinstance(x, torch.Tensor) else x
        if number is False or not math.isfinite(number):
            raise FloatingPointError(
                f"save: {name} is {number} after step {step}, so the checkpoint is not saved, and older ones remain: "
                "restore one of them, and run the step under fzero.observe.nonfinite" + trouble_link("nan-on-one-rank")
            )


def _run_id(files: Files, mesh: Mesh | None, make: bool) -> str:
    """Return an id of this run, from a random text in its folder. A new folder of the same name gets another id.

    A run without a text gets one with `make`, and else the id "".
    """

    def run_id() -> str:
        if mesh is not None and mesh.rank:
            return ""
        if files.size("run") is None:
            if not make:
                return ""
            files.put("run", secrets.token_hex(8).encode())
        # a copy of the folder is a different run, so the path is hashed too
        return hashlib.sha256(files.get("run") + files.path.encode()).hexdigest()[:16]

    run = all_or_none(f"looking into {files.path!r}", run_id, mesh)
    return all_gather_texts(run, mesh)[0] if mesh is not None and mesh.distributed else run


_FOREIGN_NAMES = {  # names of Orbax's CheckpointManager, of DeepSpeed's engine and of Accelerate
    "load": "checkpoints.restore(like), of the newest step; fzero.load(path, like, mesh) reads any",
    "load_state": "checkpoints.restore(like)",
    "load_checkpoint": "checkpoints.restore(like)",
    "save_state": "checkpoints.save(step, values)",
    "save_checkpoint": "checkpoints.save(step, values)",
    "save_pretrained": "fzero.checkpoint.hf.write(folder, params)",
    "async_save": "checkpoints.save(step, values), which saves in the background",
    "wait_until_finished": "checkpoints.wait()",
    "close": "checkpoints.wait()",
    "should_save": "your loop's: if i % 100 == 0: checkpoints.save(i, values)",
    "state_dict": "a tree: checkpoints.save(step, values) takes it, and checkpoints.restore(like) returns it",
}


class Checkpoints:
    """The checkpoints of a run, made by `fzero.checkpoint.checkpoints`. A `with` statement waits for the last save."""

    def __init__(
        self,
        files: Files,
        mesh: Mesh | None,
        keep: int,
        keep_every: int | None,
        timeout: float,
        memory: str | None = None,
        copies: int = 1,
    ) -> None:
        self._files, self._mesh, self._keep, self._keep_every, self._timeout = files, mesh, keep, keep_every, timeout
        self._memory, self._copies, self._staging, self._saving = memory, copies, StagingBuffer(), None
        self._shared = self._shared_memory(make=False)

    def _shared_memory(self, make: bool) -> SharedMemory | None:
        """Return the run's memory; None without `memory`, or if nothing was saved there and `make` is not set."""
        run = "" if self._memory is None else _run_id(self._files, self._mesh, make)
        hosts = Hosts(self._mesh, self._timeout, self._copies) if run else None
        return None if self._memory is None or hosts is None else SharedMemory.of(self._memory, run, hosts)

    if not TYPE_CHECKING:  # a type checker finds a missing name itself
        __getattr__ = missing_members(_FOREIGN_NAMES)

    def __repr__(self) -> str:
        return f"Checkpoints({self._files.path!r}, keep={self._keep}, keep_every={self._keep_every})"

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.wait()

    @api_boundary
    def save(self, step: int, values: Tree, *, background: bool = True, finite: Tree = ()) -> SaveHandle:
        """Save a tree as the checkpoint of a step, and remove the checkpoints that need not be kept.

        It returns when the tree is copied; the tree may then be changed or donated. The next save waits for this one.

        Args:
            step: the number of steps done.
            values: the tree, as `fzero.save` takes it.
            background: whether to return before the save is committed.
            finite: a tree of metrics, equal on all ranks, such as `{"loss": loss}` or the flag of `optim.all_finite`.
                If one is nan, infinite or False, nothing is saved and nothing removed. Without it, a save after a nan
                succeeds.

        Raises:
            CheckpointError: if this save or the previous one failed.
            FloatingPointError: if a value of `finite` is not finite. The message names it.
            TypeError: if a value of `finite` is not a number, or is in a box.
            ValueError: if the step is not an int of 0 or more.
        """
        _check_finite(step, finite)
        return self._start_save(self._files, step, values, background, lambda: self._remove_old(step))

    @api_boundary
    def save_in_memory(self, step: int, values: Tree, *, background: bool = True) -> SaveHandle:
        """Save a tree as the checkpoint of a step in shared memory, which outlives the processes. It replaces the last.

        Each rank writes on its own host, and as many other hosts as `copies` says get a copy. The last step is
        removed when all ranks have all of this one. So a death at any moment leaves one of them whole.

        Args:
            step: the number of steps done.
            values: the tree, as `fzero.save` takes it.
            background: whether to return before the save is committed.

        Raises:
            CheckpointError: if this save or the previous one failed.
            ValueError: if the step is not an int of 0 or more, or `checkpoints` was called without `memory`.
        """
        self._shared = shared = self._shared or self._shared_memory(make=True)
        if shared is None:
            raise ValueError(
                'save_in_memory needs a folder of shared memory: fzero.checkpoint.checkpoints(..., memory="/dev/shm")'
            )
        shared.hosts.warn_of_one()

        def remove_old() -> None:
            for old in step_numbers(shared):
                if old != step:
                    shared.subfolder(step_name(old)).remove_all()

        return self._start_save(shared, step, values, background, remove_old)

    def move_memory(self, ranks: int) -> None:
        """Copy what is in memory onto the hosts of the first ranks, before the others leave. All ranks call it.

        Args:
            ranks: the number of ranks that stay.
        """
        if self._shared is not None and (step := self._newest_in_memory()) is not None:
            self._shared.subfolder(step_name(step)).move_to(ranks)

    def clear_memory(self) -> None:
        """Remove what is in memory, and free its memory on all hosts. All ranks call it.

        Raises:
            CheckpointError: if the last save failed. Then nothing is removed.
        """
        self.wait()
        if self._shared is not None and self._shared.is_host_leader:
            self._shared.remove_all()

    def _start_save(
        self, files: Files, step: int, values: Any, background: bool, on_commit: Callable[[], None]
    ) -> SaveHandle:
        """Begin a save after the last one has ended, since both would use one staging buffer."""
        check_int(
            "step", step, 0, "the number of the step, as in checkpoints.save(step, values)", maximum=10**_MAX_DIGITS - 1
        )
        self.wait()
        if files is self._files:
            self._warn_of_newer(step)
        folder = files.subfolder(step_name(step))
        self._saving = start_save(
            files=folder,
            values=values,
            mesh=self._mesh,
            background=background,
            timeout=self._timeout,
            staging=self._staging,
            on_commit=on_commit,
        )
        return self._saving

    def _warn_of_newer(self, step: int) -> None:
        """Print a notice if there are newer steps: the user resumed the run from an older step by hand."""
        if is_leader(self._mesh) and (newer := [n for n in step_numbers(self._files) if n > step]):
            warn_once(
                f"fzero: {self._files.path!r} holds step {newer[-1]}, and saves step {step}: restore takes the newest. "
                "Remove the steps that this run did not resume from, or give it a folder of its own"
            )

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CheckpointError: if the save failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def steps(self) -> list[int]:
        """List the steps that have a manifest, oldest first."""
        return [n for n in step_numbers(self._files) if self._files.subfolder(step_name(n)).size(MANIFEST) is not None]

    @api_boundary
    def restore(self, like: Tree, *, partial: bool = False) -> Tree:
        """Read the newest complete checkpoint, whatever ranks and stage wrote it; return `like` if there is none.

        A checkpoint in memory comes before one on disk of the same step. A checkpoint that is not committed, or is
        damaged, is skipped with a notice, and the previous one is read.

        Args:
            like: the tree to read into, as `fzero.load` takes it.
            partial: whether the checkpoint may have leaves that `like` lacks.

        Raises:
            CheckpointError: on all ranks, if the checkpoint holds another tree, or all checkpoints are damaged.
        """
        if isinstance(like, str | int | None):
            raise TypeError(
                f"like={like!r}: expected the tree to read into, checkpoints.restore(like) of the newest step; "
                "fzero.load(path, like) reads another"
            )
        damage_of_step: dict[int, str] = {}
        failure = ""
        memory_step = self._newest_in_memory()
        while True:
            step = self._newest_complete_step(damage_of_step)
            if memory_step is not None and (step is None or memory_step >= step):
                files, step, memory_step = self._shared, memory_step, None
            elif step is None:
                break
            else:
                files = self._files
            try:
                checkpoint = load_files(files.subfolder(step_name(step)), like, self._mesh, partial)  # pyright: ignore
                resume_at(step)  # so that an error that names a lost rank says the run's step
                return checkpoint
            except DamagedError as error:
                if files is self._files:
                    damage_of_step[step] = str(error)
                failure = failure or str(error)
                warn_once(f"fzero: skipped: {error}")
        if failure:  # so `like` may be partly overwritten
            raise CheckpointError(f"{self._files.path!r}: no checkpoint is whole: {failure}")
        return like

    def _newest_in_memory(self) -> int | None:
        """Return the newest step that is complete in memory."""
        return None if self._shared is None else self._shared.newest(step_numbers(self._shared), step_name)

    def _newest_complete_step(self, damaged_steps: Container[int]) -> int | None:
        """Return the newest step that is complete on disk. Rank 0 looks for it, and all ranks get its answer."""
        step = all_or_none(
            f"looking into {self._files.path!r}", lambda: self._newest_on_disk(damaged_steps), self._mesh
        )
        if self._mesh is not None and self._mesh.distributed:
            step = all_gather_numbers(torch.tensor([step], device="cpu"), self._mesh)[0][0]
        return None if step < 0 else step

    def newest(self) -> int | None:
        """Return the newest step whose files all exist with the right sizes, on disk or in memory; else None.

        All ranks call it. If there is such a step, `restore` can read into a state without memory, such as `step.init`
        of a meta module returns.

        Raises:
            CheckpointError: if rank 0 cannot read the folder.
        """
        return max(
            [n for n in (self._newest_complete_step(()), self._newest_in_memory()) if n is not None], default=None
        )

    def _newest_on_disk(self, damaged_steps: Container[int]) -> int:
        for step in reversed(step_numbers(self._files) if self._mesh is None or self._mesh.rank == 0 else []):
            try:
                read_complete(self._files.subfolder(step_name(step)))
            except CheckpointError as error:
                warn_once(f"fzero: skipped: {error}")
                continue
            if step not in damaged_steps:
                return step
        return -1

    def _remove_old(self, newest: int) -> None:
        """Remove the checkpoints that need not be kept, after a newer one is committed."""
        steps = self.steps()
        keep = {*steps[-self._keep :], *[n for n in steps if self._keep_every and n % self._keep_every == 0]}
        for step in step_numbers(self._files):
            if step < newest and step not in keep:
                # the manifest first, so that a partial removal is not a checkpoint
                self._files.subfolder(step_name(step)).remove_all(first_name=MANIFEST)


def step_numbers(files: Files) -> list[int]:
    """List the steps that have a folder, oldest first, complete or not."""
    return sorted(
        [int(m[1]) for name in files.folders() if (m := re.fullmatch(rf"step-(\d{{8,{_MAX_DIGITS}}})", name))]
    )


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def read_complete(files: Files) -> Manifest:
    """Read a manifest, and check that its files exist with the right sizes.

    Raises:
        CheckpointError: if there is no manifest, or a file is missing or has another size.
    """
    manifest, _ = read_manifest(files)
    for name, file in zip(manifest.names, manifest.files, strict=True):
        size = files.size(name)
        if size != file.size:
            problem = "is missing" if size is None else f"has {size:,} bytes of {file.size:,}"
            raise DamagedError(f"{files.path!r}: {name} {problem}")
    return manifest
