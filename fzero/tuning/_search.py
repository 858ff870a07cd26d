"""Planning the configurations of a space: which need no plan, and how the others are planned, on several processes."""

import functools
import hashlib
import json
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

import fzero.tree
from fzero.graph import Plan, Settings, paused_collector
from fzero.parallel.schedules import schedule
from fzero.ranks import Mesh
from fzero.tuning._machines import Machine, cache_folder, written
from fzero.tuning._row import Digest, Made, MakeStep, Row, deeper, digest_of, made_at, planned, row_from, row_of
from fzero.tuning._space import Configuration, Space

__all__ = [
    "Measure",
    "PlanCache",
    "Skipped",
    "Start",
    "check_mesh",
    "fullest_of",
    "in_order",
    "pool_of",
    "refined",
    "rows_of",
]

# Processes that plan: forked from this one, which has torch and the user's functions already.


class _Here(Executor):
    """Calls a function at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))  # what it raises is raised here
        return future


@contextmanager
def pool_of(count: int, run: Callable[[Any], Any]) -> Iterator[Callable[[Any], Future[Any]]]:
    """Yield what starts `run` on a value, here or on forked processes, and returns its future.

    Args:
        count: of processes; 1 for none beside this one.
        run: a function, which the processes have from the fork, since a user's cannot be sent.
    """
    if count == 1:
        yield lambda given: _Here().submit(run, given)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork keeps none of its parent's threads
    pool = ProcessPoolExecutor(count, get_context("fork"), _inherit, (run,))
    try:
        yield lambda given: pool.submit(_run, given)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


_inherited: list[Callable[[Any], Any]] = []  # of a forked process: what its parent gave it


def _inherit(run: Callable[[Any], Any]) -> None:
    _inherited.append(run)


def _run(given: Any) -> Any:
    return _inherited[-1](given)


# Rows that were planned before, in the user's cache folder, by all that they depend on.


@dataclass(frozen=True)
class PlanCache:
    """Reads and writes rows of one step on one machine.

    Attributes:
        key: a string that says all that the step depends on beside the configuration.
        machine: that is planned for.
    """

    key: str
    machine: Machine

    def read(self, asked: Configuration | Row) -> Row | None:
        """Return the row that was planned before; None if there is none, or none that can be read."""
        try:
            return row_from(json.loads(self._path(asked).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, asked: Configuration | Row, row: Row) -> None:
        """Keep a row. Where the folder cannot be written, as in some containers, nothing is kept."""
        try:
            written(self._path(asked), json.dumps(row.record()))
        except OSError:
            return

    def _path(self, asked: Configuration | Row) -> pathlib.Path:
        what = asked.record() if isinstance(asked, Row) else asdict(asked)
        told = [self.key, asdict(self.machine), what, _source(), torch.version.__version__, platform.python_version()]
        name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        return cache_folder() / "rows" / f"{name}.json"


@functools.cache
def _source() -> str:
    """Return what tells one state of fzero's code from another: a version alone does not while it is written."""
    folder = pathlib.Path(fzero.tree.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.read_bytes()!r}".encode())
    return found.hexdigest()


# Planning one configuration: as it is, or by two of fewer blocks; a pipeline on each rank that may be the fullest.
#
# Numbers of blocks from which more are told. With fewer, what starts ahead has not all begun. Where every second block
# may be of another kind, they are odd for odd depths, and even for even ones.
SHALLOW = {1: (3, 5), 0: (4, 6)}
ALIKE = (4, 5)

Digests = Mapping[int, Digest]  # by rank along the pipeline; 0 where there is none


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
    kept: PlanCache | None = None

    def __call__(self, asked: Configuration | Row) -> Row:
        """Plan a configuration: as it is, or by two of fewer blocks. Of a row, plan it as it is by its schedule."""
        known = None if self.kept is None else self.kept.read(asked)
        if known is not None:
            return known
        with paused_collector():  # plans hold many small objects, and none of them goes before its row is made
            row = self._in_full(asked) if isinstance(asked, Row) else self._row(asked)
        if self.kept is not None:
            self.kept.write(asked, row)
        return row

    def _row(self, config: Configuration) -> Row:
        shallow = depths_of(config, getattr(self.make_step, "blocks_alike", False))
        found = None if shallow is None else self._by_two(config, shallow)
        in_full = found is None
        return row_of(config, self._planned(config) if found is None else found, in_full)

    def _in_full(self, row: Row) -> Row:
        known = {**dict.fromkeys(fullest_of(row.config)), row.rank: row.settings}
        return row_of(row.config, self._planned(row.config, known), in_full=True)

    def _by_two(self, config: Configuration, shallow: tuple[int, int]) -> Digests | None:
        """Extrapolate all schedules, and say what that one holds which fzero.jit would keep; None if there is none."""
        assert config.depth is not None
        plans = {n: self._planned(replace(config, depth=n)) for n in shallow}
        found = _deeper(plans, config.depth)
        if not all(digest.ways for digest in found.values()):
            return None
        kept = {rank: dict(digest.fastest) for rank, digest in found.items()}
        for n, plan in plans.items():
            others = {rank: settings for rank, settings in kept.items() if dict(plan[rank].settings) != settings}
            if others:
                plans[n] = {**plan, **self._planned(replace(config, depth=n), others)}
        found = _deeper(plans, config.depth)
        return found if all(digest.ways for digest in found.values()) else None

    def _planned(self, config: Configuration, settings: Mapping[int, Settings | None] | None = None) -> Digests:
        """Plan a configuration on each rank that may be the fullest, or the slowest; on some, by known schedules."""
        known = settings or dict.fromkeys(fullest_of(config))
        try:
            made = made_at(self.make_step, config)
            if isinstance(made, Plan):
                return {0: digest_of(made)}
            check_mesh(made, config)
            device = self.machine.as_device()
            places = {rank: {"pp": rank} if config.pp > 1 else 0 for rank in known}
            plans = {r: planned(made, config.world, device, known[r], at) for r, at in places.items()}
            return {rank: digest_of(plan) for rank, plan in plans.items()}
        except Exception as error:
            error.add_note(f"fzero.tune: while it planned {config}")
            raise


def depths_of(config: Configuration, alike: bool = False) -> tuple[int, int] | None:
    """Return two numbers of blocks that say what the configuration's takes; None where it has few itself.

    Those of a pipeline give each of its stages as many more, and leave equally many over.

    Args:
        config: the configuration.
        alike: whether all blocks are, and not only every second one.
    """
    if config.depth is None:
        return None
    stages = config.pp * config.pipeline_stages if config.pp > 1 else 1
    each, left = divmod(config.depth, stages)
    few, more = ALIKE if alike else SHALLOW[each % 2]
    return (few * stages + left, more * stages + left) if each > more else None


def fullest_of(config: Configuration) -> tuple[int, ...]:
    """List the ranks along the pipeline of which one holds most, and one takes longest.

    The first has the embedding and most micro-batches in flight, the last the head. Those between
    are alike but for what is in flight. The one with most of it may be fuller than the first, since messages come to it
    from both sides.
    """
    if config.pp == 1:
        return (0,)
    made = schedule(config.schedule, config.pp, config.accumulation, config.pipeline_stages)
    between = sorted(range(1, config.pp - 1), key=made.in_flight, reverse=True)[:1]
    return (0, *between, config.pp - 1)


def check_mesh(made: Made, config: Configuration) -> None:
    """Check that a step runs on a mesh with the axes of its configuration.

    Raises:
        ValueError: if it does not: it would be planned for other ranks than its row says.
    """
    mesh = getattr(made[0], "mesh", None)
    wanted = {name: n for name, n in (("pp", config.pp), ("ep", config.ep), ("tp", config.tp)) if n > 1}
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else {}
    if wanted and {name: sizes.get(name) for name in wanted} != wanted:
        axes = ", ".join([f"{name}={n}" for name, n in wanted.items()])
        raise ValueError(
            f"make_step({config}) returned a step on {mesh!r}, and the configuration has {axes}: make the mesh by "
            "fzero.mesh(**config.axes)"
        )


def _deeper(plans: Mapping[int, Digests], depth: int) -> Digests:
    """Extrapolate each rank's plan from two, by their numbers of blocks."""
    (few, one), (more, two) = plans.items()
    return {rank: deeper((few, one[rank]), (more, two[rank]), depth) for rank in one}


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
