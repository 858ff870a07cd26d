"""Scalars: 0-d values that are made of 0-d values, such as an optimizer's corrections and learning rate.

Inductor puts what makes them into each loop that reads them: `std::pow(0.9, t)` in double for every 16 elements. So
they run before the loops (`cut`), or their segment hands them out, for which Inductor computes them once.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from torch.fx import Node

from fzero.graph.ir import COPY, values
from fzero.graph.ops import is_random

__all__ = ["read_by_loops", "scalars"]


def scalars(nodes: Iterable[Node]) -> set[Node]:
    """Find a graph's scalars. Constants are none, unless they are for scalars only: a compiler folds them."""
    small = [n for n in nodes if n.op == "call_function" and _is_small(n) and not is_random(n)]
    constants: set[Node] = set()
    for n in small:
        if all(a in constants for a in n.all_input_nodes):
            constants.add(n)
    found: set[Node] = set()
    for n in reversed(small):
        if n not in constants or all(u in found for u in n.users):
            found.add(n)
    return found


def read_by_loops(group: Sequence[Node], small: AbstractSet[Node]) -> list[Node]:
    """List those scalars of a group that its other nodes read, maybe as views."""
    return [n for n in group if n in small and n.target is not COPY and any(u not in small for u in n.users)]


def _is_small(node: Node) -> bool:
    return bool(values(node)) and not any(x.dim() for a in (node, *node.all_input_nodes) for x in values(a))
