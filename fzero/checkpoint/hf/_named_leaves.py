"""The leaves of a tree, in its own order, and their names in a folder of Hugging Face."""

from collections.abc import Callable
from typing import NamedTuple

from fzero._arguments import check_callable
from fzero.checkpoint.layout import Leaf, LocalTree, is_empty

__all__ = ["NamedLeaf", "named_leaves"]


class NamedLeaf(NamedTuple):
    """A leaf and its names in the folder.

    Attributes:
        index: the index of the leaf in the sharded tree.
        leaf: the leaf.
        paths: all paths of the leaf in the tree; a tied leaf has several.
        names: the name of each path.
    """

    index: int
    leaf: Leaf
    paths: tuple[str, ...]
    names: tuple[str, ...]


def named_leaves(label: str, local: LocalTree, name: Callable[[str], str]) -> list[NamedLeaf]:
    """List the leaves of a tree in its own order, which does not depend on the layout.

    Raises:
        TypeError: if a leaf is not a tensor, a leaf differs by rank, or `name` returns no string. The message names
            the leaf's path.
    """
    check_callable("name", name, "a function from a leaf's path to its name in the folder")
    layout = local.layout
    for path, x in layout.values.items():
        if not is_empty(x):
            raise TypeError(
                f"{label} leaf {path!r} is {str(x)[:80]!r}, but a folder of safetensors holds tensors only: "
                "leave it out of the tree"
            )
    for leaf in layout.leaves:
        if leaf.per_rank:
            raise TypeError(
                f"{label} leaf {leaf.path!r} is a PerRank value, but a folder of safetensors has one for all ranks: "
                "make it replicated, such as by fzero.collectives.pmean in a step"
            )
    paths_of_leaf: dict[int, list[str]] = {}
    for path in local.sources:
        if path in layout.leaf_index:
            paths_of_leaf.setdefault(layout.leaf_index[path], []).append(path)
    return [
        NamedLeaf(i, layout.leaves[i], tuple(paths), tuple([_tensor_name(path, name) for path in paths]))
        for i, paths in paths_of_leaf.items()
    ]


def _tensor_name(path: str, name: Callable[[str], str]) -> str:
    result = name(path)
    if not isinstance(result, str) or result in ("", "__metadata__"):
        raise TypeError(f"name({path!r}) returned {result!r}: expected a tensor's name, such as 'lm_head.weight'")
    return result
