"""hoist: units that every iteration of a loop gathers are gathered once, before the loop.

What is gathered over one axis, to be gathered over the next, is gathered once in a graph, with or without a loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from fzero.graph.ir import (
    changes_layout,
    copy_graph,
    describe,
    encodes,
    is_gather,
    is_input,
    is_maximum,
    is_wait,
    nbytes,
    node_stand_ins,
    only_feeds,
    parameter_gathers,
)
from fzero.graph.loop import Loop, new_loop_function, node_loop

__all__ = ["hoist"]


def hoist(graph: Graph, max_reuse_bytes: float) -> Graph:
    """Move gathers of parameters out of loops, except for the loops of pipelines, and gather parts once.

    A gathered unit then stays in memory for all iterations: the loop sends fewer bytes and holds more. A pipeline's
    gathers differ by rank, but the graph around its loop must not.

    Args:
        graph: a flat graph.
        max_reuse_bytes: a gathered unit is hoisted if an iteration uses at most this many bytes of other units. What
            is gathered over one axis, to be gathered over the next, is always hoisted, and stays from the forward to
            the backward pass. The scales of codes stay with it.

    Returns:
        A graph with the same results, bit for bit.
    """
    if not _loop_nodes(graph) and not _has_repeated_parts(graph):
        return graph
    graph = copy_graph(graph)
    for node in _loop_nodes(graph):
        loop = node_loop(node)
        assert loop is not None
        inputs = [n for n in loop.body.nodes if is_input(n)]
        constants = _map_constants(loop.body, inputs[: loop.sum_indices.stop])
        units = _waits_for(parameter_gathers(loop.body), constants)
        parts = _repeated_parts(loop.body, constants)
        size = {w: nbytes(*node_stand_ins(w)) for w in units if w not in parts}
        total = sum(size.values())
        gathers_to_hoist = {w: units[w] for w in units if w in parts or total - size[w] <= max_reuse_bytes}
        if parts:
            gathers_to_hoist |= _repeated_scales(loop.body, constants)
        if gathers_to_hoist:
            _move_gathers(graph, node, loop, gathers_to_hoist)
    _merge_parts(graph)
    return graph


def _loop_nodes(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if (loop := node_loop(n)) and loop.rank_schedule is None]


def _has_repeated_parts(graph: Graph) -> bool:
    """Return whether a part of a unit is gathered twice."""
    return any(len(waits) > 1 for waits in _repeated_parts(graph, _map_constants(graph)).values())


def _merge_parts(graph: Graph) -> None:
    """Gather each part of a unit once in a graph, with its scales, for each forward and backward pass that needs it."""
    constants = _map_constants(graph)
    parts = _repeated_parts(graph, constants)
    if not parts:
        return
    for first, *duplicates in [*parts.values(), *_repeated_scales(graph, constants).values()]:
        for wait in duplicates:
            wait.replace_all_uses_with(first)
    graph.eliminate_dead_code(lambda n: n.is_impure() and not is_wait(n))


def _repeated_parts(graph: Graph, constants: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """List the waits for parts of units, gathered over one axis to be gathered over the next, by the first of each."""
    units = _waits_for(parameter_gathers(graph), constants)
    return {w: waits for w, waits in units.items() if all(only_feeds(x, is_gather) for x in waits)}


def _repeated_scales(graph: Graph, constants: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """List the waits for the scales of codes, over all axes, by the first of each."""
    maxima = _waits_for([n for n in graph.nodes if is_maximum(n)], constants)
    return {w: waits for w, waits in maxima.items() if not only_feeds(w, is_maximum)}


def _map_constants(graph: Graph, changing_inputs: Sequence[Node] = ()) -> dict[Node, Node]:
    """Map each node that depends on constant inputs alone to the first node of the same value.

    These are gathers of the inputs, and what they need. In a loop's body some inputs change with the iteration.
    """
    changing = set(changing_inputs)
    constants_by_value: dict[Node, Node] = {}
    node_of_description: dict[Any, Node] = {}
    for n in graph.nodes:
        is_constant = changes_layout(n) or encodes(n) or is_gather(n) or is_wait(n) or is_maximum(n)
        if any(a in changing for a in n.all_input_nodes) or not (is_constant or is_input(n)):
            changing.add(n)
        else:
            constants_by_value[n] = (
                n if is_input(n) else node_of_description.setdefault(describe(n, constants_by_value), n)
            )
    return constants_by_value


def _waits_for(collectives: Sequence[Node], constants: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """List the waits for those collectives that are equal in all iterations.

    Returns:
        For each result its first wait, and all its waits: `remat` gathers a unit again for the backward pass.
    """
    waits: dict[Node, list[Node]] = {}
    for w in [w for c in collectives if c in constants for w in c.users if is_wait(w)]:
        waits.setdefault(constants[w], []).append(w)
    return waits


def _move_gathers(graph: Graph, node: Node, loop: Loop, units: dict[Node, list[Node]]) -> None:
    """Move the gathers of some units, and the nodes that they need, from a loop's body to before the loop."""
    inputs = [n for n in loop.body.nodes if is_input(n)]
    operands = [a for a in node.args if isinstance(a, Node)]
    outside = dict(zip(inputs[1:], operands, strict=True))  # the body's first argument is the index of the iteration
    hoisted_gathers: dict[Node, None] = {}
    stack = [*units]
    while stack:
        n = stack.pop()
        if not is_input(n) and n not in hoisted_gathers:
            hoisted_gathers[n] = None
            stack += n.all_input_nodes
    with graph.inserting_before(node):
        for n in [n for n in loop.body.nodes if n in hoisted_gathers]:
            outside[n] = graph.node_copy(n, outside.__getitem__)
        new = graph.call_function(new_loop_function(), (*operands, *[outside[w] for w in units]))
    new.meta = {**node.meta, "loop": replace(loop, body=_body_without_gathers(loop.body, units))}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _body_without_gathers(body: Graph, units: dict[Node, list[Node]]) -> Graph:
    """Copy a body with gathered units as arguments, after its other arguments."""
    out = Graph()
    copies = dict[Node, Node]()
    inputs = [n for n in body.nodes if is_input(n)]
    for n in inputs:
        copies[n] = out.node_copy(n, copies.__getitem__)
    for w, waits in units.items():
        copies[w] = out.placeholder(w.name)
        copies |= dict.fromkeys(waits, copies[w])
        copies[w].meta = {"val": w.meta["val"], "label": w.meta.get("unit", w.name)}
    for n in body.nodes:
        if n not in copies:  # moved nodes without other users are eliminated below
            copies[n] = out.node_copy(n, copies.__getitem__)
    out.eliminate_dead_code(lambda n: n.is_impure() and not is_wait(n))
    return out
