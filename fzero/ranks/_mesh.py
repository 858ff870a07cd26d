"""Mesh: named axes of ranks, in one process (a simulation) or many."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero import tree
from fzero._arguments import check_callable, check_choice, did_you_mean
from fzero._names import missing_members
from fzero._notice import trouble_link
from fzero._torch import rank_group
from fzero._tracebacks import api_boundary, api_boundary_with
from fzero.axes import Axis, AxisName, BatchSplit, check_distinct
from fzero.collectives import to_device
from fzero.ranks._launch import TIMEOUT, check_timeout, find_device, find_world, join
from fzero.ranks._mesh_shape import check_axes, fill_shape, index_along
from fzero.ranks._split_sources import note_split
from fzero.ranks._spmd import Spmd, check_rank_dimension
from fzero.sharding import PerRank, is_box
from fzero.tree import Tree

__all__ = ["Mesh", "device_put", "is_leader", "mesh"]

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_SIMULATIONS = ("vmap", "lockstep")


@api_boundary_with("Give each axis a name: fzero.mesh(dp=4)")
def mesh(
    *,
    simulate: bool | Literal["vmap", "lockstep"] | None = None,
    simulated_ranks: int | None = None,
    device: str | None = None,
    timeout: float | None = TIMEOUT,
    **axes: int,
) -> "Mesh":
    """Name the ranks: `fzero.mesh(dp=4)`, or `fzero.mesh(dp=2, tp=2)` for two axes.

    Under torchrun or Slurm's srun, the ranks are the launched processes, in a `torch.distributed.DeviceMesh` (gloo on
    CPUs, NCCL on NVIDIA GPUs). The first axis is the slowest. Without a launcher the ranks are simulated in this
    process.

    Args:
        simulate: "vmap" (or True) simulates ranks as a batch dimension, even under torchrun: it is fast, and can be
            compiled. "lockstep" simulates ranks as threads that run one at a time: any Python and a debugger work.
            False raises an error if there is no world. By default the ranks are the world's processes if there is a
            world, else simulated with "vmap".
        simulated_ranks: the number of ranks to simulate if there is no world. `mesh(dp=-1, simulated_ranks=4)` has one
            rank per process under torchrun, else four simulated ranks.
        device: "cpu", or the type of this machine's accelerator, such as "cuda". By default each process takes the
            accelerator of its local rank if there is one (`torch.accelerator`), else the CPU. Simulated ranks share
            this process's accelerator. `step.init` and `mesh.split` put their results there. "meta" simulates ranks
            without memory, for plans.
        timeout: how long the processes wait for one another, in seconds. At the start they give up sooner, 50 s after
            the last one has come. A rank that sends no heartbeat, or hangs, for a sixth of it, 50 s, is lost: then the
            others raise `LostRankError`, see docs/survive.md. None starts no heartbeats. A world's first mesh sets it.
        **axes: the size of each axis. One size may be -1: this axis takes the rest of the world, and in a simulation
            the rest of the `simulated_ranks` ranks (without `simulated_ranks`, size 1).

    Raises:
        ValueError: if the size of the mesh differs from the world's, a size is below 1, or `simulated_ranks` is not
            divisible by the other sizes. Also if the name of an axis is not a Python name, the device is not
            available, or the timeout is not above 0.
        TypeError: if a size, `simulated_ranks` or the timeout is not a number.
        RuntimeError: if a process of the world does not arrive in time (the message names its rank), or if this process
            was forked from a rank.

    Example:
        >>> mesh(dp=2, tp=2)
        Mesh(dp=2, tp=2, simulated)
        >>> mesh(dp=-1, tp=2, simulated_ranks=8)  # the same as under torchrun with 8 processes
        Mesh(dp=4, tp=2, simulated)
    """
    check_axes(axes, simulated_ranks)
    check_timeout(timeout)
    check_choice("simulate", simulate, (*_SIMULATIONS, True, False, None))
    if simulate is False and simulated_ranks is not None:
        raise ValueError(f"simulate=False and simulated_ranks={simulated_ranks} contradict each other: leave one out")
    world = find_world()
    if simulate is False and world is None:
        raise ValueError("simulate=False, but there is no world: launch with torchrun")
    mesh_device = find_device(device, world)
    if simulate or world is None:
        simulation = "lockstep" if simulate == "lockstep" else "vmap"
        return Mesh(fill_shape(axes, None, simulated_ranks), simulation=simulation, device=mesh_device)
    if mesh_device.type == "meta":
        raise ValueError('device="meta" has no memory, so no process can run on it: pass simulate=True')
    shape = fill_shape(axes, world.size, simulated_ranks)
    join(world, mesh_device, timeout)
    names, sizes = zip(*shape, strict=True)
    device_mesh = init_device_mesh(mesh_device.type, sizes, mesh_dim_names=names)
    return Mesh(shape, device_mesh, _create_joint_groups(device_mesh), device=mesh_device)


def _create_joint_groups(device_mesh: DeviceMesh) -> tuple[tuple[str, str], ...]:
    """Create a process group for each product of several axes: `("dp,ep", group)`.

    With it, a collective over several axes is one operation. All processes create all groups, in one order.
    """
    names, ranks = device_mesh.mesh_dim_names or (), device_mesh.mesh
    groups = []
    for k in range(2, len(names) + 1):
        for dims in combinations(range(len(names)), k):
            rest = [i for i in range(len(names)) if i not in dims]
            rows = ranks.permute(*rest, *dims).reshape(-1, math.prod([ranks.shape[i] for i in dims]))
            group: Any = torch.distributed.new_subgroups_by_enumeration(rows.tolist())[0]
            groups.append((",".join(names[i] for i in dims), group.group_name))
    return tuple(groups)


_FOREIGN_NAMES = {  # names of torch's DeviceMesh and of JAX's Mesh
    "get_group": "the name of an axis, which fzero.collectives take; mesh.device_mesh has the process groups",
    "get_all_groups": "the names of axes, which fzero.collectives take; mesh.device_mesh has the process groups",
    "get_local_rank": "mesh.index(axis), and within a step fzero.axes.axis_index(axis)",
    "get_coordinate": "mesh.coordinates(mesh.rank)",
    "get_rank": "mesh.rank",
    "get_world_size": "mesh.size",
    "mesh": "dict(mesh.shape), the size of each axis",
    "mesh_dim_names": "mesh.axis_names",
    "dim_names": "mesh.axis_names",
    "ndim": "len(mesh.axis_names)",
    "device_type": "mesh.device.type",
    "devices": "mesh.device, that of this process",
    "world_size": "mesh.size",
    "barrier": "not needed: a collective waits for its ranks",
    "gather": "step.gather(params), and within a step fzero.gather(params)",
    "partition": "step.partition(values), and within a step fzero.partition(params)",
    "shard": "fzero.shard(train_step, stage=2, mesh=mesh)",
}


@dataclass(frozen=True)
class Mesh:
    """Named axes of ranks. Make one with `fzero.mesh`.

    Attributes:
        shape: the name and size of each axis, the first the slowest.
        device_mesh: the processes, or None in a simulation.
        joint: in a distributed mesh of several axes, the process group of each product of axes.
        simulation: how ranks are simulated: "vmap" or "lockstep".
        device: the device of this process's ranks; simulated ranks share it.
        within: for a part of a larger distributed mesh, this process's index along each of the other axes.
    """

    shape: tuple[tuple[str, int], ...]
    device_mesh: Any = None
    joint: tuple[tuple[str, str], ...] = ()
    simulation: str = "vmap"
    device: torch.device = _CPU
    within: tuple[tuple[str, int], ...] = ()

    if not TYPE_CHECKING:  # a type checker finds a missing name itself
        __getattr__ = missing_members(_FOREIGN_NAMES)

    def __getitem__(self, axis: str | tuple[str, ...]) -> "Mesh":
        """Return the mesh of the ranks that differ from this rank only along these axes.

        The axes stay in the order of this mesh.

        Raises:
            ValueError: if an axis is not an axis of the mesh.

        Example:
            >>> mesh(replica=2, dp=4)["dp"]
            Mesh(dp=4, simulated)
        """
        unordered = self.names(axis)
        names = tuple([name for name in self.axis_names if name in unordered])
        if names == self.axis_names:
            return self
        shape = tuple([(name, size) for name, size in self.shape if name in names])
        if self.simulated:
            return replace(self, shape=shape)
        joint = tuple([(name, group) for name, group in self.joint if set(name.split(",")) <= set(names)])
        outer_coordinates = tuple([(name, self.index(name)) for name in self.axis_names if name not in names])
        device_mesh = self.device_mesh[names] if self.distributed else self.device_mesh
        return replace(
            self, shape=shape, device_mesh=device_mesh, joint=joint, within=(*self.within, *outer_coordinates)
        )

    @property
    def process_group(self) -> Any:
        """The process group of the mesh's ranks in a distributed mesh; None for the whole world."""
        if not self.within:
            return None
        single = len(self.shape) == 1
        return self.device_mesh.get_group(self.axis_names[0]) if single else rank_group(self.joint[-1][1])

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple([name for name, _ in self.shape])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod([size for _, size in self.shape])

    @property
    def simulated(self) -> bool:
        """Whether all ranks live in this process."""
        return self.device_mesh is None

    @property
    def distributed(self) -> bool:
        """Whether the ranks are processes that communicate, not a simulation or a plan's stand-ins."""
        return isinstance(self.device_mesh, DeviceMesh)

    @property
    def rank(self) -> int:
        """This process's rank; 0 in a simulation, so that `if mesh.rank == 0: print(...)` runs everywhere.

        Call steps and `step.gather` on all ranks, outside such a branch.
        """
        return 0 if self.device_mesh is None else self.index(self.axis_names)

    def index(self, axis: AxisName, rank: int | None = None) -> int:
        """Return a rank's index along an axis, or along several axes with the first the slowest.

        The default is this process's rank.
        """
        names = self.names(axis)
        if rank is None and self.device_mesh is not None:
            by_axis = {name: self.device_mesh.get_local_rank(name) for name in names}
        else:
            by_axis = dict(zip(self.axis_names, self.coordinates(rank or 0), strict=True))
        return index_along(dict(self.shape), by_axis, names)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's index along each axis."""
        indices: list[int] = []
        for _, size in reversed(self.shape):
            rank, index = divmod(rank, size)
            indices.insert(0, index)
        return tuple(indices)

    def names(self, axis: AxisName) -> tuple[str, ...]:
        """List the axes that `axis` names; all axes if it is None.

        Raises:
            ValueError: if it names no axis, an axis twice, or one that the mesh does not have.
            TypeError: if it is neither a string nor a tuple or list.
        """
        if axis is not None and not isinstance(axis, str | tuple | list):
            raise TypeError(f"axis={tree.show(axis)}: expected the name of an axis of {self!r}, or a tuple of names")
        names = self.axis_names
        if axis is not None:
            names = (axis,) if isinstance(axis, str) else tuple(axis)
        if not names:
            advice = "leave it out for all axes; pass a batch that all ranks share without splitting it"
            raise ValueError(f"axis={axis!r} names no axis of {self!r}: {advice}")
        for name in names:
            if name not in self.axis_names:
                hint = did_you_mean(name, self.axis_names)
                raise ValueError(f"axis={axis!r}: {name!r} is not an axis of {self!r}{hint}")
        check_distinct(names)
        return names

    def bound_axes(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """List this process's axes, and the joint axes that stand for several."""
        single = [
            Axis(
                name,
                size=size,
                group=self.device_mesh.get_group(name).group_name,
                rank=i,
                token=torch.tensor(i, device="cpu"),
            )
            for (name, size), i in zip(self.shape, [self.index(name) for name in self.axis_names], strict=True)
        ]
        products = []
        sizes = dict(self.shape)
        for name, group in self.joint:
            names = tuple(name.split(","))
            i = self.index(names)
            products.append(
                Axis(
                    name,
                    size=math.prod([sizes[n] for n in names]),
                    group=group,
                    rank=i,
                    token=torch.tensor(i, device="cpu"),
                )
            )
        return tuple(single), tuple(products)

    def groups(self) -> dict[str, str]:
        """Return group name -> axis for each process group of this rank; empty in a simulation."""
        return {} if self.simulated else {axis.group: axis.name for axes in self.bound_axes() for axis in axes}

    def group_ranks(self) -> tuple[tuple[str, int], ...]:
        """Return pairs (group name, rank in the group) for each process group of this rank; none in a simulation."""
        return () if self.simulated else tuple([(a.group, a.rank) for axes in self.bound_axes() for a in axes])

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape)
        if self.simulated:
            label = "simulated" if self.simulation == "vmap" else "simulated in lockstep"
        else:
            label = f"rank {self.rank}" if self.distributed else "planned"
        label += "".join([f", {name} {index}" for name, index in self.within])
        return f"Mesh({axes}, {label}{'' if self.device == _CPU else f', {self.device}'})"

    @overload
    def split(self, batch: _T, axis: tuple[()]) -> _T: ...
    @overload
    def split(self, batch: Tree, axis: AxisName = None) -> PerRank: ...
    @api_boundary
    def split(self, batch: Tree, axis: AxisName = None) -> Any:
        """Split a global batch along dimension 0 into one equal part per rank, in rank order, on the mesh's device.

        A part that lies elsewhere is copied there through pinned memory, and the host does not wait for the copy.

        Args:
            batch: a tree of tensors `[N b, ...]`, the same on every process.
            axis: the axes whose N ranks get different parts; by default all. Ranks along other axes get the same part:
                use `mesh.split(batch, "dp")` if the ranks of an axis "tp" compute one loss together. `()` splits
                nothing, for programs that compute the axes of their data.

        Returns:
            A `PerRank` of tensors `[b, ...]` (in a simulation stacked: `[N, b, ...]`); for `axis=()` the batch itself,
            on the mesh's device, which all ranks share.

        Raises:
            ValueError: if a leaf's dimension 0 is missing, or not divisible by N. The message names the leaf.
            TypeError: if a leaf is not a tensor.

        Example:
            >>> mesh(dp=2).split({"x": torch.zeros(6, 3)})
            PerRank({'x': 'float32 [2, 3, 3]'})
        """
        if isinstance(axis, tuple | list) and not axis:
            return self.device_put(batch)
        names = self.names(axis)
        n, index = self._ranks(names), self.index(names)

        def part(path: str, x: Any) -> torch.Tensor:
            """Return this rank's part of a leaf, or those of all simulated ranks."""
            _check_tensor("batch", path, x)
            if x.ndim == 0:
                raise ValueError(
                    f"{tree.leaf_name('batch', path)} is a tensor of shape [], which cannot be split over the {n} "
                    f"ranks of {self!r}: pass it as an argument of its own, or mesh.split(x, ()) for all ranks"
                )
            if x.shape[0] % n:
                raise ValueError(
                    f"{tree.leaf_name('batch', path)} is {list(x.shape)}: dimension 0 must be divisible by the {n} "
                    f"ranks of {self!r}; drop or pad the last batch{trouble_link('shapes-that-change')}"
                )
            stacked = x.unflatten(0, (n, x.shape[0] // n))
            return device_put(stacked if self.simulated else stacked[index], self.device)

        box = PerRank(tree.map_with_path(part, batch, is_box), self._varying(names), BatchSplit(samples=names))
        if self.distributed:
            note_split(tree.tensors(box), tree.tensors(batch))
        return box

    def _ranks(self, names: tuple[str, ...]) -> int:
        return math.prod([dict(self.shape)[name] for name in names])

    def _varying(self, names: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the axes of a box, None for all axes. A simulation stacks along axes in the mesh's order."""
        sorted_names = tuple([name for name in self.axis_names if name in names])
        if sorted_names != names:
            raise ValueError(f"axis={names}: name the axes in the order of {self!r}, axis={sorted_names}")
        return None if sorted_names == self.axis_names else sorted_names

    @api_boundary
    def local(self, batch: Tree, axis: AxisName = None) -> PerRank:
        """Wrap a batch that each rank loaded itself, and bring it to the mesh's device as `split` does.

        Args:
            batch: a tree of this rank's tensors; in a simulation a tree of all ranks' tensors, stacked: `[N, ...]`. Or
                a function `rank -> tree`, which is called for this process's rank, in a simulation for every rank.
            axis: the axes along which the N ranks loaded different parts; by default all. `rank` is the index along
                these axes.

        Returns:
            A `PerRank` of the tree.

        Raises:
            ValueError: in a simulation, if a leaf's dimension 0 is not N.
            TypeError: if a leaf is not a tensor.

        Example:
            >>> mesh(dp=3).local(lambda rank: torch.tensor(rank)).value
            tensor([0, 1, 2])
        """
        names = self.names(axis)
        varying = self._varying(names)
        if callable(batch):
            ranks = range(self._ranks(names)) if self.simulated else [self.index(names)]
            parts = [batch(r) for r in ranks]
            batch = _stack_ranks(parts) if self.simulated else parts[0]

        def check(path: str, x: Any) -> torch.Tensor:
            _check_tensor("batch", path, x)
            if self.simulated:
                check_rank_dimension(x, tree.leaf_name("batch", path), self, names)
            return device_put(x, self.device)

        return PerRank(tree.map_with_path(check, batch, is_box), varying)

    @api_boundary
    def device_put(self, values: Tree) -> Tree:
        """Return a tree of plain tensors on the mesh's device, such as a module's buffers.

        Tensors that lie there, values that are not tensors, and tensors on the meta device are returned as they are.

        Example:
            >>> mesh(dp=2, device="cpu").device_put({"positions": torch.arange(3)})
            {'positions': tensor([0, 1, 2])}
        """
        return tree.map(lambda x: device_put(x, self.device), values)

    @api_boundary
    def spmd(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that runs a rank program on every rank: JAX's shard_map, with layouts stored in the values.

        Args:
            program: the function that each rank runs. A `PerRank` argument arrives without its box, a `Shard` holds the
                rank's own shard, and a plain tensor is the same on all ranks.

        Returns:
            A function of the same arguments. A result that differs by rank must be in a `PerRank` or a `Shard`. A plain
            result must be replicated; a simulation checks this.

        Raises:
            ValueError: when called, if a plain result differs by rank (simulation), or a box lacks a row for a rank.

        Example:
            >>> import fzero
            >>> m = mesh(dp=2)
            >>> m.spmd(lambda x: fzero.collectives.pmean(x.sum()))(m.split(torch.arange(4.0)))
            tensor(3.)
        """
        check_callable("program", program, "a function, as in mesh.spmd(program)(batch)")
        return Spmd(self, program)


def is_leader(mesh: Mesh | None) -> bool:
    """Return whether this process writes what ranks share: rank 0, or a process without a mesh."""
    return mesh is None or mesh.rank == 0


def device_put(x: Any, device: torch.device) -> Any:
    """Return a tensor on a device, differentiably; a value that lies there, or has no memory, is returned as it is.

    A copy from the host goes through pinned memory, and the host does not wait for it.
    """
    if not isinstance(x, torch.Tensor) or x.is_meta or x.device == device:
        return x
    return to_device(x, device) if x.device == _CPU else x.to(device)


def _check_tensor(label: str, path: str, x: Any) -> None:
    if isinstance(x, PerRank):
        raise TypeError(f"{tree.leaf_name(label, path)} is {x!r}, which is split already: split a global batch once")
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{tree.leaf_name(label, path)} is {tree.show(x)}: a value that differs by rank must be a tensor; pass "
            "torch.as_tensor(x) of it, or, if it is equal on all ranks, pass it to the step as an argument of its own"
        )


def _stack_ranks(parts: list[Any]) -> Any:
    """Stack the ranks' trees leaf by leaf."""
    columns = [tree.leaves_up_to(parts[0], part) for part in parts]
    paths, _, structure = tree.flatten_with_paths(parts[0])
    for path, *xs in zip(paths, *columns, strict=True):
        for rank, x in enumerate(xs):
            _check_tensor(f"rank {rank}'s batch", path, x)
            if tree.show(x) != tree.show(xs[0]):
                name = tree.leaf_name(f"rank {rank}'s batch", path)
                raise ValueError(
                    f"{name} is {tree.show(x)}, but rank 0's is {tree.show(xs[0])}: "
                    f"all ranks must hold tensors of one shape; pad or drop the rest"
                    f"{trouble_link('shapes-that-change')}"
                )
    return tree.unflatten(structure, [torch.stack(xs) for xs in zip(*columns, strict=True)])
