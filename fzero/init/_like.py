"""Whole leaves beside a cut tree of the same kind: which box each belongs to."""

from typing import Any

import torch

from fzero import tree
from fzero.init._given import LeafSupply, given
from fzero.layout.boxes import Shard, Slot, is_box
from fzero.layout.spec import spec_of
from fzero.layout.units import cut_units

__all__ = ["given_like"]


def given_like(what: str, values: Any, like: Any, by: str = "") -> LeafSupply:
    """Take a tree of whole leaves apart, at the places where a cut tree has its leaves and boxes.

    Args:
        what: what `values` is called in messages.
        values: the tree, as `step.gather(like)` would be.
        like: the cut tree, whatever its tensors hold.
        by: the call by which the caller gives the leaves up, if they do.

    Raises:
        ValueError: if the trees differ in structure, or a leaf has another shape or dtype than `like` says, or tied
            leaves have different values. Names the path.
    """
    paths, entries, structure = tree.flatten_with_paths(like, is_box)
    try:
        leaves = tree.leaves_up_to(tree.unflatten(structure, [_no_box(x) for x in entries]), values, is_box)
    except ValueError as error:
        raise ValueError(f"{what} is not like like=: {error}") from error
    expected = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in entries]
    owner: list[Any] = [id(x) if isinstance(x, torch.Tensor) else None for x in entries]  # alike where leaves are tied
    for uid, box, members in cut_units(paths, entries):
        for position, index in members:
            expected[position] = (spec_of(uid).whole_shapes[index], box.dtype)
            owner[position] = (id(box), index)
    first: dict[Any, int] = {}  # owner -> position
    for i, key in enumerate(owner):
        if key is not None:
            at = first.setdefault(key, i)
            _check_tied(what, (paths[at], leaves[at]), (paths[i], leaves[i]))
    for path, x, wanted in zip(paths, leaves, expected, strict=True):
        _check_like(what, path, x, wanted)
    return given(what, tree.unflatten(structure, leaves), by)


def _no_box(x: Any) -> Any:
    """Return something that is no box for a box of leaves, in whose place a whole leaf is expected."""
    return torch.empty(0, device="meta") if isinstance(x, Shard | Slot) else x


def _check_like(what: str, path: str, x: Any, wanted: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    if wanted is None or is_box(x):  # given() says what a box does here
        return
    shape, dtype = wanted
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != wanted:
        raise ValueError(f"{what} leaf {path!r} is {tree.show(x)}, and like= says {dtype} {list(shape)}")


def _check_tied(what: str, one: tuple[str, Any], other: tuple[str, Any]) -> None:
    (path, x), (other_path, y) = one, other
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if x is not y and tensors and not (x.shape == y.shape and torch.equal(x, y)):
        raise ValueError(f"{what} leaves {path!r} and {other_path!r} are tied, and have different values")
