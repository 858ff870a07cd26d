"""The plan of a step, from a function that makes the step for a ratio or a configuration."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from fzero.graph import Hardware, Jitted, Plan, PlanSettings, ScheduleOptions, StepOfRank, jit, step_of_rank
from fzero.ranks import Mesh

__all__ = ["MakeStep", "StepArgs", "World", "check_bytes", "plan_at", "step_at", "step_on"]


StepArgs = tuple[Any, ...]  # a step and its arguments
MakeStep = Callable[[Any], Any]
World = int | Mapping[str, int] | None


def plan_at(
    make_step: MakeStep,
    at: Any,
    world_size: World,
    hardware: Hardware | None = None,
    settings: PlanSettings | None = None,
) -> Plan:
    """Plan the step that `make_step` makes for a ratio or a configuration.

    Args:
        make_step: the user's function.
        at: the argument of `make_step`.
        world_size: as in `fzero.plan`.
        hardware: as in `fzero.plan`.
        settings: the settings of the schedule; by default the plan chooses them.

    Raises:
        TypeError: if `make_step` is not a function, or returns neither a tuple `(step, *args)` nor a plan.
        ValueError: if it returns a plan and `world_size` is given.
    """
    step_args = step_at(make_step, at)
    if not isinstance(step_args, Plan):
        return _plan_step(step_args, world_size, hardware, settings)
    if world_size is not None:
        raise ValueError(
            f"world_size={world_size!r}: make_step({_show_coordinates(at)}) returned a plan, which is already for one "
            "world size: plan for this size in make_step, or return (step, *args)"
        )
    return step_args


def step_at(make_step: MakeStep, at: Any) -> StepArgs | Plan:
    """Call `make_step`, and return the step and its arguments, or the plan.

    Raises:
        TypeError: if `make_step` is not a function, or returns neither of them.
    """
    if not callable(make_step):
        word = "ratio" if isinstance(at, Real) else "configuration"
        raise TypeError(
            f"make_step={make_step!r}: expected a function ({word}) -> (step, *args), or -> fzero.graph.Plan"
        )
    result = make_step(at)
    if isinstance(result, Plan) or (isinstance(result, tuple) and result and callable(result[0])):
        return result
    type_name = type(result).__name__
    if isinstance(result, tuple):
        type_name = f"({', '.join([type(x).__name__ for x in result])})"
    raise TypeError(
        f"make_step({_show_coordinates(at)}) returned {type_name}: expected (step, *args), the arguments of "
        "fzero.plan, or a fzero.graph.Plan"
    )


def _plan_step(
    step_args: StepArgs,
    world_size: World,
    hardware: Hardware | None = None,
    settings: PlanSettings | None = None,
    rank: int | Mapping[str, int] = 0,
) -> Plan:
    """Plan a step with its arguments. `rank` is as in `fzero.plan`, the rest as in `plan_at`."""
    step, *args = step_args
    if settings is not None:
        step = step if isinstance(step, Jitted) else jit(step)
        step = step.with_options(schedule_options=ScheduleOptions.of(settings))
    return step_on((step, *args), world_size, hardware, rank).plan()


def step_on(
    step_args: StepArgs, world_size: World, hardware: Hardware | None = None, rank: int | Mapping[str, int] = 0
) -> StepOfRank:
    """Return one rank's step in a world, to plan it in several schedules. The arguments are as in `_plan_step`."""
    step, *args = step_args
    mesh = getattr(step, "mesh", None)
    has_world_size = isinstance(mesh, Mesh) and mesh.size == world_size  # such a mesh may have several axes
    return step_of_rank(step, *args, world_size=None if has_world_size else world_size, hardware=hardware, rank=rank)


def _show_coordinates(at: Any) -> str:
    return f"{at:g}" if isinstance(at, Real) else str(at)


def check_bytes(name: str, value: Any) -> float:
    """Return a budget as a float, after a check that it is a positive number of bytes.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: expected a number of bytes above 0, such as 75e9")
    return float(value)
