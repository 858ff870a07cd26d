"""Fused: the values that a compiler computes within a loop over others, and never stores."""

from collections.abc import Sequence

from torch.fx import Node

from fzero.graph.ir import CASTS, COPY, FUSED, users_through_views, values
from fzero.graph.ops import is_factory, is_pointwise, name_of
from fzero.graph.run._cut import cut

__all__ = ["is_loop", "never_stored", "reduces"]

REDUCTIONS = {"sum", "mean", "linalg_vector_norm", "amax", "amin", "any", "all"}


def is_loop(node: Node) -> bool:
    """Return whether a node computes one tensor, element by element."""
    by_element = is_pointwise(node) or is_factory(node) or node.target is COPY or node.target in CASTS
    return node.op == "call_function" and by_element and len(values(node)) == 1


def reduces(node: Node) -> bool:
    """Return whether a node sums a tensor, or the like: a loop over its elements."""
    return name_of(node) in REDUCTIONS


def never_stored(order: Sequence[Node]) -> set[Node]:
    """List the values that `mark_fused` marked and that take no memory in an order.

    All that reads such a value is compiled with it, and between the two stand loops alone. What a sum or a matrix
    product comes in between of is stored.

    Args:
        order: the nodes of a graph, in an order in which they can run.
    """
    if not any(FUSED in n.meta for n in order):
        return set()
    found: set[Node] = set()
    for group in cut(order):
        run: dict[Node, int] = {}  # the loops that may be one have equal numbers
        count = 0
        for n in group:
            count += not is_loop(n) and not reduces(n)
            run[n] = count
            count += reduces(n)
        found |= {n for n in group if FUSED in n.meta and all(run.get(u) == run[n] for u in users_through_views(n))}
    return found
