"""Saving: each rank writes one file of what it owns, and rank 0 commits them all by a manifest, which comes last."""

import contextlib
import functools
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fzero._notice import notice
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import Reports, agree, all_or_none
from fzero.checkpoint._blocks import chunks, view_or_chunks
from fzero.checkpoint._cut import ShardedTree
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._holdings import Holdings, Plain, holdings
from fzero.checkpoint._manifest import BLOCK, MANIFEST, File, Manifest, data_name, header, parse, sum_of
from fzero.checkpoint._memory import SharedMemory
from fzero.ranks import Mesh, checksum, numbers_of_all

__all__ = ["Saving", "Staging", "save", "start_save"]

TIMEOUT = 300.0
MAX_COMPARED = (
    1 << 16
)  # bytes; plain leaves up to this size are compared between the ranks: a generator's state, counters


class Saving:
    """A save under way, or done.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: str, run: Callable[[], None], background: bool) -> None:
        self.path = path
        self._error: BaseException | None = None
        target = functools.partial(self._run_guarded, run)
        self._thread = threading.Thread(target=target, name=f"fzero.save {path}") if background else None
        if self._thread is None:
            run()
        else:
            self._thread.start()  # no daemon: the interpreter waits for it at its end

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "committed" if self._error is None else "failed"
        return f"Saving({self.path!r}, {state})"

    def _run_guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # raised again where it is waited for, if it is
            self._error = error
            notice(f"fzero: {error}")

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is committed.

        Raises:
            CheckpointError: if it failed, on any rank: nothing was saved, and what was there is there.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class Staging:
    """Memory into which what is saved is copied, so that a step may overwrite it; kept from save to save."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def room(self, nbytes: int) -> torch.Tensor:
        """Return a buffer `[nbytes]`, the same memory each time if it is large enough."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._buffer[:nbytes]


@api_boundary
def save(
    path: Any, values: Any, mesh: Mesh | None = None, *, background: bool = False, timeout: float = TIMEOUT
) -> Saving:
    """Save a tree, in any layout, to a folder. All ranks of the mesh call it.

    Each rank writes what it holds, straight from memory, and what several hold each writes a part of. The folder is
    a checkpoint if and only if its manifest is there, and that is written last. So if anything dies, what the folder
    held before is there. Nothing is pickled.

    Args:
        path: the folder; or a URL that fsspec knows, such as `"s3://bucket/run/step-100"`.
        values: the tree: parameters, optimizer state, keys, `PerRank` values. Leaves that are no tensors are values of
            JSON: numbers, text, None, dicts and lists of these.
        mesh: the ranks; None for a tree without boxes in one process.
        background: whether to return as soon as the tree is copied. Then it may be changed, or donated to a
            jitted step. The copy takes the memory of what this rank writes.
        timeout: how long to wait for the other ranks, in seconds.

    Returns:
        A `Saving`: its `wait()` returns when the save is committed.

    Raises:
        CheckpointError: on all ranks, if any fails or is late, the ranks' trees differ, another process saves to the
            folder, or there is no room. With `background`, also by `wait()`.
        ValueError: if two leaves have one path, or a box was cut for another mesh. Names the path. Also if a leaf is on
            the meta device, or a plain one of up to 64 KiB differs by rank.
        TypeError: if a leaf can be no part of a checkpoint. The message names its path.
        DonatedError: if a leaf was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"w": torch.arange(3.0), "step": 7}).done()
        True
        >>> fzero.load(folder, like={"w": torch.zeros(3), "step": 0})
        {'w': tensor([0., 1., 2.]), 'step': 7}
    """
    return start_save(files_at(path), values, mesh, background, timeout, Staging())


def start_save(
    files: Files,
    values: Any,
    mesh: Mesh | None,
    background: bool,
    timeout: float,
    staging: Staging,
    on_commit: Callable[[], None] = lambda: None,
) -> Saving:
    """Save a tree as `save` does, with memory to copy it into, and what rank 0 does when it is committed."""
    nonce = secrets.token_hex(8)
    results: list[Holdings] = []

    def prepare() -> bytes:
        results.append(holdings("the tree", values, mesh))
        _check_values(results[0])
        if mesh is None or mesh.rank == 0:
            _check_room(files, results[0])
        return f"{files.common_name}\n".encode() + Manifest("", results[0].tree, (), 0.0).text()

    reports = agree("save", prepare, nonce, mesh, timeout)
    mine = results.pop()
    _check_equal(mine, mesh)
    pieces = {rank: _memory(mine, rank) for rank in mine.ranks}
    if background:  # a rank that has no memory left must not leave the others waiting
        pieces = all_or_none("save", lambda: _stage(pieces, staging), mesh)
    # a step that donates what was saved must find nobody who holds it: of `mine` only numbers are kept
    return Saving(files.path, functools.partial(_write_all, files, mine.tree, pieces, reports, on_commit), background)


def _check_values(mine: Holdings) -> None:
    """Check that there is something to write.

    Raises:
        ValueError: if a leaf is on the meta device. The message names it.
    """
    for rank in mine.ranks:
        for piece, x, _ in mine.owned_pieces(rank):
            if x.is_meta:
                path = mine.tree.leaves[piece.leaf].path
                raise ValueError(f"the tree leaf {path!r} is on the meta device, and has no values to save")


def _check_equal(mine: Holdings, mesh: Mesh | None) -> None:
    """Check that small plain leaves, of which each rank writes a part, are the same on all processes.

    Raises:
        ValueError: on all ranks, if one is not. The message names it.
    """
    if mesh is None or not mesh.distributed:
        return
    plain = {i: x for memory in mine.memory if isinstance(memory, Plain) for i, x in memory.leaves.items()}
    small = [i for i, x in plain.items() if x.nbytes <= MAX_COMPARED]
    sums = torch.stack([torch.zeros((), dtype=torch.int64), *[checksum(plain[i]).cpu() for i in small]])
    all_numbers = numbers_of_all(sums, mesh)
    for n, i in enumerate(small, 1):
        rank = next((r for r, numbers in enumerate(all_numbers) if numbers[n] != all_numbers[0][n]), None)
        if rank is not None:
            raise ValueError(
                f"the tree leaf {mine.tree.leaves[i].path!r} is a plain tensor, so the same on all ranks, and differs "
                f"between ranks 0 and {rank}: give what differs by rank as mesh.local(x)"
            )


def _check_room(files: Files, mine: Holdings) -> None:
    """Check before the first byte that the disk has room for what all ranks write."""
    free, needed = files.free(), sum(mine.tree.starts(r)[-1] for r in range(mine.tree.ranks))
    if free is not None and free < needed:
        raise CheckpointError(f"there is no room for {needed:,} bytes in {files.path!r}: its disk has {free:,} left")


_Part = tuple[torch.Tensor, int, int]  # elements of a tensor, from one to before another


def _memory(mine: Holdings, rank: int) -> list[_Part]:
    """List what a rank writes, in the order of its file."""
    # of what is held, a piece begins where `owned` says
    return [(x.detach(), at, at + piece.numel) for piece, x, at in mine.owned_pieces(rank)]


def _stage(pieces: dict[int, list[_Part]], staging: Staging) -> dict[int, list[_Part]]:
    """Copy what is written into memory of its own."""
    sizes = [(stop - start) * x.element_size() for parts in pieces.values() for x, start, stop in parts]
    buffer, at = staging.room(sum(sizes)), 0
    found: dict[int, list[_Part]] = {}
    for rank, parts in pieces.items():
        found[rank] = []
        for x, start, stop in parts:
            first = at
            for part in view_or_chunks(x, start, stop):
                buffer[at : at + part.nbytes].copy_(part.view(torch.uint8), non_blocking=True)
                at += part.nbytes
            found[rank].append((buffer, first, at))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # copies from a GPU are under way
    return found


def _write_all(
    files: Files, tree: ShardedTree, pieces: dict[int, list[_Part]], reports: Reports, on_commit: Callable[[], None]
) -> None:
    """Write this process's files, and let rank 0 commit all of them."""
    names = {rank: data_name(reports.nonce, rank, tree.ranks) for rank in pieces}

    def write() -> dict[int, File]:
        return {rank: _write(files, names[rank], header(tree, rank), parts) for rank, parts in pieces.items()}

    def commit(written: dict[int, File]) -> None:
        manifest = Manifest.of(reports.nonce, tree, [written[r] for r in range(tree.ranks)])
        for name, file in zip(manifest.names, manifest.files, strict=True):
            if files.is_shared and files.size(name) != file.size:
                raise CheckpointError(f"{name} is not there whole: does another process save to this folder?")
        files.put(MANIFEST, manifest.encode())
        if not files.is_shared:
            reports.publish("manifest", manifest.encode().decode())
        tidy(manifest)

    def tidy(manifest: Manifest) -> None:
        try:
            files.remove([n for n in files.names() if n not in manifest.names and _is_data_file(n)])
            on_commit()
        except OSError as error:
            notice(f"fzero: {files.path!r} is saved, and older files could not be removed: {error}")

    try:
        if reports.is_leader:
            with contextlib.ExitStack() as stack:  # what keeps rank 0 from it is told to the others

                def write_locked() -> dict[int, File]:
                    stack.enter_context(files.exclusive())
                    return write()

                errors = reports.lead(write_locked, commit)
        else:
            errors = reports.follow(write)
            if not errors and isinstance(files, SharedMemory) and files.is_leader:
                data = reports.wait_for("manifest", 0).encode()
                files.put(MANIFEST, data)
                tidy(parse(data))
    except CheckpointError as error:  # whether it is committed is not known here, so the file stays
        raise CheckpointError(f"the save to {files.path!r} was not committed: {error}") from error
    if errors:
        files.remove(names.values())
        raise CheckpointError(f"nothing was saved to {files.path!r}: {errors}")


def _is_data_file(name: str) -> bool:
    """Return whether a file is a leftover of another save of the folder."""
    return re.fullmatch(r"[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def _write(files: Files, name: str, head: bytes, parts: Sequence[_Part]) -> File:
    """Write a file, and sum up its blocks."""
    size, sums = 0, list[str]()

    def blocks() -> Iterator[list[memoryview]]:
        nonlocal size
        for block in _in_blocks(head, parts):
            sums.append(sum_of(block))
            size += sum(len(view) for view in block)
            yield block

    files.write(name, blocks())
    return File(size, "".join(sums))


def _in_blocks(head: bytes, parts: Sequence[_Part]) -> Iterator[list[memoryview]]:
    """Yield the bytes of a file, `BLOCK` of them at a time but for the last."""
    block, space = list[memoryview](), BLOCK

    def views() -> Iterator[memoryview]:
        yield memoryview(head)
        for x, start, stop in parts:
            yield from chunks(x, start, stop)

    for view in views():
        rest = view
        while len(rest):
            block.append(rest[:space])
            space -= len(block[-1])
            rest = rest[len(block[-1]) :]
            if not space:
                yield block
                block, space = [], BLOCK
    if block:
        yield block
