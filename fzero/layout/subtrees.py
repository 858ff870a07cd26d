"""Subtrees: a tree is cut into pieces by the sizes of its subtrees, by its leaves' dotted paths alone."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Subtree", "pieces"]


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
