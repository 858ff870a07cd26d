"""Linear maps over ranks: a table with one row per map, and one autograd Function for all rows.

A row has an operation, the kinds of its input and result, and the row of its transpose. The operation is the map on the
values of all ranks at once (simulation), and the code for one rank (a process group). So `psum` and `psum_invariant`
are two rows of one operation: they compute and send the same, and have different transposes. One autograd Function
makes every row differentiable to any order in both directions, vmappable, and traceable by make_fx and torch.compile.

A transpose is the transpose of the joint map over all ranks, so `psum` is its own transpose. `torch.func.grad` inside a
rank program computes d(sum over ranks of the loss) / d(this rank's inputs), like JAX's `pmap` and
`shard_map(check_vma=False)`.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from fzero._liveness import current_heartbeat
from fzero._torch import allow_in_graph, is_tracing
from fzero._torch.levels import is_current_vmap
from fzero._torch.types import Tensors
from fzero.axes import Axis, Binding, DiffersByRankError, are_equal, bound_axes, is_lockstep, rendezvous
from fzero.collectives import _record

__all__ = [
    "COPIES",
    "INVARIANT",
    "NO_AXIS",
    "VARYING",
    "AssignmentOptions",
    "DeviceOptions",
    "DimOptions",
    "LinearMap",
    "MessageOptions",
    "NoOptions",
    "PermutationOptions",
    "RankOperation",
    "SourceOptions",
    "UnitOptions",
    "UnitPartOptions",
    "UnitSumOptions",
    "add_rows",
    "apply",
    "apply_along",
    "apply_stacked",
    "collective_row",
    "mapped_binding",
    "move_to_front",
    "transposed_name",
]


_SINGLE_RANK = "alone"
"""The group of `NO_AXIS`: an axis of one rank, outside the mesh, for maps that run over no axis."""
NO_AXIS = Axis("", size=1, group=_SINGLE_RANK, rank=0, token=torch.zeros((), dtype=torch.int64, device="cpu"))


class NoOptions(NamedTuple):
    """The options of a map of full tensors: none."""


class DimOptions(NamedTuple):
    """The options of a map that splits or concatenates tensors along a dimension.

    Attributes:
        dim: counted from the end, so that a vmap's leading dimension does not change it.
    """

    dim: int


class SourceOptions(NamedTuple):
    """The options of a map from one rank to all: that rank's index along the axis."""

    rank: int


class PermutationOptions(NamedTuple):
    """The options of a map from rank to rank: pairs `(from, to)`, with each rank at most once on either side."""

    pairs: tuple[tuple[int, int], ...]


class UnitOptions(NamedTuple):
    """The options of a map of units: the id of the unit's spec."""

    spec_id: int

    @property
    def dim(self) -> int:
        """The dimension of a flat unit `[numel]` that is split or concatenated."""
        return -1


class UnitPartOptions(NamedTuple):
    """The options of a map of this rank's part of a unit: the unit may be divided over several axes.

    Attributes:
        spec_id: the id of the unit's spec.
        index: the rank's index along the axes after the slowest.
        ranks: the number of ranks along these axes.
    """

    spec_id: int
    index: int
    ranks: int


class UnitSumOptions(NamedTuple):
    """The options of a map of a unit's sums: the id of the unit's spec, and the number of ranks in the sum."""

    spec_id: int
    ranks: int


class AssignmentOptions(NamedTuple):
    """The options of a map of several units' matrices to the ranks that own them: the id of the assignment."""

    assignment_id: int


class DeviceOptions(NamedTuple):
    """The options of a move to host memory or back: the device at the other end."""

    device: torch.device


class MessageOptions(NamedTuple):
    """The options of a message.

    Attributes:
        peer: the index along the axis of the rank at the other end.
        tag: the message's tag; gradients have odd tags.
        shape: the shape of the message's tensor.
        dtype: the dtype of the message's tensor.
    """

    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype


_Options = (
    NoOptions
    | DimOptions
    | SourceOptions
    | PermutationOptions
    | UnitOptions
    | UnitPartOptions
    | UnitSumOptions
    | AssignmentOptions
    | DeviceOptions
    | MessageOptions
)


class RankOperation(NamedTuple):
    """The computation and the messages of the ranks of one axis, whatever the kinds of the values.

    Attributes:
        kind: the operation on the wire, such as "all_gather" (see `fzero.collectives.record`), or "" for none.
        all_ranks: `(n, options, xs [n, ...]) -> ys`, all ranks at once; `ys` are `[n, ...]`, or without the leading
            dimension when they are equal on all ranks.
        local: `(binding, options, xs) -> ys`, one rank of a process group.
        uniform: like `all_ranks`, for inputs that all ranks share and that have no `[n]` dimension; optional.
        detail: `(options, xs) -> text` that tells this use of the operation from other uses, for messages.
    """

    kind: str
    all_ranks: Callable[[int, Any, Tensors], Tensors]
    local: Callable[[Binding, Any, Tensors], Tensors]
    uniform: Callable[[int, Any, Tensors], Tensors] | None = None
    detail: Callable[[Any, Tensors], str] = lambda options, xs: ""


class _ValueKind(Enum):
    """How a value depends on the rank, and what its gradient counts: a type, as in JAX's `shard_map(check_vma=True)`.

    A varying value may differ by rank. Copies are equal on all ranks, and each rank's copy has a gradient of its own.
    An invariant value is one value, whose gradient all ranks share.
    """

    VARYING = "varying"
    COPIES = "copies"
    INVARIANT = "invariant"


VARYING, COPIES, INVARIANT = _ValueKind


class LinearMap(NamedTuple):
    """A linear map over the ranks of one axis: a row of the table.

    Attributes:
        name: the row's key.
        operation: the computation and the messages of the ranks.
        transpose: the name of the transposed row; "" for values that carry no derivative, such as codes.
        input: the kind of the inputs. A simulation checks that inputs that should be equal on all ranks are.
        output: the kind of the results.
        transpose_options: `options -> options` of the transposed row.
        unit: `options -> name` of the unit that the map moves, for the recorder; "" for a user's collective.
        wire_dtype: `(options, first input) -> dtype` on the wire; by default the input's dtype.
    """

    name: str
    operation: RankOperation
    transpose: str
    input: _ValueKind = VARYING
    output: _ValueKind = VARYING
    transpose_options: Callable[[Any], _Options] = lambda options: options
    unit: Callable[[Any], str] = lambda options: ""
    wire_dtype: Callable[[Any, torch.Tensor], torch.dtype] = lambda options, x: x.dtype

    @property
    def is_replicated(self) -> bool:
        """Whether the results are equal on all ranks."""
        return self.output is not VARYING


_ROWS: dict[str, LinearMap] = {}


def add_rows(*rows: LinearMap) -> None:
    """Put linear maps into the table."""
    _ROWS.update({row.name: row for row in rows})


class _ApplyLinearMap(torch.autograd.Function):
    """Applies a row of the table."""

    @staticmethod
    def forward(token: torch.Tensor, name: str, binding: Binding, options: _Options, *xs: torch.Tensor) -> Any:
        """Run a collective for one rank: alone, in lockstep with the others, or over a process group."""
        row, group = _ROWS[name], binding.group
        if not group:
            raise RuntimeError(
                f"{name} over the simulated axis {binding.axis!r} ran after its rank program had ended: call it, and "
                "the transforms that differentiate it, inside the function that mesh.spmd or fzero.shard runs"
            )
        if group == _SINGLE_RANK:
            ys = row.operation.all_ranks(1, options, [x.unsqueeze(0) for x in xs])
            return tuple(ys) if row.is_replicated else tuple([y.squeeze(0) for y in ys])
        if is_lockstep(group) and (row.operation.kind or row.input is not VARYING):
            return _apply_in_lockstep(row, binding, options, xs)
        ys = _call_local(row, binding, options, xs)
        _record_call(row, binding, options, x=xs[0], numel_in=_numel(xs), numel_out=_numel(ys))
        return ys

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.token, ctx.name, ctx.binding, ctx.options = inputs[:4]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[4:]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        row = _ROWS[ctx.name]
        transposed = _ApplyLinearMap.apply(
            ctx.token, row.transpose, ctx.binding, row.transpose_options(ctx.options), *grads
        )
        return (None, None, None, None, *transposed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        dense = [
            torch.zeros(shape, dtype=dtype, device=device) if t is None else t
            for t, (shape, dtype, device) in zip(tangents[4:], ctx.like, strict=True)
        ]
        return _ApplyLinearMap.apply(ctx.token, ctx.name, ctx.binding, ctx.options, *dense)

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Any, name: str, binding: Binding, options: _Options, *xs: Any) -> Any:
        """Run a collective under a vmap: over the axis's own vmap for all ranks at once, else for each sample."""
        row, dims, n = _ROWS[name], in_dims[4:], info.batch_size
        if in_dims[0] is None:  # a user's vmap, or another axis's: keep its dimension in front
            ys = _ApplyLinearMap.apply(
                token, name, mapped_binding(binding, n), options, *_move_all_to_front(xs, dims, n)
            )
            return ys, (0,) * len(ys)
        if row.input is not VARYING and any(d is not None for d in dims):
            raise DiffersByRankError(_differs_message(name, binding.axis))
        if row.operation.uniform is None or any(d is not None for d in dims):
            ys = apply_stacked(name, binding, options, n, *_move_all_to_front(xs, dims, n))
        else:
            ys = tuple(row.operation.uniform(n, options, xs))
            received_numel = _numel(ys) if row.is_replicated else _numel(ys) // n
            _record_call(row, binding, options, x=xs[0], numel_in=_numel(xs), numel_out=received_numel)
        return ys, (None if row.is_replicated else 0,) * len(ys)


def _call_local(row: LinearMap, binding: Binding, options: _Options, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row on one rank of a process group. The other ranks can see that it waits there."""
    heartbeat = current_heartbeat()
    if heartbeat is None or not row.operation.kind or is_tracing():
        return tuple(row.operation.local(binding, options, xs))
    heartbeat.publish(f"{_call_label(row, options, xs)} over {binding.axis!r}", waiting=True)
    ys = tuple(row.operation.local(binding, options, xs))
    heartbeat.publish("work")
    return ys


def _call_label(row: LinearMap, options: _Options, xs: Tensors) -> str:
    unit = row.unit(options)
    return row.name + (f" of unit {unit!r}" if unit else row.operation.detail(options, xs))


def mapped_binding(binding: Binding, n: int) -> Binding:
    """Return the binding of an axis under a vmap of n values: if n are another axis's ranks, it counts them."""
    is_rank = any(is_current_vmap(a.token) for a in bound_axes())
    return binding._replace(mapped=binding.mapped * n) if is_rank else binding


def apply_stacked(
    name: str, binding: Binding, options: _Options, n: int, *xs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Apply the row `name` to the values `[n, ..]` of all n ranks at once, for code that simulates an axis itself.

    The results are `[n, ..]`, or without this dimension if they are equal on all ranks.
    """
    row = _ROWS[name]
    ys = tuple(row.operation.all_ranks(n, options, xs))
    received_numel = _numel(ys) if row.is_replicated else _numel(ys) // n
    _record_call(row, binding, options, x=xs[0], numel_in=_numel(xs) // n, numel_out=received_numel)
    return ys


def transposed_name(name: str) -> str:
    """Return the name of the transposed row."""
    return _ROWS[name].transpose


def collective_row(node: Any) -> tuple[LinearMap, Binding, _Options] | None:
    """Return the row, binding and options of a collective's autograd node; None for other nodes."""
    if type(node).__name__.startswith(_ApplyLinearMap.__name__):
        return _ROWS[node.name], node.binding, node.options
    return None


def _apply_in_lockstep(row: LinearMap, binding: Binding, options: _Options, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row where all ranks are threads: one thread computes the map of all ranks."""

    def compute(ranks: list[Tensors], first: bool) -> list[Any]:
        pairs = ((x, y) for rank in ranks for x, y in zip(ranks[0], rank, strict=True))
        if row.input is not VARYING and not all(are_equal(x, y) for x, y in pairs):
            raise DiffersByRankError(_differs_message(row.name, binding.axis))
        ys = row.operation.all_ranks(len(ranks), options, [torch.stack(list(x)) for x in zip(*ranks, strict=True)])
        if first:
            received_numel = _numel(ys) if row.is_replicated else _numel(ys) // len(ranks)
            _record_call(row, binding, options, x=xs[0], numel_in=_numel(xs), numel_out=received_numel)
        # copies, so that no rank writes into another rank's result
        return [tuple([(y if row.is_replicated else y[r]).clone() for y in ys]) for r in range(len(ranks))]

    return rendezvous(binding.group, binding.rank, _call_label(row, options, xs), xs, compute)


def _record_call(
    row: LinearMap, binding: Binding, options: Any, x: torch.Tensor, numel_in: int, numel_out: int
) -> None:
    """Record the collective of a row. Each rank sends `numel_in` elements, and gets `numel_out`."""
    _record.add(
        row.operation.kind, binding, numel_in, numel_out, dtype=row.wire_dtype(options, x), unit=row.unit(options)
    )


def _differs_message(name: str, axis: str) -> str:
    """Return the error message for an argument that differs by rank and should be equal on all ranks."""
    return (
        f"{name} over {axis!r} was given a value that differs by rank along it; its argument must be replicated: "
        "sum partial results with fzero.collectives.psum_invariant, and give the axis's ranks one batch "
        "(mesh.split(batch, axis)). In a backward pass, the gradient of psum_invariant's result differs by rank: put "
        "fzero.collectives.pvary where a replicated value is first combined with this rank's own"
    )


def _numel(xs: Tensors) -> int:
    return sum(x.numel() for x in xs)


def _move_all_to_front(xs: Tensors, dims: Sequence[int | None], n: int) -> list[torch.Tensor]:
    return [move_to_front(x, d, n) for x, d in zip(xs, dims, strict=True)]


def move_to_front(x: torch.Tensor, dim: int | None, n: int) -> torch.Tensor:
    """Move the dimension of a vmap of n values to the front; a value without one is the same for all."""
    return x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


@allow_in_graph  # Dynamo would inline the Function and, under functorch, lose its backward (pytorch#193279)
def apply(token: torch.Tensor, name: str, binding: Binding, options: _Options, *xs: torch.Tensor) -> Any:
    """Apply the row `name`, over the axis of `token` and `binding`, to tensors; return a tuple of tensors."""
    return _ApplyLinearMap.apply(token, name, binding, options, *xs)


def apply_along(name: str, x: torch.Tensor, axes: Sequence[Axis], options: _Options) -> torch.Tensor:
    """Apply a row to one tensor, over one axis after the other."""
    for axis in axes:
        (x,) = apply(axis.token, name, axis.binding, options, x)
    return x
