"""Plan the configurations of a space on several processes, and skip those that need no plan."""

import functools
import hashlib
import json
import math
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

import fzero.tree
from fzero._notice import warn_once
from fzero.graph import Plan, PlanSettings, StepOfRank, pause_collector
from fzero.parallel.schedules import schedule
from fzero.ranks import Mesh
from fzero.tuning._row import (
    MakeStep,
    PlanSummary,
    StepArgs,
    TableRow,
    make_row,
    row_from,
    step_at,
    step_on,
    summarize,
)
from fzero.tuning._search_space import Configuration, SearchSpace
from fzero.tuning.machines import Machine, cache_folder, write_atomically
from fzero.tuning.search._extrapolation import depths_of, extrapolate, extrapolate_line

__all__ = [
    "ConfigurationPlanner",
    "PlanCache",
    "Skipped",
    "Start",
    "is_surely_too_large",
    "open_pool",
    "refine",
    "search_rows",
    "sort_results",
]

# Processes that plan. They are forked, so that they have torch and the user's functions already.


class _InProcess(Executor):
    """Calls a function at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))  # its exceptions are raised here
        return future


@contextmanager
def open_pool(
    count: int, run: Callable[[Any], Any], lookup: Callable[[Any], Any] = lambda value: None
) -> Iterator[Callable[[Any], Future[Any]]]:
    """Yield a function that starts `run` on a value, in this process or a forked one, and returns the future.

    Processes start at the first value whose result is not known.

    A process that has computed gradients on a build of torch for GPUs has threads that no fork survives. Then all calls
    run in this process, which a notice says.

    Args:
        count: the number of processes; with 1 this process runs all calls.
        run: the function. Processes inherit it by the fork, since a user's function may not pickle.
        lookup: returns the result for a value if it is known already, else None.
    """
    with ExitStack() as stack:
        processes: list[Callable[[Any], Future[Any]]] = []

        def start(value: Any) -> Future[Any]:
            result = lookup(value)
            if result is not None:
                return _InProcess().submit(lambda: result)
            if not processes:
                processes.append(stack.enter_context(_processes(count, run)))
            return processes[0](value)

        yield start


@contextmanager
def _processes(count: int, run: Callable[[Any], Any]) -> Iterator[Callable[[Any], Future[Any]]]:
    """Yield a function that starts `run` on a value in one of `count` processes, as `open_pool` describes."""
    if count > 1 and not _can_fork():
        warn_once(
            f"fzero.tune: workers={count}: this process has computed gradients, and this build of torch can compute "
            "none in a fork of it. So it plans in one process; call tune before the first gradient to plan in several"
        )
        count = 1
    if count == 1:
        yield lambda value: _InProcess().submit(run, value)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads of a parent do not survive a fork
    pool = ProcessPoolExecutor(count, get_context("fork"), _inherit, (run,))
    try:
        yield lambda value: pool.submit(_run, value)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _can_fork() -> bool:
    """Return whether a process that is forked now can compute gradients: autograd refuses if its threads are lost."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            pool.submit(_differentiate).result()
        except RuntimeError:
            return False
    return True


def _differentiate() -> None:
    with torch.enable_grad():  # not torch.func, whose first use imports for seconds
        torch.zeros((), device="cpu", requires_grad=True).sin().backward()


_functions: list[Callable[[Any], Any]] = []  # in a forked process: the functions that it inherited


def _inherit(run: Callable[[Any], Any]) -> None:
    _functions.append(run)


def _run(value: Any) -> Any:
    return _functions[-1](value)


# Rows that were planned before, in the user's cache folder. The key of a row covers all that it depends on.


@dataclass(frozen=True)
class PlanCache:
    """Reads and writes the cached rows of one step on one machine.

    Attributes:
        key: a string that covers all that the step depends on, besides the configuration.
        machine: the machine that the rows are planned for.
    """

    key: str
    machine: Machine

    def read(self, request: Configuration | TableRow) -> TableRow | None:
        """Return the cached row; None if there is none, or if it cannot be read."""
        try:
            return row_from(json.loads(self._path(request).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, request: Configuration | TableRow, row: TableRow) -> None:
        """Cache a row. Nothing is cached where the folder cannot be written, as in some containers."""
        try:
            write_atomically(self._path(request), json.dumps(row.record()))
        except OSError:
            return

    def _path(self, request: Configuration | TableRow) -> pathlib.Path:
        item = request.record() if isinstance(request, TableRow) else asdict(request)
        parts = [self.key, asdict(self.machine), item, _source(), torch.version.__version__, platform.python_version()]
        name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return cache_folder() / "rows" / f"{name}.json"


@functools.cache
def _source() -> str:
    """Return a hash of fzero's code. The version alone would not change while the code is edited."""
    folder = pathlib.Path(fzero.tree.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.read_bytes()!r}".encode())
    return digest.hexdigest()


# One configuration is planned as it is, or extrapolated from models of fewer blocks. A pipeline is planned on each rank
# that may be the fullest.

_StepsOfRanks = Mapping[int, StepOfRank]  # by rank, as the summaries
_PlanSummaries = Mapping[int, PlanSummary]  # by rank along the pipeline; by 0 without a pipeline


@dataclass(frozen=True)
class ConfigurationPlanner:
    """Plans one configuration.

    Attributes:
        make_step: the user's function.
        machine: the machine to plan for.
        cache: the rows that were planned before; None to plan all rows anew.
    """

    make_step: MakeStep
    machine: Machine
    cache: PlanCache | None = None

    def __call__(self, request: Configuration | TableRow) -> TableRow:
        """Plan a configuration, as it is or from models of fewer blocks. Plan a row in full, with its schedule."""
        cached = self.cached(request)
        if cached is not None:
            return cached
        with pause_collector():  # plans hold many small objects, and all of them live until the row is made
            row = self._in_full(request) if isinstance(request, TableRow) else self._row(request)
        if self.cache is not None:
            self.cache.write(request, row)
        return row

    def cached(self, request: Configuration | TableRow) -> TableRow | None:
        """Return a row that was planned before; None if there is none."""
        return None if self.cache is None else self.cache.read(request)

    def _row(self, config: Configuration) -> TableRow:
        depths = depths_of(config, getattr(self.make_step, "blocks_alike", False))
        models = _FewerBlocks(self, config)
        for three in zip(depths, depths[1:], depths[2:], strict=False):
            summaries = models.extrapolate(three)
            if summaries is not None:
                return make_row(config, summaries, in_full=False)
        return make_row(config, self._plan(config), in_full=True)

    def _in_full(self, row: TableRow) -> TableRow:
        settings = {**dict.fromkeys(_fullest_of(row.config)), row.rank: row.settings}
        return make_row(row.config, self._plan(row.config, settings), in_full=True)

    def _plan(self, config: Configuration, settings: Mapping[int, PlanSettings | None] | None = None) -> _PlanSummaries:
        """Plan a configuration on each rank that may be the fullest or the slowest, or on the ranks of `settings`."""
        return _summaries(config, self.steps(config, settings), settings)

    def steps(self, config: Configuration, ranks: Iterable[int] | None = None) -> _StepsOfRanks | Plan:
        """Return the steps of a configuration on each rank that may be the fullest or the slowest, or on `ranks`."""
        with _name_configuration(config):
            step_args = step_at(self.make_step, config)
            if isinstance(step_args, Plan):
                return step_args
            _check_mesh(step_args, config)
            hardware = self.machine.as_hardware()._replace(fuses=config.compiled)
            positions = {rank: {"pp": rank} if config.pp > 1 else 0 for rank in ranks or _fullest_of(config)}
            return {rank: step_on(step_args, config.world, hardware, at) for rank, at in positions.items()}


@dataclass
class _FewerBlocks:
    """The models of fewer blocks from which a configuration is extrapolated. Each is traced once.

    Attributes:
        planner: the planner of the configuration.
        config: the configuration.
        steps: the steps of the models, by their number of blocks.
        plans: their plans in the schedules that fzero.jit chooses.
    """

    planner: ConfigurationPlanner
    config: Configuration
    steps: dict[int, _StepsOfRanks | Plan] = field(default_factory=dict)
    plans: dict[int, _PlanSummaries] = field(default_factory=dict)

    def extrapolate(self, depths: Sequence[int]) -> _PlanSummaries | None:
        """Extrapolate the schedule that fzero.jit would choose; None unless the middle model confirms the line.

        Args:
            depths: three numbers of blocks. The line goes through the first and the last.
        """
        assert self.config.depth is not None
        plans = {n: self._plan(n) for n in depths}
        if (fastest := self._fastest(plans)) is None:
            return None
        for n, plan in plans.items():
            replans = {rank: settings for rank, settings in fastest.items() if dict(plan[rank].settings) != settings}
            if replans:
                plans[n] = {**plan, **_summaries(self.config, self.steps[n], replans)}
        summaries = {
            rank: extrapolate_line({n: plan[rank] for n, plan in plans.items()}, self.config.depth) for rank in fastest
        }
        return None if None in summaries.values() else {rank: x for rank, x in summaries.items() if x is not None}

    def _plan(self, depth: int) -> _PlanSummaries:
        if depth not in self.plans:
            self.steps[depth] = self.planner.steps(replace(self.config, depth=depth))
            self.plans[depth] = _summaries(self.config, self.steps[depth])
        return self.plans[depth]

    def _fastest(self, plans: Mapping[int, _PlanSummaries]) -> dict[int, PlanSettings] | None:
        """Return the settings that fzero.jit would choose on each rank; None without a schedule that all plans have."""
        assert self.config.depth is not None
        first, *_, last = plans
        summaries = {
            rank: extrapolate((first, plans[first][rank]), (last, plans[last][rank]), self.config.depth)
            for rank in plans[first]
        }
        if not all(summary.schedules for summary in summaries.values()):
            return None
        return {rank: dict(summary.fastest) for rank, summary in summaries.items()}


def _summaries(
    config: Configuration, steps: _StepsOfRanks | Plan, settings: Mapping[int, PlanSettings | None] | None = None
) -> _PlanSummaries:
    """Summarize the plans of steps in the schedules that fzero.jit chooses, or of some ranks in given ones."""
    if isinstance(steps, Plan):
        return {0: summarize(steps)}
    with _name_configuration(config):
        return {rank: summarize(steps[rank].plan(at)) for rank, at in (settings or dict.fromkeys(steps)).items()}


@contextmanager
def _name_configuration(config: Configuration) -> Iterator[None]:
    """Add the configuration to an error that is raised while it is planned."""
    try:
        yield
    except Exception as error:
        error.add_note(f"fzero.tune: while planning {config}")
        raise


def _fullest_of(config: Configuration) -> tuple[int, ...]:
    """List the ranks along the pipeline that may hold most memory, or take longest.

    The first rank has the embedding and the most micro-batches in flight. The last rank has the head. Ranks between
    them differ only by the micro-batches in flight. The one with the most may hold more than the first rank, since it
    receives messages from both sides.
    """
    if config.pp == 1:
        return (0,)
    pp_schedule = schedule(config.schedule, config.pp, config.accumulation, config.pipeline_stages)
    between = sorted(range(1, config.pp - 1), key=pp_schedule.in_flight, reverse=True)[:1]
    return (0, *between, config.pp - 1)


def _check_mesh(step_args: StepArgs, config: Configuration) -> None:
    """Check that a step runs on a mesh with the axes of its configuration.

    Raises:
        ValueError: if the mesh lacks an axis: the step would be planned for other ranks than its row says.
    """
    mesh = getattr(step_args[0], "mesh", None)
    expected = {name: n for name, n in config.axes.items() if name != "dp" and n > 1}
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else {}
    if expected and {name: sizes.get(name) for name in expected} != expected:
        axes = ", ".join([f"{name}={n}" for name, n in expected.items()])
        raise ValueError(
            f"make_step({config}) returned a step on {mesh!r}, but the configuration has {axes}: make the mesh with "
            "fzero.mesh(**config.axes)"
        )


_IN_FULL = 3  # how many of the fastest rows that fit are planned as they are
_NEAR = 1.05  # an extrapolated row decides nothing if it exceeds the budget by less than this factor

Start = Callable[[Configuration | TableRow], Future[TableRow]]


class Skipped(NamedTuple):
    """A configuration that was not planned, since it holds no less than another that does not fit.

    Attributes:
        config: the configuration that was not planned.
        smaller: a planned one whose parameters, optimizer state and activations alone exceed the budget.
    """

    config: Configuration
    smaller: Configuration


def search_rows(space: SearchSpace, start: Start, workers: int, budget: float) -> Iterator[TableRow | Skipped]:
    """Plan a space, the smallest configurations first. Skip those that hold no less than one that does not fit.

    A free process does not wait: it begins with a configuration that may be skipped later. The row of such a
    configuration is then left out. So the set of results does not depend on the number of processes; their order does.

    Args:
        space: the configurations.
        start: begins to plan a configuration.
        workers: how many configurations are planned at once.
        budget: the bytes that a rank may hold.
    """
    order = [*space]
    leaner = {c: [x for x in order[:i] if c.holds_no_less_than(x)] for i, c in enumerate(order)}
    too_large: dict[Configuration, bool] = {}  # of the configurations that are decided
    started: dict[Configuration, Future[TableRow]] = {}
    while len(too_large) < len(order):
        undecided = [c for c in order if c not in too_large]
        for c in undecided:
            smaller = next((x for x in leaner[c] if too_large.get(x)), None)
            if smaller is not None:
                too_large[c] = False  # a larger one is skipped by `smaller` as well
                yield Skipped(c, smaller)
            elif c in started and started[c].done() and all(x in too_large for x in leaner[c]):
                row = started[c].result()
                too_large[c] = is_surely_too_large(row, budget)
                yield row
        undecided = [c for c in undecided if c not in too_large]
        fresh = [c for c in undecided if c not in started]
        running = [f for f in started.values() if not f.done()]
        for c in sorted(fresh, key=lambda c: not all(x in too_large for x in leaner[c]))[: workers - len(running)]:
            started[c] = start(c)
            running.append(started[c])
        wait(running, return_when=FIRST_COMPLETED)


def sort_results(
    space: SearchSpace, results: Iterable[TableRow | Skipped], budget: float
) -> tuple[list[TableRow], list[Skipped]]:
    """Put rows and skipped configurations in the order of the space, the latter with the first smaller one."""
    order_in_space = {c: i for i, c in enumerate(space)}
    parts = sorted(results, key=lambda x: order_in_space[x.config])
    rows = [x for x in parts if isinstance(x, TableRow)]
    large = [r.config for r in rows if is_surely_too_large(r, budget)]
    skipped = [x.config for x in parts if isinstance(x, Skipped)]
    return rows, [Skipped(c, next(x for x in large if c.holds_no_less_than(x))) for c in skipped]


def is_surely_too_large(row: TableRow, budget: float) -> bool:
    """Return whether the least peak of a row exceeds the budget, that of an extrapolated row by a margin."""
    return row.min_peak_bytes > budget * (1 if row.in_full else _NEAR)


def refine(rows: Sequence[TableRow], start: Start, budget: float) -> list[TableRow]:
    """Plan rows in full until none that decides about the best row is extrapolated.

    These are the fastest three rows that fit, rows as fast that nearly fit, and the smallest row if nothing fits.
    """
    rows = list(rows)
    while rough := [r for r in _deciding_rows(rows, budget) if not r.in_full]:
        exact = {future.result().config: future.result() for future in [start(r) for r in rough]}
        rows = [exact.get(r.config, r) for r in rows]
    return rows


def _deciding_rows(rows: Sequence[TableRow], budget: float) -> list[TableRow]:
    """List the rows that decide about the best one, as `refine` describes them."""
    first = sorted([r for r in rows if r.peak_bytes <= budget], key=lambda r: r.seconds)[:_IN_FULL]
    slowest = first[-1].seconds if len(first) == _IN_FULL else math.inf
    near = [r for r in rows if budget < r.peak_bytes <= _NEAR * budget and r.seconds <= slowest]
    return [*first, *near] if first else [*near, *sorted(rows, key=lambda r: r.peak_bytes)[:1]]
