"""Planning the configurations of a space: which need no plan, and how the others are planned, on several processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import NamedTuple

from fzero.graph.plan._plan import Settings
from fzero.tuning._kept import Kept
from fzero.tuning._machines import Machine
from fzero.tuning._planned import MakeStep, planned_at
from fzero.tuning._row import Digest, Row, deeper, digest_of, row_of
from fzero.tuning._space import Configuration, Space

__all__ = ["Measure", "Skipped", "Start", "in_order", "refined", "rows_of"]

# Numbers of blocks from which more are told. With fewer, what starts ahead has not all begun. They are odd for odd
# depths, and even for even ones, since every second block may be of another kind.
SHALLOW = {1: (3, 5), 0: (4, 6)}
IN_FULL = 3  # how many of the fastest that fit are planned as they are

Start = Callable[[Configuration | Row], Future[Row]]


class Skipped(NamedTuple):
    """A configuration that was not planned, since it holds no less than one that does not fit.

    Attributes:
        config: that was not planned.
        as_little_as: one that was, whose parameters, state and activations alone are too much.
    """

    config: Configuration
    as_little_as: Configuration


@dataclass(frozen=True)
class Measure:
    """Plans one configuration.

    Attributes:
        make_step: the user's function.
        machine: to plan for.
        kept: the rows that were planned before, if they are kept.
    """

    make_step: MakeStep
    machine: Machine
    kept: Kept | None = None

    def __call__(self, asked: Configuration | Row) -> Row:
        """Plan a configuration: as it is, or by two of fewer blocks. Of a row, plan it as it is by its schedule."""
        known = None if self.kept is None else self.kept.read(asked)
        if known is not None:
            return known
        row = self._in_full(asked) if isinstance(asked, Row) else self._row(asked)
        if self.kept is not None:
            self.kept.write(asked, row)
        return row

    def _row(self, config: Configuration) -> Row:
        depth = config.depth
        found = None if depth is None or depth <= SHALLOW[depth % 2][1] else self._by_two(config, depth)
        in_full = found is None
        return row_of(config, self._planned(config) if found is None else found, in_full)

    def _in_full(self, row: Row) -> Row:
        return row_of(row.config, self._planned(row.config, row.settings), in_full=True)

    def _by_two(self, config: Configuration, depth: int) -> Digest | None:
        """Extrapolate all schedules, and say what that one holds which fzero.jit would keep; None if there is none."""
        few, more = ((n, self._planned(replace(config, depth=n))) for n in SHALLOW[depth % 2])
        found = deeper(few, more, depth)
        if not found.ways:
            return None
        kept = found.fastest
        if few[1].settings == more[1].settings == kept:
            return found
        few, more = ((n, self._planned(replace(config, depth=n), dict(kept))) for n in SHALLOW[depth % 2])
        return found if (found := deeper(few, more, depth)).ways else None

    def _planned(self, config: Configuration, settings: Settings | None = None) -> Digest:
        try:
            device = self.machine.as_device()
            return digest_of(planned_at(self.make_step, config, config.ranks, device, settings))
        except Exception as error:
            error.add_note(f"fzero.tune: while it planned {config}")
            raise


def rows_of(space: Space, start: Start, workers: int, budget: float) -> Iterator[Row | Skipped]:
    """Plan a space, those that hold least first. What holds no less than one that does not fit is skipped.

    A free process begins with what may come to be skipped, rather than wait; its row is then left out. So what is
    yielded does not depend on the number of processes. Its order does.

    Args:
        space: of configurations.
        start: begins to plan one.
        workers: how many are planned at once.
        budget: bytes that a rank may hold.
    """
    order = [*space]
    leaner = {c: [x for x in order[:i] if c.holds_no_less_than(x)] for i, c in enumerate(order)}
    too_large: dict[Configuration, bool] = {}  # of those that are decided
    started: dict[Configuration, Future[Row]] = {}
    while len(too_large) < len(order):
        left = [c for c in order if c not in too_large]
        for c in left:
            known = next((x for x in leaner[c] if too_large.get(x)), None)
            if known is not None:
                too_large[c] = False  # what holds no less than this one holds no less than that
                yield Skipped(c, known)
            elif c in started and started[c].done() and all(x in too_large for x in leaner[c]):
                row = started[c].result()
                too_large[c] = row.at_least > budget
                yield row
        left = [c for c in left if c not in too_large]
        fresh = [c for c in left if c not in started]
        running = [f for f in started.values() if not f.done()]
        for c in sorted(fresh, key=lambda c: not all(x in too_large for x in leaner[c]))[: workers - len(running)]:
            started[c] = start(c)
            running.append(started[c])
        wait(running, return_when=FIRST_COMPLETED)


def in_order(space: Space, found: Iterable[Row | Skipped], budget: float) -> tuple[list[Row], list[Skipped]]:
    """Put rows, and what was skipped, in the order of the space, each of these beside the first that says why."""
    place = {c: i for i, c in enumerate(space)}
    parts = sorted(found, key=lambda x: place[x.config])
    rows = [x for x in parts if isinstance(x, Row)]
    large = [r.config for r in rows if r.at_least > budget]
    skipped = [x.config for x in parts if isinstance(x, Skipped)]
    return rows, [Skipped(c, next(x for x in large if c.holds_no_less_than(x))) for c in skipped]


def refined(rows: Sequence[Row], start: Start, budget: float) -> list[Row]:
    """Plan in full the fastest rows that fit, until the first three are; the best is always one of them."""
    rows = list(rows)
    while True:
        first = sorted([r for r in rows if r.peak_bytes <= budget], key=lambda r: r.seconds)[:IN_FULL]
        rough = [r for r in first if not r.in_full]
        if not rough:
            return rows
        exact = {future.result().config: future.result() for future in [start(r) for r in rough]}
        rows = [exact.get(r.config, r) for r in rows]
