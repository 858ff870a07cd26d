"""A configuration is planned as it is, or extrapolated from models of fewer blocks.

A pipeline is planned on each rank that may be the fullest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fzero.graph import Plan, PlanSettings, StepOfRank, pause_collector
from fzero.parallel.schedules import schedule
from fzero.ranks import Mesh
from fzero.tuning._configured_step import MakeStep, StepArgs, step_at, step_on
from fzero.tuning._row import PlanSummary, TableRow, make_row, summarize
from fzero.tuning._search_space import Configuration
from fzero.tuning.machines import Machine
from fzero.tuning.search._extrapolation import choose_depths, extrapolate, extrapolate_line
from fzero.tuning.search._row_cache import RowCache

__all__ = ["ConfigurationPlanner"]


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
    cache: RowCache | None = None

    def __call__(self, request: Configuration | TableRow) -> TableRow:
        """Plan a configuration, as it is or from models of fewer blocks. Plan a row in full, with its schedule."""
        cached_row = self.cached(request)
        if cached_row is not None:
            return cached_row
        with pause_collector():  # plans hold many small objects, and all of them live until the row is made
            row = self._plan_in_full(request) if isinstance(request, TableRow) else self._plan_row(request)
        if self.cache is not None:
            self.cache.write(request, row)
        return row

    def cached(self, request: Configuration | TableRow) -> TableRow | None:
        """Return a row that was planned before; None if there is none."""
        return None if self.cache is None else self.cache.read(request)

    def _plan_row(self, config: Configuration) -> TableRow:
        depths = choose_depths(config, getattr(self.make_step, "blocks_alike", False))
        models = _ExtrapolationModels(self, config)
        for three in zip(depths, depths[1:], depths[2:], strict=False):
            summaries = models.extrapolate(three)
            if summaries is not None:
                return make_row(config, summaries, in_full=False)
        return make_row(config, self._plan_ranks(config), in_full=True)

    def _plan_in_full(self, row: TableRow) -> TableRow:
        settings = {**dict.fromkeys(_find_fullest_ranks(row.config)), row.rank: row.settings}
        return make_row(row.config, self._plan_ranks(row.config, settings), in_full=True)

    def _plan_ranks(
        self, config: Configuration, settings: Mapping[int, PlanSettings | None] | None = None
    ) -> _PlanSummaries:
        """Plan a configuration on each rank that may be the fullest or the slowest, or on the ranks of `settings`."""
        return _summarize_plans(config, self.steps(config, settings), settings)

    def steps(self, config: Configuration, ranks: Iterable[int] | None = None) -> _StepsOfRanks | Plan:
        """Return the steps of a configuration on each rank that may be the fullest or the slowest, or on `ranks`."""
        with _name_configuration(config):
            step_args = step_at(self.make_step, config)
            if isinstance(step_args, Plan):
                return step_args
            _check_mesh(step_args, config)
            hardware = self.machine.as_hardware()._replace(fuses=config.compiled)
            positions = {rank: {"pp": rank} if config.pp > 1 else 0 for rank in ranks or _find_fullest_ranks(config)}
            return {
                rank: step_on(step_args, config.world, hardware, coordinates) for rank, coordinates in positions.items()
            }


@dataclass
class _ExtrapolationModels:
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
        plans = {n: self._plan_ranks(n) for n in depths}
        if (fastest := self._fastest_settings(plans)) is None:
            return None
        for n, plan in plans.items():
            replans = {rank: settings for rank, settings in fastest.items() if dict(plan[rank].settings) != settings}
            if replans:
                plans[n] = {**plan, **_summarize_plans(self.config, self.steps[n], replans)}
        summaries = {
            rank: extrapolate_line({n: plan[rank] for n, plan in plans.items()}, self.config.depth) for rank in fastest
        }
        return None if None in summaries.values() else {rank: x for rank, x in summaries.items() if x is not None}

    def _plan_ranks(self, depth: int) -> _PlanSummaries:
        if depth not in self.plans:
            self.steps[depth] = self.planner.steps(replace(self.config, depth=depth))
            self.plans[depth] = _summarize_plans(self.config, self.steps[depth])
        return self.plans[depth]

    def _fastest_settings(self, plans: Mapping[int, _PlanSummaries]) -> dict[int, PlanSettings] | None:
        """Return the settings that fzero.jit would choose on each rank; None without a schedule that all plans have."""
        assert self.config.depth is not None
        first_depth, *_, last_depth = plans
        summaries = {
            rank: extrapolate(
                (first_depth, plans[first_depth][rank]), (last_depth, plans[last_depth][rank]), self.config.depth
            )
            for rank in plans[first_depth]
        }
        if not all(summary.schedules for summary in summaries.values()):
            return None
        return {rank: dict(summary.fastest) for rank, summary in summaries.items()}


def _summarize_plans(
    config: Configuration, steps: _StepsOfRanks | Plan, settings: Mapping[int, PlanSettings | None] | None = None
) -> _PlanSummaries:
    """Summarize the plans of steps in the schedules that fzero.jit chooses, or of some ranks in given ones."""
    if isinstance(steps, Plan):
        return {0: summarize(steps)}
    with _name_configuration(config):
        return {
            rank: summarize(steps[rank].plan(settings_of_rank))
            for rank, settings_of_rank in (settings or dict.fromkeys(steps)).items()
        }


@contextmanager
def _name_configuration(config: Configuration) -> Iterator[None]:
    """Add the configuration to an error that is raised while it is planned."""
    try:
        yield
    except Exception as error:
        error.add_note(f"fzero.tune: while planning {config}")
        raise


def _find_fullest_ranks(config: Configuration) -> tuple[int, ...]:
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
