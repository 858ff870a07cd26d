"""Batch arithmetic: global batch = micro-batch x accumulation x data-parallel ranks."""

import math
from typing import Any, NamedTuple

from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName
from fzero.ranks import Mesh

__all__ = ["BatchPlan", "batch_plan"]


class BatchPlan(NamedTuple):
    """The sizes of a batch, in samples: `global_batch == micro_batch * accumulation * ranks`.

    Attributes:
        global_batch: samples of one step, over all ranks.
        micro_batch: samples in one forward and backward pass of a rank.
        accumulation: micro-batches of a rank in one step: `micro_batches=` of `fzero.value_and_grad`, or of a pipeline.
        ranks: data-parallel ranks, each of which has its own batch.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    ranks: int

    @property
    def local_batch(self) -> int:
        """Samples of one step on one rank, as it loads them for `mesh.local`."""
        return self.micro_batch * self.accumulation


@api_boundary
def batch_plan(
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    mesh: Mesh,
    axis: AxisName = None,
    model_axes: AxisName = None,
) -> BatchPlan:
    """Derive global batch, micro-batch or accumulation from the other two.

    Ranks along an axis of tensor parallelism, or of a pipeline, share a batch. So the batch grows with the number of
    data-parallel ranks, not with the world.

    Args:
        global_batch: samples of one step, over all ranks.
        micro_batch: samples in one forward and backward pass of a rank.
        accumulation: micro-batches of a rank in one step.
        mesh: the ranks.
        axis: the data-parallel axes, as `fzero.shard` takes them, with or without a pipeline's axis. Needed if the mesh
            has several axes besides those in `model_axes`.
        model_axes: the axes whose ranks share a batch; by default "pp", and "tp" unless `axis` names it.

    Returns:
        A `BatchPlan`.

    Raises:
        ValueError: if fewer than two sizes are given, a size is not a positive int, the sizes contradict one another,
            or the division leaves a remainder. The message names all sizes. Also if the mesh has several candidates
            for the data-parallel axis.

    Example:
        >>> import fzero
        >>> fzero.data.batch_plan(global_batch=512, micro_batch=4, mesh=fzero.mesh(dp=8))
        BatchPlan(global_batch=512, micro_batch=4, accumulation=16, ranks=8)
        >>> fzero.data.batch_plan(global_batch=512, micro_batch=4, mesh=fzero.mesh(dp=8, pp=4, tp=2)).accumulation
        16
    """
    args = {"global_batch": global_batch, "micro_batch": micro_batch, "accumulation": accumulation}
    sizes = dict(mesh.shape)
    ranks = math.prod([sizes[name] for name in _data_axes(mesh, axis, model_axes)])
    for name, value in args.items():
        if value is not None:
            check_int(name, value)
    settings = {name: value for name, value in args.items() if value is not None}
    if len(settings) < 2:
        raise ValueError(f"got {settings or 'no sizes'} and {ranks} ranks: expected two of {', '.join(args)}")
    return _solve_sizes(settings, ranks)


def _data_axes(mesh: Mesh, axis: AxisName, model_axes: AxisName) -> list[str]:
    """List the axes whose ranks have different batches."""
    names = mesh.names(axis)
    if model_axes is None:
        shared = ("pp", "tp") if axis is None else ("pp",)
    else:
        shared = mesh.names(model_axes) if model_axes != () else ()
    data_axes = [name for name in names if name not in shared]
    if axis is None and len(data_axes) > 1:
        raise ValueError(
            f"the mesh has the axes {tuple(data_axes)}: name the data-parallel ones, "
            f"axis={data_axes[0]!r} or {tuple(data_axes)}"
        )
    return data_axes


def _solve_sizes(settings: dict[str, Any], ranks: int) -> BatchPlan:
    """Derive the size that is not given from the others, or raise an error that says which sizes fit."""
    text = ", ".join([f"{name}={value}" for name, value in settings.items()])
    if "global_batch" not in settings:
        m, k = settings["micro_batch"], settings["accumulation"]
        return BatchPlan(m * k * ranks, m, k, ranks)
    total = settings["global_batch"]
    rest = settings.get("micro_batch", 1) * settings.get("accumulation", 1) * ranks
    if len(settings) == 3 and total != rest:
        raise ValueError(
            f"{text} and {ranks} data-parallel ranks contradict one another: {settings['micro_batch']} x "
            f"{settings['accumulation']} x {ranks} = {rest}, not {total}; omit one to have it derived"
        )
    if total % rest:
        missing = "accumulation" if "micro_batch" in settings else "micro_batch"
        below, above = total // rest * rest, (total // rest + 1) * rest
        nearest = f"nearest global batches are {below} and {above}" if below else f"smallest global batch is {above}"
        raise ValueError(
            f"{text} and {ranks} data-parallel ranks: {total} is not a multiple of {rest}, so no {missing} fits; the "
            f"{nearest}"
        )
    quotient = total // rest
    return BatchPlan(total, settings.get("micro_batch", quotient), settings.get("accumulation", quotient), ranks)
