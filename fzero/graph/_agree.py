"""Agreement between ranks: all trace the same step and keep the same schedule, or all raise."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._notice import see
from fzero._torch import line_of
from fzero.graph._candidates import Candidate
from fzero.graph._ir import is_collective, is_wait, shown, values
from fzero.graph._ops import differs_by_rank
from fzero.graph.loop._scan import loop_of, shared_graphs
from fzero.ranks import Mesh, MissingRank, gather_texts

__all__ = ["agree", "agreed", "of_all_ranks", "order", "signatures"]


def signatures(graph: Graph, groups: Mapping[str, str] | None = None) -> list[str]:
    """Describe what a graph computes and communicates, node by node.

    Movement of data and constants are left out: to cut its own shard out of the parameters, and to pad it, is what each
    rank does differently. So are the names of process groups, of which `groups` tells the axis.
    """
    found = []
    for n in graph.nodes:
        loop = loop_of(n)
        if loop and loop.track:  # what its ranks run differs: see `of_own_stages`
            found.append(f"a pipeline of {loop.turns} micro-batches by {loop.track.schedule.rows}")
        elif loop:
            found += [f"{loop.turns} times", *signatures(loop.body, groups)]
        elif n.op == "call_function" and not differs_by_rank(n) and not is_wait(n):
            found.append(_signature(n, groups or {}))
    return found


def _signature(node: Node, groups: Mapping[str, str]) -> str:
    def show(a: Node) -> Any:
        return _Shown(shown(a))

    args: Any = map_arg((node.args, node.kwargs), show)  # pyright: ignore
    if str(node.target).startswith("_c10d_functional.all_to_all_single"):
        args = (_permuted(*node.args), {})
    if is_collective(node):
        args = ([groups.get(a, a) if isinstance(a, str) else a for a in args[0]], args[1])
    return f"{node.target}{args} at {line_of(node)}"


def _permuted(x: Any, received: Any, sent: Any, group: Any) -> list[Any]:
    """Describe an all_to_all: in a permutation of ranks each has its own part, and may send or receive nothing."""
    if len({*received, *sent}) <= 1 and sum(sent):
        return [_Shown(shown(x)), received, sent, group]
    return [_Shown(" ".join([f"{str(v.dtype).removeprefix('torch.')}{list(v.shape[1:])}" for v in values(x)])), group]


def order(graph: Graph) -> str:
    """Return what tells in which order a scheduled graph starts its collectives, for ranks that traced the same.

    A pipeline's loop is one of them: its ranks wait for one another there.
    """
    names = [n.name for n in graph.nodes if is_collective(n) or _is_pipeline(n)]
    names += [n.name for part in list(shared_graphs(graph))[1:] for n in part.nodes if is_collective(n)]
    return _hashed(names)


def of_own_stages(graph: Graph, groups: Mapping[str, str] | None = None) -> list[str]:
    """Describe what this rank's stages of pipelines compute, which other ranks along the pipeline's axis do not."""
    return [line for body in _stages(graph) for line in signatures(body, groups)]


def order_of_own_stages(graph: Graph) -> str:
    """Return what tells in which order this rank's stages start their collectives."""
    return _hashed([n.name for body in _stages(graph) for n in body.nodes if is_collective(n)])


def place_in_pipelines(graph: Graph) -> str:
    """Return what tells which ranks have the same stages: the places along the axes of pipelines."""
    loops = [loop for n in graph.nodes if (loop := loop_of(n)) and loop.track]
    return " ".join([f"{loop.track.binding.axis}={loop.track.binding.rank}" for loop in loops if loop.track])


def _is_pipeline(node: Node) -> bool:
    loop = loop_of(node)
    return loop is not None and loop.track is not None


def _stages(graph: Graph) -> list[Graph]:
    """List the bodies of pipelines' loops."""
    return [loop.body for n in graph.nodes if (loop := loop_of(n)) and loop.track]


def _hashed(names: Sequence[str]) -> str:
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
    said = {key: (c.peak_bytes, c.seconds, order_of_own_stages(c.graph)) for key, c in mine.items()}
    largest = agree(graph, asked, said, mesh, name)
    return [mine[key]._replace(peak_bytes=int(p), seconds=s) for key, (p, s) in largest.items()]


def agree(
    graph: Graph, asked: str, offers: Mapping[str, tuple[float, float, str]], mesh: Mesh, name: str
) -> dict[str, list[float]]:
    """Compare a traced graph with the other ranks', and their schedules.

    That goes through the store of the process group (`gather_texts`): the other ranks may run, and not trace.

    Args:
        graph: the traced graph.
        asked: what the user asked of jit.
        offers: of each candidate its peak, its seconds, and the order of its own stages' collectives, by its settings
            and order. Ranks may offer different ones: peaks differ by rank.
        mesh: a distributed mesh.
        name: of the step.

    Returns:
        The largest of all ranks' peaks and seconds, of the candidates that all ranks offer.

    Raises:
        RuntimeError: on all ranks, if the graphs differ, naming the first node that does; if a rank does not trace; or
            if they have no candidate in common.
    """
    groups, place = mesh.groups(), place_in_pipelines(graph)
    mine = {"": [asked, *signatures(graph, groups)], place or "no pipeline": of_own_stages(graph, groups)}
    digests = {part: _hashed(lines) for part, lines in mine.items()}
    said = of_all_ranks([digests, offers], mesh, name)
    known: dict[str, str] = {}
    if any(known.setdefault(part, digest) != digest for theirs, _ in said for part, digest in theirs.items()):
        _raise_first_difference(of_all_ranks(mine, mesh, name), name)
    everyones = [theirs for _, theirs in said]
    common = [key for key in offers if all(key in theirs for theirs in everyones) and _is_agreed(key, said)]
    if not common:
        raise RuntimeError(
            f"fzero.jit: {name}: every schedule has the collectives in another order on each rank. Please report it; "
            "prefetch=0 and in_flight=0 may help"
        )
    return {key: [max([theirs[key][i] for theirs in everyones]) for i in (0, 1)] for key in common}


def _is_agreed(key: str, said: Sequence[Any]) -> bool:
    """Return whether ranks that have the same stages start the collectives of these in one order."""
    orders: dict[str, str] = {}
    return all(orders.setdefault(max(parts), offers[key][2]) == offers[key][2] for parts, offers in said)


def of_all_ranks(mine: Any, mesh: Mesh, name: str) -> list[Any]:
    """Give what JSON can hold to all ranks, and get all ranks', in rank order."""
    try:
        return [json.loads(text) for text in gather_texts(json.dumps(mine), mesh, f"jit/{name}")]
    except MissingRank as error:
        raise RuntimeError(
            f"fzero.jit: rank {mesh.rank} traces {name}, and rank {error.rank} did not within {error.seconds:g} s: "
            "its arguments kept their shapes, or it does not call the step. Ranks make the same calls with equal "
            f"shapes{see('a-hang')}"
        ) from error


def _raise_first_difference(everyones: list[dict[str, list[str]]], name: str) -> None:
    """Raise for the first operation that differs between ranks that should run the same."""
    first: dict[str, tuple[int, list[str]]] = {}  # of each part, a rank that has it, and its lines
    for rank, parts in enumerate(everyones):
        for part, lines in parts.items():
            other, theirs = first.setdefault(part, (rank, lines))
            for i, (a, b) in enumerate(zip([*theirs, "the end"], [*lines, "the end"], strict=False)):
                if a != b:
                    where = f" of its stages ({part})" if part else ""
                    raise RuntimeError(
                        f"fzero.jit: {name} is not the same step on all ranks. Operation {i}{where} is on rank {other} "
                        f"{a}, and on rank {rank} {b}. Ranks trace the same code with the same shapes; what differs by "
                        f"rank is data (mesh.local, axis_index), never a branch or a number in Python{see('a-hang')}"
                    )
