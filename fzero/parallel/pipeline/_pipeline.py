"""pipeline: a model of repeated blocks as a loss function that runs them as a pipeline, on any mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from fzero import tree
from fzero._tracebacks import api_boundary, api_boundary_with
from fzero.axes import SplitRule, SplitRules, axis_names, bound_axis, join_rules, loss_axes, micro_batch
from fzero.parallel.pipeline._block_placement import BlockPlacement, even_counts, place_blocks
from fzero.parallel.pipeline._execution import run_on_ranks
from fzero.parallel.pipeline._model import MicroBatchCall, Model, call_without_axis, take_micro_batch
from fzero.parallel.pipeline._model_checks import (
    check_alike,
    check_arguments,
    check_depth,
    check_rules,
    check_schedule,
    check_shared,
    check_untied,
    find_block_list,
    map_blocks,
)
from fzero.parallel.pipeline._pipeline_split import PipelineSplit
from fzero.parallel.pipeline._stage_functions import PipelineCache, PipelineStages
from fzero.parallel.pipeline._ticks import outputs_by_ticks
from fzero.parallel.schedules import PipelineSchedule
from fzero.parallel.schedules import schedule as schedule_by_name
from fzero.ranks import Mesh
from fzero.transforms import gather
from fzero.tree import Tree

__all__ = ["Pipeline", "pipeline"]


_LossSum = tuple[torch.Tensor, torch.Tensor]  # the sum of losses, and the sum of their weights


def _run_full(model: Model, blocks: Sequence[Any], rest: Any, calls: Sequence[MicroBatchCall]) -> _LossSum:
    """Run the full model on each micro-batch in order, on a mesh without the pipeline's axis."""

    def run(call: MicroBatchCall) -> _LossSum:
        return model.run_last(rest, _run_blocks(model, blocks, rest, call), call, len(blocks))

    totals, weights = zip(*[call.run(run, call) for call in calls], strict=True)
    return torch.stack(totals).sum(), torch.stack(weights).sum()


def _run_full_model(model: Model, blocks: Sequence[Any], rest: Any, calls: Sequence[MicroBatchCall]) -> Any:
    """Run the full model on each micro-batch in order, and return the concatenated results of `last`."""

    def run(call: MicroBatchCall) -> Any:
        return model.run_outputs(rest, _run_blocks(model, blocks, rest, call), call, len(blocks))

    return tree.map(lambda *xs: torch.cat(xs), *[call.run(run, call) for call in calls])


def _run_blocks(model: Model, blocks: Sequence[Any], rest: Any, call: MicroBatchCall) -> Any:
    """Run the part before the blocks, and all blocks."""
    x = model.run_first(rest, call)
    for index, p in enumerate(blocks):
        x = model.run_block(p, x, index, call, stacked=False)
    return x


@dataclass(frozen=True)
class Pipeline:
    """A loss function that runs a model's blocks as a pipeline, made by `fzero.pipeline`.

    Attributes:
        model: the functions of the model.
        axis: the axis of the mesh along which stages lie.
        micro_batches: the number of micro-batches into which a rank's batch is split.
        schedule_or_name: the schedule, or the name of one.
        stages_per_rank: the number of stages per rank, for a schedule by name.
        depth: the number of blocks, or each stage's number of blocks; None if all stages have the same number.
        blocks: the key of the blocks among the parameters.
        rule: the rule for leaves that are split along other axes, such as "tp", by their paths without a mesh.
    """

    model: Model
    axis: str
    micro_batches: int
    schedule_or_name: str | PipelineSchedule
    stages_per_rank: int = 1
    depth: int | tuple[int, ...] | None = None
    blocks: str = "blocks"
    rule: SplitRule | None = None
    _cache: PipelineCache = field(default_factory=PipelineCache, repr=False, compare=False)

    @property
    def split(self) -> PipelineSplit:
        """The rule for `fzero.shard(..., split=)`: each rank along the axis holds its own blocks."""
        return PipelineSplit(self.axis, self.blocks, self._place_blocks, self.rule)

    def schedule(self, mesh: Mesh | int) -> PipelineSchedule:
        """Return the schedule on a mesh, or on a number of ranks. It has `print` and `plot`.

        Raises:
            ValueError: if the mesh does not have the axis, or the schedule does not fit its ranks.
        """
        ranks = mesh if isinstance(mesh, int) else self._ranks(mesh)
        schedules = self._cache.schedules
        if ranks not in schedules:
            schedules[ranks] = self._build_schedule(ranks)
        return schedules[ranks]

    def _build_schedule(self, ranks: int) -> PipelineSchedule:
        schedule = self.schedule_or_name
        if isinstance(schedule, str):
            return schedule_by_name(schedule, ranks, self.micro_batches, self.stages_per_rank)
        if schedule.ranks != ranks:
            raise ValueError(
                f"fzero.pipeline: the schedule {schedule.name!r} is for {schedule.ranks} ranks, but the axis "
                f"{self.axis!r} has {ranks}: make it for as many ranks"
            )
        return schedule

    def _ranks(self, mesh: Mesh) -> int:
        sizes = dict(mesh.shape)
        if self.axis not in sizes:
            raise ValueError(f"fzero.pipeline: {mesh!r} has no axis {self.axis!r}, along which stages lie")
        return sizes[self.axis]

    def placement(self, mesh: Mesh | int, depth: int) -> BlockPlacement:
        """Return the placement of `depth` blocks on a mesh, or on a number of ranks.

        Raises:
            ValueError: if `depth` differs from the pipeline's, or the pipeline has none and stages would differ.
        """
        schedule = self.schedule(mesh)
        placements, key = self._cache.placements, (schedule.ranks, self._block_counts(schedule.stages, depth))
        if key not in placements:
            placements[key] = place_blocks(schedule, key[1])
        return placements[key]

    def _block_counts(self, stages: int, depth: int) -> tuple[int, ...]:
        """Return the number of blocks of each stage; an error if it does not follow from `depth=`."""
        counts = even_counts(depth, stages) if self.depth is None or isinstance(self.depth, int) else self.depth
        if len(counts) != stages:
            raise ValueError(
                f"fzero.pipeline: depth={counts} gives the number of blocks per stage: expected a number for each of "
                f"the {stages} stages"
            )
        if self.depth is None and len(set(counts)) > 1:
            raise ValueError(
                f"fzero.pipeline: {depth} blocks on {stages} stages: some stages have one more than others. Confirm "
                f"this with depth={depth}, or give each stage's number of blocks, depth={counts}"
            )
        if sum(counts) != depth or self.depth not in (None, depth, counts):
            raise ValueError(f"fzero.pipeline: depth={self.depth}, but the parameters have {depth} blocks")
        return counts

    def stack(self, params: Tree, mesh: Mesh | None = None) -> Tree:
        """Stack the blocks of a model by rank, as a step's `init` takes them.

        Args:
            params: a dict of parameters, with a list of blocks of one structure; or a tree that holds such dicts, such
                as an optimizer's state.
            mesh: the ranks. Without a mesh, or on a mesh without the axis, parameters stay as they are.

        Returns:
            The parameters. Their blocks are a list over a rank's slots, in which each leaf is `[ranks, ...]`.

        Raises:
            ValueError: if there are no blocks, or they differ in structure, shapes or dtypes; or if a leaf is tied to
                one outside its block. The message names the block.
        """

        def stack_blocks(params: Mapping[str, Any]) -> Sequence[Any]:
            check_alike(blocks := find_block_list(params, self.blocks), self.blocks)
            if not self._is_on(mesh):
                return blocks
            check_untied(params, self.blocks)
            return self.placement(mesh, len(blocks)).stack(blocks)

        return map_blocks(stack_blocks, params, self.blocks)

    def unstack(self, params: Tree, mesh: Mesh | None) -> Tree:
        """Undo `stack`: return the list of all blocks, for example from the result of `step.gather`.

        Args:
            params: a dict of full parameters, whose blocks are stacked; or a tree that holds such dicts, such as an
                optimizer's state.
            mesh: the mesh for which they were stacked; it must be given, since stacked blocks look like blocks. With
                None, or a mesh without the axis, nothing is stacked and the parameters stay as they are.

        Raises:
            ValueError: if there are no blocks, or they were stacked for another mesh.
        """

        def unstack_blocks(params: Mapping[str, Any]) -> Sequence[Any]:
            block_slots = find_block_list(params, self.blocks)
            if self._is_on(mesh):
                return self._place_blocks(mesh, len(block_slots)).unstack(block_slots)
            if self._depth not in (None, len(block_slots)):
                raise ValueError(
                    f"fzero.pipeline: loss.unstack was given mesh={mesh} and {len(block_slots)} blocks, but the model "
                    f"has {self._depth}: pass the mesh for which they were stacked, loss.unstack(params, mesh)"
                )
            return block_slots

        return map_blocks(unstack_blocks, params, self.blocks)

    @property
    def _depth(self) -> int | None:
        """The number of blocks; None if it follows from the parameters."""
        return sum(self.depth) if isinstance(self.depth, tuple) else self.depth

    def _is_on(self, mesh: Mesh | None) -> TypeGuard[Mesh]:
        """Return whether the mesh has the pipeline's axis."""
        return mesh is not None and self.axis in mesh.axis_names

    def _place_blocks(self, mesh: Mesh | int, block_slots: int) -> BlockPlacement:
        """Return the placement of blocks for a number of slots per rank."""
        ranks = self.schedule(mesh).ranks
        depth = block_slots * ranks if self._depth is None else self._depth
        placement = self.placement(mesh, depth)
        if len(placement.blocks[0]) != block_slots:
            raise ValueError(
                f"fzero.pipeline: the parameters have {block_slots} stacked blocks a rank, but {depth} blocks on "
                f"{ranks} ranks take {len(placement.blocks[0])}: they were stacked for another mesh, or not at all "
                "(loss.stack)"
            )
        return placement

    @api_boundary
    def __call__(
        self, params: Mapping[str, Any], batch: Tree, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of this rank's batch, and the sum of their weights.

        Args:
            params: the parameters as `stack` returned them, full or in boxes. Without a mesh they are not stacked.
            batch: a tree of tensors `[micro_batches b, ...]`; leaves of shape [] are in each micro-batch.
            key: the key for random numbers in `first`, the blocks and `last`. A block's numbers depend on its number
                and on the micro-batch, so they are the same on any mesh.

        Returns:
            `(total, weight)`, for `fzero.value_and_grad(loss, reduce="weighted")`. They are zero on all ranks along the
            axis except that of the last stage.
        """
        return self._run_on_ranks(self.model, _run_full, run_on_ranks, params, batch, key)

    def outputs(self, last: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return a function that runs the model forward, and returns the results of `last` for each example.

        Pass it to `fzero.evaluate` or `fzero.predict`. It is not differentiated.

        Args:
            last: `(rest, x, batch) -> a tree of tensors [b, ...]`, for the b examples of a micro-batch; by default the
                pipeline's own `last`.

        Returns:
            A function `(params, batch, key=None) -> tree`. The tree holds the results of all micro-batches in order, on
            all ranks along the axis.

        Raises:
            TypeError: if `last` is not a function. The function raises it if `last` returns anything else.

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
                return self._run_on_ranks(model, _run_full_model, outputs_by_ticks, params, batch, key)

        return outputs

    def _run_on_ranks(
        self, model: Model, on_one_rank: Callable[..., Any], on_ranks: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a model on the ranks along the axis; without the axis, run the full model here."""
        params, batch, key = args
        block_slots = find_block_list(params, self.blocks)
        rest = gather({name: x for name, x in params.items() if name != self.blocks})
        outer = micro_batch() * self.micro_batches

        def make_call(index: int | torch.Tensor, in_loop: bool = False) -> MicroBatchCall:
            return MicroBatchCall(take_micro_batch(batch, self.micro_batches, index, in_loop), outer + index, key)

        if self.axis not in axis_names():
            return on_one_rank(model, block_slots, rest, [make_call(m) for m in range(self.micro_batches)])
        if self.axis not in [a.name for a in loss_axes()]:
            axes = (*[a.name for a in loss_axes()], self.axis)
            raise ValueError(
                f"fzero.pipeline: the step averages over {axes[:-1]}, but ranks along {self.axis!r} share one loss: "
                f"add this axis, fzero.shard(..., axis={axes})"
            )
        check_shared(batch, axis := bound_axis(self.axis))
        schedule, placement = self.schedule(axis.size), self._place_blocks(axis.size, len(block_slots))
        stages = PipelineStages(
            model=model, schedule=schedule, placement=placement, axis=axis, make_call=make_call, cache=self._cache
        )
        return call_without_axis(self.axis, on_ranks, stages, list(block_slots), rest)


@api_boundary_with("a pipeline is made of functions: fzero.pipeline(block=, first=, last=, micro_batches=)")
def pipeline(
    *,
    block: Callable[..., Any],
    first: Callable[..., Any],
    last: Callable[..., Any],
    micro_batches: int,
    axis: str = "pp",
    schedule: str | PipelineSchedule = "1f1b",
    stages_per_rank: int = 1,
    depth: int | Sequence[int] | None = None,
    remat: Any = False,
    blocks: str = "blocks",
    split: SplitRules | None = None,
) -> Pipeline:
    """Make a loss function that runs a model's blocks as a pipeline.

    Each rank along an axis holds some of the blocks, and micro-batches pass from rank to rank. For everything else
    this is an ordinary loss: every ZeRO stage, optimizer and clip works as without a pipeline. Gradients are reduced
    once a step, and parameters gathered once. Without a mesh, or on a mesh without the axis, the full model runs.

    Args:
        block: `(p, x) -> x`: one block. `p` are its parameters, and `x` is the previous block's output: a tensor, or a
            tree of tensors, whose shapes and dtypes no block changes. If the function takes `index` or `batch`, it
            receives the number of the block or the micro-batch.
        first: `(rest, batch) -> x`: the part before the blocks; `rest` is the dict of all other parameters.
        last: `(rest, x, batch) -> (total, weight)`: the part after the blocks. It returns the sum of the losses and the
            sum of their weights, or a mean over the micro-batch.
        micro_batches: M. A rank's batch is split into M equal parts along dimension 0.
        axis: the axis of the mesh along which stages lie; the step must also average over it.
        schedule: a name in the table of `fzero.parallel.schedules.schedule`, such as "1f1b" or "zb"; or a
            `PipelineSchedule`.
        stages_per_rank: the number of stages per rank, for a schedule by name: at least 2 for "interleaved".
        depth: the number of blocks, or a list with each stage's number of blocks; needed if these numbers differ.
        remat: True to run each block again in the backward pass, or a value for `fzero.remat(save=)`, which sets what a
            block saves.
        blocks: the key of the list of blocks in the dict of parameters.
        split: one or several rules for leaves that are split along other axes, for tensor or expert parallelism. A rule
            sees paths without a mesh, such as "blocks.3.up".

    Returns:
        A `Pipeline`: a loss `(params, batch) -> (total, weight)`, with `stack`, `unstack`, `split` and `schedule`.

    Raises:
        ValueError: if an argument is out of range, or a schedule cannot run.
        TypeError: if `block`, `first` or `last` is not a function, or `schedule` is neither a name nor a table.

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
    check_arguments(
        {"block": block, "first": first, "last": last},
        {"micro_batches": micro_batches, "stages_per_rank": stages_per_rank},
    )
    check_schedule(schedule, micro_batches, stages_per_rank)
    counts = None if depth is None else check_depth(depth)
    check_rules(remat, rule := join_rules(split))
    model = Model(block, first, last, remat)
    return Pipeline(
        model=model,
        axis=axis,
        micro_batches=micro_batches,
        schedule_or_name=schedule,
        stages_per_rank=stages_per_rank,
        depth=counts,
        blocks=blocks,
        rule=rule,
    )
