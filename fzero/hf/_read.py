"""Reading: each rank reads its own ranges of the files of Hugging Face, straight into its shards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import all_or_none, check_same
from fzero.checkpoint._blocks import BlockRange, runs, whole
from fzero.checkpoint._bytes import bytes_of, is_direct
from fzero.checkpoint._empty import made_of
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._holdings import Holdings, holdings
from fzero.hf._names import Named, named_leaves
from fzero.hf._stored import Stored, Tensors, stored_in
from fzero.layout.elements import elements, put_elements
from fzero.ranks.agreement import numbers_of_all
from fzero.ranks.mesh import Mesh

__all__ = ["read"]

CHUNK = 1 << 22  # bytes, of what is cast or compared


@api_boundary
def read(
    folder: Any,
    like: Any,
    mesh: Mesh | None = None,
    *,
    name: Callable[[str], str] = lambda path: path,
    partial: bool = False,
) -> Any:
    """Read a folder of safetensors, as `save_pretrained` writes it, into a tree in any layout. All ranks call it.

    Each rank reads its own ranges of the files, into the memory of `like`. Beside it a read takes 4 MiB.

    Args:
        folder: a folder with `model.safetensors`, or with several files and `model.safetensors.index.json`.
        like: the tree, in the layout that the result is to have, such as `step.init` gives parameters. Its tensors are
            overwritten, and become the result's. Of tensors on the meta device memory is made. Floating leaves may
            have another dtype than in the files.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        name: what a leaf is called in the folder, from its path. Two leaves of one name both get its values.
        partial: whether the folder may have tensors that `like` has not.

    Returns:
        The tree.

    Raises:
        CheckpointError: on all ranks, if the folder has not these leaves, in these shapes, or is damaged. Names the
            first three leaves, or the file. Also if a leaf that is tied in `like` has two values in the folder.
        TypeError: if a leaf is no tensor, or differs by rank. `None` is no leaf.
        ValueError: if two leaves have one path, or a box was cut for another mesh. Names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=3)
        >>> fzero.hf.write(folder, {"w": torch.arange(4.0)})
        >>> cut = mesh.spmd(fzero.partition)({"w": torch.empty(4)})
        >>> fzero.hf.read(folder, like=cut, mesh=mesh)["w"].data
        tensor([[0., 1.],
                [2., 3.],
                [0., 0.]])
    """
    files = files_at(folder)
    prepared: list[tuple[Tensors, Any, Holdings, list[Named]]] = []

    def prepare() -> None:
        found = stored_in(files)
        made = made_of(like, mesh)
        mine = holdings("like", made, mesh)
        leaves = named_leaves("like", mine, name)
        _check_alike(files, found.stored, leaves, partial)
        prepared.append((found, made, mine, leaves))

    what = f"reading {files.path!r}"
    all_or_none(what, prepare, mesh)
    found, made, mine, leaves = prepared[0]
    crcs = numbers_of_all(torch.tensor([found.crc]), mesh) if mesh is not None and mesh.distributed else []
    if any(crc != [found.crc] for crc in crcs):
        raise CheckpointError(f"{files.path!r}: the ranks see different files: is it one file system?")
    check_same(what, repr([(str(leaf), names) for _, leaf, _, names in leaves]).encode(), mesh)
    all_or_none(what, lambda: _fill(files, found.stored, mine, leaves), mesh)
    return made


def _check_alike(files: Files, stored: dict[str, Stored], leaves: Sequence[Named], partial: bool) -> None:
    """Check that a folder has the leaves of a tree, with their shapes.

    Raises:
        CheckpointError: if not. Names the first three leaves.
    """
    found, used = list[str](), set[str]()
    for _, leaf, paths, names in leaves:
        used.update(names)
        if not any(name in stored for name in names):
            as_name = "" if names[0] == paths[0] else f" for leaf {paths[0]!r}"
            found.append(f"it has no tensor {names[0]!r}{as_name} ({leaf})")
        for path, name in zip(paths, names, strict=True):
            if name in stored and (stored[name].shape != leaf.shape or not _casts(stored[name].dtype, leaf.dtype)):
                found.append(f"tensor {name!r} is {stored[name]} there, and leaf {path!r} is {leaf}")
    surplus = [] if partial else [name for name in stored if name not in used]
    found += [f"the tree has no leaf for its tensor {name!r} ({stored[name]})" for name in surplus]
    if found:
        more = f"; and {len(found) - 3} more" if found[3:] else ""
        hint = "; give partial=True to leave tensors out" if len(surplus) == len(found) else ""
        raise CheckpointError(f"{files.path!r} is of another tree: " + "; ".join(found[:3]) + more + hint)


def _casts(there: torch.dtype | None, here: torch.dtype) -> bool:
    """Return whether a dtype is read into another: one floating dtype into any, each other one into itself."""
    return there is not None and (there == here or (there.is_floating_point and here.is_floating_point))


class _FileRange(NamedTuple):
    """Elements of a leaf that follow one another in memory, and in a file.

    Attributes:
        to: the tensor that they lie in.
        start: where they begin there, in elements.
        first: where they begin in the leaf, in elements.
        numel: how many.
    """

    to: torch.Tensor
    start: int
    first: int
    numel: int


def _parts(mine: Holdings) -> Iterator[tuple[int, _FileRange]]:
    """List what this process holds: the number of a leaf, and elements of it. What ranks share is there once."""
    seen: set[tuple[int, int, int]] = set()
    for rank in mine.ranks:
        for piece, x, start in mine.held(rank):
            key = (piece.leaf, x.data_ptr(), start)
            if key in seen:  # a simulation holds once what is replicated
                continue
            seen.add(key)
            leaf = mine.cut.leaves[piece.leaf]
            for run in runs(BlockRange(whole(leaf.shape), 0, leaf.numel), piece.range):
                yield piece.leaf, _FileRange(x.detach(), start + run.to, run.at, run.numel)


def _fill(files: Files, stored: dict[str, Stored], mine: Holdings, leaves: Sequence[Named]) -> None:
    """Read all that this process holds."""
    places = {leaf.number: [name for name in dict.fromkeys(leaf.names) if name in stored] for leaf in leaves}
    try:
        for number, part in _parts(mine):
            name, *others = places[number]
            _read_part(files, stored[name], part)
            for other in others:
                if not _is_read(files, stored[other], part):
                    raise CheckpointError(
                        f"{files.path!r} has different values for {name!r} and {other!r}, which are one tensor in the "
                        "tree: take a model in which they are not tied"
                    )
    finally:
        for memory in mine.memory:
            for x in memory.tensors():
                if not x.is_inference():
                    torch.autograd.graph.increment_version(x)


def _read_part(files: Files, source: Stored, part: _FileRange) -> None:
    """Read elements straight into memory; those of another dtype, or for a device, through a small buffer."""
    if source.dtype == part.to.dtype and is_direct(part.to):
        view = bytes_of(part.to.view(-1)[part.start : part.start + part.numel])
        files.read_into(source.file, source.at + part.first * part.to.element_size(), [view])
        return
    for at, values in _buffers(files, source, part):
        put_elements(part.to, part.start + at, values)


def _is_read(files: Files, source: Stored, part: _FileRange) -> bool:
    """Return whether memory holds what a file has for it."""
    for at, values in _buffers(files, source, part):
        here = elements(part.to, part.start + at, part.start + at + values.numel()).cpu().resolve_conj().contiguous()
        if bytes_of(here) != bytes_of(values.to(here.dtype)):
            return False
    return True


def _buffers(files: Files, source: Stored, part: _FileRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Read elements into one small buffer, again and again; yield how many there were before, and the buffer."""
    assert source.dtype is not None
    size = source.dtype.itemsize
    step = max(CHUNK // max(size, part.to.element_size()), 1)
    buffer = torch.empty(min(step, part.numel), dtype=source.dtype)
    for at in range(0, part.numel, step):
        values = buffer[: min(step, part.numel - at)]
        files.read_into(source.file, source.at + (part.first + at) * size, [bytes_of(values)])
        yield at, values
