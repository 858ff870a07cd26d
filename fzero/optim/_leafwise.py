"""An adapter for third-party pairs that take trees apart by themselves."""

import inspect
from typing import Any

from fzero import tree
from fzero.optim._base import Optimizer, OptState, Pair, Params, Updates, around, as_optimizer

__all__ = ["leafwise"]


def leafwise(pair: Pair) -> Optimizer:
    """Run a third-party (init, update) pair on one leaf at a time, with its state in the leaf's place.

    A pair that flattens the tree into a list keeps state of its own, in which shards cannot be told from replicated
    values; torchopt's optimizers do. Leaf by leaf, each shard's state stays in its box. Not for pairs that look at
    several leaves at once, such as clipping by a global norm: use fzero's, in a `chain`.

    Args:
        pair: an elementwise pair, such as `torchopt.adamw(1e-3)`. If its update takes `inplace`, it is told not to
            write into its arguments.

    Returns:
        A pair; its state is a tree like the parameters, of the pair's states.

    Raises:
        ValueError: if `pair` keeps master weights or a loss scale, which go around it.

    Example:
        >>> import torch
        >>> from fzero import optim
        >>> opt = optim.chain(optim.clip_by_global_norm(1.0), optim.leafwise(optim.adam(0.1)))
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1000)}
    """
    known = as_optimizer(pair)
    if known.precision is not None or known.skips:
        raise ValueError("leafwise: put master_weights, and a loss scale, around leafwise")
    takes_inplace = "inplace" in inspect.signature(pair.update).parameters

    def init(params: Params) -> OptState:
        return tree.map(lambda p: pair.init([p]), params)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        options = {"inplace": False} if takes_inplace else {}
        leaves, structure = tree.flatten(grads)
        states = tree.leaves_up_to(grads, state)
        whole = [None] * len(leaves) if params is None else tree.leaves_up_to(grads, params)
        done: dict[Any, Any] = {}  # each tied leaf is updated once, or its places would part
        keys: list[Any] = []
        for i, (g, s, p) in enumerate(zip(leaves, states, whole, strict=True)):
            keys.append(i if g is None or p is None else (tree.identity(g), tree.identity(p)))
            if keys[-1] not in done:
                u, s = ([None], s) if g is None else pair.update([g], s, params=None if p is None else [p], **options)
                done[keys[-1]] = u[0], s
        updates, new = ([done[key][j] for key in keys] for j in (0, 1))
        return tree.unflatten(structure, updates), tree.unflatten(structure, new)

    return around(init, update, pair)
