"""The plan of a step at a ratio, by a function that makes the step."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from fzero.graph._absent import plan
from fzero.graph.plan._plan import Plan

__all__ = ["MakeStep", "World", "checked_bytes", "planned_at"]

MakeStep = Callable[[float], Any]
World = int | Mapping[str, int] | None


def planned_at(make_step: MakeStep, ratio: float, world_size: World) -> Plan:
    """Plan the step that `make_step` makes for a ratio.

    Raises:
        TypeError: if `make_step` is no function, or returns neither a tuple `(step, *args)` nor a plan.
        ValueError: if it returns a plan and `world_size` is given.
    """
    if not callable(make_step):
        raise TypeError(f"make_step={make_step!r}: expected a function (ratio) -> (step, *args), or -> fzero.Plan")
    made = make_step(ratio)
    if isinstance(made, Plan):
        if world_size is not None:
            raise ValueError(
                f"world_size={world_size!r}: make_step({ratio:g}) returned a plan, which is of one world: plan for "
                "that size there, or return (step, *args)"
            )
        return made
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        given = type(made).__name__
        if isinstance(made, tuple):
            given = f"({', '.join([type(x).__name__ for x in made])})"
        raise TypeError(
            f"make_step({ratio:g}) returned {given}: expected (step, *args), what fzero.plan takes, or a fzero.Plan"
        )
    return plan(*made, world_size=world_size)


def checked_bytes(name: str, value: Any) -> float:
    """Return a budget, if it is a positive number of bytes.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: expected a number of bytes above 0, such as 75e9")
    return float(value)
