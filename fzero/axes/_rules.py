"""Rules: functions of a leaf's path and the leaf that say how a tree is cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from fzero.axes._axis import AxisName

__all__ = [
    "DEFAULT_RULES",
    "DtypeRule",
    "LayoutRules",
    "OverRule",
    "SplitRule",
    "SplitRules",
    "Stacked",
    "Stacks",
    "UnitRule",
    "WorkApart",
    "given_rules",
    "rules_in",
    "together",
]

UnitRule = Callable[[str, torch.Tensor], str | None]
OverRule = Callable[[str, torch.Tensor], AxisName]
DtypeRule = Callable[[str, torch.Tensor], torch.dtype]
SplitRule = Callable[[str, torch.Tensor], Mapping[str, int] | None]
SplitRules = SplitRule | Sequence[SplitRule]


@runtime_checkable
class WorkApart(Protocol):
    """A rule of `split` along whose axes ranks have work of their own, and no data: as stages of a pipeline.

    They are axes of the mean all the same: what a rank adds to the loss, and to the gradients, is its share.
    """

    @property
    def apart(self) -> tuple[str, ...]:
        """The names of the axes."""
        ...

    @property
    def rule(self) -> "SplitRule | None":
        """How leaves are split along other axes."""
        ...

    def __call__(self, path: str, leaf: torch.Tensor, /) -> Mapping[str, int] | None:
        """Say how a leaf is split, as any rule does."""
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


class LayoutRules(NamedTuple):
    """How a tree is cut, given the path and the leaf.

    Attributes:
        units: names the leaf's unit; None for the default rule.
        over: lists the axes that the unit is sharded over; None for all those of the step.
        split: says which further axes cut the leaf itself, and along which dimension; None for none.
        dtype: the dtype that the leaf is about to be cast to, which its unit is to have; None for its own.
        apart: the axes along which ranks have work of their own and no data of their own, as stages of a pipeline.
        stacks: those of the rules of `split` that say which lists are stacked, along which axes.
    """

    units: UnitRule | None = None
    over: OverRule | None = None
    split: SplitRule | None = None
    dtype: DtypeRule | None = None
    apart: tuple[str, ...] = ()
    stacks: tuple[Stacks, ...] = ()

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> dict[str, Stacked]:
        """Return the list that is stacked along each axis, given the paths of a tree's leaves and the axes' sizes."""
        return {axis: found for rule in self.stacks for axis, found in rule.stacked(paths, sizes).items()}


DEFAULT_RULES = LayoutRules()


@dataclass(frozen=True)
class Several:
    """Rules of which each splits leaves over axes of its own: experts over one, matrices over another."""

    rules: tuple[SplitRule, ...]

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Say how a leaf is cut by all of them.

        Raises:
            ValueError: if two cut it over one axis.
        """
        found: dict[str, int] = {}
        for rule in self.rules:
            for axis, dim in (rule(path, leaf) or {}).items():
                if axis in found:
                    raise ValueError(f"split: two rules cut leaf {path!r} over {axis!r}: let one of them leave it out")
                found[axis] = dim
        return found or None


def together(split: SplitRules | None) -> SplitRule | None:
    """Make one rule of several; anything else is as it was."""
    several: Any = split
    if isinstance(split, tuple | list) and all(callable(rule) for rule in split):
        return Several(tuple(split))
    return several


def rules_in(split: SplitRule | None) -> tuple[SplitRule, ...]:
    """List the rules that a rule is made of, itself among them unless it only joins others."""
    if isinstance(split, Several):
        return tuple([found for rule in split.rules for found in rules_in(rule)])
    inner = rules_in(split.rule) if isinstance(split, WorkApart) else ()
    return () if split is None else (split, *inner)


def given_rules(units: UnitRule | None, over: AxisName | OverRule, split: SplitRules | None) -> LayoutRules:
    """Make rules of the arguments by these names.

    Raises:
        TypeError: if one is neither a rule nor, for `over`, names of axes.
    """
    cuts: Any = together(split)
    for name, rule, gives in (("units", units, "the name of a unit, or None"), ("split", cuts, "{axis: dimension}")):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}={rule!r}: expected a rule, a function (path, leaf) -> {gives}")
    apart = tuple([name for rule in rules_in(cuts) if isinstance(rule, WorkApart) for name in rule.apart])
    stacks = tuple([rule for rule in rules_in(cuts) if isinstance(rule, Stacks)])
    if over is None or callable(over):
        return LayoutRules(units, over, cuts, apart=apart, stacks=stacks)
    if not isinstance(over, str | tuple | list) or not all(isinstance(name, str) for name in over):
        raise TypeError(f"over={over!r}: expected names of axes, or a rule, a function (path, leaf) -> names")
    return LayoutRules(units, lambda path, leaf: over, cuts, apart=apart, stacks=stacks)
