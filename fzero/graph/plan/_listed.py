"""A scheduled graph as a plan lists it: the operations of a loop's body follow the loop, once, as one of its turns."""

from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import is_input
from fzero.graph.loops import Loop, loop_of
from fzero.graph.plan._liveness import A_TURN, Range, live_ranges, ranges_of_a_turn

__all__ = ["Listed", "listed", "listed_ranges"]


class Listed(NamedTuple):
    """An operation in a plan, and how often it runs."""

    node: Node
    times: int


def listed(graph: Graph) -> list[Listed]:
    """List a graph's operations, arguments included, and behind each loop those of its body."""
    found = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        found.append(Listed(node, 1))
        if loop := loop_of(node):
            found += [Listed(n, loop.turns) for n in loop.body.nodes if n.op == "call_function"]
    return found


def listed_ranges(graph: Graph) -> list[Range]:
    """Find when each storage is alive, by the positions of the operations that `listed` lists."""
    first: list[int] = []  # of each node, its position in the list, and that of the last operation of its body
    last: list[int] = []
    inside: list[Range] = []
    for node in graph.nodes:
        at, loop = last[-1] + 1 if last else 0, loop_of(node)
        turn = [] if loop is None else _ranges_in(loop)
        first.append(at)
        last.append(at + (0 if loop is None else _length(loop)))
        inside += [r._replace(start=at + r.start, stop=at + r.stop) for r in turn]
    last.append(last[-1] + 1)
    around = [r for r in live_ranges(graph) if r.label != A_TURN]
    return inside + [r._replace(start=first[r.start] if r.start >= 0 else -1, stop=last[r.stop]) for r in around]


def _length(loop: Loop) -> int:
    return sum(n.op == "call_function" for n in loop.body.nodes)


def _ranges_in(loop: Loop) -> list[Range]:
    """Find when each storage of a turn is alive, counted from the loop's own position."""
    before, most = sum(is_input(n) for n in loop.body.nodes) - 1, _length(loop)

    def place(i: int) -> int:
        return min(max(i - before, 0), most)

    return [r._replace(start=place(r.start), stop=place(r.stop)) for r in ranges_of_a_turn(loop)]
