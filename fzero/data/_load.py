"""How the examples of a batch come to a rank: torch's DataLoader loads them, and a box holds them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from fzero import tree
from fzero.axes.axis import AxisName
from fzero.data._padding import Padding
from fzero.layout.boxes import PerRank
from fzero.ranks.mesh import Mesh

__all__ = ["BatchTarget", "check_global_batch", "check_padding", "check_sized", "loaded"]

OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator")


class BatchTarget(NamedTuple):
    """Where batches go.

    Attributes:
        mesh: the ranks.
        axis: the axes along which they get examples of their own; None for all.
        device: "cuda" or "cpu"; None for the mesh's.
    """

    mesh: Mesh
    axis: AxisName
    device: str | None

    def own(self, indices: list[int]) -> list[int]:
        """Return those of a global batch's examples that this process loads: in a simulation all."""
        if self.mesh.simulated:
            return indices
        names = self.mesh.names(self.axis)
        rows = len(indices) // ranks_along(self.mesh, self.axis)
        first = self.mesh.index(names) * rows
        return indices[first : first + rows]

    def box(self, batch: Any) -> PerRank:
        """Put what was loaded on the device, and into a box."""
        device = self.device or ("cpu" if self.mesh.simulated else self.mesh.device_mesh.device_type)

        def moved(x: Any) -> Any:
            return x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x

        batch = dict(batch) if isinstance(batch, Mapping) else batch  # transformers' BatchEncoding is no dict
        batch = tree.map(moved, batch)
        return self.mesh.split(batch, self.axis) if self.mesh.simulated else self.mesh.local(batch, self.axis)


def ranks_along(mesh: Mesh, axis: AxisName) -> int:
    """Count the ranks that get examples of their own."""
    sizes = dict(mesh.shape)
    return math.prod([sizes[name] for name in mesh.names(axis)])


class _Padded(NamedTuple):
    """A data set that is asked for an example and its length."""

    dataset: Any
    pad: Padding

    def __getitem__(self, asked: tuple[int, int]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        index, length = asked
        return self.pad.example(self.dataset[index], length)


def loaded(
    dataset: Any,
    indices: Iterable[list[int]],
    place: BatchTarget,
    collate: Callable[[list[Any]], Any] | None,
    pad: Padding | None,
    options: Mapping[str, Any],
) -> Iterator[PerRank]:
    """Load batch after batch, of which the examples are given by their indices, over all ranks."""

    def own(indices: list[int]) -> list[Any]:
        if pad is None:
            return place.own(indices)
        length = pad.length_of(indices)  # of the global batch: all ranks have one length
        return [(i, length) for i in place.own(indices)]

    loader = DataLoader(
        dataset if pad is None else _Padded(dataset, pad),  # pyright: ignore
        batch_sampler=map(own, indices),  # pyright: ignore  an iterator will do: it is asked once
        collate_fn=collate,
        generator=torch.Generator(),  # else it draws from the global one, which is the user's
        **options,
    )
    return map(place.box, loader)


def check_sized(dataset: Any) -> None:
    """Raise a TypeError for a stream of examples, which have no numbers."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, which has no length or no examples by index: load a stream with "
            "torch's own DataLoader, a part for each rank, and box what it gives: mesh.local(batch)"
        )


def check_padding(pad: Padding | None, dataset: Any, global_batch: int) -> None:
    """Raise a ValueError for a padding that was made for another data set or batch."""
    if pad is not None and len(pad.lengths) != len(dataset):
        raise ValueError(f"pad has the lengths of {len(pad.lengths):,} examples, and the data set {len(dataset):,}")
    if pad is not None and pad.global_batch != global_batch:
        raise ValueError(f"pad was made for batches of {pad.global_batch}, and global_batch={global_batch}")


def check_global_batch(global_batch: Any, mesh: Mesh, axis: AxisName, options: Mapping[str, Any]) -> None:
    """Raise an error for a batch that the ranks cannot share, or an option that is not the user's."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}: expected what fzero.mesh returns")
    if not isinstance(global_batch, int) or isinstance(global_batch, bool) or global_batch < 1:
        raise ValueError(f"global_batch={global_batch!r}: expected a number of examples, 1 or more")
    n = ranks_along(mesh, axis)
    if global_batch % n:
        raise ValueError(
            f"global_batch={global_batch} does not divide by the {n} ranks of {mesh!r}: take "
            f"{global_batch // n * n or n}"
        )
    if ours := [name for name in options if name in OURS]:
        raise TypeError(
            f"{ours[0]}= is not given to torch's DataLoader here: say global_batch, shuffle, seed or collate"
        )
