"""Rules: functions of a leaf's path and the leaf that say how a tree is cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.axes.axis import AxisName

__all__ = [
    "DEFAULT_RULES",
    "DtypeRule",
    "OverRule",
    "Rules",
    "SplitRule",
    "SplitRules",
    "UnitRule",
    "given_rules",
    "rules_in",
]

UnitRule = Callable[[str, torch.Tensor], str | None]
OverRule = Callable[[str, torch.Tensor], AxisName]
DtypeRule = Callable[[str, torch.Tensor], torch.dtype]
SplitRule = Callable[[str, torch.Tensor], Mapping[str, int] | None]
SplitRules = SplitRule | Sequence[SplitRule]


class Rules(NamedTuple):
    """How a tree is cut, given the path and the leaf.

    Attributes:
        units: names the leaf's unit; None for the default rule.
        over: lists the axes that the unit is sharded over; None for all those of the step.
        split: says which further axes cut the leaf itself, and along which dimension; None for none.
        dtype: the dtype that the leaf is about to be cast to, which its unit is to have; None for its own.
    """

    units: UnitRule | None = None
    over: OverRule | None = None
    split: SplitRule | None = None
    dtype: DtypeRule | None = None


DEFAULT_RULES = Rules()


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


def rules_in(split: SplitRule | None) -> tuple[SplitRule, ...]:
    """List the rules that a rule is made of."""
    return split.rules if isinstance(split, Several) else () if split is None else (split,)


def given_rules(units: UnitRule | None, over: AxisName | OverRule, split: SplitRules | None) -> Rules:
    """Make rules of the arguments by these names.

    Raises:
        TypeError: if one is neither a rule nor, for `over`, names of axes.
    """
    cuts: Any = split
    if isinstance(split, tuple | list) and all(callable(rule) for rule in split):
        cuts = Several(tuple(split))
    for name, rule, gives in (("units", units, "the name of a unit, or None"), ("split", cuts, "{axis: dimension}")):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}={rule!r}: expected a rule, a function (path, leaf) -> {gives}")
    if over is None or callable(over):
        return Rules(units, over, cuts)
    if not isinstance(over, str | tuple | list) or not all(isinstance(name, str) for name in over):
        raise TypeError(f"over={over!r}: expected names of axes, or a rule, a function (path, leaf) -> names")
    return Rules(units, lambda path, leaf: over, cuts)
