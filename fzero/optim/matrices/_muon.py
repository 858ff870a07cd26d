"""Muon: steps whose singular values are all near one. Each rank computes its share of the matrices."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_choice, check_int
from fzero.optim._base import Mask, Optimizer, OptimizerLike, Params, Updates, chain, check_mask, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_fraction, check_nonnegative, check_rate, is_zero, lerp, rate_at
from fzero.optim._schedules import Schedule
from fzero.optim.checks import torch_hints
from fzero.optim.matrices._matrix_shards import map_matrices
from fzero.optim.moments import MomentsLike, check_moment, init_moment, map_moments, read_moments
from fzero.optim.wrappers import masked
from fzero.sharding import abstract, is_box, per_leaf
from fzero.tree import Tree

__all__ = ["MuonState", "muon"]


_SCALES: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class MuonState(NamedTuple):
    """The number of updates (int64, 0-d), and the moving average of the gradients, a tree, or in fewer bytes."""

    count: torch.Tensor
    momentum: Tree


@torch_hints
@optimizer_factory
def muon(
    learning_rate: Scalar | Schedule,
    weight_decay: Scalar = 0.1,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    fallback: OptimizerLike | None = None,
    mask: Mask | None = None,
    ns_dtype: torch.dtype | None = torch.bfloat16,
    moments: MomentsLike = None,
) -> Optimizer:
    """Step along the orthogonalised momentum of each matrix (Keller Jordan's Muon): `torch.optim.Muon`'s numbers.

    Newton-Schulz needs full matrices. The momentum is averaged and stored in shards. One all_to_all, in `ns_dtype`,
    sends each rank the matrices that it owns, and a second one returns their directions. Each sends one shard per rank,
    about 1/N of an all_gather's data; `fzero.sharding._owners` says when it sends more. A rank computes at most 1/N of
    the matrices of each shape, rounded up. At stage 0 each rank computes all matrices, without communication.

    Muon is for the matrices within a network. Embeddings, heads, norms and biases go to `fallback`.

    Args:
        learning_rate: a number, or a schedule.
        weight_decay: the fraction of a parameter, times the rate, that is subtracted in each update.
        momentum: the decay of the moving average.
        nesterov: whether to look ahead.
        ns_coefficients: the coefficients of the polynomial that Newton-Schulz iterates.
        eps: a lower bound of the norms that matrices are divided by.
        ns_steps: the number of iterations.
        adjust_lr_fn: how the rate grows with a matrix `[r, c]`: "original" (or None) times sqrt(max(1, r / c)), or
            "match_rms_adamw" (arXiv:2502.16982) times 0.2 sqrt(max(r, c)), for AdamW's rate and decay.
        fallback: the optimizer for all other leaves, such as `optim.adamw(3e-4)`. It is required if there are such
            leaves. Muon and `fallback` both keep state for all leaves, as `masked` does.
        mask: which leaves are Muon's: a tree of bools, or a function that returns one from the tree of full leaves (as
            meta tensors). By default the leaves with two dimensions. A leaf `[.., r, c]` in the mask is a stack of
            separate matrices, such as experts. Give convolutions to `fallback`.
        ns_dtype: the dtype of the iteration, and of the matrices on the wire; None for the gradients' dtype.
        moments: how to store Muon's moving average; see `adamw`. `fallback` has an argument of its own.

    Returns:
        An optimizer. Its state is a `MuonState`; with `fallback` it is a tuple of a `MuonState` and the state of
        `fallback`.

    Raises:
        ValueError: if a hyperparameter is out of its range, or `mask` is given without `fallback`. On init and update,
            if a leaf is no matrix and there are no `fallback`, or `mask` selects a leaf with fewer than two dimensions.

    Example:
        >>> from fzero import optim
        >>> opt = muon(0.02, fallback=optim.adamw(3e-4))
        >>> params = {"w": torch.eye(2), "b": torch.zeros(2)}
        >>> updates, state = opt.update(params, opt.init(params), params)
        >>> updates["b"]
        tensor([-0., -0.])

    References:
        https://kellerjordan.github.io/posts/muon, arXiv:2502.16982
    """
    check_rate(learning_rate)
    check_mask(mask)
    check_fraction(momentum=momentum)
    check_nonnegative(eps=eps, weight_decay=weight_decay)
    check_int("ns_steps", ns_steps, 0, "the number of iterations")
    _check_coefficients(ns_coefficients)
    check_choice("adjust_lr_fn", adjust_lr_fn, tuple(_SCALES))
    if mask is not None and fallback is None:
        raise ValueError("muon: mask= selects Muon's leaves, and no optimizer updates the rest: give fallback= too")

    policy = read_moments(moments)

    def direction(matrix: torch.Tensor) -> torch.Tensor:
        return _orthogonalize(matrix, ns_coefficients, ns_steps, eps)

    def init(params: Params) -> MuonState:
        _check_mask(params, mask, fallback is not None)
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        return MuonState(count, init_moment(params, policy, signed=True))

    def update(grads: Updates, state: MuonState, params: Params | None = None) -> tuple[Updates, MuonState]:
        """Return the updates and the state after one step of Muon."""
        check_moment(state.momentum, grads, policy)
        is_matrix = _check_mask(grads, mask, fallback is not None)
        rate = rate_at(learning_rate, state.count)
        ahead, average = _momentum_direction(grads, state.momentum, momentum, nesterov, stored_exactly=policy is None)
        directions = map_matrices(direction, ahead, tree.leaves_up_to(grads, is_matrix, is_box), ns_dtype)
        scales = per_leaf(
            grads, tree.map(lambda p, m: _update_scale(adjust_lr_fn, p) if m else 0.0, abstract(grads), is_matrix)
        )
        updates = tree.map(lambda d, s: (-rate * s * d).to(d.dtype), directions, scales)
        if not is_zero(weight_decay):
            updates = _subtract_decay(updates, params, rate, weight_decay)
        return updates, MuonState(state.count + 1, average)

    matrices = Optimizer(init, update, exact_on_shards=True, elementwise=False)
    if fallback is None:
        return matrices
    return chain(
        masked(matrices, lambda p: _resolve_mask(p, mask)),
        masked(fallback, lambda p: _negate_mask(_resolve_mask(p, mask))),
    )


def _check_coefficients(coefficients: Any) -> None:
    is_triple = isinstance(coefficients, tuple | list) and len(coefficients) == 3
    if not is_triple or not all(isinstance(x, Real) for x in coefficients):
        raise ValueError(f"ns_coefficients={coefficients!r}: expected three numbers, such as (3.4445, -4.7750, 2.0315)")


def _momentum_direction(
    grads: Updates, average: Tree, momentum: Scalar, nesterov: bool, stored_exactly: bool
) -> tuple[Tree, Tree]:
    """Return the momentum to step along, and the new moving average of the gradients."""

    def step(g: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = g.to(m.dtype)
        new = lerp(m, gradient, 1 - momentum)
        return (lerp(gradient, new, momentum) if nesterov else new).to(g.dtype), new

    if not stored_exactly:
        ahead, (average,) = map_moments(step, (True,), grads, (average,))
        return ahead, average
    average = tree.map(lambda g, m: lerp(m, g, 1 - momentum), grads, average)
    ahead = tree.map(lambda g, m: lerp(g, m, momentum), grads, average) if nesterov else average
    return ahead, average


def _subtract_decay(updates: Updates, params: Params | None, rate: Scalar, weight_decay: Scalar) -> Updates:
    """Subtract a share of the parameters from the updates.

    Raises:
        ValueError: if there are no parameters.
    """
    if params is None:
        raise ValueError("muon with weight_decay needs the parameters: opt.update(grads, state, params)")
    return tree.map(lambda u, p: (u - rate * weight_decay * p).to(u.dtype), updates, params)


def _orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Drive the singular values of a matrix `[r, c]` towards one, by the Newton-Schulz iteration."""
    a, b, c = coefficients
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)  # now no singular value exceeds one
    for _ in range(steps):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _update_scale(name: str | None, leaf: torch.Tensor) -> float:
    return _SCALES[name](*leaf.shape[-2:]) if leaf.numel() else 0.0


def _resolve_mask(params: Params, mask: Mask | None) -> Tree:
    """Return a tree of bools: whether each full leaf is Muon's."""
    if mask is None:
        return tree.map(lambda p: p.ndim == 2, params)
    return mask(params) if callable(mask) else mask


def _negate_mask(mask: Tree) -> Tree:
    return tree.map(lambda m: not m, mask)


def _check_mask(params: Params, mask: Mask | None, has_fallback: bool) -> Tree:
    """Return the mask as a tree of bools. Muon's leaves must be matrices, and the rest must have an optimizer."""
    leaves = abstract(params)
    is_matrix = _resolve_mask(leaves, mask)
    paths, entries, _ = tree.flatten_with_paths(leaves)
    for path, x, m in zip(paths, entries, tree.leaves_up_to(leaves, is_matrix), strict=True):
        if x is None:
            continue
        if not m and not has_fallback:
            raise ValueError(
                f"muon is for matrices, and leaf {path!r} is {tree.show(x)}: give the other leaves another optimizer, "
                "optim.muon(0.02, fallback=optim.adamw(3e-4)), and by mask= the embeddings and the head too"
            )
        if m and x.ndim < 2:
            raise ValueError(
                f"muon: mask= selects leaf {path!r}, which is {tree.show(x)}: expected a matrix; "
                "let the mask leave it to fallback="
            )
    return is_matrix
