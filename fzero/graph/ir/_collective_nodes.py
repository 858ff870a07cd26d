"""Nodes that communicate: which collective a node starts, waits for or stands after."""

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from fzero._torch import c10d
from fzero.collectives import gloo
from fzero.graph.ir._nodes import COPY

__all__ = [
    "GATHERS",
    "GATHER_INTO",
    "METRIC",
    "REDUCE_COLLECTIVES",
    "WAIT",
    "collectives_before",
    "is_collective",
    "is_gather",
    "is_maximum",
    "is_reduce_collective",
    "is_wait",
    "is_write",
    "sends_codes",
    "source_collective",
    "wait_source",
    "wait_start",
    "write_part",
]

METRIC = "(metric)"  # `meta["unit"]` of a collective of the user
WAIT = c10d.wait_tensor.default
GATHER_INTO = gloo.all_gather_into  # followed by a wait for each argument that it writes
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default, GATHER_INTO)
REDUCE_COLLECTIVES = (
    c10d.reduce_scatter_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default,
    c10d.all_reduce_coalesced.default,
    c10d.all_reduce_.default,
    c10d.all_reduce_coalesced_.default,
)
_EXCHANGES = (c10d.all_to_all_single.default, c10d.broadcast.default)


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a collective."""
    return node.target is WAIT


def is_gather(node: Node) -> bool:
    """Return whether a node starts an all_gather."""
    return node.target in GATHERS


def is_reduce_collective(node: Node) -> bool:
    """Return whether a node starts a reduce_scatter or an all_reduce, or sends a gradient's codes to be summed."""
    return node.target in REDUCE_COLLECTIVES or sends_codes(node)


def sends_codes(node: Node) -> bool:
    """Return whether a node sends each rank its part of a unit's codes. Only such an all_to_all has a unit."""
    return node.target is c10d.all_to_all_single.default and node.meta.get("unit", METRIC) != METRIC


def is_maximum(node: Node) -> bool:
    """Return whether a node starts an all_reduce of maxima, such as the largest magnitudes of a unit's blocks."""
    return node.target in REDUCE_COLLECTIVES and "max" in node.args


def write_part(buffer: torch.Tensor, part: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    """Write a part into a buffer along a dimension, from an index on; return the buffer."""
    buffer.narrow(dim, start, part.shape[dim]).copy_(part)
    return buffer


def is_write(node: Node) -> bool:
    """Return whether a node writes into arguments."""
    return node.target is COPY or node.target is GATHER_INTO


def is_collective(node: Node) -> bool:
    """Return whether a node starts a collective."""
    return node.target in GATHERS or node.target in REDUCE_COLLECTIVES or node.target in _EXCHANGES


def wait_source(wait: Node) -> Node:
    """Return the collective, or its item, that a wait waits for. If carried, it started in the iteration before."""
    source = wait.all_input_nodes[0]
    return source.meta.get("carried", source)


def wait_start(wait: Node) -> Node:
    """Return the collective that a wait waits for."""
    return source_collective(wait_source(wait))


def source_collective(source: Node) -> Node:
    """Return the collective of a node: the node itself, or the source of an item."""
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def collectives_before(nodes: Iterable[Node]) -> dict[Node, int]:
    """Count for each node the collectives that must run one after another before its result is known."""
    counts: dict[Node, int] = {}
    for n in nodes:
        counts[n] = max([counts.get(a, 0) for a in n.all_input_nodes], default=0) + is_collective(n)
    return counts
