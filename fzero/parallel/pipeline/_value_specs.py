"""The shapes and dtypes of a pipeline's values, found by running its parts once on one micro-batch."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import fork_random_state
from fzero.parallel.pipeline._stage_functions import FlatParams, PipelineStages, ValueSpec

__all__ = ["check_output", "loss_cotangent", "probe", "probe_value_spec"]


def probe_value_spec(stages: PipelineStages, params: FlatParams, tensors: Sequence[torch.Tensor]) -> ValueSpec:
    """Return the shapes and dtypes of values, for arguments of these shapes. The first call runs the parts once.

    All ranks run the same parts, so they meet in the parts' collectives, such as those of tensor parallelism.

    Raises:
        TypeError: if a block changes the structure, shapes or dtypes of the value that it passes on.
    """
    call = stages.make_call(0)
    arguments = [*tensors, *tree.tensors(call.batch)]
    key = tuple([(x.shape, x.dtype, x.device) for x in arguments])
    value_specs = stages.cache.value_specs
    if key not in value_specs:
        with fork_random_state(x.device for x in arguments), torch.no_grad():
            value_specs[key] = call.run(probe, stages, params, tensors)
    return value_specs[key]


def probe(stages: PipelineStages, params: FlatParams, tensors: Sequence[torch.Tensor]) -> ValueSpec:
    """Run the parts of a model once, and return the shapes and dtypes of their values."""
    model, call = stages.model, stages.make_call(0)
    block_slots = range(len(params.sizes))
    trees, rest = params.trees(block_slots, True, tensors)
    x = model.run_first(rest, call)
    check_output("first", x, x)
    check_output("block", x, model.run_block(trees[0], x, 0, call, stacked=True))
    total, _ = model.run_last(rest, x, call, stages.placement.depth)
    return ValueSpec(tree.map(lambda v: torch.empty_like(v, device="meta"), x), total.dtype, total.device)


def check_output(name: str, x: Any, y: Any) -> None:
    """Check that a block returns a tree of floating-point tensors with the structure, shapes and dtypes of its input.

    Raises:
        TypeError: if it returns anything else.
    """
    (leaves, structure), (y_leaves, y_structure) = tree.flatten(x), tree.flatten(y)
    texts = [tree.show(v) for v in leaves], [tree.show(v) for v in y_leaves]
    if not leaves or not all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in y_leaves):
        raise TypeError(
            f"fzero.pipeline: {name} returned {', '.join(texts[1])}: expected a tree of floating-point tensors"
        )
    if structure != y_structure or texts[0] != texts[1]:
        raise TypeError(
            f"fzero.pipeline: block returned {', '.join(texts[1])} for an input {', '.join(texts[0])}: a value that "
            "passes from stage to stage must keep its structure, shapes and dtypes"
        )


def loss_cotangent(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of the total, with which a backward pass begins, times the loss scale."""
    return torch.ones_like(total) if scale is None else torch.ones_like(total) * scale.to(total.dtype)
