"""Of what shapes and dtypes the values of a pipeline are: found by running its parts once, on one micro-batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.pipelines._stages import Params, Stages

__all__ = ["Kinds", "check_handed_on", "kinds_of", "probed"]


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
