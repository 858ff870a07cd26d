"""Looking into a checkpoint, without a mesh: what is in it, whether it is whole, and single leaves."""

import contextlib
import difflib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch

from fzero.checkpoint._blocks import BlockRange, bytes_of, full_block
from fzero.checkpoint._cut import Leaf, ShardedTree
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_whole
from fzero.checkpoint._load import ReadRequest, read_blocks, read_requests
from fzero.checkpoint._manifest import BLOCK, NAMES, Manifest

__all__ = ["Difference", "differences", "export", "fill_leaf", "leaves", "read", "verify"]

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
    tree = read_whole(files_at(path)).tree
    return {path: tree.leaves[i] for path, i in sorted(tree.number.items())}


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
    tree = manifest.tree
    for path in _above(name):
        inside = name.removeprefix(path).lstrip(".")
        value = _within(tree.values[path], inside) if path in tree.values else ABSENT
        if value is not ABSENT:
            return value
    if name not in tree.number:
        paths = [*tree.number, *tree.values]
        examples = ", ".join([repr(p) for p in (difflib.get_close_matches(name, paths) or paths)[:3]])
        raise CheckpointError(f"{files.path!r} has no leaf {name!r}; of its {len(paths)}, look at {examples}")
    leaf = tree.leaves[tree.number[name]]
    return fill_leaf(files, manifest, tree.number[name], torch.empty(leaf.shape, dtype=leaf.dtype))


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
    by_file: dict[int, list[ReadRequest]] = {}
    for writer, request in read_requests(manifest, number, BlockRange(full_block(tuple(x.shape)), 0, x.numel()), x, 0):
        by_file.setdefault(writer, []).append(request)
    for writer, requests in sorted(by_file.items()):
        read_blocks(files, manifest, writer, requests)
    return x


def verify(path: Any, progress: Callable[[int, int], None] = lambda nbytes, total: None) -> int:
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
    manifest, nbytes = read_whole(files), 0
    for rank, at, size in _blocks(manifest.tree, manifest):
        block = torch.empty(size, dtype=torch.uint8)
        read_blocks(files, manifest, rank, [ReadRequest(at, size, block, 0)])
        nbytes += size
        progress(nbytes, manifest.nbytes)
    return nbytes


def _blocks(tree: ShardedTree, manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """Yield a rank, and where a block of its file begins and how large it is, in bytes."""
    for rank in range(tree.ranks):
        size = manifest.files[rank].size
        for at in range(0, size, BLOCK):
            yield rank, at, min(BLOCK, size - at)


# What differs between two checkpoints, whatever ranks and stages wrote them: read one leaf of each at a time.


_AT_ONCE = 1 << 20  # elements that are compared at a time


class Difference(NamedTuple):
    """A leaf or value that differs.

    Attributes:
        path: of it.
        one: what it is in the first checkpoint; empty if it is not there.
        other: what it is in the second.
        count: elements whose bits differ; None if there is nothing to compare element by element.
        largest: absolute difference of two elements; NaN if one of them is.
    """

    path: str
    one: str
    other: str
    count: int | None = None
    largest: float | None = None


def differences(
    one: Any, other: Any, progress: Callable[[int, int], None] = lambda nbytes, total: None
) -> Iterator[Difference]:
    """Yield what differs between two checkpoints, in the order of paths.

    Args:
        one: the folder, or URL, of the first.
        other: that of the second.
        progress: called after each leaf with the bytes of it and of those before, and those of all.

    Raises:
        CheckpointError: if one of them is no whole checkpoint, or a leaf of it is damaged.
    """
    files = files_at(one), files_at(other)
    manifests = read_whole(files[0]), read_whole(files[1])
    texts = _texts(manifests[0].tree), _texts(manifests[1].tree)
    results: dict[tuple[int, int], tuple[int, float]] = {}
    nbytes, total = 0, sum(x.nbytes for x in manifests[0].tree.leaves)
    for path in sorted({*texts[0], *texts[1]}):
        a, b = texts[0].get(path, ""), texts[1].get(path, "")
        numbers = manifests[0].tree.number.get(path), manifests[1].tree.number.get(path)
        if a != b or numbers[0] is None or numbers[1] is None:
            if a != b:
                yield Difference(path, a, b)
            continue
        pair = (numbers[0], numbers[1])
        if pair not in results:  # tied leaves are read once
            results[pair] = _compare(files, manifests, pair)
            nbytes += manifests[0].tree.leaves[pair[0]].nbytes
            progress(min(nbytes, total), total)
        count, largest = results[pair]
        if count:
            yield Difference(path, a, b, count, largest)


def _texts(tree: ShardedTree) -> dict[str, str]:
    """Describe each leaf and value by its path; a value by all of it."""
    leaves = {
        path: f"{tree.leaves[i]}{' per rank' if tree.leaves[i].per_rank else ''}" for path, i in tree.number.items()
    }
    return {**leaves, **{path: f"the value {value!r}" for path, value in tree.values.items()}}


def _compare(
    files: tuple[Files, Files], manifests: tuple[Manifest, Manifest], numbers: tuple[int, int]
) -> tuple[int, float]:
    """Return how many elements of two leaves differ in their bits, and the largest difference of two."""
    a, b = [_leaf(f, m, i) for f, m, i in zip(files, manifests, numbers, strict=True)]
    count, largest = 0, 0.0
    for at in range(0, a.numel(), _AT_ONCE):
        x, y = a[at : at + _AT_ONCE], b[at : at + _AT_ONCE]
        bits = [z.view(torch.uint8).view(z.numel(), -1) for z in (x, y)]
        differ = bits[0].ne(bits[1]).any(1)
        if differ.any():
            count, largest = count + int(differ.sum()), max(largest, _largest(x[differ], y[differ]), key=_nan_last)
    return count, largest


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference of two elements; of integers it is exact as far as a float is."""
    if not (x.is_floating_point() or x.is_complex()):
        return float(max(abs(a - b) for a, b in zip(x.tolist(), y.tolist(), strict=True)))
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float((x.to(wide) - y.to(wide)).abs().max())


def _leaf(files: Files, manifest: Manifest, number: int) -> torch.Tensor:
    leaf = manifest.tree.leaves[number]
    return fill_leaf(files, manifest, number, torch.empty(leaf.shape, dtype=leaf.dtype)).view(-1)


def _nan_last(x: float) -> tuple[bool, float]:
    return x != x, x


# Exporting: a checkpoint's leaves, whole, as one file of safetensors, or of torch.save.


Progress = Callable[[int, int], None]


def export(
    path: Any,
    out: Any,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    as_torch: bool = False,
    progress: Progress = lambda nbytes, total: None,
) -> tuple[str, list[str]]:
    """Write a checkpoint's leaves, whole, to one file; tied ones at each of their places.

    A safetensors file is written leaf by leaf, so that one leaf is in memory. One of torch.save needs memory for all,
    and holds the values that are no tensors, too. A file that was there is replaced at the end.

    Args:
        path: the folder, or URL, of the checkpoint.
        out: the file; without `as_torch`, what does not end with `.safetensors` is a folder for `model.safetensors`.
        prefix: of the paths to write, such as `"params"`; it is not part of the names.
        dtype: what floating point leaves are cast to; None to leave them.
        as_torch: whether to write what `torch.load` reads.
        progress: called after each leaf with the bytes that were written, and those of all.

    Returns:
        The file, and the names of its leaves.

    Raises:
        CheckpointError: if the folder is no whole checkpoint, has nothing of this prefix, or a leaf is damaged. Also
            if `out` is named as a file of another kind.
    """
    files, target = files_at(path), os.fspath(out)
    manifest = read_whole(files)
    _check_kind(target, as_torch)
    names = _below(prefix, manifest.tree.number)
    if not names:
        examples = ", ".join(sorted({repr(p.split(".")[0]) for p in manifest.tree.number})[:3])
        raise CheckpointError(f"{files.path!r} has no leaves below {prefix!r}; its first keys are {examples}")
    if as_torch or target.endswith(".safetensors"):
        _check_apart(files, target)
    if as_torch:
        values = _below(prefix, manifest.tree.values)
        with _atomic_file(target) as f:
            _write_torch(f, files, manifest, names, values, dtype, progress)
        return target, sorted([*names, *values])
    if not target.endswith(".safetensors"):
        target = os.path.join(target, "model.safetensors")
    head = _header(files, manifest.tree, names, dtype)
    with _atomic_file(target) as f:
        f.write(head)
        _write_leaves(f, files, manifest, _order(manifest.tree, names, dtype), dtype, progress)
    return target, sorted(names)


def _check_kind(target: str, as_torch: bool) -> None:
    """Check that a file is of the kind that is asked for.

    Raises:
        CheckpointError: if its name says that it is of another.
    """
    kind = os.path.splitext(target)[1]
    if not as_torch and kind in (".bin", ".pt", ".pth", ".ckpt", ".safetensor"):
        raise CheckpointError(f"{target!r} is no .safetensors file, and no folder: use --torch for a file of torch")
    if as_torch and kind == ".safetensors":
        raise CheckpointError(f"{target!r}: torch.save writes no safetensors; leave out --torch, or name it .pt")


def _check_apart(files: Files, target: str) -> None:
    """Check that a file is none of the checkpoint's folder, whose own it could replace.

    Raises:
        CheckpointError: if it is.
    """
    if os.path.realpath(os.path.dirname(os.path.abspath(target))) == os.path.realpath(files.path):
        raise CheckpointError(f"{target!r} lies in the checkpoint's own folder: write it elsewhere")


def _below(prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return what lies below a path, by its path from there; a leaf by its own name."""
    start = f"{prefix}." if prefix else ""
    below = {path[len(start) :]: x for path, x in entries.items() if path.startswith(start)}
    return below or ({prefix.rpartition(".")[2]: entries[prefix]} if prefix in entries else {})


@contextlib.contextmanager
def _atomic_file(target: str) -> Iterator[IO[bytes]]:
    """Open a new file, which takes a file's place when all of it is on the disk."""
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


def _order(tree: ShardedTree, names: dict[str, int], dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """List names and leaves as a file has them: the larger elements first, so that all are aligned."""
    return sorted(names.items(), key=lambda item: (-_dtype(tree.leaves[item[1]], dtype).itemsize, item[0]))


def _header(files: Files, tree: ShardedTree, names: dict[str, int], dtype: torch.dtype | None) -> bytes:
    """Make the header of a safetensors file; its metadata is what `from_pretrained` asks for.

    Raises:
        CheckpointError: if safetensors has no such dtype.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, i in _order(tree, names, dtype):
        leaf, kind = tree.leaves[i], _dtype(tree.leaves[i], dtype)
        if kind == torch.complex128:
            raise CheckpointError(
                f"{files.path!r}: leaf {leaf.path!r} is {leaf}, which safetensors has not: use --torch"
            )
        end = at + leaf.numel * kind.itemsize
        entries[name] = {"dtype": NAMES[kind], "shape": list(leaf.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return len(text).to_bytes(8, "little") + text


def _leaves(
    files: Files, manifest: Manifest, names: list[tuple[str, int]], dtype: torch.dtype | None, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name with its leaf, read and cast."""
    leaves = [manifest.tree.leaves[i] for _, i in names]
    nbytes, total = 0, sum(x.nbytes for x in leaves)
    for (name, i), leaf in zip(names, leaves, strict=True):
        x = fill_leaf(files, manifest, i, torch.empty(leaf.shape, dtype=leaf.dtype))
        yield name, x.to(_dtype(leaf, dtype))
        nbytes += leaf.nbytes
        progress(nbytes, total)


def _write_leaves(
    f: IO[bytes],
    files: Files,
    manifest: Manifest,
    names: list[tuple[str, int]],
    dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    for _, x in _leaves(files, manifest, names, dtype, progress):
        f.write(bytes_of(x))


def _write_torch(
    f: IO[bytes],
    files: Files,
    manifest: Manifest,
    names: dict[str, int],
    values: dict[str, Any],
    dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    """Write names, leaves and values as torch.save does; tied leaves are one tensor."""
    first_names = {i: name for name, i in reversed(names.items())}
    tensors = dict(_leaves(files, manifest, [(name, i) for i, name in first_names.items()], dtype, progress))
    torch.save({**{name: tensors[first_names[i]] for name, i in names.items()}, **values}, f)
