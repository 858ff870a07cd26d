"""Saving and loading in the format of torch.distributed.checkpoint (DCP), with checks before and clear errors after."""

import os
import pickle
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fzero import tree
from fzero._arguments import check_callable, check_path
from fzero._torch import load_metadata, pytree
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import agree, all_or_none, check_same_on_ranks
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import LocalFolder
from fzero.checkpoint._read_memory import materialize
from fzero.checkpoint._save import TIMEOUT
from fzero.checkpoint.layout import (
    MANIFEST,
    Leaf,
    LeafSource,
    LocalPiece,
    LocalTree,
    TreeLayout,
    is_entry,
    layout_text,
    local_tree,
    rectangles,
)
from fzero.ranks import Mesh
from fzero.sharding import slice_elements
from fzero.tree import Tree

__all__ = ["load", "save"]

# Names: the names in DCP of a tree's leaves, and of the parts of its other values.


_Name = Callable[[str], str]
_Keys = tuple[str | int, ...]


def _keys_of(values: Any, sources: Mapping[str, LeafSource]) -> dict[str, _Keys]:
    """Return the keys that lead to each leaf of a tree, by its path. DCP rebuilds the tree from them."""
    try:
        pairs, _ = pytree.tree_flatten_with_path(values, is_entry)
    except ValueError:  # the user registered a pytree node without names for its children
        return {}
    paths, _, _ = tree.flatten_with_paths(values, is_entry)
    keys_by_path = {path: tuple(map(_key, keys)) for path, (keys, _) in zip(paths, pairs, strict=True)}
    return {path: _of_item(keys_by_path[source.path], source) for path, source in sources.items()}


def _of_item(keys: _Keys, source: LeafSource) -> _Keys:
    """Return the keys that lead to a leaf in the full list, given its keys in a stacked list."""
    at = next((i for i in range(len(keys)) if ".".join(map(str, keys[:i])) == source.list), None)
    return keys if at is None else (*keys[:at], source.item_index, *keys[at + 1 :])


def _key(key: Any) -> str | int:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return str(key.name) if isinstance(key, pytree.GetAttrKey) else str(key.key)


def _names_of(layout: TreeLayout, name: _Name | None) -> dict[str, str]:
    """Return the name of each leaf and value, by path.

    Raises:
        ValueError: if two of them have one name.
    """
    if name is not None:
        check_callable("name", name, "a function from a leaf's path to its name in the checkpoint")
    names = {path: path if name is None else name(path) for path in [*layout.leaf_index, *layout.values]}
    used = [(names[path], path) for path in layout.leaf_index]
    used += [(part, path) for path, value in layout.values.items() for part, _, _ in _flat(names[path], (), value)]
    first: dict[str, str] = {}
    for n, path in used:
        if n in first:
            raise ValueError(f"leaves {first[n]!r} and {path!r} have one name, {n!r}: expected a name for each")
        first[n] = path
    return names


def _flat(name: str, keys: _Keys, value: Any) -> Iterator[tuple[str, _Keys, Any]]:
    """List the parts of a JSON value that DCP names: the items of dicts, and of lists that hold dicts."""
    parts: Sequence[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif _holds_dicts(value):
        parts = list(enumerate(value))
    if not parts:
        yield name, keys, value
    for key, part in parts:
        yield from _flat(f"{name}.{key}" if name else str(key), (*keys, key), part)


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(x, dict) or _holds_dicts(x) for x in value)


def _nest(parts: dict[_Keys, Any]) -> Any:
    """Build a value from its parts: the inverse of `_flat`."""
    if () in parts:
        return parts[()]
    below: dict[str | int, dict[_Keys, Any]] = {}
    for keys, x in parts.items():
        below.setdefault(keys[0], {})[keys[1:]] = x
    values = {key: _nest(below[key]) for key in below}
    return [values[i] for i in sorted(values, key=int)] if all(isinstance(key, int) for key in values) else values


def _stored_names(name: str, metadata: Metadata) -> dict[str, _Keys]:
    """List the names under which a checkpoint stores a value or its parts, with the keys that lead to each part."""
    entries = metadata.state_dict_metadata
    if name in entries:
        return {name: ()}
    parts: dict[str, _Keys] = {}
    start = f"{name}." if name else ""
    for part in entries:
        if part.startswith(start):
            keys = all_keys.get(part) if isinstance(all_keys := metadata.planner_data, dict) else None
            if not isinstance(keys, tuple) or ".".join(map(str, keys)) != part:  # a foreign planner's, or damaged
                keys = ()
            depths = [i for i in range(len(keys)) if ".".join(map(str, keys[:i])) == name]
            parts[part] = keys[depths[0] :] if depths else tuple(part[len(start) :].split("."))
    return parts


def _keys_at(path: str, name: str, keys: dict[str, _Keys]) -> _Keys:
    """Return the keys that lead to a leaf in the nested dict that DCP builds. The first key is a string."""
    if name != path:
        return (name,)
    first, *rest = keys.get(path) or (path,)
    return (str(first), *rest)


# Planners: they give DCP each flat range of a leaf as at most 2 d - 1 n-dimensional chunks.


class _Chunk(NamedTuple):
    """A rectangle of elements of a leaf, and the tensor that holds them from `offset` on."""

    offsets: torch.Size
    sizes: torch.Size
    tensor: torch.Tensor
    offset: int

    @property
    def metadata(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.sizes)


def _chunks(local: LocalTree, pieces_of: Callable[[int], Iterator[LocalPiece]]) -> dict[int, list[_Chunk]]:
    """List the chunks of each leaf that this process holds. Memory that several ranks share counts once."""
    by_leaf: dict[int, dict[Any, _Chunk]] = {}
    for rank in local.ranks:
        for piece, x, at in pieces_of(rank):
            extent, start, stop = piece.range
            for r in rectangles(tuple([size for _, size in extent]), start, stop):
                offsets = torch.Size([a + b for a, (b, _) in zip(r.offsets, extent, strict=True)])
                chunk = _Chunk(offsets, torch.Size(r.sizes), x.detach(), at + r.flat - start)
                key = (offsets, chunk.sizes, x.data_ptr(), chunk.offset)
                by_leaf.setdefault(piece.leaf, {}).setdefault(key, chunk)
    return {leaf: list(chunks.values()) for leaf, chunks in by_leaf.items()}


class _SavePlanner(DefaultSavePlanner):
    """Plans the chunks that this process writes."""

    def __init__(self, local: LocalTree, names: dict[str, str], keys: dict[str, _Keys]) -> None:
        """List what this process writes: its chunks of leaves, and on rank 0 the values and empty leaves."""
        super().__init__()
        layout = local.layout
        self._items: list[WriteItem] = []
        self._data: dict[MetadataIndex, Any] = {}
        self._tree: dict[str, _Keys] = {}
        chunks = _chunks(local, local.owned_pieces)
        for path, i in layout.leaf_index.items():
            leaf, leaf_chunks = layout.leaves[i], chunks.get(i, [])
            if not leaf.numel and 0 in local.ranks:  # the leaf has no elements to write, but needs its name
                empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                leaf_chunks = [_Chunk(torch.Size([0] * len(leaf.shape)), empty.shape, empty, 0)]
            for chunk in leaf_chunks:
                data = TensorWriteData(chunk.metadata, TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape))
                self._add(
                    WriteItem(MetadataIndex(names[path], chunk.offsets), WriteItemType.SHARD, tensor_data=data), chunk
                )
            self._tree[names[path]] = _keys_at(path, names[path], keys)
        for path, value in layout.values.items():
            for name, keys_of_part, part in _flat(names[path], _keys_at(path, names[path], keys), value):
                self._tree[name] = keys_of_part
                if 0 in local.ranks:
                    self._add(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), part)

    def _add(self, item: WriteItem, data: Any) -> None:
        self._items.append(item)
        self._data[item.index] = data

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items, planner_data=self._tree)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        data = self._data[index]
        if not isinstance(data, _Chunk):
            return data
        part = slice_elements(data.tensor, data.offset, data.offset + data.sizes.numel())
        return part.resolve_conj().resolve_neg().view(data.sizes)


class _Reader(FileSystemReader):
    """Reads the files of a checkpoint whose metadata has been read."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata, self._files = metadata, LocalFolder(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        for item in plan.items:
            info = self.storage_data.get(item.storage_index)
            if info is None:
                raise CheckpointError(f"{_METADATA} does not say in which file {item.storage_index.fqn!r} is")
            size = self._files.size(info.relative_path)
            if size is None or info.offset + info.length > size:  # else torch reserves memory as the metadata says
                problem = "is missing" if size is None else f"has {size:,} bytes of {info.offset + info.length:,}"
                raise CheckpointError(f"{info.relative_path} {problem}; it holds {item.storage_index.fqn!r}")
        return super().read_data(plan, planner)


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reads into the memory of this process."""

    def __init__(self, folder: str, local: LocalTree, names: dict[str, str], metadata: Metadata, partial: bool) -> None:
        super().__init__()
        self.metadata: Metadata = metadata
        entries = metadata.state_dict_metadata
        self._local, self._names = local, names
        self._first = {i: names[path] for path, i in reversed(local.layout.leaf_index.items())}
        self._parts = {path: _stored_names(names[path], metadata) for path in local.layout.values}
        self._read: dict[str, Any] = {}
        theirs = {name: _describe(name, x) for name, x in entries.items()}
        ours = {names[path]: str(local.layout.leaves[i]) for path, i in local.layout.leaf_index.items()}
        ours |= {part: "a value" for path in local.layout.values for part in self._parts[path] or [names[path]]}
        _check_leaves(folder, theirs, ours, partial)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor has set the planner up."""

    def create_local_plan(self) -> LoadPlan:
        """Return what this process reads: for each of its chunks the parts in the files, which must cover it once."""
        items: list[ReadItem] = []
        self._chunks: dict[str, list[_Chunk]] = {}
        for i, chunks in _chunks(self._local, self._local.local_pieces).items():
            name = self._first[i]
            self._chunks[name] = chunks
            entry: Any = self.metadata.state_dict_metadata[name]
            read_items = create_read_items_for_chunk_list(name, entry, [c.metadata for c in chunks])
            if sum(x.lengths.numel() for x in read_items) != sum(c.sizes.numel() for c in chunks):
                raise CheckpointError(f"the checkpoint lacks a part of leaf {name!r}, or has a part twice")
            items += read_items
        empty = torch.Size((0,))
        for name in [name for parts in self._parts.values() for name in parts]:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        name = read_item.dest_index.fqn
        try:
            self._read[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"value {name!r} is not plain data: {str(error)[:200]}") from None

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        x, numel = (chunk := self._chunks[index.fqn][index.index or 0]).tensor, chunk.sizes.numel()
        if x.ndim != 1 and x.numel() != numel:  # the chunk is part of x; a tensor that is not contiguous is one chunk
            x = x.view(-1)
        return (x[chunk.offset : chunk.offset + numel] if x.ndim == 1 else x).view(chunk.sizes)

    def values(self) -> dict[str, Any]:
        """Return the values that are not tensors, by path in the tree."""
        return {
            path: _nest({keys: self._read[name] for name, keys in parts.items()}) for path, parts in self._parts.items()
        }


def _describe(name: str, x: Any) -> str:
    return str(Leaf(name, tuple(x.size), x.properties.dtype)) if isinstance(x, TensorStorageMetadata) else "a value"


def _check_leaves(folder: str, theirs: dict[str, str], ours: dict[str, str], partial: bool) -> None:
    """Raise an error that names the first leaves that only one of two trees has, or whose shapes differ."""
    problems = []
    for name, text in ours.items():
        if name not in theirs:
            problems.append(f"it has no leaf {name!r} ({text})")
        elif theirs[name] != text:
            problems.append(f"leaf {name!r} is {theirs[name]} there, and {text} here")
    problems += (
        [] if partial else [f"the tree has no leaf {n!r} ({text})" for n, text in theirs.items() if n not in ours]
    )
    if problems:
        more = f"; and {len(problems) - 3} more" if problems[3:] else ""
        hint = "; give partial=True to leave leaves out" if all("the tree has no" in x for x in problems) else ""
        raise CheckpointError(f"{folder!r} is of another tree: " + "; ".join(problems[:3]) + more + hint)


_METADATA = ".metadata"  # the file that DCP writes last
_LONGEST = 1 << 30  # bytes of it


@api_boundary
def save(path: StrPath, values: Tree, mesh: Mesh | None = None, *, name: _Name | None = None) -> None:
    """Save a tree, in any layout, in the format of torch.distributed.checkpoint (DCP). All ranks of the mesh call it.

    Any program that uses DCP reads the leaves by their paths: `{"model": params}` as `{"model": module.state_dict()}`.
    A tied leaf is written at each of its paths. If only fzero reads it, prefer `fzero.save`, which writes checksums.

    Args:
        path: a folder on a file system, without a checkpoint in it.
        values: the tree, as `fzero.save` takes it.
        mesh: the ranks; None for a tree without boxes in one process.
        name: maps a leaf's path to its name in the checkpoint; None to use the path.

    Raises:
        CheckpointError: on all ranks, if a rank fails, the ranks' trees differ, or the folder holds a checkpoint.
        ValueError: if two leaves have one name, or a box was sharded for another mesh. The message names the path.
        TypeError: if a checkpoint cannot hold a leaf. The message names its path.
        DonatedError: if a leaf was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.checkpoint.dcp.save(folder, {"model": {"w": torch.arange(3.0)}, "step": 7})
        >>> fzero.checkpoint.dcp.load(folder, like={"model": {"w": torch.zeros(3)}, "step": 0})
        {'model': {'w': tensor([0., 1., 2.])}, 'step': 7}
    """
    folder = _folder(path, "save(path, values)")

    def prepare() -> tuple[bytes, _SavePlanner]:
        local = local_tree("the tree", values, mesh)
        planner = _SavePlanner(local, _names_of(local.layout, name), _keys_of(values, local.sources))
        existing = [file for file in (_METADATA, MANIFEST) if os.path.exists(os.path.join(folder, file))]
        if existing:  # DCP would overwrite it file by file, so that a kill meanwhile would leave a mixture of both
            raise CheckpointError(
                f"{folder!r} holds a checkpoint ({existing[0]}): save to a folder of its own, or remove it"
            )
        return f"{folder}\n".encode() + layout_text(local.layout), planner

    _, planner = agree("dcp.save", prepare, secrets.token_hex(8), mesh, TIMEOUT)
    writer = FileSystemWriter(folder, overwrite=False)
    _run(f"nothing was saved to {folder!r}", dcp_save, mesh, storage_writer=writer, planner=planner)


@api_boundary
def load(
    path: StrPath, like: Tree, mesh: Mesh | None = None, *, partial: bool = False, name: _Name | None = None
) -> Tree:
    """Read a checkpoint of torch.distributed.checkpoint (DCP) into a tree, in any layout. All ranks call it.

    Only DCP's own classes and values that `torch.load(weights_only=True)` accepts are unpickled: no code in files runs.

    Args:
        path: the folder.
        like: a tree with the names, shapes and dtypes of the saved tree, in the layout that the result should have.
            Its tensors are overwritten and become the result's. Tensors on the meta device get new memory.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        partial: whether the checkpoint may have leaves that `like` lacks, such as the optimizer's.
        name: maps a leaf's path to its name in the checkpoint; None to use the path.

    Returns:
        The tree. Its values that are not tensors come from the checkpoint. A tied leaf is read by its first name.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, or it has other leaves. The message names the first
            three. Also if its files cannot be read; `like` may then be partly overwritten.
        ValueError: if two leaves have one name, or a box was sharded for another mesh. The message names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=2)
        >>> fzero.checkpoint.dcp.save(folder, {"model": {"w": torch.arange(3.0)}, "step": 7})  # or an FSDP2 program
        >>> like = mesh.spmd(fzero.partition)({"weights": torch.empty(3)})
        >>> name = lambda path: path.replace("weights", "model.w")
        >>> fzero.checkpoint.dcp.load(folder, like=like, mesh=mesh, partial=True, name=name)["weights"].data
        tensor([[0., 1.],
                [2., 0.]])
    """
    folder = _folder(path, "load(path, like)")

    def prepare() -> tuple[Any, _LoadPlanner, dict[str, str]]:
        metadata = _read_metadata(folder)
        result = materialize(like, mesh)
        local = local_tree("like", result, mesh)
        names = _names_of(local.layout, name)
        return result, _LoadPlanner(folder, local, names, metadata, partial), names

    result, planner, names = all_or_none(f"loading {folder!r}", prepare, mesh)
    check_same_on_ranks(f"loading {folder!r}", repr(names).encode(), mesh)
    reader = _Reader(folder, planner.metadata)
    _run(f"{folder!r} could not be read", dcp_load, mesh, storage_reader=reader, planner=planner)
    paths, entries, structure = tree.flatten_with_paths(result, is_entry)
    values = planner.values()
    return tree.unflatten(structure, [values.get(p, x) for p, x in zip(paths, entries, strict=True)])


def _folder(path: StrPath, call: str) -> str:
    text = check_path("path", path, "the path of a folder", f"fzero.checkpoint.dcp.{call}")
    if "://" in text:
        raise ValueError(
            f"path={text!r} is a URL: expected a local folder; copy it, or use fzero.checkpoint, which takes URLs"
        )
    return os.path.abspath(text)


def _run(problem: str, f: Callable[..., Any], mesh: Mesh | None, **options: Any) -> None:
    """Call one of DCP's functions, on all ranks of a mesh or in this process alone.

    Raises:
        CheckpointError: if it fails on any rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            f({}, no_dist=mesh is None or not mesh.distributed, **options)
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        text = " ".join(str(first).split())
        text = text if isinstance(first, CheckpointError) else f"{type(first).__name__}: {text}"
        raise CheckpointError(f"{problem}: rank {rank}: {text}") from error


def _read_metadata(folder: str) -> Metadata:
    try:
        files = LocalFolder(folder)
        size = files.size(_METADATA) or 0
        if size > _LONGEST:
            raise CheckpointError(f"{folder!r}: {_METADATA} has {size:,} bytes: expected at most {_LONGEST:,}")
        return load_metadata(files.get(_METADATA))
    except FileNotFoundError:
        raise CheckpointError(f"{folder!r} is not a checkpoint of DCP: it has no file {_METADATA}") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder!r}: {_METADATA} is damaged, or not DCP's: {error}") from None
