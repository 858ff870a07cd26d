"""Exporting: a checkpoint's leaves, whole, as one file of safetensors, or of torch.save."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from fzero.checkpoint._bytes import bytes_of
from fzero.checkpoint._cut import Leaf, ShardedTree
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_whole
from fzero.checkpoint._look import fill_leaf
from fzero.checkpoint._manifest import NAMES, Manifest

__all__ = ["export"]

Progress = Callable[[int, int], None]


def export(
    path: Any,
    out: Any,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    as_torch: bool = False,
    progress: Progress = lambda done, total: None,
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
    names = _below(prefix, manifest.cut.number)
    if not names:
        some = ", ".join(sorted({repr(p.split(".")[0]) for p in manifest.cut.number})[:3])
        raise CheckpointError(f"{files.path!r} has no leaves below {prefix!r}; its first keys are {some}")
    if as_torch or target.endswith(".safetensors"):
        _check_apart(files, target)
    if as_torch:
        values = _below(prefix, manifest.cut.values)
        with _replaced(target) as f:
            _write_torch(f, files, manifest, names, values, dtype, progress)
        return target, sorted([*names, *values])
    if not target.endswith(".safetensors"):
        target = os.path.join(target, "model.safetensors")
    head = _header(files, manifest.cut, names, dtype)
    with _replaced(target) as f:
        f.write(head)
        _write_leaves(f, files, manifest, _order(manifest.cut, names, dtype), dtype, progress)
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


def _below(prefix: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what lies below a path, by its path from there; a leaf by its own name."""
    start = f"{prefix}." if prefix else ""
    below = {path[len(start) :]: x for path, x in found.items() if path.startswith(start)}
    return below or ({prefix.rpartition(".")[2]: found[prefix]} if prefix in found else {})


@contextlib.contextmanager
def _replaced(target: str) -> Iterator[IO[bytes]]:
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


def _order(cut: ShardedTree, names: dict[str, int], dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """List names and leaves as a file has them: the larger elements first, so that all are aligned."""
    return sorted(names.items(), key=lambda item: (-_dtype(cut.leaves[item[1]], dtype).itemsize, item[0]))


def _header(files: Files, cut: ShardedTree, names: dict[str, int], dtype: torch.dtype | None) -> bytes:
    """Make the header of a safetensors file; its metadata is what `from_pretrained` asks for.

    Raises:
        CheckpointError: if safetensors has no such dtype.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, i in _order(cut, names, dtype):
        leaf, kind = cut.leaves[i], _dtype(cut.leaves[i], dtype)
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
    leaves = [manifest.cut.leaves[i] for _, i in names]
    done, total = 0, sum(x.nbytes for x in leaves)
    for (name, i), leaf in zip(names, leaves, strict=True):
        x = fill_leaf(files, manifest, i, torch.empty(leaf.shape, dtype=leaf.dtype))
        yield name, x.to(_dtype(leaf, dtype))
        done += leaf.nbytes
        progress(done, total)


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
    own = {i: name for name, i in reversed(names.items())}
    read = dict(_leaves(files, manifest, [(name, i) for i, name in own.items()], dtype, progress))
    torch.save({**{name: read[own[i]] for name, i in names.items()}, **values}, f)
