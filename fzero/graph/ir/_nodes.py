"""Nodes of a flat graph: what stands for their values, and who reads them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.ir._ops import decodes, is_view

__all__ = [
    "CASTS",
    "COMPILED",
    "COPY",
    "FUSED",
    "LATE",
    "SCALINGS",
    "argument_stand_ins",
    "aten",
    "describe",
    "dtypes_and_shapes",
    "graph_results",
    "is_carried",
    "is_input",
    "nbytes",
    "node_stand_ins",
    "only_feeds",
    "signature",
    "users_through_views",
    "views_and_users",
]

aten: Any = torch.ops.aten
LATE, FUSED, COMPILED = "late", "fused", "compiled"
COPY = aten.copy_.default
SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
CASTS = (aten._to_copy.default, aten.to.dtype)


def is_input(node: Node) -> bool:
    """Return whether a node is an argument of the graph."""
    return node.op == "placeholder"


def graph_results(graph: Graph) -> list[Any]:
    """List a graph's results: nodes, and None where the function returned none."""
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])  # pyright: ignore[reportArgumentType]


def is_carried(node: Node) -> bool:
    """Return whether a node is a reduction that an earlier iteration of a loop started."""
    return "carried" in node.meta


def node_stand_ins(node: Node) -> list[torch.Tensor]:
    """List the (stand-in) tensors that a node computes."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return [val]
    return [x for x in val if isinstance(x, torch.Tensor)] if isinstance(val, tuple | list) else []


def argument_stand_ins(node: Node) -> list[torch.Tensor]:
    """List the tensors that a node reads."""
    return [x for a in node.all_input_nodes for x in node_stand_ins(a)]


def dtypes_and_shapes(node: Node) -> str:
    """Show the dtypes and shapes of a node's tensors: "float32[4, 8], int64[4]"."""
    return ", ".join([f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in node_stand_ins(node)])


def nbytes(*xs: torch.Tensor) -> int:
    """Count the bytes of tensors' elements."""
    return sum([x.numel() * x.element_size() for x in xs])


def users_through_views(node: Node) -> list[Node]:
    """List the nodes, other than views, that use a node or a view of it."""
    users = list(node.users)
    for user in users:  # grows as it goes
        if is_view(user):
            users += list(user.users)
    return [u for u in users if not is_view(u)]


def views_and_users(value: Node, decoded: bool = False) -> tuple[list[Node], list[Node]]:
    """Return a value's views (the value itself first), and the nodes that use the value through a view.

    With `decoded` the value is a gathered unit, and a node that decodes it counts as a view, too.
    """
    views = [value]
    users = []
    visited = {value}
    for view in views:  # grows as it goes
        for user in view.users:
            if user not in visited:
                visited.add(user)
                (views if is_view(user) or (decoded and decodes(user)) else users).append(user)
    return views, users


def only_feeds(value: Node, kind: Callable[[Node], bool]) -> bool:
    """Return whether all users of a value, through views, are of one kind.

    So a unit that was gathered over one axis only feeds the gather over the next.
    """
    return all(kind(user) for user in views_and_users(value)[1])


def describe(node: Node, representatives: Mapping[Node, Node]) -> tuple[str, str]:
    """Describe a node's operation and arguments: nodes that compute the same value have equal descriptions.

    Args:
        node: an operation.
        representatives: for some nodes, a node of the same value to name in their place.
    """

    def name(a: Node) -> Any:
        return _NodeName(representatives.get(a, a).name)

    args: Any = map_arg((node.args, node.kwargs), name)  # pyright: ignore[reportArgumentType]
    return str(node.target), repr(args)


class _NodeName(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{self}"


def signature(x: Any) -> tuple[Any, ...]:
    """Describe the properties of a tensor that compiled code may depend on."""
    if not isinstance(x, torch.Tensor):
        return (type(x),)
    return (tuple(x.shape), tuple(x.stride()), x.dtype, x.device)
