"""hoist: units that every iteration of a loop gathers are gathered once, before the loop."""

from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from fzero.graph._ir import copy_graph, describe, is_gather, is_input, is_wait, nbytes, parameter_gathers, values
from fzero.graph._ops import lays_out
from fzero.graph.loop._scan import Loop, function_of, loop_of

__all__ = ["hoist"]


def hoist(graph: Graph, max_reuse_bytes: float) -> Graph:
    """Move gathers of parameters out of loops, except for the loops of pipelines.

    A gathered unit then stays in memory for all iterations: the loop sends fewer bytes and holds more. A pipeline's
    gathers differ by rank, but the graph around its loop must not.

    Args:
        graph: a flat graph.
        max_reuse_bytes: a gathered unit is hoisted if an iteration uses at most this many bytes of other units.

    Returns:
        A graph with the same results, bit for bit.
    """
    if not _loops(graph):
        return graph
    graph = copy_graph(graph)
    for node in _loops(graph):
        loop = loop_of(node)
        assert loop is not None
        units = _units(loop)
        size = {w: nbytes(*values(w)) for w in units}
        hoisted = {w: units[w] for w in units if sum(size.values()) - size[w] <= max_reuse_bytes}
        if hoisted:
            _move(graph, node, loop, hoisted)
    return graph


def _loops(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if (loop := loop_of(n)) and loop.track is None]


def _units(loop: Loop) -> dict[Node, list[Node]]:
    """List the waits for units that are equal in all iterations: gathers of the body's constant arguments.

    Returns:
        For each unit its first wait, and all its waits: `remat` gathers a unit again for the backward pass.
    """
    inputs = [n for n in loop.body.nodes if is_input(n)]
    changing = set(inputs[: loop.places_of_sums.stop])
    same: dict[Node, Node] = {}  # for each constant node, the first node of the same value
    first: dict[Any, Node] = {}
    for n in loop.body.nodes:
        is_constant = lays_out(n) or is_gather(n) or is_wait(n)
        if any(a in changing for a in n.all_input_nodes) or not (is_constant or is_input(n)):
            changing.add(n)
        else:
            same[n] = n if is_input(n) else first.setdefault(describe(n, same), n)
    units: dict[Node, list[Node]] = {}
    for w in [w for g in parameter_gathers(loop.body) if g in same for w in g.users if is_wait(w)]:
        units.setdefault(same[w], []).append(w)
    return units


def _move(graph: Graph, node: Node, loop: Loop, units: dict[Node, list[Node]]) -> None:
    """Move the gathers of some units, and the nodes that they need, from a loop's body to before the loop."""
    inputs = [n for n in loop.body.nodes if is_input(n)]
    operands = [a for a in node.args if isinstance(a, Node)]
    outside = dict(zip(inputs[1:], operands, strict=True))  # the body's first argument is the index of the iteration
    moved: dict[Node, None] = {}
    stack = [*units]
    while stack:
        n = stack.pop()
        if not is_input(n) and n not in moved:
            moved[n] = None
            stack += n.all_input_nodes
    with graph.inserting_before(node):
        for n in [n for n in loop.body.nodes if n in moved]:
            outside[n] = graph.node_copy(n, outside.__getitem__)
        new = graph.call_function(function_of(), (*operands, *[outside[w] for w in units]))
    new.meta = {**node.meta, "loop": replace(loop, body=_without(loop.body, units))}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _without(body: Graph, units: dict[Node, list[Node]]) -> Graph:
    """Copy a body with gathered units as arguments, after its other arguments."""
    out, copies = Graph(), dict[Node, Node]()
    inputs = [n for n in body.nodes if is_input(n)]
    for n in inputs:
        copies[n] = out.node_copy(n, copies.__getitem__)
    for w, alike in units.items():
        copies[w] = out.placeholder(w.name)
        copies |= dict.fromkeys(alike, copies[w])
        copies[w].meta = {"val": w.meta["val"], "label": w.meta.get("unit", w.name)}
    for n in body.nodes:
        if n not in copies:  # moved nodes without other users are eliminated below
            copies[n] = out.node_copy(n, copies.__getitem__)
    out.eliminate_dead_code()
    return out
