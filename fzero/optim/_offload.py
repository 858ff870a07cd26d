"""Offload: a ratio of an optimizer's state lies in host memory, and is updated there or on the device.

ZeRO-Offload (arXiv:2101.06840) keeps all of it there, and ZeRO-Offload++ a ratio, by whole groups of parameters. Here
it is a layout: each rank's shard of a unit lies in one piece or two, and 64 elements are the grain.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from fzero import tree
from fzero.collectives import to_device, to_host
from fzero.optim._base import Optimizer, OptState, Pair, Params, Updates, around, as_optimizer, find_state
from fzero.optim._master import MasterState, difference, rounded
from fzero.optim._offload_plan import OffloadPlan, Ratio, check_ratio, offload_plan_like, offload_plan_of
from fzero.sharding import Shard, is_box, lifted, spaces

__all__ = ["DelayedState", "offload", "offloaded"]

WAYS = ("host", "device")


class DelayedState(NamedTuple):
    """The state of a pair whose host updates by the gradients of the step before.

    Attributes:
        waiting: those gradients, of the units of which the host has a part; None of the others.
        inner: the pair's state.
    """

    waiting: Updates
    inner: OptState


def offload(pair: Pair, ratio: Ratio = 1.0, update: str = "host", delay: int = 0, params: bool = False) -> Optimizer:
    """Keep a ratio of a pair's state in host memory; the numbers are bit for bit those of `pair`.

    The host has the last units of the tree, and the end of one unit's shards: their gradients come first, and the next
    step needs their parameters last. Its share of the gradients goes down in their own dtype. What comes up is a
    parameter in its own dtype if the pair keeps master weights, and else the update. So in bfloat16 each element
    takes 2 bytes each way, once a step.

    Args:
        pair: an (init, update) pair. Clip before it, on the device: `chain(clip_by_global_norm(1.0), offload(...))`.
        ratio: the share of the state's elements that lies on the host, from 0 to 1; or a rule `(path) -> share`, which
            is asked for each leaf. Of the leaves of a unit the end of each rank's shard lies there.
        update: where the host's share is updated. "host" sends gradients down and results up, and needs a pair that
            treats each element by itself. "device" lets the state come up one unit at a time, and go back; any pair
            will do.
        delay: 1 to update the units of which the host has a part by the gradients of the step before, as ZeRO-Offload's
            delayed parameter update does. Then the host computes beside the whole step. It is another algorithm: the
            numbers are those of `pair` given these units' gradients one step late, and zeros at the first step.
        params: whether the host's share of the parameters lies there, too, where `step.init` puts it; at stage 3 alone.
            A unit's share comes up whenever the unit is gathered. What follows in a chain sees it on the host.

    Returns:
        A pair. Its state is that of `pair`, whose boxes lie in pieces; so checkpoints of one ratio load at another. At
        stage 0, and unsharded, each leaf of the state is a box of its own, over no axis.

    Raises:
        TypeError: if `ratio` is no number and no rule.
        ValueError: if `ratio` is not from 0 to 1, or `update` neither. If `pair` reads more than one element of a leaf,
            and is to run on the host; or if it skips steps, since a loss scale goes around. If `delay` is neither 0 nor
            1, or is 1 with `update="device"`. In `step.init`, if `params` is asked at another stage than 3. On use, if
            the state was cut at another ratio, or made for gradients of another dtype.

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
    known = as_optimizer(pair)
    check_ratio(ratio)
    if update not in WAYS:
        raise ValueError(f"update={update!r}: expected one of {WAYS}")
    if known.skips:
        raise ValueError("offload: put the loss scale around offload: it decides on the device whether a step counts")
    if update == "host" and known.pointwise is False:
        raise ValueError(
            f"offload: {known.name} reads whole leaves or trees, and the host has a piece of each: put what clips "
            'before offload, in a chain, or let the state come up to be updated, offload(pair, ratio, update="device")'
        )
    if delay not in (0, 1) or (delay and update == "device"):
        raise ValueError(f'offload: delay={delay!r}: expected 0, or 1 with update="host"')
    run = _late if delay else _on_host if update == "host" else _on_device

    def init(params: Params) -> OptState:
        lay = offload_plan_of(params, ratio, known.precision)
        if known.pointwise is False:
            return lay.lowered(pair.init(params))
        state = pair.init(lay.cut(params, to_host))
        return DelayedState(_no_gradients(lay, params, known), state) if delay else state

    def updated(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        lay = offload_plan_of(grads if params is None else params, ratio, known.precision)
        lay.check(state)
        return run(known, lay, grads, state, params)

    updated.__qualname__ = "offload.update"
    return replace(around(init, updated, pair), pointwise=known.pointwise, offloads=True, lowers=ratio if params else 0)


def _on_host(
    pair: Optimizer, lay: OffloadPlan, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Send the host's share of the gradients down first."""
    return _by_gradients(pair, lay, lay.cut(grads, to_host), state, params)


def _late(
    pair: Optimizer, lay: OffloadPlan, grads: Updates, state: DelayedState, params: Params | None
) -> tuple[Updates, OptState]:
    """Update by the gradients that have waited, and let those of this step wait."""
    new = lay.cut(grads, to_host)
    waiting = lay.hosts(new)
    _check_waiting(waiting, state.waiting)
    updates, inner = _by_gradients(pair, lay, lay.replaced(new, state.waiting), state.inner, params)
    return updates, DelayedState(waiting, inner)


def _check_waiting(new: Updates, waiting: Updates) -> None:
    paths, leaves, _ = tree.flatten_with_paths(new, is_box)
    for path, x, before in zip(paths, leaves, tree.flatten(waiting, is_box)[0], strict=True):
        if (x is None) != (before is None):
            has = "has no gradient" if before is None else "waits with a gradient"
            raise ValueError(
                f"offload: the state {has} for leaf {path!r}: "
                "with delay=1 a state keeps the ratio that it was made with"
            )
        if isinstance(x, Shard) and x.dtype != before.dtype:
            raise ValueError(
                f"offload: the gradient of leaf {path!r} is {x.dtype}, and the state waits for {before.dtype}: give "
                "value_and_grad and master_weights the same precision; within a loss scale, whose gradients are wide, "
                "there is no delay"
            )


def _no_gradients(lay: OffloadPlan, params: Params, pair: Optimizer) -> Updates:
    """Make what waits before the first step: zeros, in the dtype of the gradients that come."""

    def zeros(path: str, x: torch.Tensor | None) -> torch.Tensor | None:
        policy = pair.precision
        if x is None:
            return None
        dtype = x.dtype if policy is None else policy.gradients(policy.dtype_of(path, x)).grad
        return torch.zeros_like(x, dtype=dtype)

    return tree.map_with_path(zeros, lay.hosts(lay.cut(params, to_host)))


def _by_gradients(
    pair: Optimizer, lay: OffloadPlan, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Update each share where it lies, and send the results up."""
    below = None if params is None else lay.cut(params, to_host)
    updates, state = pair.update(grads, state, params=below)
    low = lay.is_low(params)
    if pair.precision is None or params is None:
        return lay.joined(updates, lambda i, u: [lay.up(*x) for x in zip(spaces(u), u.parts, strict=True)], low), state
    masters = lay.entries(find_state(state, MasterState).master)
    narrow = lay.entries(lay.cut(params, lambda x: x))

    def on_device(i: int, u: Shard) -> list[torch.Tensor]:
        """Send up new parameters where these are narrower than updates: what a master is rounded to."""
        if masters[i] is None:
            return [lay.up(*x) for x in zip(spaces(u), u.parts, strict=True)]
        return [
            difference(p, to_device(rounded(m, p.dtype), lay.device), m.dtype) if space == "host" else x
            for space, x, p, m in zip(spaces(u), u.parts, narrow[i].parts, masters[i].parts, strict=True)
        ]

    return lay.joined(updates, on_device, low), state


def _on_device(
    pair: Optimizer, lay: OffloadPlan, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Let the host's share of the state come up, update all of it on the device, and send that share back."""
    above = None if params is None else lifted(params)
    updates, new = pair.update(grads, lay.lifted(state), params=above)
    return lay.cut(updates, to_host, boxes_only=True) if lay.is_low(params) else updates, lay.lowered(new)


def offloaded(opt_state: OptState, params: Params, ratio: Ratio) -> OptState:
    """Return the state of a pair as `offload` keeps it at a ratio, whatever the ratio was: 0 brings all to the device.

    It copies the pieces, so it takes memory for both at once. To change the ratio of a state that does not fit twice,
    save it, make another by `step.init`, and load.

    Args:
        opt_state: the state, made by `offload(pair)` at any ratio, or by `pair` itself on boxes.
        params: the parameters, which say the order of the units, and which device they lie on.
        ratio: as of `offload`.

    Raises:
        TypeError: if `ratio` is no number and no rule.
        ValueError: if it is not from 0 to 1.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> params = {"w": torch.ones(256)}
        >>> state = optim.offload(optim.sgd(0.1, momentum=0.9), ratio=0.5).init(params)
        >>> fzero.sharding.layouts(optim.offloaded(state, params, ratio=1))
        count       int64 []       replicated
        momentum.w  float32 [256]  unit 'w' over no axis: 256 of 256 elements, 256 of them on the host
    """
    check_ratio(ratio)
    lay = offload_plan_like(opt_state, params, ratio)
    return lay.lowered(lay.lifted(opt_state))
