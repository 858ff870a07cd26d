"""Texts from rank to rank, through the store of the process group."""

import datetime
from collections import Counter

from fzero._torch import default_store
from fzero.ranks.mesh import Mesh

__all__ = ["MissingRank", "gather_texts"]

TEXT_SECONDS = 300.0  # how long a rank waits for another's text

_ROUNDS: Counter[str] = Counter()  # how often ranks have given a text on a topic


class MissingRank(RuntimeError):
    """A rank gave no text in time; `rank` is which."""

    def __init__(self, rank: int, topic: str, seconds: float) -> None:
        super().__init__(f"rank {rank} gave no text on {topic!r} within {seconds:g} s")
        self.rank = rank


def gather_texts(mine: str, mesh: Mesh, topic: str, seconds: float | None = None) -> list[str]:
    """Give a text to all ranks, and get all ranks', in rank order.

    It is no collective, so a rank that gives a text while the others run does not take their messages for its own.

    Args:
        mine: this rank's text.
        mesh: a distributed mesh. A mesh is the world.
        topic: what the texts are about. Its n-th text on a topic is for the other ranks' n-th.
        seconds: how long to wait for another's text; by default `TEXT_SECONDS`.

    Raises:
        MissingRank: if a rank gives no text in that time.
    """
    patience = TEXT_SECONDS if seconds is None else seconds
    store = default_store()
    _ROUNDS[topic] += 1
    keys = [f"fzero/{topic}/{_ROUNDS[topic]}/{rank}" for rank in range(mesh.size)]
    store.set(keys[mesh.rank], mine)
    found = []
    for rank, key in enumerate(keys):
        try:
            store.wait([key], datetime.timedelta(seconds=patience))
        except RuntimeError as error:
            raise MissingRank(rank, topic, patience) from error
        found.append(store.get(key).decode())
    return found
