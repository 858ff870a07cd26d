"""The content of a folder of safetensors. Nothing in it is trusted: no name, length, offset or shape."""

import math
import zlib
from typing import Any, NamedTuple, TypeGuard

import torch

from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files
from fzero.checkpoint.layout import DTYPES_BY_NAME, parse_json

__all__ = ["INDEX", "SINGLE", "FolderTensors", "StoredTensor", "tensors_in"]


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names
_MAX_HEADER_BYTES = 100_000_000  # of a header or an index; safetensors' own limit
_MAX_NUMBER = 1 << 48  # an upper bound of sizes and offsets
_MAX_DIMS = 64  # torch's own limit


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
        return None if self.kind == "C128" else DTYPES_BY_NAME.get(self.kind)  # only fzero's own checkpoints have C128

    def __str__(self) -> str:
        kind = self.kind if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}"


class FolderTensors(NamedTuple):
    """The tensors of a folder.

    Attributes:
        stored: each tensor, by name.
        crc: a checksum of the headers, which the ranks compare.
    """

    stored: dict[str, StoredTensor]
    crc: int


def tensors_in(files: Files) -> FolderTensors:
    """List the tensors of a folder: of `model.safetensors`, or of the files that its index names.

    If the folder has both, the single file counts, as in transformers.

    Raises:
        CheckpointError: if the folder has neither, or a file is missing or damaged. The message names the file.
    """
    if files.size(SINGLE) is not None:
        return FolderTensors(*_read_header(files, SINGLE))
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
    return FolderTensors(tensors, crc)


def _read_bytes(files: Files, name: str, offset: int, numel: int) -> bytes:
    data = bytearray(numel)
    files.read_into(name, offset, [memoryview(data)])
    return bytes(data)


def _parse_header(files: Files, name: str, data: bytes) -> dict[str, Any]:
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
    if size > _MAX_HEADER_BYTES:
        raise DamagedError(f"{files.path!r}: {INDEX} has {size:,} bytes: expected at most {_MAX_HEADER_BYTES:,}")
    weights = _parse_header(files, INDEX, _read_bytes(files, INDEX, 0, size)).get("weight_map")
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

    def check(condition: bool, reason: str) -> None:
        if not condition:
            raise DamagedError(f"{files.path!r}: {name} is damaged: {reason}")

    size = files.size(name)
    if size is None:
        raise DamagedError(f"{files.path!r}: {name} is missing")
    check(size >= 8, f"it has {size} bytes")
    size_bytes = _read_bytes(files, name, 0, 8)
    numel = int.from_bytes(size_bytes, "little")
    check(numel <= min(size - 8, _MAX_HEADER_BYTES), f"it has {size:,} bytes, but its header claims to have {numel:,}")
    text = _read_bytes(files, name, 8, numel)
    entries = _parse_header(files, name, text)
    entries.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in entries.items():
        entry_tensor, stop = _read_entry(name, 8 + numel, entry)
        check(entry_tensor is not None, f"its header says of {tensor!r}: {str(entry)[:80]}")
        assert entry_tensor is not None
        tensors[tensor] = entry_tensor
        spans.append((entry_tensor.offset, stop, tensor))
    end = 8 + numel
    for start, stop, tensor in sorted(spans):  # safetensors has no gaps and no overlaps, so no two share bytes
        check(start == end, f"{tensor!r} begins at byte {start:,}, but the tensor before it ends at {end:,}")
        end = stop
    check(end == size, f"it has {size:,} bytes, but its header describes {end:,}")
    return tensors, zlib.crc32(text, zlib.crc32(size_bytes))


def _read_entry(name: str, base: int, entry: Any) -> tuple[StoredTensor | None, int]:
    """Return the tensor that a header entry describes, and where it ends; None if the entry is invalid."""
    if not isinstance(entry, dict):
        return None, 0
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(kind) is not str or not _is_sizes(shape, _MAX_DIMS) or not _is_sizes(offsets, 2) or len(offsets) != 2:
        return None, 0
    start, stop = offsets
    tensor = StoredTensor(name, kind, tuple(shape), base + start)
    fits_range = start <= stop and (tensor.dtype is None or math.prod(shape) * tensor.dtype.itemsize == stop - start)
    return (tensor, base + stop) if fits_range else (None, 0)


def _is_sizes(x: Any, limit: int) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most `limit` sizes."""
    return type(x) is list and len(x) <= limit and all(type(n) is int and 0 <= n < _MAX_NUMBER for n in x)
