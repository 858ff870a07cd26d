"""Operations: one table of their traits. A row is an operation of aten; a column is a flag of `_OperationTraits`.

Rows are named without namespace and overload. There are no columns for what torch itself knows: whether an operation
is pointwise, a view or random, and how many FLOPs it takes.
"""

import enum
import functools
import operator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.fx import Node

from fzero._torch import OneNode, OpOverload

__all__ = [
    "changes_layout",
    "decodes",
    "differs_by_rank",
    "display_name",
    "encodes",
    "is_factory",
    "is_known_cheap",
    "is_linear",
    "is_pointwise",
    "is_random",
    "is_uninitialized",
    "is_view",
    "is_view_operation",
    "only_copies",
    "op_name",
    "reads_sizes_on_host",
]


class _OperationTraits(enum.Flag):
    """The traits of an operation.

    Attributes:
        CHEAP: its time is proportional to its bytes, so it may run wherever that saves memory.
        FACTORY: it computes its result from sizes and numbers, or only casts, so it runs right before its use.
        BY_RANK: it may differ between ranks that run one step, since each rank slices, pads and copies its own shard.
        LAYOUT: it only changes the layout or the dtype of its operand.
        LINEAR: it changes the layout, scales or adds: it maps gradients to gradients.
        EMPTY: it does not initialize its memory, so another run gives other bytes.
        VIEW: its result lies in its operand's memory, though torch does not call it a view.
        COPIES: it only moves or fills memory; `fzero.profile` counts it as a copy.
        ENCODES: it encodes a shard for its gather, so it runs whenever the gather does.
        DECODES: it decodes a gathered unit, so a re-gather runs it again.
        HOST_SIZES: it reads its int64 operands, which are sizes, on the host, so they may lie there.
    """

    NOTHING = 0
    CHEAP = enum.auto()
    FACTORY = enum.auto()
    BY_RANK = enum.auto()
    LAYOUT = enum.auto()
    LINEAR = enum.auto()
    EMPTY = enum.auto()
    VIEW = enum.auto()
    COPIES = enum.auto()
    ENCODES = enum.auto()
    DECODES = enum.auto()
    HOST_SIZES = enum.auto()


_CHEAP = _OperationTraits.CHEAP
_FACTORY = _OperationTraits.FACTORY
_BY_RANK = _OperationTraits.BY_RANK
_LAYOUT = _OperationTraits.LAYOUT
_LINEAR = _OperationTraits.LINEAR
_EMPTY = _OperationTraits.EMPTY
_VIEW = _OperationTraits.VIEW
_COPIES = _OperationTraits.COPIES
_ENCODES = _OperationTraits.ENCODES
_DECODES = _OperationTraits.DECODES
_HOST_SIZES = _OperationTraits.HOST_SIZES

_OPERATIONS: dict[str, _OperationTraits] = {
    # constants
    "full": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "full_like": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "new_full": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "zeros": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "zeros_like": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "new_zeros": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "ones": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "ones_like": _CHEAP | _FACTORY | _BY_RANK | _COPIES,
    "new_ones": _CHEAP | _FACTORY | _BY_RANK,
    "arange": _CHEAP | _FACTORY | _BY_RANK,
    "eye": _CHEAP | _FACTORY | _BY_RANK,
    "scalar_tensor": _CHEAP | _FACTORY | _BY_RANK,
    "lift_fresh": _CHEAP | _FACTORY | _BY_RANK,
    "lift_fresh_copy": _CHEAP | _FACTORY | _BY_RANK,
    "empty": _CHEAP | _FACTORY | _BY_RANK | _EMPTY,
    "empty_like": _CHEAP | _EMPTY,
    "new_empty": _CHEAP | _BY_RANK | _EMPTY,
    # another dtype, another layout
    "_to_copy": _CHEAP | _FACTORY | _BY_RANK | _LAYOUT | _LINEAR | _COPIES,
    "convert_element_type": _CHEAP | _FACTORY | _BY_RANK | _LAYOUT,
    "clone": _CHEAP | _BY_RANK | _LAYOUT | _LINEAR | _COPIES,
    "constant_pad_nd": _CHEAP | _BY_RANK | _LAYOUT | _LINEAR | _COPIES,
    "contiguous": _CHEAP | _COPIES,
    "_unsafe_view": _VIEW,
    "_reshape_alias": _VIEW,
    # moves between device and host
    "to_host": _CHEAP | _BY_RANK | _LAYOUT | _LINEAR | _COPIES,
    "to_device": _CHEAP | _BY_RANK | _LAYOUT | _LINEAR | _COPIES,
    # experts (parallel/experts/_grouped.py)
    "grouped_mm": _HOST_SIZES,
    "grouped_outer": _HOST_SIZES,
    # slicing and concatenation
    "cat": _CHEAP | _BY_RANK | _LINEAR | _COPIES,
    "stack": _CHEAP | _COPIES,
    "slice": _BY_RANK,
    "flatten_leaves": _CHEAP | _BY_RANK | _LINEAR | _COPIES,  # these two are fzero's (sharding/maps/_flat.py)
    "view_ranges": _VIEW,
    # a codec's codes of a unit (sharding/maps/_coded_rows.py)
    "range_magnitudes": _CHEAP | _BY_RANK | _ENCODES,
    "encode_range": _CHEAP | _BY_RANK | _ENCODES,
    "decode_unit": _CHEAP | _DECODES,
    "sum_payloads": _CHEAP,
    "sums_to_bytes": _CHEAP,
    "decode_sums": _CHEAP,
    "decode_sum": _CHEAP | _BY_RANK,
    "slice_scatter": _CHEAP | _COPIES,
    "slice_backward": _CHEAP,
    "select_scatter": _CHEAP,
    "select_backward": _CHEAP,
    "diagonal_copy": _CHEAP,
    "tril": _CHEAP,
    "triu": _CHEAP,
    # look-ups
    "index": _CHEAP,
    "gather": _CHEAP,
    "embedding": _CHEAP,
    "bucketize": _CHEAP,
    "where": _CHEAP,
    # arithmetic; what torch tags as pointwise is cheap without a row
    "add": _LINEAR,
    "div": _LINEAR,
    "mul": _LINEAR,
    "fill": _CHEAP,
    "gelu_backward": _CHEAP,
    # reductions over dimensions, and operations that contain them
    "sum": _CHEAP,
    "mean": _CHEAP,
    "var": _CHEAP,
    "var_mean": _CHEAP,
    "amax": _CHEAP,
    "amin": _CHEAP,
    "argmax": _CHEAP,
    "any": _CHEAP,
    "all": _CHEAP,
    "linalg_vector_norm": _CHEAP,
    "_softmax": _CHEAP,
    "_log_softmax": _CHEAP,
    "_log_softmax_backward_data": _CHEAP,
    "native_layer_norm": _CHEAP,
    "native_layer_norm_backward": _CHEAP,
    "nll_loss_forward": _CHEAP,
    "nll_loss_backward": _CHEAP,
    # writes: a graph has only `copy_`, which donation adds; a profiler sees the other ones
    "copy_": _CHEAP | _BY_RANK | _COPIES,
    "fill_": _COPIES,
    "zero_": _COPIES,
    "index_copy_": _COPIES,
    "_foreach_copy_": _COPIES,
    # copies of views: a profiler sees them
    "view_copy": _COPIES,
    "expand_copy": _COPIES,
    "slice_copy": _COPIES,
    "as_strided_copy": _COPIES,
    "split_with_sizes_copy": _COPIES,
}


def op_name(node: Node) -> str:
    """Return the name of a node's operation without namespace and overload, "mul"; "" if it is not an operation."""
    return _operation_name(node.target)


def display_name(node: Node) -> str:
    """Return a readable name of a node's operation: "aten.mm.default", "getitem", or a function's name."""
    target = node.target
    return getattr(target, "__name__", "") if isinstance(target, FunctionType | BuiltinFunctionType) else str(target)


def _operation_name(operation: Any) -> str:
    if isinstance(operation, OpOverload):
        return operation.overloadpacket.__name__
    return operation.__name__ if isinstance(operation, OneNode) else ""


def _name_traits(name: str) -> _OperationTraits:
    return _OPERATIONS.get(name, _OperationTraits.NOTHING)


def _node_traits(node: Node) -> _OperationTraits:
    return _operation_traits(node.target)


def is_known_cheap(operation: OpOverload | OneNode) -> bool:
    """Return whether an operation is cheap by the table, or pointwise by torch."""
    if _OperationTraits.CHEAP in _operation_traits(operation):
        return True
    return isinstance(operation, OpOverload) and _works_by_element(operation) and not _draws_random(operation)


def is_factory(node: Node) -> bool:
    """Return whether a node computes its result from sizes and numbers, or only casts."""
    return _OperationTraits.FACTORY in _node_traits(node)


def differs_by_rank(node: Node) -> bool:
    """Return whether a node may differ between ranks of one step: a view, or an operation on the rank's own shard."""
    return is_view(node) or _OperationTraits.BY_RANK in _node_traits(node)


def changes_layout(node: Node) -> bool:
    """Return whether a node only changes the layout or the dtype of its operand."""
    return is_view(node) or _OperationTraits.LAYOUT in _node_traits(node)


def encodes(node: Node) -> bool:
    """Return whether a node encodes a shard for its gather."""
    return _OperationTraits.ENCODES in _node_traits(node)


def decodes(node: Node) -> bool:
    """Return whether a node decodes a gathered unit."""
    return _OperationTraits.DECODES in _node_traits(node)


def is_linear(node: Node) -> bool:
    """Return whether a node only changes the layout of its operands, scales them or adds them."""
    return is_view(node) or _OperationTraits.LINEAR in _node_traits(node)


def is_uninitialized(node: Node) -> bool:
    """Return whether a node's result is uninitialized memory."""
    return _OperationTraits.EMPTY in _node_traits(node)


def only_copies(name: str) -> bool:
    """Return whether an operation of this name only moves or fills memory."""
    return _OperationTraits.COPIES in _name_traits(name)


def reads_sizes_on_host(node: Node) -> bool:
    """Return whether an operation reads its int64 operands on the host, so that they may lie there."""
    return _OperationTraits.HOST_SIZES in _node_traits(node)


def is_view(node: Node) -> bool:
    """Return whether a node computes nothing but a view, or takes an item of a tuple."""
    return is_view_operation(node.target)


def is_view_operation(operation: Any) -> bool:
    """Return whether an operation computes nothing but a view, or takes an item of a tuple."""
    return operation is operator.getitem or _makes_view(operation)


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers: such nodes keep their order, or the numbers would change."""
    return isinstance(node.target, OpOverload) and _draws_random(node.target)


def is_pointwise(node: Node) -> bool:
    """Return whether torch calls a node's operation pointwise."""
    return isinstance(node.target, OpOverload) and _works_by_element(node.target)


# Passes query every node many times, but a graph has few distinct operations: the answers are cached.
@functools.lru_cache(maxsize=4096)
def _makes_view(operation: Any) -> bool:
    return (isinstance(operation, OpOverload) and operation.is_view) or _OperationTraits.VIEW in _operation_traits(
        operation
    )


@functools.lru_cache(maxsize=4096)
def _draws_random(operation: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


@functools.lru_cache(maxsize=4096)
def _works_by_element(operation: OpOverload) -> bool:
    return torch.Tag.pointwise in operation.tags


@functools.lru_cache(maxsize=4096)
def _operation_traits(operation: Any) -> _OperationTraits:
    return _name_traits(_operation_name(operation))
