"""Passes that gather a unit into its leaves, and read and write the rank's part there."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import c10d, storage_id
from fzero.graph.ir import COPY, GATHER_INTO, WAIT, aten, copy_graph, is_input, node_stand_ins, op_name, views_and_users

__all__ = ["gather_into", "slice_of_gather"]


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
        writes = _list_writes(gather)
        leaves = [w.all_input_nodes[0] for w in writes]
        with graph.inserting_before(gather):
            start = graph.call_function(GATHER_INTO, (*gather.args, leaves, [_write_offset(w) for w in writes]))
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


def _find_write(node: Node) -> _Write:
    leaf, part = node.args
    assert isinstance(leaf, Node) and isinstance(part, Node)
    return _Write(leaf.meta["val"], part.meta["val"])


def _list_writes(gather: Node) -> list[Node]:
    """List the writes of a gathered unit into arguments; none if the unit has other readers or the layouts differ."""
    if len(gather.users) != 1:
        return []
    views, users = views_and_users(next(iter(gather.users)))
    are_writes = all(u.target is COPY and u.args[1] in views and _have_same_bytes(_find_write(u)) for u in users)
    return users if are_writes and node_stand_ins(gather)[0].dim() == 1 else []


def _can_gather_into(node: Node) -> bool:
    """Return whether a node gathers a unit that can be gathered directly into arguments."""
    return node.target is c10d.all_gather_into_tensor.default and bool(_list_writes(node))


def _have_same_bytes(write: _Write) -> bool:
    """Return whether a leaf and a part have the same bytes in memory, on a CPU."""
    dense = all(x.is_contiguous() and not x.is_conj() and not x.is_neg() for x in write)
    return dense and write.leaf.device.type == "cpu" and write.leaf.dtype == write.part.dtype


def _write_offset(node: Node) -> int:
    """Return the offset of the written part in the gathered unit, in elements."""
    return int(_find_write(node).part.storage_offset())


def slice_of_gather(graph: Graph, group_ranks: Sequence[tuple[str, int]]) -> Graph:
    """Read a rank's old part of a unit from the leaves' buffer, and write its new part into it, without copies.

    A step of stage 1 or 2 copies its own part out of the leaves, and the new part back into them. If the leaves lie
    side by side in one buffer, as `step.init` lays them, the part is a view of the buffer, and both copies are
    removed. A unit whose size the ranks do not divide keeps its copies: the last part would reach beyond the leaves.

    Args:
        graph: a flat graph whose units are gathered into their leaves (`gather_into`).
        group_ranks: this rank's index in each process group, by the group's name.

    Returns:
        A graph with the same results.
    """
    if not any(n.target is GATHER_INTO for n in graph.nodes):
        return graph
    rank_in = dict(group_ranks)
    graph = copy_graph(graph)
    for gather in [n for n in graph.nodes if n.target is GATHER_INTO]:
        first_leaf = _first_buffer_leaf(gather)
        if first_leaf is None or gather.args[2] not in rank_in:
            continue
        new_part = gather.all_input_nodes[0]
        start = rank_in[str(gather.args[2])] * node_stand_ins(new_part)[0].numel()
        with graph.inserting_before(next(n for n in graph.nodes if not is_input(n))):
            own_part = _view_leaf(graph, first_leaf, start, node_stand_ins(new_part)[0].numel())
        for pack in [n for n in graph.nodes if op_name(n) == "cat"]:
            if _lies_in(pack, own_part):
                pack.replace_all_uses_with(own_part)
                _erase_unused(graph, pack)
        with graph.inserting_before(gather):
            copy = graph.call_function(COPY, (own_part, new_part))
        copy.meta = {**gather.meta, "val": own_part.meta["val"]}
        gather.args = (copy, *gather.args[1:])
    return graph


def _first_buffer_leaf(gather: Node) -> Node | None:
    """Return the first leaf of a gathered unit if its leaves lie side by side in one buffer that the parts fill."""
    _, ranks, _, leaves, offsets = gather.args
    assert isinstance(leaves, Sequence) and isinstance(offsets, Sequence) and isinstance(ranks, int)
    (new_part,) = node_stand_ins(gather.all_input_nodes[0])
    tensors = [node_stand_ins(x)[0] for x in leaves if isinstance(x, Node)]
    is_one_buffer = len({storage_id(x) for x in tensors}) == 1 and all(x.is_contiguous() for x in tensors)
    if not is_one_buffer or [x.storage_offset() for x in tensors] != list(offsets):
        return None
    fills = sum(x.numel() for x in tensors) == ranks * new_part.numel()
    return leaves[0] if fills and isinstance(leaves[0], Node) else None


def _view_leaf(graph: Graph, leaf: Node, start: int, numel: int) -> Node:
    """View a part of the buffer that a leaf lies in."""
    (x,) = node_stand_ins(leaf)
    view = graph.call_function(aten.as_strided.default, (leaf, [numel], [1], start))
    view.meta = {"val": torch.as_strided(x, [numel], [1], start), "own_part": True}
    return view


def _lies_in(pack: Node, own_part: Node) -> bool:
    """Return whether a node concatenates exactly the pieces that the rank's own part consists of."""
    (part,) = node_stand_ins(own_part)
    end = part.storage_offset()
    for piece in pack.all_input_nodes:
        (x,) = node_stand_ins(piece)
        if storage_id(x) != storage_id(part) or x.storage_offset() != end or x.dim() != 1 or not x.is_contiguous():
            return False
        end += x.numel()
    return end == part.storage_offset() + part.numel() and node_stand_ins(pack)[0].dim() == 1


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node without users, and then its operands that have no other user."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for a in operands:
        if not a.users and not is_input(a):
            _erase_unused(graph, a)
