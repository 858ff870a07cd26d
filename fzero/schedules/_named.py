"""The schedules that have names."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fzero.schedules._closed import one_f_one_b, shortest, there_and_back
from fzero.schedules._greedy import Cap, caps_of, counts, listed
from fzero.schedules._schedule import Schedule
from fzero.schedules._timing import Durations, timed

__all__ = ["NAMES", "check_name", "schedule"]


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
