"""all_gather and reduce_scatter on gloo as messages from rank to rank, in half the time of gloo's collectives.

gloo's all_gather copies its buffer, and its reduce_scatter sums full buffers (benchmarks/NOTES.md). Here each rank
sends every other rank its part, directly into the output, and sums in the order of ranks. So results equal those of a
simulated mesh bit for bit on up to four ranks; beyond four ranks, torch's `sum` groups its rows. Other backends and
traces use torch's collectives.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fzero._torch import c10d, is_profiling, is_tracing, rank_group

__all__ = ["REPLACEMENTS", "all_gather", "all_gather_into", "reduce_scatter", "wait"]

_FIRST_TAG, _TAGS = 1 << 20, 1 << 20  # a range of tags for these messages alone
# counts each process group's exchanges, which all ranks run in one order
_EXCHANGE_COUNTS: "WeakKeyDictionary[Any, Iterator[int]]" = WeakKeyDictionary()


class PendingMessages(NamedTuple):
    """Messages that have started.

    Attributes:
        requests: a handle for each message.
        finish: computes the result once the messages have arrived. It keeps the sent tensors alive until then.
    """

    requests: list[Any]
    finish: Callable[[], torch.Tensor]


def all_gather(x: torch.Tensor, ranks: int, group: str) -> Any:
    """Start to concatenate the ranks' tensors along dimension 0; `wait` returns the result."""
    if not _uses_messages(x, group):
        return c10d.all_gather_into_tensor(x, ranks, group)
    x = x.resolve_conj().resolve_neg()
    output, rank, inputs = x.new_empty((ranks, *x.shape)), dist.get_rank(rank_group(group)), [x]
    requests = _exchange([x] * ranks, list(output), rank, group)
    output[rank].copy_(x)

    def finish() -> torch.Tensor:
        inputs.clear()
        return output.flatten(0, 1)

    return PendingMessages(requests, finish)


def all_gather_into(
    x: torch.Tensor, ranks: int, group: str, leaves: Sequence[torch.Tensor], offsets: Sequence[int]
) -> list[Any]:
    """Start to gather the ranks' tensors `[k]` into `leaves`, which start at `offsets` of the concatenated tensor.

    Returns:
        For each leaf, pending messages to wait for. The leaf's values are undefined before.
    """
    if not _uses_messages(x, group):
        output = c10d.all_gather_into_tensor(x, ranks, group)

        def copied(leaf: torch.Tensor, start: int) -> torch.Tensor:
            return leaf.copy_(c10d.wait_tensor(output).narrow(0, start, leaf.numel()).view_as(leaf))

        return [PendingMessages([], partial(copied, leaf, i)) for leaf, i in zip(leaves, offsets, strict=True)]
    x, k, rank = x.resolve_conj().resolve_neg(), len(x), dist.get_rank(rank_group(group))
    inputs = [x] * len(leaves)
    pending = []

    def finish(leaf: torch.Tensor) -> torch.Tensor:
        inputs.pop()
        return leaf

    for leaf, start in zip(leaves, offsets, strict=True):
        part = _view_elements(x, rank * k, start, start + leaf.numel())
        rows = [_view_elements(leaf.view(-1), start, r * k, r * k + k) for r in range(ranks)]
        pending.append(PendingMessages(_exchange([part] * ranks, rows, rank, group), partial(finish, leaf)))
        if rows[rank].data_ptr() != part.data_ptr():  # equal if x is already in the leaf's memory
            rows[rank].copy_(part)
    return pending


def _view_elements(x: torch.Tensor, offset: int, start: int, stop: int) -> torch.Tensor:
    """View elements `start` to `stop` of a unit in `x`, which starts at element `offset` of the unit."""
    return x[max(start - offset, 0) : max(stop - offset, 0)]


def reduce_scatter(x: torch.Tensor, op: str, ranks: int, group: str) -> Any:
    """Start to sum the ranks' tensors; `wait` returns this rank's part of the sum along dimension 0."""
    if op != "sum" or not _uses_messages(x, group):
        return c10d.reduce_scatter_tensor(x, op, ranks, group)
    parts = x.resolve_conj().resolve_neg().contiguous().view(ranks, x.shape[0] // ranks, *x.shape[1:]).unbind()
    rank = dist.get_rank(rank_group(group))
    # one tensor per row, so that each is freed by itself; this rank's own part is read in place
    rows = [part if i == rank else torch.empty_like(part) for i, part in enumerate(parts)]
    return PendingMessages(_exchange(parts, rows, rank, group), lambda: _sum_rows(rows, rank))


def wait(pending: Any) -> torch.Tensor:
    """Wait for a collective, of this file or of torch, and return its result."""
    if not isinstance(pending, PendingMessages):
        return c10d.wait_tensor(pending)
    with torch.profiler.record_function("fzero::wait") if is_profiling() else contextlib.nullcontext():
        while pending.requests:  # once per message: a second wait would wait for another message
            pending.requests.pop().wait()
    return pending.finish()


def _exchange(sends: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], rank: int, group: str) -> list[Any]:
    """Start to send entry r of `sends` to rank r, and to receive rank r's tensor in entry r of `rows`.

    This rank's own entries are not touched, and empty tensors are not sent.
    """
    process_group: Any = rank_group(group)
    ranks = len(sends)
    # each exchange has a tag of its own, so that it cannot receive a message of the user's
    tag = _FIRST_TAG + next(_EXCHANGE_COUNTS.setdefault(process_group, itertools.count())) % _TAGS
    requests = []
    for i in range(1, ranks):  # start with the next rank, so that not all ranks send to one
        target, source = (rank + i) % ranks, (rank - i) % ranks
        if rows[source].numel():
            requests.append(dist.irecv(rows[source], group=process_group, group_src=source, tag=tag))
        if sends[target].numel():
            requests.append(dist.isend(sends[target], group=process_group, group_dst=target, tag=tag))
    return requests


def _sum_rows(rows: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Sum in the order of ranks, in the memory of a received row, and empty `rows`. Half precision is rounded once."""
    rows, arg = rows[:], rows
    arg.clear()  # frees the rows now: the list lives until the wait for the last member of a bucket
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


def _uses_messages(x: torch.Tensor, group: str) -> bool:
    """Return whether messages replace a collective: on gloo, and outside traces, which record the collective."""
    return not is_tracing() and x.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(rank_group(group))


def _start_for_each(start: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function that starts a collective for each tensor of a list."""

    def start_all(xs: Sequence[torch.Tensor], *options: Any) -> list[Any]:
        return [start(x, *options) for x in xs]

    return start_all


# The functions that an executor runs in place of torch's operations.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.reduce_scatter_tensor.default: reduce_scatter,
    c10d.all_gather_into_tensor_coalesced.default: _start_for_each(all_gather),
    c10d.reduce_scatter_tensor_coalesced.default: _start_for_each(reduce_scatter),
    c10d.wait_tensor.default: wait,
}
