"""Padding: examples of unequal lengths become batches of a few lengths, so that a jitted step is compiled for few."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

__all__ = ["Padding", "padding"]

Number = int | float
FILL: Mapping[str, Number] = {"labels": -100, "targets": -100}  # what torch's cross_entropy leaves out
MAX_CANDIDATES = 2048  # different lengths among which the best are looked for


def padding(
    lengths: Sequence[int],
    *,
    global_batch: int,
    buckets: int | Sequence[int] = 8,
    multiple: int = 8,
    fill: Mapping[str, Number] | None = None,
    mask: str | None = "attention_mask",
) -> "Padding":
    """Choose a few lengths to which batches are padded, and say how: for `fzero.data.batches(..., pad=)`.

    The longest example of a global batch decides, so that all ranks have one length. Of all choices of so many lengths
    the one is taken that pads least on average, over random batches. What is padded is masked, and its labels count in
    no loss that leaves out -100.

    Args:
        lengths: of each example of the data set: how many tokens it has.
        global_batch: how many examples all ranks take in one step.
        buckets: how many lengths to choose, or the lengths themselves.
        multiple: lengths that are chosen are multiples of it, as kernels like them.
        fill: name of a leaf of an example -> what it is padded with. By default labels and targets are padded with
            -100, and all else with 0. "" is the name of an example that is one tensor.
        mask: the name of the mask that examples are given, ones for tokens and zeros for padding, if they have none of
            that name; None for no mask.

    Returns:
        A `Padding`. Printed, it says how much is padded.

    Raises:
        ValueError: if there are no lengths, an example is longer than the longest of `buckets`, or a number is below 1.
            Names the example.

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
        14% of all tokens are padding; with one length it were 61%
        >>> {name: x.tolist() for name, x in pad.example({"input_ids": [7, 8], "labels": [8, 9]}, 3).items()}
        {'input_ids': [7, 8, 0], 'labels': [8, 9, -100], 'attention_mask': [1, 1, 0]}
    """
    for name, value in (("global_batch", global_batch), ("multiple", multiple)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a number, 1 or more")
    sizes = [int(n) for n in lengths]
    if not sizes:
        raise ValueError("lengths is empty: give the number of tokens of each example")
    choice = _choose_buckets(sizes, buckets, multiple, global_batch)
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[longest] > choice[-1]:
        raise ValueError(
            f"example {longest} has {sizes[longest]} tokens, and the longest of buckets={list(choice)} is "
            f"{choice[-1]}: give a longer one, or cut the example"
        )
    return Padding(tuple(sizes), choice, global_batch, dict(FILL if fill is None else fill), mask)


@dataclass(frozen=True)
class Padding:
    """To which lengths batches are padded, and with what. Make one with `fzero.data.padding`.

    Attributes:
        lengths: of each example of the data set.
        buckets: the lengths of batches, in ascending order.
        global_batch: how many examples all ranks take in one step.
        fill: what leaves are padded with, by name; others with 0.
        mask: the name of the mask that examples are given.
    """

    lengths: tuple[int, ...] = field(repr=False)
    buckets: tuple[int, ...]
    global_batch: int
    fill: Mapping[str, Number]
    mask: str | None

    def length_of(self, indices: Sequence[int]) -> int:
        """Return the length to which the examples of a global batch are padded."""
        return self.buckets[bisect_left(self.buckets, max(self.lengths[i] for i in indices))]

    def example(self, example: Any, length: int) -> Any:
        """Pad one example: a dict of sequences, or one sequence; what is not as long as its tokens stays.

        Args:
            example: a dict by name, of lists or tensors `[tokens, ...]` and others; or one list or tensor.
            length: to which it is padded.

        Returns:
            The same with tensors `[length, ...]`.

        Raises:
            ValueError: if it has no sequence, or one that is longer than `length`. The message names it.
        """
        if not isinstance(example, Mapping):
            return self._padded("", torch.as_tensor(example), length)
        tensors = {
            name: torch.as_tensor(x) for name, x in example.items() if isinstance(x, torch.Tensor | list | tuple)
        }
        sequences = {name: x for name, x in tensors.items() if x.dim()}
        if not sequences:
            raise ValueError(f"an example has no sequence to pad: {sorted(example)}")
        tokens = len(next(iter(sequences.values())))
        padded = {name: self._padded(name, x, length) for name, x in sequences.items() if len(x) == tokens}
        result = {**example, **tensors, **padded}
        if self.mask is not None and self.mask not in example:
            result[self.mask] = (torch.arange(length) < tokens).long()
        return result

    def _padded(self, name: str, x: torch.Tensor, length: int) -> torch.Tensor:
        if len(x) > length:
            raise ValueError(
                f"{name or 'an example'} has {len(x)} tokens, more than the {length} of its batch: `lengths` must be "
                "those of the data set's examples"
            )
        return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), self.fill.get(name, 0))])

    @property
    def share(self) -> float:
        """The share of all tokens that are padding, on average over random batches."""
        return 1 - sum(self.lengths) / len(self.lengths) / _expected(self.lengths, self.buckets, self.global_batch)

    def __str__(self) -> str:
        chances = _chances(self.lengths, self.buckets, self.global_batch)
        count = f"{len(self.buckets)} length{'s' * (len(self.buckets) > 1)}"
        examples = f"{len(self.lengths):,} examples of {min(self.lengths)} to {max(self.lengths)} tokens"
        rows = [f"{length:6}  {chance:7.0%}" for length, chance in zip(self.buckets, chances, strict=True)]
        single_share = 1 - sum(self.lengths) / len(self.lengths) / self.buckets[-1]
        return "\n".join(
            [
                f"{examples} in batches of {self.global_batch} are padded to {count}",
                "length  batches",
                *rows,
                f"{self.share:.0%} of all tokens are padding; with one length it were {single_share:.0%}",
            ]
        )


def _choose_buckets(lengths: Sequence[int], buckets: Any, multiple: int, batch: int) -> tuple[int, ...]:
    """Return the lengths that were given, or so many that pad least."""
    if not isinstance(buckets, int):
        result = tuple(sorted({int(n) for n in buckets}))
        if not result or result[0] < 1:
            raise ValueError(f"buckets={buckets!r}: expected lengths, 1 or more")
        return result
    if isinstance(buckets, bool) or buckets < 1:
        raise ValueError(f"buckets={buckets!r}: expected how many lengths to choose, or the lengths")
    while len(candidates := _candidates(lengths, multiple)) > MAX_CANDIDATES:
        multiple *= 2
    return _best_buckets(candidates, _chances(lengths, candidates, batch), buckets)


def _candidates(lengths: Sequence[int], multiple: int) -> list[int]:
    """List the multiples that some length is rounded up to."""
    return sorted({max(-(-n // multiple), 1) * multiple for n in lengths})


def _chances(lengths: Sequence[int], buckets: Sequence[int], batch: int) -> list[float]:
    """Return how likely the longest example of a random batch falls into each bucket."""
    counts = [0] * len(buckets)
    for n in lengths:
        counts[bisect_left(buckets, n)] += 1
    below = [(total / len(lengths)) ** batch for total in accumulate(counts)]
    return [b - a for a, b in zip([0.0, *below], below, strict=False)]


def _expected(lengths: Sequence[int], buckets: Sequence[int], batch: int) -> float:
    """Return the length of a batch, on average."""
    return sum(n * chance for n, chance in zip(buckets, _chances(lengths, buckets, batch), strict=True))


def _best_buckets(candidates: Sequence[int], chances: Sequence[float], count: int) -> tuple[int, ...]:
    """Choose so many of the places, the last among them, that batches rounded up to them are shortest on average.

    By dynamic programming: `least[j]` is the average of batches up to place j, where j is the last that was chosen.
    """
    n = torch.tensor([0, *candidates], dtype=torch.float64)
    below = torch.tensor([0.0, *accumulate(chances)], dtype=torch.float64)
    cost = n[None, :] * (below[None, :] - below[:, None])  # [i, j]: of batches above place i, rounded up to place j
    cost = torch.where(torch.ones_like(cost, dtype=torch.bool).triu(1), cost, torch.inf)
    least, before = cost[0], []
    for _ in range(min(count, len(candidates)) - 1):
        least, last = (least[:, None] + cost).min(0)
        before.append(last)
    choice, j = [len(candidates)], len(candidates)
    for last in reversed(before):
        j = int(last[j])
        choice.append(j)
    return tuple([int(candidates[j - 1]) for j in reversed(choice)])
