"""The manifest: the file that makes a folder a checkpoint. It holds the layout of the tree and the files' checksums.

The layout is a rule, one line per unit, so the manifest does not grow with the number of ranks.
"""

import json
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint.layout._bounded_json import check_containers
from fzero.checkpoint.layout._ranges import TreeLayout
from fzero.checkpoint.layout._safetensors import FORMAT, SAFETENSORS_NAMES, data_name, safetensors_header

__all__ = [
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "PAGE_BYTES",
    "VERSION",
    "File",
    "Manifest",
    "layout_text",
    "xxh3_checksum",
]


MANIFEST = "manifest.json"
PAGE_BYTES = 1 << 22  # bytes of a file that one checksum covers
VERSION = 2  # in version 1 all ranks hold all groups
MAX_MANIFEST_BYTES = 1 << 28  # the checksums of 64 TiB


class File(NamedTuple):
    """A file of a checkpoint.

    Attributes:
        size: its size in bytes.
        checksums: the XXH3 checksum of each of its pages, 16 hexadecimal digits each.
    """

    size: int
    checksums: str

    def page_checksum(self, page: int) -> str:
        """Return the checksum of a page."""
        return self.checksums[16 * page : 16 * page + 16]


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        nonce: 16 hexadecimal digits at the beginning of the files' names.
        layout: the layout of the tree on the ranks that wrote it.
        files: one file of each rank.
        timestamp: the time of the save, in seconds since 1970.
    """

    nonce: str
    layout: TreeLayout
    files: tuple[File, ...]
    timestamp: float

    @classmethod
    def of(cls, nonce: str, layout: TreeLayout, files: Sequence[File]) -> "Manifest":
        """Make the manifest of files that have just been written."""
        return cls(nonce, layout, tuple(files), time.time())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the files."""
        return tuple([data_name(self.nonce, r, self.layout.ranks) for r in range(self.layout.ranks)])

    @property
    def nbytes(self) -> int:
        """The bytes of all files together."""
        return sum(f.size for f in self.files)

    def data_start(self, rank: int) -> int:
        """Return where the data begins in a rank's file, in bytes.

        Raises:
            DamagedError: if the file's size does not match its leaves.
        """
        if rank not in self._data_starts:
            start = len(safetensors_header(self.layout, rank))
            if start + self.layout.starts(rank)[-1] != self.files[rank].size:
                raise DamagedError(f"{MANIFEST} is damaged: the size of {self.names[rank]} does not match its leaves")
            self._data_starts[rank] = start
        return self._data_starts[rank]

    @cached_property
    def _data_starts(self) -> dict[int, int]:
        """The results of `data_start` up to now, by rank: a header takes long to build."""
        return {}

    def encode(self) -> bytes:
        """Return the bytes of the manifest file: the JSON text and its checksum."""
        text = self.text()
        try:
            check_containers(text)
        except ValueError as error:
            raise CheckpointError(
                f"a load would refuse {MANIFEST}: {error}; save fewer leaves, and make lists of numbers tensors"
            ) from None
        data = b'{"crc32":"%08x","checkpoint":%s}\n' % (zlib.crc32(text), text)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{MANIFEST} would have {len(data):,} bytes, and a load reads at most {MAX_MANIFEST_BYTES:,}: "
                "make long values tensors"
            )
        return data

    def text(self) -> bytes:
        """Return the manifest as JSON."""
        body = {
            "format": FORMAT,
            "version": VERSION if any(g.coordinates for g in self.layout.groups) else 1,
            "written": self.timestamp,
            "nonce": self.nonce,
            **_layout_fields(self.layout),
            "block": PAGE_BYTES,
            "files": [list(f) for f in self.files],
        }
        return json.dumps(body, separators=(",", ":")).encode()


def layout_text(layout: TreeLayout) -> bytes:
    """Return the layout of a tree as JSON, which ranks compare."""
    return json.dumps(_layout_fields(layout), separators=(",", ":")).encode()


def _layout_fields(layout: TreeLayout) -> dict[str, Any]:
    """Return the part of a manifest that describes a tree."""
    groups = []
    for g in layout.groups:
        split = [[s.axis, s.size, list(s.dims)] for s in g.split]
        optional_fields = [split, [list(x) for x in g.coordinates], list(g.copies)]
        if not g.coordinates:
            optional_fields = optional_fields[: bool(split)]
        groups.append([list(g.leaves), list(g.axes), g.shard_numel, *optional_fields])
    leaves = [[x.path, SAFETENSORS_NAMES[x.dtype], list(x.shape), *([1] if x.per_rank else [])] for x in layout.leaves]
    return {
        "mesh": [list(axis) for axis in layout.mesh],
        "leaves": leaves,
        "groups": groups,
        "ties": layout.ties,
        "values": layout.values,
    }


def xxh3_checksum(views: Iterable[memoryview]) -> str:
    """Return the XXH3 checksum of bytes, as 16 hexadecimal digits. It runs at the speed of memory.

    It protects against accidents, not against forgery: https://github.com/Cyan4973/xxHash
    """
    total = xxhash.xxh3_64()
    for view in views:
        total.update(view)
    return total.hexdigest()
