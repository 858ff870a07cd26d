"""Rules: functions of a leaf's path and the leaf that say how a tree is cut."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fzero.axes.axis import AxisName

__all__ = ["DEFAULT_RULES", "DtypeRule", "OverRule", "Rules", "SplitRule", "UnitRule", "WorkApart", "given_rules"]

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

    def __call__(self, path: str, leaf: torch.Tensor, /) -> Mapping[str, int] | None:
        """Say how a leaf is split, as any rule does."""
        ...


class Rules(NamedTuple):
    """How a tree is cut, given the path and the leaf.

    Attributes:
        units: names the leaf's unit; None for the default rule.
        over: lists the axes that the unit is sharded over; None for all those of the step.
        split: says which further axes cut the leaf itself, and along which dimension; None for none.
        dtype: the dtype that the leaf is about to be cast to, which its unit is to have; None for its own.
        apart: the axes along which ranks have work of their own and no data of their own, as stages of a pipeline.
    """

    units: UnitRule | None = None
    over: OverRule | None = None
    split: SplitRule | None = None
    dtype: DtypeRule | None = None
    apart: tuple[str, ...] = ()


DEFAULT_RULES = Rules()


def given_rules(units: UnitRule | None, over: AxisName | OverRule, split: SplitRule | None) -> Rules:
    """Make rules of the arguments by these names.

    Raises:
        TypeError: if one is neither a rule nor, for `over`, names of axes.
    """
    for name, rule, gives in (("units", units, "the name of a unit, or None"), ("split", split, "{axis: dimension}")):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}={rule!r}: expected a rule, a function (path, leaf) -> {gives}")
    apart = split.apart if isinstance(split, WorkApart) else ()
    if over is None or callable(over):
        return Rules(units, over, split, apart=apart)
    if not isinstance(over, str | tuple | list) or not all(isinstance(name, str) for name in over):
        raise TypeError(f"over={over!r}: expected names of axes, or a rule, a function (path, leaf) -> names")
    return Rules(units, lambda path, leaf: over, split, apart=apart)
