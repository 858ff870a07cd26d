"""Offload: a ratio of an optimizer's state lies in host memory, and is updated there or on the device.

ZeRO-Offload (arXiv:2101.06840) keeps the whole state on the host, and ZeRO-Offload++ a ratio of it, in whole groups of
parameters. In fzero the ratio is part of the layout: each rank's shard of a unit has one piece or two, split at a
multiple of 64 elements.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_choice
from fzero._tracebacks import api_boundary
from fzero.collectives import to_device, to_host
from fzero.optim._base import (
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    as_optimizer,
    find_state,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.optim._offload_plan import OffloadPlan, Ratio, check_ratio, offload_plan_like, plan_offload
from fzero.optim.wrappers._master_weights import MasterState, difference, round_master
from fzero.sharding import Shard, boxes_to_device, is_box, spaces

__all__ = ["DelayedState", "offload", "with_offload_ratio"]

_UPDATE_SPACES = ("host", "device")


class DelayedState(NamedTuple):
    """The state of an optimizer whose host updates by the gradients of the previous step.

    Attributes:
        previous_grads: the previous step's gradients for the units with a host piece; None for the rest.
        inner: the optimizer's state.
    """

    previous_grads: Updates
    inner: OptState


@api_boundary
@optimizer_factory
def offload(
    opt: OptimizerLike, ratio: Ratio = 1.0, update_on: str = "host", delay: int = 0, params: bool = False
) -> Optimizer:
    """Keep a ratio of an optimizer's state in host memory; the numbers equal those of `opt` bit for bit.

    The host holds the last units of the tree, and the end of one unit's shards. Their gradients come first, and the
    next step needs their parameters last. The host receives its share of the gradients in the gradients' dtype. It
    returns parameters in their own dtype if the optimizer keeps master weights, and updates otherwise. So in bfloat16
    each element costs 2 bytes each way, once per step.

    Args:
        opt: an (init, update) pair. Clip before it, on the device: `chain(clip_by_global_norm(1.0), offload(...))`.
        ratio: the share of the state's elements that lies on the host, from 0 to 1; or a rule `(path) -> share` that
            is called for each leaf. The host holds the end of each rank's shard of a unit.
        update_on: the space in which the host's share is updated. "host" sends gradients to the host and results back;
            it needs an optimizer that treats each element by itself. "device" copies the state to the device and back,
            one unit at a time; it works with any optimizer.
        delay: 1 to update units with a host piece by the gradients of the previous step, as ZeRO-Offload's delayed
            parameter update does. The host then computes during the whole step. This is another algorithm: the numbers
            are those of `opt` with these units' gradients one step late, and zeros at the first step.
        params: whether the host's share of the parameters lies on the host, too; `step.init` puts it there. It needs
            stage 3. A unit's share moves to the device whenever the unit is gathered. Later links of a chain see it on
            the host.

    Returns:
        An optimizer. Its state is the state of `opt` with its boxes in pieces, so checkpoints of one ratio load at
        another. At stage 0 and unsharded, each leaf of the state is a box over no axis.

    Raises:
        TypeError: if `ratio` is neither a number nor a rule.
        ValueError: if `ratio` is not from 0 to 1, or `update_on` is not "host" or "device". If `delay` is neither 0 nor
            1, or is 1 with `update_on="device"`. If `update_on="host"` and `opt` reads more than one element of a leaf.
            If `opt` is a loss scale, which goes around `offload`, or its precision has `shard=`. In `step.init`,
            if `params` is true below stage 3. On use, if the state was split at another ratio, or made for
            gradients of another dtype.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> params = {"w": torch.ones(256)}
        >>> opt = optim.offload(optim.sgd(0.1, momentum=0.9), ratio=0.5)
        >>> state = opt.init(params)
        >>> fzero.sharding.layouts(state)
        count       int64 []       replicated
        momentum.w  float32 [256]  unit 'w' over no axis: 256 of 256 elements, 128 of them on the host
        >>> opt.update(params, state, params)[0]["w"].shape
        torch.Size([256])
    """
    if isinstance(ratio, Optimizer):
        raise TypeError(f"ratio is an optimizer, {ratio!r}: it comes first, fzero.optim.offload(opt, ratio)")
    optimizer = as_optimizer(opt)
    check_ratio(ratio)
    check_choice("update_on", update_on, _UPDATE_SPACES)
    _check_optimizer(optimizer, ratio, update_on)
    if delay not in (0, 1) or (delay and update_on == "device"):
        raise ValueError(f'offload: delay={delay!r}: expected 0, or 1 with update_on="host"')
    run = _update_on_host if update_on == "host" else _update_on_device
    if delay:
        run = _update_delayed

    def init(params: Params) -> OptState:
        plan = plan_offload(params, ratio, optimizer.precision)
        if optimizer.elementwise is False:
            return plan.state_to_host(opt.init(params))
        state = opt.init(plan.to_pieces(params, to_host))
        return DelayedState(_zero_gradients(plan, params, optimizer), state) if delay else state

    def offload_update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        plan = plan_offload(grads if params is None else params, ratio, optimizer.precision)
        plan.check(state)
        return run(optimizer, plan, grads, state, params)

    offload_update.__qualname__ = "offload.update"
    return replace(
        wrap_optimizers(init, offload_update, opt),
        elementwise=optimizer.elementwise,
        offloads_state=True,
        param_offload_ratio=ratio if params else 0,
    )


def _check_optimizer(optimizer: Optimizer, ratio: Ratio, update_on: str) -> None:
    """Check that an optimizer can be offloaded at a ratio.

    Raises:
        ValueError: if it is a loss scale, if it keeps its master weights among the parameters, or if it reads full
            leaves and is updated on the host.
    """
    if optimizer.skips_overflow:
        raise ValueError("offload: put the loss scale around offload: it decides on the device whether a step counts")
    policy = optimizer.precision
    if ratio and policy is not None and policy.has_master_shards:
        raise ValueError(
            f"offload: Precision(shard={policy.shard}) keeps the master weights among the parameters, on "
            "the device: leave shard= out, and the host holds its share of the masters"
        )
    if update_on == "host" and optimizer.elementwise is False:
        raise ValueError(
            f"offload: {optimizer.name} reads full leaves or trees, or has moments=, and the host holds only pieces of "
            "leaves: put clipping before offload, in a chain, leave moments= out, or update on the device, "
            'offload(opt, ratio, update_on="device")'
        )


def _update_on_host(
    opt: Optimizer, plan: OffloadPlan, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Send the host's share of the gradients to the host, and update each piece in its space."""
    return _update_in_pieces(opt, plan, plan.to_pieces(grads, to_host), state, params)


def _update_delayed(
    opt: Optimizer, plan: OffloadPlan, grads: Updates, state: DelayedState, params: Params | None
) -> tuple[Updates, OptState]:
    """Update units with a host piece by the previous step's gradients, and store this step's gradients for the next."""
    new_grads = plan.to_pieces(grads, to_host)
    previous_grads = plan.host_units(new_grads)
    _check_previous_grads(previous_grads, state.previous_grads)
    updates, inner = _update_in_pieces(
        opt, plan, plan.with_host_units(new_grads, state.previous_grads), state.inner, params
    )
    return updates, DelayedState(previous_grads, inner)


def _check_previous_grads(new: Updates, previous_grads: Updates) -> None:
    """Raise an error if the gradients that the state holds are of another ratio or precision than the new ones."""
    paths, leaves, _ = tree.flatten_with_paths(new, is_box)
    for path, x, previous_grad in zip(paths, leaves, tree.flatten(previous_grads, is_box)[0], strict=True):
        if (x is None) != (previous_grad is None):
            state_has = "has no gradient" if previous_grad is None else "holds a gradient"
            raise ValueError(
                f"offload: the state {state_has} for leaf {path!r}: "
                "with delay=1 a state keeps the ratio that it was made with; use that ratio, or make the state "
                "anew by opt.init"
            )
        if isinstance(x, Shard) and x.dtype != previous_grad.dtype:
            raise ValueError(
                f"offload: the gradient of leaf {path!r} is {x.dtype}, and the state expects {previous_grad.dtype}: "
                "give value_and_grad and master_weights the same precision; scaled_value_and_grad gives float32 "
                "gradients, so with a loss scale there is no delay"
            )


def _zero_gradients(plan: OffloadPlan, params: Params, opt: Optimizer) -> Updates:
    """Return the previous gradients at the first step: zeros in the gradients' dtype."""

    def zeros(path: str, x: torch.Tensor | None) -> torch.Tensor | None:
        policy = opt.precision
        if x is None:
            return None
        dtype = x.dtype if policy is None else policy.gradients(policy.leaf_dtype(path, x)).grad
        return torch.zeros_like(x, dtype=dtype)

    return tree.map_with_path(zeros, plan.host_units(plan.to_pieces(params, to_host)))


def _update_in_pieces(
    opt: Optimizer, plan: OffloadPlan, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Update each piece in its space, and move the results to the device, where the parameters lie there."""
    params_in_pieces = None if params is None else plan.to_pieces(params, to_host)
    updates, state = opt.update(grads, state, params=params_in_pieces)
    leaves_only = plan.has_host_params(params)
    if opt.precision is None or params is None:
        return plan.from_pieces(
            updates, lambda i, u: [plan.piece_to_device(*x) for x in zip(spaces(u), u.pieces, strict=True)], leaves_only
        ), state
    masters = plan.entries(find_state(state, MasterState).master)
    param_entries = plan.entries(plan.to_pieces(params, lambda x: x))

    def to_device_pieces(i: int, u: Shard) -> list[torch.Tensor]:
        """Move new parameters, which are rounded masters, instead of updates, which are wider."""
        if masters[i] is None:
            return [plan.piece_to_device(*x) for x in zip(spaces(u), u.pieces, strict=True)]
        return [
            difference(p, to_device(round_master(m, p.dtype), plan.device), m.dtype) if space == "host" else x
            for space, x, p, m in zip(spaces(u), u.pieces, param_entries[i].pieces, masters[i].pieces, strict=True)
        ]

    return plan.from_pieces(updates, to_device_pieces, leaves_only), state


def _update_on_device(
    opt: Optimizer, plan: OffloadPlan, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Move the host's share of the state to the device, update there, and move the share back."""
    params_on_device = None if params is None else boxes_to_device(params)
    updates, new_state = opt.update(grads, plan.state_to_device(state), params=params_on_device)
    return (
        plan.to_pieces(updates, to_host, boxes_only=True) if plan.has_host_params(params) else updates
    ), plan.state_to_host(new_state)


@api_boundary
def with_offload_ratio(opt_state: OptState, params: Params, ratio: Ratio) -> OptState:
    """Return an optimizer's state as `offload` keeps it at `ratio`, from any other ratio; 0 moves all to the device.

    The pieces are copied, so both states take memory at once. If the state does not fit twice, save it, make another
    state by `step.init`, and load.

    Args:
        opt_state: the state, made by `offload(opt)` at any ratio, or by `opt` itself on boxes.
        params: the parameters; they set the order of the units, and the device.
        ratio: as in `offload`.

    Raises:
        TypeError: if `ratio` is neither a number nor a rule.
        ValueError: if `ratio` is a number outside 0 to 1.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> params = {"w": torch.ones(256)}
        >>> state = optim.offload(optim.sgd(0.1, momentum=0.9), ratio=0.5).init(params)
        >>> fzero.sharding.layouts(optim.with_offload_ratio(state, params, ratio=1))
        count       int64 []       replicated
        momentum.w  float32 [256]  unit 'w' over no axis: 256 of 256 elements, 256 of them on the host
    """
    check_ratio(ratio)
    plan = offload_plan_like(opt_state, params, ratio)
    return plan.state_to_host(plan.state_to_device(opt_state))
