"""Ranks that meet in a store: they find those that live, whatever the dead have left there."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.ranks import _rendezvous
from fzero.ranks._rendezvous import MissingRankError, rendezvous, store_patience


class Dead(BaseException):
    """Ends a rank in the middle of what it does."""


class Mortal:
    """A store as one rank sees it that dies at its operation number `dies_at`, or later when the time has come."""

    def __init__(self, store: dist.Store, dies_at: int, end: threading.Event) -> None:
        self.store, self.left, self.end = store, dies_at, end

    def _live(self) -> None:
        self.left -= 1
        if self.left < 0 or self.end.is_set():
            raise Dead

    def set(self, key: str, value: str) -> None:
        self._live()
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._live()
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        self._live()
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: Any) -> None:
        self._live()
        while not self.store.check(keys):
            if self.end.is_set():
                raise Dead
            time.sleep(0.001)


def outcome(store: Any, rank: int, size: int, timeout: float, late: float = 0.0) -> Any:
    time.sleep(late)
    try:
        return rendezvous(store, rank, size, timeout)
    except (MissingRankError, Dead) as error:
        return error


def meet(stores: Any, ranks: list[int], size: int, timeout: float = 30.0, late: Any = None) -> list[Any]:
    """Return what each of these ranks gets, all at the same time, in one store or each in its own connection to it."""
    stores, waits = stores if isinstance(stores, list) else [stores] * len(ranks), late or {}
    with ThreadPoolExecutor(len(ranks)) as pool:
        each = zip(stores, ranks, strict=True)
        return [f.result() for f in [pool.submit(outcome, s, r, size, timeout, waits.get(r, 0.0)) for s, r in each]]


def generation_of_the_dead(store: dist.Store, size: int, dies_at: dict[int, int]) -> None:
    """Ranks that begin to meet, each until it dies; the last are ended from outside, as torchrun does."""
    end = threading.Event()
    with ThreadPoolExecutor(size) as pool:
        for rank, at in dies_at.items():
            pool.submit(outcome, Mortal(store, at, end), rank, size, 30.0)
        time.sleep(0.03)
        end.set()


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_agree_on_a_prefix_of_their_own(kind, tmp_path):
    """Worlds of any size follow one another, as in an elastic job."""
    first = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False) if kind == "tcp" else dist.HashStore()
    records = []
    for size in (1, 3, 2, 3):
        stores = {
            "hash": lambda: first,
            "file": lambda: dist.FileStore(str(tmp_path / "store"), -1),
            "tcp": lambda: dist.TCPStore("localhost", first.port, None, False),  # pyright: ignore
        }
        result = meet([stores[kind]() for _ in range(size)], list(range(size)), size)
        assert len(set(result)) == 1 and result[0] not in records
        records.append(result[0])


@pytest.mark.parametrize("late", range(3))
def test_a_rank_that_is_late_is_waited_for(late):
    assert len(set(meet(dist.HashStore(), [0, 1, 2], 3, late={late: 0.2}))) == 1


@pytest.mark.parametrize("absent", [1, 2])
def test_every_rank_names_the_one_that_did_not_arrive(absent):
    store = dist.HashStore()
    assert len(set(meet(store, [0, 1, 2], 3))) == 1  # they were all there once
    there = [r for r in range(3) if r != absent]
    assert [str(error) for error in meet(store, there, 3, timeout=1.0)] == [f"rank {absent} did not arrive"] * 2
    assert len(set(meet(store, [0, 1, 2], 3))) == 1  # and are there again


@pytest.mark.parametrize("late,who", [({2: 0.6}, "rank 2"), ({0: 0.6}, "rank 0"), ({1: 0.2}, None)])
def test_the_log_names_missing_ranks_before_the_timeout(late, who, caplog):
    """It does so after a sixth of the timeout, half a second here."""
    assert len(set(meet(dist.HashStore(), [0, 1, 2], 3, timeout=3.0, late=late))) == 1
    text = f"{who} did not come to the first mesh within 0 s; this rank gives up 3 s after the last one has come"
    assert [r.message for r in caplog.records] == ([text] * (2 if who == "rank 0" else 1) if who else [])


def test_ranks_that_met_rank_0_wait_by_its_clock():
    """A rank that came early does not leave while rank 0, which came later, still waits for another."""
    result = meet(dist.HashStore(), [0, 1, 2], 3, timeout=3.0, late={0: 1.5, 2: 3.75})
    assert len(set(result)) == 1, result


def test_ranks_give_up_a_while_after_the_last_one_has_come(monkeypatch):
    """Those that come one after the other are waited for, up to the timeout."""
    monkeypatch.setattr(_rendezvous, "_MIN_PATIENCE_SECONDS", 1.0)
    assert store_patience(6.0) == 1.0 and store_patience(60.0) == 10.0 and store_patience(0.5) == 0.5
    late = {rank: 0.6 * rank for rank in range(4)}
    assert len(set(meet(dist.HashStore(), [0, 1, 2, 3], 4, timeout=6.0, late=late))) == 1
    start = time.monotonic()
    result = meet(dist.HashStore(), [0, 1, 2], 4, timeout=6.0, late={2: 0.6})
    assert [str(error) for error in result] == ["rank 3 did not arrive"] * 3
    assert 1.5 < time.monotonic() - start < 4


class Dark:
    """A store whose host does not answer any more after so many operations."""

    def __init__(self, store: dist.Store, left: int) -> None:
        self.store, self.left = store, left

    def __getattr__(self, name: str) -> Any:
        self.left -= 1
        return getattr(self.store, name) if self.left >= 0 else lambda *_: time.sleep(20)


@pytest.mark.parametrize("what", ["dead", "dark"])
def test_a_rank_that_waits_for_the_outcome_notices_the_end_of_rank_0(what, monkeypatch):
    """It dies after its first answer, or its host is dark from then on: no operation on the store ends."""
    monkeypatch.setattr(_rendezvous, "_MIN_PATIENCE_SECONDS", 1.0)
    store, end, start = dist.HashStore(), threading.Event(), time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(outcome, Mortal(store, 10**6, end), 0, 3, 30.0)
        second = pool.submit(outcome, Dark(store, 4) if what == "dark" else store, 1, 3, 6.0)
        time.sleep(0.3)
        end.set()
        assert str(second.result()) == "rank 1 lost rank 0 during the rendezvous"
        assert time.monotonic() - start < 5
        assert isinstance(first.result(), Dead)


def test_without_rank_0_no_ranks_meet():
    store = dist.HashStore()
    meet(store, [0, 1, 2], 3)
    result = meet(store, [1, 2], 3, timeout=0.2)
    assert [str(error) for error in result] == ["rank 1 did not reach rank 0", "rank 2 did not reach rank 0"]


deaths = st.integers(2, 3).flatmap(
    lambda size: st.tuples(st.just(size), st.dictionaries(st.integers(0, size - 1), st.integers(0, 12), min_size=1))
)


@settings(max_examples=25)
@given(st.lists(deaths, min_size=1, max_size=2), st.integers(2, 4), st.randoms(use_true_random=False))
def test_ranks_meet_in_spite_of_messages_from_dead_ranks(generations, size, chance: random.Random):
    store = dist.HashStore()
    for dead_size, dies_at in generations:
        generation_of_the_dead(store, dead_size, dies_at)
    late = {r: chance.choice([0.0, 0.005, 0.02]) for r in range(size)}
    result = meet(store, list(range(size)), size, late=late)
    assert len(set(result)) == 1 and isinstance(result[0], str), result
