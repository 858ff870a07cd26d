"""An optimizer on full leaves at every stage: its arguments are gathered by unit, and its results sharded again.

The state has units of its own, sharded over the ranks as the parameters are. One unit holds the whole state of the
leaves of one unit of parameters, of any shapes. So a rank holds 1/N of the state, and one collective gathers a unit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.axes import LayoutRules, bound_axis
from fzero.optim._base import (
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    as_optimizer,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.optim.wrappers._wrappers import check_no_master_weights
from fzero.sharding import (
    Shard,
    ShardedUnit,
    assign_units,
    gather_full_leaves,
    gather_unit,
    is_box,
    map_units,
    own_shard,
    replace_unit,
    shard_full_leaves,
    sharded_units,
    traced_spec,
)

__all__ = ["on_full_leaves"]


@api_boundary
@optimizer_factory
def on_full_leaves(opt: OptimizerLike, reads_params: bool = True) -> Optimizer:
    """Run an (init, update) pair on full leaves at every stage, one leaf at a time. Other optimizers run on shards.

    Use it for an optimizer that mixes the elements of a leaf, by a factorisation, a sort, or a norm of rows. Each
    update gathers the gradients, state and parameters of one unit, runs the optimizer on every rank, and keeps this
    rank's shard of the results. So each rank does the full work, and one unit is full at a time. A step communicates
    the optimizer's arguments once more; at stages 1 and 2 the parameters are full already, and at stage 0 everything
    is. `optim.muon` divides the work among the ranks instead.

    Between steps each rank holds 1/N of the state, of any shapes; numbers (0-d) and integers are replicated. Chain
    elementwise links outside of `on_full_leaves`: `chain(on_full_leaves(opt), scale_by_learning_rate(1e-3))`.

    Args:
        opt: an optimizer that needs full leaves. It gets one leaf at a time, as a tree of one tensor, so its numbers
            cannot depend on how leaves are grouped into units.
        reads_params: whether the optimizer's update reads the parameters. If not, they are not gathered, and the update
            gets None.

    Returns:
        An optimizer; its state is a tree like the parameters, with the optimizer's state of a leaf in the leaf's place.

    Raises:
        ValueError: if `opt` keeps master weights or a loss scale, which go around `on_full_leaves`.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> def update(grads, state, params=None):  # the direction of a matrix, by its singular vectors
        ...     u, _, v = torch.linalg.svd(grads, full_matrices=False)
        ...     return -0.1 * (u @ v), state
        >>> opt = on_full_leaves(optim.Optimizer(lambda params: (), update), reads_params=False)
        >>> f = lambda g: fzero.gather(opt.update(fzero.partition(g), opt.init(fzero.partition(g)))[0])
        >>> fzero.mesh(dp=2).spmd(f)({"w": 3 * torch.eye(3)})["w"].diagonal()
        tensor([-0.1000, -0.1000, -0.1000])
    """
    optimizer = as_optimizer(opt)
    check_no_master_weights("on_full_leaves", optimizer)

    def init(params: Params) -> OptState:
        paths, entries, structure = tree.flatten_with_paths(params, is_box)
        states = _apply_to_plain(opt.init, entries)
        for unit in sharded_units(paths, entries):
            full_states = [opt.init(p) for p in gather_full_leaves(unit.shard)]
            for position, state in _shard_states(paths, unit, full_states).items():
                states[position] = state
        return tree.unflatten(structure, states)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        """Update plain leaves, and the leaves of each unit in full; return shards of the results."""
        paths, entries, structure = tree.flatten_with_paths(grads, is_box)
        states = tree.leaves_up_to(grads, state, is_box) if entries else []
        params = params if reads_params else None
        param_entries = [None] * len(entries) if params is None else tree.leaves_up_to(grads, params, is_box)

        def update_leaf(g: torch.Tensor, s: OptState, p: torch.Tensor | None) -> tuple[torch.Tensor, OptState]:
            return opt.update(g, s, params=p)

        results = _apply_to_plain(update_leaf, entries, states, param_entries)
        updates = [None if x is None else x[0] for x in results]
        new_states = [None if x is None else x[1] for x in results]
        for unit in sharded_units(paths, entries):
            unit_updates, unit_states = _update_unit(update_leaf, unit, paths, states, param_entries)
            replace_unit(updates, unit.members, unit_updates)
            for position, state in unit_states.items():
                new_states[position] = state
        return tree.unflatten(structure, updates), tree.unflatten(structure, new_states)

    return _exact_on_shards(wrap_optimizers(init, update, opt))


def _exact_on_shards(opt: Optimizer) -> Optimizer:
    return Optimizer(opt.init, opt.update, exact_on_shards=True, elementwise=False)


def _apply_to_plain(f: Callable[..., Any], entries: Sequence[Any], *columns: Sequence[Any]) -> list[Any]:
    """Apply `f` to each plain leaf of a tree's entries, once if it is tied; other entries become None."""
    results: dict[Any, Any] = {}
    out: list[Any] = []
    for position, x in enumerate(entries):
        if not isinstance(x, torch.Tensor):
            out.append(None)
            continue
        key = tree.identity(x)
        if key not in results:
            results[key] = f(x, *[column[position] for column in columns])
        out.append(results[key])
    return out


def _update_unit(
    update_leaf: Callable[..., Any],
    unit: ShardedUnit,
    paths: Sequence[str],
    states: Sequence[Any],
    params: Sequence[Any],
) -> tuple[Shard, dict[int, OptState]]:
    """Gather one unit and update its full leaves. Return the updates' shard, and the new state of each position."""
    first = unit.members[0][0]
    grads = gather_full_leaves(unit.shard)
    full_params = [None] * len(grads) if params[first] is None else gather_full_leaves(params[first])
    first_position = {index: position for position, index in reversed(unit.members)}  # of each leaf
    full_states = _gather_state([states[position] for position, _ in unit.members])
    by_position = dict(zip([position for position, _ in unit.members], full_states, strict=True))
    results = [
        update_leaf(g, by_position[first_position[i]], p)
        for i, (g, p) in enumerate(zip(grads, full_params, strict=True))
    ]
    updates = shard_full_leaves(unit.spec_id, [u for u, _ in results])
    return updates, _shard_states(paths, unit, [s for _, s in results])


def _shard_states(paths: Sequence[str], unit: ShardedUnit, states: Sequence[OptState]) -> dict[int, OptState]:
    """Shard the states of a unit's leaves over the unit's ranks. Return the state of each position."""
    spec = traced_spec(unit.spec_id)
    rules = LayoutRules(units=lambda path, leaf: spec.unit if leaf.ndim else None)
    by_path = {paths[position]: states[index] for position, index in unit.members}
    assignment = assign_units(by_path, [bound_axis(name) for name in spec.order], rules)
    shards = [own_shard(part.spec_id, part.leaves) for part in assignment.units]
    results = assignment.with_shards(shards)
    return {position: results[paths[position]] for position, _ in unit.members}


def _gather_state(states: Any) -> Any:
    return map_units(lambda unit: gather_unit(unit.spec_id, unit.shard.data), states)
