"""Spaces: which values of a graph lie in host memory. No operation may mix host and device values."""

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, Node

from fzero._torch import node_line
from fzero.collectives import start_to_host, to_host
from fzero.graph.ir._collective_nodes import is_collective
from fzero.graph.ir._nodes import dtypes_and_shapes, is_input, node_stand_ins
from fzero.graph.ir._ops import display_name, reads_sizes_on_host

__all__ = ["TO_DEVICE", "TO_HOST", "SpaceError", "check_spaces", "has_moves", "is_move", "on_host"]


TO_HOST, TO_DEVICE = torch.ops.fzero.to_host.default, torch.ops.fzero.to_device.default
assert to_host  # importing its module defines the operations


class SpaceError(RuntimeError):
    """An operation mixes host and device values, or ranks would communicate host values."""


SpaceError.__module__ = "fzero.errors"  # where a pickle finds it


def is_move(node: Node) -> bool:
    """Return whether a node copies a tensor between device and host memory."""
    return node.target in (TO_HOST, TO_DEVICE, start_to_host)


def has_moves(graph: Graph) -> bool:
    """Return whether a graph copies values between device and host memory."""
    return any(is_move(n) for n in graph.nodes)


def on_host(nodes: Iterable[Node]) -> set[Node]:
    """List the values that lie in host memory."""
    order = list(nodes)
    if not any(is_move(n) or _is_host_input(n) for n in order):
        return set()
    spaces = _node_spaces(order)
    host_values = {n for n, space in spaces.items() if space == "host"}
    for n in reversed(order):  # a value without operands lies where it is used
        if n.op == "call_function" and spaces[n] is None and n.users and all(u in host_values for u in n.users):
            host_values.add(n)
    return host_values


def check_spaces(graph: Graph) -> None:
    """Check that no operation mixes host and device values, which would fail on a GPU.

    Raises:
        SpaceError: if an operation does. The message names the operation and its source line.
    """
    order = list(graph.nodes)
    if any(is_move(n) or _is_host_input(n) for n in order):
        _node_spaces(order)


def _is_host_input(node: Node) -> bool:
    return is_input(node) and node.meta.get("space") == "host"


def _node_spaces(order: Sequence[Node]) -> dict[Node, str | None]:
    spaces: dict[Node, str | None] = {}
    for n in order:
        if n.op == "output":
            continue
        if is_input(n):
            spaces[n] = n.meta.get("space")  # a captured tensor may be used in either
        elif is_move(n):
            spaces[n] = "device" if n.target is TO_DEVICE else "host"
        else:
            spaces[n] = _result_space(n, spaces)
    return spaces


def _result_space(node: Node, spaces: dict[Node, str | None]) -> str | None:
    """Return the space in which a node's result lies, that of its operands; an error if they lie in both."""
    operands = node.all_input_nodes
    if reads_sizes_on_host(node):
        operands = [a for a in operands if node_stand_ins(a)[0].dtype != torch.int64]
    space_of = {a: spaces[a] for a in operands}
    host = [a for a, space in space_of.items() if space == "host"]
    device = [a for a, space in space_of.items() if space == "device"]
    if host and (is_collective(node) or device):
        beside = f" and {_describe_node(device[0])} on the device" if device else ", where ranks do not communicate"
        raise SpaceError(
            f"{display_name(node)} at {node_line(node) or 'no known line'} is given {_describe_node(host[0])} in host "
            f"memory{beside}: move one of them (fzero.collectives.to_host, fzero.collectives.to_device), or put a "
            "transform that reads full trees, such as a clip by the global norm, before optim.offload"
        )
    if host:
        return "host"
    return "device" if device else None


def _describe_node(node: Node) -> str:
    return f"{node.meta.get('label', node.name)} ({dtypes_and_shapes(node)})"
