"""Exporting: a checkpoint's full leaves as one file, of safetensors or of torch.save."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from fzero._arguments import check_path
from fzero._torch.types import StrPath
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_complete
from fzero.checkpoint._inspect import fill_leaf
from fzero.checkpoint._tensor_bytes import view_bytes
from fzero.checkpoint.layout import SAFETENSORS_NAMES, Leaf, Manifest, TreeLayout

__all__ = ["export"]


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
    names = _entries_below(prefix, manifest.layout.leaf_index)
    if not names:
        examples = ", ".join(sorted({repr(p.split(".")[0]) for p in manifest.layout.leaf_index})[:3])
        raise CheckpointError(f"{files.path!r} has no leaves below {prefix!r}: its first keys are {examples}")
    if as_torch or target.endswith(".safetensors"):
        _check_outside(files, target)
    if as_torch:
        values = _entries_below(prefix, manifest.layout.values)
        with _atomic_file(target) as f:
            _write_torch(f, files, manifest, names, values, dtype, progress)
        return target, sorted([*names, *values])
    if not target.endswith(".safetensors"):
        target = os.path.join(target, "model.safetensors")
    head = _header_bytes(files, manifest.layout, names, dtype)
    with _atomic_file(target) as f:
        f.write(head)
        _write_leaves(
            f, files, manifest, names=_file_order(manifest.layout, names, dtype), dtype=dtype, progress=progress
        )
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


def _entries_below(prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
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


def _stored_dtype(leaf: Leaf, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype


def _file_order(layout: TreeLayout, names: dict[str, int], dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """List names and leaf indices in file order: larger elements first, so that all are aligned."""
    return sorted(names.items(), key=lambda item: (-_stored_dtype(layout.leaves[item[1]], dtype).itemsize, item[0]))


def _header_bytes(files: Files, layout: TreeLayout, names: dict[str, int], dtype: torch.dtype | None) -> bytes:
    """Return the header of a safetensors file, with the metadata that `from_pretrained` requires.

    Raises:
        CheckpointError: if safetensors does not have a leaf's dtype.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, i in _file_order(layout, names, dtype):
        leaf, kind = layout.leaves[i], _stored_dtype(layout.leaves[i], dtype)
        if kind == torch.complex128:
            raise CheckpointError(
                f"{files.path!r}: leaf {leaf.path!r} is {leaf}, a dtype that safetensors does not have: use --torch"
            )
        end = offset + leaf.numel * kind.itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES[kind], "shape": list(leaf.shape), "data_offsets": [offset, end]}
        offset = end
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
        x = fill_leaf(files, manifest, i, torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))
        yield name, x.to(_stored_dtype(leaf, dtype))
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
