"""Choose the largest mesh of the live ranks that shares the global batch equally."""

import math
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["ShapeRequest", "choose_shape"]


class ShapeRequest(NamedTuple):
    """The requirements of a mesh's shape.

    Attributes:
        axes: the size of each axis; -1 for the axis that grows and shrinks.
        data_axes: the axes along which ranks get different examples.
        global_batch: the examples of a step.
        micro_batch: a rank's examples of a step are a multiple of this number.
        min_ranks: the fewest ranks to train on.
    """

    axes: Mapping[str, int]
    data_axes: tuple[str, ...]
    global_batch: int
    micro_batch: int
    min_ranks: int

    @property
    def fixed_ranks(self) -> int:
        """The product of the sizes that stay."""
        return math.prod([size for size in self.axes.values() if size != -1])

    @property
    def elastic_axis(self) -> str | None:
        """The axis that grows and shrinks."""
        return next((name for name, size in self.axes.items() if size == -1), None)


def choose_shape(alive: int, request: ShapeRequest) -> dict[str, int]:
    """Return the sizes of the largest mesh among the `alive` processes. The ranks beyond it are spares.

    Raises:
        RuntimeError: if no mesh is possible. The message says what is missing.
    """
    fixed_ranks, elastic_axis = request.fixed_ranks, request.elastic_axis
    largest = alive // fixed_ranks if elastic_axis is not None else min(alive // fixed_ranks, 1)
    for size in range(largest, 0, -1):
        shape = {name: size if name == elastic_axis else n for name, n in request.axes.items()}
        shares = math.prod([shape[name] for name in request.data_axes])
        if request.global_batch % (shares * request.micro_batch) == 0 and size * fixed_ranks >= request.min_ranks:
            return shape
    raise RuntimeError(_no_shape_message(alive, request))


def _no_shape_message(alive: int, request: ShapeRequest) -> str:
    """Say why no mesh is possible."""
    axes, _, global_batch, micro_batch, min_ranks = request
    fixed_ranks, elastic_axis = request.fixed_ranks, request.elastic_axis
    text = ", ".join([f"{name}={size}" for name, size in axes.items()])
    ranks = f"{alive} rank{'s' * (alive != 1)} alive"
    if alive < fixed_ranks:
        why = (
            f"the mesh needs {fixed_ranks} ranks"
            if elastic_axis is None
            else f"the other axes of the mesh need {fixed_ranks} ranks"
        )
    elif alive < min_ranks:
        why = f"min_ranks={min_ranks} asks for more"
    else:
        micro_batch_text = f" in micro-batches of {micro_batch}" if micro_batch > 1 else ""
        why = f"global_batch={global_batch} cannot be shared{micro_batch_text} by min_ranks={min_ranks} or more of them"
    return (
        f"elastic.run({text}) with {ranks}: {why}. Start it with more ranks, or choose another global_batch or "
        "min_ranks; a run that was saved goes on from its checkpoint. torchrun --nnodes MIN:MAX waits for MIN hosts"
    )
