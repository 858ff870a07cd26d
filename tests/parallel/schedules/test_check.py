"""check refuses every wrong table, in words."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fzero.parallel.schedules import Action, PipelineSchedule, check, schedule
from tests.parallel.schedules.strategies import edit, schedules


def table(*rows: str, rank_of_stage: tuple[int, ...] | None = None) -> PipelineSchedule:
    """Make a table of texts without a check of it."""
    results = [[Action(x[1], int(x[0]), int(x[2:])) for x in row.split()] for row in rows]  # pyright: ignore[reportArgumentType]
    return PipelineSchedule(
        tuple(map(tuple, results)), tuple(range(len(rows))) if rank_of_stage is None else rank_of_stage, "wrong"
    )


@pytest.mark.parametrize(
    "wrong,words",
    [
        (table("0F0", "1F0 1B0"), "0B0, or 0I0 and 0W0, of rank 0 is missing: the backward pass of stage 0 for"),
        (table("0F0 0I0", "1F0 1B0"), "0W0 of rank 0 is missing: .* micro-batch 0, of which 0I0 is one half"),
        (table("0F0 0W0", "1F0 1B0"), "0I0 of rank 0 is missing: .* of which 0W0 is one half"),
        (table("0F0 0B0 0W0", "1F0 1B0"), "0B0 is the full backward pass, but 0W0 is there too"),
        (table("0F0 0B0", "1B0"), "1F0, the forward pass of stage 1 for micro-batch 0, is missing on rank 1"),
        (table("0F0 0B0 0F1 0B1", "1F1 1B1"), "1F0, the forward pass .* is missing"),
        (table("0F0 0B0", "1F0 1B0 1F1 1B1"), "1B1, 1F1: stage 0 runs micro-batches 0 to 0 only"),
        (table("0F0 0B0 0B0", "1F0 1B0"), "0B0 appears twice"),
        (table("0F0 0B0 1F0", "1B0"), "rank 0, position 2: 1F0 has a stage that rank 1 holds"),
        (table("0F0 0B0", "1F0 1B0 2F0"), "rank 1, position 2: 2F0 has a stage without a rank; rank_of_stage has 2"),
        (
            table("0F0 0B0", "1F0 1B0", rank_of_stage=(0, 2)),
            r"rank_of_stage\[1\]=2: expected the rank that holds it, 0 to 1",
        ),
        (table("0F0 0B0", "", rank_of_stage=(0,)), "rank 1 holds no stage"),
        (table("", "1F0 1B0"), "stage 0 runs no micro-batch forward"),
        (PipelineSchedule((), ()), "0 ranks and 0 stages"),
        (
            table("0B0 0F0", rank_of_stage=(0,)),
            "rank 0 waits with 0B0 for the output of stage 0 for micro-batch 0, which is rank",
        ),
        (table("0F0 0W0 0I0", rank_of_stage=(0,)), "rank 0 waits with 0W0 for the gradient that stage 0 sends back"),
        (
            table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
            "no rank can continue: rank 0 waits with 0B0 for the gradient that stage 1 sends back for micro-batch 0; "
            "rank 1 waits with 1F1 for the output of stage 0 for micro-batch 1",
        ),
    ],
)
def test_a_wrong_schedule_table_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        check(wrong)


def test_texts_that_are_no_actions_are_refused():
    with pytest.raises(ValueError, match=r"rank 0, position 0: '0F0' is not an Action; PipelineSchedule.parse reads"):
        check(PipelineSchedule((("0F0",),), (0,)))  # pyright: ignore[reportArgumentType]
    for arguments in (("X", 0, 0), ("F", -1, 0), ("F", 0, 1.0), ("F", True, 0)):
        with pytest.raises(ValueError, match="expected one of F, B, I, W, a stage and a micro-batch"):
            Action(*arguments)


@given(schedules(least=2), st.sampled_from(["drop", "double", "other micro-batch", "other stage"]), st.data())
def test_a_planted_fault_in_a_schedule_is_refused(schedule_, fault, data):
    rank = data.draw(st.integers(0, schedule_.ranks - 1))
    row = list(schedule_.rows[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    a = row[at]
    if fault == "drop":
        del row[at]
    elif fault == "double":
        row.insert(data.draw(st.integers(0, len(row))), a)
    elif fault == "other micro-batch":
        row[at] = Action(a.kind, a.stage, (a.micro_batch + 1) % schedule_.micro_batches)
    else:
        row[at] = Action(a.kind, (a.stage + 1) % schedule_.stages, a.micro_batch)
    with pytest.raises(ValueError, match="edited"):
        check(edit(schedule_, rank, row))


@given(schedules(), st.data())
def test_an_action_before_one_that_it_needs_is_refused(schedule_, data):
    rank = data.draw(st.integers(0, schedule_.ranks - 1))
    row = list(schedule_.rows[rank])
    pairs = [
        (i, j)
        for i, a in enumerate(row)
        for j, b in enumerate(row)
        if (a.stage, a.micro_batch) == (b.stage, b.micro_batch)
        and (a.kind, b.kind) in {("F", "B"), ("F", "I"), ("I", "W")}
    ]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    row[i], row[j] = row[j], row[i]
    with pytest.raises(ValueError, match="no rank can continue"):
        check(edit(schedule_, rank, row))


def test_a_schedule_that_cannot_be_run_has_no_timing_and_prints_its_rows_and_the_reason():
    wrong = table("0B0 0F0", rank_of_stage=(0,))
    with pytest.raises(ValueError, match="no rank can continue"):
        wrong.timing()
    with pytest.raises(ValueError, match="no rank can continue"):
        wrong.plot()
    assert str(wrong).splitlines()[:2] == ["wrong: it cannot run", "rank 0  0B0 0F0"]
    assert "no rank can continue" in str(wrong)


def test_whole_and_halved_backward_passes_may_stand_in_one_table():
    check(table("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0"))
    check(schedule("1f1b", 1, 1))
