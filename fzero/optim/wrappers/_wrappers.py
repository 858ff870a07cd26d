"""Wrappers of an optimizer: on some leaves (`masked`), or leaf by leaf (`leafwise`)."""

import inspect
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
    check_mask,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.sharding import abstract, check_per_leaf, per_leaf
from fzero.tree import Tree

__all__ = ["check_no_master_weights", "leafwise", "masked", "where"]


def check_no_master_weights(name: str, optimizer: Optimizer) -> None:
    """Check that a wrapped optimizer keeps no state of all leaves together."""
    if optimizer.precision is not None or optimizer.skips_overflow:
        raise ValueError(
            f"{name}: put master_weights, and a loss scale, around {name}, since they keep state of all leaves: "
            f"optim.master_weights(optim.{name}(...), precision)"
        )


@api_boundary
@optimizer_factory
def masked(opt: OptimizerLike, mask: Mask) -> Optimizer:
    """Apply an optimizer to the leaves where `mask` is True; pass the gradients of all other leaves unchanged.

    The numbers are those of `optax.masked`, on any layout: a shard may hold leaves of both kinds. The optimizer sees
    zeros as the gradients and parameters of masked-out leaves. So they count in no norm, and their state stays as
    `init` made it. That state exists (optax leaves it out), because a tree's structure must not depend on how it is
    sharded. So two masked `adamw` hold the moments twice: `by_group` holds them once. Leaves that must cost no memory
    belong in another tree.

    Args:
        opt: an (init, update) pair.
        mask: a tree of bools with the structure of the full parameters, or a function that returns one from the tree
            of full leaves (as meta tensors).

    Returns:
        An optimizer; its state is the state of `opt`.

    Raises:
        ValueError: if `opt` keeps master weights or a loss scale, which go around `masked`. On use, if `mask` has
            another structure than the parameters, or differs on tied leaves. The message names the path.

    Example:
        >>> from fzero import optim
        >>> opt = masked(optim.sgd(0.1), lambda params: tree.map(lambda p: p.ndim >= 1, params))
        >>> params = {"w": torch.ones(2), "b": torch.ones(())}
        >>> opt.update(params, opt.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000]), 'b': tensor(1.)}
    """
    optimizer = as_optimizer(opt)
    check_mask(mask)
    check_no_master_weights("masked", optimizer)

    def zero_outside(values: Tree, leaf_mask: Tree) -> Tree:
        return tree.map(lambda x, m: where(m, x, torch.zeros_like(x)), values, leaf_mask)

    @api_boundary
    def init(params: Params) -> OptState:
        full = abstract(params)
        if not any(x.ndim for x in tree.tensors(optimizer.init(full))):  # of no leaf, so no zeros are needed
            check_per_leaf(params, mask)
            return optimizer.init(params)
        return optimizer.init(zero_outside(params, per_leaf(params, mask)))

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        leaf_mask = per_leaf(grads, mask)
        inner = None if params is None else zero_outside(params, leaf_mask)
        updates, state = optimizer.update(zero_outside(grads, leaf_mask), state, params=inner)
        return tree.map(lambda g, m, u: where(m, u, g), grads, leaf_mask, updates), state

    return wrap_optimizers(init, update, optimizer)


def where(mask: Mask, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `x` where a mask is true, else `y`; the mask is one number, or a tensor with a number per element."""
    if isinstance(mask, torch.Tensor):
        return torch.where(mask != 0, x, y)
    return x if mask else y


@api_boundary
@optimizer_factory
def leafwise(opt: OptimizerLike) -> Optimizer:
    """Run a third-party (init, update) pair on one leaf at a time; each leaf's state takes the leaf's place.

    Some optimizers flatten the tree into a list and keep the state in it, as torchopt's optimizers do. Such state does
    not show which values are shards and which are replicated. Leaf by leaf, each shard's state stays in its box.
    Optimizers that look at several leaves at once, such as clipping by a global norm, do not work: use fzero's, in a
    `chain`.

    Args:
        opt: an elementwise optimizer, such as `torchopt.adamw(1e-3)`. If its update has an argument `inplace`, it is
            called with `inplace=False`.

    Returns:
        An optimizer; its state is a tree like the parameters, with the optimizer's state of each leaf.

    Raises:
        ValueError: if `opt` keeps master weights or a loss scale, which go around it.

    Example:
        >>> import torch
        >>> from fzero import optim
        >>> opt = optim.chain(optim.clip_by_global_norm(1.0), optim.leafwise(optim.adam(0.1)))
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1000)}
    """
    optimizer = as_optimizer(opt)
    check_no_master_weights("leafwise", optimizer)
    takes_inplace = "inplace" in inspect.signature(optimizer.update).parameters

    def init(params: Params) -> OptState:
        return tree.map(lambda p: optimizer.init([p]), params)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        """Update leaf by leaf, each tied leaf once, and return trees of the updates and of the states."""
        options = {"inplace": False} if takes_inplace else {}
        leaves, structure = tree.flatten(grads)
        states = tree.leaves_up_to(grads, state)
        param_leaves = [None] * len(leaves) if params is None else tree.leaves_up_to(grads, params)
        results: dict[Any, Any] = {}  # a tied leaf is updated once: two updates would untie it
        keys: list[Any] = []
        for i, (g, s, p) in enumerate(zip(leaves, states, param_leaves, strict=True)):
            keys.append(i if g is None or p is None else (tree.identity(g), tree.identity(p)))
            if keys[-1] not in results:
                results[keys[-1]] = None, s
                if g is not None:
                    (u,), s = optimizer.update([g], s, params=None if p is None else [p], **options)
                    results[keys[-1]] = u, s
        updates, new = ([results[key][j] for key in keys] for j in (0, 1))
        return tree.unflatten(structure, updates), tree.unflatten(structure, new)

    return wrap_optimizers(init, update, optimizer)
