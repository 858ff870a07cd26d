"""Loading: torch's DataLoader loads each rank's examples of a batch, and a box holds them."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from fzero._arguments import check_callable, check_int, did_you_mean
from fzero._tracebacks import UserFrames
from fzero.axes import AxisName, BatchSplit
from fzero.data._padding import Padding
from fzero.ranks import Mesh
from fzero.sharding import PerRank

__all__ = ["BatchTarget", "check_options", "check_padding", "check_sized", "load_batches"]


_BATCH = "global_batch=, the examples of a batch over all ranks"
_INSTEAD = {  # of options of torch's DataLoader that are fixed here, and of names that other libraries have
    "batch_sampler": "use seed= and shuffle=, or a data set that has the examples in your order",
    "batch_size": f"use {_BATCH}",
    "collate_fn": "use collate=",
    "drop_last": "batches drops the last examples, and fzero.data.epoch repeats them",
    "epochs": "use a range of steps: data.steps(0, epochs * data.per_epoch)",
    "generator": "use seed=",
    "micro_batch_size": f"use {_BATCH}; fzero.value_and_grad(micro_batches=) divides it",
    "num_epochs": "use a range of steps: data.steps(0, num_epochs * data.per_epoch)",
    "num_replicas": "use the mesh",
    "per_device_train_batch_size": f"use {_BATCH}",
    "rank": "use the mesh",
    "sampler": "use seed= and shuffle=, or a data set that has the examples in your order",
    "shuffle": "use fzero.data.batches, which has shuffle=; fzero.data.epoch keeps the order",
    "train_batch_size": f"use {_BATCH}",
    "world_size": "use the mesh",
}
_OPTIONS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset", *_INSTEAD}


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
        rows = len(indices) // _ranks_along(self.mesh, self.axis)
        first = self.mesh.index(names) * rows
        return indices[first : first + rows]

    def box(self, batch: Any) -> PerRank:
        """Put a loaded batch into a box, on the mesh's device."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # transformers' BatchEncoding is not a dict
        if self.mesh.simulated:
            return self.mesh.split(batch, self.axis)
        box = self.mesh.local(batch, self.axis)
        return PerRank(box.value, box.axes, BatchSplit(samples=self.mesh.names(self.axis)))


def _ranks_along(mesh: Mesh, axis: AxisName) -> int:
    """Return the number of ranks that get different examples."""
    sizes = dict(mesh.shape)
    return math.prod([sizes[name] for name in mesh.names(axis)])


class _PaddedDataset(NamedTuple):
    """A data set that is indexed by an example's index and the length to pad it to."""

    dataset: Any
    pad: Padding

    def __getitem__(self, key: tuple[int, int]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        index, length = key
        return self.pad.pad_example(self.dataset[index], length)


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
        length = pad.padded_length(indices)  # the global batch decides, so that all ranks pad to one length
        return [(i, length) for i in target.local_indices(indices)]

    loader = DataLoader(
        dataset if pad is None else _PaddedDataset(dataset, pad),  # pyright: ignore
        batch_sampler=map(local_examples, indices),  # pyright: ignore  DataLoader iterates over it only once
        collate_fn=collate,
        generator=torch.Generator("cpu"),  # the default would draw from the user's global generator
        **options,
    )
    with torch.device("cpu"):  # the loader draws a number, which it reads at once
        batches_of_loader = iter(loader)
    return _box_each(batches_of_loader, target)


def _box_each(batches: Iterator[Any], target: BatchTarget) -> Iterator[PerRank]:
    """Yield loaded batches in boxes. The traceback of an error in the data set ends there, without torch's loader."""
    while True:
        with UserFrames():
            try:
                box = target.box(next(batches))
            except StopIteration:
                return
        yield box


def check_sized(dataset: Any) -> None:
    """Check that a data set has a length and an index.

    Raises:
        TypeError: if it has not, as a stream of examples.
    """
    if isinstance(dataset, Mesh):
        raise TypeError("dataset is a Mesh: the data set comes first, data.batches(dataset, mesh, global_batch=32)")
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset is a DataLoader: pass its data set, loader.dataset, of which each rank loads its own examples; or "
            "iterate over the loader, and split each batch, mesh.split(batch)"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, which has no length or no examples by index: load a stream with "
            "torch's own DataLoader, a different part on each rank, and box each batch: mesh.local(batch)"
        )


def check_padding(pad: Padding | None, dataset: Any, global_batch: int) -> None:
    """Check that a padding was made for this data set and batch.

    Raises:
        ValueError: if not.
    """
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


def check_options(global_batch: Any, mesh: Mesh, axis: AxisName, collate: Any, options: Mapping[str, Any]) -> None:
    """Check that the ranks can share a batch, and that the loader has each option.

    Raises:
        TypeError: if `mesh` is not a mesh, `collate` is not a function, or an option is unknown or reserved.
        ValueError: if the ranks do not divide `global_batch`, or it is below 1.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}: expected a mesh, such as fzero.mesh returns")
    if collate is not None:
        check_callable("collate", collate, "a function of a list of examples")
    check_int("global_batch", global_batch, 1, "a number of examples")
    n = _ranks_along(mesh, axis)
    if global_batch % n:
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of the {n} ranks of {mesh!r}: use "
            f"{global_batch // n * n or n}"
        )
    for name in options:
        if name in _INSTEAD:
            raise TypeError(f"{name}= is no option of fzero.data: {_INSTEAD[name]}")
        if name not in _OPTIONS:
            hint = did_you_mean(name, [*_OPTIONS, "global_batch", "seed", "axis", "collate", "pad"], "{}=")
            raise TypeError(f"{name}= is an option neither of fzero.data nor of torch's DataLoader{hint}")
