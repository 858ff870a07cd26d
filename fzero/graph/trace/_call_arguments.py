"""Flatten the arguments of a call of a jitted step."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import Buffer, find_buffers
from fzero.axes import BatchSplit
from fzero.sharding import PerRank, Shard, Slot, is_box, spaces

__all__ = ["Arguments", "LeafName", "block_numbers", "flatten_arguments", "list_leaf_names"]

# `(args, kwargs)` is flattened as a tree. The graph takes its distinct tensors: tied weights are one tensor in several
# leaves. The trace contains the structure and every other leaf. Each leaf has a name, which errors and the plan
# show. `rebuild` returns the call's arguments with other tensors, such as stand-ins, in place of the distinct ones.
_PLAIN = {torch.Tensor, torch.nn.Parameter}  # subclasses may redefine operations


class LeafName(NamedTuple):
    """The name of a leaf in a call or in a result, with its unit and memory.

    Attributes:
        path: in a call "0.3.w" for leaf "w" of argument 3 by position, "1.lr.w" for leaf "w" of argument lr by keyword;
            in a result the leaf's path.
        unit: the unit whose shard the leaf is, or "".
        space: the memory that the leaf lies in: "device" or "host".
    """

    path: str
    unit: str
    space: str = "device"

    @property
    def arg_index(self) -> int | None:
        """The index of the argument; None for a keyword argument."""
        kind, _, rest = self.path.partition(".")
        return int(rest.partition(".")[0]) if kind == "0" else None

    def __str__(self) -> str:
        kind, _, rest = self.path.partition(".")
        name, _, leaf = rest.partition(".")
        name = name if kind == "0" else repr(name)
        if self.unit:
            return f"argument {name}, unit {self.unit!r}" + (", on the host" if self.space == "host" else "")
        return f"argument {name}, leaf {leaf!r}" if leaf else f"argument {name}"


@dataclass(frozen=True)
class Arguments:
    """The flattened arguments of a call.

    Attributes:
        leaves: the leaves of `(args, kwargs)`.
        structure: the structure of `(args, kwargs)`.
        leaf_indices: the index of each distinct tensor among the leaves.
        tensor_indices: for each leaf its index among the distinct tensors; None for a leaf that is not a tensor.
    """

    leaves: list[Any]
    structure: Any
    leaf_indices: list[int]
    tensor_indices: list[int | None]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The distinct tensors."""
        return [self.leaves[i] for i in self.leaf_indices]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The distinct tensors that lie side by side in memory, as `step.init` places the leaves of a unit."""
        return find_buffers(self.tensors)

    @cached_property
    def per_rank_nodes(self) -> tuple[tuple[int, ...], ...]:
        """The way to each `PerRank` box of the structure: the indices of children from its root."""
        return tuple(_per_rank_nodes(self.structure, ()))

    def splits(self, nodes: Sequence[tuple[int, ...]]) -> tuple[BatchSplit | None, ...]:
        """List how the boxes at some nodes of the structure were split. It is not part of the trace's key."""
        splits = []
        for indices in nodes:
            node = self.structure
            for i in indices:
                node = node.child(i)
            splits.append(node.context.split)
        return tuple(splits)

    @cached_property
    def leaf_names(self) -> list[LeafName]:
        """The name of each leaf."""
        return list_leaf_names(tree.unflatten(self.structure, list(range(len(self.leaves)))))

    @cached_property
    def tensor_names(self) -> list[LeafName]:
        """The name of each distinct tensor's first leaf."""
        return [self.leaf_names[i] for i in self.leaf_indices]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of the distinct ones."""
        leaves = [x if i is None else tensors[i] for x, i in zip(self.leaves, self.tensor_indices, strict=True)]
        return tree.unflatten(self.structure, leaves)

    def with_scalars_on_device(self) -> "Arguments":
        """Return the arguments with each 0-d tensor, such as an optimizer's count, on the device of the others.

        A device graph would keep a number of the host for ever.

        Raises:
            ValueError: if another tensor lies elsewhere. The message names it.
        """
        devices = [x.device for x in self.tensors if x.device.type != "cpu"]
        if not devices:
            return self
        device_scalars: dict[int, torch.Tensor] = {}
        for i, x in enumerate(self.tensors):
            if x.dim() and x.device != devices[0]:
                raise ValueError(
                    f"fzero.jit: device_graph=True cannot record the step: {self.tensor_names[i]} lies on {x.device}, "
                    f"and others on {devices[0]}; move it there. The state of optim.offload stays on the host, so such "
                    "a step runs without device_graph"
                )
            if x.device != devices[0]:
                device_scalars[i] = x.to(devices[0], non_blocking=True)
        if not device_scalars:
            return self
        pairs = zip(self.leaves, self.tensor_indices, strict=True)
        return replace(self, leaves=[x if i is None else device_scalars.get(i, x) for x, i in pairs])

    def check_traceable(self) -> None:
        """Check that no tensor requires grad.

        Raises:
            ValueError: if a tensor does. The message names it.
        """
        for name, x in zip(self.tensor_names, self.tensors, strict=True):
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"fzero.jit: {name} requires grad, and a jitted step's results have no autograd graph: "
                    "take gradients inside the step (fzero.value_and_grad) and pass detached tensors"
                )

    def check_plain(self) -> None:
        """Check that every tensor is a plain `torch.Tensor` or `nn.Parameter`.

        Raises:
            TypeError: if a tensor is of another class. The message names it.
        """
        if {type(x) for x in self.tensors} <= _PLAIN:
            return
        name, x = next((p, x) for p, x in zip(self.tensor_names, self.tensors, strict=True) if type(x) not in _PLAIN)
        raise TypeError(
            f"fzero.jit: {name} is a {type(x).__name__}, and a graph holds plain tensors only: unpack it outside the "
            "step, or wrap its tensors in a class that is registered as a pytree node"
        )

    def check_real(self) -> None:
        """Check that every tensor has memory.

        Raises:
            ValueError: if a tensor is on the meta device. The message names it.
        """
        for name, x in zip(self.tensor_names, self.tensors, strict=True):
            if x.is_meta:
                raise ValueError(
                    f"{name} is on the meta device and has no memory: the step can be planned (fzero.plan), not run"
                )


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Flatten the arguments of a call.

    Raises:
        DonatedError: if an argument was donated to an earlier call.
    """
    leaves, structure = tree.flatten((args, kwargs))
    return Arguments(leaves, structure, *tree.index_tensors(leaves))


def _per_rank_nodes(structure: Any, indices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if structure.type is PerRank:
        yield indices
        return
    for i, child in enumerate(structure.children()):
        yield from _per_rank_nodes(child, (*indices, i))


def list_leaf_names(values: Any) -> list[LeafName]:
    """List the name of each leaf of a tree."""
    names = []
    for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True):
        if isinstance(x, PerRank):
            paths = tree.flatten_with_paths(x.value)[0]
            names += [LeafName(f"{path}.{inner}".strip("."), "") for inner in paths]
        elif isinstance(x, Shard):
            for space, piece in zip(spaces(x), x.pieces, strict=True):
                names += [LeafName(path, x.spec.unit, space)] * len(tree.flatten(piece)[0])
        elif not isinstance(x, Slot):
            names.append(LeafName(path, ""))
    return names


def block_numbers(names: Sequence[LeafName], parameters: Collection[int | None]) -> list[str]:
    """List the number of the repeated block that each leaf belongs to; "" for leaves of no block.

    The leaves of a box belong to its unit's block. The path of another leaf may end with the path of a parameter; then
    the leaf belongs to that parameter's block. So the moment "1.0.mu.blocks.3.w" belongs to block 3, and "1.0.mu.w" to
    none: 1 and 0 are positions in a chain of optimizers.

    Args:
        names: the names of the leaves.
        parameters: the indices of the arguments that hold parameters; if empty, any argument may hold them.
    """
    keys = [name.path.split(".")[2:] for name in names]
    parameter_keys = {
        tuple(key)
        for name, key in zip(names, keys, strict=True)
        if name.arg_index in parameters or (key and not parameters)
    }
    blocks = []
    for name, key in zip(names, keys, strict=True):
        suffixes = [key[i:] for i in range(len(key), -1, -1)]
        path = next((suffix[:-1] for suffix in suffixes if tuple(suffix) in parameter_keys), [])
        path = name.unit.split(".") if name.unit else path
        blocks.append(next((k for k in reversed(path) if k.isdigit()), ""))
    return blocks
