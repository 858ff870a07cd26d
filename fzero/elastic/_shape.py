"""Choose the largest mesh of the live ranks that shares the global batch equally."""

import math
from collections.abc import Mapping

__all__ = ["choose_shape"]


def choose_shape(
    alive: int, axes: Mapping[str, int], data_axes: tuple[str, ...], global_batch: int, micro_batch: int, min_ranks: int
) -> dict[str, int]:
    """Return the sizes of the largest mesh among the ranks that are alive. The ranks beyond it are spares.

    Args:
        alive: the number of processes.
        axes: the size of each axis; -1 for the axis that grows and shrinks.
        data_axes: the axes along which ranks get different examples.
        global_batch: the examples of a step.
        micro_batch: a rank's examples of a step are a multiple of this number.
        min_ranks: the fewest ranks to train on.

    Raises:
        RuntimeError: if no mesh is possible. The message says what is missing.
    """
    fixed = math.prod([size for size in axes.values() if size != -1])
    grows = next((name for name, size in axes.items() if size == -1), None)
    sizes = range(alive // fixed, 0, -1) if grows is not None else [1] if fixed <= alive else []
    for size in sizes:
        shape = {name: size if name == grows else n for name, n in axes.items()}
        shares = math.prod([shape[name] for name in data_axes])
        if global_batch % (shares * micro_batch) == 0 and size * fixed >= min_ranks:
            return shape
    raise RuntimeError(_impossible(alive, axes, fixed, grows, global_batch, micro_batch, min_ranks))


def _impossible(
    alive: int,
    axes: Mapping[str, int],
    fixed: int,
    grows: str | None,
    global_batch: int,
    micro_batch: int,
    min_ranks: int,
) -> str:
    """Say why no mesh is possible."""
    text = ", ".join([f"{name}={size}" for name, size in axes.items()])
    ranks = f"{alive} rank{'s' * (alive != 1)} alive"
    if alive < fixed:
        why = f"the mesh needs {fixed} ranks" if grows is None else f"the other axes of the mesh need {fixed} ranks"
    elif alive < min_ranks:
        why = f"min_ranks={min_ranks} asks for more"
    else:
        each = f" in micro-batches of {micro_batch}" if micro_batch > 1 else ""
        why = f"global_batch={global_batch} cannot be shared{each} by min_ranks={min_ranks} or more of them"
    return (
        f"elastic.run({text}) with {ranks}: {why}. Start it with more ranks, or choose another global_batch or "
        "min_ranks; a run that was saved goes on from its checkpoint. torchrun --nnodes MIN:MAX waits for MIN hosts"
    )
