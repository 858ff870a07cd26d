"""Padding: batches have only a few different lengths, so that a jitted step is compiled only a few times."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.tree import Tree

__all__ = ["Padding", "padding"]

_Number = int | float
_FILL: Mapping[str, _Number] = {"labels": -100, "targets": -100}  # the index that torch's cross_entropy ignores
_MAX_CANDIDATES = 2048  # the most lengths to choose from


@api_boundary
def padding(
    lengths: Sequence[int],
    *,
    global_batch: int,
    buckets: int | Sequence[int] = 8,
    multiple: int = 8,
    fill: Mapping[str, _Number] | None = None,
    mask: str | None = "attention_mask",
) -> "Padding":
    """Choose a few lengths that batches are padded to, for `fzero.data.batches(..., pad=)`.

    The longest example of a global batch decides, so that all ranks pad to one length. The lengths are chosen to
    minimize the average padding over random batches. Padding is masked. Its labels are -100, which losses ignore.

    Args:
        lengths: the number of tokens of each example of the data set.
        global_batch: the examples of one step over all ranks.
        buckets: the number of lengths to choose, or the lengths themselves.
        multiple: the chosen lengths are multiples of this number, which kernels run faster on.
        fill: the value that each leaf of an example is padded with, by name. By default labels and targets are padded
            with -100, and other leaves with 0. An example that is one tensor has the name "".
        mask: the name of the mask that each example gets, ones for tokens and zeros for padding, unless it has a leaf
            of that name; None for no mask.

    Returns:
        A `Padding`. Printing it shows the share of padding.

    Raises:
        ValueError: if `lengths` is empty, an example is longer than the longest of `buckets`, or a number is below 1.
            The message names the example.

    Example:
        >>> lengths = [5, 9, 12, 30, 31, 64]
        >>> pad = padding(lengths, global_batch=1, buckets=3)
        >>> pad.buckets
        (16, 32, 64)
        >>> print(pad)
        6 examples of 5 to 64 tokens in batches of 1 are padded to 3 lengths
        length  batches
            16      50%
            32      33%
            64      17%
        14% of all tokens are padding; with one length it would be 61%
        >>> {name: x.tolist() for name, x in pad.pad_example({"input_ids": [7, 8], "labels": [8, 9]}, 3).items()}
        {'input_ids': [7, 8, 0], 'labels': [8, 9, -100], 'attention_mask': [1, 1, 0]}
    """
    check_int("global_batch", global_batch, 1, "a number of examples")
    check_int("multiple", multiple, 1, "a number of tokens")
    sizes = [int(n) for n in lengths]
    if not sizes:
        raise ValueError("lengths is empty: give the number of tokens of each example")
    choice = _choose_buckets(sizes, buckets, multiple, global_batch)
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[longest] > choice[-1]:
        raise ValueError(
            f"example {longest} has {sizes[longest]} tokens, and the longest of buckets={list(choice)} is "
            f"{choice[-1]}: give a longer one, or truncate the example"
        )
    return Padding(
        lengths=tuple(sizes),
        buckets=choice,
        global_batch=global_batch,
        fill=dict(_FILL if fill is None else fill),
        mask=mask,
    )


@dataclass(frozen=True)
class Padding:
    """The lengths that batches are padded to, and the values they are padded with. Made by `fzero.data.padding`.

    Attributes:
        lengths: the number of tokens of each example of the data set.
        buckets: the lengths of batches, in ascending order.
        global_batch: the examples of one step over all ranks.
        fill: the value that each leaf is padded with, by name; other leaves are padded with 0.
        mask: the name of the mask that each example gets.
    """

    lengths: tuple[int, ...] = field(repr=False)
    buckets: tuple[int, ...]
    global_batch: int
    fill: Mapping[str, _Number]
    mask: str | None

    def padded_length(self, indices: Sequence[int]) -> int:
        """Return the length that the examples of a global batch are padded to."""
        return self.buckets[bisect_left(self.buckets, max(self.lengths[i] for i in indices))]

    def pad_example(self, example: Tree, length: int) -> Tree:
        """Pad one example. In a dict, sequences as long as the first one are padded, and other values are kept.

        Args:
            example: a dict with lists or tensors `[tokens, ...]` and other values; or one list or tensor.
            length: the length to pad to.

        Returns:
            The example with tensors `[length, ...]`.

        Raises:
            ValueError: if the example has no sequence, or one longer than `length`. The message names the sequence.
        """
        if not isinstance(example, Mapping):
            return self._pad("", torch.as_tensor(example, device="cpu"), length)
        tensors = {
            name: torch.as_tensor(x, device="cpu")
            for name, x in example.items()
            if isinstance(x, torch.Tensor | list | tuple)
        }
        sequences = {name: x for name, x in tensors.items() if x.dim()}
        if not sequences:
            raise ValueError(f"an example has no sequence to pad: {sorted(example)}; leave pad out")
        tokens = len(next(iter(sequences.values())))
        padded = {name: self._pad(name, x, length) for name, x in sequences.items() if len(x) == tokens}
        result = {**example, **tensors, **padded}
        if self.mask is not None and self.mask not in example:
            result[self.mask] = (torch.arange(length, device="cpu") < tokens).long()
        return result

    def _pad(self, name: str, x: torch.Tensor, length: int) -> torch.Tensor:
        if len(x) > length:
            raise ValueError(
                f"{name or 'an example'} has {len(x)} tokens, more than the {length} of its batch: expected `lengths` "
                "to be the lengths of the data set's examples"
            )
        return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), self.fill.get(name, 0))])

    @property
    def share(self) -> float:
        """The share of all tokens that are padding, on average over random batches."""
        return 1 - sum(self.lengths) / len(self.lengths) / _mean_length(self.lengths, self.buckets, self.global_batch)

    def __str__(self) -> str:
        """Return a table of the lengths, with the share of the batches that each is expected to have."""
        chances = _bucket_probabilities(self.lengths, self.buckets, self.global_batch)
        count = f"{len(self.buckets)} length{'s' * (len(self.buckets) > 1)}"
        examples = f"{len(self.lengths):,} examples of {min(self.lengths)} to {max(self.lengths)} tokens"
        rows = [f"{length:6}  {chance:7.0%}" for length, chance in zip(self.buckets, chances, strict=True)]
        single_share = 1 - sum(self.lengths) / len(self.lengths) / self.buckets[-1]
        return "\n".join(
            [
                f"{examples} in batches of {self.global_batch} are padded to {count}",
                "length  batches",
                *rows,
                f"{self.share:.0%} of all tokens are padding; with one length it would be {single_share:.0%}",
            ]
        )


def _choose_buckets(lengths: Sequence[int], buckets: Any, multiple: int, batch: int) -> tuple[int, ...]:
    """Return the given lengths, or choose the given number of lengths that pad least."""
    if not isinstance(buckets, int):
        result = tuple(sorted({int(n) for n in buckets}))
        if not result or result[0] < 1:
            raise ValueError(f"buckets={buckets!r}: expected lengths, 1 or more, such as (128, 256, 512)")
        return result
    check_int("buckets", buckets, 1, "the lengths, or their number")
    while len(candidates := _candidate_lengths(lengths, multiple)) > _MAX_CANDIDATES:
        multiple *= 2
    return _choose_best_buckets(candidates, _bucket_probabilities(lengths, candidates, batch), buckets)


def _candidate_lengths(lengths: Sequence[int], multiple: int) -> list[int]:
    """List the multiples that the lengths are rounded up to."""
    return sorted({max(-(-n // multiple), 1) * multiple for n in lengths})


def _bucket_probabilities(lengths: Sequence[int], buckets: Sequence[int], batch: int) -> list[float]:
    """Return the probability that the longest example of a random batch falls into each bucket."""
    counts = [0] * len(buckets)
    for n in lengths:
        counts[bisect_left(buckets, n)] += 1
    below = [(total / len(lengths)) ** batch for total in accumulate(counts)]
    return [b - a for a, b in zip([0.0, *below], below, strict=False)]


def _mean_length(lengths: Sequence[int], buckets: Sequence[int], batch: int) -> float:
    """Return the expected length of a batch."""
    return sum(n * chance for n, chance in zip(buckets, _bucket_probabilities(lengths, buckets, batch), strict=True))


def _choose_best_buckets(candidates: Sequence[int], chances: Sequence[float], count: int) -> tuple[int, ...]:
    """Choose `count` of the candidates, the last among them, to minimize the expected length of a batch.

    By dynamic programming: `best[j]` is the least expected length of batches up to candidate j, if j is chosen.
    """
    n = torch.tensor([0, *candidates], dtype=torch.float64, device="cpu")
    below = torch.tensor([0.0, *accumulate(chances)], dtype=torch.float64, device="cpu")
    cost = n[None, :] * (below[None, :] - below[:, None])  # [i, j]: batches above candidate i, rounded up to j
    cost = torch.where(torch.ones_like(cost, dtype=torch.bool).triu(1), cost, torch.inf)
    best = cost[0]
    previous_buckets = []
    for _ in range(min(count, len(candidates)) - 1):
        best, previous_bucket = (best[:, None] + cost).min(0)
        previous_buckets.append(previous_bucket)
    choice, j = [len(candidates)], len(candidates)
    for previous_bucket in reversed(previous_buckets):
        j = int(previous_bucket[j])
        choice.append(j)
    return tuple([int(candidates[j - 1]) for j in reversed(choice)])
