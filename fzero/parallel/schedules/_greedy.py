"""One generator of schedules: a list scheduler with a cap on what is in flight."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from fzero.parallel.schedules._actions import GROWTH, Action, Value, makes, needs
from fzero.parallel.schedules._schedule import Schedule
from fzero.parallel.schedules._timing import Durations

__all__ = ["Cap", "Placement", "caps_of", "counts", "greedy", "listed", "placed"]

Cap = int | Callable[[int], int] | None
Placement = Literal["loop", "v"]


def counts(ranks: int, micro_batches: int, stages: int) -> None:
    """Check the counts that a user gave.

    Raises:
        ValueError: if one is no int from 1 on.
    """
    for word, value in (("ranks", ranks), ("micro_batches", micro_batches), ("stages", stages)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{word}={value!r}: expected an int from 1 on")


def caps_of(cap: Cap, ranks: int, stages: int) -> list[int | None]:
    """Return the cap of each rank; None where there is none.

    Raises:
        ValueError: if one has no room for one micro-batch, which has a forward pass for each stage of a rank.
    """
    if cap is None:
        return [None] * ranks
    found: list[int | None] = [cap(rank) if callable(cap) else cap for rank in range(ranks)]
    for rank, most in enumerate(found):
        if type(most) is not int or most < stages:
            raise ValueError(
                f"cap={most!r} on rank {rank}: expected an int from {stages} on, for one micro-batch has {stages} "
                "forward passes there, of a stage each"
            )
    return found


def placed(ranks: int, stages: int, placement: Placement = "loop") -> tuple[int, ...]:
    """Return the rank of each of so many pipeline stages, as many on each rank.

    "loop" goes round, 0 1 2 0 1 2; "v" goes there and back, 0 1 2 2 1 0.
    """
    if placement not in ("loop", "v"):
        raise ValueError(f"placement={placement!r}: expected 'loop' (0 1 2 0 1 2) or 'v' (0 1 2 2 1 0)")
    back = [placement == "v" and s // ranks % 2 == 1 for s in range(stages)]
    return tuple([ranks - 1 - s % ranks if back[s] else s % ranks for s in range(stages)])


def greedy(
    ranks: int,
    micro_batches: int,
    stages: int = 1,
    *,
    placement: Placement = "loop",
    cap: Cap = None,
    split: bool = False,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
    hop: float = 0.0,
    cost: Sequence[float] | None = None,
    name: str = "greedy",
) -> Schedule:
    """Make a schedule: whenever a rank is free, it does what it can, a backward pass rather than a forward one.

    With no cap this is GPipe, with `cap=lambda rank: ranks - rank` 1F1B, and with `split` weight
    halves fill what would be bubbles. Slow links and uneven stages are durations, which are those of `Schedule.timing`.

    Args:
        ranks: how many ranks the pipeline has.
        micro_batches: how many go through it.
        stages: how many pipeline stages a rank holds.
        placement: "loop", the stages go round the ranks, or "v", there and back.
        cap: the most forward passes whose residuals are alive at once on a rank (`Schedule.in_flight`), or a function
            of the rank. It is `stages` or more. None: no cap, and all forward passes come first.
        split: whether backward passes are halved.
        forward: the duration of a forward pass.
        backward: of a whole backward pass.
        weight: of its weight half.
        hop: of a message.
        cost: by stage, how heavy it is.
        name: the name of the schedule.

    Raises:
        ValueError: if an argument is out of its range.

    Example:
        >>> print(greedy(2, 3, cap=2))
        greedy: 2 ranks, 3 micro-batches; efficiency 0.750; in flight 2, 1
        rank 0  F0 F1  .  . B0 -- F2 B1 --  . B2 --
        rank 1   . F0 B0 -- F1 B1 -- F2 B2 --  .  .

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 3 (which searches for the order in the same way).
    """
    counts(ranks, micro_batches, stages)
    home, caps = placed(ranks, ranks * stages, placement), caps_of(cap, ranks, stages)
    durations = Durations.of(ranks, ranks * stages, forward, backward, weight, hop, cost)
    return listed(home, micro_batches, caps, split, durations, name)


def listed(
    home: tuple[int, ...],
    micro_batches: int,
    caps: Sequence[int | None],
    split: bool,
    durations: Durations,
    name: str,
) -> Schedule:
    """Make the greedy schedule of stages that lie on given ranks, from checked arguments."""
    return Schedule(_World(home, micro_batches, caps, split, durations).run(), home, name)


class _Option(NamedTuple):
    """What a rank could do next: when, and how much it would rather do it (less is better)."""

    at: float
    wish: tuple[int, ...]
    action: Action


class _Rank:
    """A rank while the schedule is made: its stages from first to last, what it has done, and its clock."""

    def __init__(self, stages: list[int], cap: int | None) -> None:
        self.stages, self.cap = stages, cap
        self.row: list[Action] = []
        self.clock, self.alive = 0.0, 0
        self.next = {kind: dict.fromkeys(stages, 0) for kind in "FBW"}  # by stage, the next micro-batch


class _World:
    """The ranks while the schedule is made, and when each value was made."""

    def __init__(
        self, home: tuple[int, ...], micro_batches: int, caps: Sequence[int | None], split: bool, durations: Durations
    ) -> None:
        self.home, self.micro_batches, self.split, self.durations = home, micro_batches, split, durations
        self.ranks = [_Rank([s for s, r in enumerate(home) if r == rank], cap) for rank, cap in enumerate(caps)]
        self.there = dict[Value, float]()

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Have the rank that can start first do its action, until all is done."""
        options = [self.option(rank) for rank in range(len(self.ranks))]
        while ready := [(o.at, rank, o) for rank, o in enumerate(options) if o]:
            _, rank, option = min(ready)
            self.act(rank, option)
            stage = option.action.stage
            for changed in {self.home[s] for s in (stage - 1, stage, stage + 1) if 0 <= s < len(self.home)}:
                options[changed] = self.option(changed)
        return tuple([tuple(rank.row) for rank in self.ranks])

    def act(self, rank: int, option: _Option) -> None:
        """Have a rank do an action."""
        one, action = self.ranks[rank], option.action
        one.row.append(action)
        one.clock = option.at + self.durations[action]
        one.next["B" if action.kind == "I" else action.kind][action.stage] += 1
        one.alive += GROWTH[action.kind]
        if (value := makes(action)) is not None:
            self.there[value] = one.clock

    def option(self, rank: int) -> _Option | None:
        """Return what a rank would do next, as far as is known now: of what can start first, the dearest."""
        found = [
            o
            for s in self.ranks[rank].stages
            for o in (self.backward(rank, s), self.forward(rank, s), self.weight(rank, s))
            if o
        ]
        if not found:
            return None
        soonest = min(o.at for o in found)
        return min((o for o in found if o.at <= soonest + 1e-9), key=lambda o: o.wish)

    def backward(self, rank: int, stage: int) -> _Option | None:
        """Return the next backward pass of a stage. Without a cap it waits for all forward passes."""
        one = self.ranks[rank]
        m = one.next["B"][stage]
        waits = one.cap is None and any(n < self.micro_batches for n in one.next["F"].values())
        return None if waits else self.ready(rank, Action("I" if self.split else "B", stage, m), (0, -stage))

    def forward(self, rank: int, stage: int) -> _Option | None:
        """Return the next forward pass of a stage, if the cap has room for it and for this rank's later stages."""
        one = self.ranks[rank]
        m, later = one.next["F"][stage], len(one.stages) - 1 - one.stages.index(stage)
        full = one.cap is not None and one.alive + later >= one.cap
        # later stages first, but in groups of as many micro-batches as there are ranks: so the loop goes round
        return None if full else self.ready(rank, Action("F", stage, m), (1, m // len(self.ranks), stage))

    def weight(self, rank: int, stage: int) -> _Option | None:
        """Return the next weight half of a stage, which fills a rank's time where nothing else can."""
        one = self.ranks[rank]
        m = one.next["W"][stage]
        return self.ready(rank, Action("W", stage, m), (2, -stage)) if self.split else None

    def ready(self, rank: int, action: Action, wish: tuple[int, ...]) -> _Option | None:
        """Return an action with the time at which it can start, if all that it needs has been made."""
        at = self.ranks[rank].clock
        if action.micro_batch == self.micro_batches:
            return None
        for value in needs(action, len(self.home)):
            if value not in self.there:
                return None
            at = max(at, self.there[value] + (self.durations.hop if self.home[value.stage] != rank else 0.0))
        return _Option(at, wish, action)
