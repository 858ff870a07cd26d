"""Which layer a user's collective belongs to: found by the parameters that its values meet."""

import re
from collections.abc import Mapping

from torch.fx import Graph, Node

from fzero.graph.ir import is_collective, is_input, values
from fzero.graph.loops import loop_of
from fzero.layout.units import default_units

__all__ = ["layers"]

METRIC = "(metric)"


def layers(graph: Graph, given: Mapping[Node, str] | None = None) -> dict[Node, str]:
    """Name the layer of each collective that moves values of one, such as tokens to experts; in loops' bodies, too.

    It is the layer of the nearest operation, before or after the collective, that applies a parameter: rows go straight
    to their experts, and come straight from them. So do activations of layers that are cut along "tp". Of no layer are
    a metric and a loss, which are numbers and no matrices.

    Args:
        graph: a scheduled graph.
        given: of a loop's body the arguments that hold parameters, and their units.
    """
    weights, applied = _weights(graph, given or {})
    found: dict[Node, str] = {}
    for n in graph.nodes:
        if is_collective(n) and n.meta.get("unit") == METRIC and _moves_values(n):
            name = _nearest(n, applied)
            found |= {n: name} if name else {}
        elif loop := loop_of(n):
            _, *inside = [m for m in loop.body.nodes if is_input(m)]  # the first is the number of the turn
            held = {m: weights[a] for m, a in zip(inside, n.args, strict=False) if isinstance(a, Node) and a in weights}
            found |= layers(loop.body, held)
    return found


def _moves_values(node: Node) -> bool:
    """Return whether a collective moves rows: an exchange does, and what is a matrix or more."""
    return "all_to_all" in str(node.target) or values(node)[0].dim() >= 2


def _weights(graph: Graph, given: Mapping[Node, str]) -> tuple[dict[Node, str], dict[Node, str]]:
    """Find what holds parameters and nothing else, and what applies them to something; with their units."""
    weights, applied = dict(given), dict[Node, str]()
    for n in graph.nodes:
        inputs = n.all_input_nodes
        held = [weights[a] for a in inputs if a in weights]
        if is_input(n):
            weights |= _parameter(n)
        elif held and len(held) == len(inputs):
            unit = n.meta.get("unit", METRIC)  # a gather has one, and each part of a bucket its own
            weights[n] = held[0] if unit == METRIC else unit
        elif held:
            applied[n] = held[0]
    return weights, applied


def _parameter(node: Node) -> dict[Node, str]:
    named = re.search(r"(leaf|unit) '(.+)'", node.meta.get("label", ""))
    if node.meta.get("kind") != "parameters" or named is None:
        return {}
    return {node: default_units(named[2], node.meta["val"]) if named[1] == "leaf" else named[2]}


def _nearest(node: Node, applied: Mapping[Node, str]) -> str:
    """Go from a node to those before and after it, and on in both directions, until one applies a parameter."""
    before, after, seen = [node], [node], {node}
    while before or after:
        before = [m for n in before for m in n.all_input_nodes if m not in seen]
        after = [m for n in after for m in n.users if m not in seen]
        seen.update(before, after)
        for n in [*after, *before]:
            if n in applied:
                return applied[n]
    return ""
