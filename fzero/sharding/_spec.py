"""Specs: how one unit is cut, interned, and what traced code may know of it.

An ordinary object does not cross Dynamo, so traced code is handed a spec's uid, an integer, and asks the functions
here, whose answers Dynamo takes as constants.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch

from fzero._torch import assume_constant_result
from fzero.axes import Axis, Stacked, axis_index, bound, lookup

__all__ = [
    "ALIGN",
    "Facts",
    "Piece",
    "Spec",
    "Split",
    "check_cut_for",
    "facts",
    "intern",
    "intern_parts",
    "on_host",
    "on_mesh",
    "spec_of",
    "unit_axes",
    "unit_index",
    "with_cast",
]


class Split(NamedTuple):
    """An axis of model parallelism: each rank along it has its own part of every leaf of the unit.

    Attributes:
        axis: the axis, such as "tp" or "ep".
        size: the number of its ranks.
        dims: the dimension along which each leaf is cut in equal parts.
        stacked: the list that the leaves are of, if each rank's parts are those of an item of its own.
    """

    axis: str
    size: int
    dims: tuple[int, ...]
    stacked: Stacked | None = None


ALIGN = 64  # elements: where a shard is cut in pieces, so that both begin on a cache line


class Piece(NamedTuple):
    """A range of each rank's shard, and the memory that it lies in.

    Attributes:
        start: its first element in the shard.
        stop: the element behind its last one.
        space: "device" or "host".
    """

    start: int
    stop: int
    space: str


class Facts(NamedTuple):
    """What traced code may know of a spec: its attributes, and what follows from them, as plain Python values."""

    unit: str
    mesh: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    varies: tuple[str, ...]
    order: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    whole_shapes: tuple[tuple[int, ...], ...]
    item_shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    reduced: str
    split: tuple[Split, ...]
    ranks: int
    split_ranks: int
    numel: int
    shard_numel: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Spec:
    """How one unit is cut. Two specs are equal if and only if shards cut by them may meet in one operation.

    Attributes:
        unit: the unit's name.
        mesh: the name and size of each axis over whose ranks the unit is sharded; none if it is not.
        paths: the path of each leaf, for messages.
        shapes: the shape of each leaf, as a rank has it that gathered the unit.
        dtype: the dtype of the parameters; other trees of their layout, such as moments, may have another.
        reduced: when gradients are reduced: "each" micro-batch, or "once" after the last (stage 1).
        split: the further axes along which ranks have parts of the leaves, tensor or expert parallel.
        order: all these axes in the order of the mesh, which says which rank holds which shard.
        cast: in a gradient by a precision policy, its dtypes on the wire and in the end: the shard that is
            differentiated has the latter, and is gathered in `dtype`. A box between operations has None.
        host: the share of each rank's shard, at its end, that lies in host memory, before it is rounded up to where a
            shard may be cut. A share and no number of elements, so that it holds for any number of ranks.
    """

    unit: str
    mesh: tuple[tuple[str, int], ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    reduced: str = "each"
    split: tuple[Split, ...] = ()
    order: tuple[str, ...] = ()
    cast: tuple[torch.dtype, torch.dtype] | None = None
    host: Fraction = Fraction(0)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes over whose ranks the unit is sharded."""
        return tuple(name for name, _ in self.mesh)

    @cached_property
    def varies(self) -> tuple[str, ...]:
        """The axes along which a shard differs by rank."""
        return (*self.axes, *(s.axis for s in self.split))

    @cached_property
    def facts(self) -> Facts:
        """What traced code may know of it."""
        return Facts(
            unit=self.unit,
            mesh=self.mesh,
            axes=self.axes,
            varies=self.varies,
            order=self.order,
            shapes=self.shapes,
            whole_shapes=self.whole_shapes,
            item_shapes=self.item_shapes,
            offsets=self.offsets,
            dtype=self.dtype,
            reduced=self.reduced,
            split=self.split,
            ranks=self.ranks,
            split_ranks=self.split_ranks,
            numel=self.numel,
            shard_numel=self.shard_numel,
            pieces=self.pieces,
        )

    @cached_property
    def whole_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each leaf as `step.init` was given it, split along no axis."""
        found = []
        for i, shape in enumerate(self.shapes):
            whole = list(shape)
            for s in self.split:
                whole[s.dims[i]] *= s.size
            found.append(tuple(whole))
        return tuple(found)

    @cached_property
    def item_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each leaf as a model has it: of one that is stacked by rank, without the ranks."""
        return tuple([x[1:] for x in self.whole_shapes]) if any(s.stacked for s in self.split) else self.whole_shapes

    @property
    def split_ranks(self) -> int:
        """The number of ranks that have parts of one leaf."""
        return math.prod(s.size for s in self.split)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that share the unit, N."""
        return math.prod(size for _, size in self.mesh)

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

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of a rank's shard, in order: nearly always one, and two where a part of it lies on the host."""
        k = self.shard_numel
        at = max(k - -(-math.ceil(self.host * k) // ALIGN) * ALIGN, 0)
        if at == 0 or at == k:
            return (Piece(0, k, "device" if at == k else "host"),)
        return (Piece(0, at, "device"), Piece(at, k, "host"))


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
    mesh: tuple[tuple[str, int], ...],
    paths: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    reduced: str,
    split: tuple[Split, ...],
    bound: tuple[str, ...],
) -> int:
    """Return the uid of the spec with these attributes; `bound` are the mesh's axes."""
    return intern(_ordered(Spec(unit, mesh, paths, shapes, dtype, reduced, split), bound))


def _ordered(spec: Spec, bound: Sequence[str]) -> Spec:
    return replace(spec, order=tuple(name for name in bound if name in spec.varies))


@assume_constant_result
def on_mesh(uid: int, mesh: tuple[tuple[str, int], ...], reduced: str, bound: tuple[str, ...]) -> int:
    """Return the uid of the same unit, sharded over other axes; `bound` are the mesh's axes."""
    return intern(_ordered(replace(spec_of(uid), mesh=mesh, reduced=reduced), bound))


@assume_constant_result
def with_cast(uid: int, wire: torch.dtype, grad: torch.dtype) -> int:
    """Return the uid of the same unit, whose gradients are summed over ranks in one dtype, and end in another."""
    return intern(replace(spec_of(uid), cast=(wire, grad)))


@assume_constant_result
def on_host(uid: int, part: int, of: int = 1) -> int:
    """Return the uid of the same unit, of which the last `part / of` of each rank's shard lie in host memory."""
    return intern(replace(spec_of(uid), host=Fraction(part, of)))


@assume_constant_result
def _constant(uid: int) -> Facts:
    return spec_of(uid).facts


def facts(uid: int) -> Facts:
    """Return what is known of a spec, as constants also to traced code."""
    return _constant(uid + 0)  # Dynamo: + 0 makes a lazy constant a constant


def unit_axes(uid: int) -> tuple[Axis, ...]:
    """Return the bound axes over which a unit is sharded.

    Raises:
        ValueError: if one is not bound, or has another size than the unit was cut for.
    """
    known = facts(uid)
    axes = [lookup(name) for name in known.axes]
    check_cut_for(uid, f"unit {known.unit!r}", tuple([(a.name, a.size) for a in bound()]))
    return tuple(axes)


def unit_index(uid: int) -> torch.Tensor:
    """Return which of a unit's shards this rank's is: an int64 tensor of shape []."""
    return axis_index(facts(uid).axes)


def check_cut_for(uid: int, what: str, shape: Sequence[tuple[str, int]]) -> None:
    """Check that a unit was cut for a mesh of this shape.

    Raises:
        ValueError: if not; it calls the unit `what`.
    """
    known = facts(uid)
    for pair in (*known.mesh, *[(s.axis, s.size) for s in known.split]):
        if pair not in shape:
            axes = ", ".join([f"{name}={size}" for name, size in shape])
            raise ValueError(
                f"{what} was cut for {pair[0]}={pair[1]}, and this mesh has {axes}; gather it on the mesh that it was "
                "cut for, and call step.init on this one"
            )
    order, names = known.order, [name for name, _ in shape]
    if [name for name in names if name in order] != list(order):
        raise ValueError(
            f"{what} was cut on a mesh with the axes {', '.join(order)} in this order, and this one has "
            f"{', '.join(names)}: its ranks would take one another's shards; make the mesh in the same order"
        )
