"""Units: which leaves are gathered together. A tree is divided by its paths and by the sizes of its subtrees."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import Axis, LayoutRules, Stacked, axis_names, bound, lookup, rules_here
from fzero.collectives import own_part
from fzero.sharding._boxes import Shard, Slot
from fzero.sharding._spec import Split, intern_parts
from fzero.tree import Tree, is_box

__all__ = [
    "MOST",
    "Assignment",
    "CutUnit",
    "Subtree",
    "WholeUnit",
    "assign",
    "cut_units",
    "default_units",
    "map_units",
    "pieces",
    "put",
    "wanted_axes",
]


# Subtrees: a tree is cut into pieces by the sizes of its subtrees, by its leaves' dotted paths alone.


class Subtree(NamedTuple):
    """Leaves that lie together in a tree.

    Attributes:
        name: the path of the subtree that they are, or of the first and the last subtree that were joined.
        paths: of the leaves, in their order.
        numel: their elements.
    """

    name: str
    paths: tuple[str, ...]
    numel: int


def pieces(numels: Mapping[str, int], least: int, most: float = math.inf, around: Iterable[str] = ()) -> list[Subtree]:
    """Cut a tree into its smallest subtrees of at least `least` elements.

    Neighbours that are smaller are joined as long as they have no more than `most` elements together. What is still
    smaller than `least` then joins the piece before it, or else the one after it, if they have no more than `most`.

    Args:
        numels: the elements of each leaf, by its path, in the order of the tree.
        least: elements; at most `most`.
        most: elements; a piece that has more is one leaf.
        around: the paths of all leaves of the tree, if these are not all. A piece is named by
            subtrees that are whole in it.

    Returns:
        The pieces. Each leaf lies in one of them, and no two have one name.
    """
    found = _cut([_SubtreeLeaf(path, tuple(path.split(".")), numel) for path, numel in numels.items()], 0, least, most)
    below = _counts([tuple(path.split(".")) for path in around or numels])
    return [_piece(leaves, below) for leaves in found]


_Keys = tuple[str, ...]


class _SubtreeLeaf(NamedTuple):
    path: str
    keys: _Keys
    numel: int


_Leaves = list[_SubtreeLeaf]


def _cut(leaves: _Leaves, depth: int, least: int, most: float) -> list[_Leaves]:
    """Cut a subtree, whose leaves share `depth` keys."""
    children: dict[str | None, _Leaves] = {}
    for leaf in leaves:
        children.setdefault(leaf.keys[depth] if depth < len(leaf.keys) else None, []).append(leaf)
    sizes = [_numel(child) for child in children.values()]
    if sum(sizes) <= most and max(sizes, default=0) < least:
        return [leaves]
    found: list[_Leaves] = []
    is_open = False  # whether the last piece is of small neighbours, which a further one may join
    for child, numel in zip(children.values(), sizes, strict=True):
        is_small = numel < least
        if is_small and is_open and _numel(found[-1]) + numel <= most:
            found[-1] = found[-1] + child
        else:
            found += [child] if is_small or len(child) == 1 else _cut(child, depth + 1, least, most)
        is_open = is_small
    return _without_rests(found, least, most)


def _without_rests(found: Sequence[_Leaves], least: int, most: float) -> list[_Leaves]:
    """Join what is smaller than `least` to a neighbour, if there is room."""
    joined: list[_Leaves] = []
    for piece in found:
        last = _numel(joined[-1]) if joined else 0
        if joined and min(last, _numel(piece)) < least and last + _numel(piece) <= most:
            joined[-1] = joined[-1] + piece
        else:
            joined.append(piece)
    return joined


def _numel(leaves: _Leaves) -> int:
    return sum(leaf.numel for leaf in leaves)


def _counts(leaves: Iterable[_Keys]) -> Counter[_Keys]:
    """Count the leaves below each node."""
    return Counter([keys[:depth] for keys in leaves for depth in range(len(keys) + 1)])


def _piece(leaves: _Leaves, below: Mapping[_Keys, int]) -> Subtree:
    """Name a piece by its first and its last subtree, of which it has all leaves."""
    inside = _counts([leaf.keys for leaf in leaves])

    def subtree(leaf: _SubtreeLeaf) -> str:
        whole = (leaf.keys[:depth] for depth in range(len(leaf.keys) + 1))
        return ".".join(next((keys for keys in whole if inside[keys] == below[keys]), leaf.keys)) or "params"

    first, last = subtree(leaves[0]), subtree(leaves[-1])
    name = first if first == last else f"{first} to {last}"
    return Subtree(name, tuple([leaf.path for leaf in leaves]), _numel(leaves))


# Units: which leaves are gathered together, which unit each leaf belongs to, and how units are found in a cut tree.
#
# A *unit* is stored flat: its leaves concatenated, padded to a multiple of N and cut in N equal 1-D shards.


MOST = 2**31 - 1  # elements of a unit of the default rule: what an int32 counts


def default_units(path: str, leaf: torch.Tensor) -> str:
    """Name the unit of a leaf: its repeated block, else its top-level child.

    A repeated block is a numbered child that is itself a subtree: `"blocks.3.attn.w"` is in unit `"blocks.3"`,
    and `"embed.0"`, a leaf in a list of leaves, is in unit `"embed"`. What has more elements than an int32 counts is
    cut further, into subtrees, when a tree is partitioned. `fzero.sharding.by_size` sets another limit.

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


class WholeUnit(NamedTuple):
    """A unit of a tree that is about to be cut: its spec, its distinct leaves, and the position of the first."""

    uid: int
    leaves: list[torch.Tensor]
    position: int


class Assignment(NamedTuple):
    """The units of a tree: at each position of its flattened form a `Slot`, or the leaf if it belongs to no unit."""

    entries: list[Any]
    units: list[WholeUnit]
    structure: Any

    def with_shards(self, shards: Sequence[Shard]) -> Tree:
        """Build the cut tree, with the shard of each unit in place of its first slot."""
        entries = list(self.entries)
        for unit, shard in zip(self.units, shards, strict=True):
            entries[unit.position] = shard
        return tree.unflatten(self.structure, entries)


def assign(
    params: Tree,
    axes: Sequence[Axis],
    rules: LayoutRules | None = None,
    reduced: str = "each",
    rest: str | None = None,
) -> Assignment:
    """Assign the leaves of a tree to units that are to be sharded over `axes`.

    The rules are those given, else the running step's, else the default ones. A unit has one dtype and one set of axes:
    a rule's unit that has several becomes several. Leaves that are one tensor object are one leaf of the first one's
    unit. Integer and bool leaves belong to no unit. Leaves that the rule names `None` belong to the unit `rest`. A leaf
    that is neither sharded over an axis nor split along one stays as it is.
    """
    rules = rules_here() if rules is None else rules
    paths, leaves, structure = tree.flatten_with_paths(params, is_box)
    members: dict[_Key, list[int]] = {}  # positions
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
            members.setdefault(key, []).append(position)
    if rules.units is None:
        members = {k: at for key, at in members.items() for k, at in _capped(key, at, paths, leaves, split)}
    # identity of a leaf -> its unit, and index there
    owner = {tree.identity(leaves[i]): (key, index) for key, at in members.items() for index, i in enumerate(at)}
    stacks = rules.stacked(paths, {a.name: a.size for a in bound()})
    units = {key: _unit(key, axes, paths, leaves, at, split, stacks, reduced) for key, at in members.items()}
    places = [owner.get(tree.identity(x)) for x in leaves]
    entries = [x if at is None else Slot(units[at[0]].uid, at[1]) for x, at in zip(leaves, places, strict=True)]
    return Assignment(entries, list(units.values()), structure)


class _Key(NamedTuple):
    """What the leaves of a unit share."""

    name: str
    dtype: torch.dtype
    over: tuple[str, ...]
    split: tuple[str, ...]
    later: tuple[str, ...]


def _capped(
    key: _Key, at: list[int], paths: list[str], leaves: list[Any], split: Mapping[int, dict[str, int]]
) -> list[tuple[_Key, list[int]]]:
    """Cut the default rule's unit into subtrees of at most `MOST` elements, as this rank has them, if it has more."""
    parts = {i: leaves[i].numel() // math.prod([lookup(name).size for name in split[i]]) for i in at}
    if sum(parts.values()) <= MOST or len(at) == 1:
        return [(key, at)]
    found = pieces({paths[i]: parts[i] for i in at}, MOST // 2, MOST)
    of = {path: piece.name for piece in found for path in piece.paths}
    return [(key._replace(name=piece.name), [i for i in at if of[paths[i]] == piece.name]) for piece in found]


def _split_of(path: str, leaf: torch.Tensor, rules: LayoutRules) -> dict[str, int]:
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
    path: str, leaf: torch.Tensor, split: dict[str, int], axes: Sequence[Axis], rules: LayoutRules, rest: str | None
) -> _Key | None:
    name = (rules.units or default_units)(path, leaf)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"units: the rule gave {name!r} for leaf {path!r}, expected the name of a unit or None")
    if name is None:
        name = default_units(path, leaf) if split else rest
    over = wanted_axes(path, leaf, axes, rules, tuple(split))
    # split units are first cut over no axis, and then further: those that will differ are two from the start
    later = wanted_axes(path, leaf, bound(), rules, tuple(split)) if split else ()
    dtype = leaf.dtype if rules.dtype is None else rules.dtype(path, leaf)
    return _Key(name, dtype, over, tuple(split), later) if name is not None and (over or split) else None


def wanted_axes(
    path: str, leaf: torch.Tensor, axes: Sequence[Axis], rules: LayoutRules, split: Sequence[str]
) -> tuple[str, ...]:
    """List those of `axes` that the rules shard a leaf's unit over; never those that split it."""
    wanted = None if rules.over is None else rules.over(path, leaf)
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    if wanted is not None and not isinstance(wanted, tuple | list | set | frozenset):
        raise TypeError(f"over: the rule gave {wanted!r} for leaf {path!r}, expected names of axes")
    for name in wanted or ():
        lookup(name)
        if axes and name not in [a.name for a in axes]:
            raise ValueError(
                f"over: leaf {path!r} is to be sharded over {name!r}, which is none of the axes "
                f"{tuple(a.name for a in axes)} that trees are cut over; name one of these, or add {name!r} to axis="
            )
    return tuple([a.name for a in axes if a.name not in split and (wanted is None or a.name in wanted)])


def _unit(
    key: _Key,
    axes: Sequence[Axis],
    paths: list[str],
    leaves: list[Any],
    at: list[int],
    split: Any,
    stacks: Mapping[str, Stacked],
    reduced: str,
) -> WholeUnit:
    parts = [leaves[i] for i in at]
    for name in key.split:
        parts = [own_part(x, name, dim=split[i][name]) for x, i in zip(parts, at, strict=True)]
    uid = intern_parts(
        key.name,
        tuple([(a.name, a.size) for a in axes if a.name in key.over]),
        tuple([paths[i] for i in at]),
        tuple([tuple([int(d) for d in x.shape]) for x in parts]),
        key.dtype,
        reduced,
        tuple(
            [
                Split(name, lookup(name).size, tuple([split[i][name] for i in at]), stacks.get(name))
                for name in key.split
            ]
        ),
        axis_names(),
    )
    return WholeUnit(uid, parts, at[0])


# ---------------------------------------------------------------- in a cut tree


class CutUnit(NamedTuple):
    """A unit found in a cut tree.

    Attributes:
        uid: of its spec.
        shard: its box.
        members: `(position in the flattened tree, index in the unit)` of each of its leaves, the shard's own first.
    """

    uid: int
    shard: Shard
    members: list[tuple[int, int]]


def put(entries: list[Any], members: Sequence[tuple[int, int]], made: Shard | Sequence[Any]) -> None:
    """Put at a unit's positions in a flattened tree a box of another shard, or of its leaves each its own."""
    for position, index in members:
        entries[position] = Slot(made.uid, index) if isinstance(made, Shard) else made[index]
    if isinstance(made, Shard):
        entries[members[0][0]] = made


def map_units(f: Callable[[CutUnit], Shard | Sequence[Any]], values: Tree) -> Tree:
    """Replace each unit of a cut tree by what `f` makes of it: a box of another shard, or the unit's leaves.

    Plain leaves stay as they are.
    """
    paths, entries, structure = tree.flatten_with_paths(values, is_box)
    for unit in cut_units(paths, entries):
        put(entries, unit.members, f(unit))
    return tree.unflatten(structure, entries)


def cut_units(paths: Sequence[str], entries: Sequence[Any]) -> list[CutUnit]:
    """Find the units of a flattened cut tree.

    A tree may hold several trees of one layout, such as the parameters and their moving average. Then a slot belongs to
    the nearest shard of its unit before it, or to the first.

    Raises:
        ValueError: if a slot's shard is not in the tree, or several trees of one layout alternate. Names the path.
    """
    found: dict[int, list[CutUnit]] = {}
    order: list[CutUnit] = []
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            unit = CutUnit(x.uid, x, [(position, 0)])
            found.setdefault(x.uid, []).append(unit)
            order.append(unit)
    seen: dict[int, int] = {}
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            seen[x.uid] = seen.get(x.uid, 0) + 1
        elif isinstance(x, Slot):
            if x.uid not in found:
                raise ValueError(
                    f"leaf {paths[position]!r} lies in the shard of unit {x.spec.unit!r}, which is not in this tree; "
                    "pass a tree that holds whole units, a tied leaf's first place among them, or cut it finer with "
                    "units="
                )
            found[x.uid][max(seen.get(x.uid, 0) - 1, 0)].members.append((position, x.index))
    for mine in found.values():
        if len({tuple(sorted([index for _, index in unit.members])) for unit in mine}) > 1:
            where = [paths[unit.members[0][0]] for unit in mine]
            raise ValueError(
                f"leaves of {len(mine)} trees of one layout alternate ({mine[0].shard!r} at {where}), so it cannot be "
                "told which leaf lies in which: keep each tree whole, one after the other"
            )
    return order
