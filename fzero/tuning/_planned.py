"""The plan of a step at a ratio, by a function that makes the step."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from fzero.graph._absent import plan
from fzero.graph._jit import Jitted, jit
from fzero.graph._knobs import Knobs
from fzero.graph.plan._cost import Device
from fzero.graph.plan._plan import Plan, Settings
from fzero.ranks.mesh import Mesh

__all__ = ["Made", "MakeStep", "World", "checked_bytes", "made_at", "planned", "planned_at"]

Made = tuple[Any, ...]  # a step, and its arguments
MakeStep = Callable[[Any], Any]
World = int | Mapping[str, int] | None


def planned_at(
    make_step: MakeStep, at: Any, world_size: World, device: Device | None = None, settings: Settings | None = None
) -> Plan:
    """Plan the step that `make_step` makes for a ratio or a configuration.

    Args:
        make_step: the user's function.
        at: what it is given.
        world_size: as of `fzero.plan`.
        device: likewise.
        settings: of the schedule, if they are known.

    Raises:
        TypeError: if `make_step` is no function, or returns neither a tuple `(step, *args)` nor a plan.
        ValueError: if it returns a plan and `world_size` is given.
    """
    made = made_at(make_step, at)
    if not isinstance(made, Plan):
        return planned(made, world_size, device, settings)
    if world_size is not None:
        raise ValueError(
            f"world_size={world_size!r}: make_step({_given(at)}) returned a plan, which is of one world: plan for "
            "that size there, or return (step, *args)"
        )
    return made


def made_at(make_step: MakeStep, at: Any) -> Made | Plan:
    """Call `make_step`, and return the step and its arguments, or the plan.

    Raises:
        TypeError: if it is no function, or returns neither.
    """
    if not callable(make_step):
        word = "ratio" if isinstance(at, Real) else "configuration"
        raise TypeError(f"make_step={make_step!r}: expected a function ({word}) -> (step, *args), or -> fzero.Plan")
    made = make_step(at)
    if isinstance(made, Plan) or (isinstance(made, tuple) and made and callable(made[0])):
        return made
    given = type(made).__name__
    if isinstance(made, tuple):
        given = f"({', '.join([type(x).__name__ for x in made])})"
    raise TypeError(
        f"make_step({_given(at)}) returned {given}: expected (step, *args), what fzero.plan takes, or a fzero.Plan"
    )


def planned(
    made: Made,
    world_size: World,
    device: Device | None = None,
    settings: Settings | None = None,
    rank: int | Mapping[str, int] = 0,
) -> Plan:
    """Plan a step and its arguments. The other arguments are as of `planned_at`, and `rank` as of `fzero.plan`."""
    step, *args = made
    if settings is not None:
        step = step if isinstance(step, Jitted) else jit(step)
        step = step.untraced(knobs=Knobs.of(settings))
    mesh = getattr(step, "mesh", None)
    same = isinstance(mesh, Mesh) and mesh.size == world_size  # then it may have several axes
    return plan(step, *args, world_size=None if same else world_size, device=device, rank=rank)


def _given(at: Any) -> str:
    return f"{at:g}" if isinstance(at, Real) else str(at)


def checked_bytes(name: str, value: Any) -> float:
    """Return a budget, if it is a positive number of bytes.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: expected a number of bytes above 0, such as 75e9")
    return float(value)
