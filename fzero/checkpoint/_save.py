"""Saving: each rank writes one file, and rank 0 then commits all files by writing the manifest."""

import contextlib
import functools
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero._notice import warn_once
from fzero._torch import wait_for_device
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import StoreChannel, agree, all_or_none
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._shared_memory import SharedMemory
from fzero.checkpoint._tensor_bytes import byte_views, view_or_parts
from fzero.checkpoint.layout import (
    MANIFEST,
    PAGE_BYTES,
    File,
    LocalTree,
    Manifest,
    PlainMemory,
    TreeLayout,
    data_name,
    layout_text,
    local_tree,
    parse_manifest,
    safetensors_header,
    xxh3_checksum,
)
from fzero.ranks import Mesh, all_gather_numbers, checksum
from fzero.tree import Tree

__all__ = ["TIMEOUT", "SaveHandle", "StagingBuffer", "save", "start_save"]

TIMEOUT = 300.0
_MAX_COMPARED = 1 << 16  # bytes; the ranks compare plain leaves up to this size: a generator's state, counters


class SaveHandle:
    """A save that is under way or has ended.

    Attributes:
        path: the path of the folder.
    """

    def __init__(self, path: str, run: Callable[[], None], background: bool) -> None:
        self.path = path
        self._error: BaseException | None = None
        target = functools.partial(self._run_guarded, run)
        self._thread = threading.Thread(target=target, name=f"fzero.save {path}") if background else None
        if self._thread is None:
            run()
        else:
            self._thread.start()  # not a daemon, so that the interpreter waits for it at exit

    def __repr__(self) -> str:
        state = "under way"
        if self.done():
            state = "committed" if self._error is None else "failed"
        return f"SaveHandle({self.path!r}, {state})"

    def _run_guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # `wait` raises it again
            self._error = error
            warn_once(f"fzero: {error}")

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save is committed.

        Raises:
            CheckpointError: if the save failed on any rank. Nothing was saved, and earlier checkpoints are intact.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class StagingBuffer:
    """A buffer that a save copies the tree into, so that a step may overwrite the tree. It is reused between saves."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Return a buffer `[nbytes]`. It reuses the previous memory if that is large enough."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old buffer first
            is_pinned = torch.accelerator.is_available()
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
        return self._buffer[:nbytes]


@api_boundary
def save(
    path: StrPath, values: Tree, mesh: Mesh | None = None, *, background: bool = False, timeout: float = TIMEOUT
) -> SaveHandle:
    """Save a tree, in any layout, to a folder. All ranks of the mesh call it.

    Each rank writes its own part straight from memory. If several ranks hold the same elements, each writes a part of
    them. The manifest is written last, and makes the folder a checkpoint. So if any process dies, the folder keeps its
    earlier checkpoint. Nothing is pickled.

    Args:
        path: the folder, or a URL that fsspec supports, such as `"s3://bucket/run/step-100"`.
        values: the tree: parameters, optimizer state, keys, `PerRank` values. Leaves that are not tensors are JSON
            values: numbers, text, None, dicts and lists of these.
        mesh: the ranks; None for a tree without boxes in one process.
        background: whether to return as soon as the tree is copied. The tree may then be changed, or donated to a
            jitted step. The copy needs as much memory as this rank writes.
        timeout: how long to wait for the other ranks, in seconds.

    Returns:
        A `SaveHandle`. Its `wait()` returns when the save is committed.

    Raises:
        CheckpointError: on all ranks, if a rank fails or is late, the ranks' trees differ, another process saves to the
            folder, or the disk is too full. With `background`, `wait()` may raise it too.
        ValueError: if two leaves have one path, or a box was sharded for another mesh. The message names the path. Also
            if a leaf is on the meta device, or a plain leaf of up to 64 KiB differs between ranks.
        TypeError: if a checkpoint cannot hold a leaf. The message names its path.
        DonatedError: if a leaf was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"w": torch.arange(3.0), "step": 7}).done()
        True
        >>> fzero.load(folder, like={"w": torch.zeros(3), "step": 0})
        {'w': tensor([0., 1., 2.]), 'step': 7}
    """
    files = files_at(path, call="fzero.save(path, values)")
    return start_save(
        files=files, values=values, mesh=mesh, background=background, timeout=timeout, staging=StagingBuffer()
    )


def start_save(
    files: Files,
    values: Any,
    mesh: Mesh | None,
    background: bool,
    timeout: float,
    staging: StagingBuffer,
    on_commit: Callable[[], None] = lambda: None,
) -> SaveHandle:
    """Save a tree as `save` does, with a buffer for copies and a function that runs after the commit."""
    nonce = secrets.token_hex(8)

    def prepare() -> tuple[bytes, LocalTree]:
        local = local_tree("the tree", values, mesh)
        _check_values(local)
        if mesh is None or mesh.rank == 0:
            _check_room(files, local)
        return f"{files.common_name}\n".encode() + layout_text(local.layout), local

    channel, local = agree("save", prepare, nonce, mesh, timeout)
    _check_equal(local, mesh)
    ranges = {rank: _ranges_to_write(local, rank) for rank in local.ranks}
    if background:  # a rank without enough memory must not leave the others waiting
        ranges = all_or_none("save", lambda: _copy_to_staging(ranges, staging), mesh)
    # only numbers are kept of `local`: a step may donate the saved tensors, so nothing may hold a reference to them
    return SaveHandle(
        files.path,
        _SaveRun(files=files, layout=local.layout, ranges=ranges, channel=channel, on_commit=on_commit).run,
        background,
    )


def _check_values(local: LocalTree) -> None:
    """Check that every leaf has values to write.

    Raises:
        ValueError: if a leaf is on the meta device. The message names the leaf.
    """
    for rank in local.ranks:
        for piece, x, _ in local.owned_pieces(rank):
            if x.is_meta:
                path = local.layout.leaves[piece.leaf].path
                raise ValueError(f"the tree leaf {path!r} is on the meta device, and has no values to save")


def _check_equal(local: LocalTree, mesh: Mesh | None) -> None:
    """Check that small plain leaves are equal on all processes, since each rank writes a part of them.

    Raises:
        ValueError: on all ranks, if a leaf differs. The message names the leaf.
    """
    if mesh is None or not mesh.distributed:
        return
    plain = {i: x for memory in local.memory if isinstance(memory, PlainMemory) for i, x in memory.leaves.items()}
    small_indices = [i for i, x in plain.items() if x.nbytes <= _MAX_COMPARED]
    sums = torch.stack(
        [torch.zeros((), dtype=torch.int64, device="cpu"), *[checksum(plain[i]).cpu() for i in small_indices]]
    )
    all_numbers = all_gather_numbers(sums, mesh)
    for n, i in enumerate(small_indices, 1):
        rank = next((r for r, numbers in enumerate(all_numbers) if numbers[n] != all_numbers[0][n]), None)
        if rank is not None:
            raise ValueError(
                f"the tree leaf {local.layout.leaves[i].path!r} is a plain tensor, which must be equal on all ranks, "
                f"and differs between ranks 0 and {rank}: box a value that differs by rank, as mesh.local(x)"
            )


def _check_room(files: Files, local: LocalTree) -> None:
    """Check before the first write that the disk has room for the files of all ranks."""
    free, nbytes = files.free(), sum(local.layout.starts(r)[-1] for r in range(local.layout.ranks))
    if free is not None and free < nbytes:
        raise CheckpointError(f"{files.path!r}: the save needs {nbytes:,} bytes, and its disk has {free:,} free")


_TensorRange = tuple[torch.Tensor, int, int]  # a tensor, and the range of its elements


def _ranges_to_write(local: LocalTree, rank: int) -> list[_TensorRange]:
    """List the ranges of tensors that a rank writes, in file order."""
    # `owned_pieces` gives where each piece begins in its tensor
    return [(x.detach(), start, start + piece.numel) for piece, x, start in local.owned_pieces(rank)]


def _copy_to_staging(ranges: dict[int, list[_TensorRange]], staging: StagingBuffer) -> dict[int, list[_TensorRange]]:
    """Copy the ranges into the staging buffer."""
    sizes = [(stop - start) * x.element_size() for rows in ranges.values() for x, start, stop in rows]
    buffer = staging.reserve(sum(sizes))
    offset = 0
    copies: dict[int, list[_TensorRange]] = {}
    for rank, rows in ranges.items():
        copies[rank] = []
        for x, start, stop in rows:
            start_offset = offset
            for part in view_or_parts(x, start, stop):
                buffer[offset : offset + part.nbytes].copy_(part.view(torch.uint8), non_blocking=True)
                offset += part.nbytes
            copies[rank].append((buffer, start_offset, offset))
    wait_for_device()  # for the copies to the host
    return copies


@dataclass(frozen=True)
class _SaveRun:
    """A save from the first write to the commit.

    Attributes:
        files: the folder.
        layout: the layout of the tree.
        ranges: what each rank of this process writes.
        channel: the messages between the ranks.
        on_commit: runs after the commit, on the ranks that commit.
    """

    files: Files
    layout: TreeLayout
    ranges: dict[int, list[_TensorRange]]
    channel: StoreChannel
    on_commit: Callable[[], None]

    def run(self) -> None:
        """Write this process's files. Rank 0 then commits the files of all ranks.

        Raises:
            CheckpointError: if nothing was saved, or the save was not committed. The message says why.
        """
        try:
            errors = self._save_as_leader() if self.channel.is_leader else self._save_as_follower()
        except CheckpointError as error:  # rank 0 may have committed, so the file stays
            raise CheckpointError(f"the save to {self.files.path!r} was not committed: {error}") from error
        if errors:
            self.files.remove([self._file_name(rank) for rank in self.ranges])
            raise CheckpointError(f"nothing was saved to {self.files.path!r}: {errors}")

    def _save_as_leader(self) -> str:
        with contextlib.ExitStack() as stack:  # `save_as_leader` reports to the other ranks if the lock fails
            return self.channel.save_as_leader(functools.partial(self._lock_and_write, stack), self._commit)

    def _lock_and_write(self, stack: contextlib.ExitStack) -> dict[int, File]:
        stack.enter_context(self.files.exclusive())
        return self._write_files()

    def _save_as_follower(self) -> str:
        errors = self.channel.save_as_follower(self._write_files)
        if not errors and isinstance(self.files, SharedMemory) and self.files.is_host_leader:
            data = self.channel.wait_for("manifest", 0).encode()
            self.files.put(MANIFEST, data)
            self._remove_leftovers(parse_manifest(data))
        return errors

    def _file_name(self, rank: int) -> str:
        return data_name(self.channel.nonce, rank, self.layout.ranks)

    def _write_files(self) -> dict[int, File]:
        return {
            rank: _write_file(self.files, self._file_name(rank), safetensors_header(self.layout, rank), rows)
            for rank, rows in self.ranges.items()
        }

    def _commit(self, files: dict[int, File]) -> None:
        manifest = Manifest.of(self.channel.nonce, self.layout, [files[r] for r in range(self.layout.ranks)])
        for name, file in zip(manifest.names, manifest.files, strict=True):
            if self.files.is_shared and self.files.size(name) != file.size:
                raise CheckpointError(f"{name} is incomplete: does another process save to this folder?")
        self.files.put(MANIFEST, manifest.encode())
        if not self.files.is_shared:
            self.channel.publish("manifest", manifest.encode().decode())
        self._remove_leftovers(manifest)

    def _remove_leftovers(self, manifest: Manifest) -> None:
        try:
            self.files.remove([n for n in self.files.names() if n not in manifest.names and _is_data_file(n)])
            self.on_commit()
        except OSError as error:
            warn_once(f"fzero: {self.files.path!r} is saved, but older files could not be removed: {error}")


def _is_data_file(name: str) -> bool:
    """Return whether a file's name is that of a rank's file, of this save or another."""
    return re.fullmatch(r"[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def _write_file(files: Files, name: str, head: bytes, ranges: Sequence[_TensorRange]) -> File:
    """Write a file, and compute the checksum of each page."""
    size = 0
    checksums: list[str] = []

    def pages() -> Iterator[list[memoryview]]:
        nonlocal size
        for page in _file_pages(head, ranges):
            checksums.append(xxh3_checksum(page))
            size += sum(len(view) for view in page)
            yield page

    files.write(name, pages())
    return File(size, "".join(checksums))


def _file_pages(head: bytes, ranges: Sequence[_TensorRange]) -> Iterator[list[memoryview]]:
    """Yield the bytes of a file in pages of `PAGE_BYTES` bytes; the last one may be shorter."""
    page = list[memoryview]()
    space = PAGE_BYTES

    def views() -> Iterator[memoryview]:
        yield memoryview(head)
        for x, start, stop in ranges:
            yield from byte_views(x, start, stop)

    for view in views():
        unread_view = view
        while len(unread_view):
            page.append(unread_view[:space])
            space -= len(page[-1])
            unread_view = unread_view[len(page[-1]) :]
            if not space:
                yield page
                page = []
                space = PAGE_BYTES
    if page:
        yield page
