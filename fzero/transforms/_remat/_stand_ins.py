"""Trees with numbers in the places of their tensors, and the distinct tensors that the numbers stand for.

Tensors travel through the transforms of torch.func, which must see each once; the rest of a tree is constant.
"""

import enum
import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.layout.boxes import Shard, Slot

__all__ = ["Distinct", "StandIns", "arguments", "result"]

CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum, Slot),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, torch.nn.Module),
    *(torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _At(NamedTuple):
    """Stands for a tensor: its number among the distinct ones."""

    index: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.index]


class _ShardStandIn(NamedTuple):
    """Stands for a `Shard`: its unit, and the numbers of its pieces and of its origin."""

    uid: int
    data: tuple[int, ...]
    origin: tuple[int, ...] | None

    def of(self, tensors: Sequence[torch.Tensor]) -> Shard:
        origin = None if self.origin is None else tuple([tensors[i] for i in self.origin])
        pieces = [tensors[i] for i in self.data]
        return Shard(pieces[0] if len(pieces) == 1 else tuple(pieces), self.uid, origin)


class Distinct:
    """Collects distinct tensors.

    Attributes:
        tensors: those that were numbered, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, x: torch.Tensor) -> int:
        """Return the number of a tensor, a new one if it is new."""
        if id(x) not in self._numbers:
            self._numbers[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._numbers[id(x)]


@dataclass(frozen=True)
class StandIns:
    """A tree without its tensors.

    Attributes:
        leaves: its leaves, with stand-ins for tensors and boxes.
        structure: its structure.
    """

    leaves: tuple[Any, ...]
    structure: Any

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with tensors in the places of their stand-ins."""
        leaves = [x.of(tensors) if isinstance(x, _At | _ShardStandIn) else x for x in self.leaves]
        return tree.unflatten(self.structure, leaves)

    def boxed(self) -> frozenset[int]:
        """Return the numbers of the tensors in boxes."""
        boxes = [x for x in self.leaves if isinstance(x, _ShardStandIn)]
        return frozenset([i for x in boxes for i in (*x.data, *(x.origin or ()))])

    def has_boxes(self) -> bool:
        """Return whether a leaf is a box: also a slot alone, whose shard is elsewhere, for the error that says so."""
        return any(isinstance(x, _ShardStandIn | Slot) for x in self.leaves)


def arguments(args: Any, kwargs: Any, distinct: Distinct) -> StandIns:
    """Take the tensors, and those in boxes, out of the arguments of a call.

    Raises:
        TypeError: if one holds an object that is neither a tensor, a box, nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths((args, kwargs), _is_leaf)
    stand_ins = [
        _stand_in(x, distinct, tree.place("argument", path.split(".", 1)[1]))
        for path, x in zip(paths, leaves, strict=True)
    ]
    return StandIns(tuple(stand_ins), structure)


def result(out: Any, distinct: Distinct) -> StandIns:
    """Take the tensors out of a result, in which a box is a tree like any other.

    Raises:
        TypeError: if it holds an object that is neither a tensor nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths(out)
    stand_ins = [_stand_in(y, distinct, tree.place("result", path)) for path, y in zip(paths, leaves, strict=True)]
    return StandIns(tuple(stand_ins), structure)


def _is_leaf(x: Any) -> bool:
    # some caches are registered as trees, and would be rebuilt: the block would write into the copy
    return isinstance(x, Shard | Slot) or type(x).__name__.endswith("Cache")


def _stand_in(x: Any, distinct: Distinct, where: str) -> Any:
    if isinstance(x, torch.Tensor):
        return _At(distinct.number(x))
    if isinstance(x, Shard):
        origin = None if x.origin is None else tuple([distinct.number(y) for y in x.origin])
        return _ShardStandIn(x.uid, tuple([distinct.number(y) for y in x.parts]), origin)
    if isinstance(x, CONSTANTS):
        return x
    name = type(x).__name__
    advice = (
        "run the model without its cache, use_cache=False"
        if name.endswith("Cache")
        else "pass trees (dicts, lists, tuples) of tensors and constants, and let the block capture constants"
    )
    raise TypeError(
        f"remat: {where} is a {name}, an object that the block, which runs twice, could write into; {advice}"
    )
