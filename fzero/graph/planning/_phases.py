"""Divide a step's operations into forward pass, backward pass and update."""

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node

from fzero._torch import is_backward
from fzero.graph.ir import METRIC, flops, is_reduce_collective
from fzero.graph.loop import node_loop

__all__ = ["PHASES", "find_phases"]

PHASES = ("forward", "backward", "update")


def find_phases(graph: Graph) -> dict[Node, str]:
    """Return the phase of each operation of a graph and of its loops' bodies.

    The forward pass ends before the first operation of the backward pass. Later operations that no operation of the
    backward pass needs are the update, also between gradients. Recomputed operations belong to the backward pass. The
    forward pass of the next micro-batch is recognised by its matrix products.
    """
    nodes = [n for n in graph.nodes if n.op != "output"]
    phase_of = _find_phases(nodes)
    for node in nodes:
        if loop := node_loop(node):
            phase_of |= find_phases(loop.body)
    return phase_of


def _find_phases(nodes: Sequence[Node]) -> dict[Node, str]:
    """Return the phase of each node, found from gradients: what leads to them, what they are, what follows."""
    backward = {n for n in nodes if is_backward(n) or _has_gradients(n)}
    if not backward:
        return dict.fromkeys(nodes, "forward")
    backward_start = next(i for i, n in enumerate(nodes) if n in backward)
    backward |= {n for n in nodes[backward_start:] if is_reduce_collective(n) and n.meta.get("unit", "") != METRIC}
    ancestors = _ancestors(nodes, backward)
    phase_of = {}
    phase = "backward"
    for i, n in reversed(list(enumerate(nodes))):
        if n in backward:
            phase = "backward"
        elif n in ancestors and flops(n):  # the forward pass of the next micro-batch
            phase = "forward"
        if i < backward_start:
            phase_of[n] = "forward"
        else:
            phase_of[n] = phase if n in ancestors else "update"
    return phase_of


def _has_gradients(node: Node) -> bool:
    loop = node_loop(node)
    return loop is not None and any(is_backward(n) for n in loop.body.nodes)


def _ancestors(nodes: Sequence[Node], seeds: Iterable[Node]) -> set[Node]:
    """Return some nodes and all nodes that they depend on."""
    ancestors = set(seeds)
    for n in reversed(nodes):
        if n in ancestors:
            ancestors.update(n.all_input_nodes)
    return ancestors
