"""Named schedules, in the order of their papers. Orders in closed form hold for any number of micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fzero._arguments import did_you_mean
from fzero._tracebacks import api_boundary
from fzero.parallel.schedules._actions import Action, Kind, stages_on
from fzero.parallel.schedules._greedy import Cap, caps_by_rank, check_counts, list_schedule, place_stages
from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule
from fzero.parallel.schedules._timing import Durations, time_schedule

__all__ = ["NAMES", "NamedSchedule", "check_name", "one_f_one_b", "schedule"]


def _group_sizes(ranks: int, micro_batches: int) -> list[int]:
    """Return the sizes of groups of micro-batches that pass round the ranks together.

    Megatron's groups hold one micro-batch per rank. Megatron and torch refuse a smaller last group. Here the sizes
    differ by at most one, and are below the number of ranks only if there are fewer micro-batches. So every count
    reaches its full efficiency.
    """
    n = max(1, micro_batches // ranks)
    return [micro_batches // n + (i < micro_batches % n) for i in range(n)]


def one_f_one_b(
    ranks: int,
    micro_batches: int,
    stages_per_rank: int,
    name: str,
    hops: int = 1,
    splits_backward: bool = False,
    wait: bool = False,
) -> PipelineSchedule:
    """Make 1F1B for one or more stages per rank: warm-up forward passes, then one forward and one backward in turn.

    Each rank starts with `hops` more forward passes than the next one. One is enough if messages take no time. Two hide
    one message in each direction behind other work, and keep more in flight. With `wait` all forward passes come
    first, which is GPipe.

    With `splits_backward`, rank r runs each weight half r backward passes after its input half. So gradients reach
    rank 0 without waiting for weight halves, and all ranks have the same number in flight.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2. Zhuang et
        al., On Optimizing the Communication of Model Parallelism, 2023 (eager 1F1B). Qi et al., Zero Bubble Pipeline
        Parallelism, 2024, section 3.1 (ZB-H1).
    """
    sizes = _group_sizes(ranks, micro_batches)
    members = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    pairs = [(chunk, m) for group in members for chunk in range(stages_per_rank) for m in group]
    back = [(stages_per_rank - 1 - chunk, m) for chunk, m in pairs]
    rows = []
    for rank in range(ranks):
        warmup = (stages_per_rank - 1) * sizes[0] + hops * (ranks - 1 - rank)
        warmup = len(pairs) if wait else min(len(pairs), warmup)

        def action(kind: Kind, pair: tuple[int, int], rank: int = rank) -> Action:
            return Action(kind, pair[0] * ranks + rank, pair[1])

        row = [action("F", pair) for pair in pairs[:warmup]]
        for i, pair in enumerate(back):
            row += [action("F", pair) for pair in pairs[warmup + i : warmup + i + 1]]
            row += [action("I" if splits_backward else "B", pair)]
            if splits_backward and i >= rank:
                row.append(action("W", back[i - rank]))
        if splits_backward:
            row += [action("W", pair) for pair in back[max(0, len(back) - rank) :]]
        rows.append(tuple(row))
    return PipelineSchedule(tuple(rows), place_stages(ranks, ranks * stages_per_rank), name)


def _makespan_bound(
    rank_of_stage: Sequence[int], micro_batches: int, splits_backward: bool, durations: Durations
) -> float:
    """Return a lower bound on the makespan of any order of these actions.

    A rank cannot start before the first output reaches it. If backward passes are not split, its last action is the
    backward pass of its first stage, and the earlier stages must still run theirs afterwards.
    """
    forward = [durations[Action("F", s, 0)] for s in range(len(rank_of_stage))]
    backward = [durations[Action("B", s, 0)] for s in range(len(rank_of_stage))]
    latencies = [durations.latency * (rank_of_stage[s] != rank_of_stage[s - 1]) for s in range(1, len(rank_of_stage))]
    bounds = []
    for rank in set(rank_of_stage):
        stages = stages_on(rank, rank_of_stage)
        latency = sum(latencies[: stages[0]])
        head, work = sum(forward[: stages[0]]) + latency, micro_batches * sum(forward[s] + backward[s] for s in stages)
        bounds.append(head + work + (0 if splits_backward else sum(backward[: stages[0]]) + latency))
    return max(bounds)


def _zb_v(ranks: int, micro_batches: int, stages_per_rank: int, name: str) -> PipelineSchedule:
    """Make ZB-V: two stages per rank, placed as a V, so that rank 0 computes the loss and the first gradient.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 6, in the order of torch's ScheduleZBVZeroBubble.
    """
    rows = [tuple(_v_row(ranks, micro_batches, rank)) for rank in range(ranks)]
    return PipelineSchedule(tuple(rows), place_stages(ranks, stages_per_rank * ranks, "v"), name)


def _v_row(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """Return a rank's actions in the order of ZB-V (arXiv:2401.10241), with a stage on the way down and one up."""
    count = max(2 * ranks - 1, micro_batches)  # the order needs at least this many; the extra ones are removed below
    down, up = rank, 2 * ranks - 1 - rank
    row: list[Action] = []
    next_micro_batch = {(kind, stage): 0 for kind in "FIW" for stage in (down, up)}

    def do(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            row.append(Action(kind, stage, next_micro_batch[kind, stage]))
            next_micro_batch[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        do(down, "F")
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(ranks - rank):
        do(up, "F", "I", "W")
    while next_micro_batch["F", up] < count:
        if next_micro_batch["F", down] < count:
            do(down, "F")
        do(down, "I", "W")
        do(up, "F", "I", "W")
    for _ in range(rank):  # input halves only, since earlier ranks wait for them
        do(down, "I")
        do(up, "I")
    for _ in range(ranks - rank):
        do(down, "I", "W")
    for stage in (up, down):
        while next_micro_batch["W", stage] < count:
            do(stage, "W")
    return [action for action in row if action.micro_batch < micro_batches]


@dataclass(frozen=True, kw_only=True)
class NamedSchedule:
    """A named schedule.

    Attributes:
        orders: functions of (ranks, micro_batches, stages_per_rank, name) that make its orders. The first one sets the
            memory.
        splits_backward: whether its backward passes are split into halves.
        min_stages: the smallest number of stages per rank.
        max_stages: the largest number of stages per rank; None for no limit.
        advice: the schedule to use for other numbers of stages. An error ends with it: "..., but got 1: '1f1b' has
            one".
    """

    orders: tuple[Callable[[int, int, int, str], PipelineSchedule], ...]
    splits_backward: bool = False
    min_stages: int = 1
    max_stages: int | None = None
    advice: str = ""


_one_hop, _two_hops = partial(one_f_one_b, hops=1), partial(one_f_one_b, hops=2)
NAMES = {
    "gpipe": NamedSchedule(orders=(partial(one_f_one_b, wait=True),)),
    "1f1b": NamedSchedule(orders=(_one_hop, _two_hops), max_stages=1, advice="'interleaved' has more"),
    "interleaved": NamedSchedule(orders=(_two_hops, _one_hop), min_stages=2, advice="'1f1b' has one"),
    "zb": NamedSchedule(
        orders=(partial(_one_hop, splits_backward=True), partial(_two_hops, splits_backward=True)),
        splits_backward=True,
    ),
    "zbv": NamedSchedule(
        orders=(_zb_v,),
        splits_backward=True,
        min_stages=2,
        max_stages=2,
        advice="'zb' supports any number, placed in a loop",
    ),
}


@api_boundary
def schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    *,
    cap: Cap = None,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
    latency: float = 0.0,
    cost: Sequence[float] | None = None,
) -> PipelineSchedule:
    """Make a named schedule, for any number of micro-batches.

    | name | order | stages per rank, v | in flight on rank r, of one stage each |
    | --- | --- | --- | --- |
    | "gpipe" | all forward passes, then all backward passes | 1 or more | all |
    | "1f1b" | a forward and a backward pass in turn | 1 | ranks - r |
    | "interleaved" | the same, in groups that go round the ranks | 2 or more | (v + 1) ranks - 2 r - 1 |
    | "zb" | halved backward passes: ZB-H1 | 1 or more | v * ranks |
    | "zbv" | the same; stages are placed there and back: ZB-V | 2 | 2 * ranks |

    The result has the named order. If `greedy` finds an order within the same memory that ends sooner by these
    durations, the result has that order: for example with uneven stages or slow links. `cap` sets another memory.
    More memory hides slow links, and "interleaved" needs only `v * ranks - r` if messages take no time.

    Args:
        name: a name in the table.
        ranks: the number of ranks in the pipeline.
        micro_batches: the number of micro-batches.
        stages_per_rank: the number of pipeline stages per rank.
        cap: the most in flight on a rank, or a function of the rank, as in `greedy`.
        forward: the duration of a forward pass of all of a rank's stages together.
        backward: the duration of a full backward pass.
        weight: the duration of its weight half.
        latency: the duration of a message between ranks.
        cost: by stage, its relative cost; 1 is a stage of mean cost.

    Raises:
        ValueError: if no schedule has this name, or it cannot be made for these counts.

    Example:
        >>> schedule("1f1b", ranks=4, micro_batches=8)
        PipelineSchedule('1f1b': 4 ranks, 4 stages, 8 micro-batches)
        >>> print(schedule("zb", ranks=3, micro_batches=3))
        zb: 3 ranks, 3 micro-batches; efficiency 0.818; in flight 3, 3, 3
        rank 0  F0 F1 F2  .  . I0 W0 I1 W1 I2 W2
        rank 1   . F0 F1  . I0 F2 I1 W0 I2 W1 W2
        rank 2   .  . F0 I0 F1 I1 F2 I2 W0 W1 W2

    References:
        Huang et al., GPipe, 2019. Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021 (1F1B).
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021 (interleaved). Qi et
        al., Zero Bubble Pipeline Parallelism, 2024.
    """
    entry = _lookup_schedule(name)
    check_counts(ranks, micro_batches, stages_per_rank)
    _check_stages(name, entry, stages_per_rank)
    if name == "gpipe" and cap is not None:
        raise ValueError(f"schedule 'gpipe' takes no cap, but got cap={cap!r}: '1f1b' takes one")
    orders = [order(ranks, micro_batches, stages_per_rank, name) for order in entry.orders]
    caps = _memory_caps(orders[0], cap, entry.splits_backward, stages_per_rank)
    durations = Durations.of(
        ranks,
        stages=ranks * stages_per_rank,
        forward=forward,
        backward=backward,
        weight=weight,
        latency=latency,
        cost=cost,
    )
    bound = _makespan_bound(orders[0].rank_of_stage, micro_batches, entry.splits_backward, durations)
    best = _best_named(orders, caps, durations)
    if best is not None and time_schedule(best, durations).makespan <= bound * (1 + 1e-9):
        return best

    def listed(limits: Sequence[int | None]) -> PipelineSchedule:
        return list_schedule(
            orders[0].rank_of_stage,
            micro_batches,
            caps=limits,
            splits_backward=entry.splits_backward,
            durations=durations,
            name=name,
        )

    candidate = listed([None] * ranks if name == "gpipe" else caps)
    best = min([best, candidate] if best else [candidate], key=lambda s: time_schedule(s, durations).makespan)
    return best if name == "gpipe" else _best_in_memory(best, listed, durations)


def _memory_caps(order: PipelineSchedule, cap: Cap, splits_backward: bool, stages_per_rank: int) -> list[int]:
    """Return the most in flight on each rank: what `cap` allows, or else what an order needs."""
    ranks = order.ranks
    peaks = [order.in_flight(rank) for rank in range(ranks)]
    memory = [max(peak, splits_backward * stages_per_rank * ranks) for peak in peaks]
    limits = caps_by_rank(cap, ranks, stages_per_rank)
    return [memory[rank] if limit is None else limit for rank, limit in enumerate(limits)]


def _best_named(
    orders: Sequence[PipelineSchedule], caps: Sequence[int], durations: Durations
) -> PipelineSchedule | None:
    """Return the order that ends first of those within the caps; None if there is none."""
    fit = [s for s in orders if all(s.in_flight(rank) <= limit for rank, limit in enumerate(caps))]
    return min(fit, key=lambda s: time_schedule(s, durations).makespan, default=None)


def _best_in_memory(
    best: PipelineSchedule, listed: Callable[[Sequence[int | None]], PipelineSchedule], durations: Durations
) -> PipelineSchedule:
    """Return the best of the greedy orders in the memory that a schedule needs, of those in theirs, and so on.

    With less memory a greedy order may end sooner: it is held back from a step that looked best at its time.
    """
    while True:
        candidate = listed([best.in_flight(rank) for rank in range(best.ranks)])
        if time_schedule(candidate, durations).makespan >= time_schedule(best, durations).makespan * (1 - 1e-9):
            return best
        best = candidate


def check_name(name: str, stages_per_rank: int) -> None:
    """Check that a schedule of this name exists, and supports this number of stages per rank.

    Raises:
        TypeError: if the name is not a string.
        ValueError: if there is no such schedule.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"schedule={name!r}: expected the name of a schedule, or a table: PipelineSchedule.parse reads torch's"
        )
    _check_stages(name, _lookup_schedule(name), stages_per_rank)


def _lookup_schedule(name: str) -> NamedSchedule:
    if name not in NAMES:
        hint = did_you_mean(name, NAMES, "'{}'", cutoff=0.4)
        raise ValueError(f"schedule {name!r}: expected one of {', '.join(map(repr, NAMES))}{hint}")
    return NAMES[name]


def _check_stages(name: str, entry: NamedSchedule, stages_per_rank: int) -> None:
    if stages_per_rank < entry.min_stages or stages_per_rank > (entry.max_stages or stages_per_rank):
        expected = f"{entry.min_stages}" if entry.min_stages == entry.max_stages else f"{entry.min_stages} or more"
        raise ValueError(
            f"schedule {name!r} needs stages_per_rank={expected}, but got {stages_per_rank}"
            + (f": {entry.advice}" if entry.advice else "")
        )
