"""Batches that are taken ahead: in order, and on a device each is made and used only when its values are there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero


class Stream:
    """A stream of a device that runs nothing: each operation knows all operations that run before it."""

    current: "Stream"

    def __init__(self, device: Any = None) -> None:
        self.before: set[str] = set()

    def run(self, operation: str) -> set[str]:
        """Queue an operation, and return what ran before it."""
        earlier = {*self.before}
        self.before.add(operation)
        return earlier

    def __enter__(self) -> None:
        self.outer, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.outer

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before

    def record_event(self) -> set[str]:
        return {*self.before}

    def wait_event(self, event: set[str]) -> None:
        self.before |= event


def test_a_number_in_place_of_batches_is_refused_at_once():
    with pytest.raises(TypeError, match=r"batches is 5: expected several, such as data\.steps\(\)"):
        fzero.data.prefetch(5, fzero.mesh(dp=2))  # pyright: ignore


@given(steps=st.integers(0, 6), ahead=st.integers(1, 3))
def test_a_batch_is_made_after_what_the_caller_computed_and_used_after_its_copies(steps, ahead):
    """The caller's stream computes the data set, and then a step for each batch, while later batches are copied."""
    mesh, caller, queued = fzero.mesh(dp=2, device="meta"), Stream(), ["data set"]
    caller.run("data set")

    def batches() -> Iterator[int]:
        for i in range(steps):
            assert Stream.current is not caller
            assert {*queued} <= Stream.current.run(f"copy {i}")
            yield i

    with pytest.MonkeyPatch.context() as patch:
        Stream.current = caller
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch.accelerator, "current_stream", lambda device: Stream.current)
        for i in fzero.data.prefetch(batches(), mesh, ahead):
            assert Stream.current is caller
            assert f"copy {i}" in caller.run(f"step {i}")
            assert f"copy {i + ahead + 1}" not in caller.before, "no batch is taken earlier than asked"
            queued.append(f"step {i}")
    assert queued == ["data set", *[f"step {i}" for i in range(steps)]]
