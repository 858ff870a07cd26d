"""The micro-batches of a step, which are stacked where they are alike."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree

__all__ = ["MicroBatch", "stack"]


class MicroBatch(NamedTuple):
    """One micro-batch, or several that were stacked along a new dimension 0.

    Attributes:
        tensors: the trees of tensors in it, by name: `[k, ...]` for k micro-batches.
        constants: its values that hold no tensor, by name.
        count: the number k of micro-batches.
    """

    tensors: Any
    constants: dict[str, Any]
    count: int


def stack(batches: Sequence[dict[str, Any]], as_one: bool) -> list[MicroBatch]:
    """Stack the micro-batches of a step, if they are alike and `as_one` allows it; else make one of each.

    Raises:
        TypeError: if a value mixes tensors with others.
    """
    split = [_split_constants(batch) for batch in batches]
    have_equal_shapes = all(_batch_signature(x) == _batch_signature(split[0]) for x in split)
    groups = [split] if as_one and have_equal_shapes else [[x] for x in split]
    return [
        MicroBatch(tree.map(lambda *xs: torch.stack(xs), *[tensors for tensors, _ in group]), group[0][1], len(group))
        for group in groups
    ]


def _split_constants(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, constants = {}, {}
    for name, value in batch.items():
        are_tensors = [isinstance(x, torch.Tensor) for x in tree.flatten(value)[0]]
        if any(are_tensors) and not all(are_tensors):
            raise TypeError(f"the batch's {name!r} mixes tensors with other values: let the collator return tensors")
        (tensors if any(are_tensors) else constants)[name] = value
    if not tensors:
        raise TypeError(f"the batch holds no tensor, only {sorted(batch)}: let the collator return tensors")
    return tensors, constants


def _batch_signature(split: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    leaves, structure = tree.flatten(split[0])
    return structure, [(x.shape, x.dtype) for x in leaves], split[1]
