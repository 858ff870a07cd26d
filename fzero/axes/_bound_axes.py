"""The axes that are bound while a rank program runs: which an argument `axis=` means, and this rank's index on them."""

from collections.abc import Sequence

import torch

from fzero._arguments import did_you_mean
from fzero._torch import is_accelerator, is_tracing
from fzero._tracebacks import api_boundary
from fzero.axes._rules import AxisName
from fzero.axes._scope import SCOPES, Axes, Axis, Binding

__all__ = [
    "averaged_axes",
    "axis_if_bound",
    "axis_index",
    "axis_names",
    "axis_size",
    "bound_axes",
    "bound_axis",
    "check_distinct",
    "in_mesh_order",
    "index_on",
    "join_axes",
    "loss_axes",
    "resolve_axes",
    "resolve_shard_axes",
]


def bound_axes() -> tuple[Axis, ...]:
    """List the axes that are bound here; none outside a rank program."""
    return SCOPES.stack[-1].axes.each if SCOPES.stack else ()


_NO_PROGRAM = (
    "no rank program is running; mesh.spmd and fzero.shard run one, and outside of one step.gather and step.partition "
    "take trees"
)


def bound_axis(name: str, source: str = "") -> Axis:
    """Return the axis bound to `name`.

    Args:
        name: the name of an axis.
        source: what gave the name, for the message: an argument, or a rule and the leaf.

    Raises:
        ValueError: if no axis of that name is bound here.
    """
    for axis in bound_axes():
        if axis.name == name:
            return axis
    names = [axis.name for axis in bound_axes()]
    prefix, hint = f"{source}: " if source else "", did_you_mean(name, names, "{!r}")
    which = f"the bound axes are {', '.join(map(repr, names))}{hint}" if names else _NO_PROGRAM
    raise ValueError(f"{prefix}axis {name!r} is not bound here: {which}")


def resolve_axes(axis: AxisName) -> tuple[Axis, ...]:
    """Return the bound axes that `axis` means.

    `None` means the axes given to `fzero.shard`, else the only bound axis; outside any mesh it means no axis, so
    that a train step runs unsharded as it stands. `()` means no axis.

    Raises:
        ValueError: if an axis is not bound or named twice, or if `None` is ambiguous.
        TypeError: if `axis` is neither a name nor a tuple of names.
    """
    if axis is not None:
        if not isinstance(axis, str | tuple | list):
            raise TypeError(f"axis={axis!r}: expected the name of an axis, or a tuple of names")
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        check_distinct(names)
        return tuple([bound_axis(name) for name in names])
    if not SCOPES.stack:
        return ()
    axes = SCOPES.stack[-1].axes
    if axes.default is None and len(axes.each) > 1:
        names = [a.name for a in axes.each]
        raise ValueError(f"axis=None is ambiguous: {names} are bound here; name the axis, such as axis={names[0]!r}")
    return loss_axes()


def check_distinct(names: Sequence[str]) -> None:
    """Check that no axis is named twice: a unit would be divided by its ranks twice, and summed over them once.

    Raises:
        ValueError: if one is. The message names it.
    """
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"axis={tuple(names)!r} names {twice!r} twice: expected {tuple(dict.fromkeys(names))!r}")


def resolve_shard_axes(axis: AxisName) -> tuple[Axis, ...]:
    """Return the bound axes that shard trees, the one that divides a unit first: `axis`, or those of the running step.

    Batches are split in the order of the mesh, and units in the order that the user gave.

    Raises:
        ValueError: if an axis is not bound, or if `None` is ambiguous.
    """
    default = SCOPES.stack[-1].axes.default if SCOPES.stack else None
    return resolve_axes(default if axis is None else axis)


def in_mesh_order(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Sort axes as the mesh names them: a sum over several runs over the group of their product only in this order."""
    return tuple([a for a in bound_axes() if a.name in [x.name for x in axes]])


def join_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the axes that a collective over `axes` runs over, the slowest first.

    Axes in the mesh's order are one axis that stands for all, if there is a group of their product. Without the group,
    as in a simulation, the collective runs over one axis after the other, and the first one is recorded for all.

    Axes in another order, such as `("dp", "host")` of `mesh(host=2, dp=8)`, stay apart: the collective runs over the
    hosts alone, and then within a host.
    """
    positions = {a.name: i for i, a in enumerate(bound_axes())}
    axes_left: list[Axis] = []
    run: list[Axis] = []
    for axis in axes:
        if run and positions[axis.name] < positions[run[-1].name]:
            axes_left += _join_run(run)
            run = []
        run.append(axis)
    return (*axes_left, *_join_run(run))


def _join_run(axes: Sequence[Axis]) -> list[Axis]:
    """Join axes that are in the mesh's order."""
    if len(axes) < 2:
        return list(axes)
    name = ",".join([a.name for a in axes])
    joint = SCOPES.stack[-1].axes.joint if SCOPES.stack else ()
    for a in joint:
        if a.name == name:
            return [a]
    return [axes[0]._replace(name=name), *[a._replace(name="") for a in axes[1:]]]


@api_boundary
def axis_names() -> tuple[str, ...]:
    """List the axes that are bound here; none outside a rank program.

    For models that run with and without an axis: a collective over `()` is the identity.

    Example:
        >>> import fzero, torch
        >>> def total(x):
        ...     return fzero.collectives.psum_invariant(x.sum(), "tp" if "tp" in fzero.axes.axis_names() else ())
        >>> total(torch.ones(4))
        tensor(4.)
        >>> mesh = fzero.mesh(tp=2)
        >>> mesh.spmd(total)(mesh.split(torch.ones(4)))
        tensor(4.)
    """
    return tuple([axis.name for axis in bound_axes()])


def axis_if_bound(axis: str) -> tuple[str, ...]:
    """Return the axis of this name if it is bound; else no axis, and a collective over no axis sends nothing.

    Raises:
        TypeError: if `axis` is not a string.
        ValueError: if `axis` is a misspelt axis that is bound. A rank's part would pass for the whole.
    """
    if not isinstance(axis, str):
        raise TypeError(f"axis={axis!r}: expected the name of the axis, a string")
    if axis in axis_names():
        return (axis,)
    if hint := did_you_mean(axis, axis_names(), "{!r}", cutoff=0.75):
        bound = ", ".join(map(repr, axis_names()))
        raise ValueError(f"axis={axis!r} is not bound here: the bound axes are {bound}{hint}")
    return ()


def loss_axes() -> tuple[Axis, ...]:
    """List the axes whose ranks add to one loss, in the mesh's order: those of the step, else all bound axes."""
    axes = SCOPES.stack[-1].axes if SCOPES.stack else Axes()
    return axes.each if axes.default is None else in_mesh_order([bound_axis(name) for name in axes.default])


def averaged_axes() -> tuple[str, ...]:
    """List the axes that the running step averages losses over: those given to `fzero.shard`, else none."""
    return (SCOPES.stack[-1].axes.default or ()) if SCOPES.stack else ()


@api_boundary
def axis_index(axis: AxisName = None, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return this rank's index along `axis`: an int64 tensor of shape []; 0 outside any mesh.

    For a tuple of axes the first is the slowest, as in JAX.

    Args:
        axis: an axis name or a tuple of names; `None` for the axes of the running step.
        device: the device of the result; by default the CPU. The host does not wait, as it does for a copy of the
            result.

    Raises:
        ValueError: if an axis is not bound.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=3).spmd(lambda: fzero.PerRank(fzero.axes.axis_index("dp")))().value
        tensor([0, 1, 2])
    """
    device_of_index = torch.device(device or "cpu")
    index = torch.zeros((), dtype=torch.int64, device=device_of_index)
    for a in resolve_axes(axis):
        index = index * a.size + index_on(device_of_index, a.token, a.binding)
    return index


def index_on(device: torch.device, token: torch.Tensor, binding: Binding) -> torch.Tensor:
    """Return this rank's index along the axis of a token on a device: an int64 tensor of shape [].

    Where the rank is known it is made there, since the host would wait for a copy. Under vmap the token holds it. A
    trace takes the token for a constant, which lies on the device before the step runs.
    """
    if binding.group and is_accelerator(device) and not is_tracing():
        return torch.full((), binding.rank, dtype=torch.int64, device=device)
    return token.to(device)


@api_boundary
def axis_size(axis: AxisName = None) -> int:
    """Return the number of ranks along `axis` (a tuple: their product); 1 outside any mesh.

    Raises:
        ValueError: if an axis is not bound.

    Example:
        >>> axis_size()
        1
    """
    size = 1
    for a in resolve_axes(axis):
        size *= a.size
    return size
