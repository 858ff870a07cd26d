"""Supply the leaves of a tree that exists, one after the other. Its caller keeps them, or donates them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import _torch, tree
from fzero._donated import donate_memory
from fzero._format import format_tensor
from fzero.ranks import Mesh, check_equal
from fzero.sharding import PerRank, Shard, Slot, is_box, lookup_spec, sharded_units
from fzero.zero._tree_source import SourceLeaf

__all__ = ["make_supply", "supply_like"]


@dataclass(frozen=True)
class _LeafSupply:
    """A tree whose leaves exist.

    Attributes:
        leaves: meta tensors like the leaves; tied leaves are one object. Values that are not tensors are unchanged.
        devices: the device of each leaf; None for a value that is not a tensor.
        structure: the tree's structure, in which a `PerRank` value is a leaf.
        tensors: the leaves themselves, until `iter_leaves` passes them on.
        notes: if the caller donates the leaves, an error message for each, for later reads; else empty.
    """

    leaves: list[Any]
    devices: list[Any]
    structure: Any
    tensors: list[Any]
    notes: Sequence[str]

    @property
    def needs_checksums(self) -> bool:
        """Whether the values are compared later: `check_before` compares them."""
        return False

    def check_before(self, label: str, mesh: Mesh) -> None:
        """Compare the values between ranks, before the first leaf is donated."""
        check_equal(label, tree.unflatten(self.structure, self.tensors), mesh)

    def iter_leaves(self) -> Iterator[SourceLeaf]:
        """Pass on each leaf once, and drop it. A donated leaf owns its memory if nothing else lies in it."""
        positions: dict[int, list[int]] = {}  # id of a leaf -> its positions
        for i, x in enumerate(self.leaves):
            if isinstance(x, torch.Tensor):
                positions.setdefault(id(x), []).append(i)
        storages = [_torch.storage_id(self.tensors[positions_of_leaf[0]]) for positions_of_leaf in positions.values()]
        for positions_of_leaf in positions.values():
            x = self.tensors[positions_of_leaf[0]]
            is_writable = x.is_contiguous() and not x.is_inference()  # a jitted step can write into it
            owns_storage = storages.count(_torch.storage_id(x)) == 1 and x.untyped_storage().nbytes() == x.nbytes
            for i in positions_of_leaf:
                self.tensors[i] = None
            if self.notes and not x.is_meta:
                x = donate_memory(x, self.notes[positions_of_leaf[0]])
            yield SourceLeaf(positions_of_leaf, x, bool(self.notes) and is_writable and owns_storage)
            del x  # before the next leaf is copied


def make_supply(label: str, values: Any, donated_to: str | None = None) -> _LeafSupply:
    """Flatten a tree into a supply of its leaves. A leaf is freed after its use, unless someone else holds it.

    Args:
        label: the tree's name in messages.
        values: the tree.
        donated_to: the call that the leaves are donated to, for messages, such as "step.init(..., donate=True)"; None
            if the caller keeps them.

    Raises:
        ValueError: if the tree is sharded. The message names the first box.
        TypeError: if a leaf is not a dense tensor. The message names it.
    """
    paths, tensors, structure = tree.flatten_with_paths(values, is_box)
    leaves: list[Any] = []
    meta: dict[int, torch.Tensor] = {}  # id of a leaf -> its stand-in
    for i, (path, x) in enumerate(zip(paths, tensors, strict=True)):
        if isinstance(x, PerRank):
            tensors[i] = tree.map(torch.clone, x)
        else:
            _check_leaf(label, path, x)
        if isinstance(x, torch.Tensor) and id(x) not in meta:
            meta[id(x)] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        leaves.append(meta[id(x)] if isinstance(x, torch.Tensor) else tensors[i])
    devices = [x.device if isinstance(x, torch.Tensor) else None for x in tensors]
    notes = [f"{label} leaf {path!r} was donated to {donated_to}" for path in paths] if donated_to else []
    return _LeafSupply(leaves=leaves, devices=devices, structure=structure, tensors=tensors, notes=notes)


def _check_leaf(label: str, path: str, x: Any) -> None:
    """Raise an error for a leaf that cannot be sharded: a box, a module, a sparse or a wrapping tensor."""
    if is_box(x):
        raise ValueError(f"{label} is sharded already: leaf {path!r} is {x!r}; gather it with the step that sharded it")
    if isinstance(x, torch.nn.Module):
        raise TypeError(
            f"{label} holds a module: pass the module itself, or fzero.nn.functional(module).params, a tree of its "
            "parameters"
        )
    if not isinstance(x, torch.Tensor):
        if x is not None:
            raise TypeError(tree.not_a_tensor(label, path, x))
        return
    if torch.nn.parameter.is_lazy(x):
        raise TypeError(f"{label} leaf {path!r} is not initialised: run the lazy module once on a batch first")
    if hasattr(type(x), "__tensor_flatten__"):  # torch's protocol for tensor subclasses that wrap tensors
        raise TypeError(
            f"{label} leaf {path!r} is a {type(x).__name__}, a tensor that wraps tensors, and cannot be sharded: pass "
            "a plain tensor (x.full_tensor() of a DTensor)"
        )
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        kind = "quantized" if x.is_quantized else kind
        raise TypeError(
            f"{label} leaf {path!r} is {kind}, and cannot be sharded: pass a dense tensor, such as x.to_dense()"
        )


def supply_like(label: str, values: Any, like: Any, donated_to: str | None = None) -> _LeafSupply:
    """Flatten a tree of full leaves into a supply, in the structure of a sharded tree, where it has leaves and boxes.

    Args:
        label: the name of `values` in messages.
        values: the tree, with the structure, shapes and dtypes of `step.gather(like)`.
        like: the sharded tree. The contents of its tensors are not read.
        donated_to: the call that the leaves are donated to, for messages; None if the caller keeps them.

    Raises:
        ValueError: if the structures differ, or the shape or dtype of a leaf differs from `like`, or tied leaves have
            different values. The message names the path.
    """
    paths, entries, structure = tree.flatten_with_paths(like, is_box)
    try:
        leaves = tree.leaves_up_to(tree.unflatten(structure, [_no_box(x) for x in entries]), values, is_box)
    except ValueError as error:
        raise ValueError(f"{label} does not match like=: {error}") from error
    expected = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in entries]
    identities: list[Any] = [id(x) if isinstance(x, torch.Tensor) else None for x in entries]  # equal for tied leaves
    for spec_id, box, members in sharded_units(paths, entries):
        for position, index in members:
            expected[position] = (lookup_spec(spec_id).full_shapes[index], box.dtype)
            identities[position] = (id(box), index)
    first_positions: dict[Any, int] = {}  # identity -> position
    for i, key in enumerate(identities):
        if key is not None:
            first_position = first_positions.setdefault(key, i)
            _check_tied(label, (paths[first_position], leaves[first_position]), (paths[i], leaves[i]))
    for path, x, shape_and_dtype in zip(paths, leaves, expected, strict=True):
        _check_like(label, path, x, shape_and_dtype)
    return make_supply(label, tree.unflatten(structure, leaves), donated_to)


def _no_box(x: Any) -> Any:
    """Replace a box of leaves by a tensor: `values` has a full leaf there."""
    return torch.empty(0, device="meta") if isinstance(x, Shard | Slot) else x


def _check_like(label: str, path: str, x: Any, expected: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    if expected is None or is_box(x):  # make_supply refuses boxes
        return
    shape, dtype = expected
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != expected:
        raise ValueError(
            f"{label} leaf {path!r} is {tree.show(x)}: expected {format_tensor(dtype, shape)}, as in like=; "
            "convert the leaf, or pass a like= of the same model"
        )


def _check_tied(label: str, leaf: tuple[str, Any], other: tuple[str, Any]) -> None:
    (path, x), (other_path, y) = leaf, other
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if x is not y and tensors and not (x.shape == y.shape and torch.equal(x, y)):
        raise ValueError(
            f"{label} leaves {path!r} and {other_path!r} are tied in like=, and have different values: give them one "
            "value, or untie them in like="
        )
