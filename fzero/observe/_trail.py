"""Follow non-finite values through a run: which were made of which, on all ranks, and where they began."""

import linecache
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from fzero._torch.watched import Memory, WatchedOperation, is_real, memory_of, place_now
from fzero.axes import bound

__all__ = [
    "Birth",
    "Edge",
    "Found",
    "Kind",
    "Made",
    "Reached",
    "Trail",
    "Watch",
    "explain",
    "kind_of",
    "packed",
    "unpacked",
]

# The trail of non-finite values: which were made of which, on all ranks, and where they began.


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


# The watch: it looks at the results of each operation, and follows those that are not finite by their memory.


_OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")  # which do not read what they write into
_MESSAGES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::")


class Kind(NamedTuple):
    """What a tensor holds that is not finite."""

    nan: bool
    above: bool
    below: bool

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        return " and ".join([name for name, there in zip(("nan", "inf", "-inf"), self, strict=True) if there])


_FINITE = Kind(False, False, False)


def kind_of(x: torch.Tensor) -> Kind:
    """Return what a tensor holds that is not finite."""
    if not is_real(x) or not (x.is_floating_point() or x.is_complex()):
        return _FINITE
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x.float() if x.itemsize == 1 else x
    if bool(torch.isfinite(x).all()):
        return _FINITE
    return Kind(bool(x.isnan().any()), bool(x.isposinf().any()), bool(x.isneginf().any()))


class _Region(NamedTuple):
    """Memory that a non-finite value lies in; if it is only `expected` there, what makes it one when it is read."""

    memory: Memory
    number: int
    expected: Callable[[bool], int] | None = None


class Watch:
    """Follows what is not finite through the operations of one process.

    Attributes:
        trail: what was found.
        rank: of the process; None where ranks are threads.
        size: the number of ranks.
        meetings: returns how many collectives have run.
    """

    def __init__(self, rank: int | None, size: int, meetings: Callable[[], int]) -> None:
        self.trail = Trail()
        self.rank, self.size, self.meetings = rank, size, meetings
        self._regions: dict[int, list[_Region]] = {}

    # ------------------------------------------------------------ what the watch is shown

    def before(self, operation: WatchedOperation) -> list[Edge]:
        """Return what those values were made of that the operation may write over."""
        return [] if operation.name in _OVERWRITE else self._edges(operation.written, operation)

    def after(self, operation: WatchedOperation, known: list[Edge], results: Sequence[torch.Tensor]) -> None:
        """Look at what an operation has made."""
        name = operation.name
        if name.startswith(_MESSAGES):
            if not name.startswith("_c10d_functional::wait_tensor"):
                self._sent(operation, results)
            return
        if name == "aten::equal" and self.size > 1 and not bound():
            # ranks that have ended: the first's value stands for all as a result, so it is made of the others', too
            for e in self._edges(operation.given[1:], operation):
                self._remember(operation.given[:1], e.number)
            return
        storages = {memory_of(x).storage for x in operation.given if is_real(x)}
        new = [x for x in results if is_real(x) and memory_of(x).storage not in storages]
        if "empty" in name:
            self._expect(new, self._read_too_early(operation))
            return
        if "lift_fresh" in name:  # a constant: torch.tensor(-math.inf)
            new = [x for x in results if is_real(x)]
        self._look(operation, known, new)

    def argument(self, x: torch.Tensor, leaf: str, ranks: tuple[int, ...]) -> None:
        """Note an argument, or a rank's part of one, that is not finite."""
        kind = kind_of(x)
        if kind:
            # a mask in the batch is meant, so it is named only if nothing else is found
            birth = Birth(self._order(), ranks, leaf, value=str(kind), meant=not kind.nan and not kind.above)
            self._remember([x], self._made(kind.nan, [], birth))

    def result(self, x: torch.Tensor, place: str) -> None:
        """Note a result if it is not finite."""
        kind = kind_of(x)
        if kind:
            found = self._edges_of(x, kind, WatchedOperation("", [x], [], []))
            self.trail.results.append(Reached(place, kind.nan, found))

    # ------------------------------------------------------------ operations

    def _look(self, operation: WatchedOperation, known: list[Edge], new: Sequence[torch.Tensor]) -> None:
        found = [(x, kind_of(x)) for x in (*new, *operation.written)]
        kind = Kind(*[any(k[i] for _, k in found) for i in range(3)])
        written = {id(x) for x in operation.written}
        parents = known + self._edges([x for x in operation.given if id(x) not in written], operation) if kind else []
        for x, _ in found:
            self._forget(x)
        if not kind:
            return
        parents = list(dict.fromkeys(parents))
        first = not parents or (kind.nan and not any(e.nan for e in parents))
        number = self._made(kind.nan, parents, self._birth(operation, kind) if first else None)
        self._remember([x for x, k in found if k], number)

    def _sent(self, operation: WatchedOperation, results: Sequence[torch.Tensor]) -> None:
        """Note what goes to other ranks, and that something comes: when, only who waits for it knows."""
        meeting = self.meetings()
        receives = "recv" in operation.name
        if not receives:
            self.trail.sent.setdefault(meeting, []).extend(self._edges(operation.given, operation))
        birth = self._birth(operation, _FINITE, given=False)

        def received(nan: bool) -> int:
            return self._made(nan, [], birth, meeting)

        self._expect([*results, *operation.written, *(operation.given if receives else ())], received)

    def _read_too_early(self, operation: WatchedOperation) -> Callable[[bool], int]:
        operation, birth = WatchedOperation(operation.name, [], [], []), list[Birth]()  # tensors would be kept alive

        def made(nan: bool) -> int:
            birth[:] = birth or [self._birth(operation, _FINITE, given=False)]
            return self._made(nan, [], birth[0])

        return made

    # ------------------------------------------------------------ memory

    def _remember(self, xs: Sequence[torch.Tensor], number: int) -> None:
        for x in xs:
            memory = memory_of(x)
            self._regions.setdefault(memory.storage, []).append(_Region(memory, number))

    def _expect(self, xs: Sequence[torch.Tensor], made: Callable[[bool], int]) -> None:
        for x in xs:
            if is_real(x) and (x.is_floating_point() or x.is_complex()):
                memory = memory_of(x)
                self._regions.setdefault(memory.storage, []).append(_Region(memory, -1, made))

    def _forget(self, x: torch.Tensor) -> None:
        """Forget what was in memory that is written over."""
        if is_real(x) and x.is_contiguous():
            memory = memory_of(x)
            self._keep(memory.storage, lambda m: m.first < memory.first or m.stop > memory.stop)

    def _keep(self, storage: int, kept: Callable[[Memory], bool]) -> list[_Region]:
        left = [r for r in self._regions.get(storage, ()) if not r.memory.gone and kept(r.memory)]
        if left:
            self._regions[storage] = left
        else:
            self._regions.pop(storage, None)
        return left

    def _edges(self, xs: Sequence[torch.Tensor], operation: WatchedOperation) -> list[Edge]:
        found = [(x, kind_of(x)) for x in xs]
        return [e for x, kind in found if kind for e in self._edges_of(x, kind, operation)]

    def _edges_of(self, x: torch.Tensor, kind: Kind, operation: WatchedOperation) -> list[Edge]:
        """Return what a tensor that is not finite was made of."""
        memory = memory_of(x)
        here = [
            r
            for r in self._keep(memory.storage, lambda m: True)
            if r.memory.first < memory.stop and r.memory.stop > memory.first
        ]
        numbers = [r.number for r in here if r.expected is None]
        if not numbers:
            expected = next((r.expected for r in reversed(here) if r.expected is not None), None)
            numbers = [self._captured(kind, operation) if expected is None else expected(kind.nan)]
            self._remember([x], numbers[0])
        return [Edge(n, kind.nan and self.trail.made[n].nan) for n in numbers]

    # ------------------------------------------------------------ births

    def _made(self, nan: bool, parents: list[Edge], birth: Birth | None, meeting: int | None = None) -> int:
        self.trail.made.append(Made(nan, parents, birth, meeting))
        return len(self.trail.made) - 1

    def _captured(self, kind: Kind, operation: WatchedOperation) -> int:
        """Note a tensor that was there before, and is no argument: one that a function captured."""
        birth = self._birth(operation, kind, given=False)
        leaf = "a tensor that the step captured, or keeps as a constant"
        meant = not kind.nan and not kind.above
        return self._made(kind.nan, [], Birth(**{**vars(birth), "leaf": leaf, "meant": meant}))

    def _order(self) -> tuple[int, int, int]:
        return self.meetings() if self.rank is not None else 0, self.rank or 0, len(self.trail.made)

    def _birth(self, operation: WatchedOperation, kind: Kind, given: bool = True) -> Birth:
        place = place_now()
        file, _, number = place.line.rpartition(":")
        name = operation.name.split("::")[-1].strip("_")
        return Birth(
            order=self._order(),
            ranks=tuple(range(self.size)) if place.collective else self._here(),
            operation=f"{name}, in a collective" if place.collective else name,
            value=str(kind),
            given=_shown(operation) if given else "",
            line=place.line,
            code=linecache.getline(file, int(number)).strip() if number else "",
            backward=place.backward,
            meant=any(not math.isfinite(x) for x in operation.numbers) or "lift_fresh" in operation.name,
        )

    def _here(self) -> tuple[int, ...]:
        """Return the rank that runs now."""
        if self.rank is not None:
            return (self.rank,)
        place, axes = 0, bound()
        for axis in axes:
            place = place * axis.size + axis.rank
        return (place,) if axes or self.size == 1 else ()


def _shown(operation: WatchedOperation) -> str:
    """Show what an operation was given: dtypes, shapes, ranges of finite values, and what is not finite."""
    return ", ".join([_range(x) for x in operation.given[:3] if is_real(x)])


def _range(x: torch.Tensor) -> str:
    shape = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    if not x.is_floating_point() or x.itemsize == 1:
        return shape
    finite: Any = x.detach()[torch.isfinite(x.detach())]
    held = [f"{finite.min().item():.4g} to {finite.max().item():.4g}"] if finite.numel() else []
    held += [str(kind)] if (kind := kind_of(x)) else []
    return f"{shape} of {' and '.join(held)}"
