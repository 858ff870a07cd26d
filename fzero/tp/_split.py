"""The rule that splits leaves over an axis by their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from fzero.axes.rules import SplitRule
from fzero.axes.scope import where_bound

__all__ = ["named", "split"]

T = TypeVar("T")


@dataclass(frozen=True)
class _ByName:
    dims: tuple[tuple[str, int], ...]
    axis: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        dim = named(path, dict(self.dims))
        return None if dim is None or not where_bound(self.axis) else {self.axis: dim}


def split(dims: Mapping[str, int], axis: str = "tp") -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits leaves over an axis by their names.

    Args:
        dims: the end of a leaf's path -> the dimension that is cut: "up" or "mlp.up" for "blocks.3.mlp.up". The longest
            one counts. Columns are the last dimension (-1, also of a bias), rows and vocabularies the first (0).
        axis: the name of the axis. On a mesh that has none of that name nothing is split.

    Returns:
        A rule `(path, leaf) -> {axis: dimension}`, or None for other leaves.

    Raises:
        TypeError: if `dims` has other keys than names, or other values than dimensions; or `axis` is no name.

    Example:
        >>> import fzero
        >>> from fzero import tp
        >>> rule = tp.split({"tokens": 0, "up": -1, "down": 0})
        >>> fzero.mesh(tp=2).spmd(lambda: [rule(path, torch.ones(4, 4)) for path in ("h.0.up", "h.0.norm")])()
        [{'tp': -1}, None]
    """
    where_bound(axis)
    if not isinstance(dims, Mapping):
        raise TypeError(f"dims={dims!r}: expected a dict from names of leaves to dimensions, such as {{'up': -1}}")
    for name, dim in dims.items():
        if not isinstance(name, str) or not name or not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"dims: {name!r}: {dim!r}, expected a name of leaves and a dimension, such as 'up': -1")
    return _ByName(tuple(dims.items()), axis)


def named(path: str, table: Mapping[str, T]) -> T | None:
    """Return what a table has for the longest end of a path that it names; None if it names none."""
    parts = path.split(".")
    for i in range(len(parts)):
        if (end := ".".join(parts[i:])) in table:
            return table[end]
    return None
