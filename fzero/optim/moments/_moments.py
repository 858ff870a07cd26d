"""Moments in fewer bytes: the policy, the state of an 8-bit moment, and elementwise updates of such moments."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_choice
from fzero._tracebacks import api_boundary_of_class
from fzero.optim.checks import check_gradients_like
from fzero.optim.moments._eight_bit import ZERO, DynamicCode, decode, dynamic_code, encode
from fzero.optim.moments._moment_units import MomentUnit, StoredMoments, maxima_at_borders, moment_unit, update_unit
from fzero.optim.moments._sixteen_bit import SixteenBit, full_leaves, init_sixteen_bit, map_sixteen_bit, wide_dtype
from fzero.sharding import (
    Shard,
    Slot,
    block_shape,
    block_spec,
    check_on_device,
    is_box,
    leaf_blocks,
    make_box,
    traced_spec,
)
from fzero.tree import Tree

__all__ = [
    "EightBit",
    "Moments",
    "MomentsLike",
    "SixteenBit",
    "check_moment",
    "init_moment",
    "map_moments",
    "moment_elements",
    "moment_kind",
    "read_moments",
]

_MIN_NUMEL = 4096  # bitsandbytes' min_8bit_size


def _is_small(path: str, leaf: torch.Tensor) -> bool:
    return leaf.ndim < 2 or leaf.numel() < _MIN_NUMEL


class EightBit(NamedTuple):
    """A moment in 8 bits: trees like the parameters.

    Attributes:
        codes: a byte for each element (uint8): the number of a value of the dynamic code.
        scales: the largest absolute value of each block of 256 elements, in float32. The scales of a leaf
            `[.., 256 n]` are `[.., n]`, those of another leaf are `[blocks]`. A leaf in full precision has a scale of
            its own shape, which is the moment.
    """

    codes: Tree
    scales: Tree


@api_boundary_of_class
@dataclass(frozen=True)
class Moments:
    """How an optimizer stores its moments.

    Attributes:
        kind: "int8" for a byte an element and a scale for each block of 256 elements (arXiv:2110.02861), or "bfloat16"
            for two bytes an element, rounded stochastically.
        full: a rule `(path, leaf) -> bool` for leaves whose moments stay in float32. By default these are leaves of
            fewer than 4096 elements, and those with fewer than two dimensions, such as norms and biases. `leaf` is the
            full leaf, on the meta device.

    Raises:
        ValueError: if `kind` is none of these.

    Example:
        >>> from fzero import optim
        >>> moments = Moments("int8", full=lambda path, leaf: "embed" in path or leaf.ndim < 2)
        >>> state = optim.adamw(3e-4, moments=moments).init({"w": torch.ones(4, 512), "embed": torch.ones(9, 512)})
        >>> state.mu.codes["w"].dtype, state.mu.scales["w"].shape, state.mu.scales["embed"].shape
        (torch.uint8, torch.Size([4, 2]), torch.Size([9, 512]))
    """

    kind: Literal["int8", "bfloat16"]
    full: Callable[[str, torch.Tensor], bool] = _is_small

    def __post_init__(self) -> None:
        """Check the kind."""
        check_choice("moments", self.kind, ("int8", "bfloat16"))

    def is_full(self, path: str, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether the moments of a leaf stay in full precision; those of integers and of single numbers do."""
        leaf = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return not dtype.is_floating_point or leaf.numel() < 2 or bool(self.full(path, leaf))


MomentsLike = Moments | Literal["int8", "bfloat16"] | None


_KINDS = {"int8": "in 8 bits", "bfloat16": "in bfloat16", None: "in the parameters' dtypes"}


def moment_kind(moment: Tree) -> str | None:
    """Return how a moment is stored: a kind of `Moments`, or None for a tree in the parameters' dtypes."""
    return {EightBit: "int8", SixteenBit: "bfloat16"}.get(type(moment))


def moment_elements(moment: Tree) -> Tree:
    """Return the tree of a moment that has an entry for each of the parameters' elements."""
    return moment[0] if isinstance(moment, EightBit | SixteenBit) else moment


def read_moments(moments: Any) -> Moments | None:
    """Return the policy that an optimizer's argument `moments` means.

    Raises:
        TypeError: if it is not a policy, a kind of moments or None.
    """
    if moments is None or isinstance(moments, Moments):
        return moments
    if not isinstance(moments, str):
        raise TypeError(f'moments={moments!r}: expected "int8", "bfloat16", an optim.Moments, or None')
    return Moments(moments)  # pyright: ignore[reportArgumentType]  # it checks the kind


def check_moment(moment: Tree, grads: Tree, policy: Moments | None) -> None:
    """Check that a moment is stored as an optimizer stores it, and is of leaves like the gradients.

    Raises:
        TypeError: if it is stored in another way.
        ValueError: if the gradients have another structure or other shapes.
    """
    actual, expected = moment_kind(moment), None if policy is None else policy.kind
    if actual != expected:
        raise TypeError(
            f"opt_state holds moments {_KINDS[actual]}, and the optimizer stores them {_KINDS[expected]}: convert the "
            "state, inside the mesh, by optim.convert_moments(opt_state, like=opt.init(params))"
        )
    check_gradients_like(moment_elements(moment), grads, "state")


def init_moment(params: Tree, policy: Moments | None, signed: bool) -> Tree:
    """Return a moment of zeros: a tree like the parameters, or an `EightBit`.

    Args:
        params: the parameters, on any layout.
        policy: how to store the moment; None for the dtypes of the parameters.
        signed: whether the moment may be negative.
    """
    if policy is None:
        return tree.map(torch.zeros_like, params)
    if policy.kind == "bfloat16":
        return init_sixteen_bit(params, policy.is_full)
    codes = tree.map(lambda p: torch.full_like(p, ZERO[signed], dtype=torch.uint8), params)
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    tied: dict[int, torch.Tensor] = {}
    scales: list[Any] = list(entries)
    for i, (path, x) in enumerate(zip(paths, entries, strict=True)):
        if isinstance(x, torch.Tensor):
            if id(x) not in tied:
                shape = x.shape if policy.is_full(path, x.shape, x.dtype) else block_shape(x.shape)
                tied[id(x)] = torch.zeros(shape, dtype=wide_dtype(x.dtype), device=x.device)
            scales[i] = tied[id(x)]
        elif isinstance(x, Shard):
            check_on_device(x, "an 8-bit moment")
            scales_id = _scales_id(x.spec_id, policy)
            scales[i] = make_box(
                scales_id, [x.data.new_zeros(traced_spec(scales_id).shard_numel, dtype=wide_dtype(x.dtype))]
            )
        elif isinstance(x, Slot):
            scales[i] = Slot(_scales_id(x.spec_id, policy), x.index)
    return EightBit(codes, tree.unflatten(structure, scales))


def _scales_id(spec_id: int, policy: Moments) -> int:
    return block_spec(spec_id, full_leaves(spec_id, policy.is_full))


def map_moments(
    f: Callable[..., tuple[torch.Tensor, ...]],
    signed: Sequence[bool],
    grads: Tree,
    moments: Sequence[EightBit] | Sequence[SixteenBit],
    *rest: Tree,
) -> tuple[Tree, list[EightBit] | list[SixteenBit]]:
    """Update such moments by an elementwise function, unit by unit, so that one unit's moments exist in float32.

    Args:
        f: `f(g, *moments, *rest) -> (update, *new_moments)`, elementwise.
        signed: for each moment, whether it may be negative.
        grads: the gradients, on any layout.
        moments: the moments of their leaves, all of one kind.
        *rest: other trees like the gradients, such as the parameters, or trees of a number for each leaf.

    Returns:
        A tree of the updates, and the new moments.
    """
    sixteen_bit = [moment for moment in moments if isinstance(moment, SixteenBit)]
    if sixteen_bit:
        return map_sixteen_bit(f, grads, sixteen_bit, rest)
    entries, structure = tree.flatten(grads, is_box)
    parts = [part for moment in moments for part in moment]
    columns = [tree.leaves_up_to(grads, other, is_box) for other in (*parts, *rest)]
    # for each entry its update, and the bytes and the scales of each moment; a slot has them of its unit
    rows = [[None if row[0] is None else x for x in row] for row in zip(entries, *columns[: len(parts)], strict=True)]
    tables = _tables_by_device(entries, signed)
    leaves: dict[Any, list[Any]] = {}  # rows of full leaves, by the identities of their inputs
    units: list[MomentUnit] = []
    for position, (g, *other_entries) in enumerate(zip(entries, *columns, strict=True)):
        if not isinstance(g, torch.Tensor | Shard):
            continue
        halves = zip(other_entries[: len(parts) : 2], other_entries[1 : len(parts) : 2], tables[g.device], strict=True)
        stored_moments, own_rest = [StoredMoments(*half) for half in halves], other_entries[len(parts) :]
        if isinstance(g, Shard):
            units.append(moment_unit(position, g, stored_moments, own_rest))
            continue
        key = tuple([tree.identity(x) for x in (g, *other_entries)])
        if key not in leaves:
            leaves[key] = _update_leaf(f, g, stored_moments, own_rest)
        rows[position] = leaves[key]
    for position, row in _update_units(f, units):
        rows[position] = row
    updates, *new = [tree.unflatten(structure, [row[i] for row in rows]) for i in range(1 + len(parts))]
    return updates, [EightBit(*pair) for pair in zip(new[::2], new[1::2], strict=True)]


def _tables_by_device(entries: Sequence[Any], signed: Sequence[bool]) -> dict[torch.device, list[DynamicCode]]:
    """Return the tables of each moment's code on the devices of gradients: one each, as a trace makes its own."""
    devices = dict.fromkeys([g.device for g in entries if isinstance(g, torch.Tensor | Shard)])
    return {device: [dynamic_code(sign, device) for sign in signed] for device in devices}


def _update_units(f: Any, units: Sequence[MomentUnit]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the position of each unit, its update, and the new bytes and scales of each moment."""
    new_units = [update_unit(f, *pair) for pair in zip(units, maxima_at_borders(f, units), strict=True)]
    # The scales are sent last: passes of a jitted step that join these collectives would else put all bytes after them.
    for unit, ((u, *codes), maxima) in zip(units, new_units, strict=True):
        pairs = zip(codes, unit.blocks.scatter(maxima), strict=True)
        yield unit.position, [u, *[x for pair in pairs for x in pair]]


def _update_leaf(f: Any, g: torch.Tensor, moments: Sequence[StoredMoments], rest: Sequence[Any]) -> list[Any]:
    """Return the update of a full leaf, and the new bytes and scales of each moment.

    A leaf of whole blocks is updated as its blocks, so that a compiler sees loops over blocks alone.
    """
    blocks = [leaf_blocks(m.codes, m.scales) for m in moments]
    shape = blocks[0].shape if blocks[0].numel() == g.numel() else g.shape

    def flat(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.reshape(-1)[: g.numel()]

    def as_updated(x: Any) -> Any:
        return x.reshape(shape) if isinstance(x, torch.Tensor) and x.shape == g.shape else x

    old_moments = [
        flat(decode(codes, m.scales.reshape(-1, 1), m.table)).view(shape)
        for codes, m in zip(blocks, moments, strict=True)
    ]
    u, *new = f(as_updated(g), *old_moments, *[as_updated(x) for x in rest])
    out = [u.view(g.shape)]
    for x, m in zip(new, moments, strict=True):
        is_single = g.shape == m.scales.shape
        blocks_of_x = x if shape != g.shape else leaf_blocks(x, m.scales)
        maxima = (blocks_of_x if is_single else blocks_of_x.abs()).amax(1)
        out += [flat(encode(blocks_of_x, maxima[:, None], m.table)).view(g.shape), maxima.view(m.scales.shape)]
    return out
