"""The greedy schedule: a list scheduler that starts at each moment the action that is most urgent."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from fzero._arguments import check_int, is_int
from fzero._tracebacks import api_boundary
from fzero.parallel.schedules._actions import IN_FLIGHT_CHANGE, Action, Value, action_inputs, action_output, stages_on
from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule
from fzero.parallel.schedules._timing import Durations

__all__ = ["Cap", "caps_by_rank", "check_counts", "greedy", "list_schedule", "place_stages"]

Cap = int | Callable[[int], int] | None
_StagePlacement = Literal["loop", "v"]


def check_counts(ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    """Check a user's counts.

    Raises:
        ValueError: if one is not an int, or is less than 1.
    """
    for word, value in (("ranks", ranks), ("micro_batches", micro_batches), ("stages_per_rank", stages_per_rank)):
        check_int(word, value)


def caps_by_rank(cap: Cap, ranks: int, stages_per_rank: int) -> list[int | None]:
    """Return the cap of each rank; None for no cap.

    Raises:
        ValueError: if a cap has no room for one micro-batch, which has a forward pass for each stage of a rank.
    """
    if cap is None:
        return [None] * ranks
    caps: list[int | None] = [cap(rank) if callable(cap) else cap for rank in range(ranks)]
    for rank, limit in enumerate(caps):
        if not is_int(limit) or limit < stages_per_rank:
            raise ValueError(
                f"cap={limit!r} on rank {rank}: expected an int, at least {stages_per_rank}, since one micro-batch has "
                f"{stages_per_rank} forward passes there, one for each stage"
            )
    return caps


def place_stages(ranks: int, stages: int, placement: _StagePlacement = "loop") -> tuple[int, ...]:
    """Return the rank of each pipeline stage, with the same number of stages on each rank.

    "loop" starts again at rank 0, 0 1 2 0 1 2; "v" turns back at the last rank, 0 1 2 2 1 0.
    """
    if placement not in ("loop", "v"):
        raise ValueError(f"placement={placement!r}: expected 'loop' (0 1 2 0 1 2) or 'v' (0 1 2 2 1 0)")
    back = [placement == "v" and s // ranks % 2 == 1 for s in range(stages)]
    return tuple([ranks - 1 - s % ranks if back[s] else s % ranks for s in range(stages)])


@api_boundary
def greedy(
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    *,
    placement: _StagePlacement = "loop",
    cap: Cap = None,
    splits_backward: bool = False,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
    latency: float = 0.0,
    cost: Sequence[float] | None = None,
    name: str = "greedy",
) -> PipelineSchedule:
    """Make a schedule: whenever a rank is free, it runs an action that is ready, backward passes before forward ones.

    Without a cap this is GPipe. With `cap=lambda rank: ranks - rank` it is 1F1B. With `splits_backward` weight halves
    fill what would be bubbles. Model slow links and uneven stages by the durations, which are those of
    `PipelineSchedule.timing`.

    Args:
        ranks: the number of ranks in the pipeline.
        micro_batches: the number of micro-batches.
        stages_per_rank: the number of pipeline stages per rank.
        placement: "loop", stages start again at rank 0, or "v", they turn back at the last rank.
        cap: the most forward passes whose residuals are in flight at once on a rank (`PipelineSchedule.in_flight`), at
            least `stages_per_rank`; or a function of the rank. With None there is no cap, and all forward passes come
            first.
        splits_backward: whether backward passes are split into two halves.
        forward: the duration of a forward pass.
        backward: the duration of a full backward pass.
        weight: the duration of its weight half.
        latency: the duration of a message.
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
    check_counts(ranks, micro_batches, stages_per_rank)
    rank_of_stage = place_stages(ranks, ranks * stages_per_rank, placement)
    caps = caps_by_rank(cap, ranks, stages_per_rank)
    durations = Durations.of(
        ranks,
        stages=ranks * stages_per_rank,
        forward=forward,
        backward=backward,
        weight=weight,
        latency=latency,
        cost=cost,
    )
    return list_schedule(rank_of_stage, micro_batches, caps, splits_backward, durations, name)


def list_schedule(
    rank_of_stage: tuple[int, ...],
    micro_batches: int,
    caps: Sequence[int | None],
    splits_backward: bool,
    durations: Durations,
    name: str,
) -> PipelineSchedule:
    """Make the greedy schedule for stages on the given ranks, from arguments that were checked."""
    return PipelineSchedule(
        _Simulation(rank_of_stage, micro_batches, caps, splits_backward, durations).run(), rank_of_stage, name
    )


class _Option(NamedTuple):
    """An action that a rank could run next, its start, and its priority (the smallest comes first)."""

    at: float
    priority: tuple[int, ...]
    action: Action


class _Rank:
    """The state of one rank while the schedule is made: its stages in order, its actions, and its clock."""

    def __init__(self, stages: list[int], cap: int | None) -> None:
        self.stages, self.cap = stages, cap
        self.actions: list[Action] = []
        self.clock, self.in_flight = 0.0, 0
        self.next = {kind: dict.fromkeys(stages, 0) for kind in "FBW"}  # by kind and stage, the next micro-batch


class _Simulation:
    """The state of all ranks while the schedule is made, and the time at which each value was computed."""

    def __init__(
        self,
        rank_of_stage: tuple[int, ...],
        micro_batches: int,
        caps: Sequence[int | None],
        splits_backward: bool,
        durations: Durations,
    ) -> None:
        self.rank_of_stage, self.micro_batches = rank_of_stage, micro_batches
        self.splits_backward, self.durations = splits_backward, durations
        self.ranks = [_Rank(stages_on(rank, rank_of_stage), cap) for rank, cap in enumerate(caps)]
        self.value_times = dict[Value, float]()

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Let the rank that can start first run its action, until no action is left."""
        options = [self.option(rank) for rank in range(len(self.ranks))]
        while candidates := [(o.at, rank, o) for rank, o in enumerate(options) if o]:
            _, rank, option = min(candidates)
            self.act(rank, option)
            stage = option.action.stage
            for neighbour in {
                self.rank_of_stage[s] for s in (stage - 1, stage, stage + 1) if 0 <= s < len(self.rank_of_stage)
            }:
                options[neighbour] = self.option(neighbour)
        return tuple([tuple(rank.actions) for rank in self.ranks])

    def act(self, rank: int, option: _Option) -> None:
        """Run an action on a rank."""
        state, action = self.ranks[rank], option.action
        state.actions.append(action)
        state.clock = option.at + self.durations[action]
        state.next["B" if action.kind == "I" else action.kind][action.stage] += 1
        state.in_flight += IN_FLIGHT_CHANGE[action.kind]
        if (value := action_output(action)) is not None:
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
        if is_blocked:
            return None
        return self.option_at(rank, Action("I" if self.splits_backward else "B", stage, m), (0, -stage))

    def forward(self, rank: int, stage: int) -> _Option | None:
        """Return the next forward pass of a stage, if the cap has room for it and for this rank's later stages."""
        state = self.ranks[rank]
        m, later = state.next["F"][stage], len(state.stages) - 1 - state.stages.index(stage)
        is_full = state.cap is not None and state.in_flight + later >= state.cap
        # Later stages come first, within groups of as many micro-batches as ranks, so that the loop continues.
        return None if is_full else self.option_at(rank, Action("F", stage, m), (1, m // len(self.ranks), stage))

    def weight(self, rank: int, stage: int) -> _Option | None:
        """Return the next weight half of a stage, which fills a rank's time if no other action can."""
        state = self.ranks[rank]
        m = state.next["W"][stage]
        return self.option_at(rank, Action("W", stage, m), (2, -stage)) if self.splits_backward else None

    def option_at(self, rank: int, action: Action, priority: tuple[int, ...]) -> _Option | None:
        """Return an action and the time at which it can start, if all values that it needs are computed."""
        start = self.ranks[rank].clock
        if action.micro_batch == self.micro_batches:
            return None
        for value in action_inputs(action, len(self.rank_of_stage)):
            if value not in self.value_times:
                return None
            start = max(
                start,
                self.value_times[value] + (self.durations.latency if self.rank_of_stage[value.stage] != rank else 0.0),
            )
        return _Option(start, priority, action)
