"""Planning one configuration: as it is, or by two of fewer blocks; a pipeline on each rank that may be the fullest."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fzero.graph._collector import paused_collector
from fzero.graph.plan._plan import Plan, Settings
from fzero.ranks.mesh import Mesh
from fzero.schedules import schedule
from fzero.tuning._machines import Machine
from fzero.tuning._plan_cache import PlanCache
from fzero.tuning._planned import Made, MakeStep, made_at, planned
from fzero.tuning._row import Digest, Row, deeper, digest_of, row_of
from fzero.tuning._space import Configuration

__all__ = ["Measure", "check_mesh", "fullest_of"]

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
