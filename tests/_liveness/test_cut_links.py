"""A link between two ranks that carries nothing: the rank at its other end is found, and asked along the link."""

import random

import pytest

from fzero._liveness._cut_links import Link, LinkEnds, LinkWatch

LIMIT, BEAT = 60.0, 2.0
LINK = Link("10.0.0.2", 1000, "10.0.0.3", 2000)  # of rank 1, to rank 2
FOREIGN = Link("10.0.0.2", 1001, "10.9.9.9", 443)


class World:
    """Three ranks; rank 1 has a link to rank 2 and a foreign one, and nobody acknowledges its data there."""

    def __init__(self, loss: float, cut: bool, seed: int = 0) -> None:
        self.ends, self.watch, self.now, self.loss, self.cut = LinkEnds(LIMIT), LinkWatch(LIMIT), 0.0, loss, cut
        self.rng, self.asked = random.Random(seed), {0: list[Link](), 1: list[Link](), 2: list[Link]()}

    def passes(self) -> bool:
        return self.rng.random() >= self.loss

    def run(self, seconds: float) -> None:
        """Let time go on; beats and replies, and datagrams along the link, may be lost."""
        for i in range(round(seconds * 10)):
            self.now += 0.1
            self.watch.silent = {LINK: self.now, FOREIGN: self.now}
            for link, port in self.watch.probes():
                assert (link, port) == (LINK, 7002)
                if not self.cut and self.passes() and self.passes():
                    self.watch.hear_echo([*link], self.now)  # as from JSON
            if i % round(BEAT * 10):
                continue
            for rank in (0, 1, 2):
                sought = self.watch.sought() if rank == 1 else []
                owned = [x for x in self.asked[rank] if rank == 2 and x == LINK.reversed()]
                if self.passes():
                    self.ends.hear(rank, sought, owned, self.now)
                if self.passes():
                    self.asked[rank] = self.ends.questions(rank)
                    for link, other in self.ends.answers(rank):
                        assert rank == 1
                        self.watch.find([*link], other, 7000 + other, self.now)


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_cut_link_is_found_before_the_limit(loss, seed):
    world = World(loss, cut=True, seed=seed)
    world.run(LIMIT / 4 - 1)
    assert world.watch.sought() == [] and world.watch.cut(world.now) == (-1, 0.0)
    world.run(LIMIT)
    rank, seconds = world.watch.cut(world.now)
    assert rank == 2 and seconds == pytest.approx(world.now)
    assert world.ends.answers(1) == [(LINK, 2)] and world.ends.answers(2) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_answers_is_not_cut_however_late_its_data_is(seed):
    """Where three packets of ten are lost, the pauses before data is sent again grow to a minute."""
    world = World(0.3, cut=False, seed=seed)
    for _ in range(10):
        world.run(LIMIT / 2)
        assert world.watch.cut(world.now) == (-1, 0.0)


def test_a_link_that_carries_data_again_is_forgotten():
    world = World(0.0, cut=True)
    world.run(LIMIT)
    world.watch.silent = {}
    assert world.watch.probes() == [] and world.watch.cut(world.now) == (-1, 0.0)
    world.ends.hear(1, [], [], world.now + LIMIT)
    assert world.ends.questions(2) == [] and world.ends.answers(1) == []


def test_both_ends_of_a_link_may_ask_whether_it_carries_data():
    """Each has data under way to the other."""
    ends = LinkEnds(LIMIT)
    ends.hear(1, [LINK], [], 0.0)
    ends.hear(2, [LINK.reversed()], [], 0.0)
    assert (ends.questions(1), ends.questions(2)) == ([LINK], [LINK.reversed()])
    ends.hear(1, [LINK], [LINK], 1.0)
    ends.hear(2, [LINK.reversed()], [LINK.reversed()], 1.0)
    assert ends.answers(1) == [(LINK, 2)] and ends.answers(2) == [(LINK.reversed(), 1)]
