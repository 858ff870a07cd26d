"""Replicas: trees of groups of ranks that train apart, and their way into and out of a program of all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fzero import tree
from fzero._torch import in_buffers
from fzero.ranks import Mesh
from fzero.sharding import PerRank, is_box, leaf_axes

__all__ = ["LocalState", "ReplicaGroups", "Replicas", "own_memory", "rebuild"]

_SAVE_HINT = "save replicas by step.save(path, params, state), where step is from local_steps"


@dataclass(frozen=True, eq=False)
class Replicas:
    """A tree that each replica holds for itself, such as the parameters between two averages.

    It is not a pytree, so no other function mistakes the replicas for copies of one tree.

    Attributes:
        trees: on processes the tree of this process's replica; in a simulation the tree of each replica.
    """

    trees: tuple[Any, ...]
    save_hint: ClassVar[str] = _SAVE_HINT

    def __repr__(self) -> str:
        return f"Replicas({len(self.trees)} of {tree.numel(self.trees[0])} elements)"


@dataclass(frozen=True, eq=False)
class LocalState:
    """The state of a run whose replicas train apart.

    Attributes:
        count: the number of steps done.
        inner: the optimizer state of each replica.
        anchor: the parameters of the last average, in float32 at least, equal on all replicas. At stages 1 to 3 they
            are sharded over a replica's ranks. They are the model to evaluate and to export.
        outer_states: the outer optimizer's state for each part of the parameters.
        pending_sums: for each part, the sum that was sent and not used yet; None if there is none.
    """

    count: int
    inner: Replicas
    anchor: Any
    outer_states: tuple[Any, ...]
    pending_sums: tuple[Any, ...] = field(repr=False)
    save_hint: ClassVar[str] = _SAVE_HINT


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of ranks that train apart: a replica is the ranks of a mesh that share an index along `over`.

    Attributes:
        mesh: all ranks.
        over: the axis along which ranks belong to different replicas.
    """

    mesh: Mesh
    over: str

    @property
    def count(self) -> int:
        """The number of replicas."""
        return dict(self.mesh.shape)[self.over]

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes of a replica's own mesh."""
        return tuple([name for name in self.mesh.axis_names if name != self.over])

    @property
    def inner_mesh(self) -> Mesh:
        """The mesh of this process's replica; in a simulation that of any replica."""
        return self.mesh[self.inner_axes]

    @property
    def replica_indices(self) -> tuple[int, ...]:
        """The indices of the replicas whose trees this process holds."""
        return tuple(range(self.count)) if self.mesh.simulated else (self.mesh.index(self.over),)

    def argument(self, values: Any, replica: int) -> Any:
        """Return an argument of all ranks as one replica takes it: of each `PerRank` value, its own part."""

        def of_replica(x: Any) -> Any:
            if not isinstance(x, PerRank):
                return x
            names = self.mesh.axis_names if x.axes is None else x.axes
            inner_names = tuple([name for name in names if name != self.over])
            value = x.value
            if self.mesh.simulated and self.over in names:
                self._check_rows(value, names)
                value = tree.map(lambda rows: self._replica_part(rows, names, replica), value)
            if self.over in names and not inner_names:  # one value for all ranks of the replica
                return value
            return PerRank(value, None if inner_names == self.inner_axes else inner_names, x.split)

        return tree.map(of_replica, values, is_leaf=is_box)

    def join(self, trees: Sequence[Any]) -> list[PerRank]:
        """Return the distinct tensors of a tree that each replica holds, as arguments of a program of all ranks."""
        columns = zip(*[_distinct_tensors(x) for x in trees], strict=True)
        return [
            self._join_replicas(xs, names) for xs, names in zip(columns, self._differing_axes(trees[0]), strict=True)
        ]

    def box(self, values: Any) -> list[PerRank]:
        """Return the distinct tensors of a tree as results of a program of all ranks, which differ along `over`."""
        return [
            PerRank(x, self._add_over_axis(a))
            for x, a in zip(_distinct_tensors(values), self._differing_axes(values), strict=True)
        ]

    def write(self, boxes: Sequence[PerRank], trees: Sequence[Any]) -> None:
        """Write the results of a program that called `box` into the tensors of the replicas' trees.

        The tensors keep their memory, and with it the layout in memory that a compiled step was traced for.
        """
        for row, x in enumerate(trees):
            for old, box in zip(_distinct_tensors(x), boxes, strict=True):
                names = self.mesh.axis_names if box.axes is None else box.axes
                old.copy_(self._replica_part(box.value, names, row) if self.mesh.simulated else box.value)

    def wrap_results(self, trees: Sequence[Any]) -> Any:
        """Return a result of the replicas: plain tensors as values that differ along `over`, boxes in `Replicas`."""
        if any(is_box(x) for x in tree.flatten(trees[0], is_box)[0]):
            return Replicas(tuple(trees))
        structure = tree.flatten(trees[0])[1]
        columns = zip(*[tree.flatten(x)[0] for x in trees], strict=True)
        joined_results = [self._join_replicas(xs, ()) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in columns]
        return tree.unflatten(structure, joined_results)

    def _check_rows(self, values: Any, names: Sequence[str]) -> None:
        ranks = math.prod([size for name, size in self.mesh.shape if name in names])
        for x in tree.tensors(values):
            if not x.ndim or len(x) != ranks:
                raise ValueError(
                    f"an argument in a PerRank is {list(x.shape)}: expected dimension 0 to be the {ranks} ranks along "
                    f"{', '.join(names)} of {self.mesh!r}; split the batch with its split, mesh.split(batch)"
                )

    def _replica_part(self, x: torch.Tensor, names: Sequence[str], replica: int) -> torch.Tensor:
        """Return one replica's part of a simulated value `[N, ...]`, stacked along axes with `over` among them."""
        sizes = [size for name, size in self.mesh.shape if name in names]
        part = x.unflatten(0, sizes).select(list(names).index(self.over), replica)
        return part.flatten(0, len(sizes) - 2) if len(sizes) > 2 else part

    def _join_replicas(self, xs: Sequence[torch.Tensor], names: Sequence[str]) -> PerRank:
        """Return the replicas' tensors, which differ along `names` within a replica, as one value."""
        axes = self._add_over_axis(names)
        if not self.mesh.simulated:
            return PerRank(xs[0], axes)
        sizes = [size for name, size in self.mesh.shape if name in names]
        stack = torch.stack(list(xs))
        stack = stack.unflatten(1, sizes) if len(sizes) > 1 else stack
        return PerRank(stack.movedim(0, axes.index(self.over)).flatten(0, len(sizes)), axes)

    def _differing_axes(self, values: Any) -> list[tuple[str, ...]]:
        """List the axes of a replica's mesh along which each distinct tensor of its tree differs."""
        axes = leaf_axes(values, self.inner_axes)
        return [axes[i] for i in tree.index_tensors(tree.flatten(values)[0])[0]]

    def _add_over_axis(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple([name for name in self.mesh.axis_names if name in names or name == self.over])


def _distinct_tensors(values: Any) -> list[torch.Tensor]:
    """List the distinct tensors of a tree: a tied tensor comes once."""
    leaves = tree.flatten(values)[0]
    return [leaves[i] for i in tree.index_tensors(leaves)[0]]


def rebuild(like: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a tree like another with other distinct tensors. Tied leaves stay tied."""
    leaves, structure = tree.flatten(like)
    indices = tree.index_tensors(leaves)[1]
    return tree.unflatten(structure, [x if i is None else tensors[i] for x, i in zip(leaves, indices, strict=True)])


def own_memory(values: Any) -> Any:
    """Return a tree whose tensors have memory of their own; they lie side by side where those of `values` do."""

    def empty(x: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty_like(x) if x.shape == torch.Size(shape) else x.new_empty(tuple(shape))

    xs = _distinct_tensors(values)
    return rebuild(values, [y.copy_(x) for x, y in zip(xs, in_buffers(xs, empty), strict=True)])
