"""A differentiated argument, taken apart into pieces: what varies, and how its gradient becomes the argument's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes.axis import Axis
from fzero.axes.rules import Rules
from fzero.axes.scope import joint, rules_here
from fzero.layout.boxes import Shard, Slot, is_box
from fzero.layout.rows import apply_over_unit_axes, apply_to_unit
from fzero.layout.spec import facts, unit_axes, with_cast
from fzero.layout.units import assign, cut_units
from fzero.precision import Precision
from fzero.transforms._gather import gather_unit

__all__ = ["Opened", "open_argument"]


class Piece(NamedTuple):
    """Leaves that are differentiated together: what varies, how it becomes whole, how its gradient is finished."""

    members: list[tuple[int, int]]  # (position in the flattened tree, index in the piece)
    variables: list[torch.Tensor]
    whole: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    finish: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    dtypes: list[torch.dtype]  # that gradients are summed over micro-batches in
    uid: int = -1  # of the shard that the gradient is put into
    closed: Shard | None = None  # the box whose data is what varies


class Opened(NamedTuple):
    """A differentiated argument, taken apart into pieces."""

    entries: list[Any]
    structure: Any
    pieces: list[Piece]

    @property
    def variables(self) -> list[list[torch.Tensor]]:
        """What is differentiated, by piece."""
        return [p.variables for p in self.pieces]

    @property
    def dtypes(self) -> list[list[torch.dtype]]:
        """That gradients are summed over micro-batches in, by piece."""
        return [p.dtypes for p in self.pieces]

    def rebuild(self, wholes: list[Sequence[torch.Tensor]], gather: bool) -> Any:
        """Make the argument that f sees: of whole leaves, or if not `gather` of boxes that hold what varies."""
        entries = list(self.entries)
        for piece, leaves in zip(self.pieces, wholes, strict=True):
            if piece.closed is not None and not gather:
                for position, index in piece.members:
                    entries[position] = Slot(piece.closed.uid, index)
                entries[piece.members[0][0]] = Shard(leaves[0], piece.closed.uid, piece.closed.origin)
                continue
            for position, index in piece.members:
                entries[position] = leaves[index]
        return tree.unflatten(self.structure, entries)

    def finish(self, grads: list[list[torch.Tensor]]) -> Any:
        """Reduce the gradients of the pieces, and put them together like the argument."""
        entries = list(self.entries)
        for piece in self.pieces:
            # taken off the list, so that no piece's gradient is held while the next is finished
            done = piece.finish(grads.pop(0))
            if piece.uid >= 0:
                entries[piece.members[0][0]] = Shard(done[0], piece.uid)
            else:
                for position, index in piece.members:
                    entries[position] = done[index]
        return tree.unflatten(self.structure, entries)


def _same(xs: Any) -> Any:
    return xs


def open_argument(arg: Any, axes: Sequence[Axis], name: str, micro_batches: int, precision: Precision | None) -> Opened:
    """Take a tree of boxes and replicated tensors apart into the pieces that are differentiated and reduced as one."""
    paths, entries, structure = tree.flatten_with_paths(arg, is_box)
    _check_floating(paths, entries, name)
    if precision is not None:
        precision.check(name, paths, entries)
    pieces = [_shard_piece(*group, axes, micro_batches, precision) for group in cut_units(paths, entries)]
    if axes:
        assignment = assign(arg, axes, Rules(rules_here().units), rest="replicated")
        for unit in assignment.units:
            members = [
                (i, x.index)
                for i, x in enumerate(assignment.entries)
                if isinstance(x, Slot) and x.uid == unit.uid and not is_box(entries[i])
            ]
            pieces.append(_replicated_piece(unit.uid, axes, unit.leaves, members, precision))
    else:
        pieces.append(_plain_piece(entries, precision))
    return Opened(entries, structure, pieces)


def _grad_dtype(dtype: torch.dtype, precision: Precision | None) -> torch.dtype:
    return dtype if precision is None else precision.gradients(dtype)[1]


def _cast(uid: int, precision: Precision | None) -> int:
    return uid if precision is None else with_cast(uid, *precision.gradients(facts(uid).dtype))


def _shard_piece(
    uid: int,
    box: Shard,
    members: list[tuple[int, int]],
    axes: Sequence[Axis],
    micro_batches: int,
    precision: Precision | None,
) -> Piece:
    own, names = [a.name for a in unit_axes(uid)], [a.name for a in axes]
    if any(name not in names for name in own):
        raise ValueError(
            f"unit {facts(uid).unit!r} is sharded over {own}, and the mean is over {names}: its gradient would be "
            "summed over more ranks than the loss; name all its axes with axis="
        )
    # replicated along these, as in hybrid sharding: each copy has the gradient of its own part of the batch
    copies = [a for a in axes if a.name not in facts(uid).varies]
    cast = _cast(uid, precision)

    def summed(g: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(apply_over_unit_axes("all_reduce_shard", joint(copies), cast, g)) if copies else list(g)

    # what varies has the gradient's dtype, or autograd would cast the gradient to its own
    dtype = _grad_dtype(box.data.dtype, precision)
    if micro_batches > 1 and facts(uid).reduced == "once":

        def scattered(g: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return summed(apply_to_unit("reduce_scatter", cast, g))

        full = list(gather_unit(uid, box.data, box.origin))
        return Piece(members, full, _same, scattered, [dtype] * len(full), uid)
    closed = Shard(box.data.to(dtype), cast, box.origin)

    def whole(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return gather_unit(cast, xs[0], closed.origin)

    return Piece(members, [closed.data], whole, summed, [dtype], uid, closed)


def _replicated_piece(
    uid: int,
    axes: Sequence[Axis],
    leaves: list[torch.Tensor],
    members: list[tuple[int, int]],
    precision: Precision | None,
) -> Piece:
    cast, dtypes = _cast(uid, precision), [_grad_dtype(x.dtype, precision) for x in leaves]
    return Piece(members, leaves, _same, lambda g: apply_over_unit_axes("all_reduce", joint(axes), cast, g), dtypes)


def _plain_piece(entries: list[Any], precision: Precision | None) -> Piece:
    index: dict[Any, int] = {}
    leaves: list[torch.Tensor] = []
    members: list[tuple[int, int]] = []
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            if tree.identity(x) not in index:
                index[tree.identity(x)] = len(leaves)
                leaves.append(x)
            members.append((position, index[tree.identity(x)]))
    dtypes = [_grad_dtype(x.dtype, precision) for x in leaves]
    return Piece(members, leaves, _same, lambda g: [x.to(d) for x, d in zip(g, dtypes, strict=True)], dtypes)


def _check_floating(paths: list[str], entries: list[Any], name: str) -> None:
    for path, x in zip(paths, entries, strict=True):
        if x is None or is_box(x):
            continue
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            given = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise TypeError(
                f"{name} is differentiated, and its leaf {path!r} is {given}, which cannot be differentiated "
                "here; pass it in an argument that is not differentiated"
            )
