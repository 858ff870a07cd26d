"""Numbered batches: batch i is a function of the data set, the seed and i."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import torch

from fzero._arguments import check_choice, is_int
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName
from fzero.data._loading import BatchTarget, check_options, check_padding, check_sized, load_batches
from fzero.data._padding import Padding
from fzero.ranks import Mesh
from fzero.sharding import PerRank

__all__ = ["Batches", "batches"]


@api_boundary
def batches(
    dataset: Any,
    mesh: Mesh,
    *,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    axis: AxisName = None,
    collate: Callable[[list[Any]], Any] | None = None,
    pad: Padding | None = None,
    **loader: Any,
) -> "Batches":
    """Number the batches of a data set, epoch after epoch.

    Batch i is a function of the data set, `seed` and i. So there is no state to save, and the global batch is the same
    on any number of ranks. A run that resumes at step i, even on another mesh, sees the same batches. Each process
    loads only its own rows. An epoch drops the examples that do not fill a batch. With `shuffle`, each epoch drops
    different ones.

    Args:
        dataset: an object with a length and an example at each index: a `torch.utils.data.Dataset`, a list, a
            `datasets` table, a tensor. Its random draws (augmentation) repeat after a restart only if they depend on
            the index.
        mesh: the ranks.
        global_batch: the examples of one step over all ranks, micro-batches included.
        seed: the seed of the order, which differs between epochs.
        shuffle: whether the order is random; otherwise it is the data set's.
        axis: the axes along which ranks get different examples; by default all (`mesh.split`).
        collate: makes a tree of tensors `[examples, ...]` from examples; by default torch's `default_collate`.
        pad: how to pad examples of unequal lengths, from `fzero.data.padding`.
        **loader: options of `torch.utils.data.DataLoader`: `num_workers=4` loads ahead in processes, `pin_memory=True`
            also pins the batches ahead of their copy to a GPU.

    Returns:
        A `Batches`: iterate over `steps(start, stop)`, or take a batch by its number.

    Raises:
        TypeError: if the data set has no length.
        ValueError: if `global_batch` is not a multiple of the ranks, or exceeds the data set's length; or if `pad` was
            made for another data set or batch.

    Example:
        >>> import fzero
        >>> data = batches(torch.arange(10), fzero.mesh(dp=2), global_batch=4, seed=1)
        >>> data.per_epoch
        2
        >>> [(i, batch.value.shape) for i, batch in data.steps(3, 5)]
        [(3, torch.Size([2, 2])), (4, torch.Size([2, 2]))]
        >>> bool(data[3].value.eq(dict(data.steps(3, 4))[3].value).all())
        True
    """
    check_sized(dataset)
    if not is_int(seed):
        raise ValueError(f"seed={seed!r}: expected an int")
    check_choice("shuffle", shuffle, (True, False))
    check_options(global_batch, mesh, axis, collate, loader)
    if global_batch > len(dataset):
        raise ValueError(
            f"global_batch={global_batch} exceeds the data set's {len(dataset)} examples: use a smaller one, or "
            "repeat the data set (torch.utils.data.ConcatDataset)"
        )
    check_padding(pad, dataset, global_batch)
    return Batches(
        dataset=dataset,
        mesh=mesh,
        global_batch=global_batch,
        seed=seed,
        shuffle=shuffle,
        axis=axis,
        collate=collate,
        pad=pad,
        loader=loader,
    )


@dataclass(frozen=True)
class Batches:
    """The numbered batches of a data set. Make them with `fzero.data.batches`.

    Attributes:
        dataset: the examples.
        mesh: the ranks.
        global_batch: the examples of one batch, over all ranks.
        seed: the seed of the order.
        shuffle: whether the order is random.
        axis: the axes along which ranks get different examples; None for all.
        collate: makes a tree of tensors from a list of examples.
        pad: how to pad examples of unequal lengths.
        loader: further options of `torch.utils.data.DataLoader`.
    """

    dataset: Any
    mesh: Mesh
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    axis: AxisName = None
    collate: Callable[[list[Any]], Any] | None = None
    pad: Padding | None = None
    loader: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        order = f"seed={self.seed}" if self.shuffle else "in order"
        sizes = f"{len(self.dataset):,} examples, {self.global_batch} a batch, {self.per_epoch:,} batches an epoch"
        padded = "" if self.pad is None else f", {len(self.pad.buckets)} lengths, {self.pad.share:.0%} padded"
        return f"Batches({sizes}, {order}{padded})"

    @property
    def per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return len(self.dataset) // self.global_batch

    def indices(self, i: int) -> list[int]:
        """Return the data set's indices of batch i's examples, in rank order."""
        return next(self._batches_from(i, i + 1))

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset), device="cpu")
        # Python hashes the text to a seed, so that neighbouring epochs and seeds are unrelated
        generator = torch.Generator("cpu").manual_seed(Random(f"{self.seed}/{epoch}").getrandbits(63))
        return torch.randperm(len(self.dataset), generator=generator, device="cpu")

    @api_boundary
    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, PerRank]]:
        """Load the batches from `start` to before `stop`, or without end, each with its number.

        Args:
            start: the number of the first batch: the number of steps done before.
            stop: the number of steps in all; None for no end.

        Returns:
            An iterator of pairs: the number of a batch, and the batch as a `PerRank` of tensors `[b, ...]` (in a
            simulation `[N, b, ...]`).

        Raises:
            ValueError: if `start` or `stop` is negative.
            TypeError: if a leaf of a batch is not a tensor. The message names the leaf.
        """
        numbers = (start,) if stop is None else (start, stop)
        if not all(is_int(n) and n >= 0 for n in numbers):
            raise ValueError(f"steps({start!r}, {stop!r}): expected numbers of steps, ints of 0 or more")
        target = BatchTarget(self.mesh, self.axis)
        return enumerate(
            load_batches(
                self.dataset,
                indices=self._batches_from(start, stop),
                target=target,
                collate=self.collate,
                pad=self.pad,
                options=self.loader,
            ),
            start,
        )

    def _batches_from(self, start: int, stop: int | None) -> Iterator[list[int]]:
        """Yield the indices of one batch after another. Each epoch's order is drawn once."""
        epoch, order = -1, torch.empty(0, device="cpu")
        for i in count(start) if stop is None else range(start, stop):
            batch_epoch, position = divmod(i, self.per_epoch)
            if batch_epoch != epoch:
                epoch, order = batch_epoch, self._epoch_order(batch_epoch)
            yield order[position * self.global_batch : (position + 1) * self.global_batch].tolist()

    @api_boundary
    def __iter__(self) -> Iterator[PerRank]:
        """Raise an error: the batches have no end."""
        raise TypeError(
            "Batches have no end: for i, batch in data.steps(0, n) takes n of them; data.per_epoch are an epoch"
        )

    def __getitem__(self, i: int) -> PerRank:
        """Load batch i."""
        if not is_int(i):
            raise TypeError(f"batch {i!r}: expected the number of a batch, an int of 0 or more")
        if i < 0:
            raise IndexError(f"batch {i}: batch numbers are 0 or more, without end")
        return next(batch for _, batch in self.steps(i, i + 1))
