"""send_early: a pipeline stage sends its input's gradient before it computes the gradients of its weights."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from fzero._torch import copy_nodes
from fzero.graph.loop import BEGIN_REGION, SEND

__all__ = ["send_early"]


def send_early(graph: Graph) -> Graph:
    """Move the operations that lead to each gradient that is sent to the front of its backward pass.

    The rank that waits for the gradient can go on sooner. But all that the gradients of the stage's weights need stays
    alive until then, also what remat has just computed again.

    Args:
        graph: a flat graph; all but the body of a pipeline's loop stay as they are.
    """
    nodes = list(graph.nodes)
    begins = [i for i, n in enumerate(nodes) if n.target is BEGIN_REGION]
    if not begins:
        return graph
    order = nodes[: begins[0]]
    for begin, stop in zip(begins, [*begins[1:], len(nodes)], strict=True):
        region = nodes[begin:stop]
        order += _order_sends_first(region) if region[0].args[0] == "B" else region
    return copy_nodes(order)


def _order_sends_first(region: Sequence[Node]) -> list[Node]:
    begin, *operations = region
    needed_for_sends = {n for n in operations if n.target is SEND}
    for n in reversed(operations):
        if n in needed_for_sends:
            needed_for_sends.update(n.all_input_nodes)
    return [
        begin,
        *[n for n in operations if n in needed_for_sends],
        *[n for n in operations if n not in needed_for_sends],
    ]
