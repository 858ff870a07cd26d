"""Mesh: named axes of ranks, in one process (a simulation) or many, and how a rank program runs on it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero import tree
from fzero._torch import quiet_vmap_fallback
from fzero.layout import PerRank, is_box
from fzero.replicated import check_replicated
from fzero.world import Axis, Scope, UnitRule, within

__all__ = ["Mesh", "mesh"]


def mesh(*, simulate: bool | None = None, device: str | None = None, **axes: int) -> "Mesh":
    """Name the ranks: `fzero.mesh(dp=4)`.

    Under torchrun the ranks are its processes, bound through a `torch.distributed.DeviceMesh` (gloo on a CPU, nccl on
    a GPU). Alone they are simulated: a batch dimension in this process.

    Args:
        simulate: True for a simulation even under torchrun, False for an error when there is no world; by default
            a world is used if there is one.
        device: "cpu" or "cuda"; by default "cuda" where there is one. Only a distributed mesh uses it.
        **axes: the size of each axis; -1 for the whole world (1 when alone). This version takes one axis.

    Returns:
        A `Mesh`.

    Raises:
        ValueError: if the size of the mesh is not the world's, or a size is below 1.

    Example:
        >>> mesh(dp=4)
        Mesh(dp=4, simulated)
    """
    if len(axes) != 1:
        raise ValueError(f"a mesh has one axis in this version, such as mesh(dp=4); given {axes or 'none'}")
    ((name, size),) = axes.items()
    if not isinstance(size, int):
        raise TypeError(f"{name}={size!r}: the size of an axis is an int")
    distributed = torch.distributed.is_available() and (torch.distributed.is_initialized() or _launched())
    if simulate is False and not distributed:
        raise ValueError("simulate=False, and no world is at hand: launch with torchrun")
    world = 1
    if distributed and not simulate:
        ready = torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if ready else int(os.environ["WORLD_SIZE"])
    size = world if size == -1 else size
    if size < 1:
        raise ValueError(f"{name}={size}: an axis has at least one rank; -1 means the whole world")
    if simulate or not distributed:
        return Mesh(((name, size),))
    if size != world:
        raise ValueError(
            f"{name}={size}, and the world has {world} processes: launch with torchrun --nproc-per-node {size}, "
            f"or say {name}=-1 for the whole world"
        )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    device_mesh = init_device_mesh(kind, (size,), mesh_dim_names=(name,))
    return Mesh(((name, size),), device_mesh)


def _launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


@dataclass(frozen=True)
class Mesh:
    """Named axes of ranks. Make one with `fzero.mesh`.

    Attributes:
        shape: the name and size of each axis.
        device_mesh: the processes, or None in a simulation.
    """

    shape: tuple[tuple[str, int], ...]
    device_mesh: Any = None

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple([name for name, _ in self.shape])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.shape[0][1]

    @property
    def simulated(self) -> bool:
        """Whether all ranks live in this process."""
        return self.device_mesh is None

    @property
    def distributed(self) -> bool:
        """Whether the ranks are processes that can communicate: neither a simulation nor a plan's stand-ins."""
        return isinstance(self.device_mesh, DeviceMesh)

    @property
    def rank(self) -> int:
        """This process's rank; 0 in a simulation, so that `if mesh.rank == 0: print(...)` runs everywhere.

        Call steps and `step.gather` on all ranks, outside such a branch.
        """
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank()

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape)
        place = "simulated" if self.simulated else f"rank {self.rank}" if self.distributed else "planned"
        return f"Mesh({axes}, {place})"

    def split(self, batch: Any) -> PerRank:
        """Cut a global batch along dimension 0 into one equal part a rank, in rank order.

        Args:
            batch: a tree of tensors `[N b, ...]`, the same on every process.

        Returns:
            A `PerRank` of tensors `[b, ...]` (in a simulation stacked: `[N, b, ...]`).

        Raises:
            ValueError: if a leaf does not divide by N, or has no dimension. Names it.
            TypeError: if a leaf is no tensor.

        Example:
            >>> mesh(dp=2).split({"x": torch.zeros(6, 3)})
            PerRank({'x': 'torch.float32 [2, 3, 3]'})
        """
        n = self.size

        def part(path: str, x: Any) -> torch.Tensor:
            _check_tensor("batch", path, x)
            if x.ndim == 0 or x.shape[0] % n:
                raise ValueError(
                    f"batch leaf {path!r} is {list(x.shape)}: dimension 0 must divide by the {n} ranks of {self!r}; "
                    "drop or pad the last batch"
                )
            stacked = x.unflatten(0, (n, x.shape[0] // n))
            return stacked if self.simulated else stacked[self.rank]

        return PerRank(tree.map_with_path(part, batch, is_box))

    def local(self, batch: Any) -> PerRank:
        """Wrap what each rank loaded itself.

        Args:
            batch: a tree of this rank's tensors (in a simulation of all ranks' tensors, stacked: `[N, ...]`), or a
                function `rank -> tree`, which is called for this process's rank, or in a simulation for each.

        Returns:
            A `PerRank` of it.

        Raises:
            ValueError: if, in a simulation, a leaf's dimension 0 is not N.
            TypeError: if a leaf is no tensor.

        Example:
            >>> mesh(dp=3).local(lambda rank: torch.tensor(rank)).value
            tensor([0, 1, 2])
        """
        if callable(batch):
            ranks = range(self.size) if self.simulated else [self.rank]
            parts = [batch(r) for r in ranks]
            batch = _stack(parts) if self.simulated else parts[0]

        def check(path: str, x: Any) -> torch.Tensor:
            _check_tensor("batch", path, x)
            if self.simulated:
                _check_stacked(x, f"batch leaf {path!r}", self)
            return x

        return PerRank(tree.map_with_path(check, batch, is_box))

    def spmd(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Run a rank program on every rank: JAX's shard_map, with layouts that travel with the values.

        Args:
            program: what each rank runs. A `PerRank` argument arrives unwrapped, a `Shard` holds the rank's own
                piece, a plain tensor is the same on all ranks.

        Returns:
            A function of the same arguments. A result that differs by rank must be returned as `PerRank` or in
            a `Shard`; a plain result is replicated, and in a simulation that is checked.

        Raises:
            ValueError: when called, if a plain result differs by rank (simulation), or a box has not N pieces.

        Example:
            >>> import fzero
            >>> m = mesh(dp=2)
            >>> m.spmd(lambda x: fzero.pmean(x.sum()))(m.split(torch.arange(4.0)))
            tensor(3.)
        """
        return _Spmd(self, program)


@dataclass(frozen=True)
class _Spmd:
    mesh: Mesh
    program: Callable[..., Any]
    default: tuple[str, ...] | None = None
    rule: UnitRule | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = _run_rank
        if self.mesh.simulated:
            run = _simulate if torch.compiler.is_dynamo_compiling() else _simulate_eagerly

        def program(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            args, kwargs = _unwrapped(call)
            return self.program(*args, **kwargs)

        return run(self.mesh, program, (args, kwargs), self.default, self.rule)


def _run_rank(mesh: Mesh, program: Any, args: Any, default: Any, rule: Any) -> Any:
    ((name, size),) = mesh.shape
    group = mesh.device_mesh.get_group(name).group_name
    axis = Axis(name, size, group, mesh.rank, torch.tensor(mesh.rank))
    out = within(Scope((axis,), default, rule), program, args)
    return tree.map(lambda x: x, out)  # boxes forget their origin, which lives within one step


def _simulate_eagerly(*args: Any) -> Any:
    try:
        with quiet_vmap_fallback():
            return _simulate(*args)
    except RuntimeError as error:
        if "vmap" in str(error):
            error.add_note(
                "fzero: simulated ranks run under torch.vmap, which cannot run this operation or read its data "
                "in Python; real processes can: torchrun"
            )
        raise


def _simulate(mesh: Mesh, program: Any, args: Any, default: Any, rule: Any) -> Any:
    """Run all ranks as a batch dimension: one vmap over the token and whatever differs by rank."""
    ((name, size),) = mesh.shape
    paths, leaves, structure = tree.flatten_with_paths(args)
    varies = _varies(args)
    for path, x, v in zip(paths, leaves, varies, strict=True):
        if v:
            _check_tensor("argument", path.split(".", 1)[1], x)
            _check_stacked(x, tree.place("argument", path.split(".", 1)[1]), mesh)
    result: list[Any] = []

    def rank(token: torch.Tensor, *leaves: Any) -> Any:
        axis = Axis(name, size, "", 0, token)
        out = within(Scope((axis,), default, rule), program, tree.unflatten(structure, list(leaves)))
        paths, out_leaves, out_structure = tree.flatten_with_paths(out)
        varies = _varies(out)
        result.append((out_leaves, out_structure, varies))
        same = check_replicated(token, paths, out_leaves, varies)
        return same, [x for x, v in zip(out_leaves, varies, strict=True) if v]

    same, different = torch.vmap(
        rank,
        in_dims=(0, *[0 if v else None for v in varies]),
        out_dims=(None, 0),  # pyright: ignore[reportArgumentType]
        randomness="different",
    )(torch.arange(size), *leaves)
    out_leaves, out_structure, out_varies = result.pop()
    same, different = iter(same), iter(different)
    return tree.unflatten(
        out_structure,
        [
            next(different) if v else next(same) if isinstance(x, torch.Tensor) else x
            for x, v in zip(out_leaves, out_varies, strict=True)
        ],
    )


def _varies(values: Any) -> list[bool]:
    """Tell for each leaf whether it lies in a box, and so differs by rank."""
    return [v for x in tree.flatten(values, is_box)[0] for v in [is_box(x)] * len(tree.flatten(x)[0])]


def _unwrapped(args: Any) -> Any:
    def is_per_rank(x: Any) -> bool:
        return isinstance(x, PerRank)

    return tree.map(lambda x: x.value if is_per_rank(x) else x, args, is_leaf=is_per_rank)


def _check_tensor(what: str, path: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{tree.place(what, path)} is {x!r}: what differs by rank must be a tensor")


def _stack(parts: list[Any]) -> Any:
    """Stack the ranks' trees leaf by leaf."""
    columns = [tree.leaves_up_to(parts[0], part) for part in parts]
    paths, _, structure = tree.flatten_with_paths(parts[0])
    for path, *xs in zip(paths, *columns, strict=True):
        for rank, x in enumerate(xs):
            _check_tensor(f"rank {rank}'s batch", path, x)
            if tree.show(x) != tree.show(xs[0]):
                raise ValueError(
                    f"rank {rank}'s batch leaf {path!r} is {tree.show(x)}, and rank 0's is {tree.show(xs[0])}: "
                    "all ranks hold tensors of one shape; pad or drop the rest"
                )
    return tree.unflatten(structure, [torch.stack(xs) for xs in zip(*columns, strict=True)])


def _check_stacked(x: torch.Tensor, what: str, mesh: Mesh) -> None:
    if x.ndim == 0 or x.shape[0] != mesh.size:
        raise ValueError(
            f"{what} is {list(x.shape)}: in a simulation dimension 0 of what differs by rank is the rank, "
            f"and {mesh!r} has {mesh.size}; make it with mesh.split or step.init on this mesh"
        )
