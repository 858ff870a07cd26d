"""Subtrees: divide a tree into subtrees of similar size, by the dotted paths and the sizes of its leaves alone."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["divide_tree"]


class _Subtree(NamedTuple):
    """A subtree, or neighbouring subtrees that are one unit.

    Attributes:
        name: the path of the subtree; for neighbours, the paths of the first and the last.
        paths: the paths of its leaves, in the order of the tree.
        numel: the number of elements of its leaves.
    """

    name: str
    paths: tuple[str, ...]
    numel: int


def divide_tree(
    numels: Mapping[str, int], min_numel: int, max_numel: float = math.inf, all_paths: Iterable[str] = ()
) -> list[_Subtree]:
    """Divide a tree into its smallest subtrees of at least `min_numel` elements.

    Smaller neighbours are joined while they have at most `max_numel` elements together. A subtree that is still smaller
    than `min_numel` then joins the one before it, or else the one after it, if both have at most `max_numel` elements
    together.

    Args:
        numels: the number of elements of each leaf, by path, in the order of the tree.
        min_numel: the smallest number of elements of a subtree; at most `max_numel`.
        max_numel: the largest number of elements of a subtree. A larger one is a single leaf.
        all_paths: the paths of all leaves of the tree, if `numels` has only some of them. A result is named by subtrees
            that it contains completely.

    Returns:
        The subtrees. Each leaf lies in exactly one, and their names differ.
    """
    groups = _divide_subtree(
        [_SubtreeLeaf(path, tuple(path.split(".")), numel) for path, numel in numels.items()], 0, min_numel, max_numel
    )
    below = _count_leaves([tuple(path.split(".")) for path in all_paths or numels])
    return [_name_subtree(leaves, below) for leaves in groups]


_Keys = tuple[str, ...]


class _SubtreeLeaf(NamedTuple):
    path: str
    keys: _Keys
    numel: int


_Leaves = list[_SubtreeLeaf]


def _divide_subtree(leaves: _Leaves, depth: int, min_numel: int, max_numel: float) -> list[_Leaves]:
    """Divide a subtree, whose leaves share their first `depth` keys."""
    children: dict[str | None, _Leaves] = {}
    for leaf in leaves:
        children.setdefault(leaf.keys[depth] if depth < len(leaf.keys) else None, []).append(leaf)
    sizes = [_numel_of(child) for child in children.values()]
    if sum(sizes) <= max_numel and max(sizes, default=0) < min_numel:
        return [leaves]
    subtrees: list[_Leaves] = []
    is_open = False  # whether the last subtree consists of small neighbours, which the next child may join
    for child, numel in zip(children.values(), sizes, strict=True):
        is_small = numel < min_numel
        if is_small and is_open and _numel_of(subtrees[-1]) + numel <= max_numel:
            subtrees[-1] = subtrees[-1] + child
        else:
            subtrees += (
                [child] if is_small or len(child) == 1 else _divide_subtree(child, depth + 1, min_numel, max_numel)
            )
        is_open = is_small
    return _join_small(subtrees, min_numel, max_numel)


def _join_small(subtrees: Sequence[_Leaves], min_numel: int, max_numel: float) -> list[_Leaves]:
    """Join each subtree smaller than `min_numel` to a neighbour, if both together have at most `max_numel`."""
    joined: list[_Leaves] = []
    for subtree in subtrees:
        last = _numel_of(joined[-1]) if joined else 0
        if joined and min(last, _numel_of(subtree)) < min_numel and last + _numel_of(subtree) <= max_numel:
            joined[-1] = joined[-1] + subtree
        else:
            joined.append(subtree)
    return joined


def _numel_of(leaves: _Leaves) -> int:
    return sum(leaf.numel for leaf in leaves)


def _count_leaves(leaves: Iterable[_Keys]) -> Counter[_Keys]:
    """Count the leaves below each node."""
    return Counter([keys[:depth] for keys in leaves for depth in range(len(keys) + 1)])


def _name_subtree(leaves: _Leaves, below: Mapping[_Keys, int]) -> _Subtree:
    """Name a subtree by the first and the last subtree that it contains completely."""
    inside = _count_leaves([leaf.keys for leaf in leaves])

    def leaf_name(leaf: _SubtreeLeaf) -> str:
        prefixes = (leaf.keys[:depth] for depth in range(len(leaf.keys) + 1))
        return ".".join(next((keys for keys in prefixes if inside[keys] == below[keys]), leaf.keys)) or "params"

    first, last = leaf_name(leaves[0]), leaf_name(leaves[-1])
    name = first if first == last else f"{first} to {last}"
    return _Subtree(name, tuple([leaf.path for leaf in leaves]), _numel_of(leaves))
