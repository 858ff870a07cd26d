"""In which memory the values of a flat graph lie."""

import operator
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import storage_id
from fzero.graph.ir import is_input, is_wait, values
from fzero.graph.spaces import on_host

__all__ = ["Storages", "storages", "storages_in"]


class Storages(NamedTuple):
    """In which memory each value lies.

    Attributes:
        of: for each node, the storage of each tensor it computes.
        size: bytes of each storage.
        born: the node that allocates each storage.
        on_host: the values that lie in host memory.
    """

    of: dict[Node, tuple[int, ...]]
    size: list[int]
    born: list[Node]
    on_host: Set[Node] = frozenset()

    def read_by(self, node: Node) -> list[int]:
        """List the storages that a node's arguments lie in."""
        return [s for a in node.all_input_nodes for s in self.of.get(a, ())]


def storages(graph: Graph) -> Storages:
    """Find the storage of every value: views share their base's, and a wait its collective's."""
    return storages_in(graph.nodes)


def storages_in(nodes: Iterable[Node]) -> Storages:
    """Find the storage of every value of a graph whose nodes run in this order."""
    nodes = list(nodes)
    found = Storages({}, [], [], on_host(nodes))
    keys: dict[Node, list[int]] = {}  # by which tensors of one graph share memory
    given: dict[int, int] = {}  # arguments that lie side by side share theirs
    for node in nodes:
        if node.op == "output":
            continue
        keys[node] = [storage_id(x) for x in values(node)]
        if is_input(node):
            found.of[node] = _computed(found, node, keys[node], given)
        elif is_wait(node):
            found.of[node] = found.of[node.all_input_nodes[0]]
        elif node.target is operator.getitem and isinstance(node.args[0], Node):
            found.of[node] = _item(found, node)
        else:
            lent: dict[int, int] = {}
            for a in node.all_input_nodes:
                lent.update(zip(keys[a], found.of[a], strict=True))
            found.of[node] = _computed(found, node, keys[node], lent)
    return found


def _item(found: Storages, node: Node) -> tuple[int, ...]:
    (source,), index = node.all_input_nodes, int(node.args[1])  # pyright: ignore[reportArgumentType]
    parts = source.meta["val"]
    if len(found.of[source]) == len(parts):  # all are tensors
        return (found.of[source][index],)
    before = sum(isinstance(x, torch.Tensor) for x in parts[:index])
    return found.of[source][before : before + 1] if isinstance(parts[index], torch.Tensor) else ()


def _computed(found: Storages, node: Node, keys: Sequence[int], lent: dict[int, int]) -> tuple[int, ...]:
    """Return a node's storages: one that is `lent`, where the value is a view of it, else new ones."""
    out = []
    for x, key in zip(values(node), keys, strict=True):
        if key not in lent:
            lent[key] = len(found.size)
            found.size.append(x.untyped_storage().nbytes())
            found.born.append(node)
        out.append(lent[key])
    return tuple(out)
