"""Agreement between ranks: all trace the same step and keep the same schedule, or all raise."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._notice import see
from fzero._torch import line_of
from fzero.graph._choose import Candidate
from fzero.graph.ir import is_collective, shown
from fzero.graph.loops import graphs_in, loop_of
from fzero.graph.ops import differs_by_rank
from fzero.ranks import texts
from fzero.ranks.mesh import Mesh
from fzero.ranks.texts import MissingRank, gather_texts

__all__ = ["agree", "agreed", "order", "signatures"]


def signatures(graph: Graph, groups: Mapping[str, str] | None = None) -> list[str]:
    """Describe what a graph computes and communicates, node by node.

    Movement of data and constants are left out: to cut its own shard out of the parameters, and to pad it, is what each
    rank does differently. So are the names of process groups, of which `groups` tells the axis.
    """
    found = []
    for n in graph.nodes:
        if loop := loop_of(n):
            found += [f"{loop.turns} times", *signatures(loop.body, groups)]
        elif n.op == "call_function" and not differs_by_rank(n):
            found.append(_signature(n, groups or {}))
    return found


def _signature(node: Node, groups: Mapping[str, str]) -> str:
    def show(a: Node) -> Any:
        return _Shown(shown(a))

    args: Any = map_arg((node.args, node.kwargs), show)  # pyright: ignore
    if is_collective(node):
        args = ([groups.get(a, a) if isinstance(a, str) else a for a in args[0]], args[1])
    return f"{node.target}{args} at {line_of(node)}"


def order(graph: Graph) -> str:
    """Return what tells in which order a scheduled graph starts its collectives, for ranks that traced the same."""
    names = [n.name for part in graphs_in(graph) for n in part.nodes if is_collective(n)]
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


class _Shown(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def agreed(graph: Graph, asked: str, found: list[Candidate], mesh: Mesh | None, name: str) -> list[Candidate]:
    """Compare a trace with the other ranks', and rate each schedule by the rank that it suits least.

    Args:
        graph: the traced graph.
        asked: what the user asked of jit.
        found: this rank's schedules.
        mesh: of the step; only the ranks of a distributed one need to agree.
        name: of the step.

    Returns:
        The schedules that all ranks have, with the largest of all ranks' peaks and seconds.

    Raises:
        RuntimeError: as `agree` does.
    """
    if mesh is None or not mesh.distributed:
        return found
    mine = {f"{c.settings} {order(c.graph)}": c for c in found}
    said = {key: (c.peak_bytes, c.seconds) for key, c in mine.items()}
    largest = agree(graph, asked, said, mesh, name)
    return [mine[key]._replace(peak_bytes=int(p), seconds=s) for key, (p, s) in largest.items()]


def agree(
    graph: Graph, asked: str, offers: Mapping[str, Sequence[float]], mesh: Mesh, name: str
) -> dict[str, list[float]]:
    """Compare a traced graph with the other ranks', and their schedules.

    That goes through the store of the process group (`gather_texts`): the other ranks may run, and not trace.

    Args:
        graph: the traced graph.
        asked: what the user asked of jit.
        offers: numbers of each candidate, by its settings and order. Ranks may offer different ones: peaks differ by
            rank.
        mesh: a distributed mesh.
        name: of the step.

    Returns:
        The largest of all ranks' numbers, place by place, of the candidates that all ranks offer.

    Raises:
        RuntimeError: on all ranks, if the graphs differ, naming the first node that does; if a rank does not trace; or
            if they have no candidate in common.
    """
    mine = [asked, *signatures(graph, mesh.groups())]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    said = _everyones([digest, offers], mesh, name)
    if any(digest != said[0][0] for digest, _ in said):
        everyones = _everyones(mine, mesh, name)
        _raise_first_difference(everyones, name)
    everyones = [theirs for _, theirs in said]
    common = [key for key in offers if all(key in theirs for theirs in everyones)]
    if not common:
        raise RuntimeError(
            f"fzero.jit: {name}: every schedule has the collectives in another order on each rank. Please report it; "
            "prefetch=0 and in_flight=0 may help"
        )
    return {key: [max(xs) for xs in zip(*[theirs[key] for theirs in everyones], strict=True)] for key in common}


def _everyones(mine: list[Any], mesh: Mesh, name: str) -> list[Any]:
    """Give what JSON can hold to all ranks, and get all ranks', in rank order."""
    try:
        return [json.loads(text) for text in gather_texts(json.dumps(mine), mesh, f"jit/{name}")]
    except MissingRank as error:
        raise RuntimeError(
            f"fzero.jit: rank {mesh.rank} traces {name}, and rank {error.rank} did not within {texts.SECONDS:g} s: "
            "its arguments kept their shapes, or it does not call the step. Ranks make the same calls with equal "
            f"shapes{see('a-hang')}"
        ) from error


def _raise_first_difference(everyones: list[list[str]], name: str) -> None:
    for rank, lines in enumerate(everyones):
        for i, (a, b) in enumerate(zip([*everyones[0], "the end"], [*lines, "the end"], strict=False)):
            if a != b:
                raise RuntimeError(
                    f"fzero.jit: {name} is not the same step on all ranks. Operation {i} is on rank 0 {a}, and on rank "
                    f"{rank} {b}. Ranks trace the same code with the same shapes; what differs by rank is data "
                    f"(mesh.local, axis_index), never a branch or a number in Python{see('a-hang')}"
                )
