"""The rule that splits leaves over an axis by their names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fzero._arguments import is_int
from fzero._tracebacks import api_boundary
from fzero.axes import SplitRule, axis_if_bound, axis_names

__all__ = ["T", "match_suffix", "split_rule"]


T = TypeVar("T")


@dataclass(frozen=True)
class _SplitByName:
    dims: tuple[tuple[str, int], ...]
    axis: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        dim = match_suffix(path, dict(self.dims))
        return None if dim is None or self.axis not in axis_names() else {self.axis: dim}

    def unused_names(self, paths: Sequence[str]) -> list[str]:
        """List the names that end no path."""
        return [name for name, _ in self.dims if not any(match_suffix(path, {name: True}) for path in paths)]


@api_boundary
def split_rule(dims: Mapping[str, int], axis: str = "tp") -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits leaves over an axis by their names.

    Args:
        dims: the end of a leaf's path -> the dimension to split: "up" or "mlp.up" for "blocks.3.mlp.up". The longest
            match counts. Columns are the last dimension (-1, also of a bias); rows and vocabularies are the first (0).
        axis: the name of the axis. On a mesh without an axis of this name, nothing is split.

    Returns:
        A rule `(path, leaf) -> {axis: dimension}`, or None for other leaves. On a mesh with the axis `step.init`
        refuses a name that no parameter has, since a leaf that is not split makes wrong sums.

    Raises:
        TypeError: if `dims` is not a dict from names to dimensions, or `axis` is not a name.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> rule = tp.split_rule({"tokens": 0, "up": -1, "down": 0})
        >>> fzero.mesh(tp=2).spmd(lambda: [rule(path, torch.ones(4, 4)) for path in ("h.0.up", "h.0.norm")])()
        [{'tp': -1}, None]
    """
    axis_if_bound(axis)
    if not isinstance(dims, Mapping):
        raise TypeError(f"dims={dims!r}: expected a dict from names of leaves to dimensions, such as {{'up': -1}}")
    for name, dim in dims.items():
        if not isinstance(name, str) or not name or not is_int(dim):
            raise TypeError(f"dims: {name!r}: {dim!r}, expected a name of leaves and a dimension, such as 'up': -1")
    return _SplitByName(tuple(dims.items()), axis)


def match_suffix(path: str, table: Mapping[str, T]) -> T | None:
    """Return the value of the longest end of a path that is a key of the table; None if no end is."""
    parts = path.split(".")
    for i in range(len(parts)):
        if (end := ".".join(parts[i:])) in table:
            return table[end]
    return None
