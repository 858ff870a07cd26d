"""plan: one rank's plan of a step, in a world of any size that need not be at hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from fzero import tree
from fzero._torch import in_buffers
from fzero._tracebacks import door
from fzero.axes.axis import PLANNED
from fzero.graph._jit import Jitted, jit
from fzero.graph._step import step_of
from fzero.graph.plan._cost import DEVICES, Device
from fzero.graph.plan._plan import Plan
from fzero.layout.boxes import PerRank, Shard, Slot, box_of, is_box
from fzero.layout.spec import Spec, intern, spec_of
from fzero.ranks.mesh import Mesh
from fzero.tree import Tree

__all__ = ["absent", "as_one_rank_holds", "plan"]

Shape = tuple[tuple[str, int], ...]


@door
def plan(
    step: Callable[..., Any],
    *args: Any,
    world_size: int | Mapping[str, int] | None = None,
    device: str | Device | None = None,
    rank: int | Mapping[str, int] = 0,
    **kwargs: Any,
) -> Plan:
    """Plan what one rank of a world will do in a step, without running it, allocating, or any other process.

    Args:
        step: a sharded step, jitted or not, or any function that `fzero.jit` takes.
        *args: the step's arguments on its own mesh, real, or without memory: `step.init` takes meta tensors too.
        world_size: N, or the size of each axis that is to be another, `{"dp": 512}`; by default the step's mesh. Shards
            are cut anew for it, and so are leaves that an axis splits, such as experts. A rank's part of the batch
            stays as large as it is.
        device: "cuda" plans for a GPU that need not be at hand: without the buffers of a CPU's collectives, and by
            the seconds of a data-centre GPU. By default the arguments' own; meta tensors are taken for a CPU's.
        rank: whose plan it is: a rank of that world, or its places along axes, `{"pp": 3}`; 0 along those left out.
            Ranks differ along the axis of a pipeline.
        **kwargs: the step's arguments by name.

    Returns:
        A `Plan`: `print` it, `plot` it.

    Raises:
        ValueError: if `world_size` is below 1, names no axis of the mesh, or is given for a function that has no mesh.
            If an axis that splits leaves does not divide them. If `device` is unknown, or the world has no such rank.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> opt = optim.adam(1e-3)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return optim.apply_updates(params, updates), opt_state, loss
        >>> mesh = fzero.mesh(dp=4)
        >>> step = fzero.shard(train_step, stage=3, mesh=mesh)
        >>> with torch.device("meta"):
        ...     params, batch = {"w": torch.zeros(4096, 4096)}, torch.zeros(16, 4096)
        >>> params, opt_state = step.init(params, opt)
        >>> plan = fzero.plan(step, params, opt_state, mesh.split(batch), world_size=1024)
        >>> [(c.kind, c.bytes) for c in plan.collectives][:2]
        [('all_gather', 67108864), ('all_reduce', 8)]
        >>> plan.argument_bytes  # 3 x 64 MiB / 1024, a count, a quarter of the batch
        262152
    """
    jitted = step if isinstance(step, Jitted) else jit(step)
    jitted = jitted.untraced(device=_device_of(device)) if device is not None else jitted
    asked = step_of(jitted.step)
    mesh = asked.mesh
    if mesh is None:
        for name, given in (("world_size", world_size), ("rank", rank or None)):
            if given is not None:
                raise ValueError(f"{name}={given}: {jitted} has no mesh; shard it with fzero.shard first")
        return jitted.plan(*args, **kwargs)
    shape = _shape_of(mesh, world_size)
    if jitted.device is not None:
        jitted = jitted.untraced(device=jitted.device._replace(axes=shape))
    args, kwargs = as_one_rank_holds((args, kwargs), dict(shape), stacked=mesh.simulated)
    return jitted.untraced(step=asked._on(absent(shape, _places(rank, shape)))).plan(*args, **kwargs)


def _device_of(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: expected one of {', '.join(map(repr, DEVICES))}")
    return DEVICES[device]


def _shape_of(mesh: Mesh, world_size: int | Mapping[str, int] | None) -> Shape:
    if isinstance(world_size, int) and len(mesh.shape) > 1:
        raise ValueError(
            f'world_size={world_size}: {mesh!r} has several axes; say world_size={{"{mesh.axis_names[0]}": 512}}'
        )
    if world_size is None:
        return mesh.shape
    asked = world_size if isinstance(world_size, Mapping) else {mesh.axis_names[0]: world_size}
    sizes = {**dict(mesh.shape), **asked}
    for name, size in sizes.items():
        if name not in mesh.axis_names or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"world_size={world_size!r}: expected a number of ranks, at least 1, of axes of {mesh!r}")
    return tuple(sizes.items())


def _places(rank: int | Mapping[str, int], shape: Shape) -> Shape:
    """Return the place of a rank along each axis of a world.

    Raises:
        ValueError: if the world has no such rank.
    """
    places = rank if isinstance(rank, Mapping) else _coordinates(rank, shape)
    sizes = dict(shape)
    for name, place in places.items():
        if name not in sizes or not isinstance(place, int) or not 0 <= place < sizes[name]:
            world = ", ".join([f"{n}={size}" for n, size in shape])
            raise ValueError(f"rank={rank!r}: expected a rank of {world}, or places along these axes, counted from 0")
    return tuple(places.items())


def _coordinates(rank: int, shape: Shape) -> dict[str, int]:
    places: dict[str, int] = {}
    for name, size in reversed(shape):
        rank, places[name] = divmod(rank, size)
    first = shape[0][0]
    return {**places, first: places[first] + rank * shape[0][1]}  # out of range where the rank is


def absent(shape: Shape, places: Shape = ()) -> Mesh:
    """Return a mesh of processes that are not at hand, as one of them sees it: enough to trace a step on it.

    Args:
        shape: the name and size of each axis.
        places: of the one along axes; 0 along those left out.
    """
    names = [name for name, _ in shape]
    joint = [",".join(chosen) for k in range(2, len(names) + 1) for chosen in combinations(names, k)]
    return Mesh(shape, _Processes(places=places), tuple([(axes, f"{PLANNED}{axes}") for axes in joint]))


@dataclass(frozen=True)
class _Processes:
    """Answers for a `DeviceMesh` of processes that are not at hand, and for the groups of its axes."""

    group_name: str = ""
    places: Shape = ()

    def get_local_rank(self, name: str) -> int:
        """Return the rank along an axis."""
        return dict(self.places).get(name, 0)

    def get_group(self, name: str) -> "_Processes":
        """Return the group of an axis, of which a trace asks the name alone."""
        return _Processes(f"{PLANNED}{name}")


def as_one_rank_holds(values: Tree, sizes: Mapping[str, int], stacked: bool) -> Tree:
    """Return a tree as one rank of another mesh would hold it, in meta tensors, however it is cut now.

    Shards become those of a cut over the other mesh. A `PerRank` value becomes one rank's part, as large as it is now.

    Args:
        values: a tree that may hold boxes.
        sizes: of the other mesh's axes.
        stacked: whether the boxes hold the pieces of all ranks, `[N, ...]`, as those of a simulated mesh do.

    Raises:
        ValueError: if an axis that splits leaves does not divide them on the other mesh. Names the leaf.
    """

    def meta(x: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")

    whole = {id(x): x for x in tree.flatten(values, is_box)[0] if isinstance(x, torch.Tensor)}
    metas = dict(zip(whole, in_buffers([*whole.values()], meta), strict=True))

    def convert(x: Any) -> Any:
        if isinstance(x, PerRank):
            own = tree.map(lambda v: v.new_empty(v.shape[1:] if stacked else v.shape, device="meta"), x.value)
            return PerRank(own, x.axes)
        if isinstance(x, Shard | Slot):
            uid = intern(_cut_for(x.spec, sizes))
            if isinstance(x, Slot):
                return Slot(uid, x.index)
            like = x.parts[0]
            return box_of(uid, [like.new_empty(p.stop - p.start, device="meta") for p in spec_of(uid).pieces])
        return metas[id(x)] if isinstance(x, torch.Tensor) else x

    return tree.map(convert, values, is_leaf=is_box)


def _cut_for(spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """Return the spec of the same unit on a mesh of other sizes, of which a rank has another part of split leaves."""
    shapes = [list(shape) for shape in spec.shapes]
    for s in spec.split:
        n = sizes[s.axis]
        for path, shape, dim in zip(spec.paths, shapes, s.dims, strict=True):
            whole = shape[dim] * s.size
            if whole % n:
                raise ValueError(
                    f"world_size: {s.axis!r} splits dimension {dim} of leaf {path!r} of size {whole}, "
                    f"and {whole} does not divide by {n}; take another size"
                )
            shape[dim] = whole // n
    return replace(
        spec,
        mesh=tuple((name, sizes[name]) for name in spec.axes),
        split=tuple([s._replace(size=sizes[s.axis]) for s in spec.split]),
        shapes=tuple([tuple(shape) for shape in shapes]),
    )
