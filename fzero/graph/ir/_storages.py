"""The storages of a flat graph: which of its values share memory."""

import operator
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import storage_id
from fzero.graph.ir._collective_nodes import is_wait
from fzero.graph.ir._memory_spaces import on_host
from fzero.graph.ir._nodes import is_input, node_stand_ins

__all__ = ["Storages", "storages", "storages_in"]


class Storages(NamedTuple):
    """The storage of each value, as an index into `sizes` and `producers`.

    Attributes:
        indices: for each node, the index of the storage of each tensor that it computes.
        sizes: the bytes of each storage.
        producers: the node that allocates each storage.
        on_host: the values that lie in host memory.
    """

    indices: dict[Node, tuple[int, ...]]
    sizes: list[int]
    producers: list[Node]
    on_host: Set[Node] = frozenset()

    def read_by(self, node: Node) -> list[int]:
        """List the storages that a node's arguments lie in."""
        return [s for a in node.all_input_nodes for s in self.indices.get(a, ())]


def storages(graph: Graph) -> Storages:
    """Find the storage of every value. A view shares its base's storage, and a wait its collective's."""
    return storages_in(graph.nodes)


def storages_in(nodes: Iterable[Node]) -> Storages:
    """Find the storage of every value of a graph whose nodes run in this order."""
    nodes = list(nodes)
    memory = Storages({}, [], [], on_host(nodes))
    keys: dict[Node, list[int]] = {}  # equal for tensors of one graph that share memory
    input_storages: dict[int, int] = {}  # arguments that lie in one buffer share its storage
    for node in nodes:
        if node.op == "output":
            continue
        keys[node] = [storage_id(x) for x in node_stand_ins(node)]
        if is_input(node):
            memory.indices[node] = _result_storages(memory, node, keys[node], input_storages)
        elif is_wait(node):
            memory.indices[node] = memory.indices[node.all_input_nodes[0]]
        elif node.target is operator.getitem and isinstance(node.args[0], Node):
            memory.indices[node] = _item_storages(memory, node)
        else:
            aliases: dict[int, int] = {}
            for a in node.all_input_nodes:
                aliases.update(zip(keys[a], memory.indices[a], strict=True))
            memory.indices[node] = _result_storages(memory, node, keys[node], aliases)
    return memory


def _item_storages(memory: Storages, node: Node) -> tuple[int, ...]:
    (source,), index = node.all_input_nodes, int(node.args[1])  # pyright: ignore[reportArgumentType]
    parts = source.meta["val"]
    if len(memory.indices[source]) == len(parts):  # all are tensors
        return (memory.indices[source][index],)
    before = sum(isinstance(x, torch.Tensor) for x in parts[:index])
    return memory.indices[source][before : before + 1] if isinstance(parts[index], torch.Tensor) else ()


def _result_storages(memory: Storages, node: Node, keys: Sequence[int], aliases: dict[int, int]) -> tuple[int, ...]:
    """Return a node's storages: one of `aliases` if the value is a view of it, else a new one."""
    out = []
    for x, key in zip(node_stand_ins(node), keys, strict=True):
        if key not in aliases:
            aliases[key] = len(memory.sizes)
            memory.sizes.append(x.untyped_storage().nbytes())
            memory.producers.append(node)
        out.append(aliases[key])
    return tuple(out)
