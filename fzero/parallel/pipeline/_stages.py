"""A rank's stages as functions of tensors, which schedules run forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import Axis
from fzero.parallel.pipeline._model import MicroBatchCall, Model, Placement
from fzero.parallel.schedules import Schedule

__all__ = ["Kinds", "Params", "Stages", "check_handed_on", "kinds_of", "probed"]

Tensors = list[torch.Tensor]


class Params(NamedTuple):
    """A rank's parameters as a list of tensors. Leaves that are no tensors stay where they are.

    Attributes:
        tensors: those of the slots, one after the other, and then those of the rest.
        structures: of each slot, with its leaves that are no tensors.
        sizes: how many tensors each slot has.
        rest: the structure of the rest.
    """

    tensors: Tensors
    structures: "list[_Form]"
    sizes: list[int]
    rest: "_Form"

    @staticmethod
    def of(slots: Sequence[Any], rest: Any) -> "Params":
        """Take trees apart."""
        flat = [_Form.of(slot) for slot in slots]
        others, form = _Form.of(rest)
        tensors = [x for found, _ in flat for x in found] + others
        return Params(tensors, [f for _, f in flat], [len(found) for found, _ in flat], form)

    def places(self, slots: Sequence[int], rest: bool) -> list[int]:
        """List the places of the tensors of some slots, and of the rest if it is wanted."""
        begin = [sum(self.sizes[:s]) for s in range(len(self.sizes) + 1)]
        found = [i for s in slots for i in range(begin[s], begin[s + 1])]
        return found + (list(range(begin[-1], len(self.tensors))) if rest else [])

    def trees(self, slots: Sequence[int], rest: bool, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        """Put the tensors at `places(slots, rest)` together again: trees of the slots, and the rest or None."""
        left = list(tensors)
        trees = []
        for s in slots:
            trees.append(self.structures[s].filled(left[: self.sizes[s]]))
            del left[: self.sizes[s]]
        return trees, self.rest.filled(left) if rest else None


class _Form(NamedTuple):
    """A tree without its tensors.

    Attributes:
        structure: of the tree.
        others: its leaves; a tensor's place is empty.
    """

    structure: Any
    others: list[Any]

    @staticmethod
    def of(values: Any) -> "tuple[Tensors, _Form]":
        """Take the tensors out of a tree."""
        leaves, structure = tree.flatten(values)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return tensors, _Form(structure, [_EMPTY if isinstance(x, torch.Tensor) else x for x in leaves])

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Put tensors into their places."""
        left = iter(tensors)
        return tree.unflatten(self.structure, [next(left) if x is _EMPTY else x for x in self.others])


_EMPTY = object()


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline.

    Attributes:
        model: what they run.
        schedule: which rank has which.
        placement: which blocks each has.
        axis: along which they lie.
        call_of: gives a micro-batch by its number, which may be that of a traced turn: `(number, in_a_turn)`.
        known: what was found out in earlier runs.
    """

    model: Model
    schedule: Schedule
    placement: Placement
    axis: Axis
    call_of: Callable[..., MicroBatchCall]
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.schedule.stages - 1

    @cached_property
    def mine(self) -> list[int]:
        """This rank's stages."""
        return [s for s, rank in enumerate(self.schedule.home) if rank == self.axis.rank]

    def uses(self, stage: int) -> tuple[Sequence[int], bool]:
        """Return which slots a stage uses, and whether it uses the rest of the parameters."""
        return self.placement.slots[stage], stage in (0, self.last)

    def function(self, stage: int, params: Params, structure: Any, call: MicroBatchCall) -> Callable[..., Any]:
        """Return a stage as a function.

        Args:
            stage: which.
            params: this rank's; the function takes those at `params.places(*uses(stage))`.
            structure: of what blocks hand on.
            call: the micro-batch.

        Returns:
            `(tensors of parameters, tensors of x) -> (tensors of y, ())`; of the last stage
            `-> (total, weight)`. The first is given no x.
        """
        slots, rest = self.uses(stage)
        numbers = [self.placement.blocks[self.schedule.home[stage]][s] for s in slots]

        def run(own: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Any:
            trees, others = params.trees(slots, rest, own)
            x = self.model.run_first(others, call) if stage == 0 else tree.unflatten(structure, list(given))
            for p, number in zip(trees, numbers, strict=True):
                assert number is not None
                x = self.model.run_block(p, x, number, call, stacked=True)
            if stage == self.last:
                return self.model.run_last(others, x, call, self.placement.depth)
            return tree.flatten(x)[0], ()

        return lambda own, given: call.run(run, own, given)


# Of what shapes and dtypes the values of a pipeline are: found by running its parts once, on one micro-batch.


class Kinds(NamedTuple):
    """Of what shapes and dtypes values are that a rank is sent, or returns without having computed them.

    Attributes:
        x: what one block hands to the next: a tree of tensors on the meta device.
        total: the dtype of the loss.
        device: where they are to lie.
    """

    x: Any
    total: torch.dtype
    device: torch.device


def kinds_of(stages: Stages, params: Params, tensors: Sequence[torch.Tensor]) -> Kinds:
    """Return what values will be like, of arguments of these shapes: at the first call by running the parts.

    All ranks do so alike, and so meet in the collectives that a part may hold, such as those of tensor parallelism.

    Raises:
        TypeError: if a block hands on something else than it was given.
    """
    call = stages.call_of(0)
    given = [*tensors, *tree.tensors(call.batch)]
    key = tuple([(x.shape, x.dtype, x.device) for x in given])
    if key not in stages.known:
        devices = sorted({x.device for x in given if x.device.type == "cuda"}, key=str)
        with torch.random.fork_rng(devices), torch.no_grad():
            stages.known[key] = call.run(probed, stages, params, tensors)
    return stages.known[key]


def probed(stages: Stages, params: Params, tensors: Sequence[torch.Tensor]) -> Kinds:
    """Run the parts of a model once, and return what their values are like."""
    model, call = stages.model, stages.call_of(0)
    slots = range(len(params.sizes))
    trees, rest = params.trees(slots, True, tensors)
    x = model.run_first(rest, call)
    check_handed_on("first", x, x)
    check_handed_on("block", x, model.run_block(trees[0], x, 0, call, stacked=True))
    total, _ = model.run_last(rest, x, call, stages.placement.depth)
    return Kinds(tree.map(lambda v: torch.empty_like(v, device="meta"), x), total.dtype, total.device)


def check_handed_on(name: str, x: Any, y: Any) -> None:
    """Check that a block hands on what it was given: a tree of floating-point tensors of one form.

    Raises:
        TypeError: if it hands on anything else.
    """
    (leaves, structure), (others, other) = tree.flatten(x), tree.flatten(y)
    said = [tree.show(v) for v in leaves], [tree.show(v) for v in others]
    if not leaves or not all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in others):
        raise TypeError(
            f"fzero.pipeline: {name} returned {', '.join(said[1])}: expected a floating-point tensor, or a tree of such"
        )
    if structure != other or said[0] != said[1]:
        raise TypeError(
            f"fzero.pipeline: block returned {', '.join(said[1])}, and was given {', '.join(said[0])}: what goes from "
            "stage to stage keeps its form"
        )
