"""What a folder of safetensors says that it holds. Nothing is believed: not a name, a length, an offset, or a shape."""

import json
import math
import zlib
from typing import Any, NamedTuple, TypeGuard

import torch

from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files
from fzero.checkpoint._manifest import DTYPES

__all__ = ["INDEX", "SINGLE", "Stored", "Tensors", "stored_in"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # as transformers calls them
_LONGEST = 100_000_000  # bytes of a header or an index; safetensors' own bound
_MOST = 1 << 48  # elements along a dimension, and bytes
_DIMS = 64  # torch's own bound


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: the name of the file.
        kind: its dtype, as safetensors calls it.
        shape: of it.
        at: where it begins in the file, in bytes.
    """

    file: str
    kind: str
    shape: tuple[int, ...]
    at: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its elements; None if torch has none that is read here, as of packed 4-bit numbers."""
        return None if self.kind == "C128" else DTYPES.get(self.kind)  # C128 is of fzero's own checkpoints

    def __str__(self) -> str:
        kind = self.kind if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}"


class Tensors(NamedTuple):
    """The tensors of a folder.

    Attributes:
        stored: each by its name.
        crc: a checksum of the headers, which ranks compare.
    """

    stored: dict[str, Stored]
    crc: int


def stored_in(files: Files) -> Tensors:
    """List the tensors of a folder: of `model.safetensors`, or of the files that its index names.

    Where both are there, the single file is meant, as it is to transformers.

    Raises:
        CheckpointError: if there is neither, or a file is missing, or what one says cannot be. Names the file.
    """
    if files.size(SINGLE) is not None:
        return Tensors(*_header(files, SINGLE))
    if files.size(INDEX) is None:
        raise CheckpointError(
            f"{files.path!r} has no file {SINGLE}, and no {INDEX}: expected a folder that save_pretrained wrote"
        )
    found: dict[str, Stored] = {}
    weights = _weight_map(files)
    headers, crc = dict[str, dict[str, Stored]](), 0
    for name in sorted(set(weights.values())):
        headers[name], one = _header(files, name)
        crc = zlib.crc32(one.to_bytes(4, "big"), crc)
    for tensor, name in weights.items():
        if tensor not in headers[name]:
            raise DamagedError(f"{files.path!r}: {INDEX} says that {name} holds {tensor!r}, which it does not")
        found[tensor] = headers[name][tensor]
    return Tensors(found, crc)


def _bytes(files: Files, name: str, at: int, numel: int) -> bytes:
    data = bytearray(numel)
    files.read_into(name, at, [memoryview(data)])
    return bytes(data)


def _parsed(files: Files, name: str, data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{files.path!r}: {name} is damaged: its JSON is none: {str(error)[:80]}") from None
    if not isinstance(body, dict):
        raise DamagedError(f"{files.path!r}: {name} is damaged: its JSON is no object")
    return body


def _weight_map(files: Files) -> dict[str, str]:
    """Read which file each tensor is in, and check that it is a file of this folder."""
    size = files.size(INDEX) or 0
    if size > _LONGEST:
        raise DamagedError(f"{files.path!r}: {INDEX} has {size:,} bytes, and no index is so large")
    weights = _parsed(files, INDEX, _bytes(files, INDEX, 0, size)).get("weight_map")
    if not isinstance(weights, dict):
        raise DamagedError(f"{files.path!r}: {INDEX} is damaged: it has no 'weight_map'")
    for tensor, name in weights.items():
        if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise DamagedError(
                f"{files.path!r}: {INDEX} says that {tensor!r} is in {str(name)[:80]!r}: expected a file of the folder"
            )
    return weights


def _header(files: Files, name: str) -> tuple[dict[str, Stored], int]:
    """Read a file's header: its tensors, and a checksum of it."""

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise DamagedError(f"{files.path!r}: {name} is damaged: {what}")

    size = files.size(name)
    if size is None:
        raise DamagedError(f"{files.path!r}: {name} is missing")
    check(size >= 8, f"it has {size} bytes")
    first = _bytes(files, name, 0, 8)
    numel = int.from_bytes(first, "little")
    check(numel <= min(size - 8, _LONGEST), f"it has {size:,} bytes, and its header would have {numel:,}")
    text = _bytes(files, name, 8, numel)
    entries = _parsed(files, name, text)
    entries.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in entries.items():
        stored, stop = _entry(name, 8 + numel, entry)
        check(stored is not None, f"its header says of {tensor!r}: {str(entry)[:80]}")
        assert stored is not None
        found[tensor] = stored
        spans.append((stored.at, stop, tensor))
    end = 8 + numel
    for start, stop, tensor in sorted(spans):  # one after the other, as safetensors has it: then no two share bytes
        check(start == end, f"{tensor!r} begins at byte {start:,}, and what is before it ends at {end:,}")
        end = stop
    check(end == size, f"it has {size:,} bytes, and its header tells of {end:,}")
    return found, zlib.crc32(text, zlib.crc32(first))


def _entry(name: str, base: int, entry: Any) -> tuple[Stored | None, int]:
    """Return what a header says of a tensor, and where that ends; None if it cannot be."""
    if not isinstance(entry, dict):
        return None, 0
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(kind) is not str or not _sizes(shape, _DIMS) or not _sizes(offsets, 2) or len(offsets) != 2:
        return None, 0
    start, stop = offsets
    stored = Stored(name, kind, tuple(shape), base + start)
    fits = start <= stop and (stored.dtype is None or math.prod(shape) * stored.dtype.itemsize == stop - start)
    return (stored, base + stop) if fits else (None, 0)


def _sizes(x: Any, most: int) -> TypeGuard[list[int]]:
    """Return whether a value is a list of sizes, and not of too many."""
    return type(x) is list and len(x) <= most and all(type(n) is int and 0 <= n < _MOST for n in x)
