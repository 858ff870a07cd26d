"""What a checkpoint calls the leaves of a unit: those of all ranks, and those that each has of a stacked list."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fzero.layout.spec import Spec, Split
from fzero.layout.stacked import item_of, prefix_of, stacked_of

__all__ = ["LeafSource", "Member", "UnitPart", "in_order", "parts_of"]


class LeafSource(NamedTuple):
    """Where a leaf of a checkpoint comes from in a tree.

    Attributes:
        path: in the tree: not the leaf's own if it is a row of a stacked leaf.
        list: the path of the stacked list, if it is of one.
        number: of the item, in the whole list, that the leaf is of.
    """

    path: str
    list: str | None = None
    number: int = 0


class Member(NamedTuple):
    """A place of a leaf of a unit.

    Attributes:
        index: of the leaf in the unit.
        path: in the checkpoint.
        origin: in the tree.
        is_copy: whether nobody uses what is there. The path is then that of a leaf of the same shape.
    """

    index: int
    path: str
    origin: LeafSource
    is_copy: bool = False


class UnitPart(NamedTuple):
    """The leaves that some ranks, nearly always all, have of a unit.

    Attributes:
        members: their places; tied leaves have several.
        shapes: by leaf, of all of it.
        split: the axes along which ranks have parts of each.
        at: which ranks, by their place along an axis; all, if it is empty.
    """

    members: list[Member]
    shapes: tuple[tuple[int, ...], ...]
    split: tuple[Split, ...]
    at: tuple[tuple[str, int], ...] = ()


def parts_of(what: str, spec: Spec, members: Sequence[tuple[str, int]]) -> list[UnitPart]:
    """List what ranks have of a unit: all the same leaves, or of a stacked list each those of its own items.

    Args:
        what: what the tree is called in messages.
        spec: of the unit.
        members: the path of each place of a leaf in the tree, and the leaf's index in the unit; the unit's first leaf
            comes first.

    Raises:
        ValueError: if leaves of a stacked list do not lie in it. Names the first.
    """
    stacks = stacked_of(spec)
    if stacks is None:
        return [UnitPart([Member(i, path, LeafSource(path)) for path, i in members], spec.whole_shapes, spec.split)]
    along, stacked = stacks
    path, index = members[0]
    prefix = prefix_of(path, spec.paths[index])
    items = [None if prefix is None else item_of(path, prefix, stacked) for path, _ in members]
    shapes = tuple([shape[1:] for shape in spec.whole_shapes])
    others = [s._replace(dims=tuple([dim - 1 for dim in s.dims])) for s in spec.split if s is not along]
    parts = [UnitPart([], shapes, tuple(others), ((along.axis, place),)) for place in range(along.size)]
    for (path, index), item in zip(members, items, strict=True):
        if item is None:
            raise ValueError(
                f"{what} leaf {path!r} is {spec.paths[index]!r} among the parameters, where the list {stacked.key!r} "
                "is stacked by rank: give a tree that holds this list, under its own key"
            )
        some = next(number for number in item.numbers if number is not None)
        for part, number in zip(parts, item.numbers, strict=True):
            known, is_copy = (some, True) if number is None else (number, False)
            if not (is_copy and any(m.index == index for m in part.members)):  # a copy of a tied leaf has one place
                origin = LeafSource(path, item.list, known)
                part.members.append(Member(index, item.path(known), origin, is_copy))
    return parts


def in_order(origins: Mapping[str, LeafSource], paths: Sequence[str]) -> dict[str, LeafSource]:
    """Put leaves in the order of their tree, and those of a stacked list in the order of the whole list.

    Args:
        origins: by the path of a leaf.
        paths: of the tree, in its order.
    """
    position = {path: i for i, path in enumerate(paths)}
    first: dict[str, int] = {}
    for o in origins.values():
        if o.list is not None:
            first[o.list] = min(first.get(o.list, len(paths)), position[o.path])

    def place(item: tuple[str, LeafSource]) -> tuple[int, int, int]:
        o = item[1]
        return (position[o.path], 0, 0) if o.list is None else (first[o.list], o.number, position[o.path])

    return dict(sorted(origins.items(), key=place))
