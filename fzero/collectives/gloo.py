"""all_gather and reduce_scatter on gloo as messages from rank to rank, which take half the time of gloo's own.

gloo's all_gather copies its buffer, and its reduce_scatter sums whole buffers (benchmarks/NOTES.md). Here each rank
sends each other one its part, into the place where it belongs, and sums in the order of ranks, as a simulated mesh
does: bit for bit on up to four ranks, beyond which torch's `sum` groups its rows. Other backends, and what is traced,
keep torch's collectives.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fzero._torch import c10d, group_of, is_tracing, profiling

__all__ = ["INSTEAD", "all_gather", "all_gather_into", "reduce_scatter", "wait"]

FIRST_TAG, TAGS = 1 << 20, 1 << 20  # of our messages, which so meet no other's
# of each process group's exchanges: ranks run them in one order
_NUMBERS: "WeakKeyDictionary[Any, Iterator[int]]" = WeakKeyDictionary()


class PendingMessages(NamedTuple):
    """Messages on their way.

    Attributes:
        works: one for each message.
        finish: makes the result of what has arrived. Until then it holds what is sent.
    """

    works: list[Any]
    finish: Callable[[], torch.Tensor]


def all_gather(x: torch.Tensor, ranks: int, group: str) -> Any:
    """Start to concatenate the ranks' tensors along dimension 0; `wait` gives the result."""
    if not _applies(x, group):
        return c10d.all_gather_into_tensor(x, ranks, group)
    x = x.resolve_conj().resolve_neg()
    whole, rank, held = x.new_empty((ranks, *x.shape)), dist.get_rank(group_of(group)), [x]
    works = _exchange([x] * ranks, list(whole), rank, group)
    whole[rank].copy_(x)

    def finish() -> torch.Tensor:
        held.clear()
        return whole.flatten(0, 1)

    return PendingMessages(works, finish)


def all_gather_into(
    x: torch.Tensor, ranks: int, group: str, leaves: Sequence[torch.Tensor], offsets: Sequence[int]
) -> list[Any]:
    """Start to gather the ranks' tensors `[k]` into `leaves`, which begin at `offsets` of their concatenation.

    Each leaf has a wait of its own, and holds nothing of use before.
    """
    if not _applies(x, group):
        whole = c10d.all_gather_into_tensor(x, ranks, group)

        def copied(leaf: torch.Tensor, at: int) -> torch.Tensor:
            return leaf.copy_(c10d.wait_tensor(whole).narrow(0, at, leaf.numel()).view_as(leaf))

        return [PendingMessages([], partial(copied, leaf, at)) for leaf, at in zip(leaves, offsets, strict=True)]
    x, k, rank = x.resolve_conj().resolve_neg(), len(x), dist.get_rank(group_of(group))
    held, sent = [x] * len(leaves), []

    def arrived(leaf: torch.Tensor) -> torch.Tensor:
        held.pop()
        return leaf

    for leaf, at in zip(leaves, offsets, strict=True):
        mine = _between(x, rank * k, at, at + leaf.numel())
        rows = [_between(leaf.view(-1), at, r * k, r * k + k) for r in range(ranks)]
        sent.append(PendingMessages(_exchange([mine] * ranks, rows, rank, group), partial(arrived, leaf)))
        if rows[rank].data_ptr() != mine.data_ptr():  # else x lies where it belongs
            rows[rank].copy_(mine)
    return sent


def _between(x: torch.Tensor, at: int, first: int, stop: int) -> torch.Tensor:
    """View the part of `x`, which begins at `at` of a unit, that lies from `first` to `stop` of the unit."""
    return x[max(first - at, 0) : max(stop - at, 0)]


def reduce_scatter(x: torch.Tensor, op: str, ranks: int, group: str) -> Any:
    """Start to sum the ranks' tensors, of which each keeps its part along dimension 0; `wait` gives the result."""
    if op != "sum" or not _applies(x, group):
        return c10d.reduce_scatter_tensor(x, op, ranks, group)
    mine = x.resolve_conj().resolve_neg().contiguous().view(ranks, x.shape[0] // ranks, *x.shape[1:]).unbind()
    rank = dist.get_rank(group_of(group))
    # a tensor each, which dies by itself; its own part needs none
    rows = [part if i == rank else torch.empty_like(part) for i, part in enumerate(mine)]
    return PendingMessages(_exchange(mine, rows, rank, group), lambda: _summed(rows, rank))


def wait(sent: Any) -> torch.Tensor:
    """Wait for a collective, ours or torch's, and return its result."""
    if not isinstance(sent, PendingMessages):
        return c10d.wait_tensor(sent)
    with torch.profiler.record_function("fzero::wait") if profiling() else contextlib.nullcontext():
        while sent.works:  # once each: gloo would wait for a second message
            sent.works.pop().wait()
    return sent.finish()


def _exchange(sends: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], rank: int, group: str) -> list[Any]:
    """Start to send entry r of `sends` to rank r, whose own arrives in entry r of `rows`; ours is left alone.

    What is empty is not sent.
    """
    process_group: Any = group_of(group)
    ranks = len(sends)
    # each exchange has a tag of its own, so that no other message, of a user's, is taken for one of them
    tag = FIRST_TAG + next(_NUMBERS.setdefault(process_group, itertools.count())) % TAGS
    works = []
    for i in range(1, ranks):  # to the next first, so that not all send to one
        to, source = (rank + i) % ranks, (rank - i) % ranks
        if rows[source].numel():
            works.append(dist.irecv(rows[source], group=process_group, group_src=source, tag=tag))
        if sends[to].numel():
            works.append(dist.isend(sends[to], group=process_group, group_dst=to, tag=tag))
    return works


def _summed(rows: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Sum in the order of ranks, in the memory of a row that arrived; half precision is rounded once. Takes `rows`."""
    rows, given = rows[:], rows
    given.clear()  # a bucket lives on until its last member is waited for, its rows do not
    if len(rows) == 1:
        return rows[0].clone()
    if len(rows) > 2 and rows[0].dtype in (torch.bfloat16, torch.float16):
        total = rows[0].float()
        for row in rows[1:]:
            total += row
        return total.to(rows[0].dtype)
    total = torch.add(rows[0], rows[1], out=rows[0 if rank else 1])
    for row in rows[2:]:
        total += row
    return total


def _applies(x: torch.Tensor, group: str) -> bool:
    """Return whether messages take a collective's place: on gloo, and not in a trace, which records the collective."""
    return not is_tracing() and x.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group_of(group))


def _each(start: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Start a collective for each tensor of a list."""

    def starts(xs: Sequence[torch.Tensor], *options: Any) -> list[Any]:
        return [start(x, *options) for x in xs]

    return starts


# What an executor runs in place of torch's operations.
INSTEAD: dict[Any, Callable[..., Any]] = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.reduce_scatter_tensor.default: reduce_scatter,
    c10d.all_gather_into_tensor_coalesced.default: _each(all_gather),
    c10d.reduce_scatter_tensor_coalesced.default: _each(reduce_scatter),
    c10d.wait_tensor.default: wait,
}
