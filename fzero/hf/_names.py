"""Which leaves a tree has, in its own order, and what they are called in a folder of Hugging Face."""

from collections.abc import Callable
from typing import NamedTuple

from fzero.checkpoint._cut import Leaf
from fzero.checkpoint._holdings import Holdings
from fzero.checkpoint._values import is_nothing

__all__ = ["Named", "named_leaves"]


class Named(NamedTuple):
    """A leaf, and what it is called.

    Attributes:
        number: of the leaf in the cut.
        leaf: the leaf.
        paths: all its places in the tree; several if it is tied.
        names: what `name` makes of each.
    """

    number: int
    leaf: Leaf
    paths: tuple[str, ...]
    names: tuple[str, ...]


def named_leaves(what: str, held: Holdings, name: Callable[[str], str]) -> list[Named]:
    """List the leaves of a tree in its order, which no layout changes.

    Raises:
        TypeError: if a leaf is no tensor, or differs by rank, or `name` gives no text. The message names its path.
    """
    cut = held.cut
    for path, x in cut.values.items():
        if not is_nothing(x):
            raise TypeError(
                f"{what} leaf {path!r} is {str(x)[:80]!r}, and a folder of safetensors holds tensors only: "
                "leave it out of the tree"
            )
    for leaf in cut.leaves:
        if leaf.per_rank:
            raise TypeError(
                f"{what} leaf {leaf.path!r} is a PerRank value, and a folder of safetensors has one for all ranks: "
                "make it replicated, such as by fzero.pmean in a step"
            )
    places: dict[int, list[str]] = {}
    for path in held.origins:
        if path in cut.number:
            places.setdefault(cut.number[path], []).append(path)
    return [
        Named(i, cut.leaves[i], tuple(paths), tuple([_name(path, name) for path in paths]))
        for i, paths in places.items()
    ]


def _name(path: str, name: Callable[[str], str]) -> str:
    given = name(path)
    if not isinstance(given, str) or given in ("", "__metadata__"):
        raise TypeError(f"name({path!r}) gave {given!r}: expected the name of a tensor, such as 'lm_head.weight'")
    return given
