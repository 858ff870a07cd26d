"""Moments in fewer bytes: the policy, the state of an 8-bit moment, and elementwise updates of such moments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_choice
from fzero._dtypes import sum_dtype
from fzero._torch import assume_constant_result
from fzero.optim._eight_bit import ZERO, decode, encode
from fzero.sharding import (
    Shard,
    Slot,
    block_shape,
    block_spec,
    blocks_of_leaf,
    box_of,
    check_on_device,
    is_box,
    map_of_blocks,
    spec_of,
    traced_spec,
)
from fzero.tree import Tree

__all__ = ["EightBit", "Moments", "MomentsLike", "init_moment", "map_moments", "moments_of"]

MIN_NUMEL = 4096  # bitsandbytes' min_8bit_size


def _is_small(path: str, leaf: torch.Tensor) -> bool:
    return leaf.ndim < 2 or leaf.numel() < MIN_NUMEL


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


@dataclass(frozen=True)
class Moments:
    """How an optimizer stores its moments.

    Attributes:
        kind: "int8" for a byte an element and a scale for each block of 256 elements (arXiv:2110.02861).
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

    kind: Literal["int8"]
    full: Callable[[str, torch.Tensor], bool] = _is_small

    def __post_init__(self) -> None:
        """Check the kind."""
        check_choice("moments", self.kind, ("int8",))

    def is_full(self, path: str, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether the moments of a leaf stay in full precision; those of integers and of single numbers do."""
        leaf = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return not dtype.is_floating_point or leaf.numel() < 2 or bool(self.full(path, leaf))


MomentsLike = Moments | Literal["int8"] | None


def moments_of(moments: Any) -> Moments | None:
    """Return the policy that an optimizer's argument `moments` means.

    Raises:
        TypeError: if it is no policy, no kind of moments and not None.
    """
    if moments is None or isinstance(moments, Moments):
        return moments
    if not isinstance(moments, str):
        raise TypeError(f'moments={moments!r}: expected "int8", an optim.Moments, or None')
    return Moments(moments)  # pyright: ignore[reportArgumentType]  # it checks the kind


def init_moment(params: Tree, policy: Moments | None, signed: bool) -> Tree:
    """Return a moment of zeros: a tree like the parameters, or an `EightBit`.

    Args:
        params: the parameters, on any layout.
        policy: how to store the moment; None for the dtypes of the parameters.
        signed: whether the moment may be negative.
    """
    if policy is None:
        return tree.map(torch.zeros_like, params)
    codes = tree.map(lambda p: torch.full_like(p, ZERO[signed], dtype=torch.uint8), params)
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    tied: dict[int, torch.Tensor] = {}
    scales: list[Any] = list(entries)
    for i, (path, x) in enumerate(zip(paths, entries, strict=True)):
        if isinstance(x, torch.Tensor):
            if id(x) not in tied:
                shape = x.shape if policy.is_full(path, x.shape, x.dtype) else block_shape(x.shape)
                tied[id(x)] = torch.zeros(shape, dtype=_wide(x.dtype), device=x.device)
            scales[i] = tied[id(x)]
        elif isinstance(x, Shard):
            check_on_device(x, "an 8-bit moment")
            numbers_id = _numbers_id(x.spec_id, policy)
            scales[i] = box_of(
                numbers_id, [x.data.new_zeros(traced_spec(numbers_id).shard_numel, dtype=_wide(x.dtype))]
            )
        elif isinstance(x, Slot):
            scales[i] = Slot(_numbers_id(x.spec_id, policy), x.index)
    return EightBit(codes, tree.unflatten(structure, scales))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if dtype.is_floating_point else dtype


@assume_constant_result
def _paths(spec_id: int) -> tuple[str, ...]:
    return spec_of(spec_id).paths


def _numbers_id(spec_id: int, policy: Moments) -> int:
    spec = traced_spec(spec_id)
    rows = zip(_paths(spec_id), spec.item_shapes, strict=True)
    return block_spec(spec_id, tuple([policy.is_full(path, shape, spec.dtype) for path, shape in rows]))


def map_moments(
    f: Callable[..., tuple[torch.Tensor, ...]],
    signed: Sequence[bool],
    grads: Tree,
    moments: Sequence[EightBit],
    *rest: Tree,
) -> tuple[Tree, list[EightBit]]:
    """Update 8-bit moments by an elementwise function, unit by unit, so that one unit's moments exist in float32.

    Args:
        f: `f(g, *moments, *rest) -> (update, *new_moments)`, elementwise.
        signed: for each moment, whether it may be negative.
        grads: the gradients, on any layout.
        moments: the moments of their leaves.
        *rest: other trees like the gradients, such as the parameters, or trees of a number for each leaf.

    Returns:
        A tree of the updates, and the new moments.
    """
    entries, structure = tree.flatten(grads, is_box)
    parts = [part for moment in moments for part in moment]
    columns = [tree.leaves_up_to(grads, other, is_box) for other in (*parts, *rest)]
    results: dict[Any, list[Any]] = {}
    rows: list[list[Any]] = []
    for g, *others in zip(entries, *columns, strict=True):
        key = tuple([tree.identity(x) for x in (g, *others)])
        if key not in results:
            results[key] = _update_entry(f, signed, g, others)
        rows.append(results[key])
    trees = [tree.unflatten(structure, [row[i] for row in rows]) for i in range(1 + len(parts))]
    updates, *new = trees
    return updates, [EightBit(*pair) for pair in zip(new[::2], new[1::2], strict=True)]


def _update_entry(f: Any, signed: Sequence[bool], g: Any, others: Sequence[Any]) -> list[Any]:
    """Return the update of an entry of a flattened tree, and the codes and scales of each moment."""
    n = 2 * len(signed)
    if g is None:
        return [None] * (n + 1)
    if isinstance(g, Slot):
        return [g, *others[:n]]
    if isinstance(g, Shard):
        return _update_shard(f, signed, g, others[:n:2], others[1:n:2], others[n:])
    return _update_leaf(f, signed, g, others[:n:2], others[1:n:2], others[n:])


def _update_leaf(
    f: Any, signed: Sequence[bool], g: torch.Tensor, codes: Any, scales: Any, rest: Sequence[Any]
) -> list[Any]:
    """Update the moments of a full leaf."""
    old = [
        decode(blocks_of_leaf(c, s), s.reshape(-1, 1), sign).view(-1)[: g.numel()].view(g.shape)
        for c, s, sign in zip(codes, scales, signed, strict=True)
    ]
    u, *new = f(g, *old, *rest)
    out = [u]
    for x, s, sign in zip(new, scales, signed, strict=True):
        blocks = blocks_of_leaf(x, s)
        is_single = x.shape == s.shape
        maxima = (blocks if is_single else blocks.abs()).amax(1)
        out += [encode(blocks, maxima[:, None], sign).view(-1)[: g.numel()].view(g.shape), maxima.view(s.shape)]
    return out


def _update_shard(f: Any, signed: Sequence[bool], g: Shard, codes: Any, scales: Any, rest: Sequence[Any]) -> list[Any]:
    """Update the moments of a unit."""
    check_on_device(g, "an 8-bit moment")
    blocks = map_of_blocks(g.spec_id, scales[0].spec_id, g.data.device)
    pairs = zip(codes, blocks.gather(scales), signed, strict=True)
    old = [decode(c.data, s, sign) for c, s, sign in pairs]
    u, *new = f(g.data, *old, *[x.data if is_box(x) else x for x in rest])
    maxima = blocks.maxima(new)
    out: list[Any] = [box_of(g.spec_id, [u])]
    for x, m, box, sign in zip(new, maxima, blocks.scatter(maxima), signed, strict=True):
        out += [box_of(g.spec_id, [encode(x, blocks.of_elements(m), sign)]), box]
    return out
