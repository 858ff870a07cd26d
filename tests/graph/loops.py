"""What the tests of loops share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fzero import optim
from fzero.graph import _entry
from fzero.graph.loop._loop import node_loop
from tests.graph.helpers import bitwise

ADAMW = optim.adamw(1e-2, eps=1e-3)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.5), ADAMW)


@contextlib.contextmanager
def unroll() -> Iterator[None]:
    """Have every micro-batch traced by itself."""
    real = _entry.record_loops
    _entry.record_loops = lambda on, pipelines: real(False)
    try:
        yield
    finally:
        _entry.record_loops = real


def loops(jitted: Any) -> list[Any]:
    (entry,) = jitted._entries.values()
    return [loop for n in entry.best.graph.nodes if (loop := node_loop(n))]


def assert_draws_alike(jitted: Any, step: Any, *args: Any) -> None:
    """Check that two steps compute the same from the same random numbers, and take as many of them."""
    results = []
    for f in (jitted, step):
        torch.manual_seed(0)
        results.append((f(*args), torch.rand(2)))
    bitwise(*results)
