"""What one rank's plan says of a configuration, in a few numbers."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, NamedTuple

from fzero.graph import KINDS, Device, Jitted, Knobs, Plan, Settings, jit, plan
from fzero.ranks import Mesh
from fzero.tuning._space import Configuration

__all__ = [
    "Digest",
    "Made",
    "MakeStep",
    "Row",
    "World",
    "checked_bytes",
    "deeper",
    "digest_of",
    "made_at",
    "planned",
    "planned_at",
    "row_from",
    "row_of",
]

# What one rank's plan says of a configuration, in a few numbers, and on what line they lie over the depth.


SLACK = 1.03  # as fzero.jit: without a budget, what a faster schedule may take of the smallest peak

Place = tuple[str, ...]  # of an operation: its pass, its source line, its target, and which of such ones it is
Held = Mapping[str, float]  # bytes by kind


class Way(NamedTuple):
    """What one schedule of a step takes."""

    peak_bytes: float
    seconds: float


@dataclass(frozen=True)
class Digest:
    """What a plan says, as numbers each of which lies on a line over the depth.

    Attributes:
        held: at each place of the step, bytes of the device by kind.
        moved: bytes of collectives by axis.
        host: bytes of the host at the peak.
        flops: of the step.
        ways: the schedules, by their settings: the one that was kept first.
    """

    held: Mapping[Place, Held]
    moved: Held
    host: float
    flops: float
    ways: Mapping[tuple[tuple[str, Any], ...], Way]

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """The settings of the schedule that was kept."""
        return next(iter(self.ways))

    @property
    def fastest(self) -> tuple[tuple[str, Any], ...]:
        """The settings that `fzero.jit` keeps: the fastest of those within 3% of the smallest."""
        limit = SLACK * min([way.peak_bytes for way in self.ways.values()])
        fits = {s: way for s, way in self.ways.items() if way.peak_bytes <= limit}
        return min(fits, key=lambda s: (fits[s].seconds, fits[s].peak_bytes))

    @property
    def at_peak(self) -> Held:
        """Bytes of the device by kind where most is alive."""
        return max(self.held.values(), key=lambda held: sum(held.values()))


@dataclass(frozen=True)
class Row:
    """What one rank takes of a configuration, as its plan says. In a pipeline that is the fullest rank.

    Attributes:
        config: the configuration.
        held: bytes of the device at the peak, by kind: "parameters", "optimizer state", "activations", ...
        moved: bytes that collectives move in a step, and messages of a pipeline, by axis.
        seconds: of a step, by the cost model, of the slowest rank.
        host_bytes: of the host at the peak.
        flops: of a step, for this rank.
        in_full: whether the step was planned as it is; else from two of fewer blocks.
        settings: of the schedule that fzero.jit keeps, as `Plan.settings`.
        rank: which rank along the pipeline it is.
    """

    config: Configuration
    held: Held
    moved: Held
    seconds: float
    host_bytes: float
    flops: float
    in_full: bool
    settings: Settings
    rank: int = 0

    @property
    def peak_bytes(self) -> float:
        """The most bytes of the device that are alive at any time."""
        return sum(self.held.values())

    def record(self) -> dict[str, Any]:
        """Return the row as JSON has it, which has no infinity: `row_from` is the inverse."""
        settings = {k: None if v == math.inf else v for k, v in self.settings.items()}
        return {**asdict(self), "settings": settings}

    @property
    def at_least(self) -> float:
        """Bytes that a configuration holds which has no smaller a batch, no higher a stage, and no less of remat."""
        return sum([self.held.get(kind, 0.0) for kind in ("parameters", "optimizer state", "activations")])


def digest_of(plan: Plan) -> Digest:
    """Take from a plan what lies on a line over the depth."""
    by_kind = {kind: live for kind in KINDS if any(live := plan.live_of(kind))}
    held = {place: {kind: live[i] for kind, live in by_kind.items()} for place, i in _places(plan).items()}
    moved: Counter[str] = Counter()
    for c in plan.collectives:
        moved[c.axis] += c.bytes * c.times
    for m in plan.messages:
        moved[m.axis] += m.bytes * m.times
    ways = {tuple(plan.settings.items()): Way(plan.peak_bytes, plan.seconds)}
    ways |= {tuple(r.settings.items()): Way(r.peak_bytes, r.seconds) for r in plan.rejected}
    return Digest(held, dict(moved), plan.peak_of("host"), plan.flops, ways)


def _places(plan: Plan) -> dict[Place, int]:
    """Find where the most is alive of operations that are alike, and their first and their last.

    At each such place the bytes that are alive lie on a line over the depth. The peak need not: with more blocks it
    may come to lie elsewhere.
    """
    found: dict[Place, int] = {}
    for i, o in enumerate(plan.operations):
        alike = (o.phase, o.line, o.target)
        found.setdefault((*alike, "first"), i)
        found[*alike, "last"] = i
        most = (*alike, "most")
        if most not in found or plan.live[i] > plan.live[found[most]]:
            found[most] = i
    return found


def deeper(shallow: tuple[int, Digest], deep: tuple[int, Digest], depth: int) -> Digest:
    """Say what a model of more blocks takes, on the lines through two of fewer.

    Args:
        shallow: a number of blocks, and what they take.
        deep: likewise, of more blocks.
        depth: the number of blocks asked for.
    """
    (few, one), (more, two) = shallow, deep

    def at(a: float, b: float) -> float:
        return a + (b - a) * (depth - few) / (more - few)

    def each(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[Any, float]:
        return {key: at(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}

    held = {place: each(one.held[place], two.held[place]) for place in two.held if place in one.held}
    ways = {s: Way(*map(at, one.ways[s], two.ways[s])) for s in two.ways if s in one.ways}
    return Digest(held, each(one.moved, two.moved), at(one.host, two.host), at(one.flops, two.flops), ways)


def row_of(config: Configuration, digests: Mapping[int, Digest], in_full: bool) -> Row:
    """Make a row of what the plans of some ranks say: of the fullest, but for the seconds, which are the slowest's."""
    rank = max(digests, key=lambda r: sum(digests[r].at_peak.values()))
    digest = digests[rank]
    held = {kind: n for kind, n in digest.at_peak.items() if n}
    seconds = max([d.ways[d.settings].seconds for d in digests.values()])
    settings = dict(digest.settings)
    return Row(config, held, digest.moved, seconds, digest.host, digest.flops, in_full, settings, rank)


def row_from(record: Mapping[str, Any]) -> Row:
    """Read a row that `Row.record` made.

    Raises:
        TypeError: if it is none, or has lost a part.
        KeyError: likewise.
    """
    settings = {k: math.inf if v is None else v for k, v in record["settings"].items()}
    return Row(**{**record, "config": Configuration(**record["config"]), "settings": settings})


# The plan of a step at a ratio, by a function that makes the step.


Made = tuple[Any, ...]  # a step, and its arguments
MakeStep = Callable[[Any], Any]
World = int | Mapping[str, int] | None


def planned_at(
    make_step: MakeStep, at: Any, world_size: World, device: Device | None = None, settings: Settings | None = None
) -> Plan:
    """Plan the step that `make_step` makes for a ratio or a configuration.

    Args:
        make_step: the user's function.
        at: what it is given.
        world_size: as of `fzero.plan`.
        device: likewise.
        settings: of the schedule, if they are known.

    Raises:
        TypeError: if `make_step` is no function, or returns neither a tuple `(step, *args)` nor a plan.
        ValueError: if it returns a plan and `world_size` is given.
    """
    made = made_at(make_step, at)
    if not isinstance(made, Plan):
        return planned(made, world_size, device, settings)
    if world_size is not None:
        raise ValueError(
            f"world_size={world_size!r}: make_step({_given(at)}) returned a plan, which is of one world: plan for "
            "that size there, or return (step, *args)"
        )
    return made


def made_at(make_step: MakeStep, at: Any) -> Made | Plan:
    """Call `make_step`, and return the step and its arguments, or the plan.

    Raises:
        TypeError: if it is no function, or returns neither.
    """
    if not callable(make_step):
        word = "ratio" if isinstance(at, Real) else "configuration"
        raise TypeError(
            f"make_step={make_step!r}: expected a function ({word}) -> (step, *args), or -> fzero.graph.Plan"
        )
    made = make_step(at)
    if isinstance(made, Plan) or (isinstance(made, tuple) and made and callable(made[0])):
        return made
    given = type(made).__name__
    if isinstance(made, tuple):
        given = f"({', '.join([type(x).__name__ for x in made])})"
    raise TypeError(
        f"make_step({_given(at)}) returned {given}: expected (step, *args), what fzero.plan takes, or a "
        f"fzero.graph.Plan"
    )


def planned(
    made: Made,
    world_size: World,
    device: Device | None = None,
    settings: Settings | None = None,
    rank: int | Mapping[str, int] = 0,
) -> Plan:
    """Plan a step and its arguments. The other arguments are as of `planned_at`, and `rank` as of `fzero.plan`."""
    step, *args = made
    if settings is not None:
        step = step if isinstance(step, Jitted) else jit(step)
        step = step.untraced(knobs=Knobs.of(settings))
    mesh = getattr(step, "mesh", None)
    same = isinstance(mesh, Mesh) and mesh.size == world_size  # then it may have several axes
    return plan(step, *args, world_size=None if same else world_size, device=device, rank=rank)


def _given(at: Any) -> str:
    return f"{at:g}" if isinstance(at, Real) else str(at)


def checked_bytes(name: str, value: Any) -> float:
    """Return a budget, if it is a positive number of bytes.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: expected a number of bytes above 0, such as 75e9")
    return float(value)
