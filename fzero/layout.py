"""Layouts: how a tree is cut into units, and the boxes that hold the pieces.

A *unit* is a group of leaves that are gathered together. It is stored flat: its leaves concatenated, padded to a
multiple of N and cut in N equal 1-D shards. Cutting a tree keeps its structure: the unit's first leaf becomes a
`Shard`, the box of the rank's piece, and each other leaf becomes a `Slot`, an empty node that says where in the
unit the leaf is found. So `tree_map` over a cut tree visits each shard once, and `tree["generator"]` still works.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._donated import DonatedError, message
from fzero._torch import register_box
from fzero.collectives import apply
from fzero.spec import Spec, intern, intern_parts, spec_of, unit_axis
from fzero.tree import is_box
from fzero.world import Axis, UnitRule, rule_in_scope

__all__ = ["PerRank", "Shard", "Slot", "default_units", "is_box"]


# ---------------------------------------------------------------- boxes


class _Box:
    """A pytree node that a plain torch function or an operator must not take for a tensor."""

    __slots__ = ()
    is_box = True
    hint = (
        "differentiate the function with fzero.value_and_grad, which gathers its boxes, or call fzero.gather(tree) "
        "inside the rank program (step.gather(tree) outside)"
    )

    def describe(self) -> str:
        """Return all that tells this box from another, for messages."""
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        box = next((x for x in tree.flatten([args, kwargs], is_box)[0] if isinstance(x, cls)), None)
        _refuse(box, f"torch's {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "value") and hasattr(self, "donated"):
            raise DonatedError(message(self.donated))
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            raise AttributeError(f"{self!r} has no {name!r}: it is a box and not a tensor; {self.hint}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _refuse(box: Any, what: str) -> Any:
    raise TypeError(f"{what} was given {box!r}, which is a box and not a tensor; {type(box).hint}")


def _refusing(name: str) -> Any:
    return lambda self, *args: _refuse(self, f"the operator {name}")


# torch takes a TypeError of __torch_function__ for "not implemented here", and asks the other operand
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(_Box, f"__{_name}__", _refusing(_name))
    setattr(_Box, f"__r{_name}__", _refusing(_name))
for _name in ("neg", "pos", "abs", "getitem", "lt", "le", "gt", "ge", "float", "int"):
    setattr(_Box, f"__{_name}__", _refusing(_name))


class Shard(_Box):
    """This rank's piece of one unit: a pytree node with one child, `data`, and static data, `spec`.

    Attributes:
        data: a tensor `[k]`, k elements with padding at the end of the unit; outside the step, in a simulation,
            the ranks' pieces stacked: `[N, k]`.
        uid: the interned `spec`.
        origin: the whole leaves that `partition` cut, while they are known to be unchanged; else None.
            Flattening drops it, so any changed box has forgotten it.

    Example:
        >>> import fzero, torch
        >>> boxes = fzero.mesh(dp=2).spmd(fzero.partition)({"w": torch.arange(3.0)})
        >>> boxes["w"]
        Shard('w', 2 of 3 elements, dp=2)
        >>> boxes["w"].data
        tensor([[0., 1.],
                [2., 0.]])
    """

    __slots__ = ("data", "donated", "origin", "uid")

    def __init__(self, data: Any, uid: int, origin: tuple[torch.Tensor, ...] | None = None) -> None:
        self.data = data
        self.uid = uid
        self.origin = origin

    @property
    def spec(self) -> Spec:
        """How the unit is cut."""
        return spec_of(self.uid)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which `data` differs by rank."""
        return self.spec.axes

    def __repr__(self) -> str:
        spec = self.spec
        if hasattr(self, "donated"):
            return f"Shard({spec.unit!r}, donated)"
        return f"Shard({spec.unit!r}, {spec.shard_numel} of {spec.numel} elements, {','.join(spec.axes)}={spec.ranks})"

    def describe(self) -> str:
        """Return all that tells this shard from another, for messages."""
        return f"{self!r} of {self.spec.dtype}, gradients reduced {self.spec.reduce}"

    def __reduce__(self) -> Any:
        return _restore_shard, (self.data, self.spec)


def give_up(box: "Shard | PerRank", note: str) -> None:
    """Take a donated box's value away, so that reading it raises `DonatedError`."""
    if hasattr(box, "donated"):  # it was in two places
        return
    if isinstance(box, Shard):
        del box.data
        box.origin = None
    else:
        del box.value
    box.donated = note


class Slot(_Box):
    """The place of a leaf that lies in the `Shard` of its unit, as leaf `index`: an empty pytree node."""

    __slots__ = ("index", "uid")

    def __init__(self, uid: int, index: int) -> None:
        self.uid = uid
        self.index = index

    @property
    def spec(self) -> Spec:
        """How the unit is cut."""
        return spec_of(self.uid)

    def __repr__(self) -> str:
        return f"Slot({self.spec.unit!r}, {self.index})"

    def __reduce__(self) -> Any:
        return _restore_slot, (self.spec, self.index)


class PerRank(_Box):
    """A value that differs by rank, such as a rank's part of the batch: a pytree node.

    Inside a rank program an argument that is PerRank arrives unwrapped, and a result that differs by rank must be
    wrapped. A plain tensor is always replicated.

    Attributes:
        value: a tree of tensors; outside the rank program, in a simulation, each stacked over the ranks: `[N, ...]`.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=2).split(torch.arange(4)).value
        tensor([[0, 1],
                [2, 3]])
    """

    __slots__ = ("donated", "value")
    hint = "pass it to a sharded step or to a function made by mesh.spmd, where it arrives unwrapped"

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({tree.map(lambda x: f'{x.dtype} {list(x.shape)}', self.value)})"


def _restore_shard(data: Any, spec: Spec) -> Shard:
    return Shard(data, intern(spec))


def _restore_slot(spec: Spec, index: int) -> Slot:
    return Slot(intern(spec), index)


register_box(Shard, lambda box: ((box.data,), box.uid), lambda uid, children: Shard(children[0], uid))
register_box(Slot, lambda slot: ((), (slot.uid, slot.index)), lambda static, _: Slot(static[0], static[1]))
register_box(PerRank, lambda box: ((box.value,), None), lambda _, children: PerRank(children[0]))


# ---------------------------------------------------------------- units


def default_units(path: str, leaf: torch.Tensor) -> str:
    """Name the unit of a leaf: its repeated block, else its top-level child.

    A repeated block is a numbered child that is itself a subtree: `"blocks.3.attn.w"` is in unit `"blocks.3"`,
    and `"embed.0"`, a leaf in a list of leaves, is in unit `"embed"`.

    Example:
        >>> x = torch.zeros(2)
        >>> [default_units(p, x) for p in ("h.0.attn.w", "h.0.mlp.w", "ln_f.w", "wte")]
        ['h.0', 'h.0', 'ln_f', 'wte']
    """
    keys = path.split(".")
    for i, key in enumerate(keys[:-1]):
        if key.isdigit():
            return ".".join(keys[: i + 1])
    return keys[0] or "params"  # a tree that is one tensor has an empty path


class Unit(NamedTuple):
    """A unit of a tree that is about to be cut: its spec, its distinct leaves, and the position of the first."""

    uid: int
    leaves: list[torch.Tensor]
    position: int


class Cut(NamedTuple):
    """How a tree is cut: at each position of its flattened form a `Slot`, or the leaf if it belongs to no unit."""

    entries: list[Any]
    units: list[Unit]
    structure: Any

    def with_shards(self, shards: Sequence[Shard]) -> Any:
        """Build the cut tree, with the shard of each unit in place of its first slot."""
        entries = list(self.entries)
        for unit, shard in zip(self.units, shards, strict=True):
            entries[unit.position] = shard
        return tree.unflatten(self.structure, entries)


def cut(
    params: Any,
    axes: Sequence[Axis],
    rule: UnitRule | None = None,
    reduce: str = "each",
    rest: str | None = None,
) -> Cut:
    """Decide how a tree is cut over `axes`, by the rule given, else the running step's, else the default one.

    A unit has one dtype: a rule's unit of several dtypes is cut in several. Leaves that are one tensor object are
    one leaf of the unit of the first. Integer and bool leaves are in none, and those that the rule names `None` are in
    the unit `rest`.
    """
    rule = rule or rule_in_scope() or default_units
    paths, leaves, structure = tree.flatten_with_paths(params, is_box)
    members: dict[tuple[str, torch.dtype], list[int]] = {}  # the unit's name and dtype -> positions
    owner: dict[int, tuple[tuple[str, torch.dtype], int]] = {}  # id of a leaf -> its unit, and index there
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or id(leaf) in owner:
            continue
        name = rule(path, leaf)
        name = rest if name is None else name
        if name is not None:
            unit = members.setdefault((name, leaf.dtype), [])
            owner[id(leaf)] = ((name, leaf.dtype), len(unit))
            unit.append(position)
    units = {
        key: Unit(_uid_of(key[0], axes, paths, leaves, at, reduce), [leaves[i] for i in at], at[0])
        for key, at in members.items()
    }
    entries = [Slot(units[owner[id(x)][0]].uid, owner[id(x)][1]) if id(x) in owner else x for x in leaves]
    return Cut(entries, list(units.values()), structure)


def _uid_of(name: str, axes: Sequence[Axis], paths: list[str], leaves: list[Any], at: list[int], reduce: str) -> int:
    return intern_parts(
        name,
        tuple([a.name for a in axes]),
        math.prod([a.size for a in axes]),
        tuple([paths[i] for i in at]),
        tuple([tuple([int(d) for d in leaves[i].shape]) for i in at]),
        leaves[at[0]].dtype,
        reduce,
    )


class Group(NamedTuple):
    """A unit found in a cut tree: its uid, its `Shard`, and `(position, index in the unit)` of each of its leaves."""

    uid: int
    shard: Shard
    members: list[tuple[int, int]]


def groups(paths: Sequence[str], entries: Sequence[Any]) -> list[Group]:
    """Find the units of a flattened cut tree.

    A tree may hold several trees of one layout, such as the parameters and their moving average: a slot belongs to
    the nearest shard of its unit before it, or to the first.

    Raises:
        ValueError: if a slot's shard is not in the tree. Names the path.
    """
    found: dict[int, list[Group]] = {}
    order: list[Group] = []
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            group = Group(x.uid, x, [(position, 0)])
            found.setdefault(x.uid, []).append(group)
            order.append(group)
    seen: dict[int, int] = {}
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            seen[x.uid] = seen.get(x.uid, 0) + 1
        elif isinstance(x, Slot):
            if x.uid not in found:
                raise ValueError(
                    f"leaf {paths[position]!r} lies in the shard of unit {x.spec.unit!r}, which is not in this tree; "
                    "pass a tree that holds whole units, or cut it finer with units="
                )
            found[x.uid][max(seen.get(x.uid, 0) - 1, 0)].members.append((position, x.index))
    return order


def apply_to_unit(name: str, uid: int, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Apply a row of the table of collectives to a unit's tensors, over the unit's axis."""
    axis = unit_axis(uid)
    return apply(axis.token, name, axis.meta, (uid, 0), *xs)
