"""Writing: each rank writes its own ranges of Hugging Face's files, and then rank 0 gives the files their names."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero._arguments import check_int
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import agree, all_or_none
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import LocalFolder, files_at, hold_lock
from fzero.checkpoint._tensor_bytes import byte_views, view_bytes
from fzero.checkpoint.hf._named_leaves import NamedLeaf, named_leaves
from fzero.checkpoint.hf._stored_tensors import INDEX, SINGLE, StoredTensor
from fzero.checkpoint.layout import SAFETENSORS_NAMES, ChunkRange, LocalTree, full_chunk, local_tree, runs
from fzero.ranks import Mesh, is_leader
from fzero.sharding import slice_elements
from fzero.tree import Tree

__all__ = ["write"]

_CHUNK_BYTES = 1 << 22  # that are cast at a time
_TREE_TIMEOUT_SECONDS = 300.0  # to wait for another rank's tree, if the trees differ
_ALIGNMENT_BYTES = 8  # the data begins at a multiple of it, as safetensors requires


class _SafetensorsFile(NamedTuple):
    """A file to write.

    Attributes:
        name: its final name.
        head: its header.
        size: its bytes, header included.
        tensors: the range of each leaf in the file, by the leaf's index.
    """

    name: str
    head: bytes
    size: int
    tensors: dict[int, StoredTensor]


@api_boundary
def write(
    folder: StrPath,
    params: Tree,
    mesh: Mesh | None = None,
    *,
    name: Callable[[str], str] = lambda path: path,
    dtype: torch.dtype | None = None,
    max_file: int = 5_000_000_000,
) -> None:
    """Write parameters, in any layout, to a folder that `from_pretrained` reads. All ranks of the mesh call it.

    Each rank writes its own ranges of the files, whose bytes do not depend on the layout. `config.json` is not written:
    `model.config.save_pretrained(folder)` writes it. An earlier model in the folder is replaced when all ranks have
    written; other files stay. A tied leaf is stored once, under its first name.

    Args:
        folder: a local folder that all ranks see.
        params: the tree.
        mesh: the ranks; None for a tree without boxes in one process.
        name: maps a leaf's path to its name in the folder.
        dtype: the dtype that floating point leaves are cast to, in small parts; None to keep their dtypes.
        max_file: the most bytes of tensors in a file. A larger tensor gets a file of its own.

    Raises:
        CheckpointError: on all ranks, if a rank fails, the ranks' trees differ, or the disk is too full. The folder
            then holds the earlier model or none, but never parts of one.
        ValueError: if two leaves have one name, a box was sharded for another mesh, or `folder` is a URL.
        TypeError: if a leaf is not a tensor, differs by rank, or has a dtype that safetensors does not have.
        DonatedError: if a leaf was donated.

    Example:
        >>> import fzero, os, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.checkpoint.hf.write(folder, {"w": torch.ones(2), "b": torch.zeros(2)}, dtype=torch.bfloat16)
        >>> sorted(os.listdir(folder))
        ['model.safetensors']
    """
    files = _open_local(folder)
    is_storable = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in SAFETENSORS_NAMES
    if dtype is not None and not is_storable:
        raise TypeError(f"dtype={dtype!r}: expected a floating dtype, such as torch.bfloat16, or None")
    check_int("max_file", max_file, 1, "a number of bytes, such as 5_000_000_000")

    def prepare() -> tuple[bytes, tuple[LocalTree, list[_SafetensorsFile]]]:
        local = local_tree("params", params, mesh)
        plan = _plan_files(named_leaves("params", local, name), dtype, max_file)
        return files.path.encode() + b"".join([f.head for f in plan]), (local, plan)

    task = f"writing {files.path!r}"
    channel, (local, plan) = agree(task, prepare, secrets.token_hex(8), mesh, _TREE_TIMEOUT_SECONDS)
    nonce = channel.nonce
    leads = is_leader(mesh)
    with contextlib.ExitStack() as stack:
        all_or_none(task, lambda: _reserve_files(files, plan, nonce, stack) if leads else None, mesh)
        all_or_none(task, lambda: _write_local(files, plan, nonce, local), mesh)
        all_or_none(task, lambda: _rename_files(files, plan, nonce) if leads else None, mesh)


def _open_local(folder: StrPath) -> LocalFolder:
    """Return the files of a local folder, and refuse a URL before fsspec is imported."""
    scheme, separator, _ = str(folder).partition("://")
    is_url = separator and scheme not in ("file", "local")
    files = None if is_url else files_at(folder, "folder", "fzero.checkpoint.hf.write(folder, params)")
    if not isinstance(files, LocalFolder):
        raise ValueError(f"folder={folder!r} is a URL: expected a local folder; copy the folder after the write")
    return files


def _plan_files(leaves: Sequence[NamedLeaf], dtype: torch.dtype | None, max_file: int) -> list[_SafetensorsFile]:
    """Decide which file each leaf goes to, and its offset in the file.

    Raises:
        ValueError: if two leaves have one name.
        TypeError: if safetensors does not have a leaf's dtype.
    """
    parts: list[list[tuple[NamedLeaf, torch.dtype]]] = [[]]
    size = 0
    visited = dict[str, str]()
    for leaf in leaves:
        path, name = leaf.paths[0], leaf.names[0]
        if visited.setdefault(name, path) != path:
            raise ValueError(
                f"params leaves {visited[name]!r} and {path!r} have one name, {name!r}: expected two names"
            )
        kind = dtype if dtype is not None and leaf.leaf.dtype.is_floating_point else leaf.leaf.dtype
        if kind == torch.complex128:
            raise TypeError(f"params leaf {path!r} is {kind}, a dtype that safetensors does not have: give real pairs")
        nbytes = leaf.leaf.numel * kind.itemsize
        if parts[-1] and size + nbytes > max_file:
            parts.append([])
            size = 0
        parts[-1].append((leaf, kind))
        size += nbytes
    n = len(parts)
    return [
        _lay_out_file(SINGLE if n == 1 else f"model-{i:05d}-of-{n:05d}.safetensors", x) for i, x in enumerate(parts, 1)
    ]


def _lay_out_file(name: str, leaves: Sequence[tuple[NamedLeaf, torch.dtype]]) -> _SafetensorsFile:
    """Lay out a file: larger elements first, so that all are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    ranges = list[tuple[int, StoredTensor]]()
    offset = 0
    for leaf, kind in sorted(leaves, key=lambda x: -x[1].itemsize):
        end = offset + leaf.leaf.numel * kind.itemsize
        shape = leaf.leaf.shape
        entries[leaf.names[0]] = {"dtype": SAFETENSORS_NAMES[kind], "shape": list(shape), "data_offsets": [offset, end]}
        ranges.append((leaf.index, StoredTensor(name, SAFETENSORS_NAMES[kind], shape, offset)))
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    head = len(text).to_bytes(8, "little") + text
    tensors = {index: tensor._replace(offset=tensor.offset + len(head)) for index, tensor in ranges}
    return _SafetensorsFile(name, head, len(head) + offset, tensors)


_SHARD_FILE = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_TEMPORARY_FILE = re.compile(r"\.model(-\d{5,}-of-\d{5,})?\.safetensors\.[0-9a-f]{16}\.tmp")


def _temporary_name(name: str, nonce: str) -> str:
    return f".{name}.{nonce}.tmp"


def _reserve_files(
    files: LocalFolder, plan: Sequence[_SafetensorsFile], nonce: str, stack: contextlib.ExitStack
) -> None:
    """Lock the folder, and make the files in their final sizes under temporary names, with their headers.

    Raises:
        CheckpointError: if another process writes into the folder, or the disk is too full.
    """
    files.make()
    fd = os.open(files.path, os.O_RDONLY)
    stack.callback(os.close, fd)
    stack.enter_context(hold_lock(fd, files.path))
    stack.callback(files.remove, [_temporary_name(f.name, nonce) for f in plan])
    files.remove([name for name in files.names() if _TEMPORARY_FILE.fullmatch(name)])  # left by a write that was killed
    free, nbytes = files.free(), sum(f.size for f in plan)
    if free is not None and free < nbytes:
        raise CheckpointError(f"{files.path!r}: the save needs {nbytes:,} bytes, and its disk has {free:,} free")
    for file in plan:
        with open(os.path.join(files.path, _temporary_name(file.name, nonce)), "xb") as f:
            f.write(file.head)
            f.truncate(file.size)
            f.flush()
            os.fsync(f.fileno())


def _write_local(files: LocalFolder, plan: Sequence[_SafetensorsFile], nonce: str, local: LocalTree) -> None:
    """Write this process's ranges of all files. They are durable on return."""
    file_indices = {index: i for i, file in enumerate(plan) for index in file.tensors}
    fds: dict[int, int] = {}
    try:
        for rank in local.ranks:
            for piece, x, start in local.owned_pieces(rank):
                i, leaf = file_indices[piece.leaf], local.layout.leaves[piece.leaf]
                if i not in fds:
                    fds[i] = os.open(os.path.join(files.path, _temporary_name(plan[i].name, nonce)), os.O_WRONLY)
                for run in runs(piece.range, ChunkRange(full_chunk(leaf.shape), 0, leaf.numel)):
                    _write_run(
                        fd=fds[i],
                        target=plan[i].tensors[piece.leaf],
                        target_offset=run.target_offset,
                        x=x.detach(),
                        start=start + run.source_offset,
                        numel=run.numel,
                    )
        for fd in fds.values():
            os.fsync(fd)
    finally:
        for fd in fds.values():
            os.close(fd)


def _write_run(fd: int, target: StoredTensor, target_offset: int, x: torch.Tensor, start: int, numel: int) -> None:
    """Write elements of a tensor to their range of a file. If they must be cast, they are cast in small parts."""
    assert target.dtype is not None
    offset = target.offset + target_offset * target.dtype.itemsize
    if target.dtype == x.dtype:
        for view in byte_views(x, start, start + numel):
            offset = _write_at(fd, view, offset)
        return
    step = max(_CHUNK_BYTES // max(target.dtype.itemsize, x.element_size()), 1)
    for i in range(start, start + numel, step):
        part = slice_elements(x, i, min(i + step, start + numel)).to("cpu", target.dtype).contiguous()
        offset = _write_at(fd, view_bytes(part), offset)


def _write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write bytes at an offset of a file, in several system calls if necessary; return where they end."""
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
    return offset


def _rename_files(files: LocalFolder, plan: Sequence[_SafetensorsFile], nonce: str) -> None:
    """Rename the files to their final names. A reader meanwhile finds the old model, the new one, or none.

    Readers prefer a single file to an index. So a single file takes effect when it is renamed, and until it is removed.
    """
    names = [f.name for f in plan]
    existing = files.names()
    old_names = [n for n in existing if n not in names and (n == SINGLE or _SHARD_FILE.fullmatch(n))]
    if len(names) > 1 and set(names) & set(existing):  # the old index would name files of both models
        files.remove([INDEX])
        files.sync()
    for name in names:
        os.rename(os.path.join(files.path, _temporary_name(name, nonce)), os.path.join(files.path, name))
    files.sync()
    if len(names) > 1:
        files.put(INDEX, _index_bytes(plan))
    else:
        files.remove([INDEX])
    files.remove(old_names)
    files.sync()


def _index_bytes(plan: Sequence[_SafetensorsFile]) -> bytes:
    """Return the index: the file of each tensor, and the size of all tensors."""
    weights: dict[str, str] = {}
    for file in plan:
        entries = json.loads(file.head[8:])
        weights |= {name: file.name for name in entries if name != "__metadata__"}
    total = sum(f.size - len(f.head) for f in plan)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode() + b"\n"
