"""Operations: one table of their traits. A row is an operation of aten; a column is a flag of `OperationTraits`.

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
    "OPERATIONS",
    "OperationTraits",
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
    "name_of",
    "only_copies",
    "reads_sizes_on_host",
]


class OperationTraits(enum.Flag):
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


CHEAP = OperationTraits.CHEAP
FACTORY = OperationTraits.FACTORY
BY_RANK = OperationTraits.BY_RANK
LAYOUT = OperationTraits.LAYOUT
LINEAR = OperationTraits.LINEAR
EMPTY = OperationTraits.EMPTY
VIEW = OperationTraits.VIEW
COPIES = OperationTraits.COPIES
ENCODES = OperationTraits.ENCODES
DECODES = OperationTraits.DECODES
HOST_SIZES = OperationTraits.HOST_SIZES

OPERATIONS: dict[str, OperationTraits] = {
    # constants
    "full": CHEAP | FACTORY | BY_RANK | COPIES,
    "full_like": CHEAP | FACTORY | BY_RANK | COPIES,
    "new_full": CHEAP | FACTORY | BY_RANK | COPIES,
    "zeros": CHEAP | FACTORY | BY_RANK | COPIES,
    "zeros_like": CHEAP | FACTORY | BY_RANK | COPIES,
    "new_zeros": CHEAP | FACTORY | BY_RANK | COPIES,
    "ones": CHEAP | FACTORY | BY_RANK | COPIES,
    "ones_like": CHEAP | FACTORY | BY_RANK | COPIES,
    "new_ones": CHEAP | FACTORY | BY_RANK,
    "arange": CHEAP | FACTORY | BY_RANK,
    "eye": CHEAP | FACTORY | BY_RANK,
    "scalar_tensor": CHEAP | FACTORY | BY_RANK,
    "lift_fresh": CHEAP | FACTORY | BY_RANK,
    "lift_fresh_copy": CHEAP | FACTORY | BY_RANK,
    "empty": CHEAP | FACTORY | BY_RANK | EMPTY,
    "empty_like": CHEAP | EMPTY,
    "new_empty": CHEAP | BY_RANK | EMPTY,
    # another dtype, another layout
    "_to_copy": CHEAP | FACTORY | BY_RANK | LAYOUT | LINEAR | COPIES,
    "convert_element_type": CHEAP | FACTORY | BY_RANK | LAYOUT,
    "clone": CHEAP | BY_RANK | LAYOUT | LINEAR | COPIES,
    "constant_pad_nd": CHEAP | BY_RANK | LAYOUT | LINEAR | COPIES,
    "contiguous": CHEAP | COPIES,
    "_unsafe_view": VIEW,
    "_reshape_alias": VIEW,
    # moves between device and host
    "to_host": CHEAP | BY_RANK | LAYOUT | LINEAR | COPIES,
    "to_device": CHEAP | BY_RANK | LAYOUT | LINEAR | COPIES,
    # experts (parallel/experts/_grouped.py)
    "grouped_mm": HOST_SIZES,
    "grouped_outer": HOST_SIZES,
    # slicing and concatenation
    "cat": CHEAP | BY_RANK | LINEAR | COPIES,
    "stack": CHEAP | COPIES,
    "slice": BY_RANK,
    "flatten_leaves": CHEAP | BY_RANK | LINEAR | COPIES,  # these two are fzero's (sharding/_flat.py)
    "view_ranges": VIEW,
    # a codec's codes of a unit (sharding/_coded.py)
    "range_magnitudes": CHEAP | BY_RANK | ENCODES,
    "encode_range": CHEAP | BY_RANK | ENCODES,
    "decode_unit": CHEAP | DECODES,
    "sum_payloads": CHEAP,
    "sums_to_bytes": CHEAP,
    "sums_of_bytes": CHEAP,
    "decode_sum": CHEAP | BY_RANK,
    "slice_scatter": CHEAP | COPIES,
    "slice_backward": CHEAP,
    "select_scatter": CHEAP,
    "select_backward": CHEAP,
    "diagonal_copy": CHEAP,
    "tril": CHEAP,
    "triu": CHEAP,
    # look-ups
    "index": CHEAP,
    "gather": CHEAP,
    "embedding": CHEAP,
    "bucketize": CHEAP,
    "where": CHEAP,
    # arithmetic; what torch tags as pointwise is cheap without a row
    "add": LINEAR,
    "div": LINEAR,
    "mul": LINEAR,
    "fill": CHEAP,
    "gelu_backward": CHEAP,
    # reductions over dimensions, and operations that contain them
    "sum": CHEAP,
    "mean": CHEAP,
    "var": CHEAP,
    "var_mean": CHEAP,
    "amax": CHEAP,
    "amin": CHEAP,
    "argmax": CHEAP,
    "any": CHEAP,
    "all": CHEAP,
    "linalg_vector_norm": CHEAP,
    "_softmax": CHEAP,
    "_log_softmax": CHEAP,
    "_log_softmax_backward_data": CHEAP,
    "native_layer_norm": CHEAP,
    "native_layer_norm_backward": CHEAP,
    "nll_loss_forward": CHEAP,
    "nll_loss_backward": CHEAP,
    # writes: a graph has only `copy_`, which donation adds; a profiler sees the other ones
    "copy_": CHEAP | BY_RANK | COPIES,
    "fill_": COPIES,
    "zero_": COPIES,
    "index_copy_": COPIES,
    "_foreach_copy_": COPIES,
    # copies of views: a profiler sees them
    "view_copy": COPIES,
    "expand_copy": COPIES,
    "slice_copy": COPIES,
    "as_strided_copy": COPIES,
    "split_with_sizes_copy": COPIES,
}


def name_of(node: Node) -> str:
    """Return the name of a node's operation without namespace and overload, "mul"; "" if it is no operation."""
    return _name(node.target)


def display_name(node: Node) -> str:
    """Return a readable name of a node's operation: "aten.mm.default", "getitem", or a function's name."""
    target = node.target
    return getattr(target, "__name__", "") if isinstance(target, FunctionType | BuiltinFunctionType) else str(target)


def _name(operation: Any) -> str:
    if isinstance(operation, OpOverload):
        return operation.overloadpacket.__name__
    return operation.__name__ if isinstance(operation, OneNode) else ""


def _traits(name: str) -> OperationTraits:
    return OPERATIONS.get(name, OperationTraits.NOTHING)


def _row(node: Node) -> OperationTraits:
    return _row_of(node.target)


def is_known_cheap(operation: OpOverload | OneNode) -> bool:
    """Return whether an operation is cheap by the table, or pointwise by torch."""
    if OperationTraits.CHEAP in _row_of(operation):
        return True
    return isinstance(operation, OpOverload) and _works_by_element(operation) and not _draws(operation)


def is_factory(node: Node) -> bool:
    """Return whether a node computes its result from sizes and numbers, or only casts."""
    return OperationTraits.FACTORY in _row(node)


def differs_by_rank(node: Node) -> bool:
    """Return whether a node may differ between ranks of one step: a view, or an operation on the rank's own shard."""
    return is_view(node) or OperationTraits.BY_RANK in _row(node)


def changes_layout(node: Node) -> bool:
    """Return whether a node only changes the layout or the dtype of its operand."""
    return is_view(node) or OperationTraits.LAYOUT in _row(node)


def encodes(node: Node) -> bool:
    """Return whether a node encodes a shard for its gather."""
    return OperationTraits.ENCODES in _row(node)


def decodes(node: Node) -> bool:
    """Return whether a node decodes a gathered unit."""
    return OperationTraits.DECODES in _row(node)


def is_linear(node: Node) -> bool:
    """Return whether a node only changes the layout of its operands, scales them or adds them."""
    return is_view(node) or OperationTraits.LINEAR in _row(node)


def is_uninitialized(node: Node) -> bool:
    """Return whether a node's result is uninitialized memory."""
    return OperationTraits.EMPTY in _row(node)


def only_copies(name: str) -> bool:
    """Return whether an operation of this name only moves or fills memory."""
    return OperationTraits.COPIES in _traits(name)


def reads_sizes_on_host(node: Node) -> bool:
    """Return whether an operation reads its int64 operands on the host, so that they may lie there."""
    return OperationTraits.HOST_SIZES in _row(node)


def is_view(node: Node) -> bool:
    """Return whether a node computes nothing but a view, or takes an item of a tuple."""
    return is_view_operation(node.target)


def is_view_operation(operation: Any) -> bool:
    """Return whether an operation computes nothing but a view, or takes an item of a tuple."""
    return operation is operator.getitem or _makes_view(operation)


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers: such nodes keep their order, or the numbers would change."""
    return isinstance(node.target, OpOverload) and _draws(node.target)


def is_pointwise(node: Node) -> bool:
    """Return whether torch calls a node's operation pointwise."""
    return isinstance(node.target, OpOverload) and _works_by_element(node.target)


# Passes query every node many times, but a graph has few distinct operations: the answers are cached.


@functools.lru_cache(maxsize=4096)
def _makes_view(operation: Any) -> bool:
    return (isinstance(operation, OpOverload) and operation.is_view) or OperationTraits.VIEW in _row_of(operation)


@functools.lru_cache(maxsize=4096)
def _draws(operation: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


@functools.lru_cache(maxsize=4096)
def _works_by_element(operation: OpOverload) -> bool:
    return torch.Tag.pointwise in operation.tags


@functools.lru_cache(maxsize=4096)
def _row_of(operation: Any) -> OperationTraits:
    return _traits(_name(operation))
