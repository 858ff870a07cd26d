"""The failure detectors of heartbeats, on a simulated network: who is lost, and when, and that a slow rank is not."""

import random
from typing import Any

import pytest

from fzero._liveness._failure_detector import (
    FIRST_MESH,
    Activity,
    FailureDetector,
    ProcessClock,
    RankZeroDetector,
    show_activities,
)

LIMIT, STALL, BEAT = 60.0, 300.0, 2.0
WORK = Activity("a", step=3, text="work")
WAITS = Activity("a", step=3, text="psum over 'dp'", waiting=True, idle=1.0)


class Network:
    """Rank 0's failure detector, those of the other ranks, and datagrams between them that may be late or lost."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self.now, self.rng = 0.0, random.Random(seed)
        self.hub, self.members = (
            FailureDetector(ranks, LIMIT, STALL),
            {r: RankZeroDetector(LIMIT) for r in range(1, ranks)},
        )
        self.activities = {r: WORK._replace(host=f"host-{r}") for r in range(ranks)}
        self.loss, self.delay = {(r, s): 0.0 for r in range(ranks) for s in range(ranks)}, 0.01
        self.stopped: set[int] = set()
        self.flying: list[tuple[float, int, int, Any]] = []

    def send(self, source: int, target: int, message: Any) -> None:
        if self.rng.random() >= self.loss[source, target]:
            self.flying.append((self.now + self.delay, source, target, message))

    def cut(self, rank: int, outward: bool = True, inward: bool = True) -> None:
        for other in self.activities:
            self.loss[rank, other] = float(outward) or self.loss[rank, other]
            self.loss[other, rank] = float(inward) or self.loss[other, rank]

    def run(self, seconds: float) -> None:
        """Let time go on, by a tenth of a second at a time; the ranks beat each `BEAT` seconds."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            arrived = [x for x in self.flying if x[0] <= self.now]
            self.flying = [x for x in self.flying if x[0] > self.now]
            for _, source, target, message in arrived:
                if target in self.stopped:
                    continue
                if target:
                    self.members[target].hear(message, self.now)
                else:
                    activity, sent_at, echo = message
                    self.hub.hear(source, activity, echo, self.now)
                    verdict, places = (
                        self.hub.verdict,
                        show_activities({r: p for r, p in self.hub.activities.items() if r}),
                    )
                    self.send(0, source, {**self.reply(places, verdict), "echo": sent_at})
            if round(self.now * 10) % round(BEAT * 10) == 0:
                self.hub.hear(0, self.activities[0], None, self.now)
                for rank, member in self.members.items():
                    if rank not in self.stopped:
                        self.send(rank, 0, (self.activities[rank], self.now, member.heard))
            self.hub.detect(self.now)
            for rank, member in self.members.items():
                member.detect(self.now, self.activities[rank].broken)

    def reply(self, places: str, verdict: Any) -> dict[str, Any]:
        return {"sent": self.now, "activity": self.activities[0], "places": places, "verdict": verdict}

    def verdicts(self) -> dict[int, int | None]:
        detectors = {0: self.hub, **self.members}
        return {r: d.verdict and d.verdict.rank for r, d in detectors.items() if r not in self.stopped}


def test_a_whole_network_has_no_verdict():
    network = Network(4)
    network.run(1000)
    assert set(network.verdicts().values()) == {None}


@pytest.mark.parametrize("outward,inward", [(True, True), (True, False), (False, True)])
def test_a_cut_is_noticed_at_both_ends(outward, inward):
    """They notice it, too, if only one direction is cut."""
    network = Network(3)
    network.run(100)
    network.cut(2, outward, inward)
    network.run(LIMIT - 5)
    assert set(network.verdicts().values()) == {None}
    network.run(10)
    assert network.verdicts() == {0: 2, 1: 2, 2: 0}
    verdict = network.members[1].verdict
    assert verdict is not None and "rank 2 (host-2) is lost: no heartbeat came through for 6" in str(verdict)
    assert "last seen in step 3, work; the others: ranks 0-1 (2 hosts) in step 3, work" in str(verdict)


def test_all_survivors_have_one_verdict():
    network = Network(5)
    network.run(20)
    network.stopped = {3, 4}
    network.run(LIMIT + 10)
    assert network.verdicts() == {0: 3, 1: 3, 2: 3}
    assert "rank 4 (host-4) in step 3, work (silent)" in str(network.hub.verdict)


@pytest.mark.parametrize("seed", range(5))
def test_losses_and_delays_blame_nobody(seed):
    network = Network(3, seed)
    network.loss, network.delay = dict.fromkeys(network.loss, 0.3), 2.0
    network.run(2000)
    assert set(network.verdicts().values()) == {None}


def test_a_detector_that_was_paused_blames_nobody():
    """Its clock goes on by one step after a pause, however long that was."""
    clock = ProcessClock(1000.0, 4.0)
    hub = FailureDetector(2, LIMIT, STALL)
    now = clock.tick(1001.0)
    hub.hear(0, WORK, None, now)
    hub.hear(1, WORK, None, now)
    assert clock.tick(1001.0 + 10 * LIMIT) == 5.0
    assert hub.detect(clock.now) is None


@pytest.mark.parametrize("seconds", [LIMIT / 2, 10 * LIMIT])
def test_a_rank_that_works_long_is_not_lost(seconds):
    """While it compiles, for instance, it beats, and the others wait for it."""
    network = Network(3)
    network.run(10)
    network.activities[0] = network.activities[2] = WAITS._replace(idle=seconds)
    network.run(seconds)
    assert set(network.verdicts().values()) == {None}


def test_a_deadlock_of_waiting_ranks_is_a_verdict():
    network = Network(3)
    network.run(10)
    network.activities = {r: WAITS._replace(host=f"host-{r}", idle=STALL + 1, count=r) for r in range(3)}
    network.run(10)
    assert network.verdicts() == {0: 0, 1: 0, 2: 0}
    assert "it has not gone on for 301 s, and the ranks wait for one another" in str(network.hub.verdict)


@pytest.mark.parametrize("works", [None, 0, 1])
def test_ranks_that_are_all_idle_get_a_verdict_after_the_limit(works):
    """Where the system does not tell all that a rank uses, they are waited for until it has been idle for longer."""
    network = Network(2)
    network.run(10)
    network.activities = {r: WAITS._replace(idle=LIMIT + 1, is_known=True) for r in (0, 1)}
    if works is not None:
        network.activities[works] = WORK._replace(idle=STALL - 1)
    network.run(10)
    assert set(network.verdicts().values()) == {0 if works is None else None}


@pytest.mark.parametrize("waiting", [True, False])
def test_a_rank_that_works_without_end_is_blamed_after_twice_the_timeout(waiting):
    """It is in a loop that never ends, or in a wait that looks around without a pause."""
    network = Network(3)
    network.run(10)
    network.activities = {r: WAITS._replace(seconds=2 * STALL + 1) for r in range(3)}
    network.activities[2] = WAITS._replace(waiting=waiting, step=2, seconds=2 * STALL - 1)
    network.run(10)
    assert set(network.verdicts().values()) == {None}
    network.activities[2] = network.activities[2]._replace(seconds=2 * STALL + 1)
    network.run(10)
    assert set(network.verdicts().values()) == {2}
    assert "it has worked at one place for 601 s, and the" in str(network.hub.verdict)


def test_a_cut_link_between_two_ranks_is_a_verdict_after_the_limit():
    """The rank at which most such links end is named, with one at the other end."""
    network = Network(4)
    network.run(10)
    network.activities[1] = WAITS._replace(cut=(2, LIMIT - 1))
    network.activities[3] = WAITS._replace(cut=(2, LIMIT - 10))
    network.run(10)
    assert set(network.verdicts().values()) == {None}
    network.activities[1] = WAITS._replace(cut=(2, LIMIT + 1))
    network.run(10)
    assert set(network.verdicts().values()) == {2}
    text = "nothing has come through between it and rank 1 (a) for 61 s, though both reach rank 0's host"
    assert text in str(network.hub.verdict)


def test_a_rank_without_a_heartbeat_is_blamed_if_all_others_wait():
    """It was lost between the meeting at the first mesh and its first heartbeat."""
    hub, member = FailureDetector(3, LIMIT, STALL), RankZeroDetector(LIMIT, "host-0")
    for rank in (0, 1):
        hub.hear(rank, WAITS._replace(idle=LIMIT - 1, is_known=True), None, 1.0)
    assert hub.detect(1.0) is None
    for rank in (0, 1):
        hub.hear(rank, WAITS._replace(idle=LIMIT + 1, is_known=True), 1.0, 2.0)
    verdict = hub.detect(2.0)
    assert verdict is not None and (verdict.rank, verdict.reason) == (2, "no heartbeat of it has ever come")
    assert member.detect(2.0, "", WAITS._replace(idle=LIMIT + 1)) is None  # a firewall may drop heartbeats
    verdict = member.detect(2.0, "", Activity(text=FIRST_MESH, waiting=True, idle=LIMIT + 1))
    assert verdict is not None and (verdict.rank, verdict.host) == (0, "host-0")


def test_an_idle_rank_for_which_others_wait_is_blamed():
    network = Network(3)
    network.activities[1] = WORK._replace(idle=STALL + 1)
    network.run(10)
    assert set(network.verdicts().values()) == {None}  # nobody waits for it
    network.activities[0] = network.activities[2] = WAITS._replace(idle=STALL + 1)
    network.run(10)
    assert network.verdicts() == {0: 1, 1: 1, 2: 1}
    assert "and the others wait for it" in str(network.hub.verdict)


def test_the_verdict_tells_a_stopped_process_from_a_silent_one():
    network = Network(3)
    network.run(10)
    network.activities[1] = WORK._replace(process="stopped")
    network.run(LIMIT - 5)
    network.activities[1] = WORK  # it goes on, and is stopped again
    network.run(BEAT + 1)
    network.activities[1] = WORK._replace(process="stopped")
    network.run(LIMIT - 5)
    assert set(network.verdicts().values()) == {None}
    network.run(15)
    assert network.verdicts() == {0: 1, 1: 1, 2: 1}
    assert "its process has been stopped (SIGSTOP)" in str(network.hub.verdict)


@pytest.mark.parametrize("process,reason", [("ended", "its script ended"), ("died", "died without a word")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_process_is_gone_is_lost_once_others_wait_for_it(process, reason, rank):
    network = Network(3)
    network.run(10)
    network.activities[rank] = WORK._replace(process=process)
    network.run(10)
    assert set(network.verdicts().values()) == {None}
    network.activities[2] = WAITS._replace(broken="Connection closed by peer")
    network.run(BEAT + 1)
    assert network.hub.verdict is not None and reason in network.hub.verdict.reason
    network.run(BEAT + 1)
    assert network.members[2].verdict is not None and network.members[2].verdict.rank == rank


def test_ranks_that_go_on_after_one_has_ended_get_no_verdict():
    """Rank 0 may have ended too: its silence does not count as a loss then."""
    network = Network(4)
    network.run(10)
    network.activities[3] = WORK._replace(process="ended")
    network.activities[1] = WAITS._replace(idle=LIMIT + 1)
    network.run(2 * LIMIT)
    network.activities[0] = WORK._replace(process="ended")
    network.run(BEAT + 1)
    network.cut(0)
    network.run(3 * LIMIT)
    assert {r: v for r, v in network.verdicts().items() if r} == {1: None, 2: None, 3: None}


def test_the_verdict_has_the_exception_that_a_rank_raised():
    network = Network(2)
    network.run(10)
    network.activities[1] = WORK._replace(process="failed", reason="ValueError: planted")
    network.activities[0] = WAITS._replace(idle=LIMIT + 1)
    network.run(10)
    assert network.hub.verdict is not None and network.hub.verdict.reason == "it raised ValueError: planted"


def test_a_broken_connection_among_living_ranks_is_a_verdict_after_the_limit():
    network = Network(3)
    network.run(10)
    network.activities[1] = WAITS._replace(broken="Connection reset by peer")
    network.run(LIMIT - 5)
    assert set(network.verdicts().values()) == {None}
    network.run(10)
    assert network.verdicts() == {0: 1, 1: 1, 2: 1}
    assert "though every rank answers (Connection reset by peer)" in str(network.hub.verdict)


def test_once_a_connection_has_broken_a_silent_rank_is_lost_sooner():
    network = Network(3)
    network.run(10)
    network.stopped = {2}
    network.activities[1] = WAITS._replace(broken="Connection closed by peer")
    network.run(15)
    assert network.verdicts() == {0: 2, 1: 2}


def test_a_text_of_many_activities_is_short():
    activities = {r: Activity(f"host-{r}", step=r, text="x" * 50) for r in range(1000)}
    assert len(show_activities(activities)) < 1300 and "more places" in show_activities(activities)
    together = {r: Activity("h", step=7, text="work", seconds=float(r)) for r in (0, 1, 2, 5)}
    assert show_activities(together) == "ranks 0-2, 5 (h) in step 7, work for 5 s"


def test_a_detector_keeps_its_first_verdict():
    """The error that it has raised stays the error."""
    network = Network(3)
    network.run(10)
    network.cut(2)
    network.run(LIMIT + 5)
    network.loss = dict.fromkeys(network.loss, 0.0)  # the link is whole again, and rank 0's verdict arrives
    network.run(10)
    assert network.verdicts() == {0: 2, 1: 2, 2: 0}
