"""Muon: steps whose singular values are all near one, each rank working on its share of the matrices."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import joint
from fzero.collectives import NO_AXIS, Along, AssignmentOptions, all_gather, apply, own_part
from fzero.optim._base import (
    Mask,
    Number,
    Optimizer,
    Pair,
    Params,
    Updates,
    answers,
    chain,
    check_rate,
    fraction,
    is_zero,
    nonnegative,
    rate_at,
)
from fzero.optim._wrappers import masked
from fzero.optim.schedules import Schedule
from fzero.sharding import (
    CutUnit,
    Matrix,
    OwnerAssignment,
    Shard,
    abstract,
    assignment_number,
    assignment_of,
    cut_units,
    facts,
    is_box,
    per_leaf,
    unit_axes,
)
from fzero.tree import Tree

__all__ = ["MuonState", "map_matrices", "muon"]

# A function of matrices, on any layout: each rank computes its share of them, and each matrix is whole for that.


OfMatrix = Callable[[torch.Tensor], torch.Tensor]


def map_matrices(f: OfMatrix, values: Tree, chosen: Sequence[Any], dtype: torch.dtype | None = None) -> Tree:
    """Apply a function to each matrix of a tree of any layout; what is no chosen matrix becomes zeros.

    Each matrix of a plain leaf is computed where it is. Those of sharded leaves are assigned to the ranks, and
    computed by their owners. That takes one all_to_all there and one back for all units over the same axes.

    Args:
        f: takes a matrix `[r, c]` to another of its shape; zeros to zeros.
        values: the tree. A leaf `[.., r, c]` is a stack of matrices.
        chosen: for each leaf, boxes counting as leaves, whether it holds matrices.
        dtype: what matrices are cast to before they are sent; None for none.

    Returns:
        A tree like `values`, of their dtypes.
    """
    paths, entries, structure = tree.flatten_with_paths(values, is_box)
    out: list[Any] = list(entries)
    done: dict[Any, torch.Tensor] = {}
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            key = tree.identity(x)
            if key not in done:
                done[key] = _of_leaf(f, x, dtype) if chosen[position] else torch.zeros_like(x)
            out[position] = done[key]
    together: dict[tuple[Any, ...], list[CutUnit]] = {}
    for unit in cut_units(paths, entries):
        together.setdefault((facts(unit.uid).axes, unit.shard.data.dtype), []).append(unit)
    for units in together.values():
        picked = [{index for position, index in unit.members if chosen[position]} for unit in units]
        shards = _of_units(f, [unit.shard for unit in units], picked, dtype)
        for unit, data in zip(units, shards, strict=True):
            out[unit.members[0][0]] = Shard(data, unit.uid)
    return tree.unflatten(structure, out)


def _of_leaf(f: OfMatrix, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not x.numel():
        return x.clone()
    matrices = x.to(dtype or x.dtype).reshape(-1, *x.shape[-2:])  # [n, r, c]
    return _each(f, matrices).view(x.shape).to(x.dtype)


def _each(f: OfMatrix, matrices: torch.Tensor) -> torch.Tensor:
    """Apply `f` to one matrix after the other of `[n, r, c]`: the memory of one, and torch's numbers to the bit."""
    return torch.stack([f(m) for m in matrices.unbind()])


def _of_units(
    f: OfMatrix, boxes: Sequence[Shard], picked: Sequence[set[int]], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Return for each shard its part of the function's values."""
    first, *rest = joint(unit_axes(boxes[0].uid)) or [NO_AXIS]
    xs = [box.data.to(dtype or box.data.dtype) for box in boxes]
    for a in rest[::-1]:  # without a group of their product: assigned over the slowest axis alone
        xs = [_along(a, "all_gather", x) for x in xs]
    ranks, sizes = first.size, tuple([facts(box.uid).shard_numel * math.prod([a.size for a in rest]) for box in boxes])
    matrices = [m for i, box in enumerate(boxes) for m in _matrices(i, box.uid, picked[i])]
    if not matrices:
        return [torch.zeros_like(box.data) for box in boxes]
    number = assignment_number(ranks, sizes, tuple(matrices))
    assignment, options = assignment_of(number), AssignmentOptions(number)

    def sent(x: torch.Tensor) -> torch.Tensor:
        return _along(first, "all_to_all", x, -2) if assignment.part and ranks > 1 else x

    (parts,) = apply(first.token, "lay_out", first.binding, options, *xs)
    stacks = apply(first.token, "take_up", first.binding, options, sent(parts))
    found = [_of_stack(f, stack, kind) for stack, kind in zip(stacks, _kinds(assignment), strict=True)]
    (parts,) = apply(first.token, "hand_back", first.binding, options, *found)
    xs = apply(first.token, "lay_back", first.binding, options, sent(parts))
    for a in rest:
        xs = [_along(a, "own_part", x) for x in xs]
    return [x.to(box.data.dtype) for x, box in zip(xs, boxes, strict=True)]


def _along(axis: Any, name: str, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    (y,) = apply(axis.token, name, axis.binding, Along(dim), x)
    return y


def _kinds(assignment: OwnerAssignment) -> list[tuple[tuple[str, int], ...]]:
    return [kind for _, _, kind in assignment.stacks]


def _of_stack(f: OfMatrix, stack: torch.Tensor, kind: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Apply the function to a stack `[q, r, c]` of matrices, of which each rank of the axes in `kind` has a part."""
    for axis, dim in reversed(kind):
        stack = all_gather(stack, axis, dim=dim)
    stack = _each(f, stack)
    for axis, dim in kind:
        stack = own_part(stack, axis, dim=dim)
    return stack


def _matrices(place: int, uid: int, picked: set[int]) -> list[Matrix]:
    """List the matrices of a unit; those that tensor parallelism cuts are of a kind of their own."""
    known, found = facts(uid), []
    for index, shape in enumerate(known.shapes):
        size = math.prod(shape)
        if index not in picked or not size:
            continue
        rows, columns = shape[-2:]
        # a leaf [.., r, c] that is cut in front of its matrices, as experts are, has whole ones
        cuts = [(s.axis, s.dims[index] - len(shape)) for s in known.split if s.dims[index] >= len(shape) - 2]
        first = known.offsets[index]
        starts = range(first, first + size, rows * columns)
        found += [Matrix(place, start, rows, columns, tuple(cuts)) for start in starts]
    return found


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
    1/N of what gathering would; `fzero.sharding._owners` says when more. A rank runs at most 1/N of each shape's
    matrices,
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
