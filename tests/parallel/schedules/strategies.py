"""Random schedules: counts, placements, caps, durations."""

from typing import Any

from hypothesis import strategies as st

from fzero.parallel.schedules import Action, PipelineSchedule, greedy


@st.composite
def durations(draw: Any, stages: int) -> dict[str, Any]:
    cost = draw(st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=stages, max_size=stages) | st.none())
    return {"latency": draw(st.sampled_from([0.0, 0.3])), "weight": draw(st.sampled_from([1.0, 0.5])), "cost": cost}


@st.composite
def schedules(draw: Any, least: int = 1) -> PipelineSchedule:
    """Make any schedule that the generator makes, on `least` ranks and for `least` micro-batches or more."""
    ranks, micro_batches = draw(st.integers(least, 5)), draw(st.integers(least, 9))
    stages, extra = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    cap = draw(st.sampled_from([None, stages + extra, lambda rank: stages * (ranks - rank) + extra]))
    placement, split = draw(st.sampled_from(["loop", "v"])), draw(st.booleans())
    seconds = draw(durations(ranks * stages))
    return greedy(ranks, micro_batches, stages, placement=placement, cap=cap, splits_backward=split, **seconds)


def edit(schedule: PipelineSchedule, rank: int, row: list[Action]) -> PipelineSchedule:
    """Put another row into the place of a rank's."""
    rows = [*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]]
    return PipelineSchedule(tuple(rows), schedule.rank_of_stage, "edited")
