"""The unit of a user's collective, found by the parameters that its values meet."""

import re
from collections.abc import Mapping

from torch.fx import Graph, Node

from fzero.graph.ir import METRIC, is_collective, is_input, node_stand_ins
from fzero.graph.loop import node_loop
from fzero.sharding import default_units

__all__ = ["infer_units"]


def infer_units(graph: Graph, loop_weights: Mapping[Node, str] | None = None) -> dict[Node, str]:
    """Return the unit that each of the user's collectives of rows belongs to, in loops' bodies, too.

    It is the unit of the nearest operation, before or after the collective, that applies a parameter. Tokens go
    straight to their experts and come straight from them, and so do activations of layers that are split along "tp". A
    metric and a loss belong to no unit: they are numbers, not matrices.

    Args:
        graph: a scheduled graph, or the body of a loop.
        loop_weights: for a body, its arguments that hold parameters, and their units.
    """
    weights, unit_of_node = _unit_weights(graph, loop_weights or {})
    units: dict[Node, str] = {}
    for n in graph.nodes:
        if is_collective(n) and n.meta.get("unit") == METRIC and _moves_values(n):
            unit = _nearest_unit(n, unit_of_node)
            if unit:
                units[n] = unit
        elif loop := node_loop(n):
            _, *arguments = [m for m in loop.body.nodes if is_input(m)]  # the first is the iteration's number
            body_weights = {
                m: weights[a] for m, a in zip(arguments, n.args, strict=False) if isinstance(a, Node) and a in weights
            }
            units |= infer_units(loop.body, body_weights)
    return units


def _moves_values(node: Node) -> bool:
    """Return whether a collective moves rows: it is an exchange, or its value has two dimensions or more."""
    return "all_to_all" in str(node.target) or node_stand_ins(node)[0].dim() >= 2


def _unit_weights(graph: Graph, known_weights: Mapping[Node, str]) -> tuple[dict[Node, str], dict[Node, str]]:
    """Return the unit of each node that holds only parameters, and of each node that applies a parameter to a value."""
    weights = dict(known_weights)
    unit_of_node = dict[Node, str]()
    for n in graph.nodes:
        inputs = n.all_input_nodes
        units = [weights[a] for a in inputs if a in weights]
        if is_input(n):
            weights |= _parameter_unit(n)
        elif units and len(units) == len(inputs):
            unit = n.meta.get("unit", METRIC)  # a gather has a unit, and each part of a bucket has its own
            weights[n] = units[0] if unit == METRIC else unit
        elif units:
            unit_of_node[n] = units[0]
    return weights, unit_of_node


def _parameter_unit(node: Node) -> dict[Node, str]:
    match = re.search(r"(leaf|unit) '(.+)'", node.meta.get("label", ""))
    if node.meta.get("kind") != "parameters" or match is None:
        return {}
    return {node: default_units(match[2], node.meta["val"]) if match[1] == "leaf" else match[2]}


def _nearest_unit(node: Node, unit_of_node: Mapping[Node, str]) -> str:
    """Search outward from a node in both directions; return the unit of the first node that applies a parameter."""
    earlier_nodes, later_nodes, visited = [node], [node], {node}
    while earlier_nodes or later_nodes:
        earlier_nodes = [m for n in earlier_nodes for m in n.all_input_nodes if m not in visited]
        later_nodes = [m for n in later_nodes for m in n.users if m not in visited]
        visited.update(earlier_nodes, later_nodes)
        for n in [*later_nodes, *earlier_nodes]:
            if n in unit_of_node:
                return unit_of_node[n]
    return ""
