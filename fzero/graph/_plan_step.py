"""plan: one rank's plan of a step in a world of any size, without its processes or devices."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fzero._arguments import check_choice, is_int
from fzero._tracebacks import api_boundary
from fzero.graph._jit import Jitted, jit
from fzero.graph._one_rank import Shape, one_rank_tree, planned_mesh
from fzero.graph._step import as_step
from fzero.graph.planning import HARDWARE, Hardware, Interval, Plan, PlanSettings
from fzero.ranks import Mesh

__all__ = ["StepOfRank", "plan", "step_of_rank"]


@api_boundary
def plan(
    step: Callable[..., Any],
    *args: Any,
    world_size: int | Mapping[str, int] | None = None,
    hardware: str | Hardware | None = None,
    rank: int | Mapping[str, int] = 0,
    **kwargs: Any,
) -> Plan:
    """Plan one rank's step in a world of any size, without running it, allocating memory or starting processes.

    Args:
        step: a sharded step, jitted or not, or any function that `fzero.jit` takes.
        *args: the step's arguments on its own mesh, real or meta tensors; `step.init` takes meta tensors too.
        world_size: N, or the new size of some axes, `{"dp": 512}`; by default the step's mesh. The parameters are
            sharded anew for it, and so are leaves that an axis splits, such as experts. A rank's part of the batch
            keeps its size.
        hardware: "cuda" plans for a GPU, which this machine need not have: without the buffers of a CPU's collectives,
            and with the seconds of a data-centre GPU. By default the arguments' device; meta tensors count as a CPU's.
        rank: the rank to plan, or its coordinates along axes, `{"pp": 3}`; 0 along an axis that is left out.
            Ranks differ along the axis of a pipeline.
        **kwargs: the step's arguments by name.

    Returns:
        A `Plan`: `print` it, `plot` it.

    Raises:
        ValueError: if `world_size` is below 1, names no axis of the mesh, or is set for a function without a mesh.
            Also if an axis that splits leaves does not divide them, if `hardware` is unknown, or if the world has no
            such rank.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> opt = optim.adam(1e-3)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return optim.apply_updates(params, updates), opt_state, loss
        >>> mesh = fzero.mesh(dp=4)
        >>> step = fzero.shard(train_step, stage=3, mesh=mesh)
        >>> with torch.device("meta"):
        ...     params, batch = {"w": torch.zeros(4096, 4096)}, torch.zeros(16, 4096)
        >>> params, opt_state = step.init(params, opt)
        >>> plan = fzero.plan(step, params, opt_state, mesh.split(batch), world_size=1024)
        >>> [(c.kind, c.bytes) for c in plan.collectives][:2]
        [('all_gather', 67108864), ('all_reduce', 8)]
        >>> plan.argument_bytes  # 3 x 64 MiB / 1024, a count, a quarter of the batch
        262152
    """
    try:
        return step_of_rank(step, *args, world_size=world_size, hardware=hardware, rank=rank, **kwargs).plan()
    except TypeError as error:
        if not args and not kwargs:  # else Python's message about missing arguments names the step alone
            error.add_note(
                "fzero.plan takes the arguments of a call of the step, as in fzero.plan(step, params, opt_state, batch)"
            )
        raise


class StepOfRank(NamedTuple):
    """One rank's step in a world of any size, and its arguments there. All its plans have one trace.

    Attributes:
        step: the step on a mesh of this world.
        args: the arguments by position.
        kwargs: the arguments by name.
    """

    step: Jitted
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @api_boundary
    def plan(self, settings: PlanSettings | None = None) -> Plan:
        """Plan the step, in the schedule of another plan's settings if they are given."""
        if settings is None:
            return self.step.plan(*self.args, **self.kwargs)
        return self.step.plan_as(settings, *self.args, **self.kwargs)

    @api_boundary
    def timeline(self) -> list[Interval]:
        """List when compute, collectives and the host are busy, by the cost model."""
        return self.step.timeline(*self.args, **self.kwargs)


def step_of_rank(
    step: Callable[..., Any],
    *args: Any,
    world_size: int | Mapping[str, int] | None = None,
    hardware: str | Hardware | None = None,
    rank: int | Mapping[str, int] = 0,
    **kwargs: Any,
) -> StepOfRank:
    """Return one rank's step in a world of any size, to plan it. The arguments and errors are those of `plan`."""
    jitted = step if isinstance(step, Jitted) else jit(step)
    jitted = jitted.with_options(hardware=_find_hardware(hardware)) if hardware is not None else jitted
    train_step = as_step(jitted.step)
    mesh = train_step.mesh
    if mesh is None:
        for name, value in (("world_size", world_size), ("rank", rank or None)):
            if value is not None:
                raise ValueError(f"{name}={value}: {jitted} has no mesh; shard it with fzero.shard first")
        return StepOfRank(jitted, args, kwargs)
    shape = _resolve_shape(mesh, world_size)
    if jitted.options.hardware is not None:
        jitted = jitted.with_options(hardware=jitted.options.hardware._replace(axes=shape))
    args, kwargs = one_rank_tree((args, kwargs), dict(shape), all_ranks=mesh.simulated)
    world = planned_mesh(shape, _compute_coordinates(rank, shape))
    return StepOfRank(jitted.with_options(train_step.on_mesh(world)), args, kwargs)


def _find_hardware(hardware: str | Hardware) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    check_choice("hardware", hardware, tuple(HARDWARE))
    return HARDWARE[hardware]


def _resolve_shape(mesh: Mesh, world_size: int | Mapping[str, int] | None) -> Shape:
    """Return the name and the size of each axis in the planned world."""
    if isinstance(world_size, int) and len(mesh.shape) > 1:
        raise ValueError(
            f'world_size={world_size}: {mesh!r} has several axes; say world_size={{"{mesh.axis_names[0]}": 512}}'
        )
    if world_size is None:
        return mesh.shape
    request = world_size if isinstance(world_size, Mapping) else {mesh.axis_names[0]: world_size}
    sizes = {**dict(mesh.shape), **request}
    for name, size in sizes.items():
        if name not in mesh.axis_names or not is_int(size) or size < 1:
            raise ValueError(f"world_size={world_size!r}: expected a number of ranks, at least 1, of axes of {mesh!r}")
    return tuple(sizes.items())


def _compute_coordinates(rank: int | Mapping[str, int], shape: Shape) -> Shape:
    """Return the coordinates of a rank along the axes of a world.

    Raises:
        ValueError: if the world has no such rank.
    """
    coordinates = rank if isinstance(rank, Mapping) else _rank_coordinates(rank, shape)
    sizes = dict(shape)
    for name, coordinate in coordinates.items():
        if name not in sizes or not is_int(coordinate) or not 0 <= coordinate < sizes[name]:
            world = ", ".join([f"{n}={size}" for n, size in shape])
            raise ValueError(
                f"rank={rank!r}: expected a rank of {world}, or coordinates along these axes, counted from 0"
            )
    return tuple(coordinates.items())


def _rank_coordinates(rank: int, shape: Shape) -> dict[str, int]:
    coordinates: dict[str, int] = {}
    for name, size in reversed(shape):
        rank, coordinates[name] = divmod(rank, size)
    first = shape[0][0]
    return {**coordinates, first: coordinates[first] + rank * shape[0][1]}  # out of range if the rank is
