"""The schedules that have names."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fzero.parallel.schedules._actions import Action, Kind
from fzero.parallel.schedules._greedy import Cap, caps_of, counts, listed, placed
from fzero.parallel.schedules._schedule import Schedule
from fzero.parallel.schedules._timing import Durations, timed

__all__ = ["NAMES", "check_name", "one_f_one_b", "schedule", "shortest", "there_and_back"]

# Orders that are known in closed form, for any number of micro-batches.


def groups(ranks: int, micro_batches: int) -> list[int]:
    """Cut micro-batches into groups that go round the ranks together: as many as can have one for each rank.

    Megatron's groups have one micro-batch for each rank, and it refuses a last one that is smaller, as torch does. Of
    sizes that differ by one at most, and are never below the number of ranks, every count has its whole efficiency.
    """
    n = max(1, micro_batches // ranks)
    return [micro_batches // n + (i < micro_batches % n) for i in range(n)]


def one_f_one_b(
    ranks: int, micro_batches: int, stages: int, name: str, hops: int = 1, split: bool = False, wait: bool = False
) -> Schedule:
    """Make 1F1B of one stage a rank or more: some forward passes, then one and a backward pass in turn, then the rest.

    A rank begins `hops` forward passes sooner than the next one. One is enough where messages take no time; two hide
    a message there and one back behind other work, and keep more in flight. With `wait` all forward passes come
    first, which is GPipe.

    With `split`, rank r does a weight half r backward passes after its input half. So gradients run back to rank 0
    without waiting for weights, and all ranks have as much in flight.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2. Zhuang et
        al., On Optimizing the Communication of Model Parallelism, 2023 (eager 1F1B). Qi et al., Zero Bubble Pipeline
        Parallelism, 2024, section 3.1 (ZB-H1).
    """
    sizes = groups(ranks, micro_batches)
    members = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    turns = [(chunk, m) for group in members for chunk in range(stages) for m in group]
    back = [(stages - 1 - chunk, m) for chunk, m in turns]
    rows = []
    for rank in range(ranks):
        ahead = (stages - 1) * sizes[0] + hops * (ranks - 1 - rank)
        ahead = len(turns) if wait else min(len(turns), ahead)

        def action(kind: Kind, turn: tuple[int, int], rank: int = rank) -> Action:
            return Action(kind, turn[0] * ranks + rank, turn[1])

        row = [action("F", turn) for turn in turns[:ahead]]
        for i, turn in enumerate(back):
            row += [action("F", turn) for turn in turns[ahead + i : ahead + i + 1]]
            row += [action("I" if split else "B", turn)]
            row += [action("W", back[i - rank])] if split and i >= rank else []
        row += [action("W", turn) for turn in back[max(0, len(back) - rank) :]] if split else []
        rows.append(tuple(row))
    return Schedule(tuple(rows), placed(ranks, ranks * stages), name)


def shortest(home: Sequence[int], micro_batches: int, split: bool, durations: Durations) -> float:
    """Return a time below which no order of these actions ends.

    A rank cannot begin before the first output has come to it. Where backward passes are whole, its last one is that
    of its first stage, and the stages before have theirs to do after it.
    """
    forward = [durations[Action("F", s, 0)] for s in range(len(home))]
    backward = [durations[Action("B", s, 0)] for s in range(len(home))]
    hops = [durations.hop * (home[s] != home[s - 1]) for s in range(1, len(home))]
    found = []
    for rank in set(home):
        own = [s for s, r in enumerate(home) if r == rank]
        way = sum(hops[: own[0]])
        head, work = sum(forward[: own[0]]) + way, micro_batches * sum(forward[s] + backward[s] for s in own)
        found.append(head + work + (0 if split else sum(backward[: own[0]]) + way))
    return max(found)


def there_and_back(ranks: int, micro_batches: int, stages: int, name: str) -> Schedule:
    """Make ZB-V: two stages a rank, placed there and back, so that the loss and the first gradient are on rank 0.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 6, in the order of torch's ScheduleZBVZeroBubble.
    """
    rows = [tuple(_v_row(ranks, micro_batches, rank)) for rank in range(ranks)]
    return Schedule(tuple(rows), placed(ranks, stages * ranks, "v"), name)


def _v_row(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    count = max(2 * ranks - 1, micro_batches)  # the order is known from so many on: of fewer, those are left out
    down, up = rank, 2 * ranks - 1 - rank
    row: list[Action] = []
    done = {(kind, stage): 0 for kind in "FIW" for stage in (down, up)}

    def do(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            row.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        do(down, "F")
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(ranks - rank):
        do(up, "F", "I", "W")
    while done["F", up] < count:
        if done["F", down] < count:
            do(down, "F")
        do(down, "I", "W")
        do(up, "F", "I", "W")
    for _ in range(rank):  # input halves only: the ranks before wait for them
        do(down, "I")
        do(up, "I")
    for _ in range(ranks - rank):
        do(down, "I", "W")
    for stage in (up, down):
        while done["W", stage] < count:
            do(stage, "W")
    return [action for action in row if action.micro_batch < micro_batches]


class _Known(NamedTuple):
    """A schedule with a name.

    Attributes:
        closed: make its known orders of (ranks, micro_batches, stages, name). The first one sets the memory.
        split: whether its backward passes are halved.
        least: how many stages a rank holds at least,
        most: and at most.
        instead: what to use for other numbers of stages.
    """

    closed: tuple[Callable[[int, int, int, str], Schedule], ...]
    split: bool
    least: int
    most: int | None
    instead: str


_near, _far = partial(one_f_one_b, hops=1), partial(one_f_one_b, hops=2)
NAMES = {
    "gpipe": _Known((partial(one_f_one_b, wait=True),), False, 1, None, ""),
    "1f1b": _Known((_near, _far), False, 1, 1, "'interleaved' has more"),
    "interleaved": _Known((_far, _near), False, 2, None, "'1f1b' has one"),
    "zb": _Known((partial(_near, split=True), partial(_far, split=True)), True, 1, None, ""),
    "zbv": _Known((there_and_back,), True, 2, 2, "'zb' has any number, placed in a loop"),
}


def schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    stages: int = 1,
    *,
    cap: Cap = None,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
    hop: float = 0.0,
    cost: Sequence[float] | None = None,
) -> Schedule:
    """Make a known schedule, for any number of micro-batches.

    | name | order | stages a rank | in flight on rank r, of a stage each |
    | --- | --- | --- | --- |
    | "gpipe" | all forward passes, then all backward passes | 1 or more | all |
    | "1f1b" | a forward and a backward pass in turn | 1 | ranks - r |
    | "interleaved" | the same, in groups that go round the ranks | 2 or more | (stages + 1) ranks - 2 r - 1 |
    | "zb" | halved backward passes: ZB-H1 | 1 or more | stages * ranks |
    | "zbv" | the same; stages are placed there and back: ZB-V | 2 | 2 * ranks |

    The known order is taken, or that of `greedy` within the same memory, if by the durations it ends sooner: where
    stages are uneven or links slow. With `cap` the memory is another one: more hides slow links, and "interleaved" does
    with `stages * ranks - r` where messages take no time.

    Args:
        name: one of the table.
        ranks: how many ranks the pipeline has.
        micro_batches: how many go through it.
        stages: how many pipeline stages a rank holds.
        cap: the most in flight on a rank, or a function of the rank, as in `greedy`.
        forward: the duration of a forward pass of a rank's stages together.
        backward: of a whole backward pass.
        weight: of its weight half.
        hop: of a message between ranks.
        cost: by stage, how heavy it is; 1 is a stage of the mean weight.

    Raises:
        ValueError: if there is no schedule of this name, or it cannot be made for these counts.

    Example:
        >>> schedule("1f1b", ranks=4, micro_batches=8)
        Schedule('1f1b': 4 ranks, 4 stages, 8 micro-batches)
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
    known = _known(name)
    counts(ranks, micro_batches, stages)
    _check_stages(name, known, stages)
    if name == "gpipe" and cap is not None:
        raise ValueError(f"schedule 'gpipe' has no cap, and got cap={cap!r}: '1f1b' has one")
    closed = [order(ranks, micro_batches, stages, name) for order in known.closed]
    peaks = [closed[0].in_flight(rank) for rank in range(ranks)]
    own = [max(peak, known.split * stages * ranks) for peak in peaks]
    caps = [own[rank] if most is None else most for rank, most in enumerate(caps_of(cap, ranks, stages))]
    durations = Durations.of(ranks, ranks * stages, forward, backward, weight, hop, cost)
    least = shortest(closed[0].home, micro_batches, known.split, durations)
    fit = [s for s in closed if all(s.in_flight(rank) <= most for rank, most in enumerate(caps))]
    best = min(fit, key=lambda s: timed(s, durations).makespan, default=None)
    if best is not None and timed(best, durations).makespan <= least * (1 + 1e-9):
        return best
    limits = [None] * ranks if name == "gpipe" else caps
    other = listed(closed[0].home, micro_batches, limits, known.split, durations, name)
    return min([best, other] if best else [other], key=lambda s: timed(s, durations).makespan)


def check_name(name: str, stages: int) -> None:
    """Check that there is a schedule of this name, with so many stages on each rank.

    Raises:
        TypeError: if the name is no string.
        ValueError: if there is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"schedule={name!r}: expected the name of one, or a table: Schedule.parse reads torch's")
    _check_stages(name, _known(name), stages)


def _known(name: str) -> _Known:
    if name not in NAMES:
        near = difflib.get_close_matches(str(name).lower(), NAMES, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"schedule {name!r}: expected one of {', '.join(map(repr, NAMES))}{hint}")
    return NAMES[name]


def _check_stages(name: str, known: _Known, stages: int) -> None:
    if stages < known.least or stages > (known.most or stages):
        wanted = f"{known.least}" if known.least == known.most else f"{known.least} or more"
        raise ValueError(f"schedule {name!r} needs stages={wanted} on each rank, and got {stages}: {known.instead}")
