"""Primals: the leaves of a differentiated argument, in groups that are differentiated and reduced together.

A primal determines which tensors torch.func differentiates for its leaves, how the loss function's leaves are computed
from them, and how their gradient becomes the argument's gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.axes import Axis, LayoutRules, axis_names, check_inputs_replicated, current_rules, join_axes
from fzero.collectives import NoOptions, apply_along, mark_invariant
from fzero.optim import Precision
from fzero.sharding import (
    PerRank,
    Shard,
    ShardedUnit,
    Slot,
    apply_over_unit_axes,
    apply_to_unit,
    assign_units,
    boxes_to_device,
    gather_unit,
    is_box,
    replace_unit,
    sharded_units,
    spec_info,
    unit_axes,
    with_cast,
)

__all__ = ["Argument", "PerRankPrimal", "Primal", "as_one_value", "open_argument"]

Tensors = Sequence[torch.Tensor]
Members = list[tuple[int, int]]


@dataclass(frozen=True)
class Primal:
    """Leaves that are differentiated together. This base class is for tensors outside any mesh.

    Attributes:
        members: `(position in the flattened argument, index in the primal)` of each leaf.
        variables: the tensors that torch.func differentiates.
        dtypes: the dtypes in which the variables' gradients are summed over micro-batches.
        copies: the axes along which each rank has a copy of the variables, and the gradient for its part of the batch;
            none outside any mesh.
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
        """Compute the loss function's leaves, differentiably, from the variables."""
        return variables

    def inputs(self, leaves: Tensors) -> Any:
        """Return the entries at the members' positions in the loss function's argument, by index."""
        return leaves

    def reduce(self, gradients: Tensors) -> Any:
        """Reduce the variables' gradients, and return the entries at the members' positions in the gradient."""
        return [g.to(dtype) for g, dtype in zip(gradients, self.dtypes, strict=True)]


@dataclass(frozen=True)
class ReplicatedPrimal(Primal):
    """Replicated leaves of one unit. One all_reduce sums their gradients.

    Attributes:
        cast: the id of the unit's spec, with the dtypes in which its gradient is reduced.
    """

    cast: int

    def reduce(self, gradients: Tensors) -> Tensors:
        return apply_over_unit_axes("all_reduce", join_axes(self.copies), self.cast, gradients)


@dataclass(frozen=True)
class AccumulatedPrimal(Primal):
    """The full leaves of a shard. Full gradients accumulate, and are reduced after the last micro-batch.

    Attributes:
        spec_id: the id of the gradient's spec.
        cast: the id of the same unit's spec, with the dtypes in which its gradient is reduced.
    """

    spec_id: int
    cast: int

    @property
    def varies(self) -> tuple[str, ...]:
        return spec_info(self.spec_id).varies

    def reduce(self, gradients: Tensors) -> Shard:
        return self._summed(apply_to_unit("reduce_scatter", self.cast, gradients))

    def _summed(self, gradients: Tensors) -> Shard:
        if self.copies:
            gradients = apply_over_unit_axes("all_reduce_shard", join_axes(self.copies), self.cast, gradients)
        return Shard(gradients[0], self.spec_id)


@dataclass(frozen=True)
class ShardPrimal(AccumulatedPrimal):
    """A unit's shard. The loss function gets its full leaves; the gather's transpose reduces their gradients.

    Attributes:
        origin: the full leaves, or None if they must be gathered.
    """

    origin: tuple[torch.Tensor, ...] | None

    def leaves(self, variables: Tensors) -> Tensors:
        return gather_unit(self.cast, variables[0], self.origin)

    def reduce(self, gradients: Tensors) -> Shard:
        return self._summed(gradients)


@dataclass(frozen=True)
class BoxPrimal(ShardPrimal):
    """A unit's shard. The loss function gets it in its box, and gathers it itself."""

    def leaves(self, variables: Tensors) -> Tensors:
        return variables

    def inputs(self, leaves: Tensors) -> Shard:
        return Shard(leaves[0], self.cast, self.origin)


@dataclass(frozen=True)
class PerRankPrimal(Primal):
    """The tensors in a `PerRank` box. Their gradient differs by rank too.

    Attributes:
        structure: the structure of the box's value.
        indices: for each leaf of the value the index of its variable; None if the leaf is not a tensor.
        axes: the box's axes.
    """

    structure: Any
    indices: list[int | None]
    axes: tuple[str, ...] | None

    @property
    def varies(self) -> tuple[str, ...]:
        return axis_names() if self.axes is None else self.axes

    def inputs(self, leaves: Tensors) -> list[Any]:
        return [tree.unflatten(self.structure, [None if i is None else leaves[i] for i in self.indices])]

    def reduce(self, gradients: Tensors) -> list[PerRank]:
        summed = [apply_along("psum", g, join_axes(self.copies), NoOptions()) for g in gradients]
        return [PerRank(self.inputs(summed)[0], self.axes)]


@dataclass(frozen=True)
class OneValuePrimal(Primal):
    """A primal whose copies count as one value, so that an outer torch.func transform sees unsharded derivatives.

    Otherwise the outer transform would see each copy as an input and an output of its own.

    Attributes:
        primal: the primal.
    """

    primal: Primal

    @property
    def varies(self) -> tuple[str, ...]:
        return self.primal.varies

    def leaves(self, variables: Tensors) -> Tensors:
        return self.primal.leaves(variables)

    def inputs(self, leaves: Tensors) -> Any:
        return self.primal.inputs(leaves)

    def reduce(self, gradients: Tensors) -> Any:
        return tree.map(lambda g: mark_invariant(g, join_axes(self.copies)), self.primal.reduce(gradients))


def as_one_value(primal: Primal) -> Primal:
    """Make the ranks' copies of a primal one differentiable input, as `pvary` does."""
    if not primal.copies:
        return primal
    variables = [apply_along("pvary", x, join_axes(primal.copies), NoOptions()) for x in primal.variables]
    return OneValuePrimal(primal.members, variables, primal.dtypes, primal.copies, primal)


@dataclass(frozen=True)
class Argument:
    """A differentiated argument, split into primals.

    Attributes:
        entries: the flattened argument, in which a box is one entry.
        structure: the structure of the flattened argument.
        primals: the primals in the order of the tree, boxes first.
    """

    entries: list[Any]
    structure: Any
    primals: list[Primal]

    def build(self, leaves: list[Tensors]) -> Any:
        """Build the loss function's argument from the leaves of each primal."""
        return self._like([p.inputs(xs) for p, xs in zip(self.primals, leaves, strict=True)])

    def reduce(self, gradients: list[torch.Tensor]) -> Any:
        """Build the argument's gradient from the variables' gradients, and remove these from the list.

        So each primal's unreduced gradient is freed before the next primal's gradient is reduced.
        """
        return self._like([p.reduce([gradients.pop(0) for _ in p.variables]) for p in self.primals])

    def _like(self, values: list[Any]) -> Any:
        entries = list(self.entries)
        for primal, value in zip(self.primals, values, strict=True):
            replace_unit(entries, primal.members, value)
        return tree.unflatten(self.structure, entries)


def open_argument(
    arg: Any, axes: Sequence[Axis], name: str, micro_batches: int, gather: bool, precision: Precision | None
) -> Argument:
    """Split a tree of boxes and replicated tensors into primals.

    Raises:
        TypeError: if a leaf cannot be differentiated, or its dtype is not the dtype of `precision`. The message names
            the leaf.
        ValueError: if a unit is sharded over an axis outside `axes`; in a simulation, if a plain tensor differs by rank
            along one of `axes`. The message names the unit or the leaf.
    """
    arg = boxes_to_device(arg)  # to the device: part of each parameter may be on the host
    paths, entries, structure = tree.flatten_with_paths(arg, is_box)
    _check_floating(paths, entries, name)
    if precision is not None:
        precision.check(name, paths, entries)
    primals = [_of_shard(unit, axes, micro_batches, gather, precision) for unit in sharded_units(paths, entries)]
    primals += [_of_per_rank(i, x, axes) for i, x in enumerate(entries) if isinstance(x, PerRank)]
    if axes:
        check_inputs_replicated(name, axes, paths, entries)
        primals += _of_replicated(arg, entries, axes, precision)
    else:
        variables, indices = _distinct(entries)
        members = [(i, index) for i, index in enumerate(indices) if index is not None]
        primals.append(Primal(members, variables, [_grad_dtype(x.dtype, precision) for x in variables], ()))
    return Argument(entries, structure, primals)


def _grad_dtype(dtype: torch.dtype, precision: Precision | None) -> torch.dtype:
    return dtype if precision is None else precision.gradients(dtype)[1]


def _cast(spec_id: int, precision: Precision | None) -> int:
    return spec_id if precision is None else with_cast(spec_id, *precision.gradients(spec_info(spec_id).dtype))


def _of_shard(
    unit: ShardedUnit, axes: Sequence[Axis], micro_batches: int, gather: bool, precision: Precision | None
) -> Primal:
    spec_id, box, members = unit
    shard_axes, mean_axes = [a.name for a in unit_axes(spec_id)], [a.name for a in axes]
    if any(name not in mean_axes for name in shard_axes):
        raise ValueError(
            f"unit {spec_info(spec_id).unit!r} is sharded over {shard_axes}, and the mean is over {mean_axes}: its "
            "gradient would be summed over more ranks than the loss; name all axes of the unit with axis="
        )
    copies = [a for a in axes if a.name not in spec_info(spec_id).varies]
    # the variables have the gradient's dtype, or autograd would cast the gradient to their dtype
    dtype, cast = _grad_dtype(box.data.dtype, precision), _cast(spec_id, precision)
    if micro_batches > 1 and spec_info(spec_id).reduced == "once":
        leaves = list(gather_unit(spec_id, box.data, box.origin))
        return AccumulatedPrimal(members, leaves, [dtype] * len(leaves), copies, spec_id, cast)
    kind = ShardPrimal if gather else BoxPrimal
    return kind(members, [box.data.to(dtype)], [dtype], copies, spec_id, cast, box.origin)


def _of_per_rank(position: int, box: PerRank, axes: Sequence[Axis]) -> Primal:
    entries, structure = tree.flatten(box.value)
    variables, indices = _distinct(entries)
    copies = [a for a in axes if box.axes is not None and a.name not in box.axes]
    return PerRankPrimal([(position, 0)], variables, [x.dtype for x in variables], copies, structure, indices, box.axes)


def _of_replicated(arg: Any, entries: list[Any], axes: Sequence[Axis], precision: Precision | None) -> list[Primal]:
    assignment = assign_units(arg, axes, LayoutRules(current_rules().units), rest="replicated")
    primals: list[Primal] = []
    for unit in assignment.units:
        members = [
            (i, x.index)
            for i, x in enumerate(assignment.entries)
            if isinstance(x, Slot) and x.spec_id == unit.spec_id and not is_box(entries[i])
        ]
        dtypes = [_grad_dtype(x.dtype, precision) for x in unit.leaves]
        primals.append(ReplicatedPrimal(members, unit.leaves, dtypes, axes, _cast(unit.spec_id, precision)))
    return primals


def _distinct(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int | None]]:
    """List the distinct tensors among leaves, and the index of each leaf in this list (None if it is no tensor)."""
    numbers: dict[Any, int] = {}
    distinct: list[torch.Tensor] = []
    indices: list[int | None] = []
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            indices.append(None)
            continue
        if tree.identity(x) not in numbers:
            numbers[tree.identity(x)] = len(distinct)
            distinct.append(x)
        indices.append(numbers[tree.identity(x)])
    return distinct, indices


def _check_floating(paths: list[str], entries: list[Any], name: str) -> None:
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, PerRank):
            inner, leaves, _ = tree.flatten_with_paths(x.value)
            _check_floating([f"{path}.{p}".strip(".") for p in inner], leaves, name)
        elif x is not None and not is_box(x) and not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            shown = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise TypeError(
                f"{name} is differentiated, and its leaf {path!r} is {shown}, which cannot be differentiated; "
                "pass it in an argument that is not differentiated"
            )
