"""Specs: how one unit is cut, interned, and what traced code may know of it.

An ordinary object does not cross Dynamo, so traced code is handed a spec's uid, an integer, and asks the functions
here, whose answers Dynamo takes as constants.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fzero._torch import assume_constant_result
from fzero.world import Axis, lookup

__all__ = [
    "Spec",
    "check_cut_for",
    "intern",
    "intern_parts",
    "reduces_once",
    "shard_numel",
    "spec_of",
    "unit_axis",
    "unit_name",
]


@dataclass(frozen=True)
class Spec:
    """How one unit is cut. Two specs are equal if and only if shards cut by them may meet in one operation.

    Attributes:
        unit: the unit's name.
        axes: the axes over whose ranks the unit is sharded.
        ranks: the number of those ranks, N.
        paths: the path of each leaf, for messages.
        shapes: the shape of each leaf.
        dtype: the dtype of the leaves.
        reduce: when gradients are reduced: "each" micro-batch, or "once" after the last (stage 1).
    """

    unit: str
    axes: tuple[str, ...]
    ranks: int
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    reduce: str = "each"

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each leaf starts in the flat unit, in elements; then where the last one ends."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    @property
    def numel(self) -> int:
        """Elements of the unit, without padding."""
        return sum(self.sizes)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return -(-self.numel // self.ranks)


_SPECS: list[Spec] = []
_UIDS: dict[Spec, int] = {}


def intern(spec: Spec) -> int:
    """Return the uid of a spec: equal specs have the same."""
    if spec not in _UIDS:
        _UIDS[spec] = len(_SPECS)
        _SPECS.append(spec)
    return _UIDS[spec]


def spec_of(uid: int) -> Spec:
    """Return the spec with this uid."""
    return _SPECS[uid]


@assume_constant_result
def intern_parts(
    unit: str,
    axes: tuple[str, ...],
    ranks: int,
    paths: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    reduce: str,
) -> int:
    """Return the uid of the spec with these attributes."""
    return intern(Spec(unit, axes, ranks, paths, shapes, dtype, reduce))


@assume_constant_result
def _facts(uid: int) -> tuple[str, int, int, bool]:
    spec = spec_of(uid)
    return spec.axes[0], spec.ranks, spec.shard_numel, spec.reduce == "once"


def unit_axis(uid: int) -> Axis:
    """Return the bound axis over which a unit is sharded.

    Raises:
        ValueError: if it is not bound, or has another size than the unit was cut for.
    """
    axis = lookup(_facts(uid + 0)[0])
    check_cut_for(uid, f"unit {unit_name(uid + 0)!r}", ((axis.name, axis.size),))
    return axis


def check_cut_for(uid: int, what: str, shape: Sequence[tuple[str, int]]) -> None:
    """Check that a unit was cut for a mesh of this shape.

    Raises:
        ValueError: if not; it calls the unit `what`.
    """
    name, ranks, *_ = _facts(uid + 0)  # Dynamo: + 0 makes a lazy constant a constant
    if (name, ranks) not in shape:
        axes = ", ".join([f"{name}={size}" for name, size in shape])
        raise ValueError(
            f"{what} was cut for {name}={ranks}, and this mesh has {axes}; gather it on the mesh that it was "
            "cut for, and call step.init on this one"
        )


@assume_constant_result
def unit_name(uid: int) -> str:
    """Return the name of a unit."""
    return spec_of(uid).unit


def shard_numel(uid: int) -> int:
    """Return the elements of one rank's shard of a unit, padding included."""
    return _facts(uid + 0)[2]


def reduces_once(uid: int) -> bool:
    """Tell whether a unit's gradients are reduced once a step, and not each micro-batch."""
    return _facts(uid + 0)[3]
