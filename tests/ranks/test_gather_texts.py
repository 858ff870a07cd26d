"""gather_texts returns each rank's text in rank order, round by round, and names a rank that sends none."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

import fzero
from fzero.ranks import _agreement
from fzero.ranks._agreement import MissingRankError, gather_texts


@pytest.fixture
def store() -> Iterator[dist.HashStore]:  # pyright: ignore
    """The store of a world of two, in which the other rank does what the test does for it."""
    shared = dist.HashStore()  # pyright: ignore
    dist.init_process_group("fake", store=shared, rank=0, world_size=2)
    try:
        yield shared
    finally:
        dist.destroy_process_group()


def test_texts_come_in_rank_order_and_rounds_stay_apart(store, monkeypatch):
    monkeypatch.setattr(_agreement, "_ROUNDS", _agreement.Counter())
    monkeypatch.setattr(_agreement, "_TEXT_SECONDS", 5.0)  # a fault is found soon
    mesh = fzero.mesh(simulate=False, dp=2)
    group_store = dist.distributed_c10d._get_default_store()
    for number, word in enumerate(("first", "second"), 1):
        group_store.set(f"fzero/topic/{number}/1", f"their {word}")
        assert gather_texts(f"my {word}", mesh, "topic") == [f"my {word}", f"their {word}"]
    group_store.set("fzero/another/1/1", "theirs")
    assert gather_texts("", mesh, "another") == ["", "theirs"]


def test_a_rank_that_gives_no_text_is_named(store, monkeypatch):
    monkeypatch.setattr(_agreement, "_TEXT_SECONDS", 0.1)
    with pytest.raises(MissingRankError, match=r"rank 1 sent no text on 'alone' within 0\.1 s") as caught:
        gather_texts("mine", fzero.mesh(simulate=False, dp=2), "alone")
    assert caught.value.rank == 1
