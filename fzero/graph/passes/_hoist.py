"""hoist: units that every turn of a loop gathers are gathered once, before it."""

from torch.fx import Graph, Node

from fzero.graph.ir import is_gather, is_input, is_wait, nbytes, parameter_gathers, reordered, values
from fzero.graph.loops import Loop, function_of, loop_of
from fzero.graph.ops import lays_out

__all__ = ["hoist"]


def hoist(graph: Graph, max_reuse_bytes: float) -> Graph:
    """Move gathers of parameters out of loops.

    A gathered unit then stays from turn to turn: the loop sends fewer bytes, and holds more.

    Args:
        graph: a flat graph.
        max_reuse_bytes: how many bytes of other units a turn may use for a gathered unit to stay.

    Returns:
        A graph with the same results, bit for bit.
    """
    graph = reordered(graph, graph.nodes)
    for node in [n for n in graph.nodes if loop_of(n)]:
        loop = loop_of(node)
        assert loop is not None
        waits = _waits(loop)
        size = {w: nbytes(*values(w)) for w in waits}
        waits = [w for w in waits if sum(size.values()) - size[w] <= max_reuse_bytes]
        if waits:
            _move(graph, node, loop, waits)
    graph.lint()
    return graph


def _waits(loop: Loop) -> list[Node]:
    """List the waits for what no turn changes: gathers of what the body is given, and of how that is laid out."""
    inputs = [n for n in loop.body.nodes if is_input(n)]
    changing = set(inputs[: loop.places_of_sums.stop])
    for n in loop.body.nodes:
        fixed = lays_out(n) or is_gather(n) or is_wait(n)
        if any(a in changing for a in n.all_input_nodes) or not (fixed or is_input(n)):
            changing.add(n)
    return [w for g in parameter_gathers(loop.body) if g not in changing for w in g.users if is_wait(w)]


def _move(graph: Graph, node: Node, loop: Loop, waits: list[Node]) -> None:
    """Put a loop without these waits, and what they need, in a loop's place, and those before it."""
    inputs = [n for n in loop.body.nodes if is_input(n)]
    given = [a for a in node.args if isinstance(a, Node)]
    outside = dict(zip(inputs[1:], given, strict=True))  # the first argument is the number of the turn
    moved: dict[Node, None] = {}
    stack = [*waits]
    while stack:
        n = stack.pop()
        if not is_input(n) and n not in moved:
            moved[n] = None
            stack += n.all_input_nodes
    with graph.inserting_before(node):
        for n in [n for n in loop.body.nodes if n in moved]:
            outside[n] = graph.node_copy(n, outside.__getitem__)
        new = graph.call_function(function_of(), (*given, *[outside[w] for w in waits]))
    new.meta = {**node.meta, "loop": Loop(_without(loop.body, waits), loop.turns, loop.parts, loop.sums)}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _without(body: Graph, waits: list[Node]) -> Graph:
    """Copy a body in which waits are arguments, behind the others."""
    out, copies = Graph(), dict[Node, Node]()
    inputs = [n for n in body.nodes if is_input(n)]
    for n in inputs:
        copies[n] = out.node_copy(n, copies.__getitem__)
    for w in waits:
        copies[w] = out.placeholder(w.name)
        copies[w].meta = {"val": w.meta["val"], "label": w.meta.get("unit", w.name), "kind": "gathered"}
    for n in body.nodes:
        if n not in copies:  # of those that moved, what nothing else needs goes below
            copies[n] = out.node_copy(n, copies.__getitem__)
    out.eliminate_dead_code()
    return out
