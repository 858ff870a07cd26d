"""Batches that are numbered: the i-th one is a function of the data set, the seed and i."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import torch

from fzero.axes.axis import AxisName
from fzero.data._load import BatchTarget, check_global_batch, check_padding, check_sized, loaded
from fzero.data._padding import Padding
from fzero.layout.boxes import PerRank
from fzero.ranks.mesh import Mesh

__all__ = ["Batches", "batches"]


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
    device: str | None = None,
    **loader: Any,
) -> "Batches":
    """Number the batches of a data set, epoch after epoch.

    Batch i is a function of the data set, `seed` and i: no state has to be saved, and on any number of ranks the global
    batch is the same. So a run that goes on at step i, on another mesh too, sees what it would have seen. Each process
    loads its own rows alone. The examples that are left at the end of an epoch, too few for a batch, are left out; each
    epoch leaves out others.

    Args:
        dataset: what has a length, and an example at each index: a `torch.utils.data.Dataset`, a list, a `datasets`
            table, a tensor. Draws of its own (augmentation) repeat after a restart only if they depend on the index.
        mesh: the ranks.
        global_batch: how many examples all ranks take in one step, micro-batches included.
        seed: of the order, in which each epoch differs.
        shuffle: whether the order is random; else it is the data set's.
        axis: the axes along which ranks get examples of their own; by default all (`mesh.split`).
        collate: makes a tree of tensors `[examples, ...]` of a list of examples; by default torch's `default_collate`.
        pad: how examples of unequal lengths are padded, as `fzero.data.padding` says.
        device: where batches go: "cuda" or "cpu"; by default the mesh's.
        **loader: given to `torch.utils.data.DataLoader`: `num_workers=4` loads ahead in processes, `pin_memory=True`
            speeds up the way to a GPU.

    Returns:
        A `Batches`: iterate over `steps(start, stop)`, or take one by its number.

    Raises:
        TypeError: if the data set has no length.
        ValueError: if `global_batch` is not a multiple of the ranks, or above the data set's length; or if `pad` was
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
    check_global_batch(global_batch, mesh, axis, loader)
    if global_batch > len(dataset):
        raise ValueError(
            f"global_batch={global_batch} is above the data set's {len(dataset)} examples: take a smaller one, or "
            "repeat the data set (torch.utils.data.ConcatDataset)"
        )
    check_padding(pad, dataset, global_batch)
    return Batches(dataset, mesh, global_batch, seed, shuffle, axis, collate, pad, device, loader)


@dataclass(frozen=True)
class Batches:
    """The numbered batches of a data set. Make them with `fzero.data.batches`.

    Attributes:
        dataset: what holds the examples.
        mesh: the ranks.
        global_batch: the examples of one batch, over all ranks.
        seed: of the order.
        shuffle: whether the order is random.
        axis: the axes along which ranks get examples of their own; None for all.
        collate: makes a tree of tensors of a list of examples.
        pad: how examples of unequal lengths are padded.
        device: where batches go.
        loader: what `torch.utils.data.DataLoader` is given beside.
    """

    dataset: Any
    mesh: Mesh
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    axis: AxisName = None
    collate: Callable[[list[Any]], Any] | None = None
    pad: Padding | None = None
    device: str | None = None
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
        """Return the examples of batch i, by their indices in the data set, in rank order."""
        return next(self._from(i, i + 1))

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        # of a text Python makes a seed that has nothing to do with its neighbours'
        generator = torch.Generator().manual_seed(Random(f"{self.seed}/{epoch}").getrandbits(63))
        return torch.randperm(len(self.dataset), generator=generator)

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, PerRank]]:
        """Load the batches from `start` on, before `stop`, or without end: each with its number.

        Args:
            start: the number of the first: that of the steps that were done before.
            stop: how many steps there are in all; None for no end.

        Returns:
            An iterator of pairs: the number of a batch, and the batch as a `PerRank` of tensors `[b, ...]` (in a
            simulation `[N, b, ...]`).

        Raises:
            ValueError: if `start` or `stop` is no number of steps.
            TypeError: if a leaf of a batch is no tensor. The message names it.
        """
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError(f"steps({start}, {stop}): expected numbers of steps, 0 or more")
        place = BatchTarget(self.mesh, self.axis, self.device)
        return enumerate(
            loaded(self.dataset, self._from(start, stop), place, self.collate, self.pad, self.loader), start
        )

    def _from(self, start: int, stop: int | None) -> Iterator[list[int]]:
        """List the indices of batch after batch, and draw each epoch's order once."""
        epoch, order = -1, torch.empty(0)
        for i in count(start) if stop is None else range(start, stop):
            of, place = divmod(i, self.per_epoch)
            if of != epoch:
                epoch, order = of, self._order(of)
            yield order[place * self.global_batch : (place + 1) * self.global_batch].tolist()

    def __getitem__(self, i: int) -> PerRank:
        """Load batch i."""
        if i < 0:
            raise IndexError(f"batch {i}: batches are numbered from 0 on, without end")
        return next(batch for _, batch in self.steps(i, i + 1))
