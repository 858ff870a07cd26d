"""Pairs around a pair: on some leaves only, on each leaf by itself, or on full leaves at every stage."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes import LayoutRules, lookup
from fzero.collectives import all_gather, own_part
from fzero.optim._base import Mask, Optimizer, OptState, Pair, Params, Updates, around, as_optimizer
from fzero.sharding import CutUnit, Shard, assign, cut_units, facts, gather_unit, is_box, map_units, per_leaf, put
from fzero.tree import Tree

__all__ = ["leafwise", "masked", "whole"]

# A pair on some leaves only.


def masked(pair: Pair, mask: Mask) -> Optimizer:
    """Apply a pair to the leaves where `mask` is True; pass the gradients of the others unchanged.

    The numbers are `optax.masked`'s, on any layout: a shard may hold leaves of both kinds. The pair sees zeros as the
    gradients and as the parameters of the others, so they count in no norm, and their state stays as `init` made it.
    That state exists (optax leaves it out), because a tree's structure must not depend on how it is cut. So mask links
    without state, such as `scale_by_learning_rate`, behind one `scale_by_adam`: two masked `adamw` hold the moments
    twice. Leaves that must cost no memory belong into a tree of their own.

    Args:
        pair: an (init, update) pair.
        mask: a tree of bools with the structure of the whole parameters, or a function from the tree of whole leaves
            (as meta tensors) to one.

    Returns:
        A pair; its state is the state of `pair`.

    Raises:
        ValueError: if `pair` keeps master weights or a loss scale, which go around; on use, if `mask` has another
            structure than the parameters, or differs on tied leaves. Names the path.

    Example:
        >>> from fzero import optim
        >>> opt = masked(optim.sgd(0.1), lambda params: tree.map(lambda p: p.ndim >= 1, params))
        >>> params = {"w": torch.ones(2), "b": torch.ones(())}
        >>> opt.update(params, opt.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000]), 'b': tensor(1.)}
    """
    known = as_optimizer(pair)
    if known.precision is not None or known.skips:
        raise ValueError("masked: put master_weights, and a loss scale, around masked: they keep state of all leaves")

    def chosen(values: Tree, applies: Tree) -> Tree:
        return tree.map(lambda x, m: _where(m, x, torch.zeros_like(x)), values, applies)

    def init(params: Params) -> OptState:
        return pair.init(chosen(params, per_leaf(params, mask)))

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        applies = per_leaf(grads, mask)
        inner = None if params is None else chosen(params, applies)
        updates, state = pair.update(chosen(grads, applies), state, params=inner)
        return tree.map(lambda g, m, u: _where(m, u, g), grads, applies, updates), state

    return around(init, update, pair)


def _where(mask: Mask, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Choose by one number for all elements, or by a tensor of a number each."""
    if isinstance(mask, torch.Tensor):
        return torch.where(mask != 0, x, y)
    return x if mask else y


# An adapter for third-party pairs that take trees apart by themselves.


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


# A pair on whole leaves, at every stage: its arguments are gathered one unit at a time, and its results cut again.
#
# The state lies in units of its own, cut over the ranks as the parameters are. Such a unit is all that the pair keeps
# for the leaves of one unit of parameters, whatever its shapes. So a rank holds 1/N of it, and one collective gathers
# it.


def whole(pair: Pair, reads_params: bool = True) -> Optimizer:
    """Run an (init, update) pair on whole leaves at every stage, one leaf at a time, where others run on shards.

    For what mixes the elements of a leaf: a factorisation, a sort, a norm of rows. Each update gathers the gradients of
    one unit, its state and its parameters, runs the pair on every rank, and keeps the own part of the results. So each
    rank does the work of all, and one unit is whole at a time. A step moves once more what the pair is given; stages 1
    and 2 have the parameters whole already, and stage 0 has everything. `optim.muon` shares the work out instead.

    The state is cut over the ranks between steps, 1/N on each, whatever its shapes; numbers (0-d) and integers are not.
    Put what acts on each element alone around it: `chain(whole(pair), scale_by_learning_rate(1e-3))`.

    Args:
        pair: a pair that needs whole leaves. It is given one leaf at a time, a tree of one tensor, so that its numbers
            cannot depend on which leaves make up a unit.
        reads_params: whether its update reads the parameters. If not, they are not gathered, and it is given None.

    Returns:
        A pair; its state is a tree like the parameters, with the pair's state of a leaf in the leaf's place.

    Raises:
        ValueError: if `pair` keeps master weights or a loss scale, which go around it.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> def update(grads, state, params=None):  # the direction of a matrix, by its singular vectors
        ...     u, _, v = torch.linalg.svd(grads, full_matrices=False)
        ...     return -0.1 * (u @ v), state
        >>> opt = whole(optim.Optimizer(lambda params: (), update), reads_params=False)
        >>> f = lambda g: fzero.gather(opt.update(fzero.partition(g), opt.init(fzero.partition(g)))[0])
        >>> fzero.mesh(dp=2).spmd(f)({"w": 3 * torch.eye(3)})["w"].diagonal()
        tensor([-0.1000, -0.1000, -0.1000])
    """
    known = as_optimizer(pair)
    if known.precision is not None or known.skips:
        raise ValueError("whole: put master_weights, and a loss scale, around whole")

    def init(params: Params) -> OptState:
        paths, entries, structure = tree.flatten_with_paths(params, is_box)
        out = _on_plain(pair.init, entries)
        for unit in cut_units(paths, entries):
            _put_state(out, paths, unit, [pair.init(p) for p in _leaves(unit.shard)])
        return tree.unflatten(structure, out)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        paths, entries, structure = tree.flatten_with_paths(grads, is_box)
        states = tree.leaves_up_to(grads, state, is_box) if entries else []
        given = params if reads_params else None
        beside = [None] * len(entries) if given is None else tree.leaves_up_to(grads, given, is_box)

        def of_leaf(g: torch.Tensor, s: OptState, p: torch.Tensor | None) -> tuple[torch.Tensor, OptState]:
            return pair.update(g, s, params=p)

        done = _on_plain(of_leaf, entries, states, beside)
        updates, new = [None if x is None else x[0] for x in done], [None if x is None else x[1] for x in done]
        for unit in cut_units(paths, entries):
            _update_unit(of_leaf, unit, paths, (states, beside), (updates, new))
        return tree.unflatten(structure, updates), tree.unflatten(structure, new)

    return _elementwise(around(init, update, pair))


def _elementwise(pair: Optimizer) -> Optimizer:
    return Optimizer(pair.init, pair.update, elementwise=True, pointwise=False)


def _on_plain(f: Callable[..., Any], entries: Sequence[Any], *columns: Sequence[Any]) -> list[Any]:
    """Apply `f` to the plain leaves among a tree's entries, to tied ones once; None for all others."""
    done: dict[Any, Any] = {}
    out: list[Any] = []
    for position, x in enumerate(entries):
        if not isinstance(x, torch.Tensor):
            out.append(None)
            continue
        key = tree.identity(x)
        if key not in done:
            done[key] = f(x, *[column[position] for column in columns])
        out.append(done[key])
    return out


def _update_unit(
    of_leaf: Callable[..., Any],
    unit: CutUnit,
    paths: Sequence[str],
    old: tuple[Sequence[Any], Sequence[Any]],
    new: tuple[list[Any], list[Any]],
) -> None:
    """Update one unit, whose leaves are whole meanwhile, and put its updates and its new state into `new`."""
    (states, params), (updates, new_states) = old, new
    first = unit.members[0][0]
    grads = _leaves(unit.shard)
    whole_params = [None] * len(grads) if params[first] is None else _leaves(params[first])
    at = {index: position for position, index in reversed(unit.members)}  # of each leaf its first place
    gathered = _gathered([states[position] for position, _ in unit.members])
    by_position = dict(zip([position for position, _ in unit.members], gathered, strict=True))
    done = [of_leaf(g, by_position[at[i]], p) for i, (g, p) in enumerate(zip(grads, whole_params, strict=True))]
    put(updates, unit.members, _cut(unit.uid, [u for u, _ in done]))
    _put_state(new_states, paths, unit, [s for _, s in done])


def _leaves(box: Shard) -> list[torch.Tensor]:
    """Return a unit's whole leaves, put together also along the axes that split them."""
    leaves = list(gather_unit(box.uid, box.data, box.origin))
    for split in reversed(facts(box.uid).split):
        leaves = [all_gather(x, split.axis, dim=d) for x, d in zip(leaves, split.dims, strict=True)]
    return leaves


def _cut(uid: int, leaves: Sequence[torch.Tensor]) -> Shard:
    """Keep this rank's part of whole leaves: the inverse of `_leaves`."""
    for split in facts(uid).split:
        leaves = [own_part(x, split.axis, dim=d) for x, d in zip(leaves, split.dims, strict=True)]
    return _own_shard(uid, leaves)


def _own_shard(uid: int, leaves: Sequence[torch.Tensor]) -> Shard:
    """Keep the own part of a unit's leaves, all of which are used.

    `partition` takes what it needs. Then the update of a leaf, of which a rank keeps nothing, would be dead code there,
    and a jitted step another graph on each rank.
    """
    known = facts(uid)
    padding = leaves[0].new_zeros(known.shard_numel * known.ranks - known.numel)
    buffer = torch.cat([*[x.reshape(-1) for x in leaves], padding])  # [N k]
    return Shard(own_part(buffer, known.axes), uid)


# ---------------------------------------------------------------- the state


def _put_state(out: list[Any], paths: Sequence[str], unit: CutUnit, states: Sequence[OptState]) -> None:
    """Cut the states of a unit's leaves over the unit's ranks, and put them into the places of the leaves."""
    known = facts(unit.uid)
    rules = LayoutRules(units=lambda path, leaf: known.unit if leaf.ndim else None)
    by_path = {paths[position]: states[index] for position, index in unit.members}
    assigned = assign(by_path, [lookup(name) for name in known.order], rules)
    shards = [_own_shard(part.uid, part.leaves) for part in assigned.units]
    cut = assigned.with_shards(shards)
    for position, _ in unit.members:
        out[position] = cut[paths[position]]


def _gathered(states: Any) -> Any:
    return map_units(lambda unit: gather_unit(unit.uid, unit.shard.data), states)
