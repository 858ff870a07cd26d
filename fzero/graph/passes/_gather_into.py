"""gather_into: a gathered unit that is only written into arguments is gathered directly into them."""

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph._ir import COPY, GATHER_INTO, WAIT, copy_graph, values
from fzero.graph.passes._uses import views_and_users

__all__ = ["gather_into"]


def gather_into(graph: Graph) -> Graph:
    """Gather new parameters directly into the old ones' memory, without a buffer of the full unit or a copy.

    A step of stage 1 or 2 ends with such gathers. The pass applies to CPUs only, since NCCL gathers into one buffer. A
    gather with another reader stays unchanged.

    Args:
        graph: a flat graph after `donate`.

    Returns:
        A graph with the same results.
    """
    if not any(_can_gather_into(n) for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    for gather in [n for n in graph.nodes if _can_gather_into(n)]:
        writes = _writes(gather)
        leaves = [w.all_input_nodes[0] for w in writes]
        with graph.inserting_before(gather):
            start = graph.call_function(GATHER_INTO, (*gather.args, leaves, [_offset(w) for w in writes]))
        start.meta = {**gather.meta, "val": [x.meta["val"] for x in leaves]}
        for i, write in enumerate(writes):
            with graph.inserting_before(write):
                item = graph.call_function(operator.getitem, (start, i))
                leaf = graph.call_function(WAIT, (item,))
            item.meta, leaf.meta = dict(write.meta), dict(write.meta)
            write.replace_all_uses_with(leaf)
            graph.erase_node(write)
        (wait,) = gather.users
        for node in [*views_and_users(wait)[0][::-1], gather]:
            graph.erase_node(node)
    return graph


class _Write(NamedTuple):
    """A write of a part of a gathered unit into an argument: the stand-ins of both."""

    leaf: torch.Tensor
    part: torch.Tensor


def _write(node: Node) -> _Write:
    leaf, part = node.args
    assert isinstance(leaf, Node) and isinstance(part, Node)
    return _Write(leaf.meta["val"], part.meta["val"])


def _writes(gather: Node) -> list[Node]:
    """List the writes of a gathered unit into arguments; none if the unit has other readers or the layouts differ."""
    if len(gather.users) != 1:
        return []
    views, users = views_and_users(next(iter(gather.users)))
    good = all(u.target is COPY and u.args[1] in views and _alike(_write(u)) for u in users)
    return users if good and values(gather)[0].dim() == 1 else []


def _can_gather_into(node: Node) -> bool:
    """Return whether a node gathers a unit that can be gathered directly into arguments."""
    return node.target is c10d.all_gather_into_tensor.default and bool(_writes(node))


def _alike(write: _Write) -> bool:
    """Return whether a leaf and a part have the same bytes in memory, on a CPU."""
    dense = all(x.is_contiguous() and not x.is_conj() and not x.is_neg() for x in write)
    return dense and write.leaf.device.type == "cpu" and write.leaf.dtype == write.part.dtype


def _offset(node: Node) -> int:
    """Return the offset of the written part in the gathered unit, in elements."""
    return int(_write(node).part.storage_offset())
