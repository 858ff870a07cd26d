"""The manifest: the file that makes a folder a checkpoint. It holds the layout of the tree and the files' checksums.

The layout is a rule, one line per unit, so the manifest does not grow with the number of ranks. A manifest is not
trusted: a name that leads out of the folder, an impossible size, or unexpected JSON is an error.
"""

import functools
import json
import re
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import xxhash

from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files
from fzero.checkpoint.layout._bounded_json import check_containers, parse_json
from fzero.checkpoint.layout._ranges import ALIGNMENT, Leaf, LeafGroup, TreeLayout
from fzero.sharding import Split

__all__ = [
    "DTYPES",
    "MANIFEST",
    "NAMES",
    "PAGE_BYTES",
    "File",
    "Manifest",
    "data_name",
    "header",
    "layout_text",
    "parse",
    "read_manifest",
    "xxh3_checksum",
]


MANIFEST = "manifest.json"
PAGE_BYTES = 1 << 22  # bytes of a file that one checksum covers
_FORMAT, _VERSION = "fzero checkpoint", 2  # in version 1 all ranks hold all groups
_MAX_NUMBER = 1 << 48  # an upper bound of every number in a manifest: elements, bytes, ranks
_MAX_DIMS = 64  # torch's own limit
_MAX_MANIFEST_BYTES = 1 << 28  # the checksums of 64 TiB

NAMES = {  # safetensors' names
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",  # safetensors has no such dtype: files hold pairs of F64
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class File(NamedTuple):
    """A file of a checkpoint.

    Attributes:
        size: its size in bytes.
        sums: the XXH3 checksum of each of its pages, 16 hexadecimal digits each.
    """

    size: int
    sums: str

    def sum(self, page: int) -> str:
        """Return the checksum of a page."""
        return self.sums[16 * page : 16 * page + 16]


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

    @cached_property
    def base(self) -> Callable[[int], int]:
        """A function of a rank: where the data begins in its file, in bytes.

        It raises a DamagedError if the file's size does not match its leaves.
        """
        return functools.cache(self._data_start)

    def _data_start(self, rank: int) -> int:
        base = len(header(self.layout, rank))
        if base + self.layout.starts(rank)[-1] != self.files[rank].size:
            raise DamagedError(f"{MANIFEST} is damaged: the size of {self.names[rank]} does not match its leaves")
        return base

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
        if len(data) > _MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{MANIFEST} would have {len(data):,} bytes, and a load reads at most {_MAX_MANIFEST_BYTES:,}: "
                "make long values tensors"
            )
        return data

    def text(self) -> bytes:
        """Return the manifest as JSON."""
        body = {
            "format": _FORMAT,
            "version": _VERSION if any(g.coordinates for g in self.layout.groups) else 1,
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
        rest = [split, [list(x) for x in g.coordinates], list(g.copies)]
        groups.append([list(g.leaves), list(g.axes), g.shard_numel, *(rest if g.coordinates else rest[: bool(split)])])
    return {
        "mesh": [list(axis) for axis in layout.mesh],
        "leaves": [[x.path, NAMES[x.dtype], list(x.shape), *([1] if x.per_rank else [])] for x in layout.leaves],
        "groups": groups,
        "ties": layout.ties,
        "values": layout.values,
    }


_FRAME = re.compile(rb'\{"crc32":"([0-9a-f]{8})","checkpoint":(.*)\}\n', re.DOTALL)


def xxh3_checksum(views: Iterable[memoryview]) -> str:
    """Return the XXH3 checksum of bytes, as 16 hexadecimal digits. It runs at the speed of memory.

    It protects against accidents, not against forgery: https://github.com/Cyan4973/xxHash
    """
    total = xxhash.xxh3_64()
    for view in views:
        total.update(view)
    return total.hexdigest()


def data_name(nonce: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"{nonce}-{rank:05d}-of-{ranks:05d}.safetensors"


def header(layout: TreeLayout, rank: int) -> bytes:
    """Return the header of a rank's file, in safetensors' format, so that any safetensors reader reads the ranges."""
    entries: dict[str, Any] = {"__metadata__": {"format": _FORMAT}}
    offset = 0
    for piece in layout.owned_pieces(rank):
        leaf = layout.leaves[piece.leaf]
        end = offset + piece.numel * leaf.dtype.itemsize
        pairs = leaf.dtype == torch.complex128
        name, numel = ("F64", 2 * piece.numel) if pairs else (NAMES[leaf.dtype], piece.numel)
        entries[leaf.path] = {"dtype": name, "shape": [numel], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_manifest(files: Files) -> tuple[Manifest, int]:
    """Read the manifest of a folder; return it and the checksum of its file.

    Raises:
        CheckpointError: if there is no manifest, or it has a later version.
        DamagedError: if the manifest is damaged.
    """
    try:
        size = files.size(MANIFEST) or 0
        if size > _MAX_MANIFEST_BYTES:
            raise DamagedError(
                f"{files.path!r}: {MANIFEST} has {size:,} bytes: expected at most {_MAX_MANIFEST_BYTES:,}"
            )
        data = files.get(MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(
            f"{files.path!r} is not a checkpoint: it has no file {MANIFEST}; give the folder that fzero.save wrote, "
            "such as runs/step-00000004; a file of torch.save is torch.load's"
        ) from None
    try:
        return parse(data), zlib.crc32(data)
    except _FormatError as error:
        raise DamagedError(f"{files.path!r}: {MANIFEST} is damaged: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{files.path!r}: {error}") from None


class _FormatError(CheckpointError):
    """A manifest is malformed."""


def parse(data: bytes) -> Manifest:
    """Parse the bytes of a manifest.

    Raises:
        CheckpointError: if the manifest has a later version.
        FormatError: if the manifest is damaged.
    """
    frame = _FRAME.fullmatch(data)
    if not frame or int(frame[1], 16) != zlib.crc32(frame[2]):
        raise _FormatError("its checksum differs")
    try:
        body = parse_json(frame[2])
    except ValueError as error:
        raise _FormatError(str(error)) from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise _FormatError(f"its format is not {_FORMAT!r}")
    if body.get("version") not in range(1, _VERSION + 1) or body.get("block") != PAGE_BYTES:
        raise CheckpointError(
            f"it has version {body.get('version')!r}: this fzero reads versions up to {_VERSION}; install a newer one"
        )
    try:
        return _parse_manifest(body)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _FormatError(f"{type(error).__name__}: {error}") from None


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _FormatError(reason)


def _check_size(x: Any) -> int:
    _require(type(x) is int and 0 <= x < _MAX_NUMBER, f"{str(x)[:40]!r} is not a size")
    return x


def _parse_text(x: Any) -> str:
    _require(type(x) is str, f"{str(x)[:40]!r} is not a string")
    return x


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    """Build a manifest of JSON, and check all that a load relies on: anybody may have written the file."""
    nonce = _parse_text(body["nonce"])
    _require(bool(re.fullmatch("[0-9a-f]{16}", nonce)), f"{nonce[:40]!r} is not a nonce")
    mesh = tuple([(_parse_text(name), _check_size(size)) for name, size in body["mesh"]])
    _require(len(dict(mesh)) == len(mesh) and all(size for _, size in mesh), "its mesh is invalid")
    leaves = tuple([_parse_leaf(*x) for x in body["leaves"]])
    ties = {_parse_text(path): _parse_text(first) for path, first in body["ties"].items()}
    values = {_parse_text(path): value for path, value in body["values"].items()}
    paths = [x.path for x in leaves]
    _require(len({*paths, *ties, *values}) == len(paths) + len(ties) + len(values), "two leaves have one path")
    _require(set(ties.values()) <= set(paths), "a leaf is tied to a leaf that does not exist")
    layout = TreeLayout(
        mesh=mesh,
        leaves=leaves,
        groups=tuple([_make_group(dict(mesh), leaves, *g) for g in body["groups"]]),
        ties=ties,
        values=values,
    )
    indices = [i for g in layout.groups for index, i in enumerate(g.leaves) if index not in g.copies]
    _require(sorted(indices) == [*range(len(leaves))], "a leaf is in no group, or in several")
    files = tuple([File(_check_size(size), _parse_text(sums)) for size, sums in body["files"]])
    _require(len(files) == layout.ranks, f"it has {len(files)} files for {layout.ranks} ranks")
    for r, f in enumerate(files):
        _require(bool(re.fullmatch("[0-9a-f]*", f.sums)), f"file {r} has no checksums")
        _require(len(f.sums) == 16 * -(-f.size // PAGE_BYTES), f"file {r} has {len(f.sums) // 16} checksums")
    # so that no leaf is larger than the files on disk; each file's size is checked when it is read
    _require(sum(x.nbytes for x in leaves) <= sum(f.size for f in files), "its files are too small for its leaves")
    date = body["written"]
    _require(type(date) in (int, float) and 0 <= date < 1e12, "it has no date")
    return Manifest(nonce, layout, files, float(date))


def _parse_leaf(path: Any, dtype: Any, shape: Any, per_rank: Any = 0) -> Leaf:
    _require(_parse_text(dtype) in DTYPES, f"{dtype[:40]!r} is not a dtype")
    _require(len(shape) <= _MAX_DIMS, f"a leaf has {len(shape)} dimensions")
    leaf = Leaf(_parse_text(path), tuple(map(_check_size, shape)), DTYPES[dtype], bool(per_rank))
    _check_size(leaf.nbytes)
    return leaf


def _make_group(
    mesh: dict[str, int], leaves: Sequence[Leaf], members: Any, axes: Any, shard: Any, *more: Any
) -> LeafGroup:
    """Build a group of its JSON entry, and check that it fits the mesh and its leaves."""
    split, at, copies = (*more, *[()] * (3 - len(more)))
    group = LeafGroup(
        leaves=tuple(map(_check_size, members)),
        axes=tuple(map(_parse_text, axes)),
        shard_numel=_check_size(shard),
        split=tuple(
            [Split(_parse_text(axis), _check_size(size), tuple(map(_check_size, dims))) for axis, size, dims in split]
        ),
        coordinates=tuple([(_parse_text(axis), _check_size(coordinate)) for axis, coordinate in at]),
        copies=tuple(map(_check_size, copies)),
    )
    names = [*group.axes, *[s.axis for s in group.split], *[axis for axis, _ in group.coordinates]]
    _require(len(set(names)) == len(names) and set(names) <= set(mesh), "a group is sharded along an unknown axis")
    _require(
        all(coordinate < mesh[axis] for axis, coordinate in group.coordinates),
        "a group is held by ranks that do not exist",
    )
    _require(set(group.copies) <= set(range(len(group.leaves))), "a group has a copy of a leaf that does not exist")
    _require(bool(group.leaves) and len({leaves[i].dtype for i in group.leaves}) == 1, "a group has no single dtype")
    numel = sum(leaves[i].numel for i in group.leaves)
    for s in group.split:
        _require(
            s.size == mesh[s.axis] and len(s.dims) == len(group.leaves), "a split does not match its axis or leaves"
        )
        numel //= s.size
    for index, i in enumerate(group.leaves):
        shape = list(leaves[i].shape)
        for s in group.split:
            _require(shape[s.dims[index]] % s.size == 0, f"leaf {leaves[i].path!r} cannot be split")
            shape[s.dims[index]] //= s.size
    ranks = 1
    for name in group.axes:
        ranks *= mesh[name]
    _require(group.shard_numel * ranks >= numel and (group.shard_numel > 0 or not numel), "a group has too few shards")
    return group
