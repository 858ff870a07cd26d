"""The boxes of a sharded tree. A box records the layout of its leaf, so layouts are never guessed from shapes.

A sharded tree has the structure of the full tree. A unit's first leaf becomes a `Shard`, the box of the rank's shard.
Each other leaf becomes a `Slot`, an empty node with the leaf's index in the unit. So `fzero.tree.map` over a sharded
tree visits each shard once, and `tree["generator"]` still works.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._donated import DonatedError, donated_message
from fzero._format import format_tensor
from fzero._names import missing_attribute
from fzero._notice import trouble_link
from fzero._torch import register_box
from fzero._torch.levels import VersionKey, version_key
from fzero.axes import BatchSplit
from fzero.sharding._spec import Spec, intern, lookup_spec, traced_spec
from fzero.tree import is_box

__all__ = [
    "PerRank",
    "Shard",
    "Slot",
    "first_device",
    "is_box",
    "leaf_axes",
    "make_box",
    "mark_donated",
    "unwrap_per_rank",
]


_FOREIGN_NAMES = {  # names of torch's DTensor and of JAX's arrays
    "full_tensor": "fzero.gather(tree), outside a step step.gather(tree)",
    "to_local": "box.data, this rank's elements",
    "from_local": "step.partition(tree) of full tensors",
    "redistribute": "fzero.gather(tree) and then fzero.partition(tree)",
    "placements": "box.spec, the layout of its unit; fzero.sharding.layouts(tree) lists those of a tree",
    "sharding": "box.spec, the layout of its unit; fzero.sharding.layouts(tree) lists those of a tree",
    "device_mesh": "box.spec, the layout of its unit; fzero.sharding.layouts(tree) lists those of a tree",
    "addressable_shards": "box.data, this rank's elements",
}


class _Box:
    """A pytree node that torch functions and operators must not accept as a tensor."""

    __slots__ = ()
    is_box = True
    hint = (
        "compute on it elementwise with fzero.tree.map(f, params, grads), take norms with optim.global_norm, "
        "differentiate with fzero.value_and_grad, or get the full tensors with fzero.gather(tree), outside a step with "
        "step.gather(tree)" + trouble_link("a-box-where-a-tensor-was-meant")
    )

    def describe(self) -> str:
        """Return a text that distinguishes this box from others, for messages."""
        return repr(self)

    def full_numel(self) -> int:
        """Count the elements that the box stands for in its tree. A `Shard` counts its whole unit, a `Slot` none."""
        return 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        box = next((x for x in tree.flatten([args, kwargs], is_box)[0] if isinstance(x, cls)), None)
        _refuse_use(box, f"torch's {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name != "donated":
            _check_not_donated(self)
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            raise AttributeError(f"{self!r} has no {name!r}: it is a box and not a tensor; {self.hint}")
        raise missing_attribute(f"{type(self).__name__!r} object", name, (), _FOREIGN_NAMES)


def _check_not_donated(box: Any) -> None:
    """Check that a box was not donated."""
    if hasattr(box, "donated"):
        raise DonatedError(donated_message(box.donated))


def _refuse_use(box: Any, user: str) -> Any:
    _check_not_donated(box)
    raise TypeError(f"{user} was given {box!r}, which is a box and not a tensor; {type(box).hint}")


def _refused_operator(name: str) -> Any:
    return lambda self, *args: _refuse_use(self, f"the operator {name}")


# torch treats a TypeError of __torch_function__ as "not implemented" and tries the other operand: so operators refuse
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(_Box, f"__{_name}__", _refused_operator(_name))
    setattr(_Box, f"__r{_name}__", _refused_operator(_name))
for _name in ("neg", "pos", "abs", "getitem", "lt", "le", "gt", "ge", "float", "int"):
    setattr(_Box, f"__{_name}__", _refused_operator(_name))


class _ShardedLeaf(_Box):
    """A sharded leaf in a tree. Its `shape` and `numel()` describe the full leaf, as in torch's DTensor."""

    __slots__ = ()
    index = 0  # of the leaf in its unit

    @property
    def spec(self) -> Spec:
        """The spec of the leaf's unit."""
        return lookup_spec(self.spec_id)

    @property
    def shape(self) -> torch.Size:
        """The shape of the full leaf."""
        _check_not_donated(self)
        return torch.Size(self.spec.full_shapes[self.index])

    @property
    def ndim(self) -> int:
        """The number of dimensions of the full leaf."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter."""
        _check_not_donated(self)
        return self.spec.dtype

    def numel(self) -> int:
        """Count the elements of the full leaf."""
        return self.shape.numel()


class _ShardOrigin(NamedTuple):
    """The full leaves that a shard was partitioned from, and the write state of its data at that time.

    An in-place write into the data changes this state. It is None while Dynamo traces, which cannot read it.
    """

    leaves: tuple[torch.Tensor, ...]
    version_key: VersionKey | None


class Shard(_ShardedLeaf):
    """This rank's shard of one unit: a pytree node whose children are its tensors, and whose static data is `spec_id`.

    It replaces the unit's first leaf. Its `shape`, `dtype`, `device` and `numel()` describe that leaf.

    Attributes:
        data: a tensor `[k]`, k elements with padding at the end of the unit. Outside the step, in a simulation, it is
            `[N, k]`: the shards of N ranks along `axes`, stacked. A shard of two pieces, one on the device and one on
            the host (`optim.offload`), has a tuple of both.
        spec_id: the id of the interned `spec`.
        origin: the full leaves that `partition` sharded, as long as `data` is their part; else None. Flattening the box
            drops it, and so does an in-place write into `data`: a changed box has no origin.

    Example:
        >>> import fzero, torch
        >>> boxes = fzero.mesh(dp=2).spmd(fzero.partition)({"w": torch.arange(3.0)})
        >>> boxes["w"]
        Shard('w', float32 [3], 2 of 3 elements, dp=2)
        >>> boxes["w"].data
        tensor([[0., 1.],
                [2., 0.]])
    """

    __slots__ = ("_origin", "data", "donated", "spec_id")

    def __init__(self, data: Any, spec_id: int, origin: tuple[torch.Tensor, ...] | None = None) -> None:
        self.data = data
        self.spec_id = spec_id
        self._origin = None if origin is None else _ShardOrigin(origin, _data_version(data))

    @property
    def origin(self) -> tuple[torch.Tensor, ...] | None:
        """The full leaves that `partition` sharded, as long as `data` is their part; else None."""
        if self._origin is None or self._origin.version_key != _data_version(self.data):
            return None
        return self._origin.leaves

    @property
    def pieces(self) -> tuple[Any, ...]:
        """The tensor of each of its spec's pieces: usually one, `data`."""
        return self.data if len(traced_spec(self.spec_id).pieces) > 1 else (self.data,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements. A moment's dtype may differ from its parameter's."""
        return self.pieces[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the elements; for a shard of two pieces, the device of the first piece."""
        return self.pieces[0].device

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which `data` differs by rank: the unit is sharded over them, or its leaves are split."""
        return traced_spec(self.spec_id).varies

    def __repr__(self) -> str:
        spec = self.spec
        if hasattr(self, "donated"):
            return f"Shard({spec.unit!r}, donated)"
        axes = [",".join([f"{name}={size}" for name, size in spec.sharded_over])] if spec.sharded_over else []
        axes += [f"part of {s.axis}={s.size}" for s in spec.split]
        axes += [f"{p.stop - p.start} on the host" for p in spec.pieces if p.space == "host"]
        leaf = _shape_text(spec.full_shapes[0], self.dtype)
        return f"Shard({spec.unit!r}, {', '.join([leaf, f'{spec.shard_numel} of {spec.numel} elements', *axes])})"

    def full_numel(self) -> int:
        """Count the elements of the unit's full leaves."""
        _check_not_donated(self)
        return sum(torch.Size(shape).numel() for shape in self.spec.full_shapes)

    def describe(self) -> str:
        """Return a text that distinguishes this shard from others, for messages."""
        return f"{self!r} of {self.spec.dtype}, gradients reduced {self.spec.reduce_grads}"

    def __reduce__(self) -> Any:
        return _restore_shard, (self.data, self.spec)


def _data_version(data: torch.Tensor) -> VersionKey | None:
    return None if torch.compiler.is_dynamo_compiling() else version_key(data)


def mark_donated(box: "Shard | Slot | PerRank", note: str) -> None:
    """Delete the value of a box that was donated, so that reading it raises `DonatedError` with the message `note`."""
    if hasattr(box, "donated"):  # the tree holds the same box twice
        return
    if isinstance(box, Shard):
        del box.data
        box._origin = None
    elif isinstance(box, PerRank):
        del box.value
    box.donated = note


class Slot(_ShardedLeaf):
    """A leaf whose elements lie in the `Shard` of its unit, as leaf `index`: an empty pytree node."""

    __slots__ = ("donated", "index", "spec_id")

    def __init__(self, spec_id: int, index: int) -> None:
        self.spec_id = spec_id
        self.index = index

    def __repr__(self) -> str:
        spec = self.spec
        if hasattr(self, "donated"):
            return f"Slot({spec.unit!r}, {self.index}, donated)"
        return f"Slot({spec.unit!r}, {self.index}, {_shape_text(spec.full_shapes[self.index], spec.dtype)})"

    def __reduce__(self) -> Any:
        return _restore_slot, (self.spec, self.index)


class PerRank(_Box):
    """A value that differs by rank, such as a rank's part of the batch: a pytree node.

    A rank program receives the value of a PerRank argument without the box, and must wrap a result that differs by
    rank. A plain tensor is always replicated.

    Attributes:
        value: a tree of this rank's tensors. Outside the rank program, in a simulation, all ranks' tensors are stacked:
            `[N, ...]`.
        axes: the axes along which the value differs; None for all axes of the mesh. It is replicated along other axes.
        split: how `mesh.split` or `context.split` made it from a global batch; None for a value that a rank loaded.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=2).split(torch.arange(4)).value
        tensor([[0, 1],
                [2, 3]])
    """

    __slots__ = ("axes", "donated", "split", "value")
    hint = "pass it to a sharded step or to a function made by mesh.spmd, where it arrives without the box"

    def __init__(self, value: Any, axes: str | tuple[str, ...] | None = None, split: BatchSplit | None = None) -> None:
        self.value = value
        self.axes = (axes,) if isinstance(axes, str) else axes
        self.split = split

    def full_numel(self) -> int:
        """Count the elements of the value."""
        return tree.numel(self.value)

    def __repr__(self) -> str:
        text = tree.map(lambda x: format_tensor(x.dtype, x.shape) if isinstance(x, torch.Tensor) else x, self.value)
        return f"PerRank({text}{'' if self.axes is None else f', {self.axes}'})"


@dataclass(frozen=True)
class _PerRankKey:
    """The static data of a `PerRank` node. How a batch was split is not part of a tree's structure."""

    axes: tuple[str, ...] | None
    split: BatchSplit | None = field(compare=False)


def _shape_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return format_tensor(dtype, shape)


def _restore_shard(data: Any, spec: Spec) -> Shard:
    return Shard(data, intern(spec))


def first_device(entries: Iterable[Any]) -> torch.device:
    """Return the device of the first box or tensor among a tree's entries; the CPU if there is none."""
    devices = [x.device for x in entries if isinstance(x, Shard | torch.Tensor)]
    return devices[0] if devices else torch.device("cpu")


def make_box(spec_id: int, pieces: Sequence[Any]) -> Shard:
    """Return a unit's box, given the tensor of each of the spec's pieces."""
    return Shard(pieces[0] if len(pieces) == 1 else tuple(pieces), spec_id)


def _restore_slot(spec: Spec, index: int) -> Slot:
    return Slot(intern(spec), index)


register_box(Shard, lambda box: (box.pieces, box.spec_id), make_box)
register_box(Slot, lambda slot: ((), (slot.spec_id, slot.index)), lambda static, _: Slot(static[0], static[1]))
register_box(
    PerRank,
    lambda box: ((box.value,), _PerRankKey(box.axes, box.split)),
    lambda key, children: PerRank(children[0], key.axes, key.split),
)


def unwrap_per_rank(values: Any) -> Any:
    """Replace each `PerRank` box of a tree by its value, as for the arguments of a rank program."""

    def is_per_rank(x: Any) -> bool:
        return isinstance(x, PerRank)

    return tree.map(lambda x: x.value if is_per_rank(x) else x, values, is_leaf=is_per_rank)


def leaf_axes(values: Any, mesh_axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List for each leaf the axes along which it differs by rank, in the mesh's order; none for plain leaves."""
    out: list[tuple[str, ...]] = []
    for x in tree.flatten(values, is_box)[0]:
        axes = x.axes if isinstance(x, Shard | PerRank) else ()
        if isinstance(x, PerRank) and axes is not None and (not axes or any(a not in mesh_axes for a in axes)):
            raise ValueError(f"{x!r} differs along {axes}: expected some of the mesh's axes, {mesh_axes}")
        axes = mesh_axes if axes is None else tuple([name for name in mesh_axes if name in axes])
        out += [axes] * (len(tree.flatten(x)[0]) if is_box(x) else 1)
    return out
