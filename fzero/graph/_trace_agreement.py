"""Agreement between ranks: all trace the same step and keep the same schedule, or all raise."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._notice import trouble_link
from fzero._torch import node_line
from fzero.graph._candidates import Candidate
from fzero.graph.ir import differs_by_rank, dtypes_and_shapes, is_collective, is_wait, node_stand_ins
from fzero.graph.loop import node_loop, shared_graphs
from fzero.ranks import Mesh, MissingRankError, gather_texts

__all__ = ["common_schedules", "gather_values"]


def _node_signatures(graph: Graph, groups: Mapping[str, str] | None = None) -> list[str]:
    """Describe the operations and collectives of a graph, node by node.

    Data movement and constants are left out, since each rank slices and pads a shard of its own. The name of a process
    group is replaced by its axes, which `groups` maps it to.
    """
    lines = []
    for n in graph.nodes:
        loop = node_loop(n)
        if loop and loop.rank_schedule:  # its ranks run different stages: see `_stage_signatures`
            lines.append(f"a pipeline of {loop.iterations} micro-batches by {loop.rank_schedule.schedule.rows}")
        elif loop:
            lines += [f"{loop.iterations} times", *_node_signatures(loop.body, groups)]
        elif n.op == "call_function" and not differs_by_rank(n) and not is_wait(n):
            lines.append(_node_signature(n, groups or {}))
    return lines


_DEVICE = re.compile(r"device\(type=('\w+'), index=\d+\)")  # a rank of a host has the GPU of its own number


def _node_signature(node: Node, groups: Mapping[str, str]) -> str:
    def show(a: Node) -> Any:
        return _PlainRepr(dtypes_and_shapes(a))

    args: Any = map_arg((node.args, node.kwargs), show)  # pyright: ignore
    if str(node.target).startswith("_c10d_functional.all_to_all_single"):
        args = (_describe_exchange(*node.args), {})
    if is_collective(node):
        args = ([groups.get(a, a) if isinstance(a, str) else a for a in args[0]], args[1])
    return _DEVICE.sub(r"\1", f"{node.target}{args} at {node_line(node)}")


def _describe_exchange(x: Any, output_splits: Any, input_splits: Any, group: Any) -> list[Any]:
    """Describe an all_to_all. Sizes that differ by rank are left out: ranks that permute values may send nothing."""
    if len({*output_splits, *input_splits}) <= 1 and sum(input_splits):
        return [_PlainRepr(dtypes_and_shapes(x)), output_splits, input_splits, group]
    return [
        _PlainRepr(" ".join([f"{str(v.dtype).removeprefix('torch.')}{list(v.shape[1:])}" for v in node_stand_ins(x)])),
        group,
    ]


def _collective_order_digest(graph: Graph) -> str:
    """Return a digest of the order in which a scheduled graph starts its collectives.

    Ranks that traced the same graph compare it. A pipeline's loop counts as a collective: its ranks wait for one
    another there.
    """
    names = [n.name for n in graph.nodes if is_collective(n) or _is_pipeline(n)]
    names += [n.name for part in list(shared_graphs(graph))[1:] for n in part.nodes if is_collective(n)]
    return _hash_names(names)


def _stage_signatures(graph: Graph, groups: Mapping[str, str] | None = None) -> list[str]:
    """Describe the work of this rank's pipeline stages. Other ranks along the pipeline's axis run other stages."""
    return [line for body in _pipeline_bodies(graph) for line in _node_signatures(body, groups)]


def _stage_order_digest(graph: Graph) -> str:
    """Return a digest of the order in which this rank's stages start their collectives."""
    return _hash_names([n.name for body in _pipeline_bodies(graph) for n in body.nodes if is_collective(n)])


def _pipeline_coordinates(graph: Graph) -> str:
    """Return this rank's coordinates along the axes of pipelines: ranks with equal coordinates have the same stages."""
    loops = [loop for n in graph.nodes if (loop := node_loop(n)) and loop.rank_schedule]
    bindings = [loop.rank_schedule.binding for loop in loops if loop.rank_schedule]
    return " ".join([f"{b.axis}={b.rank}" for b in bindings])


def _is_pipeline(node: Node) -> bool:
    loop = node_loop(node)
    return loop is not None and loop.rank_schedule is not None


def _pipeline_bodies(graph: Graph) -> list[Graph]:
    """List the loop bodies of pipelines."""
    return [loop.body for n in graph.nodes if (loop := node_loop(n)) and loop.rank_schedule]


def _hash_names(names: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


class _PlainRepr(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def common_schedules(
    graph: Graph, options_text: str, schedules: list[Candidate], mesh: Mesh | None, name: str
) -> list[Candidate]:
    """Compare a trace with those of the other ranks, and rate each schedule by its worst rank.

    Args:
        graph: the traced graph.
        options_text: the options of `fzero.jit`, as text.
        schedules: this rank's candidates.
        mesh: the step's mesh; only the ranks of a distributed mesh need to agree.
        name: the step's name.

    Returns:
        The schedules that all ranks have, each with the largest peak and the most seconds of any rank.

    Raises:
        RuntimeError: as `_compare_ranks` does.
    """
    if mesh is None or not mesh.distributed:
        return schedules
    schedule_of = {f"{c.settings} {_collective_order_digest(c.graph)}": c for c in schedules}
    ratings = {key: (c.peak_bytes, c.seconds, _stage_order_digest(c.graph)) for key, c in schedule_of.items()}
    largest = _compare_ranks(graph, options_text, ratings, mesh, name)
    return [schedule_of[key]._replace(peak_bytes=int(p), seconds=s) for key, (p, s) in largest.items()]


def _compare_ranks(
    graph: Graph, options_text: str, ratings: Mapping[str, tuple[float, float, str]], mesh: Mesh, name: str
) -> dict[str, list[float]]:
    """Compare a traced graph and its schedules with those of the other ranks.

    The ranks communicate through the process group's store (`gather_texts`), since another rank may run, not trace.

    Args:
        graph: the traced graph.
        options_text: the options of `fzero.jit`, as text.
        ratings: each candidate's peak, seconds and order of its own stages' collectives, by its settings and order.
            Ranks may have different candidates, since peaks differ by rank.
        mesh: a distributed mesh.
        name: the step's name.

    Returns:
        For each candidate that all ranks have, the largest peak and the most seconds of any rank.

    Raises:
        RuntimeError: on all ranks, if the graphs differ, if a rank does not trace, or if the ranks have no candidate
            in common. The message names the first node that differs.
    """
    groups = mesh.groups()
    stages = _pipeline_coordinates(graph) or "no pipeline"
    descriptions = {"": [options_text, *_node_signatures(graph, groups)], stages: _stage_signatures(graph, groups)}
    digests = {part: _hash_names(lines) for part, lines in descriptions.items()}
    replies = gather_values([digests, ratings], mesh, name)
    first: dict[str, str] = {}
    if any(first.setdefault(part, digest) != digest for digests, _ in replies for part, digest in digests.items()):
        _raise_first_difference(gather_values(descriptions, mesh, name), name)
    ratings_by_rank = [rank_ratings for _, rank_ratings in replies]
    common = [key for key in ratings if all(key in x for x in ratings_by_rank) and _is_agreed(key, replies)]
    if not common:
        raise RuntimeError(
            f"fzero.jit: {name}: no schedule starts its collectives in the same order on all ranks. Please report "
            "this; prefetch=0 and in_flight=0 may help"
        )
    return {key: [max([x[key][i] for x in ratings_by_rank]) for i in (0, 1)] for key in common}


def _is_agreed(key: str, replies: Sequence[Any]) -> bool:
    """Return whether ranks with the same stages start the collectives of these stages in the same order."""
    orders: dict[str, str] = {}
    return all(orders.setdefault(max(parts), ratings[key][2]) == ratings[key][2] for parts, ratings in replies)


def gather_values(value: Any, mesh: Mesh, name: str) -> list[Any]:
    """Send a JSON value to all ranks, and return the values of all ranks in rank order."""
    try:
        return [json.loads(text) for text in gather_texts(json.dumps(value), mesh, f"jit/{name}")]
    except MissingRankError as error:
        raise RuntimeError(
            f"fzero.jit: rank {mesh.rank} traces {name}, but rank {error.rank} did not within {error.seconds:g} s: "
            "its arguments kept their shapes, or it does not call the step. All ranks must make the same calls with "
            f"equal shapes{trouble_link('a-hang')}"
        ) from error


def _raise_first_difference(descriptions: list[dict[str, list[str]]], name: str) -> None:
    """Raise for the first operation that differs between ranks that should run the same."""
    first_by_part: dict[
        str, tuple[int, list[str]]
    ] = {}  # for each part, a rank that has it, and the lines of that rank
    for rank, parts in enumerate(descriptions):
        for part, lines in parts.items():
            first_rank, first_lines = first_by_part.setdefault(part, (rank, lines))
            for i, (a, b) in enumerate(zip([*first_lines, "the end"], [*lines, "the end"], strict=False)):
                if a != b:
                    stages = f" of its stages ({part})" if part else ""
                    raise RuntimeError(
                        f"fzero.jit: {name} is not the same step on all ranks. Operation {i}{stages} is {a} on "
                        f"rank {first_rank}, but {b} on rank {rank}. All ranks must trace the same code with the same "
                        "shapes. Only data may differ by rank (mesh.local, axis_index), never a branch or a number in "
                        "Python"
                        f"{trouble_link('a-hang')}"
                    )
