"""Laws of schedules: the generator's, those of the known orders, and the numbers that papers and notes give."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.parallel.schedules import Action, Message, PipelineSchedule, check, greedy, schedule
from fzero.parallel.schedules._greedy import place_stages
from fzero.parallel.schedules._named_schedules import NAMES
from tests.helpers import examples
from tests.parallel.schedules.strategies import durations, schedules
from tests.parallel.schedules.table import KNOWN, TABLE, Counts

counts = st.integers(1, 8)


def test_each_named_schedule_has_a_row():
    assert {*TABLE} == {*NAMES}, "TABLE in tests/parallel/schedules/table.py has a row for each"


def test_each_named_schedule_is_in_the_docstring():
    missing = [name for name in NAMES if f'"{name}"' not in (schedule.__doc__ or "")]
    assert not missing, f"the docstring of fzero.parallel.schedules.schedule: add {missing}"


@given(schedules())
def test_the_generator_makes_schedules_that_can_be_run(schedule_):
    check(schedule_)


@given(counts, st.integers(1, 12), st.integers(1, 3), st.integers(0, 5), st.booleans(), st.sampled_from(["loop", "v"]))
def test_no_more_is_in_flight_than_the_cap(ranks, micro_batches, stages, extra, split, placement):
    def cap(rank: int) -> int:
        return stages + (rank + extra) % 4

    schedule_ = greedy(ranks, micro_batches, stages, cap=cap, splits_backward=split, placement=placement)
    check(schedule_)
    assert all(schedule_.in_flight(rank) <= cap(rank) for rank in range(ranks))


@examples(25, 100)
@given(st.sampled_from(KNOWN), counts, st.integers(1, 20), st.data())
def test_known_schedules_can_be_run_for_any_count_and_stay_within_their_memory(known, ranks, micro_batches, data):
    (name, stages), given_durations = known, data.draw(durations(known[1] * ranks))
    schedule_ = schedule(name, ranks, micro_batches, stages, **given_durations)
    check(schedule_)
    counted = Counts(ranks, micro_batches, stages)
    most = [TABLE[name].most_in_flight(counted, rank) for rank in range(ranks)]
    assert all(schedule_.in_flight(rank) <= most[rank] for rank in range(ranks))


@examples(14, 100)
@given(counts, st.integers(1, 24))
def test_efficiencies_are_those_of_the_papers(ranks, micro_batches):
    m, p = micro_batches, ranks

    def efficiency(name: str, stages: int = 1) -> float:
        return schedule(name, ranks, micro_batches, stages).timing().efficiency

    assert efficiency("gpipe") == pytest.approx(m / (m + p - 1))
    if m >= p:  # each group of micro-batches fills the ranks
        assert efficiency("gpipe", 2) == pytest.approx(2 * m / (2 * m + p - 1))
        assert efficiency("1f1b") == pytest.approx(m / (m + p - 1))
        assert efficiency("interleaved", 3) == pytest.approx(3 * m / (3 * m + p - 1))
        assert efficiency("zb") == pytest.approx(3 * m / (3 * m + p - 1))
        assert efficiency("zb", 2) == pytest.approx(6 * m / (6 * m + p - 1))
    if m >= 2 * p - 1:
        assert efficiency("zbv", 2) == pytest.approx(6 * m / (6 * m + p - 1))


@pytest.mark.parametrize("ranks,micro_batches", [(4, 4), (5, 4), (5, 5)])
def test_a_greedy_order_in_less_memory_may_end_sooner_and_is_taken(ranks, micro_batches):
    result = schedule("zbv", ranks, micro_batches, 2, weight=0.5)
    other = greedy(ranks, micro_batches, 2, placement="v", cap=result.in_flight, splits_backward=True, weight=0.5)
    assert result.timing(weight=0.5).makespan <= other.timing(weight=0.5).makespan


@given(st.sampled_from(KNOWN), st.integers(1, 5), st.integers(1, 9), st.data())
def test_a_known_schedule_is_never_longer_than_the_greedy_order_in_its_memory(known, ranks, micro_batches, data):
    (name, stages), given_durations = known, data.draw(durations(known[1] * ranks))
    schedule_ = schedule(name, ranks, micro_batches, stages, **given_durations)
    cap = None if name == "gpipe" else schedule_.in_flight
    is_v = schedule_.rank_of_stage == place_stages(ranks, stages * ranks, "v")
    placement, split = "v" if is_v else "loop", NAMES[name].splits_backward
    other = greedy(ranks, micro_batches, stages, placement=placement, cap=cap, splits_backward=split, **given_durations)
    assert schedule_.timing(**given_durations).makespan <= other.timing(**given_durations).makespan * (1 + 1e-9)


# efficiency and the most in flight, in micro-batches, of the schedules of a study that came before this code
STUDY = {
    (4, 8): [(0.727, 8), (0.727, 4), (0.828, 4), (0.889, 7), (0.941, 4)],
    (4, 32): [(0.914, 32), (0.914, 4), (0.950, 4), (0.970, 7), (0.975, 4)],
    (8, 64): [(0.901, 64), (0.901, 8), (0.955, 8), (0.965, 15), (0.982, 8)],
}


@pytest.mark.parametrize("ranks,micro_batches", STUDY)
def test_the_generator_gives_the_numbers_of_the_study(ranks, micro_batches):
    all_schedules = [
        greedy(ranks, micro_batches),
        greedy(ranks, micro_batches, cap=lambda rank: ranks - rank),
        greedy(ranks, micro_batches, cap=ranks, splits_backward=True),
        greedy(ranks, micro_batches, cap=2 * ranks - 1, splits_backward=True),
        greedy(ranks, micro_batches, 2, cap=2 * ranks, splits_backward=True),
    ]
    figures = [(round(s.timing().efficiency, 3), s.in_flight(0) * s.ranks / s.stages) for s in all_schedules]
    assert figures == STUDY[ranks, micro_batches]
    assert [all_schedules[1].in_flight(rank) for rank in range(ranks)] == list(range(ranks, 0, -1))


def test_slow_links_and_uneven_stages_cost_the_efficiency_of_the_study():
    def efficiency(extra: int, times: int = 1, **durations: object) -> float:
        schedule_ = greedy(4, 16, cap=lambda rank: times * (4 - rank) + extra, **durations)  # pyright: ignore[reportArgumentType]
        return round(schedule_.timing(**durations).efficiency, 3)  # pyright: ignore[reportArgumentType]

    assert [efficiency(0, latency=0.5), efficiency(1, latency=0.5), efficiency(-1, 2, latency=0.5)] == [
        0.676,
        0.727,
        0.800,
    ]
    assert [efficiency(0), efficiency(0, cost=[1, 1, 1, 1.5])] == [0.842, 0.667]


def test_zero_bubble_needs_no_more_memory_than_1f1b_for_its_shortest_step():
    # The greedy order takes 29 units here. Gradients run ahead where rank r does weights r passes later: 24 + 3.
    schedule_ = schedule("zb", 4, 8)
    assert schedule_.timing().makespan == 27
    assert {schedule_.in_flight(rank) for rank in range(4)} == {4}
    assert greedy(4, 8, cap=4, splits_backward=True).timing().makespan == 29


@pytest.mark.slow
def test_twenty_stages_reach_90_percent_efficiency_with_171_micro_batches():
    m = 171
    assert schedule("1f1b", 20, m - 1).timing().efficiency < 0.9 <= schedule("1f1b", 20, m).timing().efficiency
    assert (schedule("gpipe", 20, m).in_flight(0), schedule("1f1b", 20, m).in_flight(0)) == (171, 20)


def test_1f1b_is_the_table_that_people_draw():
    assert (
        str(schedule("1f1b", 3, 4))
        == """\
1f1b: 3 ranks, 4 micro-batches; efficiency 0.667; in flight 3, 2, 1
rank 0  F0 F1 F2  .  .  .  . B0 -- F3 B1 --  . B2 --  . B3 --
rank 1   . F0 F1  .  . B0 -- F2 B1 -- F3 B2 --  . B3 --  .  .
rank 2   .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --  .  .  .  ."""
    )


def test_a_long_schedule_prints_in_several_rows():
    lines = str(schedule("interleaved", 2, 16, 2)).splitlines()
    assert max(map(len, lines)) <= 120
    assert [line[:6] for line in lines[1:]] == (["rank 0", "rank 1", ""] * 5)[:-1]
    drawn = " ".join([line[6:] for line in lines[1:]]).split()
    for row in schedule("interleaved", 2, 16, 2).rows:
        assert {str(action) for action in row} <= {*drawn}


def test_messages_of_a_schedule_are_listed_in_the_order_of_each_sender():
    schedule_ = schedule("zbv", 2, 1, 2)  # stages 0 1 2 3 on ranks 0 1 1 0
    assert schedule_.rank_of_stage == (0, 1, 1, 0)
    assert schedule_.messages == (
        Message(0, 1, "F", 0, 0),
        Message(0, 1, "G", 3, 0),
        Message(1, 0, "F", 2, 0),
        Message(1, 0, "G", 1, 0),
    )
    assert len(schedule("1f1b", 4, 8).messages) == 2 * 3 * 8
    assert schedule("gpipe", 1, 4, 3).messages == ()


@given(schedules())
def test_each_message_of_a_schedule_is_sent_once_to_a_rank_that_needs_it(schedule_):
    assert len({*schedule_.messages}) == len(schedule_.messages)
    for sender, receiver, kind, stage, m in schedule_.messages:
        user = Action("F", stage + 1, m) if kind == "F" else None
        users = {user} if user else {Action("B", stage - 1, m), Action("I", stage - 1, m)}
        assert schedule_.rank_of_stage[stage] == sender != receiver
        assert users & {*schedule_.rows[receiver]}


@examples(25, 50)
@given(schedules(), st.data())
def test_a_timing_obeys_the_ranks_and_the_dependencies(schedule_, data):
    known = data.draw(durations(schedule_.stages))
    t = schedule_.timing(**known)
    for row in schedule_.rows:
        for before, after in itertools.pairwise(row):
            assert t.end[before] <= t.start[after]
    for a in t.start:
        if a.kind == "F" and a.stage:
            latency = known["latency"] * (schedule_.rank_of_stage[a.stage] != schedule_.rank_of_stage[a.stage - 1])
            assert t.end[Action("F", a.stage - 1, a.micro_batch)] + latency <= t.start[a]
        if a.kind in "BI":
            assert t.end[Action("F", a.stage, a.micro_batch)] <= t.start[a]
    share = schedule_.ranks / schedule_.stages
    cost = known["cost"] or [1.0] * schedule_.stages
    assert sum(t.busy) == pytest.approx(3 * share * schedule_.micro_batches * sum(cost))
    assert max(t.end.values()) == t.makespan


@given(st.integers(1, 5), st.integers(1, 5))
def test_sending_early_lets_ranks_wait_for_input_halves_only(ranks, factor):
    """A rank waits for input halves only; the work of a rank stays, and split schedules send so by themselves."""
    m = ranks * factor
    one = schedule("1f1b", ranks, m)
    assert one.timing().makespan == pytest.approx(3 * (m + ranks - 1))
    assert one.timing(sends_early=True).makespan == pytest.approx(3 * m + 2 * (ranks - 1))
    assert schedule("zb", ranks, m).timing(sends_early=True) == schedule("zb", ranks, m).timing()


def test_schedules_compare_and_hash_by_value():
    assert schedule("1f1b", 3, 4) == schedule("1f1b", 3, 4)
    assert len({schedule("1f1b", 3, 4), schedule("1f1b", 3, 4), schedule("1f1b", 3, 5)}) == 2
    assert repr(schedule("zb", 1, 1)) == "PipelineSchedule('zb': 1 rank, 1 stage, 1 micro-batch)"


@pytest.mark.parametrize(
    "arguments,options,words",
    [
        (("1f1", 4, 8), {}, "did you mean '1f1b'"),
        (("1f1b", 4, 8, 2), {}, r"needs stages_per_rank=1, but got 2: 'interleaved' has more"),
        (("interleaved", 4, 8), {}, r"needs stages_per_rank=2 or more, but got 1: '1f1b' has one"),
        (("zbv", 4, 8), {}, "needs stages_per_rank=2, but got 1: 'zb' supports any number"),
        (("zbv", 4, 8, 3), {}, "needs stages_per_rank=2"),
        (("gpipe", 4, 8), {"cap": 3}, "'gpipe' takes no cap, but got cap=3"),
        (("zb", 4, 8, 2), {"cap": 1}, "cap=1 on rank 0: expected an int, at least 2"),
        (("1f1b", 4, 8), {"cap": lambda rank: 3 - rank}, "cap=0 on rank 3: expected an int, at least 1"),
        (("1f1b", 0, 8), {}, "ranks=0: expected an int, at least 1"),
        (("1f1b", 4, 0), {}, "micro_batches=0: expected an int, at least 1"),
        (("1f1b", 4, 8.0), {}, "micro_batches=8.0"),
        (("zb", 4, 8, 0), {}, "stages_per_rank=0"),
        (("zb", 4, 8), {"latency": -1}, "latency=-1: expected a duration"),
        (("zb", 4, 8), {"backward": float("nan")}, "backward=nan: expected a duration"),
        (("zb", 4, 8), {"weight": 3}, "weight=3 is more than backward=2.0"),
        (("zb", 4, 8), {"cost": [1, 2]}, "cost has 2 numbers: expected one for each of the 4 stages"),
        (("zb", 2, 8), {"cost": [1, 0]}, "expected finite numbers above 0"),
        (("zb", 2, 8), {"forward": 0, "backward": 0, "weight": 0}, "nothing takes time"),
    ],
)
def test_an_impossible_schedule_names_its_wrong_argument(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        schedule(*arguments, **options)


def test_greedy_refuses_an_unknown_placement():
    with pytest.raises(ValueError, match="placement='zigzag': expected 'loop'"):
        greedy(2, 2, 2, placement="zigzag")  # pyright: ignore[reportArgumentType]


def test_a_cap_sets_the_memory_and_hides_slow_links():
    fast, wide = (
        schedule("1f1b", 4, 16, latency=0.5),
        schedule("1f1b", 4, 16, cap=lambda r: 2 * (4 - r) - 1, latency=0.5),
    )
    assert wide.timing(latency=0.5).efficiency > fast.timing(latency=0.5).efficiency + 0.1
    near, far = schedule("interleaved", 4, 8, 2, cap=lambda r: 8 - r), schedule("interleaved", 4, 8, 2)
    assert (near.timing().makespan, near.in_flight(0)) == (28.5, 8)
    assert (far.timing().makespan, far.in_flight(0)) == (28.5, 11)
    assert near.timing(latency=0.2).makespan > far.timing(latency=0.2).makespan + 3
    assert schedule("interleaved", 4, 8, 2, cap=6).in_flight(0) <= 6


def test_a_schedule_may_be_made_of_lists():
    schedule_ = PipelineSchedule([[Action("F", 0, 0), Action("B", 0, 0)]], [0])  # pyright: ignore[reportArgumentType]
    check(schedule_)
    assert schedule_.rows == ((Action("F", 0, 0), Action("B", 0, 0)),)


@pytest.mark.parametrize("name,stages", KNOWN)
def test_memory_and_messages_are_the_formulas_of_the_page(name, stages):
    counted, row = Counts(4, 16, stages), TABLE[name]
    schedule_ = schedule(name, *counted)
    in_flight = [schedule_.in_flight(r) / stages for r in range(4)]
    assert in_flight == [row.in_flight(counted, r) for r in range(4)]
    assert len(schedule_.messages) == row.num_messages(counted)
