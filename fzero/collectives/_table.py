"""Linear maps over ranks: a table, one row each, and one autograd Function for all rows.

A row says what the map does to the stacked values of all ranks (simulation), what one rank does (a process
group), and which row is its transpose. The Function makes every row differentiable to any order in both
directions, vmappable, and traceable by make_fx and torch.compile.

Transposes are those of the joint map over all ranks, so `psum` is its own transpose. `torch.func.grad` inside a
rank program gives d(sum over ranks of the loss) / d(own inputs). JAX's `pmap` and `shard_map(check_vma=False)`
do the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero._torch import allow_in_graph
from fzero._torch.levels import maps_now
from fzero.axes import Axis, Binding, bound, is_lockstep, meet, same
from fzero.collectives import _record

__all__ = [
    "ALONE",
    "NO_AXIS",
    "Along",
    "AssignmentOptions",
    "LinearMap",
    "OfUnit",
    "OnDevice",
    "Options",
    "Pairs",
    "Post",
    "Source",
    "Tensors",
    "Whole",
    "add_row",
    "apply",
    "apply_along",
    "not_invariant",
    "row_of",
]

Tensors = Sequence[torch.Tensor]

ALONE = "alone"
"""The group of an axis of one rank that is no axis of the mesh: collectives over no axis at all."""
NO_AXIS = Axis("", 1, ALONE, 0, torch.zeros((), dtype=torch.int64))


class Whole(NamedTuple):
    """The options of a map of whole tensors: there is nothing to choose."""


class Along(NamedTuple):
    """The options of a map that cuts or joins tensors along a dimension.

    Attributes:
        dim: counted from the end, so that a dimension that a vmap puts in front changes nothing.
    """

    dim: int


class Source(NamedTuple):
    """The options of a map from one rank to all: its place along the axis."""

    rank: int


class Pairs(NamedTuple):
    """The options of a map from rank to rank: `(from, to)`, each rank once at most on either side."""

    pairs: tuple[tuple[int, int], ...]


class OfUnit(NamedTuple):
    """The options of a map of whole units: the uid of the unit's spec."""

    uid: int


class AssignmentOptions(NamedTuple):
    """The options of a map of several units' matrices to the ranks that own them: the number of the assignment."""

    number: int


class OnDevice(NamedTuple):
    """The options of a move to host memory or back: the device at the other end."""

    device: torch.device


class Post(NamedTuple):
    """The options of a message.

    Attributes:
        peer: the place along the axis of the rank at the other end.
        tag: of the message; gradients have odd ones.
        shape: of the tensor that is sent.
        dtype: of it.
    """

    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Options = Whole | Along | Source | Pairs | OfUnit | AssignmentOptions | OnDevice | Post


class LinearMap(NamedTuple):
    """A linear map over the ranks of one axis.

    Attributes:
        name: the row's key.
        wire: the operation on the wire, such as "all_gather" (see `fzero.collectives.record`), or "" for none.
        stacked: `(n, options, xs [n, ...]) -> ys`, all ranks at once; `ys` are `[n, ...]`, or without the leading
            dimension when `replicated`.
        local: `(binding, options, xs) -> ys`, one rank of a process group.
        transpose: the name of the transposed row.
        replicated: whether the results are equal on all ranks.
        dual: what `options` become for the transposed row.
        invariant: whether the inputs must be equal on all ranks, as those of Megatron's f are.
        one: whether the results are one value, whose gradient all ranks share; others have a copy on each rank.
        uniform: like `stacked`, for inputs that all ranks share and that have no `[n]` dimension; optional.
        unit: the name of the unit that the map moves, for the recorder, given `options`; "" for a user's own.
        detail: what tells this use of the row from another, for messages, given `options` and the inputs.
        wire_dtype: the dtype on the wire, given `options` and the first input; by default the input's.
    """

    name: str
    wire: str
    stacked: Callable[[int, Any, Tensors], Tensors]
    local: Callable[[Binding, Any, Tensors], Tensors]
    transpose: str
    replicated: bool
    dual: Callable[[Any], Options] = lambda options: options
    invariant: bool = False
    one: bool = False
    uniform: Callable[[int, Any, Tensors], Tensors] | None = None
    unit: Callable[[Any], str] = lambda options: ""
    detail: Callable[[Any, Tensors], str] = lambda options, xs: ""
    wire_dtype: Callable[[Any, torch.Tensor], torch.dtype] = lambda options, x: x.dtype


_ROWS: dict[str, LinearMap] = {}


def add_row(row: LinearMap) -> None:
    """Put a linear map into the table."""
    _ROWS[row.name] = row


class _LinearMap(torch.autograd.Function):
    """A row of the table, applied."""

    @staticmethod
    def forward(token: torch.Tensor, name: str, binding: Binding, options: Options, *xs: torch.Tensor) -> Any:
        row, group = _ROWS[name], binding.group
        if not group:
            raise RuntimeError(f"{name} over the simulated axis {binding.axis!r} ran outside that axis's vmap")
        if group == ALONE:
            ys = row.stacked(1, options, [x.unsqueeze(0) for x in xs])
            return tuple(ys) if row.replicated else tuple([y.squeeze(0) for y in ys])
        if is_lockstep(group) and (row.wire or row.invariant):
            return _meet(row, binding, options, xs)
        ys = tuple(row.local(binding, options, xs))
        _record.add(row.wire, binding, _numel(xs), _numel(ys), row.wire_dtype(options, xs[0]), row.unit(options))
        return ys

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.token, ctx.name, ctx.binding, ctx.options = inputs[:4]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[4:]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        row = _ROWS[ctx.name]
        transposed = _LinearMap.apply(ctx.token, row.transpose, ctx.binding, row.dual(ctx.options), *grads)
        return (None, None, None, None, *transposed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        filled = [
            torch.zeros(shape, dtype=dtype, device=device) if t is None else t
            for t, (shape, dtype, device) in zip(tangents[4:], ctx.like, strict=True)
        ]
        return _LinearMap.apply(ctx.token, ctx.name, ctx.binding, ctx.options, *filled)

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Any, name: str, binding: Binding, options: Options, *xs: Any) -> Any:
        row, dims, n = _ROWS[name], in_dims[4:], info.batch_size
        if in_dims[0] is None:  # a user's vmap, or another axis's: carry its dimension through, in front
            if any(maps_now(a.token) for a in bound()):
                binding = binding._replace(mapped=binding.mapped * n)
            ys = _LinearMap.apply(token, name, binding, options, *_in_front(xs, dims, n))
            return ys, (0,) * len(ys)
        if row.invariant and any(d is not None for d in dims):
            raise ValueError(not_invariant(name, binding.axis))
        if row.uniform is not None and all(d is None for d in dims):
            sent, ys = _numel(xs), tuple(row.uniform(n, options, xs))
        else:
            stacked = _in_front(xs, dims, n)
            sent, ys = _numel(stacked) // n, tuple(row.stacked(n, options, stacked))
        received = _numel(ys) if row.replicated else _numel(ys) // n
        _record.add(row.wire, binding, sent, received, row.wire_dtype(options, xs[0]), row.unit(options))
        return ys, (None if row.replicated else 0,) * len(ys)


def row_of(node: Any) -> tuple[LinearMap, Binding, Options] | None:
    """Return which row of the table, over which axis, a node of an autograd graph differentiates; None for others."""
    if type(node).__name__.startswith(_LinearMap.__name__):
        return _ROWS[node.name], node.binding, node.options
    return None


def _meet(row: LinearMap, binding: Binding, options: Options, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row where all ranks are threads: one of them computes the stacked map for all."""

    def compute(ranks: list[Tensors], first: bool) -> list[Any]:
        if row.invariant and not all(same(x, y) for other in ranks for x, y in zip(ranks[0], other, strict=True)):
            raise ValueError(not_invariant(row.name, binding.axis))
        ys = row.stacked(len(ranks), options, [torch.stack(list(x)) for x in zip(*ranks, strict=True)])
        if first:
            received = _numel(ys) if row.replicated else _numel(ys) // len(ranks)
            _record.add(row.wire, binding, _numel(xs), received, row.wire_dtype(options, xs[0]), row.unit(options))
        # copies, so that no rank writes into another's
        return [tuple([(y if row.replicated else y[r]).clone() for y in ys]) for r in range(len(ranks))]

    unit = row.unit(options)
    what = row.name + (f" of unit {unit!r}" if unit else row.detail(options, xs))
    return meet(binding.group, binding.rank, what, xs, compute)


def not_invariant(name: str, axis: str) -> str:
    """Say what is wrong with an argument that should be equal on all ranks."""
    return (
        f"{name} over {axis!r} was given a value that differs by rank along it; what it is given must be replicated: "
        "sum partial results with fzero.collectives.psum_invariant, and give the axis's ranks one batch "
        "(mesh.split(batch, axis)). "
        "In a backward pass: the gradient of what psum_invariant gave differs, so put fzero.collectives.pvary "
        "where a replicated "
        "value first meets what is this rank's own"
    )


def _numel(xs: Tensors) -> int:
    return sum(x.numel() for x in xs)


def _in_front(xs: Tensors, dims: Sequence[int | None], n: int) -> list[torch.Tensor]:
    return [x.unsqueeze(0).expand(n, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]


@allow_in_graph  # Dynamo would inline the Function and, under functorch, lose its backward (pytorch#193279)
def apply(token: torch.Tensor, name: str, binding: Binding, options: Options, *xs: torch.Tensor) -> Any:
    """Apply the row `name` over the axis of `token` and `binding` to tensors; returns a tuple of tensors."""
    return _LinearMap.apply(token, name, binding, options, *xs)


def apply_along(name: str, x: torch.Tensor, axes: Sequence[Axis], options: Options) -> torch.Tensor:
    """Apply a row of one tensor over one axis after the other."""
    for axis in axes:
        (x,) = apply(axis.token, name, axis.binding, options, x)
    return x
