"""carry: the last reductions of a loop's iteration stay in flight until the next iteration starts its own."""

import operator
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import (
    COPY,
    aten,
    check_order,
    collective_kind,
    copy_graph,
    graph_results,
    is_input,
    is_reduce_collective,
    is_view,
    is_wait,
    op_name,
)
from fzero.graph.loop import Loop, node_loop

__all__ = ["carry"]


class _Chain(NamedTuple):
    """The nodes from a reduction to the sum of its gradients.

    Attributes:
        source: the collective, or its item.
        wait: the wait for `source`.
        views: views and casts of the result.
        add: the addition to the sum.
        write: the write into the sum.
    """

    source: Node
    wait: Node
    views: list[Node]
    add: Node
    write: Node


def carry(graph: Graph, in_flight: int) -> Graph:
    """Let the last reductions of each iteration of a loop continue during the next iteration.

    Without this pass a loop waits for these reductions at the end of its body, with no work to overlap. With this pass
    the next iteration waits for them before it starts a reduction of its own. The graph waits for the last iteration's
    reductions after the loop. The first iteration adds -0.0, which changes no value.

    Args:
        graph: a scheduled graph; the bodies of its loops are scheduled too.
        in_flight: how many reductions may be in flight.

    Returns:
        A graph with the same results, bit for bit, and the same collectives.
    """
    graph = copy_graph(graph)
    for node in graph.nodes:
        loop = node_loop(node)
        if loop and loop.rank_schedule is None:  # a pipeline's iterations are split into regions
            _carry_reductions(node, loop, in_flight)
    return graph


def _carry_reductions(node: Node, loop: Loop, in_flight: int) -> None:
    """Leave a loop's last reductions in flight between iterations, and wait for the final ones after the loop."""
    body = copy_graph(loop.body)
    items = {int(n.args[1]): n for n in node.users}  # pyright: ignore[reportArgumentType]
    starts = [n for n in body.nodes if is_reduce_collective(n)]
    last_chains: list[list[_Chain]] = []
    for start in reversed(starts):
        chains = _list_chains(start, body, loop)
        if (
            len(last_chains) == in_flight
            or not chains
            or any(_result_position(c, body, loop) not in items for c in chains)
        ):
            break
        last_chains.insert(0, chains)
    if not last_chains:
        return
    carried_chains = [c for chains in last_chains for c in chains]
    totals = [items[_result_position(c, body, loop)] for c in carried_chains]
    for start, chains in zip(starts, last_chains, strict=False):
        for chain in chains:
            _wait_before(start, chain, body)
    check_order(body)
    carried_start = len(node.meta["val"])
    values = (*node.meta["val"], *[c.source.meta["val"] for c in carried_chains])
    node.meta = {**node.meta, "val": values, "loop": replace(loop, body=body, carried_count=len(carried_chains))}
    behind = [*items.values()][-1].next
    with node.graph.inserting_before(behind):
        for i, (chain, total) in enumerate(zip(carried_chains, totals, strict=True)):
            _wait_after(node, carried_start + i, chain, total)


def _list_chains(start: Node, body: Graph, loop: Loop) -> list[_Chain]:
    """List the chains from a reduction's results to their sums; none if a result is used otherwise too."""
    sources = list(start.users) if any(n.target is operator.getitem for n in start.users) else [start]
    chains = [_follow_chain(source, body, loop) for source in sources]
    complete = [c for c in chains if c is not None]
    return complete if collective_kind(start) == "reduce_scatter" and len(complete) == len(chains) else []


def _follow_chain(source: Node, body: Graph, loop: Loop) -> _Chain | None:
    """Follow a reduced gradient into its sum; None if it is used otherwise."""
    inputs = [n for n in body.nodes if is_input(n)]
    sums = inputs[loop.sum_indices.start : loop.sum_indices.stop]
    path = list[Node]()
    node = source
    while len(node.users) == 1:
        node = next(iter(node.users))
        path.append(node)
        if node.target is COPY:
            break
    if len(path) < 3 or path[-1].target is not COPY:
        return None
    wait, *views, add, write = path
    total = write.args[0]
    plain = is_wait(wait) and all(is_view(n) or op_name(n) == "_to_copy" for n in views)
    adds = add.target is aten.add.Tensor and add.args[0] is total and not add.kwargs
    is_exclusive = total in sums and set(total.users) == {add, write} and [u.op for u in write.users] == ["output"]  # pyright: ignore
    return (
        _Chain(source=source, wait=wait, views=views, add=add, write=write) if plain and adds and is_exclusive else None
    )


def _result_position(chain: _Chain, body: Graph, loop: Loop) -> int:
    """Return the position of the chain's sum among the body's results."""
    return graph_results(body).index(chain.write)


def _wait_before(start: Node, chain: _Chain, body: Graph) -> None:
    """Wait for a reduction of the previous iteration before `start`, and return this iteration's own one pending."""
    last = [n for n in body.nodes if is_input(n)][-1]
    with body.inserting_after(last):
        pending = body.placeholder(f"{chain.source.name}_before")
    pending.meta = {**chain.source.meta, "label": chain.source.meta.get("unit", ""), "carried": chain.source}
    chain.wait.replace_input_with(chain.source, pending)
    for n in [chain.wait, *chain.views, chain.add, chain.write]:
        start.prepend(n)
    output = next(n for n in reversed(body.nodes) if n.op == "output")
    output.args = ((*graph_results(body), chain.source),)


def _wait_after(node: Node, position: int, chain: _Chain, total: Node) -> None:
    """Wait after a loop for a reduction of its last iteration, and add the result to the sum."""
    graph = node.graph
    item = graph.call_function(operator.getitem, (node, position))
    item.meta = {**chain.source.meta, "carried": chain.source}
    before: Any = chain.add.args[0]
    copies: dict[Node, Node] = {chain.source: item, before: total}
    for n in [chain.wait, *chain.views, chain.add]:
        source = chain.source if n is chain.wait else None
        copies[n] = graph.node_copy(n, lambda a, source=source: copies[source or a])
    sum_node = copies[chain.add]
    total.replace_all_uses_with(sum_node, delete_user_cb=lambda user: user is not sum_node)
