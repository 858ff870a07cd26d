"""Read a manifest, which is not trusted: anybody may have written the file.

A name that leads out of the folder, an impossible size, or unexpected JSON is an error.
"""

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import Files
from fzero.checkpoint.layout._bounded_json import parse_json
from fzero.checkpoint.layout._manifest import MANIFEST, MAX_MANIFEST_BYTES, PAGE_BYTES, VERSION, File, Manifest
from fzero.checkpoint.layout._ranges import Leaf, LeafGroup, TreeLayout
from fzero.checkpoint.layout._safetensors import DTYPES_BY_NAME, FORMAT
from fzero.sharding import Split

__all__ = ["parse_manifest", "read_manifest"]


_MAX_NUMBER = 1 << 48  # an upper bound of every number in a manifest: elements, bytes, ranks
_MAX_DIMS = 64  # torch's own limit
_FRAME = re.compile(rb'\{"crc32":"([0-9a-f]{8})","checkpoint":(.*)\}\n', re.DOTALL)


class _FormatError(CheckpointError):
    """A manifest is malformed."""


def read_manifest(files: Files) -> tuple[Manifest, int]:
    """Read the manifest of a folder; return it and the checksum of its file.

    Raises:
        CheckpointError: if there is no manifest, or it has a later version.
        DamagedError: if the manifest is damaged.
    """
    try:
        size = files.size(MANIFEST) or 0
        if size > MAX_MANIFEST_BYTES:
            raise DamagedError(
                f"{files.path!r}: {MANIFEST} has {size:,} bytes: expected at most {MAX_MANIFEST_BYTES:,}"
            )
        data = files.get(MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(
            f"{files.path!r} is not a checkpoint: it has no file {MANIFEST}; give the folder that fzero.save wrote, "
            "such as runs/step-00000004; a file of torch.save is torch.load's"
        ) from None
    try:
        return parse_manifest(data), zlib.crc32(data)
    except _FormatError as error:
        raise DamagedError(f"{files.path!r}: {MANIFEST} is damaged: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{files.path!r}: {error}") from None


def parse_manifest(data: bytes) -> Manifest:
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
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _FormatError(f"its format is not {FORMAT!r}")
    if body.get("version") not in range(1, VERSION + 1) or body.get("block") != PAGE_BYTES:
        raise CheckpointError(
            f"it has version {body.get('version')!r}: this fzero reads versions up to {VERSION}; install a newer one"
        )
    try:
        return _build_manifest(body)
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


def _build_manifest(body: dict[str, Any]) -> Manifest:
    """Build a manifest of JSON, and check all that a load relies on: anybody may have written the file."""
    nonce = _parse_text(body["nonce"])
    _require(bool(re.fullmatch("[0-9a-f]{16}", nonce)), f"{nonce[:40]!r} is not a nonce")
    mesh = tuple([(_parse_text(name), _check_size(size)) for name, size in body["mesh"]])
    _require(len(dict(mesh)) == len(mesh) and all(size for _, size in mesh), "its mesh is invalid")
    leaves = tuple([_parse_leaf(*x) for x in body["leaves"]])
    ties = {_parse_text(path): _parse_text(first) for path, first in body["ties"].items()}
    values = {_parse_text(path): value for path, value in body["values"].items()}
    _check_paths(leaves, ties, values)
    groups = tuple([_parse_group(*x) for x in body["groups"]])
    for group in groups:
        _check_group(group, dict(mesh), leaves)
    layout = TreeLayout(
        mesh=mesh,
        leaves=leaves,
        groups=groups,
        ties=ties,
        values=values,
    )
    indices = [i for g in groups for index, i in enumerate(g.leaves) if index not in g.copies]
    _require(sorted(indices) == [*range(len(leaves))], "a leaf is in no group, or in several")
    files = tuple([File(_check_size(size), _parse_text(checksums)) for size, checksums in body["files"]])
    _check_files(files, layout)
    date = body["written"]
    _require(type(date) in (int, float) and 0 <= date < 1e12, "it has no date")
    return Manifest(nonce, layout, files, float(date))


def _check_paths(leaves: Sequence[Leaf], ties: dict[str, str], values: dict[str, Any]) -> None:
    paths = [x.path for x in leaves]
    _require(len({*paths, *ties, *values}) == len(paths) + len(ties) + len(values), "two leaves have one path")
    _require(set(ties.values()) <= set(paths), "a leaf is tied to a leaf that does not exist")


def _check_files(files: Sequence[File], layout: TreeLayout) -> None:
    _require(len(files) == layout.ranks, f"it has {len(files)} files for {layout.ranks} ranks")
    for r, f in enumerate(files):
        _require(bool(re.fullmatch("[0-9a-f]*", f.checksums)), f"file {r} has no checksums")
        page_count = len(f.checksums) // 16
        _require(len(f.checksums) == 16 * -(-f.size // PAGE_BYTES), f"file {r} has {page_count} checksums")
    # so that no leaf is larger than the files on disk; each file's size is checked when it is read
    leaf_bytes = sum(x.nbytes for x in layout.leaves)
    _require(leaf_bytes <= sum(f.size for f in files), "its files are too small for its leaves")


def _parse_leaf(path: Any, dtype: Any, shape: Any, per_rank: Any = 0) -> Leaf:
    _require(_parse_text(dtype) in DTYPES_BY_NAME, f"{dtype[:40]!r} is not a dtype")
    _require(len(shape) <= _MAX_DIMS, f"a leaf has {len(shape)} dimensions")
    leaf = Leaf(_parse_text(path), tuple(map(_check_size, shape)), DTYPES_BY_NAME[dtype], bool(per_rank))
    _check_size(leaf.nbytes)
    return leaf


def _parse_group(
    members: Any, axes: Any, shard_numel: Any, split: Any = (), coordinates: Any = (), copies: Any = ()
) -> LeafGroup:
    return LeafGroup(
        leaves=tuple(map(_check_size, members)),
        axes=tuple(map(_parse_text, axes)),
        shard_numel=_check_size(shard_numel),
        split=tuple(
            [Split(_parse_text(axis), _check_size(size), tuple(map(_check_size, dims))) for axis, size, dims in split]
        ),
        coordinates=tuple([(_parse_text(axis), _check_size(coordinate)) for axis, coordinate in coordinates]),
        copies=tuple(map(_check_size, copies)),
    )


def _check_group(group: LeafGroup, mesh: dict[str, int], leaves: Sequence[Leaf]) -> None:
    """Check that a group fits the mesh and its leaves."""
    names = [*group.axes, *[s.axis for s in group.split], *[axis for axis, _ in group.coordinates]]
    _require(len(set(names)) == len(names) and set(names) <= set(mesh), "a group is sharded along an unknown axis")
    _require(
        all(coordinate < mesh[axis] for axis, coordinate in group.coordinates),
        "a group is held by ranks that do not exist",
    )
    _require(set(group.copies) <= set(range(len(group.leaves))), "a group has a copy of a leaf that does not exist")
    _require(bool(group.leaves) and len({leaves[i].dtype for i in group.leaves}) == 1, "a group has no single dtype")
    _check_split(group, mesh, leaves)
    numel = sum(leaves[i].numel for i in group.leaves)
    for s in group.split:
        numel //= s.size
    ranks = math.prod([mesh[axis] for axis in group.axes])
    _require(group.shard_numel * ranks >= numel and (group.shard_numel > 0 or not numel), "a group has too few shards")


def _check_split(group: LeafGroup, mesh: dict[str, int], leaves: Sequence[Leaf]) -> None:
    """Check that the parts of a group's leaves are equal along each axis over which they are split."""
    for s in group.split:
        _require(
            s.size == mesh[s.axis] and len(s.dims) == len(group.leaves), "a split does not match its axis or leaves"
        )
    for index, i in enumerate(group.leaves):
        shape = list(leaves[i].shape)
        for s in group.split:
            _require(shape[s.dims[index]] % s.size == 0, f"leaf {leaves[i].path!r} cannot be split")
            shape[s.dims[index]] //= s.size
