"""Reading a checkpoint without a mesh: its leaves, its integrity, single leaves, differences, and exports."""

import contextlib
import difflib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch

from fzero._arguments import check_callable, check_path
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_complete
from fzero.checkpoint._load import ReadRequest, read_pages, read_requests
from fzero.checkpoint._tensor_bytes import view_bytes
from fzero.checkpoint.layout import NAMES, PAGE_BYTES, ChunkRange, Leaf, Manifest, TreeLayout, full_chunk

__all__ = ["differences", "export", "leaves", "read", "verify"]

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

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.save(folder, {"params": {"w": torch.ones(2)}, "step": 7}).wait()
        >>> fzero.checkpoint.read(folder, "params.w"), fzero.checkpoint.read(folder, "step")
        (tensor([1., 1.]), 7)
    """
    files = files_at(path, call="fzero.checkpoint.read(path, name)")
    manifest = read_complete(files)
    layout = manifest.layout
    for parent in _above(name):
        inside = name.removeprefix(parent).lstrip(".")
        value = _within(layout.values[parent], inside) if parent in layout.values else _ABSENT
        if value is not _ABSENT:
            return value
    if name not in layout.leaf_index:
        paths = [*layout.leaf_index, *layout.values]
        examples = ", ".join([repr(p) for p in (difflib.get_close_matches(name, paths) or paths)[:3]])
        raise CheckpointError(f"{files.path!r} has no leaf {name!r}: it has {len(paths)} leaves, such as {examples}")
    leaf = layout.leaves[layout.leaf_index[name]]
    return _fill_leaf(files, manifest, layout.leaf_index[name], torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))


def _above(path: str) -> Iterator[str]:
    """Yield a path and each path above it, up to the root."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _within(value: Any, path: str) -> Any:
    """Return the part of a JSON value at a path, or `_ABSENT`."""
    if not path:
        return value
    if not isinstance(value, dict):
        return _ABSENT
    keys = [key for key in value if path == key or path.startswith(f"{key}.")]
    return next((_within(value[key], path[len(key) + 1 :]) for key in keys), _ABSENT)


def _fill_leaf(files: Files, manifest: Manifest, index: int, x: torch.Tensor) -> torch.Tensor:
    """Read a full leaf into a contiguous tensor of its shape and dtype, and return the tensor."""
    by_file: dict[int, list[ReadRequest]] = {}
    if not x.numel():  # nothing is read, so only the files' sizes show whether the leaf has no elements
        for rank in range(manifest.layout.ranks):
            manifest.base(rank)
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
    for rank, at, size in _pages(manifest.layout, manifest):
        page = torch.empty(size, dtype=torch.uint8, device="cpu")
        read_pages(files, manifest, rank, [ReadRequest(at, size, page, 0)])
        nbytes += size
        progress(nbytes, manifest.nbytes)
    return nbytes


def _pages(layout: TreeLayout, manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """Yield each page of each rank's file: the rank, and the page's first byte and size."""
    for rank in range(layout.ranks):
        size = manifest.files[rank].size
        for at in range(0, size, PAGE_BYTES):
            yield rank, at, min(PAGE_BYTES, size - at)


# Differences between two checkpoints, whatever ranks and stages wrote them. One leaf of each is in memory at a time.


_AT_ONCE = 1 << 20  # elements compared at a time


class _Difference(NamedTuple):
    """A leaf or value that differs between two checkpoints.

    Attributes:
        path: its path.
        one: its description in the first checkpoint; empty if it is missing there.
        other: its description in the second checkpoint.
        count: elements whose bits differ; None if the two cannot be compared element by element.
        largest: the largest absolute difference of two elements; NaN if one of them is NaN.
    """

    path: str
    one: str
    other: str
    count: int | None = None
    largest: float | None = None


def differences(
    one: Any, other: Any, progress: Callable[[int, int], None] = lambda nbytes, total: None
) -> Iterator[_Difference]:
    """Yield the differences between two checkpoints, sorted by path.

    Args:
        one: the folder or URL of the first checkpoint.
        other: the folder or URL of the second checkpoint.
        progress: called after each leaf with the bytes compared so far and the bytes of all leaves.

    Raises:
        CheckpointError: if one of them is not a complete checkpoint, or one of its leaves is damaged.
    """
    files = files_at(one), files_at(other)
    manifests = read_complete(files[0]), read_complete(files[1])
    texts = _describe_entries(manifests[0].layout), _describe_entries(manifests[1].layout)
    results: dict[tuple[int, int], tuple[int, float]] = {}
    nbytes, total = 0, sum(x.nbytes for x in manifests[0].layout.leaves)
    for path in sorted({*texts[0], *texts[1]}):
        a, b = texts[0].get(path, ""), texts[1].get(path, "")
        indices = manifests[0].layout.leaf_index.get(path), manifests[1].layout.leaf_index.get(path)
        if a != b or indices[0] is None or indices[1] is None:
            if a != b:
                yield _Difference(path, a, b)
            continue
        pair = (indices[0], indices[1])
        if pair not in results:  # tied leaves are read once
            results[pair] = _compare(files, manifests, pair)
            nbytes += manifests[0].layout.leaves[pair[0]].nbytes
            progress(min(nbytes, total), total)
        count, largest = results[pair]
        if count:
            yield _Difference(path=path, one=a, other=b, count=count, largest=largest)


def _describe_entries(layout: TreeLayout) -> dict[str, str]:
    """Describe each leaf by its dtype and shape and each value in full, by path."""
    leaves = {
        path: f"{layout.leaves[i]}{' per rank' if layout.leaves[i].per_rank else ''}"
        for path, i in layout.leaf_index.items()
    }
    return {**leaves, **{path: f"the value {value!r}" for path, value in layout.values.items()}}


def _compare(
    files: tuple[Files, Files], manifests: tuple[Manifest, Manifest], indices: tuple[int, int]
) -> tuple[int, float]:
    """Return how many elements of two leaves differ in their bits, and the largest difference."""
    a, b = [_leaf(f, m, i) for f, m, i in zip(files, manifests, indices, strict=True)]
    count, largest = 0, 0.0
    for at in range(0, a.numel(), _AT_ONCE):
        x, y = a[at : at + _AT_ONCE], b[at : at + _AT_ONCE]
        bits = [z.view(torch.uint8).view(z.numel(), -1) for z in (x, y)]
        differ = bits[0].ne(bits[1]).any(1)
        if differ.any():
            count, largest = count + int(differ.sum()), max(largest, _largest(x[differ], y[differ]), key=_nan_last)
    return count, largest


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference of two elements. For integers it is exact up to the rounding to a float."""
    if not (x.is_floating_point() or x.is_complex()):
        return float(max(abs(a - b) for a, b in zip(x.tolist(), y.tolist(), strict=True)))
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float((x.to(wide) - y.to(wide)).abs().max())


def _leaf(files: Files, manifest: Manifest, index: int) -> torch.Tensor:
    leaf = manifest.layout.leaves[index]
    return _fill_leaf(files, manifest, index, torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")).view(-1)


def _nan_last(x: float) -> tuple[bool, float]:
    return x != x, x


# Exporting: a checkpoint's full leaves as one file, of safetensors or of torch.save.


_Progress = Callable[[int, int], None]


def export(
    path: StrPath,
    out: Any,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    as_torch: bool = False,
    progress: _Progress = lambda nbytes, total: None,
) -> tuple[str, list[str]]:
    """Write the full leaves of a checkpoint to one file; a tied leaf at each of its paths.

    A safetensors file is written leaf by leaf, with one leaf in memory at a time. A file of torch.save needs memory for
    all leaves, and also holds the values that are not tensors. An existing file is replaced at the end.

    Args:
        path: the folder or URL of the checkpoint.
        out: the file. Without `as_torch`, a name that does not end with `.safetensors` is a folder, and the file in it
            is `model.safetensors`.
        prefix: the path whose leaves are written, such as `"params"`. The names in the file leave it out.
        dtype: the dtype that floating point leaves are cast to; None to keep their dtypes.
        as_torch: whether to write a file for `torch.load`.
        progress: called after each leaf with the bytes written so far and the bytes of all leaves.

    Returns:
        The file, and the names of its leaves.

    Raises:
        CheckpointError: if the folder is not a complete checkpoint, has no leaf below the prefix, or a leaf is damaged.
            Also if the name of `out` is that of another kind of file.
    """
    files, target = files_at(path), check_path("out", out, "the path of a file")
    manifest = read_complete(files)
    _check_kind(target, as_torch)
    names = _below(prefix, manifest.layout.leaf_index)
    if not names:
        examples = ", ".join(sorted({repr(p.split(".")[0]) for p in manifest.layout.leaf_index})[:3])
        raise CheckpointError(f"{files.path!r} has no leaves below {prefix!r}: its first keys are {examples}")
    if as_torch or target.endswith(".safetensors"):
        _check_outside(files, target)
    if as_torch:
        values = _below(prefix, manifest.layout.values)
        with _atomic_file(target) as f:
            _write_torch(f, files, manifest, names, values, dtype, progress)
        return target, sorted([*names, *values])
    if not target.endswith(".safetensors"):
        target = os.path.join(target, "model.safetensors")
    head = _header(files, manifest.layout, names, dtype)
    with _atomic_file(target) as f:
        f.write(head)
        _write_leaves(f, files, manifest, names=_order(manifest.layout, names, dtype), dtype=dtype, progress=progress)
    return target, sorted(names)


def _check_kind(target: str, as_torch: bool) -> None:
    """Check that a file's name fits its kind.

    Raises:
        CheckpointError: if the name is that of another kind of file.
    """
    kind = os.path.splitext(target)[1]
    if not as_torch and kind in (".bin", ".pt", ".pth", ".ckpt", ".safetensor"):
        raise CheckpointError(
            f"{target!r} is neither a .safetensors file nor a folder: use --torch for a torch.save file"
        )
    if as_torch and kind == ".safetensors":
        raise CheckpointError(f"{target!r}: torch.save writes no safetensors; omit --torch, or name the file .pt")


def _check_outside(files: Files, target: str) -> None:
    """Check that a file lies outside the checkpoint's folder, where it could replace one of the checkpoint's files.

    Raises:
        CheckpointError: if the file lies in the folder.
    """
    if os.path.realpath(os.path.dirname(os.path.abspath(target))) == os.path.realpath(files.path):
        raise CheckpointError(f"{target!r} lies in the checkpoint's own folder: write it elsewhere")


def _below(prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries below a path, by their paths relative to it. A leaf at the path has its last key as name."""
    start = f"{prefix}." if prefix else ""
    below = {path[len(start) :]: x for path, x in entries.items() if path.startswith(start)}
    return below or ({prefix.rpartition(".")[2]: entries[prefix]} if prefix in entries else {})


@contextlib.contextmanager
def _atomic_file(target: str) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `target` once it is durable."""
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    part = f"{target}.{os.getpid()}.tmp"
    try:
        with open(part, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _dtype(leaf: Leaf, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype


def _order(layout: TreeLayout, names: dict[str, int], dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """List names and leaf indices in file order: larger elements first, so that all are aligned."""
    return sorted(names.items(), key=lambda item: (-_dtype(layout.leaves[item[1]], dtype).itemsize, item[0]))


def _header(files: Files, layout: TreeLayout, names: dict[str, int], dtype: torch.dtype | None) -> bytes:
    """Return the header of a safetensors file, with the metadata that `from_pretrained` requires.

    Raises:
        CheckpointError: if safetensors does not have a leaf's dtype.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, i in _order(layout, names, dtype):
        leaf, kind = layout.leaves[i], _dtype(layout.leaves[i], dtype)
        if kind == torch.complex128:
            raise CheckpointError(
                f"{files.path!r}: leaf {leaf.path!r} is {leaf}, a dtype that safetensors does not have: use --torch"
            )
        end = at + leaf.numel * kind.itemsize
        entries[name] = {"dtype": NAMES[kind], "shape": list(leaf.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_leaves(
    files: Files, manifest: Manifest, names: list[tuple[str, int]], dtype: torch.dtype | None, progress: _Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name with its leaf, read and cast to `dtype`."""
    leaves = [manifest.layout.leaves[i] for _, i in names]
    nbytes, total = 0, sum(x.nbytes for x in leaves)
    for (name, i), leaf in zip(names, leaves, strict=True):
        x = _fill_leaf(files, manifest, i, torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))
        yield name, x.to(_dtype(leaf, dtype))
        nbytes += leaf.nbytes
        progress(nbytes, total)


def _write_leaves(
    f: IO[bytes],
    files: Files,
    manifest: Manifest,
    names: list[tuple[str, int]],
    dtype: torch.dtype | None,
    progress: _Progress,
) -> None:
    for _, x in _read_leaves(files, manifest, names, dtype, progress):
        f.write(view_bytes(x))


def _write_torch(
    f: IO[bytes],
    files: Files,
    manifest: Manifest,
    names: dict[str, int],
    values: dict[str, Any],
    dtype: torch.dtype | None,
    progress: _Progress,
) -> None:
    """Write leaves and values by name with torch.save; tied leaves are one tensor."""
    first_names = {i: name for name, i in reversed(names.items())}
    tensors = dict(_read_leaves(files, manifest, [(name, i) for i, name in first_names.items()], dtype, progress))
    torch.save({**{name: tensors[first_names[i]] for name, i in names.items()}, **values}, f)
