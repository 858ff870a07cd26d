"""The sizes of a mesh's axes: those that are said, and the one that is what is left of the world."""

import math
from collections.abc import Mapping
from difflib import get_close_matches

__all__ = ["check_axes", "filled"]

Shape = tuple[tuple[str, int], ...]


def check_axes(axes: Mapping[str, int], alone: int | None) -> None:
    """Check what can be checked of a mesh's axes whatever the world is.

    Raises:
        ValueError: if there is no axis, one has no name of its own, several are -1, or `alone` fills none.
        TypeError: if a size is no int.
    """
    if not axes:
        raise ValueError("a mesh has at least one axis, such as mesh(dp=4)")
    for name, size in axes.items():
        if not name.isidentifier():  # groups of several axes have names with commas
            raise ValueError(f"axis {name!r}: the name of an axis is a Python name, such as 'dp'")
        if not isinstance(size, int) or isinstance(size, bool):
            near = get_close_matches(name, ("simulate", "alone", "device", "timeout"), 1)
            hint = f"; did you mean {near[0]}= by {name}=?" if near else ""
            raise TypeError(f"{name}={size!r}: the size of an axis is an int{hint}")
        if size < 1 and size != -1:
            raise ValueError(f"{name}={size}: an axis has at least one rank; -1 means the whole world")
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{' and '.join(open_axes)} are -1: only one axis can be what is left of the world")
    if alone is None:
        return
    if not isinstance(alone, int) or isinstance(alone, bool):
        raise TypeError(f"alone={alone!r}: expected an int, the number of ranks to simulate when there is no world")
    if alone < 1:
        raise ValueError(f"alone={alone}: expected at least one rank to simulate")
    if not open_axes:
        said, first = _said(axes), next(iter(axes))
        raise ValueError(f"{said}, alone={alone}, and no axis is -1 to be filled: say {first}=-1, or leave out alone")


def filled(axes: Mapping[str, int], world: int | None, alone: int | None) -> Shape:
    """Fill in the size that is -1.

    Args:
        axes: the sizes, as `check_axes` lets them pass.
        world: the number of processes; None in a simulation.
        alone: the number of ranks of a simulation; None for as many as the other sizes make.

    Raises:
        ValueError: if the mesh would not have as many ranks as there are.
    """
    given = math.prod([size for size in axes.values() if size != -1])
    ranks = (alone or given) if world is None else world
    shape = tuple([(name, max(ranks // given, 1) if size == -1 else size) for name, size in axes.items()])
    product = math.prod([size for _, size in shape])
    if world is not None and product != world:
        raise ValueError(f"{_said(axes)}, and the world has {_processes(world)}: {_advice(axes, world, product)}")
    if alone is not None and world is None and product != alone:
        raise ValueError(f"{_said(axes)}, alone={alone}: {alone} does not divide by {given}")
    return shape


def _advice(axes: Mapping[str, int], world: int, product: int) -> str:
    given = math.prod([size for size in axes.values() if size != -1])
    if -1 in axes.values():
        return f"{world} does not divide by {given}"
    rest = "the whole world" if len(axes) == 1 else "what is left of the world"
    return f"launch with torchrun --nproc-per-node {product}, or say {next(iter(axes))}=-1 for {rest}"


def _processes(world: int) -> str:
    return f"{world} process{'es' * (world != 1)}"


def _said(axes: Mapping[str, int]) -> str:
    return ", ".join([f"{name}={size}" for name, size in axes.items()])
