"""Units: which unit each leaf belongs to, and how units are found in a sharded tree.

A *unit* is stored flat: its leaves are concatenated, padded to a multiple of N, and divided into N equal 1-D shards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._arguments import is_int
from fzero._tracebacks import api_boundary
from fzero.axes import Axis, LayoutRules, StackedList, axis_names, bound_axes, bound_axis, current_rules
from fzero.collectives import own_part
from fzero.sharding._boxes import Shard, Slot
from fzero.sharding._spec import ReduceGrads, Split, intern_parts
from fzero.sharding.units._subtrees import divide_tree
from fzero.tree import Tree, is_box

__all__ = [
    "MAX_UNIT_NUMEL",
    "ShardedUnit",
    "assign_units",
    "default_units",
    "map_units",
    "replace_unit",
    "shard_axes",
    "sharded_units",
]


MAX_UNIT_NUMEL = 2**31 - 1  # the most elements of a unit of the default rule: an int32 can count them


@api_boundary
def default_units(path: str, leaf: torch.Tensor) -> str:
    """Name the unit of a leaf: its repeated block, else its top-level child.

    A repeated block is a numbered child that is itself a subtree: `"blocks.3.attn.w"` is in unit `"blocks.3"`,
    and `"embed.0"`, a leaf in a list of leaves, is in unit `"embed"`. If a unit has more elements than an int32 can
    count, `partition` divides it into subtrees. `fzero.sharding.by_size` sets another limit.

    Example:
        >>> x = torch.zeros(2)
        >>> [default_units(p, x) for p in ("h.0.attn.w", "h.0.mlp.w", "ln_f.w", "wte")]
        ['h.0', 'h.0', 'ln_f', 'wte']
    """
    keys = path.split(".")
    for i, key in enumerate(keys[:-1]):
        if key.isdigit():
            return ".".join(keys[: i + 1])
    return keys[0] or "params"  # a tree that is one tensor has an empty path


class _FullUnit(NamedTuple):
    """A unit of a tree that is about to be sharded: its spec, its distinct leaves, and the position of the first."""

    spec_id: int
    leaves: list[torch.Tensor]
    position: int


class _UnitAssignment(NamedTuple):
    """The units of a tree. Each entry of the flattened tree is a `Slot`, or the leaf itself if it is in no unit."""

    entries: list[Any]
    units: list[_FullUnit]
    structure: Any

    def with_shards(self, shards: Sequence[Shard]) -> Tree:
        """Build the sharded tree: the shard of each unit replaces the unit's first slot."""
        entries = list(self.entries)
        for unit, shard in zip(self.units, shards, strict=True):
            entries[unit.position] = shard
        return tree.unflatten(self.structure, entries)


def assign_units(
    params: Tree,
    axes: Sequence[Axis],
    rules: LayoutRules | None = None,
    reduce_grads: ReduceGrads = "each",
    rest: str | None = None,
) -> _UnitAssignment:
    """Assign the leaves of a tree to units that will be sharded over `axes`.

    Without `rules`, the running step's rules apply, or else the default rules. Leaves of one name that
    differ in dtype or axes form separate units. Tied leaves, one tensor object with several paths, are one leaf of the
    unit of the first path. Integer and bool leaves belong to no unit.
    Leaves that the rule names `None` belong to the unit `rest`. A leaf that is neither sharded nor split over an axis
    stays as it is.
    """
    rules = current_rules() if rules is None else rules
    paths, leaves, structure = tree.flatten_with_paths(params, is_box)
    members: dict[_UnitKey, list[int]] = {}  # positions
    visited: set[Any] = set()
    split: dict[int, dict[str, int]] = {}  # position -> axis -> dimension
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor) or tree.identity(leaf) in visited:
            continue
        visited.add(tree.identity(leaf))
        split[position] = _resolve_split(path, leaf, rules)
        if not leaf.is_floating_point():
            continue
        key = _make_unit_key(path, leaf, split=split[position], axes=axes, rules=rules, rest=rest)
        if key is not None:
            members.setdefault(key, []).append(position)
    if rules.units is None:
        members = {
            k: part
            for key, positions in members.items()
            for k, part in _divide_large(key, positions, paths, leaves, split)
        }
    # identity of a leaf -> its unit, and index there
    unit_of_leaf = {
        tree.identity(leaves[i]): (key, index)
        for key, positions in members.items()
        for index, i in enumerate(positions)
    }
    stacks = rules.stacked(paths, {a.name: a.size for a in bound_axes()})
    units = {
        key: _make_unit(
            key, axes, paths, leaves, positions=positions, split=split, stacks=stacks, reduce_grads=reduce_grads
        )
        for key, positions in members.items()
    }
    keys = [unit_of_leaf.get(tree.identity(x)) for x in leaves]
    entries = [x if p is None else Slot(units[p[0]].spec_id, p[1]) for x, p in zip(leaves, keys, strict=True)]
    return _UnitAssignment(entries, list(units.values()), structure)


class _UnitKey(NamedTuple):
    """The properties that all leaves of a unit share."""

    name: str
    dtype: torch.dtype
    over: tuple[str, ...]
    split: tuple[str, ...]
    later_axes: tuple[str, ...]


def _divide_large(
    key: _UnitKey, positions: list[int], paths: list[str], leaves: list[Any], split: Mapping[int, dict[str, int]]
) -> list[tuple[_UnitKey, list[int]]]:
    """Divide a unit of the default rule into subtrees if this rank's part has more than `MAX_UNIT_NUMEL` elements."""
    parts = {i: leaves[i].numel() // math.prod([bound_axis(name).size for name in split[i]]) for i in positions}
    if sum(parts.values()) <= MAX_UNIT_NUMEL or len(positions) == 1:
        return [(key, positions)]
    subtrees = divide_tree({paths[i]: parts[i] for i in positions}, MAX_UNIT_NUMEL // 2, MAX_UNIT_NUMEL)
    unit_of = {path: subtree.name for subtree in subtrees for path in subtree.paths}
    return [
        (key._replace(name=subtree.name), [i for i in positions if unit_of[paths[i]] == subtree.name])
        for subtree in subtrees
    ]


def _resolve_split(path: str, leaf: torch.Tensor, rules: LayoutRules) -> dict[str, int]:
    """Return the axes that split a leaf, with the dimension of each, counted from the front, and check both."""
    dims = (rules.split and rules.split(path, leaf)) or {}
    if not isinstance(dims, dict) or not all(is_int(dim) for dim in dims.values()):
        raise TypeError(f'split: the rule gave {dims!r} for leaf {path!r}, expected {{axis: dimension}}: {{"tp": 1}}')
    source = f"split: the rule gave {dims!r} for leaf {path!r}"
    split: dict[str, int] = {}
    parts: dict[int, int] = {}  # dimension -> number of its parts
    for name in sorted(dims):
        dim = dims[name]
        is_valid = leaf.is_floating_point() and -leaf.ndim <= dim < leaf.ndim
        if is_valid:
            split[name] = dim % leaf.ndim
            parts[split[name]] = parts.get(split[name], 1) * bound_axis(name, source).size
        if not is_valid or leaf.shape[dim] % parts[split[name]]:
            n = parts[split[name]] if is_valid else bound_axis(name, source).size
            raise ValueError(
                f"split: leaf {path!r} is {tree.show(leaf)}, and cannot be split in {n} equal parts along dimension "
                f"{dim} over {name!r}"
                + ("; pad the model's dimension, or leave the leaf out" if is_valid else ": it has no such dimension")
            )
    return split


def _make_unit_key(
    path: str, leaf: torch.Tensor, split: dict[str, int], axes: Sequence[Axis], rules: LayoutRules, rest: str | None
) -> _UnitKey | None:
    """Return what the leaves of one unit have in common, for one leaf; None if the leaf is in no unit."""
    name = (rules.units or default_units)(path, leaf)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"units: the rule gave {name!r} for leaf {path!r}, expected the name of a unit or None")
    if name is None:
        name = default_units(path, leaf) if split else rest
    over = shard_axes(path, leaf, axes, rules, tuple(split))
    # A split unit is at first sharded over no axis, and later over some. Leaves whose later axes differ need two units.
    later_axes = shard_axes(path, leaf, bound_axes(), rules, tuple(split)) if split else ()
    dtype = leaf.dtype if rules.dtype is None else rules.dtype(path, leaf)
    return (
        _UnitKey(name, dtype=dtype, over=over, split=tuple(split), later_axes=later_axes)
        if name is not None and (over or split)
        else None
    )


def shard_axes(
    path: str, leaf: torch.Tensor, axes: Sequence[Axis], rules: LayoutRules, split: Sequence[str]
) -> tuple[str, ...]:
    """List the axes, among `axes`, over which the rules shard a leaf's unit; axes that split the leaf are left out."""
    over = None if rules.over is None else rules.over(path, leaf)
    over = (over,) if isinstance(over, str) else over
    if over is not None and not isinstance(over, tuple | list | set | frozenset):
        raise TypeError(f"over: the rule gave {over!r} for leaf {path!r}, expected names of axes")
    for name in over or ():
        bound_axis(name, f"over: the rule gave {over!r} for leaf {path!r}")
        if axes and name not in [a.name for a in axes]:
            raise ValueError(
                f"over: leaf {path!r} is to be sharded over {name!r}, which is none of the axes "
                f"{tuple(a.name for a in axes)} that shard trees; name one of these, or add {name!r} to axis="
            )
    return tuple([a.name for a in axes if a.name not in split and (over is None or a.name in over)])


def _make_unit(
    key: _UnitKey,
    axes: Sequence[Axis],
    paths: list[str],
    leaves: list[Any],
    positions: list[int],
    split: Any,
    stacks: Mapping[str, StackedList],
    reduce_grads: ReduceGrads,
) -> _FullUnit:
    """Make the unit of the leaves at some positions, of which each split one is reduced to this rank's part."""
    parts = [leaves[i] for i in positions]
    for name in key.split:
        parts = [own_part(x, name, dim=split[i][name]) for x, i in zip(parts, positions, strict=True)]
    spec_id = intern_parts(
        unit=key.name,
        sharded_over=tuple([(a.name, a.size) for a in axes if a.name in key.over]),
        paths=tuple([paths[i] for i in positions]),
        shapes=tuple([tuple([int(d) for d in x.shape]) for x in parts]),
        dtype=key.dtype,
        reduce_grads=reduce_grads,
        split=tuple(
            [
                Split(name, bound_axis(name).size, tuple([split[i][name] for i in positions]), stacks.get(name))
                for name in key.split
            ]
        ),
        bound=axis_names(),
    )
    return _FullUnit(spec_id, parts, positions[0])


class ShardedUnit(NamedTuple):
    """A unit of a sharded tree.

    Attributes:
        spec_id: the id of its spec.
        shard: its box.
        members: `(position in the flattened tree, index in the unit)` of each leaf. The first is the shard's.
    """

    spec_id: int
    shard: Shard
    members: list[tuple[int, int]]


def replace_unit(entries: list[Any], members: Sequence[tuple[int, int]], result: Shard | Sequence[Any]) -> None:
    """Replace a unit in a flattened tree by another shard, or by its leaves, each at its position."""
    for position, index in members:
        entries[position] = Slot(result.spec_id, index) if isinstance(result, Shard) else result[index]
    if isinstance(result, Shard):
        entries[members[0][0]] = result


def map_units(f: Callable[[ShardedUnit], Shard | Sequence[Any]], values: Tree) -> Tree:
    """Replace each unit of a sharded tree by the result of `f`: another shard, or the unit's leaves.

    Plain leaves stay as they are.
    """
    paths, entries, structure = tree.flatten_with_paths(values, is_box)
    for unit in sharded_units(paths, entries):
        replace_unit(entries, unit.members, f(unit))
    return tree.unflatten(structure, entries)


def sharded_units(paths: Sequence[str], entries: Sequence[Any]) -> list[ShardedUnit]:
    """Find the units of a flattened sharded tree.

    A tree may hold several trees of one layout, such as the parameters and their moving average. Then a slot belongs to
    the last shard of its unit before the slot, or else to the first shard of its unit.

    Raises:
        ValueError: if a slot's shard is not in the tree, or several trees of one layout alternate. The message names
            the leaves.
    """
    by_spec_id: dict[int, list[ShardedUnit]] = {}
    units: list[ShardedUnit] = []
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            unit = ShardedUnit(x.spec_id, x, [(position, 0)])
            by_spec_id.setdefault(x.spec_id, []).append(unit)
            units.append(unit)
    counts: dict[int, int] = {}  # spec_id -> number of its shards so far
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            counts[x.spec_id] = counts.get(x.spec_id, 0) + 1
        elif isinstance(x, Slot):
            if x.spec_id not in by_spec_id:
                raise ValueError(
                    f"leaf {paths[position]!r} lies in the shard of unit {x.spec.unit!r}, which is not in this tree; "
                    "pass a tree that holds whole units, including the first path of a tied leaf, or make smaller "
                    "units with units="
                )
            by_spec_id[x.spec_id][max(counts.get(x.spec_id, 0) - 1, 0)].members.append((position, x.index))
    for slots in by_spec_id.values():
        if len({tuple(sorted([index for _, index in unit.members])) for unit in slots}) > 1:
            shard_paths = [paths[unit.members[0][0]] for unit in slots]
            raise ValueError(
                f"leaves of {len(slots)} trees of one layout alternate ({slots[0].shard!r} at {shard_paths}), so the "
                "shard of a leaf cannot be determined: keep each tree together, one after the other"
            )
    return units
