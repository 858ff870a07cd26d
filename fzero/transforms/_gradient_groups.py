"""Gradient groups: the leaves of a differentiated argument, in groups that are differentiated and reduced together.

A group determines which tensors torch.func differentiates for its leaves. It computes the loss function's leaves from
them, and turns their gradient into the argument's gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch

from fzero import tree
from fzero._format import format_tensor
from fzero._torch.types import Tensors
from fzero.axes import Axis, LayoutRules, axis_names, check_inputs_replicated, current_rules, join_axes
from fzero.codecs import CodecKey, round_with
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
    traced_spec,
    unit_axes,
    with_cast,
)

__all__ = ["Argument", "PerRankGroup", "open_argument"]

_Members = list[tuple[int, int]]


@dataclass(frozen=True)
class _GradientGroup:
    """Leaves that are differentiated and reduced together: replicated leaves of one unit, or tensors outside any mesh.

    Attributes:
        members: `(index in the flattened argument, index in the group)` of each leaf.
        variables: the tensors that torch.func differentiates.
        dtypes: the dtypes in which the variables' gradients are summed over micro-batches.
        copy_axes: the axes along which each rank has a copy of the variables, and the gradient for its part of the
            batch; none outside any mesh.
        reduce_spec_id: the unit's spec, with the dtypes in which its gradient is reduced; None without a unit.
        rounding: the settings of the codec by which the loss function's leaves are rounded; None for none.
        is_invariant: whether the copies count as one value, so that an outer torch.func transform sees unsharded
            derivatives. Otherwise that transform would see each copy as an input and an output of its own.
    """

    members: _Members
    variables: list[torch.Tensor]
    dtypes: list[torch.dtype]
    copy_axes: Sequence[Axis]
    reduce_spec_id: int | None
    rounding: CodecKey | None = field(default=None, kw_only=True)
    is_invariant: bool = field(default=False, kw_only=True)

    @property
    def varies(self) -> tuple[str, ...]:
        """The axes along which the variables differ by rank."""
        return ()

    def leaves(self, variables: Tensors) -> Tensors:
        """Compute the loss function's leaves, differentiably, from the variables."""
        return _round_leaves(self.rounding, variables)

    def inputs(self, leaves: Tensors) -> Any:
        """Return the members' entries in the loss function's argument."""
        return leaves

    def reduce(self, gradients: Tensors) -> Any:
        """Reduce the variables' gradients, and return the members' entries in the argument's gradient."""
        entries = self._reduce(gradients)
        return (
            tree.map(lambda g: mark_invariant(g, join_axes(self.copy_axes)), entries) if self.is_invariant else entries
        )

    def _reduce(self, gradients: Tensors) -> Any:
        if self.reduce_spec_id is None:
            return [g.to(dtype) for g, dtype in zip(gradients, self.dtypes, strict=True)]
        return apply_over_unit_axes("all_reduce", join_axes(self.copy_axes), self.reduce_spec_id, gradients)


def _round_leaves(key: CodecKey | None, xs: Tensors) -> Tensors:
    return xs if key is None else [round_with(key, x, 0) for x in xs]


@dataclass(frozen=True)
class _ShardGroup(_GradientGroup):
    """The leaves of a unit's shard.

    Attributes:
        spec_id: the gradient's spec.
        origin: the full leaves, or None if they must be gathered.
        wrt: "shard" or "box" if the shard is differentiated, and the gather's transpose reduces its gradient. A box
            is gathered by the loss function itself. With "full" the full leaves are differentiated, and their gradients
            are reduced after the last micro-batch.
    """

    reduce_spec_id: int
    spec_id: int
    origin: tuple[torch.Tensor, ...] | None
    wrt: Literal["shard", "box", "full"]

    @property
    def varies(self) -> tuple[str, ...]:
        return traced_spec(self.spec_id).varies

    def leaves(self, variables: Tensors) -> Tensors:
        if self.wrt == "shard":
            return gather_unit(self.reduce_spec_id, variables[0], self.origin)
        return variables if self.wrt == "box" else _round_leaves(self.rounding, variables)

    def inputs(self, leaves: Tensors) -> Any:
        return Shard(leaves[0], self.reduce_spec_id, self.origin) if self.wrt == "box" else leaves

    def _reduce(self, gradients: Tensors) -> Shard:
        if self.wrt == "full":
            gradients = apply_to_unit("reduce_scatter", self.reduce_spec_id, gradients)
        if self.copy_axes:
            gradients = apply_over_unit_axes(
                "all_reduce_shard", join_axes(self.copy_axes), self.reduce_spec_id, gradients
            )
        return Shard(gradients[0], self.spec_id)


@dataclass(frozen=True)
class PerRankGroup(_GradientGroup):
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

    def _reduce(self, gradients: Tensors) -> list[PerRank]:
        summed = [apply_along("psum", g, join_axes(self.copy_axes), NoOptions()) for g in gradients]
        return [PerRank(self.inputs(summed)[0], self.axes)]


def _as_invariant(group: _GradientGroup) -> _GradientGroup:
    """Make the ranks' copies of a group one differentiable input, as `pvary` does."""
    if not group.copy_axes:
        return group
    variables = [apply_along("pvary", x, join_axes(group.copy_axes), NoOptions()) for x in group.variables]
    return replace(group, variables=variables, is_invariant=True)


@dataclass(frozen=True)
class Argument:
    """A differentiated argument, split into groups.

    Attributes:
        entries: the flattened argument, in which a box is one entry.
        structure: the structure of the flattened argument.
        groups: the groups in the order of the tree, boxes first.
    """

    entries: list[Any]
    structure: Any
    groups: list[_GradientGroup]

    def build(self, leaves: list[Tensors]) -> Any:
        """Build the loss function's argument from the leaves of each group."""
        return self._with_values([group.inputs(xs) for group, xs in zip(self.groups, leaves, strict=True)])

    def as_invariant(self) -> "Argument":
        """Return the argument with the ranks' copies of each group as one differentiable input."""
        return replace(self, groups=[_as_invariant(group) for group in self.groups])

    def reduce(self, gradients: Iterator[torch.Tensor]) -> Any:
        """Build the argument's gradient from the next gradients, one for each variable of the argument.

        If nothing else holds a gradient, it is freed before the next group's gradient is reduced.
        """
        return self._with_values([group.reduce(list(islice(gradients, len(group.variables)))) for group in self.groups])

    def _with_values(self, values: list[Any]) -> Any:
        entries = list(self.entries)
        for group, value in zip(self.groups, values, strict=True):
            replace_unit(entries, group.members, value)
        return tree.unflatten(self.structure, entries)


def open_argument(
    arg: Any, axes: Sequence[Axis], name: str, micro_batches: int, gather: bool, precision: Precision | None
) -> Argument:
    """Split a tree of boxes and replicated tensors into gradient groups.

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
    groups: list[_GradientGroup] = [
        _shard_group(unit, axes, micro_batches, gather, precision) for unit in sharded_units(paths, entries)
    ]
    groups += [_per_rank_group(i, x, axes) for i, x in enumerate(entries) if isinstance(x, PerRank)]
    if axes:
        check_inputs_replicated(name, axes, paths, entries)
        groups += _replicated_groups(arg, entries, axes, precision)
    else:
        positions, indices = tree.index_tensors(entries)
        members = [(i, index) for i, index in enumerate(indices) if index is not None]
        groups += _tensor_groups(members, [entries[i] for i in positions], precision)
    return Argument(entries, structure, groups)


def _grad_dtype(dtype: torch.dtype, precision: Precision | None) -> torch.dtype:
    return dtype if precision is None else precision.gradients(dtype)[1]


def _reduce_spec_id(spec_id: int, precision: Precision | None) -> int:
    return spec_id if precision is None else with_cast(spec_id, *precision.gradients(traced_spec(spec_id).dtype))


def _rounding_codec(dtype: torch.dtype, precision: Precision | None) -> CodecKey | None:
    return None if precision is None else precision.gradients(dtype).gather_key


def _tensor_groups(
    members: _Members, variables: list[torch.Tensor], precision: Precision | None
) -> list[_GradientGroup]:
    """Return one group, or with a codec a group for each dtype: it rounds parameters of the policy's dtype alone."""
    if precision is None or precision.gather is None:
        return [
            _GradientGroup(
                members=members,
                variables=variables,
                dtypes=[_grad_dtype(x.dtype, precision) for x in variables],
                copy_axes=(),
                reduce_spec_id=None,
            )
        ]
    groups = []
    for dtype in dict.fromkeys([x.dtype for x in variables]):
        of_dtype = [i for i, x in enumerate(variables) if x.dtype == dtype]
        members_of_dtype = [(index, of_dtype.index(i)) for index, i in members if i in of_dtype]
        xs = [variables[i] for i in of_dtype]
        dtypes = [_grad_dtype(dtype, precision)] * len(xs)
        groups.append(
            _GradientGroup(
                members=members_of_dtype,
                variables=xs,
                dtypes=dtypes,
                copy_axes=(),
                reduce_spec_id=None,
                rounding=_rounding_codec(dtype, precision),
            )
        )
    return groups


def _shard_group(
    unit: ShardedUnit, axes: Sequence[Axis], micro_batches: int, gather: bool, precision: Precision | None
) -> _GradientGroup:
    """Return the group of a unit that is sharded: its variables are the shard, or the leaves if it is reduced once."""
    spec_id, box, members = unit
    shard_axes, mean_axes = [a.name for a in unit_axes(spec_id)], [a.name for a in axes]
    if any(name not in mean_axes for name in shard_axes):
        raise ValueError(
            f"unit {traced_spec(spec_id).unit!r} is sharded over {shard_axes}, and the mean is over {mean_axes}: its "
            "gradient would be summed over more ranks than the loss; name all axes of the unit with axis="
        )
    copy_axes = [a for a in axes if a.name not in traced_spec(spec_id).varies]
    # the variables have the gradient's dtype, or autograd would cast the gradient to their dtype
    dtype, reduce_spec_id = _grad_dtype(box.data.dtype, precision), _reduce_spec_id(spec_id, precision)
    key = _rounding_codec(traced_spec(spec_id).dtype, precision)
    if micro_batches > 1 and traced_spec(spec_id).reduce_grads == "once":
        leaves = list(gather_unit(spec_id, box.data, box.origin))
        dtypes = [dtype] * len(leaves)
        return _ShardGroup(
            members=members,
            variables=leaves,
            dtypes=dtypes,
            copy_axes=copy_axes,
            reduce_spec_id=reduce_spec_id,
            spec_id=spec_id,
            origin=None,
            wrt="full",
            rounding=key,
        )
    data, wrt = box.data.to(dtype), "shard" if gather else "box"
    return _ShardGroup(
        members=members,
        variables=[data],
        dtypes=[dtype],
        copy_axes=copy_axes,
        reduce_spec_id=reduce_spec_id,
        spec_id=spec_id,
        origin=box.origin,
        wrt=wrt,
    )


def _per_rank_group(index: int, box: PerRank, axes: Sequence[Axis]) -> _GradientGroup:
    """Return the group of a `PerRank` box: its distinct tensors, whose gradients differ by rank as they do."""
    entries, structure = tree.flatten(box.value)
    positions, indices = tree.index_tensors(entries)
    variables: list[torch.Tensor] = [entries[i] for i in positions]
    copy_axes = [a for a in axes if box.axes is not None and a.name not in box.axes]
    members, dtypes = [(index, 0)], [x.dtype for x in variables]
    return PerRankGroup(
        members=members,
        variables=variables,
        dtypes=dtypes,
        copy_axes=copy_axes,
        reduce_spec_id=None,
        structure=structure,
        indices=indices,
        axes=box.axes,
    )


def _replicated_groups(
    arg: Any, entries: list[Any], axes: Sequence[Axis], precision: Precision | None
) -> list[_GradientGroup]:
    """Return the groups of replicated leaves, one for each unit, since a unit's gradients are reduced together."""
    assignment = assign_units(arg, axes, LayoutRules(current_rules().units), rest="replicated")
    groups: list[_GradientGroup] = []
    for unit in assignment.units:
        members = [
            (i, x.index)
            for i, x in enumerate(assignment.entries)
            if isinstance(x, Slot) and x.spec_id == unit.spec_id and not is_box(entries[i])
        ]
        dtypes = [_grad_dtype(x.dtype, precision) for x in unit.leaves]
        spec_id = _reduce_spec_id(unit.spec_id, precision)
        key = _rounding_codec(traced_spec(unit.spec_id).dtype, precision)
        groups.append(
            _GradientGroup(
                members=members,
                variables=unit.leaves,
                dtypes=dtypes,
                copy_axes=axes,
                reduce_spec_id=spec_id,
                rounding=key,
            )
        )
    return groups


def _check_floating(paths: list[str], entries: list[Any], name: str) -> None:
    """Raise an error for a leaf that cannot be differentiated."""
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, PerRank):
            inner, leaves, _ = tree.flatten_with_paths(x.value)
            _check_floating([f"{path}.{p}".strip(".") for p in inner], leaves, name)
        elif x is not None and not is_box(x) and not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            if isinstance(x, torch.nn.Module):
                raise TypeError(
                    f"{name} is a module, {type(x).__name__}, and the gradient is of a tree of tensors: "
                    "apply, params, buffers = fzero.nn.functional(module), and apply(params, buffers, x) in the loss"
                )
            text = format_tensor(x.dtype, x.shape) if isinstance(x, torch.Tensor) else repr(x)
            raise TypeError(
                f"{name} is differentiated, and its leaf {path!r} is {text}, which cannot be differentiated; "
                "pass it in an argument that is not differentiated"
            )
