"""Numbered batches, each example once in order, and the mean over batches of unequal size."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from fzero import tree
from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName, BatchSplit
from fzero.data._padding import Padding
from fzero.ranks import Mesh
from fzero.sharding import PerRank

__all__ = [
    "BatchTarget",
    "Batches",
    "batches",
    "check_global_batch",
    "check_padding",
    "check_sized",
    "load_batches",
    "mean",
    "once",
    "prefetch",
]

# Loading: torch's DataLoader loads each rank's examples of a batch, and a box holds them.


T = TypeVar("T")
RESERVED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator")


class BatchTarget(NamedTuple):
    """The ranks that batches are loaded for.

    Attributes:
        mesh: the ranks.
        axis: the axes along which ranks get different examples; None for all.
    """

    mesh: Mesh
    axis: AxisName

    def local_indices(self, indices: list[int]) -> list[int]:
        """Return the indices of a global batch that this process loads; all of them in a simulation."""
        if self.mesh.simulated:
            return indices
        names = self.mesh.names(self.axis)
        rows = len(indices) // ranks_along(self.mesh, self.axis)
        first = self.mesh.index(names) * rows
        return indices[first : first + rows]

    def box(self, batch: Any) -> PerRank:
        """Put a loaded batch into a box, on the mesh's device."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # transformers' BatchEncoding is not a dict
        if self.mesh.simulated:
            return self.mesh.split(batch, self.axis)
        box = self.mesh.local(batch, self.axis)
        return PerRank(box.value, box.axes, BatchSplit(samples=self.mesh.names(self.axis)))


def ranks_along(mesh: Mesh, axis: AxisName) -> int:
    """Return the number of ranks that get different examples."""
    sizes = dict(mesh.shape)
    return math.prod([sizes[name] for name in mesh.names(axis)])


class _PaddedDataset(NamedTuple):
    """A data set that is indexed by an example's index and the length to pad it to."""

    dataset: Any
    pad: Padding

    def __getitem__(self, key: tuple[int, int]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        index, length = key
        return self.pad.example(self.dataset[index], length)


def load_batches(
    dataset: Any,
    indices: Iterable[list[int]],
    target: BatchTarget,
    collate: Callable[[list[Any]], Any] | None,
    pad: Padding | None,
    options: Mapping[str, Any],
) -> Iterator[PerRank]:
    """Load one batch after another. Each global batch is a list of the examples' indices."""

    def local_examples(indices: list[int]) -> list[Any]:
        if pad is None:
            return target.local_indices(indices)
        length = pad.length_of(indices)  # the global batch decides, so that all ranks pad to one length
        return [(i, length) for i in target.local_indices(indices)]

    loader = DataLoader(
        dataset if pad is None else _PaddedDataset(dataset, pad),  # pyright: ignore
        batch_sampler=map(local_examples, indices),  # pyright: ignore  DataLoader iterates over it only once
        collate_fn=collate,
        generator=torch.Generator("cpu"),  # the default would draw from the user's global generator
        **options,
    )
    with torch.device("cpu"):  # the loader draws a number, which it reads at once
        loaded = iter(loader)
    return map(target.box, loaded)


def check_sized(dataset: Any) -> None:
    """Check that a data set has a length and an index: a stream of examples raises a TypeError."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, which has no length or no examples by index: load a stream with "
            "torch's own DataLoader, a different part on each rank, and box each batch: mesh.local(batch)"
        )


def check_padding(pad: Padding | None, dataset: Any, global_batch: int) -> None:
    """Check that a padding was made for this data set and batch. If not, raise a ValueError."""
    if pad is not None and len(pad.lengths) != len(dataset):
        raise ValueError(
            f"pad has the lengths of {len(pad.lengths):,} examples, but the data set has {len(dataset):,}: make it "
            "with fzero.data.padding and the length of each example of this data set"
        )
    if pad is not None and pad.global_batch != global_batch:
        raise ValueError(
            f"pad was made for global_batch={pad.global_batch}, not for global_batch={global_batch}: make it with "
            f"fzero.data.padding(..., global_batch={global_batch})"
        )


def check_global_batch(global_batch: Any, mesh: Mesh, axis: AxisName, options: Mapping[str, Any]) -> None:
    """Check that the ranks can share a batch, and that no option is reserved. If not, raise an error."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}: expected a mesh, such as fzero.mesh returns")
    check_int("global_batch", global_batch, 1, "a number of examples")
    n = ranks_along(mesh, axis)
    if global_batch % n:
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of the {n} ranks of {mesh!r}: use "
            f"{global_batch // n * n or n}"
        )
    if reserved := [name for name in options if name in RESERVED]:
        raise TypeError(
            f"{reserved[0]}= cannot be passed to torch's DataLoader here: use global_batch, shuffle, seed or collate"
        )


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
    check_global_batch(global_batch, mesh, axis, loader)
    if global_batch > len(dataset):
        raise ValueError(
            f"global_batch={global_batch} exceeds the data set's {len(dataset)} examples: use a smaller one, or "
            "repeat the data set (torch.utils.data.ConcatDataset)"
        )
    check_padding(pad, dataset, global_batch)
    return Batches(dataset, mesh, global_batch, seed, shuffle, axis, collate, pad, loader)


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
        return next(self._from(i, i + 1))

    def _order(self, epoch: int) -> torch.Tensor:
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
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError(f"steps({start}, {stop}): expected numbers of steps, 0 or more")
        target = BatchTarget(self.mesh, self.axis)
        return enumerate(
            load_batches(self.dataset, self._from(start, stop), target, self.collate, self.pad, self.loader), start
        )

    def _from(self, start: int, stop: int | None) -> Iterator[list[int]]:
        """Yield the indices of one batch after another. Each epoch's order is drawn once."""
        epoch, order = -1, torch.empty(0, device="cpu")
        for i in count(start) if stop is None else range(start, stop):
            batch_epoch, position = divmod(i, self.per_epoch)
            if batch_epoch != epoch:
                epoch, order = batch_epoch, self._order(batch_epoch)
            yield order[position * self.global_batch : (position + 1) * self.global_batch].tolist()

    @api_boundary
    def __getitem__(self, i: int) -> PerRank:
        """Load batch i."""
        if i < 0:
            raise IndexError(f"batch {i}: batch numbers are 0 or more, without end")
        return next(batch for _, batch in self.steps(i, i + 1))


# The mean over batches of unequal size.


@api_boundary
def mean(totals: Iterable[tuple[Any, torch.Tensor]]) -> Any:
    """Return the mean over all examples of all batches, as Python numbers.

    The sums stay on their device, in double precision, until the last batch, so that no batch waits for the device.

    Args:
        totals: a pair for each batch, as a program of `fzero.evaluate` returns it: a tree of sums over the batch's
            examples, and the sum of their weights.

    Returns:
        The tree, with a float for each sum.

    Raises:
        ValueError: if there are no batches, or the weights add up to 0.

    Example:
        >>> mean([({"loss": torch.tensor(6.0)}, torch.tensor(4)), ({"loss": torch.tensor(1.0)}, torch.tensor(1))])
        {'loss': 1.4}
    """
    sums: Any = None
    for batch, weight in totals:
        batch_sums = tree.map(torch.Tensor.double, (batch, weight))
        sums = batch_sums if sums is None else tree.map(torch.add, sums, batch_sums)
    if sums is None:
        raise ValueError("fzero.data.mean: there are no batches to take the mean of")
    total, weight = sums
    if weight.item() == 0:
        raise ValueError("fzero.data.mean: the weights of all examples add up to 0")
    return tree.map(lambda x: (x / weight).item(), total)


# Each example once, in order: the last batch is filled up.


@api_boundary
def once(
    dataset: Any,
    mesh: Mesh,
    *,
    global_batch: int,
    axis: AxisName = None,
    collate: Callable[[list[Any]], Any] | None = None,
    pad: Padding | None = None,
    **loader: Any,
) -> Iterator[tuple[PerRank, torch.Tensor]]:
    """Load each example of a data set once, in order, for `fzero.evaluate` and `fzero.predict`.

    All batches have one size, so that a jitted program is traced once. The last batch repeats its last example.

    Args:
        dataset: the data set, as `fzero.data.batches` takes it.
        mesh: the ranks.
        global_batch: the examples of one batch over all ranks.
        axis: the axes along which ranks get different examples; by default all.
        collate: makes a tree of tensors `[examples, ...]` from examples; by default torch's `default_collate`.
        pad: how to pad examples of unequal lengths, from `fzero.data.padding`.
        **loader: options of `torch.utils.data.DataLoader`.

    Returns:
        An iterator of pairs: a batch, as a `PerRank`, and the number of its examples without repetitions, over all
        ranks, as a 0-d int64 tensor.

    Raises:
        TypeError: if the data set has no length.
        ValueError: if `global_batch` is not a multiple of the ranks, or `pad` was made for another data set or batch.

    Example:
        >>> import fzero
        >>> for batch, rows in once(torch.arange(5), fzero.mesh(dp=2), global_batch=4):
        ...     print(batch.value.tolist(), int(rows))
        [[0, 1], [2, 3]] 4
        [[4, 4], [4, 4]] 1
    """
    check_sized(dataset)
    check_global_batch(global_batch, mesh, axis, loader)
    check_padding(pad, dataset, global_batch)
    length = len(dataset)
    starts = range(0, length, global_batch)
    indices = ([min(i, length - 1) for i in range(start, start + global_batch)] for start in starts)
    rows = (torch.tensor(min(global_batch, length - start), device="cpu") for start in starts)
    return zip(load_batches(dataset, indices, BatchTarget(mesh, axis), collate, pad, loader), rows, strict=True)


# Copies to the device, beside the step before.


@api_boundary
def prefetch(batches: Iterable[T], mesh: Mesh, ahead: int = 1) -> Iterator[T]:
    """Take batches before they are used, so that their copies to the device run beside the steps before them.

    On the CPU nothing is copied, and the batches come as they are. On an accelerator `ahead` more batches lie in its
    memory, which no plan counts.

    Args:
        batches: the batches, such as `data.steps()`, or `map(mesh.split, loader)`; also pairs of a number and a batch.
        mesh: the ranks.
        ahead: the number of batches to take before they are used, 1 or more.

    Returns:
        An iterator of the same batches, in order.

    Raises:
        ValueError: if `ahead` is below 1.

    Example:
        >>> import fzero
        >>> mesh = fzero.mesh(dp=2)
        >>> data = batches(torch.arange(10), mesh, global_batch=4)
        >>> [i for i, batch in prefetch(data.steps(0, 3), mesh)]
        [0, 1, 2]
    """
    check_int("ahead", ahead, 1, "a number of batches")
    return iter(batches) if mesh.device.type == "cpu" else _prefetched(iter(batches), mesh.device, ahead)


def _prefetched(batches: Iterator[T], device: torch.device, ahead: int) -> Iterator[T]:
    """Copy batches on a stream of their own. The caller's stream waits for a batch's copies only when it is used."""
    stream = torch.Stream(device)
    pending: deque[tuple[T, torch.Event]] = deque()

    def take(count: int) -> None:
        for _ in range(count):
            with stream:
                for batch in islice(batches, 1):
                    pending.append((batch, stream.record_event()))

    take(ahead)
    while pending:
        batch, event = pending.popleft()
        take(1)
        current = torch.accelerator.current_stream(device)
        current.wait_event(event)
        for x in tree.tensors(batch):
            if x.device == device:
                x.record_stream(current)  # its memory is not reused before the caller's work on it is done
        yield batch
