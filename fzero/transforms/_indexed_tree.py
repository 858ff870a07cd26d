"""Trees with indices in place of tensors, and the list of distinct tensors that they index.

The transforms of torch.func must see each tensor once; the rest of a tree is constant.
"""

import enum
import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.sharding import Shard, Slot

__all__ = ["DistinctTensors", "IndexedTree", "replace_arguments", "replace_result"]


_CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum, Slot),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, torch.nn.Module),
    *(torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _TensorIndex(NamedTuple):
    """Stands for a tensor: its index among the distinct tensors."""

    index: int

    def restore(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.index]


class _ShardIndices(NamedTuple):
    """Stands for a `Shard`: the id of its spec, and the indices of its pieces and of its origin."""

    spec_id: int
    data: tuple[int, ...]
    origin: tuple[int, ...] | None

    def restore(self, tensors: Sequence[torch.Tensor]) -> Shard:
        origin = None if self.origin is None else tuple([tensors[i] for i in self.origin])
        pieces = [tensors[i] for i in self.data]
        return Shard(pieces[0] if len(pieces) == 1 else tuple(pieces), self.spec_id, origin)


class DistinctTensors:
    """Collects distinct tensors, and gives each an index.

    Attributes:
        tensors: the tensors, in the order of their indices.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}

    def index_of(self, x: torch.Tensor) -> int:
        """Return the index of a tensor; a new tensor gets the next index."""
        if id(x) not in self._indices:
            self._indices[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._indices[id(x)]


@dataclass(frozen=True)
class IndexedTree:
    """A tree without its tensors.

    Attributes:
        leaves: the tree's leaves, with indices in place of tensors and boxes.
        structure: the tree's structure.
    """

    leaves: tuple[Any, ...]
    structure: Any

    def restore(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with tensors in place of their indices."""
        leaves = [x.restore(tensors) if isinstance(x, _TensorIndex | _ShardIndices) else x for x in self.leaves]
        return tree.unflatten(self.structure, leaves)

    def boxed_indices(self) -> frozenset[int]:
        """Return the indices of the tensors in boxes."""
        boxes = [x for x in self.leaves if isinstance(x, _ShardIndices)]
        return frozenset([i for x in boxes for i in (*x.data, *(x.origin or ()))])

    def has_boxes(self) -> bool:
        """Return whether a leaf is a box. A slot without its shard counts too, so that gathering it raises an error."""
        return any(isinstance(x, _ShardIndices | Slot) for x in self.leaves)


def replace_arguments(args: Any, kwargs: Any, distinct: DistinctTensors) -> IndexedTree:
    """Replace the tensors in a call's arguments, and in their boxes, by indices.

    Raises:
        TypeError: if an argument holds an object that is neither a tensor, a box, nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths((args, kwargs), _is_leaf)
    entries = [
        _argument_indices(x, distinct, tree.leaf_name("argument", path.split(".", 1)[1]))
        for path, x in zip(paths, leaves, strict=True)
    ]
    return IndexedTree(tuple(entries), structure)


def replace_result(out: Any, distinct: DistinctTensors) -> IndexedTree:
    """Replace the tensors in a result by indices; boxes are flattened like other trees.

    Raises:
        TypeError: if the result holds an object that is neither a tensor nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths(out)
    entries = [
        _argument_indices(y, distinct, tree.leaf_name("result", path)) for path, y in zip(paths, leaves, strict=True)
    ]
    return IndexedTree(tuple(entries), structure)


def _is_leaf(x: Any) -> bool:
    # some caches are registered as pytree nodes, and would be rebuilt: the block would write into the copy
    return isinstance(x, Shard | Slot) or type(x).__name__.endswith("Cache")


def _argument_indices(x: Any, distinct: DistinctTensors, label: str) -> Any:
    """Return what stands for an argument in the saved call; an error for an object that the block could change."""
    if isinstance(x, torch.Tensor):
        return _TensorIndex(distinct.index_of(x))
    if isinstance(x, Shard):
        origin = None if x.origin is None else tuple([distinct.index_of(y) for y in x.origin])
        return _ShardIndices(x.spec_id, tuple([distinct.index_of(y) for y in x.pieces]), origin)
    if isinstance(x, _CONSTANTS):
        return x
    name = type(x).__name__
    advice = (
        "run the model without its cache, use_cache=False"
        if name.endswith("Cache")
        else "pass trees (dicts, lists, tuples) of tensors and constants, and let the block capture constants"
    )
    raise TypeError(
        f"remat: {label} is a {name}, an object that the block could write into each time it runs; {advice}"
    )
