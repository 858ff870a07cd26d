"""A rule of units made for one tree: it can print the units of this tree."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.sharding.units._units import default_units
from fzero.tree import Tree, is_box

__all__ = ["NUMEL", "UnitPolicy", "UnitRow", "find_unit_leaves"]


NUMEL = "a number of elements"  # what an int means, in messages


class UnitRow(NamedTuple):
    """A unit in the table of a rule.

    Attributes:
        name: the unit's name.
        elements: the number of elements of its full leaves together.
        leaves: the number of its leaves. Tied leaves are one.
    """

    name: str
    elements: int
    leaves: int


@dataclass(frozen=True)
class UnitPolicy:
    """A rule `(path, leaf) -> name of its unit`, for `fzero.shard(units=)`. `print` shows its table.

    The default rule names leaves that are not in the rule's tree.

    Attributes:
        table: one row for each unit, in the order of the tree.
    """

    table: tuple[UnitRow, ...]
    _names: Mapping[str, str] = field(repr=False)

    def __call__(self, path: str, leaf: torch.Tensor) -> str:
        """Name the unit of a leaf."""
        return self._names[path] if path in self._names else default_units(path, leaf)

    def __str__(self) -> str:
        """Show the table, with the totals in the last line."""
        width = max([len(row.name) for row in self.table] + [4])
        lines = [f"{'unit':<{width}}  {'elements':>15}  {'leaves':>7}"]
        lines += [f"{row.name:<{width}}  {row.elements:>15,}  {row.leaves:>7,}" for row in self.table]
        elements, leaves = sum(row.elements for row in self.table), sum(row.leaves for row in self.table)
        lines += [f"{f'{len(self.table):,} units':<{width}}  {elements:>15,}  {leaves:>7,}"]
        return "\n".join(lines)


class _UnitLeaves(NamedTuple):
    """The leaves of a tree that can be in units.

    Attributes:
        leaves: the leaves by path, in the order of the tree; a tied leaf is listed once.
        ties: for each further path of a tied leaf, its first path.
    """

    leaves: dict[str, Any]
    ties: dict[str, str]

    def make_rule(self, names: Mapping[str, str]) -> UnitPolicy:
        """Make the rule that gives each leaf its name, and a tied leaf the name for its first path."""
        elements: dict[str, list[int]] = {}
        for path, name in names.items():
            elements.setdefault(name, []).append(self.leaves[path].numel())
        table = tuple([UnitRow(name, sum(sizes), len(sizes)) for name, sizes in elements.items()])
        return UnitPolicy(table, {**names, **{path: names[first] for path, first in self.ties.items()}})


def find_unit_leaves(params: Tree) -> _UnitLeaves:
    """Find the leaves of a tree that can be in units: the leaves of floating point.

    Raises:
        TypeError: if the tree has none.
    """
    unit_leaves = _UnitLeaves({}, {})
    first_paths = dict[Any, str]()
    paths, leaves, _ = tree.flatten_with_paths(params, is_box)
    for path, x in zip(paths, leaves, strict=True):
        if not (isinstance(x, torch.Tensor) or is_box(x)) or not x.dtype.is_floating_point:
            continue
        if tree.identity(x) in first_paths:
            unit_leaves.ties[path] = first_paths[tree.identity(x)]
        else:
            first_paths[tree.identity(x)] = path
            unit_leaves.leaves[path] = x
    if not unit_leaves.leaves:
        raise TypeError(
            f"params is {tree.show(params)[:80]}, and holds no tensor of floating point: expected a tree of "
            "parameters, such as dict(module.named_parameters())"
        )
    return unit_leaves
