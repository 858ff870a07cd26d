"""Offload plans: which part of each unit lies on the host, and trees that are split so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import axis_names
from fzero.collectives import to_device, to_host
from fzero.optim._precision import Precision
from fzero.sharding import (
    Shard,
    Slot,
    concatenated,
    facts,
    host_elements,
    in_pieces,
    intern_parts,
    is_box,
    on_device,
    on_host,
    spec_of,
)
from fzero.tree import Tree

__all__ = ["OffloadPlan", "Ratio", "check_ratio", "offload_params", "offload_plan_like", "offload_plan_of"]

Ratio = float | Callable[[str], float]
"""The share of a state that lies on the host, or a rule `(path) -> share`."""

Move = Callable[[torch.Tensor], torch.Tensor]


def check_ratio(ratio: object, what: str = "ratio") -> None:
    """Check that a share is a number from 0 to 1, or a rule.

    Raises:
        TypeError: if it is neither.
        ValueError: if it is another number.
    """
    if callable(ratio):
        return
    if not isinstance(ratio, int | float) or isinstance(ratio, bool):
        raise TypeError(f"{what}={ratio!r}: expected a number from 0 to 1, or a rule (path) -> number")
    if not 0 <= ratio <= 1:
        raise ValueError(f"{what}={ratio!r}: expected a number from 0 to 1")


class UnitEntry(NamedTuple):
    """Where an entry of a tree lies: in which unit, as its leaf `index`.

    Attributes:
        base: the uid of the unit, all of which is on the device.
        index: of the leaf in the unit.
        first: whether the unit's shard is here, and not only a slot.
        shape: of a leaf that was in no box, and is a unit by itself; None for a box.
    """

    base: int
    index: int
    first: bool
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class OffloadPlan:
    """How the units of a tree lie in the two memories.

    Attributes:
        structure: of the tree, in which boxes are leaves.
        places: of its entries; None of what is in no unit, such as an integer, and of a number (0-d).
        taken: for the uid of each unit the share of each rank's shard that lies on the host.
        device: of the tree.
    """

    structure: Any
    places: tuple[UnitEntry | None, ...]
    taken: dict[int, Fraction]
    device: torch.device

    @cached_property
    def uids(self) -> dict[int, int]:
        """The uid of each unit in pieces, by that of the unit on the device."""
        return {base: _with_share(base, share) for base, share in self.taken.items()}

    def entries(self, values: Tree) -> list[Any]:
        """List what a tree of this structure has at each place."""
        return tree.leaves_up_to(tree.unflatten(self.structure, [None] * len(self.places)), values, is_box)

    def cut(self, values: Tree, move: Move, boxes_only: bool = False) -> Tree:
        """Split each unit into a device and a host part, and move the latter; plain leaves too, unless `boxes_only`."""
        out = self.entries(values)
        for i, (x, place) in enumerate(zip(out, self.places, strict=True)):
            if place is None or x is None or (boxes_only and place.shape is not None):
                continue
            uid = self.uids[place.base]
            box = x if place.shape is None else Shard(x.reshape(-1), place.base)
            if spec_of(box.uid).host not in (0, spec_of(uid).host):
                raise ValueError(
                    f"offload: unit {facts(uid).unit!r} has {_in_words(box.uid)} on the host, and ratio says "
                    f"{_in_words(uid)}: give step.init the pair that the step updates with"
                )
            out[i] = in_pieces(box, uid, move) if place.first else Slot(uid, place.index)
        return tree.unflatten(self.structure, out)

    def joined(
        self, values: Tree, on_device: Callable[[int, Shard], Sequence[torch.Tensor]], leaves_only: bool = False
    ) -> Tree:
        """Put the pieces of each unit together: the inverse of `cut`.

        Args:
            values: a tree in pieces.
            on_device: given the number of an entry and its box, returns the pieces, all on the device.
            leaves_only: whether boxes stay in pieces, and only what was in no box is put together.
        """
        out = self.entries(values)
        whole: dict[int, torch.Tensor] = {}  # of leaves that were in no box: ties stay tied
        for i, (x, place) in enumerate(zip(out, self.places, strict=True)):
            if place is None or x is None or (leaves_only and place.shape is None):
                continue
            if place.first:
                data = concatenated(on_device(i, x))
                out[i] = Shard(data, place.base)
                if place.shape is not None:
                    out[i] = whole[place.base] = data.view((*data.shape[:-1], *place.shape))
            else:
                out[i] = Slot(place.base, place.index) if place.shape is None else whole[place.base]
        return tree.unflatten(self.structure, out)

    def hosts(self, values: Tree) -> Tree:
        """Keep of a tree in pieces the units of which the host has a part, and None of all else."""
        kept = [x if isinstance(x, Shard | Slot) and spec_of(x.uid).host else None for x in self.entries(values)]
        return tree.unflatten(self.structure, kept)

    def replaced(self, values: Tree, units: Tree) -> Tree:
        """Return a tree with other units in the places of those of which the host has a part."""
        pairs = zip(self.entries(values), self.entries(units), strict=True)
        return tree.unflatten(self.structure, [x if unit is None else unit for x, unit in pairs])

    def lowered(self, state: Tree) -> Tree:
        """Move the host's share of a state that lies on the device down; plain leaves go into boxes over no axis."""
        paths, out, structure = tree.flatten_with_paths(state, is_box)
        for i, (place, x) in enumerate(zip(_places(paths, out, None), out, strict=True)):
            if place is None:
                continue
            uid = self._uid_in_pieces(self._base_of(place))
            box = x if place.shape is None else Shard(x.reshape(-1), place.base)
            out[i] = in_pieces(box, uid, to_host) if place.first else Slot(uid, place.index)
        return tree.unflatten(structure, out)

    def lifted(self, state: Tree) -> Tree:
        """Move the host's share of a state up, and put it together as the pair keeps it: the inverse of `lowered`."""
        out, structure = tree.flatten(state, is_box)
        whole: dict[int, torch.Tensor] = {}  # of leaves that lie in no unit of the parameters
        for i, x in enumerate(out):
            if not isinstance(x, Shard | Slot):
                continue
            base, spec = on_host(x.uid, 0), spec_of(x.uid)
            if isinstance(x, Shard):
                data = on_device(x, self.device).data
                if not spec.varies:
                    whole[base] = data.view((*data.shape[:-1], *spec.shapes[0]))
                out[i] = Shard(data, base) if spec.varies else whole[base]
            else:
                out[i] = whole[base] if base in whole else Slot(base, x.index)
        return tree.unflatten(structure, out)

    def up(self, space: str, x: torch.Tensor) -> torch.Tensor:
        """Move a piece to the device, if it is not there."""
        return to_device(x, self.device) if space == "host" else x

    def _base_of(self, place: UnitEntry) -> int:
        """Return the unit of a leaf of the state: that of the parameter whose path its own ends with, if it has one."""
        if place.shape is None:
            return place.base
        keys = facts(place.base).unit.split(".")  # its path; of tied leaves the first's, at each of their places
        ends = [".".join(keys[i:]) for i in range(len(keys))]
        known = [self._by_path[end] for end in ends if end in self._by_path]
        same = [base for base in known if facts(base).shapes == (place.shape,)]
        return same[0] if same else place.base

    @cached_property
    def _by_path(self) -> dict[str, int]:
        return {facts(base).unit: base for base in self.taken if not facts(base).varies}

    def _uid_in_pieces(self, base: int) -> int:
        if base in self.uids:
            return self.uids[base]
        total = sum([_weight(uid) for uid in self.taken])  # a unit of the pair's own: as much of it as of all others
        host = sum([share * _weight(uid) for uid, share in self.taken.items()])
        return _with_share(base, Fraction(host, total) if total else Fraction(0))

    def is_low(self, params: Tree | None) -> bool:
        """Return whether the host's share of the parameters lies there, too."""
        entries = [] if params is None else self.entries(params)
        return any(isinstance(x, Shard) and spec_of(x.uid).host for x in entries)

    def check(self, state: Tree) -> None:
        """Check that a state is cut as this says.

        Raises:
            ValueError: if not. Names the leaf.
        """
        paths, entries, _ = tree.flatten_with_paths(state, is_box)
        for path, x in zip(paths, entries, strict=True):
            if isinstance(x, Shard | Slot) and spec_of(x.uid).host != spec_of(self._expected(x)).host:
                has, wanted = _in_words(x.uid), _in_words(self._expected(x))
                raise ValueError(
                    f"offload: leaf {path!r} of the state has {has} on the host, and ratio says {wanted}: use the "
                    "ratio that the state was made with, or optim.offloaded(opt_state, params, ratio)"
                )

    def _expected(self, x: Shard | Slot) -> int:
        return self._uid_in_pieces(on_host(x.uid, 0))


# ---------------------------------------------------------------- which part of each unit


def _with_share(base: int, share: Fraction) -> int:
    return on_host(base, share.numerator, share.denominator) if share else base


def _in_words(uid: int) -> str:
    return f"{host_elements(uid)} elements ({float(spec_of(uid).host):.4g} of them)"


def _weight(uid: int) -> int:
    """Count a unit's elements, of all ranks: the same on any mesh."""
    return facts(uid).numel * facts(uid).split_ranks


def _exact(share: float) -> Fraction:
    """Return the number that a share is written as: 1/10 of 0.1, and not a little more."""
    return Fraction(repr(float(share)))


def offload_plan_of(params: Tree, ratio: Ratio, precision: Precision | None = None) -> OffloadPlan:
    """Say which part of each unit of a tree lies on the host.

    With a number it is the last of all elements: the end of one unit, and all units behind it. Their gradients are made
    first, and the next step needs their parameters last, so the host has the longest time.

    Args:
        params: the tree.
        ratio: a share of all elements, or a rule.
        precision: the policy that says the dtypes of the parameters, if `params` may be wider masters.
    """
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    places = _places(paths, entries, precision)
    units = [place.base for place in places if place is not None and place.first]
    return OffloadPlan(structure, tuple(places), _taken(list(dict.fromkeys(units)), ratio), _device_of(entries))


def offload_plan_like(state: Tree, params: Tree, ratio: Ratio) -> OffloadPlan:
    """Say the same of a state's own units, outside a step, where the parameters may be whole: in their order."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    order = {path: i for i, path in enumerate(paths)}
    found = {on_host(x.uid, 0): x.spec.paths[0] for x in tree.flatten(state, is_box)[0] if isinstance(x, Shard)}
    units = sorted([uid for uid, path in found.items() if path in order], key=lambda uid: order[found[uid]])
    if not units:  # of a step that shards no state
        return offload_plan_of(params, ratio)
    return OffloadPlan(structure, (None,) * len(entries), _taken(units, ratio), _device_of(entries))


def _device_of(entries: Sequence[Any]) -> torch.device:
    found = [x.device for x in entries if isinstance(x, Shard | torch.Tensor)]
    return found[0] if found else torch.device("cpu")


def _places(paths: Sequence[str], entries: Sequence[Any], precision: Precision | None) -> list[UnitEntry | None]:
    found: list[UnitEntry | None] = []
    seen: dict[Any, UnitEntry] = {}
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            found.append(UnitEntry(on_host(x.uid, 0), 0, True, None))
        elif isinstance(x, Slot):
            found.append(UnitEntry(on_host(x.uid, 0), x.index, False, None))
        elif not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim):
            found.append(None)  # of numbers it could not be told which are a pair's own, such as a rate
        elif tree.identity(x) in seen:
            found.append(seen[tree.identity(x)]._replace(first=False))
        else:
            shape = tuple([int(n) for n in x.shape])
            dtype = x.dtype if precision is None else precision.dtype_of(path, x)
            uid = intern_parts(path, (), (path,), (shape,), dtype, "each", (), axis_names())
            found.append(UnitEntry(uid, 0, True, shape))
            seen[tree.identity(x)] = UnitEntry(uid, 0, True, shape)
    return found


def offload_params(params: Tree, ratio: Ratio, precision: Precision | None) -> Tree:
    """Put the last share of sharded parameters into host memory.

    Raises:
        ValueError: if all of them are whole, as at stages 0 to 2.
    """
    if not any(isinstance(x, Shard) and spec_of(x.uid).axes for x in tree.flatten(params, is_box)[0]):
        raise ValueError(
            "offload: params=True: no parameter is cut, and whole ones stay on the device: use stage=3, and a rule of "
            "units that cuts some"
        )
    return offload_plan_of(params, ratio, precision).cut(params, to_host, boxes_only=True)


def _taken(units: Sequence[int], ratio: Ratio) -> dict[int, Fraction]:
    if callable(ratio):
        return {uid: _by_rule(uid, ratio) for uid in units}
    wanted = _exact(ratio) * sum([_weight(uid) for uid in units])
    found: dict[int, Fraction] = {}
    for uid in units[::-1]:
        here = min(wanted, Fraction(_weight(uid)))
        found[uid] = here / max(_weight(uid), 1)
        wanted -= here
    return {uid: found[uid] for uid in units}


def _by_rule(uid: int, rule: Callable[[str], float]) -> Fraction:
    """Ask a rule for each leaf of a unit: it gives the share of each, and the end of the shard has their sum."""
    spec = spec_of(uid)
    shares = [rule(path) for path in spec.paths]
    for path, share in zip(spec.paths, shares, strict=True):
        if callable(share):
            raise TypeError(f"ratio: the rule gave {share!r} for leaf {path!r}, expected a number from 0 to 1")
        check_ratio(share, f"ratio: the rule's answer for leaf {path!r}")
    wanted = sum([_exact(share) * size for share, size in zip(shares, spec.sizes, strict=True)], Fraction(0))
    return wanted / max(spec.numel, 1)
