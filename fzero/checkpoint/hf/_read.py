"""Reading: each rank reads its own ranges of Hugging Face's files straight into its shards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import all_or_none, check_same_on_ranks
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._read_memory import materialize
from fzero.checkpoint._tensor_bytes import is_direct, view_bytes
from fzero.checkpoint.hf._named_leaves import NamedLeaf, named_leaves
from fzero.checkpoint.hf._stored_tensors import FolderTensors, StoredTensor, tensors_in
from fzero.checkpoint.layout import ChunkRange, LocalTree, full_chunk, local_tree, runs
from fzero.ranks import Mesh, all_gather_numbers
from fzero.sharding import put_elements, slice_elements
from fzero.tree import Tree

__all__ = ["read"]


_CHUNK_BYTES = 1 << 22  # that are cast or compared at a time


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

    def prepare() -> tuple[FolderTensors, Any, LocalTree, list[NamedLeaf]]:
        tensors = tensors_in(files)
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
    all_or_none(task, lambda: _read_leaves(files, tensors.stored, local, leaves), mesh)
    return result


def _check_leaves(
    files: Files, stored_tensors: dict[str, StoredTensor], leaves: Sequence[NamedLeaf], partial: bool
) -> None:
    """Check that a folder has the leaves of a tree, with their shapes.

    Raises:
        CheckpointError: if the leaves differ. The message names the first three.
    """
    problems, used_names = list[str](), set[str]()
    for _, leaf, paths, names in leaves:
        used_names.update(names)
        if not any(name in stored_tensors for name in names):
            as_name = "" if names[0] == paths[0] else f" for leaf {paths[0]!r}"
            problems.append(f"it has no tensor {names[0]!r}{as_name} ({leaf})")
        for path, name in zip(paths, names, strict=True):
            if name in stored_tensors and (
                stored_tensors[name].shape != leaf.shape or not _can_cast(stored_tensors[name].dtype, leaf.dtype)
            ):
                problems.append(f"tensor {name!r} is {stored_tensors[name]} there, and leaf {path!r} is {leaf}")
    surplus = [] if partial else [name for name in stored_tensors if name not in used_names]
    problems += [f"the tree has no leaf for its tensor {name!r} ({stored_tensors[name]})" for name in surplus]
    if problems:
        rest_text = f"; and {len(problems) - 3} more" if problems[3:] else ""
        hint = "; give partial=True to leave tensors out" if len(surplus) == len(problems) else ""
        raise CheckpointError(f"{files.path!r} is of another tree: " + "; ".join(problems[:3]) + rest_text + hint)


def _can_cast(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Return whether a dtype can be read into another: any floating dtype into any, another one only into itself."""
    return source is not None and (source == target or (source.is_floating_point and target.is_floating_point))


class _FileRange(NamedTuple):
    """Elements of a leaf that are contiguous in memory and in a file.

    Attributes:
        tensor: the tensor that holds them.
        start: where they begin in the tensor, in elements.
        first: where they begin in the leaf, in elements.
        numel: the number of elements.
    """

    tensor: torch.Tensor
    start: int
    first: int
    numel: int


def _local_ranges(local: LocalTree) -> Iterator[tuple[int, _FileRange]]:
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


def _read_leaves(
    files: Files, stored_tensors: dict[str, StoredTensor], local: LocalTree, leaves: Sequence[NamedLeaf]
) -> None:
    """Read all ranges that this process holds."""
    names = {leaf.index: [name for name in dict.fromkeys(leaf.names) if name in stored_tensors] for leaf in leaves}
    try:
        for index, part in _local_ranges(local):
            name, *rest = names[index]
            _read_part(files, stored_tensors[name], part)
            for twin in rest:
                if not _is_read(files, stored_tensors[twin], part):
                    raise CheckpointError(
                        f"{files.path!r} has different values for {name!r} and {twin!r}, which are one tensor in the "
                        "tree: use a model that does not tie them"
                    )
    finally:
        for memory in local.memory:
            for x in memory.tensors():
                if not x.is_inference():
                    torch.autograd.graph.increment_version(x)


def _read_part(files: Files, source: StoredTensor, part: _FileRange) -> None:
    """Read elements straight into memory; if they must be cast, or go to a device, through a small buffer."""
    if source.dtype == part.tensor.dtype and is_direct(part.tensor):
        view = view_bytes(part.tensor.view(-1)[part.start : part.start + part.numel])
        files.read_into(source.file, source.offset + part.first * part.tensor.element_size(), [view])
        return
    for start, values in _read_buffers(files, source, part):
        put_elements(part.tensor, part.start + start, values)


def _is_read(files: Files, source: StoredTensor, part: _FileRange) -> bool:
    """Return whether memory and a file hold the same values."""
    for start, values in _read_buffers(files, source, part):
        actual = (
            slice_elements(part.tensor, part.start + start, part.start + start + values.numel())
            .cpu()
            .resolve_conj()
            .contiguous()
        )
        if view_bytes(actual) != view_bytes(values.to(actual.dtype)):
            return False
    return True


def _read_buffers(files: Files, source: StoredTensor, part: _FileRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Read elements into one small buffer, part by part; yield the number read before, and the buffer."""
    assert source.dtype is not None
    size = source.dtype.itemsize
    step = max(_CHUNK_BYTES // max(size, part.tensor.element_size()), 1)
    buffer = torch.empty(min(step, part.numel), dtype=source.dtype, device="cpu")
    for start in range(0, part.numel, step):
        values = buffer[: min(step, part.numel - start)]
        files.read_into(source.file, source.offset + (part.first + start) * size, [view_bytes(values)])
        yield start, values
