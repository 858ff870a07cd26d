"""Rules: functions of a leaf's path and the leaf that say how a tree is cut."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from fzero.axes.axis import AxisName

__all__ = ["DEFAULT_RULES", "DtypeRule", "OverRule", "Rules", "SplitRule", "UnitRule"]

UnitRule = Callable[[str, torch.Tensor], str | None]
OverRule = Callable[[str, torch.Tensor], AxisName]
DtypeRule = Callable[[str, torch.Tensor], torch.dtype]
SplitRule = Callable[[str, torch.Tensor], Mapping[str, int] | None]


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
