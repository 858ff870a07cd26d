"""Between groups: which values later groups need, and which views exist as values at all."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch.fx import Node

from fzero.graph.ir import COPY
from fzero.graph.run._cut import is_alias, runs_alone

__all__ = ["exports", "needed_views", "operands", "sources", "views_to", "written_argument"]


def written_argument(node: Node) -> Node:
    """Return the argument that a write wrote, which is its result; other nodes as they are."""
    while node.target is COPY:
        node = node.all_input_nodes[0]
    return node


def operands(group: Sequence[Node]) -> list[Node]:
    """List what the nodes of a group are given."""
    return [a for n in group for a in n.all_input_nodes]


def sources(nodes: Sequence[Node], parts: AbstractSet[Node] = frozenset()) -> list[Node]:
    """List the values that nodes are, or are aliases of; `parts` count as values."""
    found: dict[Node, None] = {}
    stack, seen = list(reversed(nodes)), set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if is_alias(n) and n not in parts:
            stack += n.all_input_nodes
        else:
            found[written_argument(n)] = None
    return list(found)


def needed_views(groups: Sequence[Sequence[Node]], results: Sequence[Node]) -> set[Node]:
    """List the aliases that must exist as values: operands of what runs alone, and results of the graph."""
    found: set[Node] = set()
    stack = [a for group in groups if runs_alone(group[0]) for a in group[0].all_input_nodes]
    stack += results
    while stack:
        n = stack.pop()
        if is_alias(n) and n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return found


def exports(groups: Sequence[Sequence[Node]], results: Sequence[Node]) -> list[list[Node]]:
    """List for each group the values that later ones, or the caller, need."""
    home = {n: i for i, group in enumerate(groups) for n in group}
    found: list[dict[Node, None]] = [{} for _ in groups]
    for i, group in enumerate(groups):
        for x in sources(operands(group)):
            if x in home and home[x] != i:
                found[home[x]][x] = None
    for x in sources(results):
        if x in home:
            found[home[x]][x] = None
    return [list(e) for e in found]


def views_to(nodes: Sequence[Node], slot: Mapping[Node, int], alone: AbstractSet[Node]) -> list[Node]:
    """List the views that must run for `nodes` to have slots, in an order that can run.

    Args:
        nodes: values that are about to be used.
        slot: of all values that are there.
        alone: the views that exist as values.
    """
    found: dict[Node, None] = {}
    stack = [(n, False) for n in reversed(nodes)]
    while stack:
        n, ready = stack.pop()
        if n in slot or n not in alone or n in found:
            continue
        if ready:
            found[n] = None
        else:
            stack.append((n, True))
            stack += [(a, False) for a in n.all_input_nodes]
    return list(found)
