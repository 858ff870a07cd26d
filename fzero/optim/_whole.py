"""A pair on whole leaves, at every stage: its arguments are gathered one unit at a time, and its results cut again.

The state lies in units of its own, cut over the ranks as the parameters are. Such a unit is all that the pair keeps for
the leaves of one unit of parameters, whatever its shapes. So a rank holds 1/N of it, and one collective gathers it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes.rules import LayoutRules
from fzero.axes.scope import lookup
from fzero.collectives.invariant import own_part
from fzero.collectives.sums import all_gather
from fzero.layout.boxes import Shard, is_box
from fzero.layout.gathering import gather_unit
from fzero.layout.spec import facts
from fzero.layout.units import CutUnit, assign, cut_units, map_units, put
from fzero.optim._base import Optimizer, OptState, Pair, Params, Updates, around, as_optimizer

__all__ = ["whole"]


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
