"""The trail of non-finite values: which were made of which, on all ranks, and where they began."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = ["Birth", "Edge", "Found", "Made", "Reached", "Trail", "explain", "packed", "unpacked"]


class Edge(NamedTuple):
    """What a value was made of: the number of another, and whether a nan came from there."""

    number: int
    nan: bool


@dataclass(frozen=True)
class Birth:
    """Where a value was made.

    Attributes:
        order: its place in time: the collectives before it, the rank of the process, its number there.
        ranks: the ranks that made it.
        leaf: the place of the argument that it stood in; "" of what an operation made.
        operation: what made it.
        value: "nan", "inf", "-inf", or several of them.
        given: what the operation was given.
        line: the user's, as "file:line".
        code: the text of the line.
        backward: the node of a backward pass.
        meant: whether the program asked for it, as a mask of -inf.
    """

    order: tuple[int, int, int]
    ranks: tuple[int, ...]
    leaf: str = ""
    operation: str = ""
    value: str = ""
    given: str = ""
    line: str = ""
    code: str = ""
    backward: str = ""
    meant: bool = False


@dataclass
class Made:
    """A non-finite value.

    Attributes:
        nan: whether it holds nan, and not only infinities.
        parents: what it was made of.
        birth: where it was made, if it may be the first.
        meeting: if it came from other ranks, the number of the collective.
    """

    nan: bool
    parents: list[Edge]
    birth: Birth | None = None
    meeting: int | None = None


class Reached(NamedTuple):
    """A result that is not finite: its place, whether it holds nan, and what it is made of."""

    place: str
    nan: bool
    parents: list[Edge]


@dataclass
class Trail:
    """The non-finite values of a process, its results, and what it sent in each collective."""

    made: list[Made] = field(default_factory=list)
    results: list[Reached] = field(default_factory=list)
    sent: dict[int, list[Edge]] = field(default_factory=dict)


def packed(trail: Trail) -> Any:
    """Return a trail as lists and dicts, for JSON."""
    return asdict(trail) | {"results": [[r.place, r.nan, r.parents] for r in trail.results]}


def unpacked(values: Any) -> Trail:
    """Return the trail that `packed` was given."""

    def edges(found: Any) -> list[Edge]:
        return [Edge(*e) for e in found]

    def birth(b: Any) -> Birth | None:
        return b and Birth(**{**b, "order": tuple(b["order"]), "ranks": tuple(b["ranks"])})

    made = [Made(m["nan"], edges(m["parents"]), birth(m["birth"]), m["meeting"]) for m in values["made"]]
    results = [Reached(place, nan, edges(parents)) for place, nan, parents in values["results"]]
    return Trail(made, results, {int(k): edges(sent) for k, sent in values["sent"].items()})


class Found(NamedTuple):
    """Where non-finite results began: the first value, and, if it was infinite, where it became nan."""

    origin: Birth | None
    became: Birth | None


Node = tuple[int, int]  # a process, and a number there


def explain(trails: Sequence[Trail]) -> Found:
    """Find where the results of all processes began not to be finite."""
    reached = [(p, r) for p, trail in enumerate(trails) for r in trail.results]
    nans = _ends(trails, [(p, e.number) for p, r in reached if r.nan for e in r.parents if e.nan], nan=True)
    for node in _in_time(trails, nans):
        before = _ends(trails, [other for other, _ in _parents(trails, node)], nan=False)
        first = [n for n in _in_time(trails, before) if not _birth(trails, n).meant]
        if first:
            return Found(_joint(trails, first[0], before), _joint(trails, node, nans))
        return Found(_joint(trails, node, nans), None)
    infinities = _ends(trails, [(p, e.number) for p, r in reached for e in r.parents], nan=False)
    ordered = sorted(_in_time(trails, infinities), key=lambda n: _birth(trails, n).meant)
    return Found(_joint(trails, ordered[0], infinities) if ordered else None, None)


def _parents(trails: Sequence[Trail], node: Node) -> Iterator[tuple[Node, bool]]:
    """List what a value was made of: here, or in a collective on all ranks."""
    process, number = node
    made = trails[process].made[number]
    for e in made.parents:
        yield (process, e.number), e.nan
    if made.meeting is not None:
        for other, trail in enumerate(trails):
            for e in trail.sent.get(made.meeting, ()):
                yield (other, e.number), e.nan


def _ends(trails: Sequence[Trail], start: Iterable[Node], nan: bool) -> set[Node]:
    """Walk back from values, along nan only or along all, to those that were made of no others."""
    stack, seen, ends = list(start), set[Node](), set[Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        before = [other for other, holds in _parents(trails, node) if holds or not nan]
        stack += before
        if not before and trails[node[0]].made[node[1]].birth is not None:
            ends.add(node)
    return ends


def _birth(trails: Sequence[Trail], node: Node) -> Birth:
    found = trails[node[0]].made[node[1]].birth
    assert found is not None
    return found


def _in_time(trails: Sequence[Trail], nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda n: _birth(trails, n).order)


def _joint(trails: Sequence[Trail], node: Node, nodes: Iterable[Node]) -> Birth:
    """Return where a value was made, with all ranks that made one there."""
    found, others = _birth(trails, node), [_birth(trails, n) for n in nodes]

    def where(b: Birth) -> Any:
        return b.leaf, b.operation, b.line, b.backward

    ranks = sorted({r for b in others if where(b) == where(found) for r in b.ranks})
    return Birth(**{**asdict(found), "ranks": tuple(ranks)})
