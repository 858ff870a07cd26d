"""Loading: each rank reads its own ranges of the files, straight into its shards, and checks their sums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._notice import see
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import all_or_none, check_same
from fzero.checkpoint._blocks import BlockRange, bytes_of, is_direct, made_of, runs
from fzero.checkpoint._cut import ShardedTree
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._holdings import Holdings, holdings, is_whole
from fzero.checkpoint._manifest import BLOCK, Manifest, is_none, paths_of, read_manifest, sum_of, values_like
from fzero.checkpoint._memory import SharedMemory
from fzero.ranks import Mesh, numbers_of_all
from fzero.sharding import put_elements

__all__ = ["Wanted", "load", "load_files", "read_blocks", "wanted_of"]


@api_boundary
def load(path: Any, like: Any, mesh: Mesh | None = None, *, partial: bool = False) -> Any:
    """Read a checkpoint into a tree, in any layout, on any number of ranks. All ranks of the mesh call it.

    Each rank reads its own parts of the files, into the memory of `like`. Beside it a load takes a block of 4 MiB.

    Args:
        path: the folder, or URL, that `fzero.save` was given.
        like: a tree with the structure, shapes and dtypes of the one that was saved, in the layout that the result is
            to have. Its tensors are overwritten, and become the result's. Of tensors on the meta device, as
            `step.init` of a module on the meta device gives them, memory is made, and of those that share memory.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        partial: whether the checkpoint may have leaves that `like` has not, such as the optimizer's.

    Returns:
        The tree. Values that are no tensors are the checkpoint's.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, it is of another tree, or damaged. Names the first
            three leaves, or the file. If a file turned out to be damaged, `like` holds parts of it.
        ValueError: if two leaves have one path, or a box was cut for another mesh. Names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=3)
        >>> fzero.save(folder, {"w": torch.arange(4.0)})
        Saving(..., committed)
        >>> cut = mesh.spmd(fzero.partition)({"w": torch.empty(4)})
        >>> fzero.load(folder, like=cut, mesh=mesh)["w"].data
        tensor([[0., 1.],
                [2., 3.],
                [0., 0.]])
    """
    return load_files(files_at(path), like, mesh, partial)


def load_files(files: Files, like: Any, mesh: Mesh | None, partial: bool = False) -> Any:
    """Read a checkpoint out of some files, as `load` does; again, if another save took its place meanwhile."""
    while True:
        seen: list[int] = []
        try:
            return _load_files(files, like, mesh, partial, seen)
        except DamagedError:
            if not _replaced(files, seen, mesh):
                raise


def _replaced(files: Files, seen: list[int], mesh: Mesh | None) -> bool:
    """Return whether the manifest is another one now, on any rank."""
    try:
        another = bool(seen) and read_manifest(files)[1] != seen[0]
    except (CheckpointError, OSError):
        another = False
    if mesh is None or not mesh.distributed:
        return another
    return any(x for (x,) in numbers_of_all(torch.tensor([int(another)]), mesh))


def _load_files(files: Files, like: Any, mesh: Mesh | None, partial: bool, seen: list[int]) -> Any:
    prepared: list[tuple[Manifest, Any, Holdings]] = []

    def prepare() -> int:
        manifest, crc = read_manifest(files)
        seen.append(crc)
        made = made_of(like, mesh)
        mine = holdings("like", made, mesh)
        check_alike(files, manifest.cut, mine.cut, partial)
        prepared.append((manifest, made, mine))
        return crc

    crc = all_or_none(f"loading {files.path!r}", prepare, mesh)
    if mesh is not None and mesh.distributed:
        sums = [crc for (crc,) in numbers_of_all(torch.tensor([crc]), mesh)]
        if len(set(sums)) > 1:
            raise CheckpointError(f"{files.path!r}: the ranks see different manifests: is it one file system?")
    manifest, made, mine = prepared[0]
    check_same(f"loading {files.path!r}", Manifest("", mine.cut, (), 0.0).text(), mesh)
    by_file = all_or_none(f"loading {files.path!r}", lambda: _by_file(manifest, mine), mesh)
    if isinstance(files, SharedMemory):
        files.fetch(manifest, by_file)
    all_or_none(f"loading {files.path!r}", lambda: _fill(files, manifest, mine, by_file), mesh)
    paths, entries, structure = tree.flatten_with_paths(made, is_whole)
    values = values_like(mine.cut.values, manifest.cut.values)
    return tree.unflatten(structure, [values.get(p, x) for p, x in zip(paths, entries, strict=True)])


def _leaf(path: str) -> str:
    return f"leaf {path!r}" if path else "single value"


def check_alike(files: Files, saved: ShardedTree, mine: ShardedTree, partial: bool) -> None:
    """Check that a tree has the leaves of a checkpoint, with their shapes and dtypes.

    Raises:
        CheckpointError: if not. Names the first three leaves.
    """
    theirs = {**{p: str(saved.leaves[i]) for p, i in saved.number.items()}, **dict.fromkeys(saved.values, "a value")}
    # None is no leaf, and may be missing on either side
    wanted = [(path, x) for path, x in mine.values.items() if path in theirs or not is_none(x)]
    parts = [p for path, x in wanted for p in paths_of(path, x, saved.values)]
    ours = {**{p: str(mine.leaves[i]) for p, i in mine.number.items()}, **dict.fromkeys(parts, "a value")}
    theirs = {p: what for p, what in theirs.items() if p in ours or not is_none(saved.values.get(p, 0))}
    found = []
    for path, what in ours.items():
        if path not in theirs:
            found.append(f"it has no {_leaf(path)} ({what})")
        elif theirs[path] != what:
            found.append(_differs(path, saved, mine, theirs[path], what))
    found += [] if partial else [f"the tree has no {_leaf(p)} ({what})" for p, what in theirs.items() if p not in ours]
    for path, first in mine.ties.items():
        if not found and saved.number[path] != saved.number[first]:
            found.append(f"leaves {first!r} and {path!r} are one tensor in the tree, and two in it")
    if found:
        more = f"; and {len(found) - 3} more" if found[3:] else ""
        hint = "; give partial=True to leave leaves out" if all("the tree has no" in x for x in found) else ""
        hint += see("a-checkpoint-that-does-not-load")
        raise CheckpointError(f"{files.path!r} is of another tree: " + "; ".join(found[:3]) + more + hint)


def _differs(path: str, saved: ShardedTree, mine: ShardedTree, theirs: str, what: str) -> str:
    one, other = saved.number.get(path), mine.number.get(path)
    if one is not None and other is not None and saved.leaves[one].per_rank and mine.leaves[other].per_rank:
        return (
            f"leaf {path!r} is a PerRank value, {theirs} there and {what} here: it differs by rank, and cannot be cut "
            "anew for another mesh; save what does not depend on the ranks, such as one position in the data"
        )
    return f"leaf {path!r} is {theirs} there, and {what} here"


# ---------------------------------------------------------------- reading


class Wanted(NamedTuple):
    """Bytes of a file, and the elements of a tensor that they belong to."""

    at: int
    nbytes: int
    to: torch.Tensor
    start: int


def _by_file(manifest: Manifest, mine: Holdings) -> dict[int, list[Wanted]]:
    """List what this process holds by the file that it is in; what simulated ranks share is there once."""
    found: dict[int, list[Wanted]] = {}
    seen: set[tuple[int, int, int]] = set()
    for rank in mine.ranks:
        for piece, x, first in mine.held(rank):
            if (piece.leaf, x.data_ptr(), first) in seen:
                continue
            seen.add((piece.leaf, x.data_ptr(), first))
            leaf = manifest.cut.number[mine.cut.leaves[piece.leaf].path]
            for writer, part in wanted_of(manifest, leaf, piece.range, x, first):
                found.setdefault(writer, []).append(part)
    return found


def _fill(files: Files, manifest: Manifest, mine: Holdings, by_file: dict[int, list[Wanted]]) -> None:
    """Read all that this process holds, file by file."""
    for writer, wanted in sorted(by_file.items()):
        read_blocks(files, manifest, writer, wanted)
    for memory in mine.memory:
        for x in memory.tensors():
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)


def wanted_of(
    manifest: Manifest, leaf: int, wanted: BlockRange, x: torch.Tensor, first: int
) -> Iterator[tuple[int, Wanted]]:
    """Find the parts of files that a range of a leaf is in; it lies in a tensor, from the element `first` on.

    Yields:
        The rank whose file it is, and the part.
    """
    size = x.element_size()
    for writer, at, written in manifest.cut.writers(leaf, wanted):
        for run in runs(written, wanted):
            start = manifest.base(writer) + at + run.at * size
            yield writer, Wanted(start, run.numel * size, x, first + run.to)


def read_blocks(files: Files, manifest: Manifest, rank: int, wanted: Sequence[Wanted]) -> None:
    """Read parts of a rank's file into tensors, a block at a time, and check each block's sum.

    Raises:
        DamagedError: if the file is missing or cut, or a block's sum differs. Names the file and the leaves.
    """
    name, file, scratch = manifest.names[rank], manifest.files[rank], bytearray(BLOCK)
    left = sorted(wanted, key=lambda w: w.at)
    while left:
        left, again = _apart(left)
        for block, parts in _by_block(left):
            start, stop = block * BLOCK, min(block * BLOCK + BLOCK, file.size)
            views, finish = _views(parts, start, stop, memoryview(scratch))
            files.read_into(name, start, views)
            if sum_of(views) != file.sum(block):
                raise DamagedError(
                    f"{files.path!r}: {name} is damaged: bytes {start} to {stop} are not what was written"
                    + _leaves_there(manifest, rank, start, stop)
                )
            for put in finish:
                put()
        left = again


def _apart(wanted: Sequence[Wanted]) -> tuple[list[Wanted], list[Wanted]]:
    """Split sorted parts into some that do not overlap, and the rest: untied leaves want the same bytes."""
    some, rest, end = [], [], 0
    for w in wanted:
        (some if w.at >= end else rest).append(w)
        end = max(end, w.at + w.nbytes) if w.at >= end else end
    return some, rest


def _by_block(wanted: Sequence[Wanted]) -> Iterator[tuple[int, list[Wanted]]]:
    """Cut sorted parts at the borders of blocks, and yield those of each block."""
    parts: list[Wanted] = []
    block = -1
    for w in wanted:
        at, start = w.at, w.start
        while at < w.at + w.nbytes:
            if at // BLOCK != block:
                if parts:
                    yield block, parts
                block, parts = at // BLOCK, []
            n = min(w.at + w.nbytes, (block + 1) * BLOCK) - at
            parts.append(Wanted(at, n, w.to, start))
            at, start = at + n, start + n // w.to.element_size()
    if parts:
        yield block, parts


def _views(
    parts: Sequence[Wanted], start: int, stop: int, scratch: memoryview
) -> tuple[list[memoryview], list[Callable[[], None]]]:
    """List where the bytes of a block go: into tensors, or what is between them nowhere; and what is then to do."""
    views, finish, at, used = list[memoryview](), list[Callable[[], None]](), start, 0
    for w in [*parts, None]:
        gap = (stop if w is None else w.at) - at
        if gap:
            views.append(scratch[used : used + gap])
            used += gap
        if w is None:
            break
        numel = w.nbytes // w.to.element_size()
        if is_direct(w.to):
            views.append(bytes_of(w.to.detach().view(-1)[w.start : w.start + numel]))
        else:
            data = torch.empty(numel, dtype=w.to.dtype)
            views.append(bytes_of(data))
            finish.append(lambda w=w, data=data: put_elements(w.to.detach(), w.start, data))
        at = w.at + w.nbytes
    return views, finish


def _leaves_there(manifest: Manifest, rank: int, start: int, stop: int) -> str:
    """Name the first leaves of which a range of bytes of a file holds some."""
    at, names = manifest.base(rank), []
    for piece in manifest.cut.owned(rank):
        leaf = manifest.cut.leaves[piece.leaf]
        end = at + piece.numel * leaf.dtype.itemsize
        if at < stop and start < end:
            names.append(repr(leaf.path))
        at = end
    return f"; they are of {', '.join(names[:3])}{' and others' if names[3:] else ''}" if names else ""
