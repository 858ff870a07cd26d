"""Planning the configurations of a space: which need no plan, and how the others are planned, on several processes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from fzero.graph.plan._plan import Settings
from fzero.tuning._machines import Machine
from fzero.tuning._planned import MakeStep, planned_at
from fzero.tuning._row import Digest, Row, deeper, digest_of, row_of
from fzero.tuning._space import Configuration, Space

__all__ = ["Skipped", "refined", "rows_of", "workers_of"]

# Numbers of blocks from which more are told. With fewer, what starts ahead has not all begun. They are odd for odd
# depths, and even for even ones, since every second block may be of another kind.
SHALLOW = {1: (3, 5), 0: (4, 6)}
IN_FULL = 3  # how many of the fastest that fit are planned as they are

Each = Callable[[Callable[[Any], Row], Iterable[Any]], Iterable[Row]]


class Skipped(NamedTuple):
    """A configuration that was not planned, since it holds no less than one that does not fit.

    Attributes:
        config: that was not planned.
        as_little_as: one that was, whose parameters, state and activations alone are too much.
    """

    config: Configuration
    as_little_as: Configuration


@dataclass(frozen=True)
class _Measure:
    """Plans one configuration; the pool's processes have it from the fork, since a user's function cannot be sent.

    Attributes:
        make_step: the user's function.
        machine: to plan for.
    """

    make_step: MakeStep
    machine: Machine

    def __call__(self, config: Configuration) -> Row:
        """Plan a configuration: as it is, or by two of fewer blocks."""
        depth = config.depth
        found = None if depth is None or depth <= SHALLOW[depth % 2][1] else self._by_two(config, depth)
        in_full = found is None
        return row_of(config, self._planned(config) if found is None else found, in_full)

    def in_full(self, row: Row) -> Row:
        """Plan the configuration of a row as it is, with the schedule that is known."""
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


def rows_of(space: Space, make_step: MakeStep, machine: Machine, budget: float, each: Each) -> Iterator[Row | Skipped]:
    """Plan a space, those that hold least first. What holds no less than one that does not fit is skipped.

    Args:
        space: of configurations.
        make_step: the user's function.
        machine: to plan for.
        budget: bytes that a rank may hold.
        each: maps a function over configurations, as `workers_of` does.
    """
    too_large: list[Configuration] = []
    measure = _Measure(make_step, machine)
    for _, wave in groupby(space, key=lambda c: (c.micro_batch, c.remat)):
        ready: list[Configuration] = []
        for config in wave:
            known = next((other for other in too_large if config.holds_no_less_than(other)), None)
            if known is None:
                ready.append(config)
            else:
                yield Skipped(config, known)
        for row in each(measure, ready):
            if row.at_least > budget:
                too_large.append(row.config)
            yield row


def refined(rows: Iterable[Row], make_step: MakeStep, machine: Machine, budget: float, each: Each) -> list[Row]:
    """Plan in full the fastest rows that fit, until the first three are; the best is always one of them."""
    rows = list(rows)
    measure = _Measure(make_step, machine).in_full
    while True:
        first = sorted([r for r in rows if r.peak_bytes <= budget], key=lambda r: r.seconds)[:IN_FULL]
        rough = [r for r in first if not r.in_full]
        if not rough:
            return rows
        exact = {row.config: row for row in each(measure, rough)}
        rows = [exact.get(r.config, r) for r in rows]


@contextmanager
def workers_of(count: int) -> Iterator[Each]:
    """Yield a function that maps as `map` does, here or on forked processes that have torch imported.

    Args:
        count: of processes; 1 for none beside this one.
    """
    if count == 1:
        yield map
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork keeps none of its parent's threads

    def each(measure: Callable[[Any], Row], given: Iterable[Any]) -> Iterator[Row]:
        given = list(given)
        if len(given) < 2:
            yield from map(measure, given)
            return
        with ProcessPoolExecutor(min(count, len(given)), get_context("fork"), _inherit, (measure,)) as pool:
            yield from pool.map(_measured, given)

    try:
        yield each
    finally:
        torch.set_num_threads(threads)


_inherited: list[Callable[[Any], Row]] = []  # of a forked process: what its parent gave it


def _inherit(measure: Callable[[Any], Row]) -> None:
    _inherited.append(measure)


def _measured(given: Any) -> Row:
    return _inherited[-1](given)
