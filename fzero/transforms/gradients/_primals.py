"""Primals: a differentiated argument, taken apart into tensors that are differentiated, and reduced, together.

A primal knows three things of its leaves. It says which tensors torch.func differentiates, what the loss function is
handed in their place, and how their gradient becomes the gradient of the argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.axes import Axis, LayoutRules, axis_names, check_inputs_replicated, joint, rules_here
from fzero.collectives import Whole, apply_along, one_of_copies
from fzero.optim import Precision
from fzero.sharding import (
    CutUnit,
    PerRank,
    Shard,
    Slot,
    apply_over_unit_axes,
    apply_to_unit,
    assign,
    cut_units,
    facts,
    gather_unit,
    is_box,
    lifted,
    put,
    unit_axes,
    with_cast,
)

__all__ = ["Argument", "OwnPrimal", "Primal", "as_one_value", "open_argument"]

Tensors = Sequence[torch.Tensor]
Members = list[tuple[int, int]]


@dataclass(frozen=True)
class Primal:
    """Leaves that are differentiated together: here tensors outside any mesh.

    Attributes:
        members: `(position in the flattened argument, index in the primal)` of each leaf.
        variables: what torch.func differentiates.
        dtypes: that gradients of the variables are summed over micro-batches in.
        copies: the axes along which each rank has a copy of the variables, and the gradient of its own part of the
            batch; none outside any mesh.
    """

    members: Members
    variables: list[torch.Tensor]
    dtypes: list[torch.dtype]
    copies: Sequence[Axis]

    @property
    def varies(self) -> tuple[str, ...]:
        """The axes along which the variables differ by rank."""
        return ()

    def leaves(self, variables: Tensors) -> Tensors:
        """Make the tensors that the loss function is handed, differentiably in the variables."""
        return variables

    def boxed(self, leaves: Tensors) -> Any:
        """Return what stands at the members' positions in the loss function's argument, by index."""
        return leaves

    def closed(self, gradients: Tensors) -> Any:
        """Reduce the variables' gradients, and return what stands at the members' positions in the gradient."""
        return [g.to(dtype) for g, dtype in zip(gradients, self.dtypes, strict=True)]


@dataclass(frozen=True)
class ReplicatedPrimal(Primal):
    """Replicated leaves of one unit, whose gradients one all_reduce sums.

    Attributes:
        cast: the uid of the unit's spec, with the dtypes that its gradient is reduced in.
    """

    cast: int

    def closed(self, gradients: Tensors) -> Tensors:
        return apply_over_unit_axes("all_reduce", joint(self.copies), self.cast, gradients)


@dataclass(frozen=True)
class AccumulatedPrimal(Primal):
    """The whole leaves of a shard: their gradients accumulate whole, and are reduced after the last micro-batch.

    Attributes:
        uid: of the box that the gradient is put into.
        cast: the uid of the same unit, with the dtypes that its gradient is reduced in.
    """

    uid: int
    cast: int

    @property
    def varies(self) -> tuple[str, ...]:
        return facts(self.uid).varies

    def closed(self, gradients: Tensors) -> Shard:
        return self._summed(apply_to_unit("reduce_scatter", self.cast, gradients))

    def _summed(self, gradients: Tensors) -> Shard:
        if self.copies:
            gradients = apply_over_unit_axes("all_reduce_shard", joint(self.copies), self.cast, gradients)
        return Shard(gradients[0], self.uid)


@dataclass(frozen=True)
class ShardPrimal(AccumulatedPrimal):
    """A unit's shard: the loss function is handed its leaves, and the gather's transpose reduces their gradients.

    Attributes:
        origin: the whole leaves, if they are known.
    """

    origin: tuple[torch.Tensor, ...] | None

    def leaves(self, variables: Tensors) -> Tensors:
        return gather_unit(self.cast, variables[0], self.origin)

    def closed(self, gradients: Tensors) -> Shard:
        return self._summed(gradients)


@dataclass(frozen=True)
class BoxPrimal(ShardPrimal):
    """A unit's shard that the loss function is handed in its box, and gathers itself."""

    def leaves(self, variables: Tensors) -> Tensors:
        return variables

    def boxed(self, leaves: Tensors) -> Shard:
        return Shard(leaves[0], self.cast, self.origin)


@dataclass(frozen=True)
class OwnPrimal(Primal):
    """What is in a `PerRank` box: the gradient of each rank's own value is its own too.

    Attributes:
        structure: of the box's value.
        places: for each of its leaves the variable that it is; None for what is no tensor.
        axes: the box's.
    """

    structure: Any
    places: list[int | None]
    axes: tuple[str, ...] | None

    @property
    def varies(self) -> tuple[str, ...]:
        return axis_names() if self.axes is None else self.axes

    def boxed(self, leaves: Tensors) -> list[Any]:
        return [tree.unflatten(self.structure, [None if i is None else leaves[i] for i in self.places])]

    def closed(self, gradients: Tensors) -> list[PerRank]:
        summed = [apply_along("psum", g, joint(self.copies), Whole()) for g in gradients]
        return [PerRank(self.boxed(summed)[0], self.axes)]


@dataclass(frozen=True)
class OneValuePrimal(Primal):
    """A primal whose copies are one value to a transform of torch.func around all: so its derivatives are unsharded.

    To it each copy would be an input and an output of its own.

    Attributes:
        of: the primal.
    """

    of: Primal

    @property
    def varies(self) -> tuple[str, ...]:
        return self.of.varies

    def leaves(self, variables: Tensors) -> Tensors:
        return self.of.leaves(variables)

    def boxed(self, leaves: Tensors) -> Any:
        return self.of.boxed(leaves)

    def closed(self, gradients: Tensors) -> Any:
        return tree.map(lambda g: one_of_copies(g, joint(self.copies)), self.of.closed(gradients))


def as_one_value(primal: Primal) -> Primal:
    """Make the copies of a primal one value, which each rank uses in its own way."""
    if not primal.copies:
        return primal
    variables = [apply_along("pvary", x, joint(primal.copies), Whole()) for x in primal.variables]
    return OneValuePrimal(primal.members, variables, primal.dtypes, primal.copies, primal)


@dataclass(frozen=True)
class Argument:
    """A differentiated argument, taken apart into primals.

    Attributes:
        entries: of its flattened form, boxes whole.
        structure: of it.
        primals: in the order of the tree, those of boxes first.
    """

    entries: list[Any]
    structure: Any
    primals: list[Primal]

    def handed(self, leaves: list[Tensors]) -> Any:
        """Build what the loss function is handed, given the leaves of each primal."""
        return self._like([p.boxed(xs) for p, xs in zip(self.primals, leaves, strict=True)])

    def closed(self, gradients: list[torch.Tensor]) -> Any:
        """Build the gradient, given the variables' gradients, which are taken off the list.

        So no primal's gradient is held while the next one's is reduced.
        """
        return self._like([p.closed([gradients.pop(0) for _ in p.variables]) for p in self.primals])

    def _like(self, made: list[Any]) -> Any:
        entries = list(self.entries)
        for primal, new in zip(self.primals, made, strict=True):
            put(entries, primal.members, new)
        return tree.unflatten(self.structure, entries)


def open_argument(
    arg: Any, axes: Sequence[Axis], name: str, micro_batches: int, gather: bool, precision: Precision | None
) -> Argument:
    """Take a tree of boxes and replicated tensors apart into primals.

    Raises:
        TypeError: if a leaf cannot be differentiated, or has another dtype than `precision` says. The message names
            its path.
        ValueError: if a unit is sharded over an axis that is not among `axes`; in a simulation, if a plain tensor
            differs by rank along one of them. Names the unit, or the path.
    """
    arg = lifted(arg)  # parameters of which the host has a part
    paths, entries, structure = tree.flatten_with_paths(arg, is_box)
    _check_floating(paths, entries, name)
    if precision is not None:
        precision.check(name, paths, entries)
    primals = [_of_shard(unit, axes, micro_batches, gather, precision) for unit in cut_units(paths, entries)]
    primals += [_of_per_rank(i, x, axes) for i, x in enumerate(entries) if isinstance(x, PerRank)]
    if axes:
        check_inputs_replicated(name, axes, paths, entries)
        primals += _of_replicated(arg, entries, axes, precision)
    else:
        variables, places = _distinct(entries)
        members = [(i, place) for i, place in enumerate(places) if place is not None]
        primals.append(Primal(members, variables, [_grad_dtype(x.dtype, precision) for x in variables], ()))
    return Argument(entries, structure, primals)


def _grad_dtype(dtype: torch.dtype, precision: Precision | None) -> torch.dtype:
    return dtype if precision is None else precision.gradients(dtype)[1]


def _cast(uid: int, precision: Precision | None) -> int:
    return uid if precision is None else with_cast(uid, *precision.gradients(facts(uid).dtype))


def _of_shard(
    unit: CutUnit, axes: Sequence[Axis], micro_batches: int, gather: bool, precision: Precision | None
) -> Primal:
    uid, box, members = unit
    own, names = [a.name for a in unit_axes(uid)], [a.name for a in axes]
    if any(name not in names for name in own):
        raise ValueError(
            f"unit {facts(uid).unit!r} is sharded over {own}, and the mean is over {names}: its gradient would be "
            "summed over more ranks than the loss; name all its axes with axis="
        )
    copies = [a for a in axes if a.name not in facts(uid).varies]
    # what varies has the gradient's dtype, or autograd would cast the gradient to its own
    dtype, cast = _grad_dtype(box.data.dtype, precision), _cast(uid, precision)
    if micro_batches > 1 and facts(uid).reduced == "once":
        leaves = list(gather_unit(uid, box.data, box.origin))
        return AccumulatedPrimal(members, leaves, [dtype] * len(leaves), copies, uid, cast)
    kind = ShardPrimal if gather else BoxPrimal
    return kind(members, [box.data.to(dtype)], [dtype], copies, uid, cast, box.origin)


def _of_per_rank(position: int, box: PerRank, axes: Sequence[Axis]) -> Primal:
    entries, structure = tree.flatten(box.value)
    variables, places = _distinct(entries)
    copies = [a for a in axes if box.axes is not None and a.name not in box.axes]
    return OwnPrimal([(position, 0)], variables, [x.dtype for x in variables], copies, structure, places, box.axes)


def _of_replicated(arg: Any, entries: list[Any], axes: Sequence[Axis], precision: Precision | None) -> list[Primal]:
    assignment = assign(arg, axes, LayoutRules(rules_here().units), rest="replicated")
    primals: list[Primal] = []
    for unit in assignment.units:
        members = [
            (i, x.index)
            for i, x in enumerate(assignment.entries)
            if isinstance(x, Slot) and x.uid == unit.uid and not is_box(entries[i])
        ]
        dtypes = [_grad_dtype(x.dtype, precision) for x in unit.leaves]
        primals.append(ReplicatedPrimal(members, unit.leaves, dtypes, axes, _cast(unit.uid, precision)))
    return primals


def _distinct(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int | None]]:
    """List the distinct tensors among leaves, and for each leaf which of them it is."""
    number: dict[Any, int] = {}
    found: list[torch.Tensor] = []
    places: list[int | None] = []
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            places.append(None)
            continue
        if tree.identity(x) not in number:
            number[tree.identity(x)] = len(found)
            found.append(x)
        places.append(number[tree.identity(x)])
    return found, places


def _check_floating(paths: list[str], entries: list[Any], name: str) -> None:
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, PerRank):
            inner, leaves, _ = tree.flatten_with_paths(x.value)
            _check_floating([f"{path}.{p}".strip(".") for p in inner], leaves, name)
        elif x is not None and not is_box(x) and not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            given = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise TypeError(
                f"{name} is differentiated, and its leaf {path!r} is {given}, which cannot be differentiated "
                "here; pass it in an argument that is not differentiated"
            )
