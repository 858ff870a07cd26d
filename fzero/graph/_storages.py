"""In which memory the values of a flat graph lie: which of them share a storage, and which lie on the host."""

import operator
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import line_of, storage_id
from fzero.collectives import on_its_way, to_host
from fzero.graph._ir import is_collective, is_input, is_wait, shown, values
from fzero.graph._ops import title_of

__all__ = ["SpaceError", "Storages", "check_spaces", "is_move", "moves", "on_host", "storages", "storages_in"]

# Spaces: which values of a graph lie in host memory, and that no operation mixes both.
#
# An argument says where it lies. A move changes that, and all other results lie where their operands do. A number (0-d)
# that is given, and a constant, may meet either. The same holds where both are one memory, so a forgotten move is
# found on a machine without accelerators.


DOWN, UP = torch.ops.fzero.to_host.default, torch.ops.fzero.to_device.default
assert to_host  # its module defines them


class SpaceError(RuntimeError):
    """An operation was given values of both memories."""


def is_move(node: Node) -> bool:
    """Return whether a node copies a tensor from one memory to the other."""
    return node.target in (DOWN, UP, on_its_way)


def moves(graph: Graph) -> bool:
    """Return whether a graph copies values from one memory to the other."""
    return any(is_move(n) for n in graph.nodes)


def on_host(nodes: Iterable[Node]) -> set[Node]:
    """List the values that lie in host memory; of a graph without moves there are none."""
    order = list(nodes)
    if not any(is_move(n) or _given_on_host(n) for n in order):
        return set()
    spaces = _spaces(order)
    found = {n for n, space in spaces.items() if space == "host"}
    for n in reversed(order):  # what is made of nothing lies where it is used
        if n.op == "call_function" and spaces[n] is None and n.users and all(u in found for u in n.users):
            found.add(n)
    return found


def check_spaces(graph: Graph) -> None:
    """Check that no operation mixes values of the two memories, as a GPU would refuse to.

    Raises:
        SpaceError: if one does. Names it and its source line.
    """
    order = list(graph.nodes)
    if any(is_move(n) or _given_on_host(n) for n in order):
        _spaces(order)


def _given_on_host(node: Node) -> bool:
    return is_input(node) and node.meta.get("space") == "host"


def _spaces(order: Sequence[Node]) -> dict[Node, str | None]:
    found: dict[Node, str | None] = {}
    for n in order:
        if n.op == "output":
            continue
        if is_input(n):
            found[n] = n.meta.get("space")  # what a step captures may lie in either
        elif is_move(n):
            found[n] = "device" if n.target is UP else "host"
        else:
            found[n] = _space_of_result(n, found)
    return found


def _space_of_result(node: Node, found: dict[Node, str | None]) -> str | None:
    of = {a: found[a] for a in node.all_input_nodes}
    host = [a for a, space in of.items() if space == "host"]
    device = [a for a, space in of.items() if space == "device"]
    if host and (is_collective(node) or device):
        beside = f" and {_named(device[0])} on the device" if device else ", where ranks do not communicate"
        raise SpaceError(
            f"{title_of(node)} at {line_of(node) or 'no known line'} is given {_named(host[0])} in host memory"
            f"{beside}: move one of them (fzero.collectives.to_host, fzero.collectives.to_device), or put what "
            f"reads whole trees, such as a "
            "clip by the global norm, before optim.offload"
        )
    return "host" if host else "device" if device else None


def _named(node: Node) -> str:
    return f"{node.meta.get('label', node.name)} ({shown(node)})"


# In which memory the values of a flat graph lie.


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
