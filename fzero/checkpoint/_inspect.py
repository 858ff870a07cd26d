"""Reading a checkpoint without a mesh: its leaves, single leaves, and its integrity."""

import difflib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fzero._arguments import check_callable
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_complete
from fzero.checkpoint._load import ReadRequest, read_pages, read_requests
from fzero.checkpoint.layout import PAGE_BYTES, ChunkRange, Leaf, Manifest, TreeLayout, full_chunk

__all__ = ["fill_leaf", "leaves", "read", "verify"]

_ABSENT = object()


@api_boundary
def leaves(path: StrPath) -> dict[str, Leaf]:
    """List the leaves of a checkpoint, with shapes and dtypes. A tied leaf is listed at each of its paths.

    Raises:
        CheckpointError: if the folder is not a complete checkpoint.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"w": torch.zeros(2, 3)}).wait()
        >>> [(path, leaf.shape) for path, leaf in fzero.checkpoint.leaves(folder).items()]
        [('w', (2, 3))]
    """
    layout = read_complete(files_at(path, call="fzero.checkpoint.leaves(path)")).layout
    return {path: layout.leaves[i] for path, i in sorted(layout.leaf_index.items())}


@api_boundary
def read(path: StrPath, name: str) -> Any:
    """Read one full leaf, or one value that is not a tensor, whatever ranks and stage wrote the checkpoint.

    Args:
        path: the folder or URL of the checkpoint.
        name: the path of the leaf, such as `"params.blocks.0.w"`, or of a key within a value, `"loader.position"`.

    Raises:
        CheckpointError: if the folder is not a complete checkpoint, has no such leaf, or the leaf is damaged.
        TypeError: if `name` is a folder, and `path` is not.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"params": {"w": torch.ones(2)}, "step": 7}).wait()
        >>> fzero.checkpoint.read(folder, "params.w"), fzero.checkpoint.read(folder, "step")
        (tensor([1., 1.]), 7)
    """
    files = files_at(path, call="fzero.checkpoint.read(path, name)")
    if os.path.isdir(name) and "://" not in str(path) and not os.path.isdir(path):
        raise TypeError(
            f"name={name!r} is a folder, and path={path!r} is not: expected fzero.checkpoint.read(path, name)"
        )
    manifest = read_complete(files)
    layout = manifest.layout
    for parent in _paths_above(name):
        inside = name.removeprefix(parent).lstrip(".")
        value = _part_at_path(layout.values[parent], inside) if parent in layout.values else _ABSENT
        if value is not _ABSENT:
            return value
    if name not in layout.leaf_index:
        paths = [*layout.leaf_index, *layout.values]
        examples = ", ".join([repr(p) for p in (difflib.get_close_matches(name, paths) or paths)[:3]])
        raise CheckpointError(f"{files.path!r} has no leaf {name!r}: it has {len(paths)} leaves, such as {examples}")
    leaf = layout.leaves[layout.leaf_index[name]]
    return fill_leaf(files, manifest, layout.leaf_index[name], torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))


def _paths_above(path: str) -> Iterator[str]:
    """Yield a path and each path above it, up to the root."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _part_at_path(value: Any, path: str) -> Any:
    """Return the part of a JSON value at a path, or `_ABSENT`."""
    if not path:
        return value
    if not isinstance(value, dict):
        return _ABSENT
    keys = [key for key in value if path == key or path.startswith(f"{key}.")]
    return next((_part_at_path(value[key], path[len(key) + 1 :]) for key in keys), _ABSENT)


def fill_leaf(files: Files, manifest: Manifest, index: int, x: torch.Tensor) -> torch.Tensor:
    """Read a full leaf into a contiguous tensor of its shape and dtype, and return the tensor."""
    by_file: dict[int, list[ReadRequest]] = {}
    if not x.numel():  # nothing is read, so only the files' sizes show whether the leaf has no elements
        for rank in range(manifest.layout.ranks):
            manifest.data_start(rank)
    for writer, request in read_requests(manifest, index, ChunkRange(full_chunk(tuple(x.shape)), 0, x.numel()), x, 0):
        by_file.setdefault(writer, []).append(request)
    for writer, requests in sorted(by_file.items()):
        read_pages(files, manifest, writer, requests)
    return x


@api_boundary
def verify(path: StrPath, progress: Callable[[int, int], None] = lambda nbytes, total: None) -> int:
    """Read all files of a checkpoint, and check each page's checksum.

    Args:
        path: the folder or URL of the checkpoint.
        progress: called after each page with the bytes read so far and the bytes of all files.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or is damaged. The message names the first damaged file and
            leaves in it.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"w": torch.zeros(1000)}).wait()
        >>> fzero.checkpoint.verify(folder)
        4128
    """
    files = files_at(path, call="fzero.checkpoint.verify(path)")
    check_callable("progress", progress, "a function of the bytes read and of all bytes")
    manifest, nbytes = read_complete(files), 0
    for rank, offset, size in _rank_pages(manifest.layout, manifest):
        page = torch.empty(size, dtype=torch.uint8, device="cpu")
        read_pages(files, manifest, rank, [ReadRequest(offset, size, page, 0)])
        nbytes += size
        progress(nbytes, manifest.nbytes)
    return nbytes


def _rank_pages(layout: TreeLayout, manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """Yield each page of each rank's file: the rank, and the page's first byte and size."""
    for rank in range(layout.ranks):
        size = manifest.files[rank].size
        for offset in range(0, size, PAGE_BYTES):
            yield rank, offset, min(PAGE_BYTES, size - offset)
