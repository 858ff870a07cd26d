"""A rank's stages as functions of tensors, which schedules run forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import Axis
from fzero.parallel.pipeline._block_placement import BlockPlacement
from fzero.parallel.pipeline._model import MicroBatchCall, Model
from fzero.parallel.schedules import PipelineSchedule

__all__ = ["FlatParams", "PipelineCache", "PipelineStages", "ValueSpec"]


class FlatParams(NamedTuple):
    """A rank's parameters as a list of tensors. Leaves that are not tensors stay in the structures.

    Attributes:
        tensors: the tensors of the slots in order, and then those of the rest.
        structures: for each slot, its structure and its leaves that are not tensors.
        sizes: the number of tensors of each slot.
        rest: the structure of the rest, with its leaves that are not tensors.
    """

    tensors: list[torch.Tensor]
    structures: "list[_TreeSpec]"
    sizes: list[int]
    rest: "_TreeSpec"

    @staticmethod
    def of(block_slots: Sequence[Any], rest: Any) -> "FlatParams":
        """Make a list of the tensors of trees."""
        flat = [_TreeSpec.of(block_slot) for block_slot in block_slots]
        rest_tensors, rest_spec = _TreeSpec.of(rest)
        tensors = [x for leaves, _ in flat for x in leaves] + rest_tensors
        return FlatParams(tensors, [f for _, f in flat], [len(leaves) for leaves, _ in flat], rest_spec)

    def indices(self, block_slots: Sequence[int], rest: bool) -> list[int]:
        """Return the indices of the tensors of some slots, and of the rest if `rest` is set."""
        begin = [sum(self.sizes[:s]) for s in range(len(self.sizes) + 1)]
        indices = [i for s in block_slots for i in range(begin[s], begin[s + 1])]
        return indices + (list(range(begin[-1], len(self.tensors))) if rest else [])

    def trees(self, block_slots: Sequence[int], rest: bool, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        """Rebuild the trees of slots, and the rest or None, from the tensors at `indices(block_slots, rest)`."""
        remainder = list(tensors)
        trees = []
        for s in block_slots:
            trees.append(self.structures[s].fill(remainder[: self.sizes[s]]))
            del remainder[: self.sizes[s]]
        return trees, self.rest.fill(remainder) if rest else None


class _TreeSpec(NamedTuple):
    """A tree without its tensors.

    Attributes:
        structure: the structure of the tree.
        constants: its leaves, with a placeholder for each tensor.
    """

    structure: Any
    constants: list[Any]

    @staticmethod
    def of(values: Any) -> "tuple[list[torch.Tensor], _TreeSpec]":
        """Separate the tensors of a tree from the rest."""
        leaves, structure = tree.flatten(values)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return tensors, _TreeSpec(structure, [_EMPTY if isinstance(x, torch.Tensor) else x for x in leaves])

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Rebuild the tree with tensors."""
        iterator = iter(tensors)
        return tree.unflatten(self.structure, [next(iterator) if x is _EMPTY else x for x in self.constants])


_EMPTY = object()


class ValueSpec(NamedTuple):
    """The shapes and dtypes of values that a rank receives, or returns without computing them.

    Attributes:
        x: the value that passes between blocks: a tree of tensors on the meta device.
        total: the dtype of the loss.
        device: the device of these values.
    """

    x: Any
    total: torch.dtype
    device: torch.device


@dataclass
class PipelineCache:
    """Results that a pipeline computes once.

    Attributes:
        schedules: by the number of ranks, the schedule.
        placements: by the number of ranks and each stage's number of blocks, the placement of the blocks.
        value_specs: by the shapes, dtypes and devices of the arguments, the shapes and dtypes of values.
        checked_groups: the process groups whose ranks have the same schedule.
    """

    schedules: dict[int, PipelineSchedule] = field(default_factory=dict)
    placements: dict[tuple[int, tuple[int, ...]], BlockPlacement] = field(default_factory=dict)
    value_specs: dict[tuple[tuple[torch.Size, torch.dtype, torch.device], ...], ValueSpec] = field(default_factory=dict)
    checked_groups: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class PipelineStages:
    """The stages of a pipeline.

    Attributes:
        model: the model that they run.
        schedule: the schedule, which assigns stages to ranks.
        placement: the blocks of each stage.
        axis: the axis along which the stages lie.
        make_call: `(index, in_loop) -> call` of a micro-batch. The index may be that of a traced loop's iteration.
        cache: the pipeline's cache.
    """

    model: Model
    schedule: PipelineSchedule
    placement: BlockPlacement
    axis: Axis
    make_call: Callable[..., MicroBatchCall]
    cache: PipelineCache

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.schedule.stages - 1

    @cached_property
    def rank_stages(self) -> list[int]:
        """The indices of this rank's stages."""
        return self.schedule.stages_on(self.axis.rank)

    def uses(self, stage: int) -> tuple[Sequence[int], bool]:
        """Return the slots that a stage uses, and whether it uses the rest of the parameters."""
        return self.placement.block_slots[stage], stage in (0, self.last)

    def function(self, stage: int, params: FlatParams, structure: Any, call: MicroBatchCall) -> Callable[..., Any]:
        """Return a stage as a function.

        Args:
            stage: the number of the stage.
            params: this rank's parameters; the function takes those at `params.indices(*uses(stage))`.
            structure: the structure of the values that pass between blocks.
            call: the micro-batch.

        Returns:
            `(tensors of parameters, tensors of x) -> (tensors of y, ())`; for the last stage
            `-> (total, weight)`. The first stage takes no tensors of x.
        """
        block_slots, rest = self.uses(stage)
        indices = [self.placement.blocks[self.schedule.rank_of_stage[stage]][s] for s in block_slots]

        def run(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
            trees, rest_params = params.trees(block_slots, rest, weights)
            x = self.model.run_first(rest_params, call) if stage == 0 else tree.unflatten(structure, list(inputs))
            for p, index in zip(trees, indices, strict=True):
                assert index is not None
                x = self.model.run_block(p, x, index, call, stacked=True)
            if stage == self.last:
                return self.model.run_last(rest_params, x, call, self.placement.depth)
            return tree.flatten(x)[0], ()

        return lambda weights, inputs: call.run(run, weights, inputs)
