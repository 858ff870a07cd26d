"""Rules: functions of a leaf's path and the leaf that decide how a tree is sharded."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

__all__ = [
    "DEFAULT_RULES",
    "AxisName",
    "LayoutRules",
    "OverRule",
    "SplitRule",
    "SplitRules",
    "StackedList",
    "UnitRule",
    "join_rules",
    "layout_rules",
    "rules_in",
]

AxisName = str | tuple[str, ...] | None
"""The name of an axis of a mesh, the names of several, or None for the default."""
UnitRule = Callable[[str, torch.Tensor], str | None]
"""A function of a leaf's path and the leaf to the name of its unit, or None to keep the leaf replicated."""
OverRule = Callable[[str, torch.Tensor], AxisName]
"""A function of a leaf's path and the leaf to the axes over which it is sharded."""
_DtypeRule = Callable[[str, torch.Tensor], torch.dtype]
SplitRule = Callable[[str, torch.Tensor], Mapping[str, int] | None]
"""A function of a leaf's path and the leaf to `{axis: dimension}`, or None: along an axis, ranks hold parts of it."""
SplitRules = SplitRule | Sequence[SplitRule]
"""A rule of `split`, or several, each for another axis."""


@runtime_checkable
class _PipelineRule(Protocol):
    """A rule of `split` along whose axes ranks do different work on the same data, such as stages of a pipeline.

    Losses are averaged over these axes all the same: each rank contributes its share of the loss and the gradients.
    """

    @property
    def pipeline_axes(self) -> tuple[str, ...]:
        """The names of these axes."""
        ...

    @property
    def rule(self) -> "SplitRule | None":
        """The rule that splits leaves along other axes."""
        ...

    def __call__(self, path: str, leaf: torch.Tensor, /) -> Mapping[str, int] | None:
        """Return how a leaf is split, as any rule does."""
        ...


class StackedList(NamedTuple):
    """A list whose items are stacked along an axis of ranks, such as a pipeline's blocks; each rank has some items.

    In a leaf `[ranks, ...]` of item s of the stacked list, row r belongs to item `items[s][r]` of the full list.

    Attributes:
        key: the path of the list in the tree.
        items: for each position in the stacked list and each rank, the number of the item; None if there is none.
    """

    key: str
    items: tuple[tuple[int | None, ...], ...]


@runtime_checkable
class _StackRule(Protocol):
    """A rule of `split` for trees that hold a stacked list."""

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> Mapping[str, StackedList]:
        """Return the list that is stacked along each axis, given the paths of a tree's leaves and the axes' sizes."""
        ...


@runtime_checkable
class _NamedRule(Protocol):
    """A rule of `split` that finds leaves by names in their paths, each of which must find one."""

    @property
    def axis(self) -> str:
        """The axis over which it splits leaves."""
        ...

    def unused_names(self, paths: Sequence[str]) -> list[str]:
        """List the names that stand in no path of a tree."""
        ...


class LayoutRules(NamedTuple):
    """The rules by which a tree is sharded, each a function of a leaf's path and the leaf.

    Attributes:
        units: names the leaf's unit; None for the default rule.
        over: lists the axes that the unit is sharded over; None for all axes of the step.
        split: names the axes that split the leaf itself, with the dimension for each; None for no such axes.
        dtype: returns the dtype of the leaf's unit, to which the leaf will be cast; None for the leaf's own dtype.
        pipeline_axes: the axes along which ranks do different work on the same data, such as stages of a pipeline.
        stacks: the rules of `split` that say which lists are stacked along which axes.
    """

    units: UnitRule | None = None
    over: OverRule | None = None
    split: SplitRule | None = None
    dtype: _DtypeRule | None = None
    pipeline_axes: tuple[str, ...] = ()
    stacks: tuple[_StackRule, ...] = ()

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> dict[str, StackedList]:
        """Return the list that is stacked along each axis, given the paths of a tree's leaves and the axes' sizes."""
        return {axis: stack for rule in self.stacks for axis, stack in rule.stacked(paths, sizes).items()}

    @property
    def named_axes(self) -> tuple[str, ...]:
        """The axes over which rules of `split` split leaves by their names."""
        return tuple([rule.axis for rule in rules_in(self.split) if isinstance(rule, _NamedRule)])

    def unused_names(self, paths: Sequence[str], axes: Sequence[str]) -> list[str]:
        """List the names in rules of `split`, for some axes, that stand in no path of a tree."""
        rules = [rule for rule in rules_in(self.split) if isinstance(rule, _NamedRule) and rule.axis in axes]
        return [name for rule in rules for name in rule.unused_names(paths)]


DEFAULT_RULES = LayoutRules()


@dataclass(frozen=True)
class _JoinedRules:
    """Several rules, each of which splits leaves over its own axes: experts over one, matrices over another."""

    rules: tuple[SplitRule, ...]

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Return how all rules together split a leaf.

        Raises:
            ValueError: if two rules split the leaf over the same axis.
        """
        dims: dict[str, int] = {}
        for rule in self.rules:
            for axis, dim in (rule(path, leaf) or {}).items():
                if axis in dims:
                    raise ValueError(
                        f"split: two rules split leaf {path!r} over {axis!r}: remove the leaf from one of them"
                    )
                dims[axis] = dim
        return dims or None


def join_rules(split: SplitRules | None) -> SplitRule | None:
    """Join several rules into one; return anything else unchanged."""
    rule: Any = split
    if isinstance(split, tuple | list) and all(callable(r) for r in split):
        return _JoinedRules(tuple(split))
    return rule


def rules_in(split: SplitRule | None) -> tuple[SplitRule, ...]:
    """List the rules that a rule consists of; the rule itself is among them unless it only joins others."""
    if isinstance(split, _JoinedRules):
        return tuple([inner_rule for rule in split.rules for inner_rule in rules_in(rule)])
    inner = rules_in(split.rule) if isinstance(split, _PipelineRule) else ()
    return () if split is None else (split, *inner)


def _check_parameters(name: str, rule: Callable[..., Any], expected: str) -> None:
    """Check that a rule takes a path and a leaf, as far as its signature is known."""
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):
        return
    try:
        signature.bind("path", None)
    except TypeError:
        raise TypeError(f"{name}: the rule takes {signature}: expected a function (path, leaf) -> {expected}") from None


def layout_rules(units: UnitRule | None, over: AxisName | OverRule, split: SplitRules | None) -> LayoutRules:
    """Return the layout rules that the arguments `units`, `over` and `split` mean.

    Raises:
        TypeError: if an argument is not a rule, or takes other arguments; `over` may also be names of axes.
    """
    split_rule: Any = join_rules(split)
    for name, rule, expected in (
        ("units", units, "the name of a unit, or None"),
        ("split", split_rule, "{axis: dimension}"),
    ):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}={rule!r}: expected a rule, a function (path, leaf) -> {expected}")
    if units is not None:
        _check_parameters("units", units, "the name of a unit, or None")
    for split_part in rules_in(split_rule):
        _check_parameters("split", split_part, "{axis: dimension}")
    pipeline_axes = tuple(
        [name for rule in rules_in(split_rule) if isinstance(rule, _PipelineRule) for name in rule.pipeline_axes]
    )
    stacks = tuple([rule for rule in rules_in(split_rule) if isinstance(rule, _StackRule)])
    if callable(over):
        _check_parameters("over", over, "names of axes")
    if over is None or callable(over):
        return LayoutRules(units, over, split_rule, pipeline_axes=pipeline_axes, stacks=stacks)
    if not isinstance(over, str | tuple | list) or not all(isinstance(name, str) for name in over):
        raise TypeError(f"over={over!r}: expected names of axes, or a rule, a function (path, leaf) -> names")
    return LayoutRules(units, lambda path, leaf: over, split_rule, pipeline_axes=pipeline_axes, stacks=stacks)
