"""Looking into a checkpoint, without a mesh: what is in it, whether it is whole, and single leaves."""

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fzero.checkpoint._blocks import BlockRange, whole
from fzero.checkpoint._cut import Leaf, ShardedTree
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_whole
from fzero.checkpoint._load import Wanted, read_blocks, wanted_of
from fzero.checkpoint._manifest import BLOCK, Manifest

__all__ = ["fill_leaf", "leaves", "read", "verify"]

ABSENT = object()


def leaves(path: Any) -> dict[str, Leaf]:
    """List the leaves of a checkpoint: path, shape, dtype. Tied leaves are there once for each place.

    Raises:
        CheckpointError: if the folder is no whole checkpoint.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"w": torch.zeros(2, 3)}).wait()
        >>> [(path, leaf.shape) for path, leaf in fzero.checkpoint.leaves(folder).items()]
        [('w', (2, 3))]
    """
    cut = read_whole(files_at(path)).cut
    return {path: cut.leaves[i] for path, i in sorted(cut.number.items())}


def read(path: Any, name: str) -> Any:
    """Read one leaf of a checkpoint whole, or one value that is no tensor, whatever ranks and stage wrote it.

    Args:
        path: the folder, or URL.
        name: the leaf's path, such as `"params.blocks.0.w"`; or that of a key within a value, `"loader.position"`.

    Raises:
        CheckpointError: if the folder is no whole checkpoint, it has no such leaf, or the leaf is damaged.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"params": {"w": torch.ones(2)}, "step": 7}).wait()
        >>> fzero.checkpoint.read(folder, "params.w"), fzero.checkpoint.read(folder, "step")
        (tensor([1., 1.]), 7)
    """
    files = files_at(path)
    manifest = read_whole(files)
    cut = manifest.cut
    for path in _above(name):
        inside = name.removeprefix(path).lstrip(".")
        found = _within(cut.values[path], inside) if path in cut.values else ABSENT
        if found is not ABSENT:
            return found
    if name not in cut.number:
        known = [*cut.number, *cut.values]
        some = ", ".join([repr(p) for p in (difflib.get_close_matches(name, known) or known)[:3]])
        raise CheckpointError(f"{files.path!r} has no leaf {name!r}; of its {len(known)}, look at {some}")
    leaf = cut.leaves[cut.number[name]]
    return fill_leaf(files, manifest, cut.number[name], torch.empty(leaf.shape, dtype=leaf.dtype))


def _above(path: str) -> Iterator[str]:
    """Yield a path, and those of what it lies in, up to the whole tree's."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _within(value: Any, path: str) -> Any:
    """Return what lies at a path within a JSON value."""
    if not path:
        return value
    if not isinstance(value, dict):
        return ABSENT
    keys = [key for key in value if path == key or path.startswith(f"{key}.")]
    return next((_within(value[key], path[len(key) + 1 :]) for key in keys), ABSENT)


def fill_leaf(files: Files, manifest: Manifest, number: int, x: torch.Tensor) -> torch.Tensor:
    """Read all of a leaf into a contiguous tensor of its shape and dtype, and return that."""
    by_file: dict[int, list[Wanted]] = {}
    for writer, part in wanted_of(manifest, number, BlockRange(whole(tuple(x.shape)), 0, x.numel()), x, 0):
        by_file.setdefault(writer, []).append(part)
    for writer, wanted in sorted(by_file.items()):
        read_blocks(files, manifest, writer, wanted)
    return x


def verify(path: Any, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Read all files of a checkpoint, and check each block's sum.

    Args:
        path: the folder, or URL.
        progress: called after each block with the bytes that were read and those of all files.

    Returns:
        The bytes that were read.

    Raises:
        CheckpointError: if the folder is no checkpoint, or damaged. Names the first file, and leaves that it holds.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"w": torch.zeros(1000)}).wait()
        >>> fzero.checkpoint.verify(folder)
        4128
    """
    files = files_at(path)
    manifest, done = read_whole(files), 0
    for rank, at, size in _blocks(manifest.cut, manifest):
        block = torch.empty(size, dtype=torch.uint8)
        read_blocks(files, manifest, rank, [Wanted(at, size, block, 0)])
        done += size
        progress(done, manifest.nbytes)
    return done


def _blocks(cut: ShardedTree, manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """Yield a rank, and where a block of its file begins and how large it is, in bytes."""
    for rank in range(cut.ranks):
        size = manifest.files[rank].size
        for at in range(0, size, BLOCK):
            yield rank, at, min(BLOCK, size - at)
