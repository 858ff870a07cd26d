"""Offload: a ratio of an optimizer's state lies in host memory, and is updated there or on the device.

ZeRO-Offload (arXiv:2101.06840) keeps all of it there, and ZeRO-Offload++ a ratio, by whole groups of parameters. Here
it is a layout: each rank's shard of a unit lies in one piece or two, and 64 elements are the grain.
"""

from dataclasses import replace

import torch

from fzero.collectives.moves import to_device, to_host
from fzero.layout.boxes import Shard
from fzero.layout.pieces import spaces
from fzero.optim._base import Optimizer, OptState, Pair, Params, Updates, around, as_optimizer, find_state
from fzero.optim._master import MasterState, difference, rounded
from fzero.optim._spread import Ratio, Spread, check_ratio, spread_like, spread_of

__all__ = ["offload", "offloaded"]

WAYS = ("host", "device")


def offload(pair: Pair, ratio: Ratio = 1.0, update: str = "host") -> Optimizer:
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

    Returns:
        A pair. Its state is that of `pair`, whose boxes lie in pieces; so checkpoints of one ratio load at another. At
        stage 0, and unsharded, each leaf of the state is a box of its own, over no axis.

    Raises:
        TypeError: if `ratio` is no number and no rule.
        ValueError: if `ratio` is not from 0 to 1, or `update` neither. If `pair` reads more than one element of a leaf,
            and is to run on the host; or if it skips steps, since a loss scale goes around. On use, if the state was
            cut at another ratio.

    Example:
        >>> import fzero
        >>> from fzero import optim
        >>> params = {"w": torch.ones(256)}
        >>> opt = optim.offload(optim.sgd(0.1, momentum=0.9), ratio=0.5)
        >>> state = opt.init(params)
        >>> fzero.layouts(state)
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
    run = _on_host if update == "host" else _on_device

    def init(params: Params) -> OptState:
        lay = spread_of(params, ratio, known.precision)
        if known.pointwise is False:
            return lay.lowered(pair.init(params))
        return pair.init(lay.cut(params, to_host))

    def updated(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        lay = spread_of(grads if params is None else params, ratio, known.precision)
        lay.check(state)
        return run(known, lay, grads, state, params)

    updated.__qualname__ = "offload.update"
    return replace(around(init, updated, pair), pointwise=known.pointwise)


def _on_host(
    pair: Optimizer, lay: Spread, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Send the host's share of the gradients down, update each share where it lies, and send the results up."""
    below = None if params is None else lay.cut(params, to_host)
    updates, state = pair.update(lay.cut(grads, to_host), state, params=below)
    if pair.precision is None or params is None:
        return lay.joined(updates, lambda i, u: [lay.up(*x) for x in zip(spaces(u), u.parts, strict=True)]), state
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

    return lay.joined(updates, on_device), state


def _on_device(
    pair: Optimizer, lay: Spread, grads: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Let the host's share of the state come up, update all of it on the device, and send that share back."""
    updates, new = pair.update(grads, lay.lifted(state), params=params)
    return updates, lay.lowered(new)


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
        >>> fzero.layouts(optim.offloaded(state, params, ratio=1))
        count       int64 []       replicated
        momentum.w  float32 [256]  unit 'w' over no axis: 256 of 256 elements, 256 of them on the host
    """
    check_ratio(ratio)
    lay = spread_like(opt_state, params, ratio)
    return lay.lowered(lay.lifted(opt_state))
