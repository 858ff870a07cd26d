"""Planners: they give torch.distributed.checkpoint each flat range of a leaf as at most 2 d - 1 n-d chunks."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
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

from fzero.checkpoint._blocks import rectangles
from fzero.checkpoint._cut import Leaf
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._holdings import Holdings, Lying
from fzero.dcp._names import Keys, flat, nested, parts_of, place_of
from fzero.layout.elements import elements

__all__ = ["LoadPlanner", "Reader", "SavePlanner"]


class _Chunk(NamedTuple):
    """A box of elements of a leaf, and the memory of this process that it lies in, from `at` on."""

    offsets: torch.Size
    sizes: torch.Size
    memory: torch.Tensor
    at: int

    @property
    def metadata(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.sizes)


def _chunks(mine: Holdings, lying: Callable[[int], Iterator[Lying]]) -> dict[int, list[_Chunk]]:
    """List what this process has of each leaf: of pieces of all its ranks, each memory once."""
    found: dict[int, dict[Any, _Chunk]] = {}
    for rank in mine.ranks:
        for piece, x, at in lying(rank):
            block, start, stop = piece.range
            for r in rectangles(tuple([size for _, size in block]), start, stop):
                offsets = torch.Size([a + b for a, (b, _) in zip(r.offsets, block, strict=True)])
                chunk = _Chunk(offsets, torch.Size(r.sizes), x.detach(), at + r.flat - start)
                key = (offsets, chunk.sizes, x.data_ptr(), chunk.at)
                found.setdefault(piece.leaf, {}).setdefault(key, chunk)
    return {leaf: list(chunks.values()) for leaf, chunks in found.items()}


class SavePlanner(DefaultSavePlanner):
    """Gives DCP what this process writes."""

    def __init__(self, mine: Holdings, names: dict[str, str], keys: dict[str, Keys]) -> None:
        super().__init__()
        cut = mine.cut
        self._items: list[WriteItem] = []
        self._data: dict[MetadataIndex, Any] = {}
        self._tree: dict[str, Keys] = {}
        chunks = _chunks(mine, mine.owned)
        for path, i in cut.number.items():
            leaf, where = cut.leaves[i], chunks.get(i, [])
            if not leaf.numel and 0 in mine.ranks:  # nobody has elements of it, and it has a name
                nothing = torch.empty(leaf.shape, dtype=leaf.dtype)
                where = [_Chunk(torch.Size([0] * len(leaf.shape)), nothing.shape, nothing, 0)]
            for chunk in where:
                data = TensorWriteData(chunk.metadata, TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape))
                self._add(
                    WriteItem(MetadataIndex(names[path], chunk.offsets), WriteItemType.SHARD, tensor_data=data), chunk
                )
            self._tree[names[path]] = place_of(path, names[path], keys)
        for path, value in cut.values.items():
            for name, place, part in flat(names[path], place_of(path, names[path], keys), value):
                self._tree[name] = place
                if 0 in mine.ranks:
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
        part = elements(data.memory, data.at, data.at + data.sizes.numel())
        return part.resolve_conj().resolve_neg().view(data.sizes)


class Reader(FileSystemReader):
    """Reads the files of a checkpoint whose metadata is known."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class LoadPlanner(DefaultLoadPlanner):
    """Lets DCP write into what this process holds."""

    def __init__(self, folder: str, mine: Holdings, names: dict[str, str], metadata: Metadata, partial: bool) -> None:
        super().__init__()
        self.metadata: Metadata = metadata
        there = metadata.state_dict_metadata
        self._mine, self._names = mine, names
        self._first = {i: names[path] for path, i in reversed(mine.cut.number.items())}
        self._parts = {path: parts_of(names[path], metadata) for path in mine.cut.values}
        self._read: dict[str, Any] = {}
        theirs = {name: _described(name, x) for name, x in there.items()}
        ours = {names[path]: str(mine.cut.leaves[i]) for path, i in mine.cut.number.items()}
        ours |= {part: "a value" for path in mine.cut.values for part in self._parts[path] or [names[path]]}
        _check_alike(folder, theirs, ours, partial)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: all is known."""

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        self._chunks: dict[str, list[_Chunk]] = {}
        for i, chunks in _chunks(self._mine, self._mine.held).items():
            name = self._first[i]
            self._chunks[name] = chunks
            there: Any = self.metadata.state_dict_metadata[name]
            found = create_read_items_for_chunk_list(name, there, [c.metadata for c in chunks])
            if sum(x.lengths.numel() for x in found) != sum(c.sizes.numel() for c in chunks):
                raise CheckpointError(f"the checkpoint has not all of leaf {name!r}, or some of it twice")
            items += found
        nowhere = torch.Size((0,))
        for name in [name for parts in self._parts.values() for name in parts]:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        name = read_item.dest_index.fqn
        try:
            self._read[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"value {name!r} is no plain data: {str(error)[:200]}") from None

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        x, numel = (chunk := self._chunks[index.fqn][index.index or 0]).memory, chunk.sizes.numel()
        if x.ndim != 1 and x.numel() != numel:  # a part of a tensor; what is not contiguous is held whole
            x = x.view(-1)
        return (x[chunk.at : chunk.at + numel] if x.ndim == 1 else x).view(chunk.sizes)

    def values(self) -> dict[str, Any]:
        """Return what is no tensor, by its path in the tree."""
        return {
            path: nested({keys: self._read[name] for name, keys in parts.items()})
            for path, parts in self._parts.items()
        }


def _described(name: str, x: Any) -> str:
    return str(Leaf(name, tuple(x.size), x.properties.dtype)) if isinstance(x, TensorStorageMetadata) else "a value"


def _check_alike(folder: str, theirs: dict[str, str], ours: dict[str, str], partial: bool) -> None:
    found = []
    for name, what in ours.items():
        if name not in theirs:
            found.append(f"it has no leaf {name!r} ({what})")
        elif theirs[name] != what:
            found.append(f"leaf {name!r} is {theirs[name]} there, and {what} here")
    found += [] if partial else [f"the tree has no leaf {n!r} ({what})" for n, what in theirs.items() if n not in ours]
    if found:
        more = f"; and {len(found) - 3} more" if found[3:] else ""
        hint = "; give partial=True to leave leaves out" if all("the tree has no" in x for x in found) else ""
        raise CheckpointError(f"{folder!r} is of another tree: " + "; ".join(found[:3]) + more + hint)
