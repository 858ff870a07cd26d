"""The items of a stacked list: the one whose leaves a rank holds, and the paths of these leaves in the full list."""

from collections.abc import Mapping
from typing import NamedTuple

from fzero.axes import StackedList
from fzero.sharding._spec import Spec, Split

__all__ = ["find_item", "find_stacked_list", "path_on_rank", "subtree_prefix"]


class _Item(NamedTuple):
    """The position of a leaf in a stacked list.

    Attributes:
        list_path: the path of the list in the tree.
        indices: for each rank along the axis, the index of its item in the full list; None if it holds no item.
        subpath: the path of the leaf within an item; empty if the item is the leaf.
    """

    list_path: str
    indices: tuple[int | None, ...]
    subpath: str

    def path(self, index: int) -> str:
        """Return the path of the leaf in an item of the full list."""
        return ".".join([self.list_path, str(index), *([self.subpath] if self.subpath else [])])


def find_stacked_list(spec: Spec) -> tuple[Split, StackedList] | None:
    """Return the axis along which a unit's leaves are stacked, and the list; None if they are not stacked."""
    return next(((s, s.stacked) for s in spec.split if s.stacked is not None), None)


def subtree_prefix(path: str, own_path: str) -> str | None:
    """Return the path of the subtree in which the leaf at `path` has the path `own_path`; None if there is none.

    Example:
        >>> subtree_prefix("opt_state.mu.blocks.0.w", "blocks.0.w")
        'opt_state.mu.'
    """
    return path.removesuffix(own_path) if path == own_path or path.endswith(f".{own_path}") else None


def find_item(path: str, prefix: str, stacked: StackedList) -> _Item | None:
    """Return the position of a leaf in a stacked list; None if the leaf is not in the list.

    Args:
        path: the path of the leaf.
        prefix: the path of the tree that holds the list.
        stacked: the list.

    Example:
        >>> find_item("mu.blocks.1.w", "mu.", StackedList("blocks", ((0, 2), (1, None)))).indices
        (1, None)
    """
    start = f"{prefix}{stacked.key}."
    if not path.startswith(start):
        return None
    index_text, _, subpath = path.removeprefix(start).partition(".")
    return _Item(start[:-1], stacked.items[int(index_text)], subpath)


def path_on_rank(spec: Spec, index: int, prefix: str, rank_indices: Mapping[str, int]) -> str:
    """Return the path, in the full tree, of the leaf that a rank holds at an index of a unit.

    Args:
        spec: the unit's spec.
        index: the leaf's index in the unit.
        prefix: the path of the tree that holds the unit.
        rank_indices: the rank's index along each axis.
    """
    path, stacks = prefix + spec.paths[index], find_stacked_list(spec)
    item = None if stacks is None else find_item(path, prefix, stacks[1])
    item_index = None if item is None or stacks is None else item.indices[rank_indices[stacks[0].axis]]
    return path if item is None or item_index is None else item.path(item_index)
