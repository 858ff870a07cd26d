"""A rule of units that was made of one tree, and that prints what it makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.layout.units import default_units
from fzero.tree import Tree, is_box

__all__ = ["UnitPolicy", "UnitRow", "leaves_of", "number"]


class UnitRow(NamedTuple):
    """A unit in the table of a rule.

    Attributes:
        name: of the unit.
        elements: of its leaves together, as they are whole.
        leaves: how many there are. Tied leaves are one.
    """

    name: str
    elements: int
    leaves: int


@dataclass(frozen=True)
class UnitPolicy:
    """A rule `(path, leaf) -> name of its unit`, for `fzero.shard(units=)`. It prints its table.

    A leaf that the tree of the rule has not is named by the default rule.

    Attributes:
        table: a row for each unit, in the order of the tree.
    """

    table: tuple[UnitRow, ...]
    _names: Mapping[str, str] = field(repr=False)

    def __call__(self, path: str, leaf: torch.Tensor) -> str:
        """Name the unit of a leaf."""
        return self._names[path] if path in self._names else default_units(path, leaf)

    def __str__(self) -> str:
        """Show the table, and the largest unit."""
        wide = max([len(row.name) for row in self.table] + [4])
        lines = [f"{'unit':<{wide}}  {'elements':>15}  {'leaves':>7}"]
        lines += [f"{row.name:<{wide}}  {row.elements:>15,}  {row.leaves:>7,}" for row in self.table]
        elements, leaves = sum(row.elements for row in self.table), sum(row.leaves for row in self.table)
        lines += [f"{f'{len(self.table):,} units':<{wide}}  {elements:>15,}  {leaves:>7,}"]
        return "\n".join(lines)


class UnitLeaves(NamedTuple):
    """The leaves of a tree that can be in units.

    Attributes:
        leaves: by path, each tensor once, in the order of the tree.
        ties: the path of the first place of a leaf, for each further one.
    """

    leaves: dict[str, Any]
    ties: dict[str, str]

    def rule(self, names: Mapping[str, str]) -> UnitPolicy:
        """Make the rule that gives each leaf its name, and a tied one the name of its first place."""
        elements: dict[str, list[int]] = {}
        for path, name in names.items():
            elements.setdefault(name, []).append(self.leaves[path].numel())
        table = tuple([UnitRow(name, sum(sizes), len(sizes)) for name, sizes in elements.items()])
        return UnitPolicy(table, {**names, **{path: names[first] for path, first in self.ties.items()}})


def leaves_of(params: Tree) -> UnitLeaves:
    """Find the leaves of a tree that can be in units: those of floating point.

    Raises:
        TypeError: if there is none.
    """
    known, first = UnitLeaves({}, {}), dict[Any, str]()
    paths, leaves, _ = tree.flatten_with_paths(params, is_box)
    for path, x in zip(paths, leaves, strict=True):
        if not (isinstance(x, torch.Tensor) or is_box(x)) or not x.dtype.is_floating_point:
            continue
        if tree.identity(x) in first:
            known.ties[path] = first[tree.identity(x)]
        else:
            first[tree.identity(x)] = path
            known.leaves[path] = x
    if not known.leaves:
        raise TypeError(
            f"params is {tree.show(params)[:80]}, and holds no tensor of floating point: expected a tree of "
            "parameters, such as dict(module.named_parameters())"
        )
    return known


def number(name: str, value: Any, least: int) -> int:
    """Return a count that a user gave.

    Raises:
        ValueError: if it is no int from `least` on.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected an int from {least:,} on, in elements")
    return value
