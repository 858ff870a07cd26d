"""The sizes of a mesh's axes: the sizes given, and the size of the axis that takes the rest of the world."""

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from fzero._arguments import did_you_mean, is_int

__all__ = ["check_axes", "fill_shape", "index_along"]

_Shape = tuple[tuple[str, int], ...]

_ARGUMENTS = ("simulate", "simulated_ranks", "device", "timeout")  # of `mesh`, besides its axes


def index_along(sizes: Mapping[str, int], coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
    """Return the index along several axes together, the first one the slowest; 0 along none.

    Args:
        sizes: the number of ranks along each axis.
        coordinates: the index along each axis.
        axes: the names of the axes.
    """
    index = 0
    for name in axes:
        index = index * sizes[name] + coordinates[name]
    return index


def check_axes(axes: Mapping[str, int], simulated_ranks: int | None, arguments: Sequence[str] = _ARGUMENTS) -> None:
    """Check a mesh's axes, as far as this is possible without the world.

    Args:
        axes: the size of each axis.
        simulated_ranks: the number of ranks in a simulation; None for the product of the sizes.
        arguments: the arguments of the function that was given the axes: a name near one of them is a typing error.

    Raises:
        ValueError: if there is no axis, a name is not a Python name, a size is out of range, or several sizes are -1.
            Also if `simulated_ranks` is given and no size is -1.
        TypeError: if a size or `simulated_ranks` is not an int, or a name is nearly that of an argument of `mesh`.
    """
    if not axes:
        raise ValueError("a mesh has at least one axis, such as mesh(dp=4)")
    for name, size in axes.items():
        if not name.isidentifier():  # a comma would join the names of several axes
            raise ValueError(f"axis {name!r}: the name of an axis is a Python name, such as 'dp'")
        if typos := get_close_matches(name, arguments, 1, cutoff=0.85):  # else a mistyped argument is an axis
            raise TypeError(f"{name}={size!r}: did you mean {typos[0]}=? An axis needs a name that is less like it")
        if not is_int(size):
            hint = did_you_mean(name, arguments, "{}=")
            if isinstance(size, tuple | list):
                hint = "; each axis has a name of its own, fzero.mesh(dp=2, tp=2)"
            raise TypeError(
                f"{name}={size!r}: expected an int, the number of ranks of an axis, such as fzero.mesh(dp=2){hint}"
            )
        if size < 1 and size != -1:
            raise ValueError(f"{name}={size}: an axis has at least one rank; -1 means the whole world")
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{' and '.join(open_axes)} are -1: only one axis can take the rest of the world")
    if simulated_ranks is None:
        return
    if not is_int(simulated_ranks):
        raise TypeError(
            f"simulated_ranks={simulated_ranks!r}: expected an int, the number of ranks to simulate without a world"
        )
    if simulated_ranks < 1:
        raise ValueError(f"simulated_ranks={simulated_ranks}: expected at least one rank to simulate")
    if not open_axes:
        text, first_axis = _axes_text(axes), next(iter(axes))
        raise ValueError(
            f"{text}, simulated_ranks={simulated_ranks}, but no axis is -1: "
            f"pass {first_axis}=-1, or leave out simulated_ranks"
        )


def fill_shape(axes: Mapping[str, int], world: int | None, simulated_ranks: int | None) -> _Shape:
    """Replace a size of -1 by the number of ranks that the other axes leave.

    Args:
        axes: the sizes, checked by `check_axes`.
        world: the number of processes; None in a simulation.
        simulated_ranks: the number of ranks in a simulation; None for the product of the other sizes.

    Raises:
        ValueError: if the size of the mesh would differ from the number of ranks.
    """
    fixed_size = math.prod([size for size in axes.values() if size != -1])
    ranks = (simulated_ranks or fixed_size) if world is None else world
    shape = tuple([(name, max(ranks // fixed_size, 1) if size == -1 else size) for name, size in axes.items()])
    product = math.prod([size for _, size in shape])
    if world is not None and product != world:
        raise ValueError(
            f"{_axes_text(axes)}, but the world has {_format_processes(world)}: {_shape_advice(axes, world, product)}"
        )
    if simulated_ranks is not None and world is None and product != simulated_ranks:
        raise ValueError(
            f"{_axes_text(axes)}, simulated_ranks={simulated_ranks}: {simulated_ranks} is not divisible by "
            f"{fixed_size}; pass a multiple of {fixed_size}"
        )
    return shape


def _shape_advice(axes: Mapping[str, int], world: int, product: int) -> str:
    fixed_size = math.prod([size for size in axes.values() if size != -1])
    if -1 in axes.values():
        return f"{world} is not divisible by {fixed_size}; pass sizes whose product divides {world}"
    rest = "the whole world" if len(axes) == 1 else "the rest of the world"
    return f"launch with torchrun --nproc-per-node {product}, or pass {next(iter(axes))}=-1 for {rest}"


def _format_processes(world: int) -> str:
    return f"{world} process{'es' * (world != 1)}"


def _axes_text(axes: Mapping[str, int]) -> str:
    return ", ".join([f"{name}={size}" for name, size in axes.items()])
