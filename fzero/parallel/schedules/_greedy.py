"""A generator of schedules: a list scheduler with a cap on what is in flight."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from fzero.parallel.schedules._actions import GROWTH, Action, Value, makes, needs
from fzero.parallel.schedules._schedule import Schedule
from fzero.parallel.schedules._timing import Durations

__all__ = ["Cap", "Placement", "caps_of", "check_counts", "greedy", "list_schedule", "place_stages"]

Cap = int | Callable[[int], int] | None
Placement = Literal["loop", "v"]


def check_counts(ranks: int, micro_batches: int, stages: int) -> None:
    """Check a user's counts.

    Raises:
        ValueError: if one is not an int, or is less than 1.
    """
    for word, value in (("ranks", ranks), ("micro_batches", micro_batches), ("stages", stages)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{word}={value!r}: expected an int, at least 1")


def caps_of(cap: Cap, ranks: int, stages: int) -> list[int | None]:
    """Return the cap of each rank; None for no cap.

    Raises:
        ValueError: if a cap has no room for one micro-batch, which has a forward pass for each stage of a rank.
    """
    if cap is None:
        return [None] * ranks
    caps: list[int | None] = [cap(rank) if callable(cap) else cap for rank in range(ranks)]
    for rank, most in enumerate(caps):
        if type(most) is not int or most < stages:
            raise ValueError(
                f"cap={most!r} on rank {rank}: expected an int, at least {stages}, since one micro-batch has {stages} "
                "forward passes there, one for each stage"
            )
    return caps


def place_stages(ranks: int, stages: int, placement: Placement = "loop") -> tuple[int, ...]:
    """Return the rank of each pipeline stage, with the same number of stages on each rank.

    "loop" starts again at rank 0, 0 1 2 0 1 2; "v" turns back at the last rank, 0 1 2 2 1 0.
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
    """Make a schedule: whenever a rank is free, it runs an action that is ready, backward passes before forward ones.

    Without a cap this is GPipe. With `cap=lambda rank: ranks - rank` it is 1F1B, and with `split` weight halves fill
    what would be bubbles. Model slow links and uneven stages by the durations, which are those of `Schedule.timing`.

    Args:
        ranks: the number of ranks in the pipeline.
        micro_batches: the number of micro-batches.
        stages: the number of pipeline stages per rank.
        placement: "loop", stages start again at rank 0, or "v", they turn back at the last rank.
        cap: the most forward passes whose residuals are alive at once on a rank (`Schedule.in_flight`), at least
            `stages`; or a function of the rank. With None there is no cap, and all forward passes come first.
        split: whether backward passes are split into two halves.
        forward: the duration of a forward pass.
        backward: the duration of a full backward pass.
        weight: the duration of its weight half.
        hop: the duration of a message.
        cost: by stage, its relative cost.
        name: the name of the schedule.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> print(greedy(2, 3, cap=2))
        greedy: 2 ranks, 3 micro-batches; efficiency 0.750; in flight 2, 1
        rank 0  F0 F1  .  . B0 -- F2 B1 --  . B2 --
        rank 1   . F0 B0 -- F1 B1 -- F2 B2 --  .  .

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 3 (which searches for the order in the same way).
    """
    check_counts(ranks, micro_batches, stages)
    home, caps = place_stages(ranks, ranks * stages, placement), caps_of(cap, ranks, stages)
    durations = Durations.of(ranks, ranks * stages, forward, backward, weight, hop, cost)
    return list_schedule(home, micro_batches, caps, split, durations, name)


def list_schedule(
    home: tuple[int, ...],
    micro_batches: int,
    caps: Sequence[int | None],
    split: bool,
    durations: Durations,
    name: str,
) -> Schedule:
    """Make the greedy schedule for stages on the given ranks, from arguments that were checked."""
    return Schedule(_Simulation(home, micro_batches, caps, split, durations).run(), home, name)


class _Option(NamedTuple):
    """An action that a rank could run next, its start, and its priority (the smallest comes first)."""

    at: float
    priority: tuple[int, ...]
    action: Action


class _Rank:
    """The state of one rank while the schedule is made: its stages in order, its row, and its clock."""

    def __init__(self, stages: list[int], cap: int | None) -> None:
        self.stages, self.cap = stages, cap
        self.row: list[Action] = []
        self.clock, self.alive = 0.0, 0
        self.next = {kind: dict.fromkeys(stages, 0) for kind in "FBW"}  # by kind and stage, the next micro-batch


class _Simulation:
    """The state of all ranks while the schedule is made, and the time at which each value was computed."""

    def __init__(
        self, home: tuple[int, ...], micro_batches: int, caps: Sequence[int | None], split: bool, durations: Durations
    ) -> None:
        self.home, self.micro_batches, self.split, self.durations = home, micro_batches, split, durations
        self.ranks = [_Rank([s for s, r in enumerate(home) if r == rank], cap) for rank, cap in enumerate(caps)]
        self.value_times = dict[Value, float]()

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Let the rank that can start first run its action, until no action is left."""
        options = [self.option(rank) for rank in range(len(self.ranks))]
        while candidates := [(o.at, rank, o) for rank, o in enumerate(options) if o]:
            _, rank, option = min(candidates)
            self.act(rank, option)
            stage = option.action.stage
            for neighbour in {self.home[s] for s in (stage - 1, stage, stage + 1) if 0 <= s < len(self.home)}:
                options[neighbour] = self.option(neighbour)
        return tuple([tuple(rank.row) for rank in self.ranks])

    def act(self, rank: int, option: _Option) -> None:
        """Run an action on a rank."""
        state, action = self.ranks[rank], option.action
        state.row.append(action)
        state.clock = option.at + self.durations[action]
        state.next["B" if action.kind == "I" else action.kind][action.stage] += 1
        state.alive += GROWTH[action.kind]
        if (value := makes(action)) is not None:
            self.value_times[value] = state.clock

    def option(self, rank: int) -> _Option | None:
        """Return a rank's next action: of those that can start first, the one with the best priority."""
        options = [
            o
            for s in self.ranks[rank].stages
            for o in (self.backward(rank, s), self.forward(rank, s), self.weight(rank, s))
            if o
        ]
        if not options:
            return None
        earliest = min(o.at for o in options)
        return min((o for o in options if o.at <= earliest + 1e-9), key=lambda o: o.priority)

    def backward(self, rank: int, stage: int) -> _Option | None:
        """Return the next backward pass of a stage. Without a cap it waits for all forward passes."""
        state = self.ranks[rank]
        m = state.next["B"][stage]
        is_blocked = state.cap is None and any(n < self.micro_batches for n in state.next["F"].values())
        return None if is_blocked else self.option_at(rank, Action("I" if self.split else "B", stage, m), (0, -stage))

    def forward(self, rank: int, stage: int) -> _Option | None:
        """Return the next forward pass of a stage, if the cap has room for it and for this rank's later stages."""
        state = self.ranks[rank]
        m, later = state.next["F"][stage], len(state.stages) - 1 - state.stages.index(stage)
        is_full = state.cap is not None and state.alive + later >= state.cap
        # Later stages come first, within groups of as many micro-batches as ranks, so that the loop continues.
        return None if is_full else self.option_at(rank, Action("F", stage, m), (1, m // len(self.ranks), stage))

    def weight(self, rank: int, stage: int) -> _Option | None:
        """Return the next weight half of a stage, which fills a rank's time if no other action can."""
        state = self.ranks[rank]
        m = state.next["W"][stage]
        return self.option_at(rank, Action("W", stage, m), (2, -stage)) if self.split else None

    def option_at(self, rank: int, action: Action, priority: tuple[int, ...]) -> _Option | None:
        """Return an action and the time at which it can start, if all values that it needs are computed."""
        at = self.ranks[rank].clock
        if action.micro_batch == self.micro_batches:
            return None
        for value in needs(action, len(self.home)):
            if value not in self.value_times:
                return None
            at = max(at, self.value_times[value] + (self.durations.hop if self.home[value.stage] != rank else 0.0))
        return _Option(at, priority, action)
