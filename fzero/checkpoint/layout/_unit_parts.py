"""The leaves of a unit in a checkpoint.

All ranks hold the same leaves, or each rank its own items of a stacked list.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fzero.sharding import Spec, Split, find_item, find_stacked_list, subtree_prefix

__all__ = ["LeafSource", "UnitPart", "in_tree_order", "list_unit_parts"]


class LeafSource(NamedTuple):
    """The part of a tree that a leaf of a checkpoint comes from.

    Attributes:
        path: the path in the tree. It differs from the leaf's path if the leaf is a row of a stacked leaf.
        list: the path of the stacked list, if the leaf is an item of one.
        item_index: the index of the leaf's item in the full list.
    """

    path: str
    list: str | None = None
    item_index: int = 0


class _Member(NamedTuple):
    """One occurrence of a leaf of a unit.

    Attributes:
        index: the index of the leaf in the unit.
        path: its path in the checkpoint.
        source: the part of the tree that it comes from.
        is_copy: whether the occurrence is an unused copy. `path` is then the path of a leaf of the same shape.
    """

    index: int
    path: str
    source: LeafSource
    is_copy: bool = False


class UnitPart(NamedTuple):
    """The leaves of a unit that some ranks hold; nearly always all ranks hold all leaves.

    Attributes:
        members: the occurrences of the leaves; tied leaves have several.
        shapes: the full shape of each leaf.
        split: the axes along which each leaf is split.
        coordinates: the ranks that hold the part, as coordinates along an axis; empty if all ranks hold it.
    """

    members: list[_Member]
    shapes: tuple[tuple[int, ...], ...]
    split: tuple[Split, ...]
    coordinates: tuple[tuple[str, int], ...] = ()


def list_unit_parts(label: str, spec: Spec, members: Sequence[tuple[str, int]]) -> list[UnitPart]:
    """List the parts of a unit: one that all ranks hold, or each rank's own items of a stacked list.

    Args:
        label: the name of the tree in messages.
        spec: the spec of the unit.
        members: the path of each occurrence of a leaf in the tree, and the leaf's index in the unit. The unit's first
            leaf comes first.

    Raises:
        ValueError: if a leaf of a stacked list does not lie in the list. The message names the first such leaf.
    """
    stack_info = find_stacked_list(spec)
    if stack_info is None:
        return [UnitPart([_Member(i, path, LeafSource(path)) for path, i in members], spec.full_shapes, spec.split)]
    along, stacked = stack_info
    path, index = members[0]
    prefix = subtree_prefix(path, spec.paths[index])
    items = [None if prefix is None else find_item(path, prefix, stacked) for path, _ in members]
    shapes = tuple([shape[1:] for shape in spec.full_shapes])
    splits = [s._replace(dims=tuple([dim - 1 for dim in s.dims])) for s in spec.split if s is not along]
    parts = [UnitPart([], shapes, tuple(splits), ((along.axis, coordinate),)) for coordinate in range(along.size)]
    for (path, index), item in zip(members, items, strict=True):
        if item is None:
            raise ValueError(
                f"{label} leaf {path!r} is the parameter {spec.paths[index]!r} of the list {stacked.key!r}, which is "
                f"stacked by rank: expected a tree that holds this list under the key {stacked.key!r}"
            )
        any_index = next(i for i in item.indices if i is not None)
        for part, own_index in zip(parts, item.indices, strict=True):
            item_index, is_copy = (any_index, True) if own_index is None else (own_index, False)
            if not (is_copy and any(m.index == index for m in part.members)):  # a tied leaf needs one copy only
                source = LeafSource(path, item.list_path, item_index)
                part.members.append(_Member(index, item.path(item_index), source, is_copy))
    return parts


def in_tree_order(sources: Mapping[str, LeafSource], paths: Sequence[str]) -> dict[str, LeafSource]:
    """Sort leaves by their order in the tree, and leaves of a stacked list by their order in the full list.

    Args:
        sources: the source of each leaf, by the leaf's path.
        paths: the paths of the tree, in order.
    """
    position = {path: i for i, path in enumerate(paths)}
    first_positions: dict[str, int] = {}
    for source in sources.values():
        if source.list is not None:
            first_positions[source.list] = min(first_positions.get(source.list, len(paths)), position[source.path])

    def sort_key(item: tuple[str, LeafSource]) -> tuple[int, int, int]:
        source = item[1]
        if source.list is None:
            return position[source.path], 0, 0
        return first_positions[source.list], source.item_index, position[source.path]

    return dict(sorted(sources.items(), key=sort_key))
