"""gather_into: an all_gather that is only written into arguments arrives there."""

import operator

import torch
from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph.ir import COPY, GATHER_INTO, WAIT, copied, values
from fzero.graph.passes._regather import family

__all__ = ["gather_into"]


def gather_into(graph: Graph) -> Graph:
    """Let new parameters arrive where the old ones lie: no buffer of a whole unit is made, nor copied from.

    That is the end of a step of stage 1 or 2. On CPUs only: NCCL gathers into one buffer. A gather that anything else
    reads stays as it is.

    Args:
        graph: a flat graph, donation done.

    Returns:
        A graph with the same results.
    """
    graph = copied(graph)
    for gather in [n for n in graph.nodes if n.target is c10d.all_gather_into_tensor.default]:
        writes = _writes(gather)
        if not writes:
            continue
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
        for node in [*family(wait)[0][::-1], gather]:
            graph.erase_node(node)
    graph.lint()
    return graph


def _writes(gather: Node) -> list[Node]:
    """List the writes of a gathered unit's parts into arguments, if nothing else reads it and each can arrive there."""
    if len(gather.users) != 1:
        return []
    views, users = family(next(iter(gather.users)))
    good = all(u.target is COPY and u.args[1] in views and _alike(*_written(u)) for u in users)
    return users if good and values(gather)[0].dim() == 1 else []


def _written(write: Node) -> tuple[torch.Tensor, torch.Tensor]:
    leaf, part = write.args[0].meta["val"], write.args[1].meta["val"]  # pyright: ignore
    return leaf, part


def _alike(leaf: torch.Tensor, part: torch.Tensor) -> bool:
    """Return whether a leaf's memory is to hold just what a part's holds."""
    dense = all(x.is_contiguous() and not x.is_conj() and not x.is_neg() for x in (leaf, part))
    return dense and leaf.device.type == "cpu" and leaf.dtype == part.dtype


def _offset(write: Node) -> int:
    """Return where in the gathered unit the part begins, in elements."""
    return int(_written(write)[1].storage_offset())
