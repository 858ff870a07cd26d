"""Planners give DCP each flat range of a leaf as at most 2 d - 1 n-dimensional chunks."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
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

from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint.dcp._leaf_names import KeyPath, flatten_value, keys_at, nest_values, stored_names
from fzero.checkpoint.layout import Leaf, LocalPiece, LocalTree, rectangles
from fzero.sharding import slice_elements

__all__ = ["LoadPlanner", "SavePlanner"]


class _Chunk(NamedTuple):
    """A rectangle of elements of a leaf, and the tensor that holds them from `offset` on."""

    offsets: torch.Size
    sizes: torch.Size
    tensor: torch.Tensor
    offset: int

    @property
    def metadata(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.sizes)


def _local_chunks(local: LocalTree, pieces_of: Callable[[int], Iterator[LocalPiece]]) -> dict[int, list[_Chunk]]:
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


class SavePlanner(DefaultSavePlanner):
    """Plans the chunks that this process writes."""

    def __init__(self, local: LocalTree, names: dict[str, str], keys: dict[str, KeyPath]) -> None:
        """List what this process writes: its chunks of leaves, and on rank 0 the values and empty leaves."""
        super().__init__()
        layout = local.layout
        self._items: list[WriteItem] = []
        self._data: dict[MetadataIndex, Any] = {}
        self._tree: dict[str, KeyPath] = {}
        chunks = _local_chunks(local, local.owned_pieces)
        for path, i in layout.leaf_index.items():
            leaf, leaf_chunks = layout.leaves[i], chunks.get(i, [])
            if not leaf.numel and 0 in local.ranks:  # the leaf has no elements to write, but needs its name
                empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                leaf_chunks = [_Chunk(torch.Size([0] * len(leaf.shape)), empty.shape, empty, 0)]
            for chunk in leaf_chunks:
                data = TensorWriteData(chunk.metadata, TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape))
                self._add_item(
                    WriteItem(MetadataIndex(names[path], chunk.offsets), WriteItemType.SHARD, tensor_data=data), chunk
                )
            self._tree[names[path]] = keys_at(path, names[path], keys)
        for path, value in layout.values.items():
            for name, keys_of_part, part in flatten_value(names[path], keys_at(path, names[path], keys), value):
                self._tree[name] = keys_of_part
                if 0 in local.ranks:
                    self._add_item(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), part)

    def _add_item(self, item: WriteItem, data: Any) -> None:
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


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads into the memory of this process."""

    def __init__(self, folder: str, local: LocalTree, names: dict[str, str], metadata: Metadata, partial: bool) -> None:
        super().__init__()
        self.metadata: Metadata = metadata
        entries = metadata.state_dict_metadata
        self._local, self._names = local, names
        self._first = {i: names[path] for path, i in reversed(local.layout.leaf_index.items())}
        self._parts = {path: stored_names(names[path], metadata) for path in local.layout.values}
        self._read: dict[str, Any] = {}
        saved_texts = {name: _describe_entry(name, x) for name, x in entries.items()}
        local_texts = {names[path]: str(local.layout.leaves[i]) for path, i in local.layout.leaf_index.items()}
        local_texts |= {part: "a value" for path in local.layout.values for part in self._parts[path] or [names[path]]}
        _check_leaves(folder, saved_texts, local_texts, partial)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor has set the planner up."""

    def create_local_plan(self) -> LoadPlan:
        """Return what this process reads: for each of its chunks the parts in the files, which must cover it once."""
        items: list[ReadItem] = []
        self._local_chunks: dict[str, list[_Chunk]] = {}
        for i, chunks in _local_chunks(self._local, self._local.local_pieces).items():
            name = self._first[i]
            self._local_chunks[name] = chunks
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
        x, numel = (chunk := self._local_chunks[index.fqn][index.index or 0]).tensor, chunk.sizes.numel()
        if x.ndim != 1 and x.numel() != numel:  # the chunk is part of x; a tensor that is not contiguous is one chunk
            x = x.view(-1)
        return (x[chunk.offset : chunk.offset + numel] if x.ndim == 1 else x).view(chunk.sizes)

    def values(self) -> dict[str, Any]:
        """Return the values that are not tensors, by path in the tree."""
        return {
            path: nest_values({keys: self._read[name] for name, keys in parts.items()})
            for path, parts in self._parts.items()
        }


def _describe_entry(name: str, x: Any) -> str:
    return str(Leaf(name, tuple(x.size), x.properties.dtype)) if isinstance(x, TensorStorageMetadata) else "a value"


def _check_leaves(folder: str, saved_texts: dict[str, str], local_texts: dict[str, str], partial: bool) -> None:
    """Raise an error that names the first leaves that only one of two trees has, or whose shapes differ."""
    problems = []
    for name, text in local_texts.items():
        if name not in saved_texts:
            problems.append(f"it has no leaf {name!r} ({text})")
        elif saved_texts[name] != text:
            problems.append(f"leaf {name!r} is {saved_texts[name]} there, and {text} here")
    problems += (
        []
        if partial
        else [f"the tree has no leaf {n!r} ({text})" for n, text in saved_texts.items() if n not in local_texts]
    )
    if problems:
        rest_text = f"; and {len(problems) - 3} more" if problems[3:] else ""
        hint = "; give partial=True to leave leaves out" if all("the tree has no" in x for x in problems) else ""
        raise CheckpointError(f"{folder!r} is of another tree: " + "; ".join(problems[:3]) + rest_text + hint)
