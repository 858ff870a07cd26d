"""Offload plans: the part of each unit that lies in host memory, and the trees split into device and host pieces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import axis_names
from fzero.collectives import to_device, to_host
from fzero.optim._precision import Precision
from fzero.sharding import (
    Shard,
    Slot,
    first_device,
    host_numel,
    intern_parts,
    is_box,
    join_pieces,
    lookup_spec,
    shard_to_device,
    split_shard,
    traced_spec,
    with_host_share,
)
from fzero.tree import Tree

__all__ = ["OffloadPlan", "Ratio", "check_ratio", "offload_params", "offload_plan_like", "plan_offload"]

Ratio = float | Callable[[str], float]
"""The share of a state that lies in host memory, or a rule `(path) -> share`."""

_Move = Callable[[torch.Tensor], torch.Tensor]


def check_ratio(ratio: object, name: str = "ratio") -> None:
    """Check that a ratio is a number from 0 to 1 or a rule. The messages call it `name`.

    Raises:
        TypeError: if it is neither a number nor a rule.
        ValueError: if it is a number outside 0 to 1.
    """
    if callable(ratio):
        return
    if not isinstance(ratio, int | float) or isinstance(ratio, bool):
        raise TypeError(f"{name}={ratio!r}: expected a number from 0 to 1, or a rule (path) -> number")
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name}={ratio!r}: expected a number from 0 to 1")


class _UnitLeaf(NamedTuple):
    """A leaf in a unit: the unit of an entry of a tree, and the leaf's index there.

    Attributes:
        spec_id: the unit's spec, with all elements on the device.
        index: the leaf's index in the unit.
        has_shard: whether the entry holds the unit's shard (or the tensor itself); other entries refer to it.
        shape: the shape of a plain leaf, which is a unit by itself; None for a box.
    """

    spec_id: int
    index: int
    has_shard: bool
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class OffloadPlan:
    """The split of a tree's units between device and host memory.

    Attributes:
        structure: the tree's structure, with boxes as leaves.
        unit_leaves: the unit of each entry; None for an entry in no unit, such as an integer or a number (0-d).
        host_shares: the share of each rank's shard that lies on the host, by the spec_id of the unit.
        device: the tree's device.
    """

    structure: Any
    unit_leaves: tuple[_UnitLeaf | None, ...]
    host_shares: dict[int, Fraction]
    device: torch.device

    @cached_property
    def spec_ids(self) -> dict[int, int]:
        """The spec_id of each unit in pieces, by the spec_id of the same unit on the device."""
        return {spec_id: _with_share(spec_id, share) for spec_id, share in self.host_shares.items()}

    def entries(self, values: Tree) -> list[Any]:
        """List the entries of a tree that has this structure."""
        return tree.leaves_up_to(tree.unflatten(self.structure, [None] * len(self.unit_leaves)), values, is_box)

    def to_pieces(self, values: Tree, move: _Move, boxes_only: bool = False) -> Tree:
        """Split each unit into a device piece and a host piece, and apply `move` to the host piece.

        Plain leaves are split too, unless `boxes_only`.
        """
        out = self.entries(values)
        for i, (x, leaf) in enumerate(zip(out, self.unit_leaves, strict=True)):
            if leaf is None or x is None or (boxes_only and leaf.shape is not None):
                continue
            spec_id = self.spec_ids[leaf.spec_id]
            box = x if leaf.shape is None else Shard(x.reshape(-1), leaf.spec_id)
            if lookup_spec(box.spec_id).host not in (0, lookup_spec(spec_id).host):
                raise ValueError(
                    f"offload: unit {traced_spec(spec_id).unit!r} has {_host_text(box.spec_id)} on the host, and "
                    f"ratio says {_host_text(spec_id)}: give step.init the optimizer that the step updates with"
                )
            out[i] = split_shard(box, spec_id, move) if leaf.has_shard else Slot(spec_id, leaf.index)
        return tree.unflatten(self.structure, out)

    def from_pieces(
        self, values: Tree, on_device: Callable[[int, Shard], Sequence[torch.Tensor]], leaves_only: bool = False
    ) -> Tree:
        """Concatenate the pieces of each unit: the inverse of `to_pieces`.

        Args:
            values: a tree in pieces.
            on_device: takes the number of an entry and its box, and returns the box's pieces, all on the device.
            leaves_only: whether boxes stay in pieces, and only plain leaves are put together.
        """
        out = self.entries(values)
        full: dict[int, torch.Tensor] = {}  # plain leaves by unit: tied leaves get one tensor
        for i, (x, leaf) in enumerate(zip(out, self.unit_leaves, strict=True)):
            if leaf is None or x is None or (leaves_only and leaf.shape is None):
                continue
            if leaf.has_shard:
                data = join_pieces(on_device(i, x))
                out[i] = Shard(data, leaf.spec_id)
                if leaf.shape is not None:
                    out[i] = full[leaf.spec_id] = data.view((*data.shape[:-1], *leaf.shape))
            else:
                out[i] = Slot(leaf.spec_id, leaf.index) if leaf.shape is None else full[leaf.spec_id]
        return tree.unflatten(self.structure, out)

    def host_units(self, values: Tree) -> Tree:
        """Return a tree in pieces with only the units that have a host piece; all other entries become None."""
        entries = [
            x if isinstance(x, Shard | Slot) and lookup_spec(x.spec_id).host else None for x in self.entries(values)
        ]
        return tree.unflatten(self.structure, entries)

    def with_host_units(self, values: Tree, units: Tree) -> Tree:
        """Return `values` with the entries of `units`, a tree from `host_units`, in place of its own."""
        pairs = zip(self.entries(values), self.entries(units), strict=True)
        return tree.unflatten(self.structure, [x if unit is None else unit for x, unit in pairs])

    def state_to_host(self, state: Tree) -> Tree:
        """Move the host's share of a state to the host; plain leaves become boxes over no axis."""
        paths, out, structure = tree.flatten_with_paths(state, is_box)
        for i, (leaf, x) in enumerate(zip(_unit_leaves(paths, out, None), out, strict=True)):
            if leaf is None:
                continue
            spec_id = self._spec_id_in_pieces(self._parameter_unit(leaf))
            box = x if leaf.shape is None else Shard(x.reshape(-1), leaf.spec_id)
            out[i] = split_shard(box, spec_id, to_host) if leaf.has_shard else Slot(spec_id, leaf.index)
        return tree.unflatten(structure, out)

    def state_to_device(self, state: Tree) -> Tree:
        """Move the host's share of a state to the device, in the state's own layout: the inverse of `state_to_host`."""
        out, structure = tree.flatten(state, is_box)
        full: dict[int, torch.Tensor] = {}  # leaves of units over no axis
        for i, x in enumerate(out):
            if not isinstance(x, Shard | Slot):
                continue
            spec_id, spec = with_host_share(x.spec_id, 0), lookup_spec(x.spec_id)
            if isinstance(x, Shard):
                data = shard_to_device(x, self.device).data
                if not spec.varies:
                    full[spec_id] = data.view((*data.shape[:-1], *spec.shapes[0]))
                out[i] = Shard(data, spec_id) if spec.varies else full[spec_id]
            else:
                out[i] = full[spec_id] if spec_id in full else Slot(spec_id, x.index)
        return tree.unflatten(structure, out)

    def piece_to_device(self, space: str, x: torch.Tensor) -> torch.Tensor:
        """Move a piece to the device if its space is the host."""
        return to_device(x, self.device) if space == "host" else x

    def _parameter_unit(self, leaf: _UnitLeaf) -> int:
        """Return the parameter's unit for a plain leaf of the state, or the leaf's own unit.

        The leaf "mu.a.w" belongs to the parameter "a.w" of the same shape.
        """
        if leaf.shape is None:
            return leaf.spec_id
        keys = traced_spec(leaf.spec_id).unit.split(".")  # the leaf's path; tied leaves have the path of the first
        suffixes = [".".join(keys[i:]) for i in range(len(keys))]
        candidates = [self._parameters_by_path[suffix] for suffix in suffixes if suffix in self._parameters_by_path]
        same_shape = [spec_id for spec_id in candidates if traced_spec(spec_id).shapes == (leaf.shape,)]
        return same_shape[0] if same_shape else leaf.spec_id

    @cached_property
    def _parameters_by_path(self) -> dict[str, int]:
        return {traced_spec(spec_id).unit: spec_id for spec_id in self.host_shares if not traced_spec(spec_id).varies}

    def _spec_id_in_pieces(self, spec_id: int) -> int:
        if spec_id in self.spec_ids:
            return self.spec_ids[spec_id]
        # a unit that only the state has gets the average share of the parameters
        total = sum([_count_elements(x) for x in self.host_shares])
        host = sum([share * _count_elements(x) for x, share in self.host_shares.items()])
        return _with_share(spec_id, Fraction(host, total) if total else Fraction(0))

    def has_host_params(self, params: Tree | None) -> bool:
        """Return whether parameters have a host piece."""
        entries = [] if params is None else self.entries(params)
        return any(isinstance(x, Shard) and lookup_spec(x.spec_id).host for x in entries)

    def check(self, state: Tree) -> None:
        """Check that a state is split as this plan says.

        Raises:
            ValueError: if a unit has another host share. The message names the leaf.
        """
        paths, entries, _ = tree.flatten_with_paths(state, is_box)
        for path, x in zip(paths, entries, strict=True):
            if (
                isinstance(x, Shard | Slot)
                and lookup_spec(x.spec_id).host != lookup_spec(self._expected_spec_id(x)).host
            ):
                actual, expected = _host_text(x.spec_id), _host_text(self._expected_spec_id(x))
                raise ValueError(
                    f"offload: leaf {path!r} of the state has {actual} on the host, and ratio says {expected}: use the "
                    "ratio that the state was made with, or optim.with_offload_ratio(opt_state, params, ratio)"
                )

    def _expected_spec_id(self, x: Shard | Slot) -> int:
        return self._spec_id_in_pieces(with_host_share(x.spec_id, 0))


def _with_share(spec_id: int, share: Fraction) -> int:
    return with_host_share(spec_id, share.numerator, share.denominator) if share else spec_id


def _host_text(spec_id: int) -> str:
    return f"{host_numel(spec_id)} elements ({float(lookup_spec(spec_id).host):.4g} of them)"


def _count_elements(spec_id: int) -> int:
    """Count a unit's elements on all ranks: the count is the same on any mesh."""
    return traced_spec(spec_id).numel * traced_spec(spec_id).split_ranks


def _to_fraction(share: float) -> Fraction:
    """Return a share as the fraction that its decimal digits say: exactly 1/10 for 0.1."""
    return Fraction(repr(float(share)))


def plan_offload(params: Tree, ratio: Ratio, precision: Precision | None = None) -> OffloadPlan:
    """Plan which part of each unit of a tree lies on the host.

    If the ratio is a number, the host holds the last elements: the end of one unit, and all units after it. Their
    gradients are computed first, and the next step needs their parameters last, so the host has the most time.

    Args:
        params: the tree.
        ratio: a share of all elements, or a rule.
        precision: the policy that sets the dtypes of the parameters, if `params` may be wider masters.
    """
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    unit_leaves = _unit_leaves(paths, entries, precision)
    spec_ids = [leaf.spec_id for leaf in unit_leaves if leaf is not None and leaf.has_shard]
    return OffloadPlan(
        structure, tuple(unit_leaves), _host_shares(list(dict.fromkeys(spec_ids)), ratio), first_device(entries)
    )


def offload_plan_like(state: Tree, params: Tree, ratio: Ratio) -> OffloadPlan:
    """Plan by the units of a state, in the order of the parameters, outside a step.

    There the parameters may be full leaves, which do not say the units.
    """
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    order = {path: i for i, path in enumerate(paths)}
    first_paths = {
        with_host_share(x.spec_id, 0): x.spec.paths[0] for x in tree.flatten(state, is_box)[0] if isinstance(x, Shard)
    }
    spec_ids = sorted(
        [spec_id for spec_id, path in first_paths.items() if path in order],
        key=lambda spec_id: order[first_paths[spec_id]],
    )
    if not spec_ids:  # the step shards no state
        return plan_offload(params, ratio)
    return OffloadPlan(structure, (None,) * len(entries), _host_shares(spec_ids, ratio), first_device(entries))


def _unit_leaves(paths: Sequence[str], entries: Sequence[Any], precision: Precision | None) -> list[_UnitLeaf | None]:
    """Return for each entry its unit's spec and its place there; None for one that stays on the device."""
    unit_leaves: list[_UnitLeaf | None] = []
    visited: dict[Any, _UnitLeaf] = {}
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            unit_leaves.append(_UnitLeaf(with_host_share(x.spec_id, 0), 0, True, None))
        elif isinstance(x, Slot):
            unit_leaves.append(_UnitLeaf(with_host_share(x.spec_id, 0), x.index, False, None))
        elif not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim):
            unit_leaves.append(None)  # a 0-d tensor may be a parameter or a number of the optimizer, such as its rate
        elif tree.identity(x) in visited:
            unit_leaves.append(visited[tree.identity(x)]._replace(has_shard=False))
        else:
            unit_leaf = _plain_leaf_unit(path, x, precision)
            unit_leaves.append(unit_leaf)
            visited[tree.identity(x)] = unit_leaf
    return unit_leaves


def _plain_leaf_unit(path: str, x: torch.Tensor, precision: Precision | None) -> _UnitLeaf:
    """Return the place of a plain leaf, which is a unit of its own, sharded over no axis."""
    shape = tuple([int(n) for n in x.shape])
    spec_id = intern_parts(
        unit=path,
        sharded_over=(),
        paths=(path,),
        shapes=(shape,),
        dtype=x.dtype if precision is None else precision.leaf_dtype(path, x),
        reduce_grads="each",
        split=(),
        bound=axis_names(),
    )
    return _UnitLeaf(spec_id, 0, True, shape)


def offload_params(params: Tree, ratio: Ratio, precision: Precision | None) -> Tree:
    """Move the last share of sharded parameters to host memory.

    Raises:
        ValueError: if all parameters are full, as at stages 0 to 2.
    """
    if not any(isinstance(x, Shard) and lookup_spec(x.spec_id).axes for x in tree.flatten(params, is_box)[0]):
        raise ValueError(
            "offload: params=True: no parameter is sharded, and full parameters stay on the device: use stage=3, and "
            "a units= rule that shards some"
        )
    return plan_offload(params, ratio, precision).to_pieces(params, to_host, boxes_only=True)


def _host_shares(spec_ids: Sequence[int], ratio: Ratio) -> dict[int, Fraction]:
    if callable(ratio):
        return {spec_id: _share_by_rule(spec_id, ratio) for spec_id in spec_ids}
    remaining = _to_fraction(ratio) * sum([_count_elements(spec_id) for spec_id in spec_ids])
    shares: dict[int, Fraction] = {}
    for spec_id in spec_ids[::-1]:
        elements = min(remaining, Fraction(_count_elements(spec_id)))
        shares[spec_id] = elements / max(_count_elements(spec_id), 1)
        remaining -= elements
    return {spec_id: shares[spec_id] for spec_id in spec_ids}


def _share_by_rule(spec_id: int, rule: Callable[[str], float]) -> Fraction:
    """Return the share of a unit that lies on the host, from the shares that a rule returns for its leaves.

    The elements of all leaves' shares are summed, and the end of the shard holds as many.
    """
    spec = lookup_spec(spec_id)
    shares = [rule(path) for path in spec.paths]
    for path, share in zip(spec.paths, shares, strict=True):
        if callable(share):
            raise TypeError(f"ratio: the rule returned {share!r} for leaf {path!r}: expected a number from 0 to 1")
        check_ratio(share, f"ratio: the rule's share for leaf {path!r}")
    elements = sum([_to_fraction(share) * size for share, size in zip(shares, spec.sizes, strict=True)], Fraction(0))
    return elements / max(spec.numel, 1)
