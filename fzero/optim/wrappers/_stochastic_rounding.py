"""Stochastic rounding: half-precision parameters that keep small updates on average, without master weights."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim._base import (
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    apply_updates,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.optim._precision import Precision
from fzero.optim.moments import round_at_random
from fzero.optim.wrappers._master_weights import check_dtypes, check_no_masters, difference
from fzero.random import check_key, fold_in
from fzero.sharding import Shard, is_box, key_beside, leaf_bits, make_box, shard_bits
from fzero.tree import Tree

__all__ = ["StochasticRoundingState", "stochastic_rounding"]


class StochasticRoundingState(NamedTuple):
    """The key of the next update's draws (int64, 0-d), and the state of the optimizer."""

    key: torch.Tensor
    inner: OptState


@api_boundary
@optimizer_factory
def stochastic_rounding(opt: OptimizerLike, precision: Precision, key: torch.Tensor) -> Optimizer:
    """Round updated parameters to bfloat16 up or down at random, so that the mean is the exact value.

    Rounding to the nearest loses every update smaller than half of a parameter's last bit. With stochastic rounding
    (arXiv:1502.02551) such an update changes the last bit with a probability in proportion to its size. It takes no
    master weights: with Adam 10 bytes an element, and 4 with `moments="int8"`, where masters take 14. The noise costs
    some accuracy; use it where masters do not fit.

    The draws are functions of the key, a leaf's path and an element's position in the full leaf. So the numbers are
    equal at every stage and on any number of ranks.

    Args:
        opt: an (init, update) pair, such as a whole chain; it sees gradients and parameters in `precision.master`'s
            dtype.
        precision: the policy that `fzero.value_and_grad` gets, too, with `param=torch.bfloat16`. Leaves that it keeps
            in full precision are not rounded.
        key: a key of `fzero.random`.

    Returns:
        An optimizer, like `master_weights`: call its `init` with the parameters before they are cast.
        `fzero.zero.ShardedStep.init` does so, and casts them afterwards.

    Raises:
        TypeError: if `precision` is not a `Precision` or `key` is not a key. On update, if parameters or gradients do
            not have the policy's dtypes. The message names the path.
        ValueError: if the parameters' dtype is not bfloat16, or masters' is not float32. On update, if `params` is not
            given.

    Example:
        >>> from fzero import Precision, optim, random
        >>> precision = Precision(param=torch.bfloat16)
        >>> opt = stochastic_rounding(optim.sgd(0.001), precision, random.key(0))
        >>> params = {"w": torch.ones(10000)}
        >>> state, params = opt.init(params), precision.cast(params)
        >>> updates, state = opt.update({"w": torch.ones(10000)}, state, params)
        >>> params = optim.apply_updates(params, updates)
        >>> params["w"].unique(), params["w"].double().mean()
        (tensor([0.9961, 1.0000], dtype=torch.bfloat16), tensor(0.9990, dtype=torch.float64))
    """
    if not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: expected a policy, such as fzero.Precision(param=torch.bfloat16)")
    check_no_masters("stochastic_rounding", opt)
    if precision.param != torch.bfloat16 or precision.master != torch.float32:
        raise ValueError(
            f"stochastic_rounding: param={precision.param}, master={precision.master}: expected torch.bfloat16 and "
            "torch.float32; for another dtype use optim.master_weights"
        )
    if precision.has_master_shards:
        raise ValueError(
            f"stochastic_rounding: precision has shard={precision.shard}, for master weights; leave it out, or use "
            "optim.master_weights"
        )
    check_key(key)

    def init(params: Params) -> StochasticRoundingState:
        float32_params = tree.map(lambda p: p.to(torch.float32), params)
        return StochasticRoundingState(key_beside(key, params), opt.init(float32_params))

    def update(
        grads: Updates, state: StochasticRoundingState, params: Params | None = None
    ) -> tuple[Updates, StochasticRoundingState]:
        """Update in float32, and return the updates after which each parameter is rounded at random."""
        if params is None:
            raise ValueError("stochastic_rounding needs the parameters: opt.update(grads, state, params)")
        check_dtypes(params, grads, precision.dtype_tree(params), precision, "stochastic_rounding")
        float32_params = tree.map(lambda p: p.to(torch.float32), params)
        updates, inner = opt.update(tree.map(lambda g: g.to(torch.float32), grads), state.inner, params=float32_params)
        new_params = _round_tree(apply_updates(float32_params, updates), params, state.key)

        def choose_update(p: torch.Tensor, u: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return difference(p, n, torch.float32) if p.dtype == torch.bfloat16 else u

        updates = tree.map(choose_update, params, updates, new_params)
        return updates, StochasticRoundingState(fold_in(state.key, 0), inner)

    return replace(wrap_optimizers(init, update, opt), precision=precision)


def _round_tree(values: Tree, like: Tree, key: torch.Tensor) -> Tree:
    """Round float32 values to bfloat16 at random where `like` has this dtype; other values stay as they are."""
    key = fold_in(key, 1)  # moments in bfloat16 may have the same key, and draw with it as it is
    paths, entries, structure = tree.flatten_with_paths(values, is_box)
    like_leaves = tree.leaves_up_to(values, like, is_box)
    rounded_leaves: dict[Any, torch.Tensor] = {}  # a tied leaf is rounded once, by the draws of its first path
    out = list(entries)
    for i, (path, x, p) in enumerate(zip(paths, entries, like_leaves, strict=True)):
        if not isinstance(x, torch.Tensor | Shard) or p.dtype != torch.bfloat16:
            continue
        if isinstance(x, Shard):
            out[i] = make_box(x.spec_id, [round_at_random(x.data, shard_bits(key, x.spec_id, x.device))])
            continue
        if tree.identity(x) not in rounded_leaves:
            rounded_leaves[tree.identity(x)] = round_at_random(x, leaf_bits(key, path, x))
        out[i] = rounded_leaves[tree.identity(x)]
    return tree.unflatten(structure, out)
