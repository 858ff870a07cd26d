"""Reading: each rank reads its own ranges of Hugging Face's files straight into its shards."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from fzero._arguments import check_callable
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import all_or_none, check_same_on_ranks
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._read_memory import materialize
from fzero.checkpoint._tensor_bytes import is_direct, view_bytes
from fzero.checkpoint.layout import (
    DTYPES,
    ChunkRange,
    Leaf,
    LocalTree,
    full_chunk,
    is_empty,
    local_tree,
    parse_json,
    runs,
)
from fzero.ranks import Mesh, all_gather_numbers
from fzero.sharding import put_elements, slice_elements
from fzero.tree import Tree

__all__ = ["INDEX", "SINGLE", "NamedLeaf", "StoredTensor", "named_leaves", "read"]

# The leaves of a tree, in its own order, and their names in a folder of Hugging Face.


class NamedLeaf(NamedTuple):
    """A leaf and its names in the folder.

    Attributes:
        index: the index of the leaf in the sharded tree.
        leaf: the leaf.
        paths: all paths of the leaf in the tree; a tied leaf has several.
        names: the name of each path.
    """

    index: int
    leaf: Leaf
    paths: tuple[str, ...]
    names: tuple[str, ...]


def named_leaves(label: str, local: LocalTree, name: Callable[[str], str]) -> list[NamedLeaf]:
    """List the leaves of a tree in its own order, which does not depend on the layout.

    Raises:
        TypeError: if a leaf is not a tensor, a leaf differs by rank, or `name` returns no string. The message names
            the leaf's path.
    """
    check_callable("name", name, "a function from a leaf's path to its name in the folder")
    layout = local.layout
    for path, x in layout.values.items():
        if not is_empty(x):
            raise TypeError(
                f"{label} leaf {path!r} is {str(x)[:80]!r}, but a folder of safetensors holds tensors only: "
                "leave it out of the tree"
            )
    for leaf in layout.leaves:
        if leaf.per_rank:
            raise TypeError(
                f"{label} leaf {leaf.path!r} is a PerRank value, but a folder of safetensors has one for all ranks: "
                "make it replicated, such as by fzero.collectives.pmean in a step"
            )
    paths_of_leaf: dict[int, list[str]] = {}
    for path in local.sources:
        if path in layout.leaf_index:
            paths_of_leaf.setdefault(layout.leaf_index[path], []).append(path)
    return [
        NamedLeaf(i, layout.leaves[i], tuple(paths), tuple([_name(path, name) for path in paths]))
        for i, paths in paths_of_leaf.items()
    ]


def _name(path: str, name: Callable[[str], str]) -> str:
    result = name(path)
    if not isinstance(result, str) or result in ("", "__metadata__"):
        raise TypeError(f"name({path!r}) returned {result!r}: expected a tensor's name, such as 'lm_head.weight'")
    return result


# The content of a folder of safetensors. Nothing in it is trusted: no name, length, offset or shape.


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names
_LONGEST = 100_000_000  # bytes of a header or an index; safetensors' own limit
_LIMIT = 1 << 48  # an upper bound of sizes and offsets
_DIMS = 64  # torch's own limit


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: the name of the file.
        kind: its dtype, by safetensors' name.
        shape: its shape.
        offset: where it begins in the file, in bytes.
    """

    file: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its elements; None if it cannot be read here, such as packed 4-bit numbers."""
        return None if self.kind == "C128" else DTYPES.get(self.kind)  # only fzero's own checkpoints have C128

    def __str__(self) -> str:
        kind = self.kind if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}"


class _Tensors(NamedTuple):
    """The tensors of a folder.

    Attributes:
        stored: each tensor, by name.
        crc: a checksum of the headers, which the ranks compare.
    """

    stored: dict[str, StoredTensor]
    crc: int


def _tensors_in(files: Files) -> _Tensors:
    """List the tensors of a folder: of `model.safetensors`, or of the files that its index names.

    If the folder has both, the single file counts, as in transformers.

    Raises:
        CheckpointError: if the folder has neither, or a file is missing or damaged. The message names the file.
    """
    if files.size(SINGLE) is not None:
        return _Tensors(*_read_header(files, SINGLE))
    if files.size(INDEX) is None:
        raise CheckpointError(
            f"{files.path!r} has no file {SINGLE}, and no {INDEX}: expected a folder that save_pretrained wrote"
        )
    tensors: dict[str, StoredTensor] = {}
    weights = _read_weight_map(files)
    headers = dict[str, dict[str, StoredTensor]]()
    crc = 0
    for name in sorted(set(weights.values())):
        headers[name], header_crc = _read_header(files, name)
        crc = zlib.crc32(header_crc.to_bytes(4, "big"), crc)
    for tensor, name in weights.items():
        if tensor not in headers[name]:
            raise DamagedError(f"{files.path!r}: {INDEX} says that {name} holds {tensor!r}, which it does not")
        tensors[tensor] = headers[name][tensor]
    return _Tensors(tensors, crc)


def _bytes(files: Files, name: str, at: int, numel: int) -> bytes:
    data = bytearray(numel)
    files.read_into(name, at, [memoryview(data)])
    return bytes(data)


def _parse(files: Files, name: str, data: bytes) -> dict[str, Any]:
    try:
        body = parse_json(data)
    except ValueError as error:
        raise DamagedError(f"{files.path!r}: {name} is damaged: its JSON is invalid: {str(error)[:80]}") from None
    if not isinstance(body, dict):
        raise DamagedError(f"{files.path!r}: {name} is damaged: its JSON is not an object")
    return body


def _read_weight_map(files: Files) -> dict[str, str]:
    """Read which file holds each tensor, and check that each file name lies in this folder."""
    size = files.size(INDEX) or 0
    if size > _LONGEST:
        raise DamagedError(f"{files.path!r}: {INDEX} has {size:,} bytes: expected at most {_LONGEST:,}")
    weights = _parse(files, INDEX, _bytes(files, INDEX, 0, size)).get("weight_map")
    if not isinstance(weights, dict):
        raise DamagedError(f"{files.path!r}: {INDEX} is damaged: it has no 'weight_map'")
    for tensor, name in weights.items():
        if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise DamagedError(
                f"{files.path!r}: {INDEX} says that {tensor!r} is in {str(name)[:80]!r}: expected a file of the folder"
            )
    return weights


def _read_header(files: Files, name: str) -> tuple[dict[str, StoredTensor], int]:
    """Read a file's header: its tensors, and a checksum of the header."""

    def check(holds: bool, reason: str) -> None:
        if not holds:
            raise DamagedError(f"{files.path!r}: {name} is damaged: {reason}")

    size = files.size(name)
    if size is None:
        raise DamagedError(f"{files.path!r}: {name} is missing")
    check(size >= 8, f"it has {size} bytes")
    first = _bytes(files, name, 0, 8)
    numel = int.from_bytes(first, "little")
    check(numel <= min(size - 8, _LONGEST), f"it has {size:,} bytes, but its header claims to have {numel:,}")
    text = _bytes(files, name, 8, numel)
    entries = _parse(files, name, text)
    entries.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in entries.items():
        stored, stop = _entry(name, 8 + numel, entry)
        check(stored is not None, f"its header says of {tensor!r}: {str(entry)[:80]}")
        assert stored is not None
        tensors[tensor] = stored
        spans.append((stored.offset, stop, tensor))
    end = 8 + numel
    for start, stop, tensor in sorted(spans):  # safetensors has no gaps and no overlaps, so no two share bytes
        check(start == end, f"{tensor!r} begins at byte {start:,}, but the tensor before it ends at {end:,}")
        end = stop
    check(end == size, f"it has {size:,} bytes, but its header describes {end:,}")
    return tensors, zlib.crc32(text, zlib.crc32(first))


def _entry(name: str, base: int, entry: Any) -> tuple[StoredTensor | None, int]:
    """Return the tensor that a header entry describes, and where it ends; None if the entry is invalid."""
    if not isinstance(entry, dict):
        return None, 0
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(kind) is not str or not _is_sizes(shape, _DIMS) or not _is_sizes(offsets, 2) or len(offsets) != 2:
        return None, 0
    start, stop = offsets
    stored = StoredTensor(name, kind, tuple(shape), base + start)
    fits = start <= stop and (stored.dtype is None or math.prod(shape) * stored.dtype.itemsize == stop - start)
    return (stored, base + stop) if fits else (None, 0)


def _is_sizes(x: Any, limit: int) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most `limit` sizes."""
    return type(x) is list and len(x) <= limit and all(type(n) is int and 0 <= n < _LIMIT for n in x)


_CHUNK = 1 << 22  # bytes that are cast or compared at a time


@api_boundary
def read(
    folder: StrPath,
    like: Tree,
    mesh: Mesh | None = None,
    *,
    name: Callable[[str], str] = lambda path: path,
    partial: bool = False,
) -> Tree:
    """Read a folder of safetensors, as `save_pretrained` writes it, into a tree in any layout. All ranks call it.

    Each rank reads its own ranges of the files into the memory of `like`. A read needs 4 MiB of memory beyond that.

    Args:
        folder: a folder with `model.safetensors`, or with several files and `model.safetensors.index.json`.
        like: the tree, in the layout that the result should have, such as `step.init` returns parameters. Its tensors
            are overwritten and become the result's. Tensors on the meta device get new memory. A floating point leaf
            may have another dtype than in the files.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        name: maps a leaf's path to its name in the folder. Two leaves with one name both get its values.
        partial: whether the folder may have tensors that `like` lacks.

    Returns:
        The tree.

    Raises:
        CheckpointError: on all ranks, if the folder is damaged, or lacks a leaf or has it in another shape. The message
            names the file or the first three leaves. Also if a tied leaf of `like` has two values in the folder.
        TypeError: if a leaf is not a tensor, or differs by rank. `None` is not a leaf.
        ValueError: if two leaves have one path, or a box was sharded for another mesh. The message names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=3)
        >>> fzero.checkpoint.hf.write(folder, {"w": torch.arange(4.0)})
        >>> like = mesh.spmd(fzero.partition)({"w": torch.empty(4)})
        >>> fzero.checkpoint.hf.read(folder, like=like, mesh=mesh)["w"].data
        tensor([[0., 1.],
                [2., 3.],
                [0., 0.]])
    """
    files = files_at(folder, "folder", "fzero.checkpoint.hf.read(folder, like)")

    def prepare() -> tuple[_Tensors, Any, LocalTree, list[NamedLeaf]]:
        tensors = _tensors_in(files)
        result = materialize(like, mesh)
        local = local_tree("like", result, mesh)
        leaves = named_leaves("like", local, name)
        _check_leaves(files, tensors.stored, leaves, partial)
        return tensors, result, local, leaves

    task = f"reading {files.path!r}"
    tensors, result, local, leaves = all_or_none(task, prepare, mesh)
    crcs = (
        all_gather_numbers(torch.tensor([tensors.crc], device="cpu"), mesh)
        if mesh is not None and mesh.distributed
        else []
    )
    if any(crc != [tensors.crc] for crc in crcs):
        raise CheckpointError(f"{files.path!r}: the ranks see different files: is the file system shared?")
    check_same_on_ranks(task, repr([(str(leaf), names) for _, leaf, _, names in leaves]).encode(), mesh)
    all_or_none(task, lambda: _fill(files, tensors.stored, local, leaves), mesh)
    return result


def _check_leaves(files: Files, stored: dict[str, StoredTensor], leaves: Sequence[NamedLeaf], partial: bool) -> None:
    """Check that a folder has the leaves of a tree, with their shapes.

    Raises:
        CheckpointError: if the leaves differ. The message names the first three.
    """
    problems, used = list[str](), set[str]()
    for _, leaf, paths, names in leaves:
        used.update(names)
        if not any(name in stored for name in names):
            as_name = "" if names[0] == paths[0] else f" for leaf {paths[0]!r}"
            problems.append(f"it has no tensor {names[0]!r}{as_name} ({leaf})")
        for path, name in zip(paths, names, strict=True):
            if name in stored and (stored[name].shape != leaf.shape or not _casts(stored[name].dtype, leaf.dtype)):
                problems.append(f"tensor {name!r} is {stored[name]} there, and leaf {path!r} is {leaf}")
    surplus = [] if partial else [name for name in stored if name not in used]
    problems += [f"the tree has no leaf for its tensor {name!r} ({stored[name]})" for name in surplus]
    if problems:
        more = f"; and {len(problems) - 3} more" if problems[3:] else ""
        hint = "; give partial=True to leave tensors out" if len(surplus) == len(problems) else ""
        raise CheckpointError(f"{files.path!r} is of another tree: " + "; ".join(problems[:3]) + more + hint)


def _casts(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Return whether a dtype can be read into another: any floating dtype into any, another one only into itself."""
    return source is not None and (source == target or (source.is_floating_point and target.is_floating_point))


class _FileRange(NamedTuple):
    """Elements of a leaf that are contiguous in memory and in a file.

    Attributes:
        to: the tensor that holds them.
        start: where they begin in the tensor, in elements.
        first: where they begin in the leaf, in elements.
        numel: the number of elements.
    """

    to: torch.Tensor
    start: int
    first: int
    numel: int


def _parts(local: LocalTree) -> Iterator[tuple[int, _FileRange]]:
    """Yield the ranges that this process holds, each with its leaf's index. Memory that ranks share counts once."""
    visited: set[tuple[int, int, int]] = set()
    for rank in local.ranks:
        for piece, x, start in local.local_pieces(rank):
            key = (piece.leaf, x.data_ptr(), start)
            if key in visited:  # a simulation holds replicated values once
                continue
            visited.add(key)
            leaf = local.layout.leaves[piece.leaf]
            for run in runs(ChunkRange(full_chunk(leaf.shape), 0, leaf.numel), piece.range):
                yield piece.leaf, _FileRange(x.detach(), start + run.target_offset, run.source_offset, run.numel)


def _fill(files: Files, stored: dict[str, StoredTensor], local: LocalTree, leaves: Sequence[NamedLeaf]) -> None:
    """Read all ranges that this process holds."""
    names = {leaf.index: [name for name in dict.fromkeys(leaf.names) if name in stored] for leaf in leaves}
    try:
        for index, part in _parts(local):
            name, *rest = names[index]
            _read_part(files, stored[name], part)
            for other in rest:
                if not _is_read(files, stored[other], part):
                    raise CheckpointError(
                        f"{files.path!r} has different values for {name!r} and {other!r}, which are one tensor in the "
                        "tree: use a model that does not tie them"
                    )
    finally:
        for memory in local.memory:
            for x in memory.tensors():
                if not x.is_inference():
                    torch.autograd.graph.increment_version(x)


def _read_part(files: Files, source: StoredTensor, part: _FileRange) -> None:
    """Read elements straight into memory; if they must be cast, or go to a device, through a small buffer."""
    if source.dtype == part.to.dtype and is_direct(part.to):
        view = view_bytes(part.to.view(-1)[part.start : part.start + part.numel])
        files.read_into(source.file, source.offset + part.first * part.to.element_size(), [view])
        return
    for at, values in _buffers(files, source, part):
        put_elements(part.to, part.start + at, values)


def _is_read(files: Files, source: StoredTensor, part: _FileRange) -> bool:
    """Return whether memory and a file hold the same values."""
    for at, values in _buffers(files, source, part):
        actual = (
            slice_elements(part.to, part.start + at, part.start + at + values.numel()).cpu().resolve_conj().contiguous()
        )
        if view_bytes(actual) != view_bytes(values.to(actual.dtype)):
            return False
    return True


def _buffers(files: Files, source: StoredTensor, part: _FileRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Read elements into one small buffer, part by part; yield the number read before, and the buffer."""
    assert source.dtype is not None
    size = source.dtype.itemsize
    step = max(_CHUNK // max(size, part.to.element_size()), 1)
    buffer = torch.empty(min(step, part.numel), dtype=source.dtype, device="cpu")
    for at in range(0, part.numel, step):
        values = buffer[: min(step, part.numel - at)]
        files.read_into(source.file, source.offset + (part.first + at) * size, [view_bytes(values)])
        yield at, values
