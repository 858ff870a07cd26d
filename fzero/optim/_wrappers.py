"""Wrappers of an optimizer: on some leaves, leaf by leaf, on full leaves, or with hyperparameters in its state."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.axes import LayoutRules, bound_axis
from fzero.optim._base import Mask, Optimizer, OptimizerLike, OptState, Params, Updates, as_optimizer, wrap_optimizers
from fzero.sharding import (
    Shard,
    ShardedUnit,
    abstract,
    assign_units,
    check_per_leaf,
    gather_full_leaves,
    gather_unit,
    is_box,
    map_units,
    own_shard,
    per_leaf,
    replace_unit,
    shard_full_leaves,
    sharded_units,
    traced_spec,
)
from fzero.tree import Tree

__all__ = ["InjectHyperparamsState", "inject_hyperparams", "leafwise", "masked", "on_full_leaves", "where"]


def _check_inner(name: str, optimizer: Optimizer) -> None:
    """Check that a wrapped optimizer keeps no state of all leaves together."""
    if optimizer.precision is not None or optimizer.skips_overflow:
        raise ValueError(
            f"{name}: put master_weights, and a loss scale, around {name}, since they keep state of all leaves: "
            f"optim.master_weights(optim.{name}(...), precision)"
        )


# An optimizer on some leaves.


@api_boundary
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
    _check_inner("masked", optimizer)

    def zero_outside(values: Tree, leaf_mask: Tree) -> Tree:
        return tree.map(lambda x, m: where(m, x, torch.zeros_like(x)), values, leaf_mask)

    @api_boundary
    def init(params: Params) -> OptState:
        full = abstract(params)
        if not any(x.ndim for x in tree.tensors(opt.init(full))):  # of no leaf, so no zeros are needed
            check_per_leaf(params, mask)
            return opt.init(params)
        return opt.init(zero_outside(params, per_leaf(params, mask)))

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        leaf_mask = per_leaf(grads, mask)
        inner = None if params is None else zero_outside(params, leaf_mask)
        updates, state = opt.update(zero_outside(grads, leaf_mask), state, params=inner)
        return tree.map(lambda g, m, u: where(m, u, g), grads, leaf_mask, updates), state

    return wrap_optimizers(init, update, opt)


def where(mask: Mask, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `x` where a mask is true, else `y`; the mask is one number, or a tensor with a number per element."""
    if isinstance(mask, torch.Tensor):
        return torch.where(mask != 0, x, y)
    return x if mask else y


# An adapter for third-party optimizers that flatten trees themselves.


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
    _check_inner("leafwise", optimizer)
    takes_inplace = "inplace" in inspect.signature(opt.update).parameters

    def init(params: Params) -> OptState:
        return tree.map(lambda p: opt.init([p]), params)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        options = {"inplace": False} if takes_inplace else {}
        leaves, structure = tree.flatten(grads)
        states = tree.leaves_up_to(grads, state)
        param_leaves = [None] * len(leaves) if params is None else tree.leaves_up_to(grads, params)
        results: dict[Any, Any] = {}  # a tied leaf is updated once: two updates would untie it
        keys: list[Any] = []
        for i, (g, s, p) in enumerate(zip(leaves, states, param_leaves, strict=True)):
            keys.append(i if g is None or p is None else (tree.identity(g), tree.identity(p)))
            if keys[-1] not in results:
                u, s = ([None], s) if g is None else opt.update([g], s, params=None if p is None else [p], **options)
                results[keys[-1]] = u[0], s
        updates, new = ([results[key][j] for key in keys] for j in (0, 1))
        return tree.unflatten(structure, updates), tree.unflatten(structure, new)

    return wrap_optimizers(init, update, opt)


# An optimizer on full leaves at every stage: its arguments are gathered by unit, and its results sharded again.
#
# The state has units of its own, sharded over the ranks as the parameters are. One unit holds the whole state of the
# leaves of one unit of parameters, of any shapes. So a rank holds 1/N of the state, and one collective gathers a unit.


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
    _check_inner("on_full_leaves", optimizer)

    def init(params: Params) -> OptState:
        paths, entries, structure = tree.flatten_with_paths(params, is_box)
        states = _on_plain(opt.init, entries)
        for unit in sharded_units(paths, entries):
            full_states = [opt.init(p) for p in gather_full_leaves(unit.shard)]
            for position, state in _shard_states(paths, unit, full_states).items():
                states[position] = state
        return tree.unflatten(structure, states)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        paths, entries, structure = tree.flatten_with_paths(grads, is_box)
        states = tree.leaves_up_to(grads, state, is_box) if entries else []
        params = params if reads_params else None
        param_entries = [None] * len(entries) if params is None else tree.leaves_up_to(grads, params, is_box)

        def update_leaf(g: torch.Tensor, s: OptState, p: torch.Tensor | None) -> tuple[torch.Tensor, OptState]:
            return opt.update(g, s, params=p)

        results = _on_plain(update_leaf, entries, states, param_entries)
        updates, new = [None if x is None else x[0] for x in results], [None if x is None else x[1] for x in results]
        for unit in sharded_units(paths, entries):
            unit_updates, unit_states = _update_unit(update_leaf, unit, paths, states, param_entries)
            replace_unit(updates, unit.members, unit_updates)
            for position, state in unit_states.items():
                new[position] = state
        return tree.unflatten(structure, updates), tree.unflatten(structure, new)

    return _exact_on_shards(wrap_optimizers(init, update, opt))


def _exact_on_shards(opt: Optimizer) -> Optimizer:
    return Optimizer(opt.init, opt.update, exact_on_shards=True, elementwise=False)


def _on_plain(f: Callable[..., Any], entries: Sequence[Any], *columns: Sequence[Any]) -> list[Any]:
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


# ---------------------------------------------------------------- the state


def _shard_states(paths: Sequence[str], unit: ShardedUnit, states: Sequence[OptState]) -> dict[int, OptState]:
    """Shard the states of a unit's leaves over the unit's ranks. Return the state of each position."""
    spec = traced_spec(unit.spec_id)
    rules = LayoutRules(units=lambda path, leaf: spec.unit if leaf.ndim else None)
    by_path = {paths[position]: states[index] for position, index in unit.members}
    assignment = assign_units(by_path, [bound_axis(name) for name in spec.order], rules)
    shards = [own_shard(part.spec_id, part.leaves) for part in assignment.units]
    sharded = assignment.with_shards(shards)
    return {position: sharded[paths[position]] for position, _ in unit.members}


def _gather_state(states: Any) -> Any:
    return map_units(lambda unit: gather_unit(unit.spec_id, unit.shard.data), states)


# Hyperparameters that change during training.


class InjectHyperparamsState(NamedTuple):
    """The number of updates (int64, 0-d), the hyperparameters (float64, 0-d), and the state of the optimizer."""

    count: torch.Tensor
    hyperparams: dict[str, torch.Tensor]
    inner_state: OptState


def inject_hyperparams(
    factory: Callable[..., Optimizer], static_args: str | Iterable[str] = ()
) -> Callable[..., Optimizer]:
    """Move an optimizer's hyperparameters into its state, where they follow schedules or can be changed by hand.

    Like `optax.inject_hyperparams`: every argument that is a number may also be a schedule, and becomes a tensor of
    `state.hyperparams`, float64 and 0-d. Write a new value into the tensor between steps (`.fill_(1e-4)`), and a jitted
    step reads it without another trace. A number or another tensor in its place works too, but may cause a trace. Each
    update overwrites scheduled hyperparameters, so changing them by hand has no effect.

    Args:
        factory: a function that makes an optimizer, such as `optim.adamw`, or your own function that returns a `chain`.
        static_args: names of arguments that stay out of the state: functions that are no schedules, such as `mask`, and
            numbers that decide a structure. Bools, None and trees always stay out.

    Returns:
        `factory`, with the same arguments.

    Raises:
        ValueError: if `static_args` names no argument of `factory`. On use, if a schedule does not return a number, or
            the state has other hyperparameters. A call also raises the errors of `factory`.

    Example:
        >>> from fzero import optim
        >>> opt = inject_hyperparams(optim.sgd)(0.1, momentum=optim.linear(0.0, 0.9, 100))
        >>> params = {"w": torch.tensor(1.0)}
        >>> state = opt.init(params)
        >>> _ = state.hyperparams["learning_rate"].fill_(0.5)
        >>> opt.update({"w": torch.tensor(2.0)}, state, params)[0]
        {'w': tensor(-1.)}
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(factory)
    if not static <= set(signature.parameters):
        names = ", ".join(signature.parameters)
        raise ValueError(f"static_args={sorted(static)}: expected some of the arguments of {factory!r}: {names}")

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Optimizer:
        settings = signature.bind(*args, **kwargs)
        settings.apply_defaults()
        dynamic = {k: v for k, v in settings.arguments.items() if k not in static}
        injected = _Injected(
            factory,
            signature,
            args,
            kwargs,
            numbers={k: v for k, v in dynamic.items() if _is_number(v)},
            schedules={k: v for k, v in dynamic.items() if callable(v)},
        )
        # the numbers are not yet tensors, so that `factory` checks them
        opt = injected.optimizer_with(injected.scheduled_at(torch.zeros((), dtype=torch.int64, device="cpu")))
        return wrap_optimizers(injected.init, injected.update, opt)

    return make


@dataclass(frozen=True, eq=False)  # a trace may hash the optimizer, and dicts have no hash
class _Injected:
    """An optimizer whose hyperparameters are in its state.

    Attributes:
        factory: the function that makes an optimizer of hyperparameters.
        signature: the signature of `factory`.
        args: the positional arguments of `factory`.
        kwargs: its keyword arguments.
        numbers: the arguments that are numbers, defaults among them.
        schedules: the arguments that are schedules, defaults among them.
    """

    factory: Callable[..., Optimizer]
    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numbers: dict[str, Any]
    schedules: dict[str, Callable[[torch.Tensor], Any]]

    def init(self, params: Params) -> InjectHyperparamsState:
        """Make the state, with the hyperparameters of the first update."""
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        hyperparams = {k: _scalar_tensor(k, v, count) for k, v in self.numbers.items()} | self.scheduled_at(count)
        return InjectHyperparamsState(count, hyperparams, self.optimizer_with(hyperparams).init(params))

    def update(
        self, grads: Updates, state: InjectHyperparamsState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        """Update with the hyperparameters of the state, and with those of the schedules at its count."""
        _check_names(state.hyperparams, {**self.numbers, **self.schedules})
        current = {k: _scalar_tensor(k, v, state.count) for k, v in state.hyperparams.items()}
        hyperparams = {**current, **self.scheduled_at(state.count)}
        updates, inner = self.optimizer_with(hyperparams).update(grads, state.inner_state, params=params)
        return updates, InjectHyperparamsState(state.count + 1, hyperparams, inner)

    def scheduled_at(self, count: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the scheduled hyperparameters of an update."""
        return {k: _scalar_tensor(k, schedule(count), count) for k, schedule in self.schedules.items()}

    def optimizer_with(self, hyperparams: dict[str, Any]) -> Optimizer:
        """Make the optimizer with other hyperparameters in place of its own."""
        bound = self.signature.bind(*self.args, **self.kwargs)
        bound.arguments.update(hyperparams)
        return self.factory(*bound.args, **bound.kwargs)


def _check_names(hyperparams: dict[str, Any], expected: dict[str, Any]) -> None:
    if hyperparams.keys() != expected.keys():
        raise ValueError(
            f"state.hyperparams has {sorted(hyperparams)}: expected {sorted(expected)}; "
            "make the state with this optimizer's `init`"
        )


def _is_number(value: object) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.ndim == 0
    return is_scalar or (isinstance(value, Real) and not isinstance(value, bool))


def _scalar_tensor(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    if not _is_number(value):
        raise ValueError(
            f"hyperparameter {name!r}: its schedule returned {value!r}, expected a number or a 0-d tensor; name a "
            f'function that is no schedule in static_args: inject_hyperparams(factory, static_args=("{name}",))'
        )
    return torch.as_tensor(value, dtype=torch.float64, device=like.device).clone()
