"""Loading: each rank reads its own ranges of the files straight into its shards, and checks their checksums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._notice import trouble_link
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import all_or_none, check_same_on_ranks
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._read_memory import materialize
from fzero.checkpoint._shared_memory import SharedMemory
from fzero.checkpoint._tensor_bytes import is_direct, view_bytes
from fzero.checkpoint.layout import (
    PAGE_BYTES,
    ChunkRange,
    LocalTree,
    Manifest,
    TreeLayout,
    is_entry,
    is_none,
    layout_text,
    local_tree,
    possible_paths,
    read_manifest,
    runs,
    values_like,
    xxh3_checksum,
)
from fzero.ranks import Mesh, all_gather_numbers
from fzero.sharding import put_elements
from fzero.tree import Tree

__all__ = ["ReadRequest", "load", "load_files", "read_pages", "read_requests"]


@api_boundary
def load(path: StrPath, like: Tree, mesh: Mesh | None = None, *, partial: bool = False) -> Tree:
    """Read a checkpoint into a tree, in any layout, on any number of ranks. All ranks of the mesh call it.

    Each rank reads its own ranges of the files into the memory of `like`. A load needs 4 MiB of memory beyond that.

    Args:
        path: the folder or URL of the checkpoint, as given to `fzero.save`.
        like: a tree with the structure, shapes and dtypes of the saved tree, in the layout that the result should
            have. Its tensors are overwritten and become the result's. Tensors on the meta device, such as
            `step.init` of a meta module returns, get new memory; so do tensors that share memory.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        partial: whether the checkpoint may have leaves that `like` lacks, such as the optimizer's.

    Returns:
        The tree. Its values that are not tensors come from the checkpoint.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, it is damaged, or it holds another tree. The message
            names the file, or the first three leaves. If a file was found damaged, `like` may be partly overwritten.
        ValueError: if two leaves have one path, or a box was sharded for another mesh. The message names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=3)
        >>> fzero.save(folder, {"w": torch.arange(4.0)})
        SaveHandle(..., committed)
        >>> like = mesh.spmd(fzero.partition)({"w": torch.empty(4)})
        >>> fzero.load(folder, like=like, mesh=mesh)["w"].data
        tensor([[0., 1.],
                [2., 3.],
                [0., 0.]])
    """
    return load_files(files_at(path, call="fzero.load(path, like)"), like, mesh, partial)


def load_files(files: Files, like: Tree, mesh: Mesh | None, partial: bool = False) -> Any:
    """Read a checkpoint as `load` does. Start again if another save replaced the checkpoint meanwhile."""
    while True:
        manifest_or_error = _try_manifest(files)
        try:
            return _load_files(files, manifest_or_error, like, mesh, partial)
        except DamagedError:
            if not _is_replaced(files, manifest_or_error, mesh):
                raise


def _try_manifest(files: Files) -> tuple[Manifest, int] | Exception:
    """Return the manifest and its checksum, or the error of reading them."""
    try:
        return read_manifest(files)
    except Exception as error:  # `all_or_none` raises it on all ranks
        return error


def _is_replaced(files: Files, manifest_or_error: tuple[Manifest, int] | Exception, mesh: Mesh | None) -> bool:
    """Return whether the manifest has changed since it was read, on any rank."""
    try:
        is_new = not isinstance(manifest_or_error, Exception) and read_manifest(files)[1] != manifest_or_error[1]
    except (CheckpointError, OSError):
        is_new = False
    if mesh is None or not mesh.distributed:
        return is_new
    return any(x for (x,) in all_gather_numbers(torch.tensor([int(is_new)], device="cpu"), mesh))


def _load_files(
    files: Files, manifest_or_error: tuple[Manifest, int] | Exception, like: Any, mesh: Mesh | None, partial: bool
) -> Any:
    """Read a checkpoint; `manifest_or_error` is the result of `_try_manifest`."""

    def prepare() -> tuple[Manifest, int, Any, LocalTree]:
        if isinstance(manifest_or_error, Exception):
            raise manifest_or_error
        result = materialize(like, mesh)
        local = local_tree("like", result, mesh)
        _check_leaves(files, manifest_or_error[0].layout, local.layout, partial)
        return *manifest_or_error, result, local

    manifest, crc, result, local = all_or_none(f"loading {files.path!r}", prepare, mesh)
    if mesh is not None and mesh.distributed:
        sums = [crc for (crc,) in all_gather_numbers(torch.tensor([crc], device="cpu"), mesh)]
        if len(set(sums)) > 1:
            raise CheckpointError(f"{files.path!r}: the ranks see different manifests: is the file system shared?")
    check_same_on_ranks(f"loading {files.path!r}", layout_text(local.layout), mesh)
    by_file = all_or_none(f"loading {files.path!r}", lambda: _reads_by_file(manifest, local), mesh)
    if isinstance(files, SharedMemory):
        files.fetch(manifest, by_file)
    all_or_none(f"loading {files.path!r}", lambda: _read_ranges(files, manifest, local, by_file), mesh)
    paths, entries, structure = tree.flatten_with_paths(result, is_entry)
    values = values_like(local.layout.values, manifest.layout.values)
    return tree.unflatten(structure, [values.get(p, x) for p, x in zip(paths, entries, strict=True)])


def _describe_leaf(path: str) -> str:
    return f"leaf {path!r}" if path else "single value"


def _check_leaves(files: Files, saved: TreeLayout, local: TreeLayout, partial: bool) -> None:
    """Check that a tree has the leaves of a checkpoint, with their shapes and dtypes.

    Raises:
        CheckpointError: if the leaves differ. The message names the first three.
    """
    problems = _list_problems(saved, local, partial)
    if problems:
        rest_text = f"; and {len(problems) - 3} more" if problems[3:] else ""
        hint = "; give partial=True to leave leaves out" if all("the tree has no" in x for x in problems) else ""
        hint += trouble_link("a-checkpoint-that-does-not-load")
        raise CheckpointError(f"{files.path!r} is of another tree: " + "; ".join(problems[:3]) + rest_text + hint)


def _leaf_texts(saved: TreeLayout, local: TreeLayout) -> tuple[dict[str, str], dict[str, str]]:
    """Show the leaves of a checkpoint and of a tree, by path. A None that the other lacks is left out."""
    saved_texts = {
        **{p: str(saved.leaves[i]) for p, i in saved.leaf_index.items()},
        **dict.fromkeys(saved.values, "a value"),
    }
    # None is not a leaf, and may be missing on either side
    items = [(path, x) for path, x in local.values.items() if path in saved_texts or not is_none(x)]
    parts = [p for path, x in items for p in possible_paths(path, x, saved.values)]
    local_texts = {**{p: str(local.leaves[i]) for p, i in local.leaf_index.items()}, **dict.fromkeys(parts, "a value")}
    return {
        p: text for p, text in saved_texts.items() if p in local_texts or not is_none(saved.values.get(p, 0))
    }, local_texts


def _list_problems(saved: TreeLayout, local: TreeLayout, partial: bool) -> list[str]:
    """List how the leaves of a tree differ from those of a checkpoint."""
    saved_texts, local_texts = _leaf_texts(saved, local)
    problems = []
    for path, text in local_texts.items():
        if path not in saved_texts:
            problems.append(f"it has no {_describe_leaf(path)} ({text})")
        elif saved_texts[path] != text:
            problems.append(_difference_message(path, saved, local, saved_texts[path], text))
        elif (
            (saved_axes := _varying_axes(saved, path))
            and (local_axes := _varying_axes(local, path))
            and saved_axes != local_axes
        ):
            problems.append(
                f"leaf {path!r} is a PerRank value that differs along {saved_axes} there, and along {local_axes} here: "
                f"give `like` a value of the saved axes, fzero.PerRank(x, {saved_axes})"
            )
    problems += (
        []
        if partial
        else [
            f"the tree has no {_describe_leaf(p)} ({text})" for p, text in saved_texts.items() if p not in local_texts
        ]
    )
    for path, first in local.ties.items():
        if not problems and saved.leaf_index[path] != saved.leaf_index[first]:
            problems.append(f"leaves {first!r} and {path!r} are one tensor in the tree, and two in the checkpoint")
    return problems


def _varying_axes(layout: TreeLayout, path: str) -> tuple[str, ...] | None:
    """Return the axes along which a `PerRank` leaf differs, or None if its rows are those of all ranks, in order."""
    index = layout.leaf_index.get(path)
    if index is None or not layout.leaves[index].per_rank:
        return None
    axes = layout.groups[layout.home[index][0]].axes
    if layout.size(axes) == layout.ranks:
        return None
    return tuple([axis for axis in axes if layout.size((axis,)) > 1])


def _difference_message(path: str, saved: TreeLayout, local: TreeLayout, saved_text: str, local_text: str) -> str:
    i, j = saved.leaf_index.get(path), local.leaf_index.get(path)
    if i is not None and j is not None and saved.leaves[i].per_rank and local.leaves[j].per_rank:
        return (
            f"leaf {path!r} is a PerRank value, {saved_text} there and {local_text} here: it differs by rank, and "
            "cannot be resharded for another mesh; save what does not depend on the ranks, such as one position in the "
            "data"
        )
    return f"leaf {path!r} is {saved_text} there, and {local_text} here"


class ReadRequest(NamedTuple):
    """A range of bytes of a file, and the range of a tensor that they are read into."""

    offset: int
    nbytes: int
    tensor: torch.Tensor
    start: int


def _reads_by_file(manifest: Manifest, local: LocalTree) -> dict[int, list[ReadRequest]]:
    """List the reads of this process by file. Memory that simulated ranks share is read once."""
    requests: dict[int, list[ReadRequest]] = {}
    visited: set[tuple[int, int, int]] = set()
    for rank in local.ranks:
        for piece, x, first_element in local.local_pieces(rank):
            if (piece.leaf, x.data_ptr(), first_element) in visited:
                continue
            visited.add((piece.leaf, x.data_ptr(), first_element))
            leaf = manifest.layout.leaf_index[local.layout.leaves[piece.leaf].path]
            for writer, request in read_requests(manifest, leaf, piece.range, x, first_element):
                requests.setdefault(writer, []).append(request)
    return requests


def _read_ranges(files: Files, manifest: Manifest, local: LocalTree, by_file: dict[int, list[ReadRequest]]) -> None:
    """Read all ranges that this process holds, file by file."""
    for writer, requests in sorted(by_file.items()):
        read_pages(files, manifest, writer, requests)
    for memory in local.memory:
        for x in memory.tensors():
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)


def read_requests(
    manifest: Manifest, leaf: int, target: ChunkRange, x: torch.Tensor, first_element: int
) -> Iterator[tuple[int, ReadRequest]]:
    """Find the parts of files that hold a range of a leaf. It begins at element `first_element` of the tensor `x`.

    Yields:
        The rank whose file holds the part, and the read.
    """
    size = x.element_size()
    for writer, piece_offset, numel in manifest.layout.writers(leaf, target):
        for run in runs(numel, target):
            start = manifest.data_start(writer) + piece_offset + run.source_offset * size
            yield writer, ReadRequest(start, run.numel * size, x, first_element + run.target_offset)


def read_pages(files: Files, manifest: Manifest, rank: int, requests: Sequence[ReadRequest]) -> None:
    """Read parts of a rank's file into tensors, a page at a time, and check each page's checksum.

    Raises:
        DamagedError: if the file is missing or truncated, or a checksum differs. The message names the file and leaves.
    """
    name, file, scratch = manifest.names[rank], manifest.files[rank], bytearray(PAGE_BYTES)
    batch = sorted(requests, key=lambda request: request.offset)
    while batch:
        batch, later_requests = _split_overlapping(batch)
        for page, parts in _reads_by_page(batch):
            start, stop = page * PAGE_BYTES, min(page * PAGE_BYTES + PAGE_BYTES, file.size)
            views, finish = _page_buffers(parts, start, stop, memoryview(scratch))
            files.read_into(name, start, views)
            if xxh3_checksum(views) != file.page_checksum(page):
                raise DamagedError(
                    f"{files.path!r}: {name} is damaged: bytes {start} to {stop} are not what was written"
                    + _leaf_names(manifest, rank, start, stop)
                )
            for finish_read in finish:
                finish_read()
        batch = later_requests


def _split_overlapping(requests: Sequence[ReadRequest]) -> tuple[list[ReadRequest], list[ReadRequest]]:
    """Split sorted reads into reads that do not overlap, and the rest. Untied leaves may read the same bytes."""
    batch = []
    later_requests = []
    end = 0
    for request in requests:
        (batch if request.offset >= end else later_requests).append(request)
        end = max(end, request.offset + request.nbytes) if request.offset >= end else end
    return batch, later_requests


def _reads_by_page(requests: Sequence[ReadRequest]) -> Iterator[tuple[int, list[ReadRequest]]]:
    """Split sorted reads at page boundaries, and yield the reads of each page."""
    parts: list[ReadRequest] = []
    page = -1
    for request in requests:
        offset, start = request.offset, request.start
        while offset < request.offset + request.nbytes:
            if offset // PAGE_BYTES != page:
                if parts:
                    yield page, parts
                page = offset // PAGE_BYTES
                parts = []
            n = min(request.offset + request.nbytes, (page + 1) * PAGE_BYTES) - offset
            parts.append(ReadRequest(offset, n, request.tensor, start))
            offset, start = offset + n, start + n // request.tensor.element_size()
    if parts:
        yield page, parts


def _page_buffers(
    parts: Sequence[ReadRequest], start: int, stop: int, scratch: memoryview
) -> tuple[list[memoryview], list[Callable[[], None]]]:
    """List the buffers for a page's bytes, and the copies to do afterwards. Bytes between reads go to `scratch`."""
    views = list[memoryview]()
    finish = list[Callable[[], None]]()
    page_start = start
    scratch_bytes = 0
    for request in [*parts, None]:
        gap = (stop if request is None else request.offset) - page_start
        if gap:
            views.append(scratch[scratch_bytes : scratch_bytes + gap])
            scratch_bytes += gap
        if request is None:
            break
        numel = request.nbytes // request.tensor.element_size()
        if is_direct(request.tensor):
            views.append(view_bytes(request.tensor.detach().view(-1)[request.start : request.start + numel]))
        else:
            data = torch.empty(numel, dtype=request.tensor.dtype, device="cpu")
            views.append(view_bytes(data))
            finish.append(lambda request=request, data=data: put_elements(request.tensor.detach(), request.start, data))
        page_start = request.offset + request.nbytes
    return views, finish


def _leaf_names(manifest: Manifest, rank: int, start: int, stop: int) -> str:
    """Name the first leaves that lie in a range of bytes of a file."""
    offset = manifest.data_start(rank)
    names = []
    for piece in manifest.layout.owned_pieces(rank):
        leaf = manifest.layout.leaves[piece.leaf]
        end = offset + piece.numel * leaf.dtype.itemsize
        if offset < stop and start < end:
            names.append(repr(leaf.path))
        offset = end
    if not names:
        return ""
    return f"; they hold {', '.join(names[:3])}{' and others' if names[3:] else ''}"
