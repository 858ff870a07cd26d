"""by_group: one optimizer for each group of leaves, with one state for all groups."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim._base import (
    Mask,
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    as_optimizer,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.optim.wrappers._wrappers import masked, where
from fzero.sharding import abstract, per_leaf
from fzero.tree import Tree

__all__ = ["by_group"]


@api_boundary
@optimizer_factory
def by_group(*groups: tuple[OptimizerLike, Mask]) -> Optimizer:
    """Apply one optimizer to each group of leaves, with one state for all groups: torch's parameter groups.

    The groups' optimizers are of one kind, such as two `adamw` with other rates and decays. Each leaf's moments are
    held once, so the state is one optimizer's at every stage and in checkpoints. The numbers are those of a chain of
    `masked` optimizers, which hold a state for each group. Each group's update runs over all leaves.

    Args:
        *groups: pairs `(opt, mask)`; a mask is as in `masked`. Each leaf belongs to exactly one group.

    Returns:
        An optimizer; its state is the state of the first group's optimizer.

    Raises:
        TypeError: if a group is not a pair.
        ValueError: as `masked` raises. On `init`, if the states differ in structure, or hold tensors that are neither
            like the parameters nor counts. Also if a leaf is in no group, or in several; the message names the leaf.

    Example:
        >>> from fzero import optim
        >>> is_matrix = lambda params: tree.map(lambda p: p.ndim >= 2, params)
        >>> others = lambda params: tree.map(lambda p: p.ndim < 2, params)
        >>> opt = by_group((optim.sgd(0.1), is_matrix), (optim.sgd(1.0), others))
        >>> params = {"w": torch.ones(1, 2), "b": torch.ones(2)}
        >>> opt.update(params, opt.init(params), params)[0]
        {'w': tensor([[-0.1000, -0.1000]]), 'b': tensor([-1., -1.])}
    """
    if not groups or any(not isinstance(group, tuple) or len(group) != 2 for group in groups):
        raise TypeError("by_group: expected pairs (opt, mask), one for each group of leaves")
    if any(hasattr(mask, "init") and hasattr(mask, "update") for _, mask in groups):
        raise TypeError("by_group: an optimizer is in the place of a mask: expected pairs (opt, mask), in this order")
    opts = [as_optimizer(opt, f"group {k}'s opt") for k, (opt, _) in enumerate(groups)]
    masks = [mask for _, mask in groups]
    parts = [masked(opt, mask) for opt, mask in zip(opts, masks, strict=True)]

    def init(params: Params) -> OptState:
        full = abstract(params)
        _check_groups(full, masks)
        states = [opt.init(full) for opt in opts]  # without memory
        for k, state in enumerate(states):
            _check_group_state(k, state, states[0], full)
        return opts[0].init(params)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        updates, new_state, structure = grads, state, tree.flatten(grads)[1]
        for part, mask in zip(parts, masks, strict=True):
            leaf_mask = per_leaf(grads, mask)
            own_updates, own_state = part.update(grads, state, params=params)
            updates = tree.map(lambda m, x, y: where(m, y, x), leaf_mask, updates, own_updates)
            new_state = _merge_states(leaf_mask, new_state, own_state, structure)
        return updates, new_state

    return wrap_optimizers(init, update, *parts)


def _merge_states(leaf_mask: Tree, state: OptState, group_state: OptState, structure: Any) -> OptState:
    """Take a group's own state where its mask is true, and its counts, which all groups have in common."""
    nodes, outer = tree.flatten(state, lambda x: _has_structure(x, structure))
    own_nodes = tree.flatten(group_state, lambda x: _has_structure(x, structure))[0]
    results = [
        tree.map(lambda m, a, b: where(m, b, a), leaf_mask, x, y) if _has_structure(x, structure) else y
        for x, y in zip(nodes, own_nodes, strict=True)
    ]
    return tree.unflatten(outer, results)


def _check_groups(full: Params, masks: Sequence[Mask]) -> None:
    """Raise an error if a leaf is in no group, or in several."""
    paths, entries, _ = tree.flatten_with_paths(full)
    rows = [
        tree.leaves_up_to(full, mask(full) if callable(mask) else mask, names=("params", f"the mask of group {k}"))
        for k, mask in enumerate(masks)
    ]
    for path, x, *members in zip(paths, entries, *rows, strict=True):
        if x is not None and sum(map(bool, members)) != 1:
            numbers = [k for k, is_member in enumerate(members) if is_member]
            raise ValueError(
                f"by_group: {tree.leaf_name('params', path)} is in the groups {numbers}: expected exactly one; let the "
                "masks cover each leaf once"
            )


def _check_group_state(k: int, state: OptState, first_state: OptState, params: Params) -> None:
    """Raise an error if the state of a group cannot be held in one state with those of the others."""
    structure, shapes = tree.flatten(params)[1], [x.shape for x in tree.tensors(params)]
    advice = "hold one state for each group, optim.chain(optim.masked(opt, mask), ...)"
    if tree.flatten(first_state)[1] != tree.flatten(state)[1]:
        raise ValueError(
            f"by_group: the state of group {k} is not like the state of group 0, and one state cannot serve both: give "
            f"all groups optimizers of one kind, or {advice}"
        )
    paths, nodes, _ = tree.flatten_with_paths(state, lambda x: _has_structure(x, structure))
    for path, x in zip(paths, nodes, strict=True):
        is_like = _has_structure(x, structure) and [y.shape for y in tree.tensors(x)] == shapes
        if not is_like and any(y.ndim for y in tree.tensors(x)):
            raise ValueError(
                f"by_group: {tree.leaf_name('state', path)} of group {k} is neither a count nor like the parameters: "
                f"its elements belong to no leaf; {advice}"
            )


def _has_structure(x: Any, structure: Any) -> bool:
    return not isinstance(x, torch.Tensor) and tree.flatten(x)[1] == structure
