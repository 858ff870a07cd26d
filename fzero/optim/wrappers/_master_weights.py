"""Master weights: an optimizer that updates full-precision copies of half-precision parameters, or their shards."""

from dataclasses import replace
from typing import NamedTuple

import torch

from fzero import tree
from fzero._notice import warn_once
from fzero._tracebacks import api_boundary
from fzero.optim._base import (
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    apply_updates,
    as_optimizer,
    find_state,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.optim._precision import Precision
from fzero.sharding import Shard, Slot, is_box, traced_spec

__all__ = [
    "MasterState",
    "check_dtypes",
    "check_no_masters",
    "convert_masters",
    "difference",
    "master_params",
    "master_weights",
    "round_master",
]


class MasterState(NamedTuple):
    """The master weights, a tree like the parameters, and the state of the optimizer.

    A parameter that is itself in full precision has no second copy: its entry in `master` is None. With
    `Precision(shard=)` these are all parameters that are sharded between steps.
    """

    master: Params
    inner: OptState


def check_no_masters(name: str, opt: OptimizerLike) -> None:
    """Check that an optimizer, to be wrapped by `name`, does not cast the parameters already.

    Raises:
        ValueError: if it does: a second copy of the parameters would be held, and rounded twice.
    """
    optimizer = as_optimizer(opt)
    if optimizer.precision is not None:
        raise ValueError(
            f"{name}: opt is {optimizer!r}, which keeps parameters by a policy already: wrap the optimizer once, "
            f"optim.{name}(optim.adamw(1e-3), precision)"
        )


@api_boundary
@optimizer_factory
def master_weights(opt: OptimizerLike, precision: Precision) -> Optimizer:
    """Apply an optimizer to master weights, and return updates that set the parameters to the rounded masters.

    Half-precision parameters lose every update smaller than their last bit; master weights accumulate such updates
    (arXiv:1710.03740). They are part of the optimizer state, so stages 1 to 3 shard them. With Adam that takes 12 bytes
    per element on N ranks, beside 2 for the parameter (arXiv:1910.02054). The masters determine the parameters: an
    update overwrites parameters that were changed by hand.

    Args:
        opt: an (init, update) pair, such as a whole chain; it sees gradients and parameters in `precision.master`'s
            dtype, as in training without half precision.
        precision: the policy that `fzero.value_and_grad` gets, too.

    Returns:
        An optimizer. Call its `init` with the parameters before they are cast, so that the masters have all their bits.
        `fzero.zero.ShardedStep.init` does so, and casts them afterwards. Unsharded: `opt_state = opt.init(params)`,
        then `params = precision.cast(params)`.

    Raises:
        TypeError: if `precision` is not a `Precision`. On init, if a parameter is not a floating-point tensor. On
            update, if parameters or gradients do not have the policy's dtypes. The message names the path.
        ValueError: on update, if `params` is not given.

    Example:
        >>> from fzero import optim
        >>> precision = Precision(param=torch.bfloat16)
        >>> opt, params = master_weights(optim.sgd(0.001), precision), {"w": torch.ones(1)}
        >>> state, params = opt.init(params), precision.cast(params)
        >>> for _ in range(2):  # each update is less than half of the last bit of bfloat16
        ...     updates, state = opt.update({"w": torch.ones(1)}, state, params)
        ...     params = optim.apply_updates(params, updates)
        >>> params["w"], state.master["w"]
        (tensor([0.9961], dtype=torch.bfloat16), tensor([0.9980]))
    """
    if not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: expected a policy, such as fzero.Precision(param=torch.bfloat16)")
    check_no_masters("master_weights", opt)
    master = precision.master

    def init(params: Params) -> MasterState:
        _check_params(params, precision)
        masters = tree.map(lambda p: p.to(master), params)
        return MasterState(_distinct_masters(masters, precision.dtype_tree(params)), opt.init(masters))

    def update(grads: Updates, state: MasterState, params: Params | None = None) -> tuple[Updates, MasterState]:
        """Update the masters, and return the updates that round the parameters to them."""
        if params is None:
            raise ValueError("master_weights needs the parameters: opt.update(grads, state, params)")
        like = precision.dtype_tree(params)
        check_dtypes(params, grads, like, precision, "master_weights")
        _check_masters(params, state.master, precision)
        masters = master_params(params, state)
        updates, inner = opt.update(tree.map(lambda g: g.to(master), grads), state.inner, params=masters)
        new_masters = apply_updates(masters, updates)

        def choose_update(p: torch.Tensor, u: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return u if p.dtype == master else _round_update(p, m)

        return tree.map(choose_update, params, updates, new_masters), MasterState(
            _distinct_masters(new_masters, like), inner
        )

    return replace(wrap_optimizers(init, update, opt), precision=precision)


def _distinct_masters(masters: Params, like: Params) -> Params:
    """Return the masters, with None for parameters that are in the masters' dtype; `like` has the dtypes."""
    entries, structure = tree.flatten(masters, is_box)
    expected = [_entry_dtype(x) for x in tree.leaves_up_to(masters, like, is_box)]
    is_narrow = [dtype is not None and dtype != _entry_dtype(x) for x, dtype in zip(entries, expected, strict=True)]
    narrow_units = {x.spec_id for x, narrow in zip(entries, is_narrow, strict=True) if isinstance(x, Shard) and narrow}
    is_kept = [x.spec_id in narrow_units if isinstance(x, Slot) else n for x, n in zip(entries, is_narrow, strict=True)]
    return tree.unflatten(structure, [x if keep else None for x, keep in zip(entries, is_kept, strict=True)])


def _round_update(p: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the update that sets a narrow parameter to the rounded master, in the master's dtype.

    The update is the difference of two narrow values. So `apply_updates` adds it to the parameter without another
    rounding, unless the difference is near zero.
    """
    return difference(p, round_master(master, p.dtype), master.dtype)


def round_master(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a master to a narrow dtype, and clamp it to the dtype's range: no update could correct an infinity."""
    largest = torch.finfo(dtype).max
    return master.clamp(-largest, largest).to(dtype)


def difference(p: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the update from a narrow parameter to its new value, in a wide dtype."""
    return new.to(dtype) - p.to(dtype)


@api_boundary
def master_params(params: Params, opt_state: OptState) -> Params:
    """Return parameters in full precision: the master weights, and the parameters without master weights.

    Args:
        params: the parameters, on any layout, inside or outside the step.
        opt_state: a `MasterState`, or a state that holds one.

    Returns:
        A tree on the layout of the masters: at stages 1 to 3 boxes, which `step.gather` gathers.

    Raises:
        ValueError: if `opt_state` holds no `MasterState`, or the trees differ in structure.

    Example:
        >>> from fzero import optim
        >>> precision, params = Precision(param=torch.bfloat16), {"w": torch.tensor([1 / 3])}
        >>> state = master_weights(optim.sgd(0.1), precision).init(params)
        >>> master_params(precision.cast(params), state)
        {'w': tensor([0.3333])}
    """
    masters = find_state(opt_state, MasterState).master
    entries, structure = tree.flatten(masters, is_box)
    param_entries = tree.leaves_up_to(masters, params, is_box)
    return tree.unflatten(structure, [p if m is None else m for p, m in zip(param_entries, entries, strict=True)])


@api_boundary
def convert_masters(params: Params, opt_state: OptState, precision: Precision) -> tuple[Params, OptState]:
    """Return parameters and state with master weights where a policy keeps them: in the state, or as the shards.

    So a checkpoint that was saved without `Precision(shard=)` goes on with it, and the reverse. Load it into what
    `step.init` makes by the policy of the checkpoint, and convert that.

    Args:
        params: the parameters between steps, at stage 3 or unsharded.
        opt_state: a `MasterState`, or a state that holds one.
        precision: the new policy; only `shard` may differ from the old one.

    Raises:
        ValueError: if `opt_state` holds no `MasterState`, or the trees differ in structure.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> precision = Precision(param=torch.bfloat16)
        >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
        >>> state = step.init({"w": torch.full((4,), 1 / 3)}, master_weights(optim.sgd(0.1), precision))
        >>> params, opt_state = convert_masters(*state, Precision(param=torch.bfloat16, shard=torch.float32))
        >>> step.gather(params), opt_state.master
        ({'w': tensor([0.3333, 0.3333, 0.3333, 0.3333])}, {'w': None})
    """
    masters = master_params(params, opt_state)
    new_masters = precision.cast(masters)
    state = MasterState(_distinct_masters(masters, new_masters), find_state(opt_state, MasterState).inner)
    entries, structure = tree.flatten(opt_state, _is_master_state)
    return new_masters, tree.unflatten(structure, [state if isinstance(x, MasterState) else x for x in entries])


def _is_master_state(x: object) -> bool:
    return isinstance(x, MasterState)


def _check_params(params: Params, precision: Precision) -> None:
    """Raise an error for a leaf without a gradient, and warn if parameters are in half precision already."""
    half_precision_paths = []
    for path, x in zip(*tree.flatten_with_paths(params)[:2], strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        if not x.is_floating_point():
            raise TypeError(
                f"master_weights: params leaf {path!r} is {tree.show(x)}, which has no gradient: move it to another "
                "tree, such as the buffers"
            )
        if x.dtype.itemsize < 4:
            half_precision_paths.append(path)
    if half_precision_paths:
        warn_once(
            f"optim.master_weights: {len(half_precision_paths)} leaves ({half_precision_paths[0]!r}, ...) are in half "
            f"precision already, so their masters in {precision.master} start from rounded values: if you have the "
            "parameters before the cast, pass those to step.init"
        )


def _check_masters(params: Params, masters: Params, precision: Precision) -> None:
    """Check that the state has masters of the parameters that are in half precision, and of no others.

    Raises:
        ValueError: if not, as with a state that was made for `Precision(shard=)`, or without it. The message names the
            leaf.
    """
    paths, entries, _ = tree.flatten_with_paths(params, is_box)
    for path, p, m in zip(paths, entries, tree.flatten(masters, is_box)[0], strict=True):
        dtype = _entry_dtype(p)
        if dtype is not None and not isinstance(p, Slot) and (m is None) != (dtype == precision.master):
            problem = "no master weights" if m is None else "master weights, too,"
            raise ValueError(
                f"master_weights: params leaf {path!r} is {dtype}, and the state has {problem} of it: it was made with "
                "another precision.shard; see docs/training.md#master-weights-as-shards"
            )


def _entry_dtype(x: object) -> torch.dtype | None:
    """Return the dtype of an entry of a tree; None if it is not a tensor. A slot has the dtype of its unit."""
    if isinstance(x, Slot):
        return traced_spec(x.spec_id).dtype
    data = x.pieces[0] if isinstance(x, Shard) else x
    return data.dtype if isinstance(data, torch.Tensor) else None


def check_dtypes(params: Params, grads: Updates, like: Params, precision: Precision, name: str) -> None:
    """Check that parameters and gradients have the dtypes of a policy.

    Raises:
        TypeError: if they have not. The message begins with `name`, the function that checks, and names the leaf.
    """
    paths, entries, _ = tree.flatten_with_paths(params, is_box)
    columns = [tree.leaves_up_to(params, values, is_box) for values in (grads, like)]
    for path, p, g, x in zip(paths, entries, *columns, strict=True):
        dtype, grad_dtype = _entry_dtype(x), _entry_dtype(g)
        if dtype is None or isinstance(p, Slot):
            continue
        if _entry_dtype(p) != dtype:
            raise TypeError(
                f"{name}: params leaf {path!r} is {_entry_dtype(p)}, and precision says {dtype}; start with params, "
                "opt_state = step.init(params, opt); unsharded, params = precision.cast(params) after opt.init(params)"
            )
        expected = precision.gradients(dtype).grad
        if grad_dtype is not None and grad_dtype != torch.promote_types(grad_dtype, expected):
            raise TypeError(
                f"{name}: grads leaf {path!r} is {grad_dtype}, and precision says {expected}; take them with "
                "fzero.value_and_grad(f, precision=precision)"
            )
