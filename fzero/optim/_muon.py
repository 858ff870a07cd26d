"""Muon: steps whose singular values are all near one, each rank working on its share of the matrices."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fzero import tree
from fzero.layout.boxes import is_box
from fzero.layout.segments import abstract, per_leaf
from fzero.optim._base import Mask, Optimizer, Pair, Params, Updates, chain
from fzero.optim._hyper import Number, fraction, is_zero, nonnegative
from fzero.optim._masked import masked
from fzero.optim._owners import map_matrices
from fzero.optim._rate import check_rate, rate_at
from fzero.optim._words import answers
from fzero.optim.schedules import Schedule
from fzero.tree import Tree

__all__ = ["MuonState", "muon"]

_SCALES: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class MuonState(NamedTuple):
    """The number of updates done (int64, 0-d), and the moving average of the gradients, like the parameters."""

    count: torch.Tensor
    momentum: Tree


@answers
def muon(
    learning_rate: Number | Schedule,
    weight_decay: Number = 0.1,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    others: Pair | None = None,
    mask: Mask | None = None,
    ns_dtype: torch.dtype | None = torch.bfloat16,
) -> Optimizer:
    """Step along the orthogonalised momentum of each matrix (Keller Jordan's Muon): `torch.optim.Muon`'s numbers.

    Newton-Schulz needs whole matrices. The momentum is kept and averaged in shards. Then one all_to_all, in `ns_dtype`,
    gives each rank its share of the matrices, and another takes their directions back. Each moves a rank's shard, about
    1/N of what gathering would; `fzero.layout.owners` says when more. A rank runs at most 1/N of each shape's matrices,
    rounded up. At stage 0 every rank has all and runs all, and nothing is moved.

    Muon is for the matrices within a network. Embeddings, heads, norms and biases go to `others`.

    Args:
        learning_rate: a number, or a schedule.
        weight_decay: the fraction of a parameter, times the rate, that is taken off each update.
        momentum: how much of the average stays.
        nesterov: whether to look ahead.
        ns_coefficients: of the polynomial that Newton-Schulz iterates.
        eps: the least norm that is divided by.
        ns_steps: the number of iterations.
        adjust_lr_fn: how the rate grows with a matrix `[r, c]`: "original" (or None) times sqrt(max(1, r / c)), or
            "match_rms_adamw" (arXiv:2502.16982) times 0.2 sqrt(max(r, c)), for AdamW's rate and decay.
        others: the pair for all other leaves, such as `optim.adamw(3e-4)`. It is needed if there are any. Muon and
            `others` both keep state for all leaves, as `masked` does.
        mask: which leaves are Muon's: a tree of bools, or a function from the tree of whole leaves (as meta tensors) to
            one. By default those with two dimensions. A leaf `[.., r, c]` that it names is a stack of matrices, each by
            itself: experts. Give convolutions to `others`.
        ns_dtype: the dtype of the iteration, and of what is sent; None for the gradients' own.

    Returns:
        A pair. Its state is a `MuonState`; with `others` a tuple of it and theirs.

    Raises:
        ValueError: if a hyperparameter is out of its range, or `mask` is given and `others` is not. On init and update,
            if a leaf is no matrix and there are no `others`, or `mask` names a leaf of less than two dimensions.

    Example:
        >>> from fzero import optim
        >>> opt = muon(0.02, others=optim.adamw(3e-4))
        >>> params = {"w": torch.eye(2), "b": torch.zeros(2)}
        >>> updates, state = opt.update(params, opt.init(params), params)
        >>> updates["b"]
        tensor([-0., -0.])

    References:
        https://kellerjordan.github.io/posts/muon, arXiv:2502.16982
    """
    check_rate(learning_rate)
    fraction(momentum=momentum)
    nonnegative(eps=eps, weight_decay=weight_decay, ns_steps=ns_steps)
    if adjust_lr_fn not in _SCALES:
        raise ValueError(f'adjust_lr_fn={adjust_lr_fn!r}: expected None, "original" or "match_rms_adamw"')
    if mask is not None and others is None:
        raise ValueError("muon: mask says which leaves are Muon's, and nothing updates the rest: give others= too")

    def direction(matrix: torch.Tensor) -> torch.Tensor:
        return _orthogonalised(matrix, ns_coefficients, ns_steps, eps)

    def init(params: Params) -> MuonState:
        _chosen(params, mask, others is not None)
        return MuonState(torch.zeros((), dtype=torch.int64), tree.map(torch.zeros_like, params))

    def update(grads: Updates, state: MuonState, params: Params | None = None) -> tuple[Updates, MuonState]:
        chosen = _chosen(grads, mask, others is not None)
        rate = rate_at(learning_rate, state.count)
        average = tree.map(lambda g, m: _lerp(m, g, 1 - momentum), grads, state.momentum)
        ahead = tree.map(lambda g, m: _lerp(g, m, momentum), grads, average) if nesterov else average
        directions = map_matrices(direction, ahead, tree.leaves_up_to(grads, chosen, is_box), ns_dtype)
        scales = per_leaf(grads, tree.map(lambda p, c: _scale(adjust_lr_fn, p) if c else 0.0, abstract(grads), chosen))
        updates = tree.map(lambda d, s: (-rate * s * d).to(d.dtype), directions, scales)
        if not is_zero(weight_decay):
            if params is None:
                raise ValueError("muon with weight_decay needs the parameters: opt.update(grads, state, params)")
            updates = tree.map(lambda u, p: (u - rate * weight_decay * p).to(u.dtype), updates, params)
        return updates, MuonState(state.count + 1, average)

    matrices = Optimizer(init, update, elementwise=True, pointwise=False)
    if others is None:
        return matrices
    return chain(masked(matrices, lambda p: _mask(p, mask)), masked(others, lambda p: _not(_mask(p, mask))))


def _orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Drive the singular values of a matrix `[r, c]` towards one, by Newton and Schulz's iteration."""
    a, b, c = coefficients
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)  # so that none is above one
    for _ in range(steps):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _lerp(x: torch.Tensor, y: torch.Tensor, weight: Number) -> torch.Tensor:
    """Go from `x` towards `y`, as torch.optim does."""
    if isinstance(weight, torch.Tensor):
        return (x + weight * (y - x)).to(x.dtype)
    return torch.lerp(x, y, weight)


def _scale(name: str | None, leaf: torch.Tensor) -> float:
    return _SCALES[name](*leaf.shape[-2:]) if leaf.numel() else 0.0


# ---------------------------------------------------------------- which leaves


def _mask(params: Params, mask: Mask | None) -> Tree:
    """Return which whole leaves are Muon's."""
    if mask is None:
        return tree.map(lambda p: p.ndim == 2, params)
    return mask(params) if callable(mask) else mask


def _not(mask: Tree) -> Tree:
    return tree.map(lambda m: not m, mask)


def _chosen(params: Params, mask: Mask | None, has_others: bool) -> Tree:
    """Return which leaves are Muon's, checked."""
    leaves = abstract(params)
    chosen = _mask(leaves, mask)
    paths, entries, _ = tree.flatten_with_paths(leaves)
    for path, x, c in zip(paths, entries, tree.leaves_up_to(leaves, chosen), strict=True):
        if x is None:
            continue
        if not c and not has_others:
            raise ValueError(
                f"muon is for matrices, and leaf {path!r} is {tree.show(x)}: give the other leaves a pair of their "
                "own, optim.muon(0.02, others=optim.adamw(3e-4)), and the embeddings and the head too, by mask="
            )
        if c and x.ndim < 2:
            raise ValueError(f"muon: mask names leaf {path!r}, which is {tree.show(x)} and no matrix")
    return chosen
