"""A scheduled graph as subgraphs: lists of nodes in the order of the schedule. Each runs alone or is compiled."""

import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch.fx import Graph, Node

from fzero._torch import node_chunk, storage_id
from fzero.collectives import wait_to_host
from fzero.graph.ir import (
    CASTS,
    COPY,
    is_collective,
    is_input,
    is_move,
    is_pointwise,
    is_random,
    is_reduce_collective,
    is_view,
    is_wait,
    nbytes,
    node_stand_ins,
    on_host,
    op_name,
    users_through_views,
    write_part,
)
from fzero.graph.loop import node_loop

__all__ = [
    "argument_parts",
    "find_scalars",
    "is_alias",
    "read_by_kernels",
    "resolve_alias",
    "runs_alone",
    "split_into_subgraphs",
]


# Inductor computes a scalar within each kernel that reads it: `std::pow(0.9, t)` in double for every 16 elements. So
# scalars run before the kernels (`split_into_subgraphs`), or their segment returns them: Inductor computes a result
# only once.
def find_scalars(nodes: Iterable[Node]) -> set[Node]:
    """Return a graph's scalars. A constant counts only if scalars alone use it: the compiler folds constants."""
    zero_dim = [n for n in nodes if n.op == "call_function" and _is_zero_dim(n) and not is_random(n)]
    constants: set[Node] = set()
    for n in zero_dim:
        if all(a in constants for a in n.all_input_nodes):
            constants.add(n)
    scalars: set[Node] = set()
    for n in reversed(zero_dim):
        if n not in constants or all(u in scalars for u in n.users):
            scalars.add(n)
    return scalars


def read_by_kernels(subgraph: Sequence[Node], scalars: AbstractSet[Node]) -> list[Node]:
    """List the scalars of a subgraph that its other nodes read, maybe as views."""
    return [n for n in subgraph if n in scalars and n.target is not COPY and any(u not in scalars for u in n.users)]


def _is_zero_dim(node: Node) -> bool:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.dim():  # so are nearly all
        return False
    return bool(node_stand_ins(node)) and not any(
        x.dim() for a in (node, *node.all_input_nodes) for x in node_stand_ins(a)
    )


def split_into_subgraphs(
    nodes: Iterable[Node], scalars: AbstractSet[Node] | None = None, host: AbstractSet[Node] | None = None
) -> list[list[Node]]:
    """Split a graph into subgraphs at collectives, their packing and moves, and where the parameters of a block begin.

    So blocks of one shape give equal segments. Each chunk of a value that is computed in parts begins a subgraph, too.
    A subgraph lies in one memory, so it runs on one device. Aliases are in no subgraph: each subgraph recomputes the
    aliases that it uses. Scalars that depend on no large value of their segment run before it, in subgraphs of their
    own: an optimizer's bias corrections, a learning rate. Otherwise Inductor would compute them again for every few
    elements of a kernel that reads them.

    Args:
        nodes: the nodes of a graph, in an order in which they can run.
        scalars: the graph's scalars; computed if None.
        host: the values that lie in host memory; found if None.

    Returns:
        Subgraphs in order: one node that runs alone, scalars, or nodes that are compiled together.
    """
    nodes = list(nodes)
    scalars = find_scalars(nodes) if scalars is None else scalars
    host = on_host(nodes) if host is None else host
    builder = _SubgraphBuilder()
    boundaries = _Boundaries(host)
    for n in nodes:
        if n.op != "call_function" or is_alias(n):
            continue
        if n.target is operator.getitem:  # a tuple does not leave its segment
            builder.put(n, builder.subgraph_index[n.all_input_nodes[0]])
        elif runs_alone(n):
            builder.add_alone(n)
        elif n in scalars and (index := builder.scalar_subgraph_for(n)) is not None:
            builder.put(n, index)
        else:
            if boundaries.begins_subgraph(n, builder.subgraphs[-1] if builder.is_open else ()):
                builder.is_open = False
            builder.add(n)
    builder.move_to_readers(scalars)
    return [subgraph for subgraph in builder.subgraphs if subgraph]


class _Boundaries:
    """Where compiled subgraphs begin, by the nodes that were added so far.

    Attributes:
        host: the values that lie in host memory.
        block: the block whose arguments the latest subgraph reads.
        chunk: the latest chunk that an operation belongs to.
        is_host: whether the latest subgraph runs on the host.
    """

    def __init__(self, host: AbstractSet[Node]) -> None:
        self.host, self.block, self.is_host = host, "", False
        self.chunk: int | None = None

    def begins_subgraph(self, node: Node, subgraph: Sequence[Node]) -> bool:
        """Return whether a node must not be compiled with the nodes of the open subgraph, and remember its own."""
        block = next((b for a in node.all_input_nodes if (b := _block_name(a))), "")
        chunk, is_host = node_chunk(node), node in self.host
        is_other_block = block not in ("", self.block) or _overwrites_unseen(node, subgraph)
        is_other_chunk = chunk not in (None, self.chunk)  # Inductor would keep the values of several chunks at once
        is_other_memory = is_host != self.is_host
        self.block = block if is_other_block else self.block
        self.chunk = chunk if is_other_chunk else self.chunk
        self.is_host = is_host
        return is_other_block or is_other_chunk or is_other_memory


class _SubgraphBuilder:
    """The subgraphs of a graph while nodes are added.

    Attributes:
        subgraphs: the subgraphs in order; some may be empty.
        subgraph_index: the index of each node's subgraph.
        is_open: whether the last subgraph is compiled, and takes the next node.
    """

    def __init__(self) -> None:
        self.subgraphs: list[list[Node]] = []
        self.subgraph_index: dict[Node, int] = {}
        self.is_open = False
        # the indices of the subgraphs of scalars, one before each compiled subgraph
        self._scalar_subgraphs: list[int] = []

    def put(self, node: Node, index: int) -> None:
        """Add a node to a subgraph."""
        self.subgraph_index[node] = index
        self.subgraphs[index].append(node)

    def add_alone(self, node: Node) -> None:
        """Add a node that runs alone."""
        self.subgraphs.append([])
        self.put(node, len(self.subgraphs) - 1)
        self.is_open = False

    def add(self, node: Node) -> None:
        """Add a node to the open subgraph, or begin a subgraph with it."""
        if not self.is_open:
            self._begin_scalars()
            self.subgraphs.append([])
            self.is_open = True
        self.put(node, len(self.subgraphs) - 1)

    def scalar_subgraph_for(self, node: Node) -> int | None:
        """Return the index of the scalar subgraph for a scalar; None if the scalar needs the open subgraph.

        It is the first scalar subgraph after all the scalar's operands, so that the scalars of all units run at once. A
        write goes to the last scalar subgraph, since all readers of the overwritten value must come before.
        """
        last_operand_index = max(
            [self.subgraph_index.get(resolve_alias(a), -1) for a in node.all_input_nodes], default=-1
        )
        if self.is_open and (
            last_operand_index == len(self.subgraphs) - 1 or _overwrites_for(node, self.subgraphs[-1])
        ):
            return None
        begun = self._scalar_subgraphs
        if not self.is_open and (node.target is COPY or not begun or begun[-1] < last_operand_index):
            self._begin_scalars()
        return begun[-1] if node.target is COPY else begun[bisect_left(begun, last_operand_index)]

    def _begin_scalars(self) -> None:
        """Begin a scalar subgraph, unless the last subgraph is one."""
        if not self._scalar_subgraphs or self._scalar_subgraphs[-1] != len(self.subgraphs) - 1:
            self._scalar_subgraphs.append(len(self.subgraphs))
            self.subgraphs.append([])

    def move_to_readers(self, scalars: AbstractSet[Node]) -> None:
        """Move nodes that only the next compiled subgraph needs into that subgraph, unless more bytes would be stored.

        So a block's gradient is scaled in the segment that updates the block. The scaling reads none of the block's
        arguments: without this move it would be in the previous block's update, which would store the scaled gradient.
        """
        for i, j in _neighbour_pairs(self.subgraphs, scalars):
            overwritten_storages = {
                storage_id(x) for n in self.subgraphs[i] if n.target is COPY for x in node_stand_ins(n)
            }
            for node in reversed(self.subgraphs[i]):
                users = users_through_views(node)
                if (
                    not users
                    or any(self.subgraph_index.get(u) != j for u in users)
                    or not _may_run_later(node, overwritten_storages, j, self.subgraph_index)
                ):
                    continue
                self.subgraphs[i].remove(node)
                self.subgraphs[j].insert(0, node)
                self.subgraph_index[node] = j


def _neighbour_pairs(subgraphs: Sequence[Sequence[Node]], scalars: AbstractSet[Node]) -> list[tuple[int, int]]:
    """List the pairs of compiled subgraphs with nothing but scalars between them, the last pair first."""
    neighbours: list[tuple[int, int]] = []
    previous_index = None
    for i, subgraph in enumerate(subgraphs):
        if not subgraph or scalars >= {*subgraph}:
            continue
        if runs_alone(subgraph[0]):
            previous_index = None
            continue
        if previous_index is not None:
            neighbours.append((previous_index, i))
        previous_index = i
    return neighbours[::-1]


def _may_run_later(
    node: Node, overwritten_storages: AbstractSet[int], later: int, subgraph_index: Mapping[Node, int]
) -> bool:
    """Return whether a node may run later: it is pointwise, its operands unwritten and no larger than its result."""
    if not (is_pointwise(node) or node.target in CASTS) or len(node_stand_ins(node)) != 1:
        return False
    inputs = [resolve_alias(a) for a in node.all_input_nodes]
    if any(storage_id(x) in overwritten_storages for a in inputs for x in node_stand_ins(a)):
        return False
    ends = [
        a
        for a in inputs
        if not is_input(a) and all(subgraph_index.get(u, later) == later or u is node for u in users_through_views(a))
    ]
    return nbytes(*[x for a in ends for x in node_stand_ins(a)]) <= nbytes(*node_stand_ins(node))


def _overwrites_for(node: Node, subgraph: list[Node]) -> bool:
    """Return whether a node writes an argument that a subgraph reads."""
    if node.target is not COPY:
        return False
    target = resolve_alias(node.all_input_nodes[0])
    return any(resolve_alias(a) is target for n in subgraph for a in n.all_input_nodes)


def _overwrites_unseen(node: Node, subgraph: Sequence[Node]) -> bool:
    """Return whether a node writes memory that a subgraph reads by another argument. Inductor assumes them separate."""
    if node.target is not COPY or not _is_own_part(node.all_input_nodes[0]):
        return False
    storage = storage_id(node.meta["val"])
    readers = [
        a for n in subgraph for a in n.all_input_nodes if any(storage_id(x) == storage for x in node_stand_ins(a))
    ]
    return not all(_is_own_part(a) for a in readers)


def _is_own_part(node: Node) -> bool:
    """Return whether a node views a rank's own part of a unit (`passes.slice_of_gather`)."""
    return node.meta.get("own_part", False)


def runs_alone(node: Node) -> bool:
    """Return whether a node runs outside of segments: a collective, a move, a wait, a loop, a packing or a write."""
    moves = is_move(node) or node.target in (wait_to_host, write_part)
    return (
        moves
        or is_collective(node)
        or is_wait(node)
        or node_loop(node) is not None
        or _packs_gradients(node)
        or node.target is write_part
    )


def _packs_gradients(node: Node) -> bool:
    """Return whether a node packs a unit's gradients. Inductor would allocate the buffer at the first gradient."""
    users = users_through_views(node) if op_name(node) in ("cat", "flatten_leaves") else []
    return bool(users) and all(is_reduce_collective(u) for u in users)


def is_alias(node: Node) -> bool:
    """Return whether a node is a view, or an item of a view of several tensors, of a collective or of a loop."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and (is_view(source) or is_collective(source) or node_loop(source) is not None)
    return is_view(node)


def _block_name(node: Node) -> str:
    """Return the repeated block whose argument (a parameter, a moment) a value views; "" if there is none."""
    source = resolve_alias(node)
    return source.meta.get("block", "") if is_input(source) else ""


def resolve_alias(node: Node) -> Node:
    """Return the value that a node is an alias of, or the node itself."""
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node


def argument_parts(graph: Graph) -> set[Node]:
    """List the views that divide an argument into several parts of one shape, such as micro-batches.

    The parts become arguments of segments. If a segment contained the part's offset, the segments of different parts
    would differ. A rank's own part of a unit becomes an argument too, since it reaches beyond the leaf that it views.
    """
    slices: dict[tuple[Node, torch.Size], list[Node]] = {}
    for n in graph.nodes:
        argument = n.args[0] if op_name(n) == "slice" else None
        if isinstance(argument, Node) and is_input(argument):
            slices.setdefault((argument, n.meta["val"].shape), []).append(n)
    own_parts = {n for n in graph.nodes if _is_own_part(n)}
    return own_parts | {n for nodes in slices.values() if len(nodes) > 1 for n in nodes}
