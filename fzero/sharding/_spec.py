"""Specs: immutable descriptions of how a unit is sharded, interned so that traced code refers to one by a number.

Traced code holds a spec's spec_id and calls the functions here, whose results Dynamo treats as
constants.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from fzero._registry import Registry
from fzero._torch import assume_constant_result
from fzero.axes import Axis, StackedList, axis_index, bound_axes, bound_axis
from fzero.codecs import Codec, CodecKey
from fzero.tree import LayoutError

__all__ = [
    "Piece",
    "ReduceGrads",
    "Spec",
    "Split",
    "check_sharded_for",
    "intern",
    "intern_parts",
    "lookup_spec",
    "traced_spec",
    "unit_axes",
    "unit_index",
    "with_cast",
    "with_host_share",
    "with_sharding_axes",
]


ReduceGrads = Literal["replicated", "once", "each"]
"""When gradients are reduced: into full gradients, or into shards after the last or after each micro-batch."""


class Split(NamedTuple):
    """An axis of model parallelism: each rank along it has its own part of every leaf of the unit.

    Attributes:
        axis: the axis, such as "tp" or "ep".
        size: the number of its ranks.
        dims: for each leaf, the dimension along which it is split in equal parts.
        stacked: the list that the leaves belong to, if each rank has a different item of a list; else None.
    """

    axis: str
    size: int
    dims: tuple[int, ...]
    stacked: StackedList | None = None


# the granularity at which a shard is divided into pieces, so that both begin on a cache line
_ALIGN_ELEMENTS = 64


class Piece(NamedTuple):
    """A range of each rank's shard, and the memory in which it lies.

    Attributes:
        start: the index of its first element in the shard.
        stop: the index after its last element.
        space: "device" or "host".
    """

    start: int
    stop: int
    space: str


class _Cast(NamedTuple):
    """How a unit is sent under a precision policy.

    The differentiated shard has the dtype `grad`, and is gathered in the unit's dtype.

    Attributes:
        wire: the dtype in which gradients are summed over ranks.
        grad: the dtype of their sum.
        gather: the codec by which the unit is gathered; None to gather it as it is.
        reduce: the codec by which gradients are summed; None to sum them in `wire`.
    """

    wire: torch.dtype
    grad: torch.dtype
    gather: Codec | None = None
    reduce: Codec | None = None


class _TracedSpec(NamedTuple):
    """The attributes and properties of a `Spec` that traced code may read, under the same names, as plain values."""

    unit: str
    sharded_over: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    varies: tuple[str, ...]
    order: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    full_shapes: tuple[tuple[int, ...], ...]
    item_shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    reduce_grads: ReduceGrads
    split: tuple[Split, ...]
    ranks: int
    split_ranks: int
    numel: int
    shard_numel: int
    pieces: tuple[Piece, ...]
    gather_key: CodecKey | None
    reduce_key: CodecKey | None


@dataclass(frozen=True)
class Spec:
    """How one unit is sharded. Two specs are equal if and only if their shards may meet in one operation.

    Attributes:
        unit: the unit's name.
        sharded_over: the name and size of each axis over which the unit is sharded; empty if it is not sharded.
        paths: the path of each leaf, for messages.
        shapes: the shape of each leaf on a rank that has gathered the unit.
        dtype: the dtype of the parameters. Other trees of their layout, such as moments, may have another dtype.
        reduce_grads: when gradients are reduced: "each" micro-batch, or "once" after the last (stage 1).
        split: the further axes along which ranks have parts of the leaves: tensor or expert parallelism.
        order: all axes of `sharded_over` and `split`, in the order of the rank program's mesh: it fixes the rank of
            each shard.
        cast: how a precision policy sends the unit. A box between operations has None.
        host: the share of each rank's shard, at its end, that lies in host memory, before rounding up to a multiple of
            `_ALIGN_ELEMENTS` elements. A share, unlike a number of elements, is valid for any number of ranks.
    """

    unit: str
    sharded_over: tuple[tuple[str, int], ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    reduce_grads: ReduceGrads = "each"
    split: tuple[Split, ...] = ()
    order: tuple[str, ...] = ()
    cast: _Cast | None = None
    host: Fraction = Fraction(0)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the unit is sharded."""
        return tuple(name for name, _ in self.sharded_over)

    @cached_property
    def varies(self) -> tuple[str, ...]:
        """The axes along which a shard differs by rank."""
        return (*self.axes, *(s.axis for s in self.split))

    @cached_property
    def traced(self) -> _TracedSpec:
        """The spec's properties as plain values, for traced code."""
        return _TracedSpec._make([getattr(self, name) for name in _TracedSpec._fields])

    @cached_property
    def full_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each full leaf, before any split, as the user passes it to `step.init`."""
        shapes = []
        for i, shape in enumerate(self.shapes):
            full = list(shape)
            for s in self.split:
                full[s.dims[i]] *= s.size
            shapes.append(tuple(full))
        return tuple(shapes)

    @cached_property
    def item_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each leaf in the model: a leaf that is stacked by rank has no dimension of ranks there."""
        return tuple([x[1:] for x in self.full_shapes]) if any(s.stacked for s in self.split) else self.full_shapes

    @property
    def gather_key(self) -> CodecKey | None:
        """The settings of the gather's codec."""
        return None if self.cast is None or self.cast.gather is None else self.cast.gather.key

    @property
    def reduce_key(self) -> CodecKey | None:
        """The settings of the codec of gradients."""
        return None if self.cast is None or self.cast.reduce is None else self.cast.reduce.key

    @property
    def split_ranks(self) -> int:
        """The number of ranks among which each leaf is split."""
        return math.prod(s.size for s in self.split)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks over which the unit is sharded, N."""
        return math.prod(size for _, size in self.sharded_over)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each leaf on a rank that has gathered the unit."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each leaf in the flat unit, and then the end of the last leaf."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    @property
    def numel(self) -> int:
        """The number of elements of the unit, without padding."""
        return sum(self.sizes)

    @property
    def shard_numel(self) -> int:
        """The number of elements of one rank's shard, with padding."""
        return -(-self.numel // self.ranks)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of a rank's shard, in order: usually one, and two if a part of the shard lies on the host."""
        k = self.shard_numel
        boundary = max(k - -(-math.ceil(self.host * k) // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS, 0)
        if boundary == 0 or boundary == k:
            return (Piece(0, k, "device" if boundary == k else "host"),)
        return (Piece(0, boundary, "device"), Piece(boundary, k, "host"))


_SPECS = Registry[Spec]()


def intern(spec: Spec) -> int:
    """Return the spec_id of a spec. Equal specs have equal spec_ids."""
    return _SPECS.id_of(spec)


def lookup_spec(spec_id: int) -> Spec:
    """Return the spec with this spec_id, in code that `torch.compile` does not trace (else `traced_spec`)."""
    return _SPECS.value(spec_id)


@assume_constant_result
def intern_parts(
    unit: str,
    sharded_over: tuple[tuple[str, int], ...],
    paths: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    reduce_grads: ReduceGrads,
    split: tuple[Split, ...],
    bound: tuple[str, ...],
) -> int:
    """Return the spec_id of the spec with these attributes. `bound` lists the axes of the rank program's mesh."""
    return intern(
        _order_axes(
            Spec(
                unit=unit,
                sharded_over=sharded_over,
                paths=paths,
                shapes=shapes,
                dtype=dtype,
                reduce_grads=reduce_grads,
                split=split,
            ),
            bound,
        )
    )


def _order_axes(spec: Spec, bound: Sequence[str]) -> Spec:
    return replace(spec, order=tuple(name for name in bound if name in spec.varies))


@assume_constant_result
def with_sharding_axes(
    spec_id: int, axes: tuple[tuple[str, int], ...], reduce_grads: ReduceGrads, bound: tuple[str, ...]
) -> int:
    """Return the id of the same unit sharded over other axes. `bound` lists the axes of the rank program's mesh."""
    return intern(_order_axes(replace(lookup_spec(spec_id), sharded_over=axes, reduce_grads=reduce_grads), bound))


@assume_constant_result
def with_cast(
    spec_id: int,
    wire: torch.dtype,
    grad: torch.dtype,
    gather_key: CodecKey | None = None,
    reduce_key: CodecKey | None = None,
) -> int:
    """Return the id of the same unit with gradients that are summed over ranks in `wire`, and returned in `grad`.

    With `gather_key`, the settings of a codec, it is gathered by this codec; with `reduce_key` its gradients are
    summed by one.
    """
    codecs = [None if key is None else Codec(*key) for key in (gather_key, reduce_key)]
    return intern(replace(lookup_spec(spec_id), cast=_Cast(wire, grad, *codecs)))


@assume_constant_result
def with_host_share(spec_id: int, part: int, of: int = 1) -> int:
    """Return the spec_id of the same unit with the last `part / of` of each rank's shard in host memory."""
    return intern(replace(lookup_spec(spec_id), host=Fraction(part, of)))


@assume_constant_result
def _trace_constant(spec_id: int) -> _TracedSpec:
    return lookup_spec(spec_id).traced


def traced_spec(spec_id: int) -> _TracedSpec:
    """Return the properties of a spec, in code that `torch.compile` may trace.

    Dynamo cannot trace `lookup_spec`: its table grows, and a `Spec` computes its properties when they are
    read. Dynamo calls this function as it traces, and takes the plain values as constants.
    """
    return _trace_constant(spec_id + 0)  # Dynamo: + 0 makes a lazy constant a constant


def unit_axes(spec_id: int) -> tuple[Axis, ...]:
    """Return the bound axes over which a unit is sharded.

    Raises:
        ValueError: if an axis is not bound, or its size is not the size in the unit's spec.
    """
    spec = traced_spec(spec_id)
    axes = [bound_axis(name) for name in spec.axes]
    check_sharded_for(spec_id, f"unit {spec.unit!r}", tuple([(a.name, a.size) for a in bound_axes()]))
    return tuple(axes)


def unit_index(spec_id: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the index of this rank's shard among the unit's shards: an int64 tensor of shape []."""
    return axis_index(traced_spec(spec_id).axes, device=device)


def check_sharded_for(spec_id: int, label: str, shape: Sequence[tuple[str, int]]) -> None:
    """Check that a unit was sharded for a mesh of this shape.

    Raises:
        LayoutError: if the mesh has other axes, sizes, or another order. The message calls the unit `label`.
    """
    spec = traced_spec(spec_id)
    for pair in (*spec.sharded_over, *[(s.axis, s.size) for s in spec.split]):
        if pair not in shape:
            axes = ", ".join([f"{name}={size}" for name, size in shape])
            raise LayoutError(
                f"{label} was sharded for {pair[0]}={pair[1]}, and this mesh has {axes}; gather it with the "
                "step that sharded it, then pass it to step.partition(full, like=...) of this mesh's step"
            )
    order, names = spec.order, [name for name, _ in shape]
    if [name for name in names if name in order] != list(order):
        raise LayoutError(
            f"{label} was sharded on a mesh with the axes {', '.join(order)} in this order, and this mesh has "
            f"{', '.join(names)}: ranks would take each other's shards; make the mesh with the axes in the same order"
        )
