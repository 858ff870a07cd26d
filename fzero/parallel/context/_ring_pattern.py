"""The pattern of ring attention: which queries attend to which keys at each step, and under which mask."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fzero.axes import Binding
from fzero.collectives import PermutationOptions, apply, apply_stacked
from fzero.parallel.context._layout import compute_positions

__all__ = ["AttentionOptions", "Half", "HalfPair", "Mask", "Qkv", "Ring", "RingPattern"]

_MASK_ELEMENTS = 2**24  # of a mask in memory at a time, for each sequence
_SCORE_ROWS = 128  # of a tile whose scores are in memory
_MOST_TILES = 64  # of a pair of halves; each is a few operations of a graph


class AttentionOptions(NamedTuple):
    """The options of attention.

    Attributes:
        causal: whether a token attends only to itself and to tokens before it.
        window: a token attends to those at distances below it; None for any distance.
        scale: the factor of the products of queries and keys.
        softcap: the bound of the products, `softcap * tanh(products / softcap)`; None for none.
    """

    causal: bool
    window: int | None
    scale: float
    softcap: float | None = None

    def keep(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether queries at positions `[.., t]` attend to keys at positions `[.., s]`: bool `[.., t, s]`."""
        distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
        keep = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return keep if self.window is None else keep & (distance.abs() < self.window)


class Qkv(NamedTuple):
    """The operands of attention on one rank.

    Attributes:
        q: queries `[.., h, t, d]`.
        k: keys `[.., h / g, t, d]`.
        v: values `[.., h / g, t, e]`.
        sinks: `[.., h]`, in float32 at least: one more score of each query, for a key without a value; None for none.
        documents: int64 `[.., t]`: tokens attend to those of the same number; None for one document.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    documents: torch.Tensor | None = None


class _RingMessage(NamedTuple):
    """The tensors that a rank sends to the next one: two, such as keys and values, and the documents of keys.

    Attributes:
        tensors: both, stacked along a dimension if that is possible. As they arrive they are sent on, without a copy.
        documents: of the keys; None for one document, or if gradients are sent.
        dim: the dimension.
    """

    tensors: list[torch.Tensor]
    documents: torch.Tensor | None
    dim: int

    def pair(self) -> list[torch.Tensor]:
        """Return both tensors."""
        return self.tensors if len(self.tensors) == 2 else list(self.tensors[0].unbind(self.dim))


class Ring(NamedTuple):
    """The ranks of an axis, as one of them sees it, or all at once in a simulation.

    Attributes:
        token: the axis's token.
        binding: the constants of the axis.
        index: the index of this rank `[]`, or the indices `[n]` of all, where the values are.
    """

    token: torch.Tensor
    binding: Binding
    index: torch.Tensor

    @property
    def stacked(self) -> bool:
        """Whether values have a first dimension `[n]`, one for each rank."""
        return self.index.ndim > 0

    @property
    def size(self) -> int:
        return self.binding.size

    @property
    def rank(self) -> int | None:
        """The index of this rank as a number; None in a simulation by vmap, where one program computes all ranks."""
        return self.binding.rank if self.binding.group else None

    def source(self, step: int) -> torch.Tensor:
        """Return the rank whose keys this rank holds after some steps."""
        return (self.index - step) % self.size

    def like(self, x: torch.Tensor, ndim: int) -> torch.Tensor:
        """Give a value for each rank `[]` or `[n]` more dimensions, so that it broadcasts to one of `ndim`."""
        return x.reshape(-1, *[1] * (ndim - 1)) if self.stacked else x

    def message(self, x: torch.Tensor, y: torch.Tensor, documents: torch.Tensor | None = None) -> "_RingMessage":
        """Return two tensors as what is sent: as one tensor if they have one shape and dtype."""
        is_one = self.size > 1 and x.shape == y.shape and x.dtype == y.dtype
        return _RingMessage(
            [torch.stack([x, y], int(self.stacked))] if is_one else [x, y], documents, int(self.stacked)
        )

    def shift(self, message: "_RingMessage") -> "_RingMessage":
        """Send tensors to the next rank, and return those of the rank before."""
        documents = None if message.documents is None else self._shift(message.documents)
        return message._replace(tensors=[self._shift(x) for x in message.tensors], documents=documents)

    def broadcast_mask(self, x: torch.Tensor, ndim: int) -> torch.Tensor:
        """Give a mask `[t, s]` or `[n, t, s]` dimensions of size 1 before the last two, `ndim` in all."""
        return x.reshape(x.shape[0], *[1] * (ndim - 3), *x.shape[-2:]) if self.stacked else x

    def _shift(self, x: torch.Tensor) -> torch.Tensor:
        n = self.size
        options = PermutationOptions(tuple([(r, (r + 1) % n) for r in range(n)]))
        if self.stacked:
            return apply_stacked("ppermute", self.binding, options, n, x)[0]
        return apply(self.token, "ppermute", self.binding, options, x)[0]


_ALL, _EARLY, _LATE = "all", "early", "late"
Half = str | torch.Tensor  # a tensor: the early half where it is true, else the late half


class HalfPair(NamedTuple):
    """Queries of this rank, and keys of another one to which they attend."""

    queries: Half
    keys: Half


class RingPattern(NamedTuple):
    """Which keys this rank's queries attend to at each step of the ring.

    Attributes:
        ring: the ranks.
        options: the options of attention.
        tokens: the number of tokens of a rank.
        documents: `[.., tokens]`, the document of each token of this rank; None for one document.
    """

    ring: Ring
    options: AttentionOptions
    tokens: int
    documents: torch.Tensor | None

    @property
    def masked(self) -> bool:
        """Whether pairs are divided into tiles, each with a mask: also where torch's kernels would hold all scores."""
        return self.documents is not None or self.options.window is not None or self.options.softcap is not None

    @property
    def halves(self) -> int:
        """The number of parts into which queries and keys are divided."""
        return 2 if self.options.causal and self.ring.size > 1 else 1

    def pairs(self, step: int) -> list[HalfPair]:
        """List the pairs of halves that meet after some steps. All ranks have the same number of pairs.

        Early halves lie on the ranks in the order of the sequence, and late halves in the reverse order. The early keys
        of an earlier rank come before all queries, and its late keys after all. Both halves of a later rank's keys come
        before the late queries, and after the early ones.
        """
        if step == 0 or self.halves == 1:
            return [HalfPair(_ALL, _ALL)]
        rank, half = self.ring.rank, self.ring.source(step) < self.ring.index
        if rank is not None:  # the half is known, so it is taken without a copy
            half = _EARLY if (rank - step) % self.ring.size < rank else _LATE
        return [HalfPair(_LATE, _EARLY), HalfPair(half, half)]

    def take(self, x: torch.Tensor, half: Half, dim: int) -> torch.Tensor:
        """Take a half of the tokens, along a dimension counted from the end."""
        if isinstance(half, str) and half == _ALL:
            return x
        early, late = x.chunk(2, dim)
        if isinstance(half, str):
            return early if half == _EARLY else late
        return torch.where(self.ring.like(half, x.ndim), early, late)

    def take_pair(
        self, pair: HalfPair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take the queries, keys and values of a pair."""
        return self.take(q, pair.queries, -2), self.take(k, pair.keys, -2), self.take(v, pair.keys, -2)

    def targets(self, half: Half) -> list[tuple[int, torch.Tensor | None]]:
        """List the parts to which results of a half belong, each with the ranks where they do: None for all."""
        if isinstance(half, torch.Tensor):
            return [(0, half), (1, ~half)]
        return [(int(half == _LATE), None)]

    def mask(self, pair: HalfPair, step: int, key_documents: torch.Tensor | None) -> "Mask | None":
        """Return the mask of a pair; None if it needs none. `key_documents` are those of all keys."""
        if not self.masked:
            return None
        queries = self.take(compute_positions(self.ring.index, self.ring.size, self.tokens), pair.queries, -1)
        keys = self.take(compute_positions(self.ring.source(step), self.ring.size, self.tokens), pair.keys, -1)
        if self.documents is None or key_documents is None:
            return Mask(pattern=self, queries=queries, keys=keys, query_documents=None, key_documents=None)
        query_documents = self.take(self.documents, pair.queries, -1)
        return Mask(
            pattern=self,
            queries=queries,
            keys=keys,
            query_documents=query_documents,
            key_documents=self.take(key_documents, pair.keys, -1),
        )


class Mask(NamedTuple):
    """Which queries attend to which keys, by their positions `[t]` or `[n, t]` and documents `[.., t]`."""

    pattern: RingPattern
    queries: torch.Tensor
    keys: torch.Tensor
    query_documents: torch.Tensor | None
    key_documents: torch.Tensor | None

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """List slices of queries, each with the slice of keys to which some of them may attend."""
        t, s, (ring, options) = self.queries.shape[-1], self.keys.shape[-1], self.pattern[:2]
        window = options.window if ring.size == 1 else None
        reach = s if window is None else min(window, s)
        rows = max(_MASK_ELEMENTS // (2 * max(reach, 1)), -(-t // _MOST_TILES), 1)
        if options.softcap is not None:  # the scores of a tile are in memory, for each head
            rows = min(rows, max(_SCORE_ROWS, -(-t // _MOST_TILES)))
        rows = rows if window is None else min(rows, max(reach, -(-t // _MOST_TILES)))
        for a in range(0, t, rows):
            b = min(a + rows, t)
            if ring.size > 1:  # the keys are not in the order of the queries
                yield slice(a, b), slice(0, s)
            else:
                first_key = 0 if window is None else max(0, a - window + 1)
                end = s if window is None else min(s, b + window - 1)
                end = b if options.causal else end
                yield slice(a, b), slice(first_key, end)

    def of(self, rows: slice, columns: slice, lead: torch.Size) -> torch.Tensor:
        """Return which queries of a tile attend to which of its keys: bool `[b, 1, rows, columns]`.

        Args:
            rows: the tile's queries.
            columns: the tile's keys.
            lead: the leading dimensions of the values. b is their number of elements, or 1 if all have one mask.
        """
        keep = self.pattern.options.keep(self.queries[..., rows], self.keys[..., columns])
        if self.query_documents is not None and self.key_documents is not None:
            are_same_document = self.query_documents[..., rows].unsqueeze(-1) == self.key_documents[
                ..., columns
            ].unsqueeze(-2)
            keep = are_same_document & self.pattern.ring.broadcast_mask(keep, are_same_document.ndim)
        elif self.pattern.ring.stacked:
            keep = self.pattern.ring.broadcast_mask(keep, len(lead) + 2)
        else:
            return keep[None, None]
        return keep.expand(*lead, *keep.shape[-2:]).reshape(lead.numel(), 1, *keep.shape[-2:])
