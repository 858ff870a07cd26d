"""Leaves that exist already: given by the caller, who keeps them or gives them up, or made by a function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import _torch, tree
from fzero._donated import empty
from fzero.layout.boxes import PerRank, is_box

__all__ = ["LeafSupply", "given"]


@dataclass(frozen=True)
class LeafSupply:
    """A tree whose leaves are at hand, to be handed out once, one after the other.

    Attributes:
        leaves: its leaves, in meta tensors; one object where leaves are tied. Other values are as they were given.
        devices: the device of each; None where there is no tensor.
        structure: its structure, in which a `PerRank` value is a leaf.
        held: the leaves themselves, until they are handed out.
        notes: if the caller gives the leaves up, the message of each for whoever reads it afterwards; else empty.
    """

    leaves: list[Any]
    devices: list[Any]
    structure: Any
    held: list[Any]
    notes: Sequence[str]

    def run(self, take: Callable[[list[int], torch.Tensor, bool], None]) -> None:
        """Hand out the leaves, and forget each.

        Args:
            take: called with each leaf's positions, the leaf, and whether its memory may be kept for the result.
        """
        positions: dict[int, list[int]] = {}  # id of a leaf -> its positions
        for i, x in enumerate(self.leaves):
            if isinstance(x, torch.Tensor):
                positions.setdefault(id(x), []).append(i)
        lie_in = [_torch.storage_id(self.held[at[0]]) for at in positions.values()]
        for at in positions.values():
            x = self.held[at[0]]
            fit = x.is_contiguous() and not x.is_inference()  # to be written into by a jitted step
            alone = lie_in.count(_torch.storage_id(x)) == 1 and x.untyped_storage().nbytes() == x.nbytes
            for i in at:
                self.held[i] = None
            if self.notes and not x.is_meta:
                x = empty(x, self.notes[at[0]])
            take(at, x, bool(self.notes) and fit and alone)
            del x  # before the next one is made


def given(what: str, values: Any, by: str = "") -> LeafSupply:
    """Take a tree apart. Where nobody else holds its leaves, each is freed when it was handed out.

    Args:
        what: what the tree is called in messages.
        values: the tree.
        by: the call by which the caller gives the leaves up, if they do: "step.init(..., donate=True)".

    Raises:
        ValueError: if the tree is cut. Names the first box.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    paths, held, structure = tree.flatten_with_paths(values, is_box)
    leaves: list[Any] = []
    meta: dict[int, torch.Tensor] = {}  # id of a leaf -> its stand-in
    for i, (path, x) in enumerate(zip(paths, held, strict=True)):
        if isinstance(x, PerRank):
            held[i] = tree.map(torch.clone, x)
        else:
            _check_leaf(what, path, x)
        if isinstance(x, torch.Tensor) and id(x) not in meta:
            meta[id(x)] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        leaves.append(meta[id(x)] if isinstance(x, torch.Tensor) else held[i])
    devices = [x.device if isinstance(x, torch.Tensor) else None for x in held]
    notes = [f"{what} leaf {path!r} was donated to {by}" for path in paths] if by else []
    return LeafSupply(leaves, devices, structure, held, notes)


def _check_leaf(what: str, path: str, x: Any) -> None:
    if is_box(x):
        raise ValueError(f"{what} is cut already: leaf {path!r} is {x!r}; gather it with the step that cut it")
    if isinstance(x, torch.nn.Module):
        raise TypeError(
            f"{what} holds a module: give the module itself, or fzero.nn.functional(module).params, a tree of its "
            "parameters"
        )
    if not isinstance(x, torch.Tensor):
        if x is not None:
            raise TypeError(f"{what} leaf {path!r} is {x!r}: expected a tensor; register its class as a pytree node")
        return
    if torch.nn.parameter.is_lazy(x):
        raise TypeError(f"{what} leaf {path!r} is not initialised: run the lazy module once on a batch first")
    if hasattr(type(x), "__tensor_flatten__"):  # torch's protocol of tensors that are made of others
        raise TypeError(
            f"{what} leaf {path!r} is a {type(x).__name__}, a tensor made of others, which cannot be cut: give a plain "
            "tensor (x.full_tensor() of a DTensor)"
        )
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{what} leaf {path!r} is {kind}, and cannot be cut: give a dense tensor, such as x.to_dense()")
