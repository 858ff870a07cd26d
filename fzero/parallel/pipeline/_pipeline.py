"""pipeline: a model cut at its blocks as a loss function, on any mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.levels import derivatives
from fzero._tracebacks import api_boundary
from fzero.axes import SplitRule, SplitRules, axis_names, data_axes, lookup, micro_batch, together
from fzero.graph import loop
from fzero.parallel.pipeline._checks import (
    PipelineSplit,
    blocks_of,
    check_alike,
    check_arguments,
    check_depth,
    check_schedule,
    check_shared,
    check_untied,
    map_blocks,
)
from fzero.parallel.pipeline._model import MicroBatchCall, Model, Placement, even, micro_batch_of, placed, without_axis
from fzero.parallel.pipeline._stages import Stages
from fzero.parallel.pipeline._table import run_table
from fzero.parallel.pipeline._ticks import outputs_by_ticks, run_ticks
from fzero.parallel.schedules import Schedule
from fzero.parallel.schedules import schedule as named
from fzero.ranks import Mesh
from fzero.transforms import gather

__all__ = ["Pipeline", "outputs_of_all", "pipeline", "run_all", "run_on"]

# Choose how to run a pipeline: by its schedule on real ranks, or micro-batch by micro-batch under vmap.


Pair = tuple[torch.Tensor, torch.Tensor]


def run_all(model: Model, blocks: Sequence[Any], rest: Any, calls: Sequence[MicroBatchCall]) -> Pair:
    """Run a whole model on micro-batches, one after the other, where there are no ranks to share it."""

    def run(call: MicroBatchCall) -> Pair:
        return model.run_last(rest, _through(model, blocks, rest, call), call, len(blocks))

    totals, weights = zip(*[call.run(run, call) for call in calls], strict=True)
    return torch.stack(totals).sum(), torch.stack(weights).sum()


def outputs_of_all(model: Model, blocks: Sequence[Any], rest: Any, calls: Sequence[MicroBatchCall]) -> Any:
    """Run a whole model on micro-batches, and return what `last` makes of each, one after the other."""

    def run(call: MicroBatchCall) -> Any:
        return model.run_outputs(rest, _through(model, blocks, rest, call), call, len(blocks))

    return tree.map(lambda *xs: torch.cat(xs), *[call.run(run, call) for call in calls])


def _through(model: Model, blocks: Sequence[Any], rest: Any, call: MicroBatchCall) -> Any:
    """Run all blocks, and what comes before them."""
    x = model.run_first(rest, call)
    for index, p in enumerate(blocks):
        x = model.run_block(p, x, index, call, stacked=False)
    return x


def run_on(stages: Stages, slots: list[Any], rest: Any) -> Pair:
    """Run a pipeline on the ranks of an axis.

    By its table, where each rank has a program of its own: on processes, also in a graph of fzero.jit, and in lockstep.
    By ticks where ranks are a vmap, in graphs of other tracers, and for all derivatives but one gradient.
    """
    if not stages.axis.group or torch.compiler.is_dynamo_compiling():
        return run_ticks(stages, slots, rest)
    order = derivatives(tree.tensors([slots, rest]))
    if order is None or order > 1 or (is_tracing() and not (order and loop.pipelines_are_recorded())):
        return run_ticks(stages, slots, rest)
    if is_tracing() and isinstance(micro_batch(), torch.Tensor):
        raise loop.NotScannable("a pipeline is in the loss, with micro-batches of its own")
    return run_table(stages, slots, rest, backward=order == 1)


@dataclass(frozen=True)
class Pipeline:
    """A loss function that runs a model's blocks as a pipeline, made by `fzero.pipeline`.

    Attributes:
        model: what it runs.
        axis: the axis of the mesh along which stages lie.
        micro_batches: how many it cuts a rank's batch into.
        asked: the schedule, or the name of one.
        stages: how many stages a rank holds, for a schedule by name.
        depth: how many blocks there are, or how many each stage has; None if all stages have equally many.
        blocks: the key of the blocks among the parameters.
        rule: how leaves are split along other axes, such as "tp", by their paths in the parameters without a mesh.
    """

    model: Model
    axis: str
    micro_batches: int
    asked: str | Schedule
    stages: int = 1
    depth: int | tuple[int, ...] | None = None
    blocks: str = "blocks"
    rule: SplitRule | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def split(self) -> PipelineSplit:
        """The rule for `fzero.shard(..., split=)`: each rank along the axis has its own blocks."""
        return PipelineSplit(self.axis, self.blocks, self._stacked, self.rule)

    def schedule(self, mesh: Mesh | int) -> Schedule:
        """Return the schedule on a mesh, or on so many ranks. `print` and `plot` it.

        Raises:
            ValueError: if the mesh does not have the axis, or the schedule does not fit its ranks.
        """
        ranks = mesh if isinstance(mesh, int) else self._ranks(mesh)
        if ranks not in self._cache:
            self._cache[ranks] = self._made(ranks)
        return self._cache[ranks]

    def _made(self, ranks: int) -> Schedule:
        if isinstance(self.asked, str):
            return named(self.asked, ranks, self.micro_batches, self.stages)
        if self.asked.ranks != ranks:
            raise ValueError(
                f"fzero.pipeline: the schedule {self.asked.name!r} is for {self.asked.ranks} ranks, and the axis "
                f"{self.axis!r} has {ranks}"
            )
        return self.asked

    def _ranks(self, mesh: Mesh) -> int:
        sizes = dict(mesh.shape)
        if self.axis not in sizes:
            raise ValueError(f"fzero.pipeline: {mesh!r} has no axis {self.axis!r}, along which stages lie")
        return sizes[self.axis]

    def placement(self, mesh: Mesh | int, depth: int) -> Placement:
        """Return where each of `depth` blocks lies on a mesh, or on so many ranks.

        Raises:
            ValueError: if `depth` is not what the pipeline was told, or it was not told and stages would differ.
        """
        schedule = self.schedule(mesh)
        counts = self._counts(schedule.stages, depth)
        if (schedule.ranks, counts) not in self._cache:
            self._cache[schedule.ranks, counts] = placed(schedule, counts)
        return self._cache[schedule.ranks, counts]

    def _counts(self, stages: int, depth: int) -> tuple[int, ...]:
        counts = even(depth, stages) if self.depth is None or isinstance(self.depth, int) else self.depth
        if len(counts) != stages:
            raise ValueError(
                f"fzero.pipeline: depth={counts} says how many blocks each stage has: expected a number for each of "
                f"the {stages} stages"
            )
        if self.depth is None and len(set(counts)) > 1:
            raise ValueError(
                f"fzero.pipeline: {depth} blocks on {stages} stages: some stages have one more than others, so say "
                f"depth={depth}, or how many each stage has, depth={counts}"
            )
        if sum(counts) != depth or self.depth not in (None, depth, counts):
            raise ValueError(f"fzero.pipeline: depth={self.depth}, and the parameters have {depth} blocks")
        return counts

    def stack(self, params: Any, mesh: Mesh | None = None) -> Any:
        """Stack the blocks of a model by rank: what a step's `init` takes.

        Args:
            params: a dict of parameters, with a list of blocks of one structure; or a tree that holds such dicts, as an
                optimizer's state does.
            mesh: the ranks. Without one, or where it does not have the axis, parameters stay as they are.

        Returns:
            The parameters, with the blocks as a list over a rank's slots, each leaf `[ranks, ...]`.

        Raises:
            ValueError: if there are no blocks, or they differ in structure, shapes or dtypes; or a leaf is tied to one
                outside its block. Names the block.
        """

        def stacked(params: Mapping[str, Any]) -> Sequence[Any]:
            check_alike(blocks := blocks_of(params, self.blocks), self.blocks)
            if not self._is_on(mesh):
                return blocks
            check_untied(params, self.blocks)
            return self.placement(mesh, len(blocks)).stack(blocks)

        return map_blocks(stacked, params, self.blocks)

    def unstack(self, params: Any, mesh: Mesh | None = None) -> Any:
        """Undo `stack`: a list of all blocks again, such as of what `step.gather` gave.

        Args:
            params: a dict of whole parameters, whose blocks are stacked; or a tree that holds such dicts, as an
                optimizer's state does.
            mesh: that they were stacked for.

        Raises:
            ValueError: if there are no blocks, or they were stacked for another mesh.
        """

        def unstacked(params: Mapping[str, Any]) -> Sequence[Any]:
            slots = blocks_of(params, self.blocks)
            return self._stacked(mesh, len(slots)).unstack(slots) if self._is_on(mesh) else slots

        return map_blocks(unstacked, params, self.blocks)

    def _is_on(self, mesh: Mesh | None) -> TypeGuard[Mesh]:
        """Return whether there are ranks along the pipeline's axis."""
        return mesh is not None and self.axis in mesh.axis_names

    def _stacked(self, mesh: Mesh | int, slots: int) -> Placement:
        """Return where blocks lie of which a rank has so many slots."""
        ranks = self.schedule(mesh).ranks
        depth = slots * ranks if self.depth is None else self.depth if isinstance(self.depth, int) else sum(self.depth)
        placement = self.placement(mesh, depth)
        if len(placement.blocks[0]) != slots:
            raise ValueError(
                f"fzero.pipeline: the parameters have {slots} stacked blocks a rank, and {depth} blocks on {ranks} "
                f"ranks take {len(placement.blocks[0])}: they were stacked for another mesh, or not at all (loss.stack)"
            )
        return placement

    @api_boundary
    def __call__(
        self, params: Mapping[str, Any], batch: Any, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of this rank's batch, and that of their weights.

        Args:
            params: as `stack` made them, whole or in boxes. Without a mesh, as they were.
            batch: a tree of tensors `[micro_batches b, ...]`; leaves of shape [] are in each micro-batch.
            key: from which `first`, each block and `last` draw their random numbers, if they do. A block's draws
                depend on its number and the micro-batch, so they are the same on any mesh.

        Returns:
            `(total, weight)`, for `fzero.value_and_grad(loss, reduce="weighted")`. They are zero on all ranks along the
            axis but that of the last stage.
        """
        return self._run(self.model, run_all, run_on, params, batch, key)

    def outputs(self, last: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make the function that runs the model forward, and returns what `last` makes of each example.

        It is what `fzero.evaluate` and `fzero.predict` take. It is not differentiated.

        Args:
            last: `(rest, x, batch) -> a tree of tensors [b, ...]`, of the b examples of a micro-batch; by default the
                pipeline's own.

        Returns:
            `(params, batch, key=None) -> the tree`, of all micro-batches one after the other, on all ranks along the
            axis.

        Raises:
            TypeError: if `last` is no function; when called, if it gives anything else.

        Example:
            >>> import fzero
            >>> loss = fzero.pipeline(
            ...     block=lambda p, x: x + p,
            ...     first=lambda rest, batch: batch,
            ...     last=lambda rest, x, batch: x.mean(),
            ...     micro_batches=2,
            ... )
            >>> loss.outputs(lambda rest, x, batch: x)({"blocks": [torch.ones(1), torch.ones(1)]}, torch.arange(4.0))
            tensor([2., 3., 4., 5.])
        """
        if last is not None and not callable(last):
            raise TypeError(f"fzero.pipeline: outputs: last={last!r}: expected a function (rest, x, batch) -> a tree")
        model = self.model if last is None else replace(self.model, last=last)

        @api_boundary
        def outputs(params: Any, batch: Any, key: torch.Tensor | None = None) -> Any:
            with torch.no_grad():
                return self._run(model, outputs_of_all, outputs_by_ticks, params, batch, key)

        return outputs

    def _run(self, model: Model, alone: Callable[..., Any], on_ranks: Callable[..., Any], *args: Any) -> Any:
        """Run a model on the ranks along the axis, or where there are none alone."""
        params, batch, key = args
        slots = blocks_of(params, self.blocks)
        rest = gather({name: x for name, x in params.items() if name != self.blocks})
        outer = micro_batch() * self.micro_batches

        def call_of(number: int | torch.Tensor, in_a_turn: bool = False) -> MicroBatchCall:
            return MicroBatchCall(micro_batch_of(batch, self.micro_batches, number, in_a_turn), outer + number, key)

        if self.axis not in axis_names():
            return alone(model, slots, rest, [call_of(m) for m in range(self.micro_batches)])
        if self.axis not in [a.name for a in data_axes()]:
            mean = (*[a.name for a in data_axes()], self.axis)
            raise ValueError(
                f"fzero.pipeline: the step averages over {mean[:-1]}, and ranks along {self.axis!r} share one loss: "
                f"name it, too, fzero.shard(..., axis={mean})"
            )
        check_shared(batch, axis := lookup(self.axis))
        schedule, placement = self.schedule(axis.size), self._stacked(axis.size, len(slots))
        stages = Stages(model, schedule, placement, axis, call_of, self._cache)
        return without_axis(self.axis, on_ranks, stages, list(slots), rest)


@api_boundary
def pipeline(
    *,
    block: Callable[..., Any],
    first: Callable[..., Any],
    last: Callable[..., Any],
    micro_batches: int,
    axis: str = "pp",
    schedule: str | Schedule = "1f1b",
    stages: int = 1,
    depth: int | Sequence[int] | None = None,
    remat: Any = False,
    blocks: str = "blocks",
    split: SplitRules | None = None,
) -> Pipeline:
    """Make a loss function of a model that is cut at its blocks, which runs them as a pipeline.

    The ranks along an axis hold the blocks, some each, and micro-batches go from rank to rank. To all that is around
    it, this is a loss like another: every ZeRO stage, optimizer and clip works as without it. Gradients are reduced
    once a step, and parameters gathered once. Without a mesh, or on one without the axis, it is the ordinary loss.

    Args:
        block: `(p, x) -> x`: one block, of its parameters and what the one before it made. That is a tensor, or a tree
            of tensors, and goes out in the shapes and dtypes in which it came. Parameters named `index` and `batch` are
            handed the number of the block and the micro-batch.
        first: `(rest, batch) -> x`: what comes before the blocks; `rest` are all other parameters, a dict.
        last: `(rest, x, batch) -> (total, weight)`: what comes after them: the sum of the losses and that of their
            weights. Or a mean over the micro-batch.
        micro_batches: M. A rank's batch is cut in M equal parts along dimension 0.
        axis: of the mesh, along which stages lie; it is one of the axes of the mean.
        schedule: "gpipe", "1f1b", "interleaved", "zb", "zbv", or a table (`fzero.parallel.schedules.schedule`).
        stages: how many stages a rank holds, for a schedule by name: 2 or more where it is "interleaved".
        depth: the number of blocks, or that of each stage; needed where stages have unequally many.
        remat: whether each block runs again in the backward pass; or what it saves then, as `fzero.remat(save=)` takes.
        blocks: the key of the list of blocks in the dict of parameters.
        split: a rule for leaves that are split along other axes, by their paths without a mesh, such as
            "blocks.3.up": tensor and expert parallelism. Or several.

    Returns:
        A `Pipeline`: a loss `(params, batch) -> (total, weight)`, with `stack`, `unstack`, `split` and `schedule`.

    Raises:
        ValueError: if an argument is out of its range, or a schedule cannot be run.
        TypeError: if `block`, `first` or `last` is no function, or `schedule` neither a name nor a table.

    Example:
        >>> import fzero, torch
        >>> loss = fzero.pipeline(
        ...     block=lambda p, x: torch.tanh(x @ p["w"]),
        ...     first=lambda rest, batch: batch["x"],
        ...     last=lambda rest, x, batch: (x @ rest["head"] - batch["y"]).square().mean(),
        ...     micro_batches=2,
        ... )
        >>> params = {"blocks": [{"w": torch.eye(3)} for _ in range(4)], "head": torch.ones(3, 1)}
        >>> batch = {"x": torch.ones(8, 3), "y": torch.ones(8, 1)}
        >>> fzero.value_and_grad(loss, reduce="weighted")(params, batch)[0]
        tensor(0.2893)
        >>> mesh = fzero.mesh(dp=2, pp=2)
        >>> step = fzero.shard(
        ...     fzero.value_and_grad(loss, reduce="weighted"), stage=3, mesh=mesh, axis=("dp", "pp"), split=loss.split
        ... )

    References:
        Huang et al., GPipe, 2019 (arXiv:1811.06965); Narayanan et al., 2021 (arXiv:2104.04473).
    """
    check_arguments({"block": block, "first": first, "last": last}, {"micro_batches": micro_batches, "stages": stages})
    check_schedule(schedule, micro_batches, stages)
    counts = None if depth is None else check_depth(depth)
    model = Model(block, first, last, remat)
    return Pipeline(model, axis, micro_batches, schedule, stages, counts, blocks, together(split))
