"""Rules: functions of a leaf's path and the leaf that say how a tree is cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from fzero.axes.axis import AxisName

__all__ = [
    "DEFAULT_RULES",
    "DtypeRule",
    "OverRule",
    "Rules",
    "SplitRule",
    "Stacked",
    "Stacks",
    "UnitRule",
    "WorkApart",
    "given_rules",
]

UnitRule = Callable[[str, torch.Tensor], str | None]
OverRule = Callable[[str, torch.Tensor], AxisName]
DtypeRule = Callable[[str, torch.Tensor], torch.dtype]
SplitRule = Callable[[str, torch.Tensor], Mapping[str, int] | None]


@runtime_checkable
class WorkApart(Protocol):
    """A rule of `split` along whose axes ranks have work of their own, and no data: as stages of a pipeline.

    They are axes of the mean all the same: what a rank adds to the loss, and to the gradients, is its share.
    """

    @property
    def apart(self) -> tuple[str, ...]:
        """The names of the axes."""
        ...


class Stacked(NamedTuple):
    """A list of which each rank along an axis has some items, stacked: as a pipeline's blocks are.

    In a leaf of item s, `[ranks, ...]`, row r is that of the item `items[s][r]` of the whole list.

    Attributes:
        key: the path of the list in the tree.
        items: by place in the stacked list and rank, the number of the item; None where there is none.
    """

    key: str
    items: tuple[tuple[int | None, ...], ...]


@runtime_checkable
class Stacks(Protocol):
    """A rule of `split` for trees that hold a stacked list."""

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> Mapping[str, Stacked]:
        """Return the list that is stacked along each axis, given the paths of a tree's leaves and the axes' sizes."""
        ...


class Rules(NamedTuple):
    """How a tree is cut, given the path and the leaf.

    Attributes:
        units: names the leaf's unit; None for the default rule.
        over: lists the axes that the unit is sharded over; None for all those of the step.
        split: says which further axes cut the leaf itself, and along which dimension; None for none.
        dtype: the dtype that the leaf is about to be cast to, which its unit is to have; None for its own.
        apart: the axes along which ranks have work of their own and no data of their own, as stages of a pipeline.
        stacks: says which lists are stacked along which axes.
    """

    units: UnitRule | None = None
    over: OverRule | None = None
    split: SplitRule | None = None
    dtype: DtypeRule | None = None
    apart: tuple[str, ...] = ()
    stacks: Stacks | None = None


DEFAULT_RULES = Rules()


def given_rules(units: UnitRule | None, over: AxisName | OverRule, split: SplitRule | None) -> Rules:
    """Make rules of the arguments by these names.

    Raises:
        TypeError: if one is neither a rule nor, for `over`, names of axes.
    """
    for name, rule, gives in (("units", units, "the name of a unit, or None"), ("split", split, "{axis: dimension}")):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}={rule!r}: expected a rule, a function (path, leaf) -> {gives}")
    rule: Any = split
    apart = rule.apart if isinstance(rule, WorkApart) else ()
    stacks = rule if isinstance(rule, Stacks) else None
    if over is None or callable(over):
        return Rules(units, over, split, apart=apart, stacks=stacks)
    if not isinstance(over, str | tuple | list) or not all(isinstance(name, str) for name in over):
        raise TypeError(f"over={over!r}: expected names of axes, or a rule, a function (path, leaf) -> names")
    return Rules(units, lambda path, leaf: over, split, apart=apart, stacks=stacks)
