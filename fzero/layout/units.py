"""Units: which leaves are gathered together, how a tree is cut into them, and how they are found in a cut tree.

A *unit* is stored flat: its leaves concatenated, padded to a multiple of N and cut in N equal 1-D shards.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes.scope import Axis, Rules, axis_names, bound, joint, lookup, rules_in_scope
from fzero.collectives.invariant import own_part
from fzero.collectives.table import ALONE, apply
from fzero.layout.boxes import Shard, Slot
from fzero.layout.spec import intern_parts, unit_axes
from fzero.tree import is_box

__all__ = ["Cut", "Group", "Unit", "apply_over", "apply_to_unit", "cut", "default_units", "groups", "wanted_axes"]


def default_units(path: str, leaf: torch.Tensor) -> str:
    """Name the unit of a leaf: its repeated block, else its top-level child.

    A repeated block is a numbered child that is itself a subtree: `"blocks.3.attn.w"` is in unit `"blocks.3"`,
    and `"embed.0"`, a leaf in a list of leaves, is in unit `"embed"`.

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


class Unit(NamedTuple):
    """A unit of a tree that is about to be cut: its spec, its distinct leaves, and the position of the first."""

    uid: int
    leaves: list[torch.Tensor]
    position: int


class Cut(NamedTuple):
    """How a tree is cut: at each position of its flattened form a `Slot`, or the leaf if it belongs to no unit."""

    entries: list[Any]
    units: list[Unit]
    structure: Any

    def with_shards(self, shards: Sequence[Shard]) -> Any:
        """Build the cut tree, with the shard of each unit in place of its first slot."""
        entries = list(self.entries)
        for unit, shard in zip(self.units, shards, strict=True):
            entries[unit.position] = shard
        return tree.unflatten(self.structure, entries)


def cut(
    params: Any,
    axes: Sequence[Axis],
    rules: Rules | None = None,
    reduce: str = "each",
    rest: str | None = None,
) -> Cut:
    """Decide how a tree is cut over `axes`, by the rules given, else the running step's, else the default one.

    A unit has one dtype, and one set of axes: a rule's unit of several is cut in several. Leaves that are one tensor
    object are one leaf of the unit of the first. Integer and bool leaves are in none, those that the rule names `None`
    are in the unit `rest`, and what neither is sharded over an axis nor split along one stays as it is.
    """
    rules = rules_in_scope() if rules is None else rules
    paths, leaves, structure = tree.flatten_with_paths(params, is_box)
    members: dict[_Key, list[int]] = {}  # positions
    owner: dict[Any, tuple[_Key, int]] = {}  # identity of a leaf -> its unit, and index there
    seen: set[Any] = set()
    split: dict[int, dict[str, int]] = {}  # position -> axis -> dimension
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor) or tree.identity(leaf) in seen:
            continue
        seen.add(tree.identity(leaf))
        split[position] = _split_of(path, leaf, rules)
        if not leaf.is_floating_point():
            continue
        key = _key_of(path, leaf, split[position], axes, rules, rest)
        if key is not None:
            unit = members.setdefault(key, [])
            owner[tree.identity(leaf)] = (key, len(unit))
            unit.append(position)
    units = {key: _unit(key, axes, paths, leaves, at, split, reduce) for key, at in members.items()}
    places = [owner.get(tree.identity(x)) for x in leaves]
    entries = [x if at is None else Slot(units[at[0]].uid, at[1]) for x, at in zip(leaves, places, strict=True)]
    return Cut(entries, list(units.values()), structure)


class _Key(NamedTuple):
    """What the leaves of a unit share."""

    name: str
    dtype: torch.dtype
    over: tuple[str, ...]
    split: tuple[str, ...]
    later: tuple[str, ...]


def _split_of(path: str, leaf: torch.Tensor, rules: Rules) -> dict[str, int]:
    """Check which axes cut a leaf itself, and along which dimensions, counted from the front."""
    wanted = (rules.split and rules.split(path, leaf)) or {}
    if not isinstance(wanted, dict) or not all(isinstance(dim, int) for dim in wanted.values()):
        raise TypeError(f'split: the rule gave {wanted!r} for leaf {path!r}, expected {{axis: dimension}}: {{"tp": 1}}')
    found: dict[str, int] = {}
    parts: dict[int, int] = {}  # dimension -> in how many parts it is cut
    for name in sorted(wanted):
        dim = wanted[name]
        known = leaf.is_floating_point() and -leaf.ndim <= dim < leaf.ndim
        if known:
            found[name] = dim % leaf.ndim
            parts[found[name]] = parts.get(found[name], 1) * lookup(name).size
        if not known or leaf.shape[dim] % parts[found[name]]:
            n = parts[found[name]] if known else lookup(name).size
            raise ValueError(
                f"split: leaf {path!r} is {tree.show(leaf)}, and cannot be cut in {n} equal parts along dimension "
                f"{dim} over {name!r}"
                + ("; pad the model's dimension, or leave the leaf out" if known else ": it has no such dimension")
            )
    return found


def _key_of(
    path: str, leaf: torch.Tensor, split: dict[str, int], axes: Sequence[Axis], rules: Rules, rest: str | None
) -> _Key | None:
    name = (rules.units or default_units)(path, leaf)
    if name is None:
        name = default_units(path, leaf) if split else rest
    over = wanted_axes(path, leaf, axes, rules, tuple(split))
    # split units are first cut over no axis, and then further: those that will differ are two from the start
    later = wanted_axes(path, leaf, bound(), rules, tuple(split)) if split else ()
    dtype = leaf.dtype if rules.dtype is None else rules.dtype(path, leaf)
    return _Key(name, dtype, over, tuple(split), later) if name is not None and (over or split) else None


def wanted_axes(
    path: str, leaf: torch.Tensor, axes: Sequence[Axis], rules: Rules, split: Sequence[str]
) -> tuple[str, ...]:
    """List those of `axes` that the rules shard a leaf's unit over; never those that split it."""
    wanted = None if rules.over is None else rules.over(path, leaf)
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    for name in wanted or ():
        lookup(name)
    return tuple([a.name for a in axes if a.name not in split and (wanted is None or a.name in wanted)])


def _unit(
    key: _Key, axes: Sequence[Axis], paths: list[str], leaves: list[Any], at: list[int], split: Any, reduce: str
) -> Unit:
    parts = [leaves[i] for i in at]
    for name in key.split:
        parts = [own_part(x, name, dim=split[i][name]) for x, i in zip(parts, at, strict=True)]
    uid = intern_parts(
        key.name,
        tuple([(a.name, a.size) for a in axes if a.name in key.over]),
        tuple([paths[i] for i in at]),
        tuple([tuple([int(d) for d in x.shape]) for x in parts]),
        key.dtype,
        reduce,
        tuple([(name, lookup(name).size, tuple([split[i][name] for i in at])) for name in key.split]),
        axis_names(),
    )
    return Unit(uid, parts, at[0])


class Group(NamedTuple):
    """A unit found in a cut tree: its uid, its `Shard`, and `(position, index in the unit)` of each of its leaves."""

    uid: int
    shard: Shard
    members: list[tuple[int, int]]


def groups(paths: Sequence[str], entries: Sequence[Any]) -> list[Group]:
    """Find the units of a flattened cut tree.

    A tree may hold several trees of one layout, such as the parameters and their moving average: a slot belongs to
    the nearest shard of its unit before it, or to the first.

    Raises:
        ValueError: if a slot's shard is not in the tree, or several trees of one layout alternate. Names the path.
    """
    found: dict[int, list[Group]] = {}
    order: list[Group] = []
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            group = Group(x.uid, x, [(position, 0)])
            found.setdefault(x.uid, []).append(group)
            order.append(group)
    seen: dict[int, int] = {}
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            seen[x.uid] = seen.get(x.uid, 0) + 1
        elif isinstance(x, Slot):
            if x.uid not in found:
                raise ValueError(
                    f"leaf {paths[position]!r} lies in the shard of unit {x.spec.unit!r}, which is not in this tree; "
                    "pass a tree that holds whole units, or cut it finer with units="
                )
            found[x.uid][max(seen.get(x.uid, 0) - 1, 0)].members.append((position, x.index))
    for mine in found.values():
        if len({tuple(sorted([index for _, index in group.members])) for group in mine}) > 1:
            where = [paths[group.members[0][0]] for group in mine]
            raise ValueError(
                f"leaves of {len(mine)} trees of one layout alternate ({mine[0].shard!r} at {where}), so it cannot be "
                "told which leaf lies in which: keep each tree whole, one after the other"
            )
    return order


_NOWHERE = Axis("", 1, ALONE, 0, torch.zeros((), dtype=torch.int64))
_REST = {"reduce_scatter": "psum_scatter", "partition": "own_part", "pad": "own_part_padded"}


def apply_over(name: str, axes: Sequence[Axis], uid: int, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Apply a row of units over one axis after the other: the slowest cuts the unit, the others its pieces."""
    first, *rest = axes or [_NOWHERE]
    if name == "gather":  # the way back
        for a in rest[::-1]:
            xs = apply(a.token, "all_gather", a.meta, (0,), *xs)
        return apply(first.token, name, first.meta, (uid, 0), *xs)
    xs = apply(first.token, name, first.meta, (uid, 0), *xs)
    for a in rest:
        xs = apply(a.token, _REST.get(name, name), a.meta, (0,) if name in _REST else (uid, 0), *xs)
    return tuple(xs)


def apply_to_unit(name: str, uid: int, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Apply a row of the table to a unit's tensors, over the unit's axes."""
    return apply_over(name, joint(unit_axes(uid)), uid, xs)
