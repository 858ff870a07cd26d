"""Units in fewer bits: what a unit's gathers and sums send under a precision policy with codecs.

A codec has a scale for each block of elements within a leaf. Blocks are numbered within a unit, leaf after leaf. A
rank's shard may begin and end within a block. So the ranks first agree on the largest magnitude of each block, by one
all_reduce of 4 bytes a block, and then send codes. What is sent does not depend on where shards begin, so decoded
numbers are the same on any number of ranks.

A sum of gradients has one scale for all ranks, too. So the codes of all ranks are added as integers, and the sum is
exact in any order.

The functions here compute values without derivatives. `_unit_maps.py` gives them those of the exact maps.
"""

import math
from collections.abc import Sequence

import torch

from fzero._torch.types import Tensors
from fzero.axes import Axis
from fzero.collectives import NO_AXIS, DimOptions, NoOptions, UnitOptions, UnitPartOptions, UnitSumOptions, apply
from fzero.sharding._spec import lookup_spec
from fzero.sharding.maps._coded_rows import find_codec, padded_numel, quantized_blocks, sum_payloads
from fzero.sharding.maps._flat import flatten_leaves, view_leaves
from fzero.sharding.maps._unit_dtypes import to_gradient_dtype

__all__ = ["coded_all_reduce", "coded_gather", "coded_reduce_scatter", "decode_shard", "encode_shard"]


_Options = UnitOptions | UnitPartOptions | UnitSumOptions


def _apply_row(name: str, axis: Axis, options: _Options, *xs: torch.Tensor) -> torch.Tensor:
    (y,) = apply(axis.token, name, axis.binding, options, *xs)
    return y


def _apply_row_to_part(name: str, spec_id: int, axes: Sequence[Axis], *xs: torch.Tensor) -> torch.Tensor:
    """Apply a row that depends on which part of a unit this rank has, and sends nothing."""
    first_axis, *other_axes = axes
    ranks = math.prod([a.size for a in other_axes])
    if all(a.group for a in other_axes):
        index = 0
        for a in other_axes:
            index = index * a.size + a.rank
        return _apply_row(name, first_axis, UnitPartOptions(spec_id, index, ranks), *xs)
    # under vmap an index is no number: compute what each rank would, and take this rank's
    y = torch.cat(
        [_apply_row(name, first_axis, UnitPartOptions(spec_id, index, ranks), *xs) for index in range(ranks)], -1
    )
    for a in other_axes:
        (y,) = apply(a.token, "own_part", a.binding, DimOptions(-1), y)
    return y


def _largest_magnitudes(spec_id: int, axes: Sequence[Axis], magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitudes of a unit's blocks on all ranks, from each rank's."""
    for a in reversed(axes):
        magnitudes = _apply_row("largest", a, UnitOptions(spec_id), magnitudes)
    return magnitudes


def _encode_part(spec_id: int, axes: Sequence[Axis], shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload of this rank's shard `[k]`, and the magnitudes that the ranks share."""
    x = shard.detach()
    magnitudes = _largest_magnitudes(spec_id, axes, _apply_row_to_part("own_magnitudes", spec_id, axes, x))
    return _apply_row_to_part("own_payload", spec_id, axes, x, magnitudes), magnitudes


def coded_gather(spec_id: int, axes: Sequence[Axis], shard: torch.Tensor) -> Tensors:
    """Return the decoded leaves of a unit, from this rank's shard `[k]`.

    Codes are gathered over one axis after another.
    """
    axes = axes or [NO_AXIS]
    payload, magnitudes = _encode_part(spec_id, axes, shard)
    for a in reversed(axes):
        payload = _apply_row("gather_flat", a, UnitOptions(spec_id), payload)
    of_all = UnitPartOptions(spec_id, 0, math.prod([a.size for a in axes[1:]]))
    return view_leaves(lookup_spec(spec_id), _apply_row("decoded_unit", axes[0], of_all, payload, magnitudes))


def _encode_gradients(spec_id: int, axes: Sequence[Axis], leaves: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payloads of a unit's gradient for all ranks, and the magnitudes that the ranks share."""
    spec, first_axis, unit = lookup_spec(spec_id), axes[0], UnitOptions(spec_id)
    padding = padded_numel(spec, first_axis.size) - spec.numel
    leading = leaves[0].ndim - len(spec.shapes[0])
    buffer = flatten_leaves([x.detach() for x in leaves], leading, padding)
    magnitudes = _largest_magnitudes(spec_id, axes, _apply_row("unit_magnitudes", first_axis, unit, buffer))
    return _apply_row("unit_payload", first_axis, unit, buffer, magnitudes), magnitudes


def coded_reduce_scatter(spec_id: int, axes: Sequence[Axis], leaves: Tensors) -> Tensors:
    """Return this rank's shard `[k]` of the sum of all ranks' gradients of a unit.

    Over the slowest axis ranks send codes, and over each further axis the sums so far: integers, in as few bytes as the
    largest possible sum needs. So a gradient is rounded once.
    """
    payload, magnitudes = _encode_gradients(spec_id, axes, leaves)
    sums, ranks = _apply_row("sum_of_payloads", axes[0], UnitOptions(spec_id), payload), axes[0].size
    for a in axes[1:]:
        sums = _scatter_sums(spec_id, a, ranks, sums)
        ranks *= a.size
    return [to_gradient_dtype(lookup_spec(spec_id), _apply_row_to_part("own_sum", spec_id, axes, sums, magnitudes))]


def _scatter_sums(spec_id: int, axis: Axis, ranks: int, sums: torch.Tensor) -> torch.Tensor:
    """Return this rank's part `[k]` of the sum over an axis of sums of codes `[n k]`, each a sum over `ranks` ranks."""
    if find_codec(lookup_spec(spec_id), "reduce").code_kind.is_float:
        return _apply_row("reduce_scatter_flat", axis, UnitOptions(spec_id), sums)
    options = UnitSumOptions(spec_id, ranks)
    return _apply_row("sum_of_sums", axis, options, _apply_row("part_bytes", axis, options, sums))


def coded_all_reduce(spec_id: int, axes: Sequence[Axis], leaves: Tensors) -> Tensors:
    """Return the sum of all ranks' gradients of a unit, on every rank.

    The sums of integer codes are integers. So they are gathered in as few bytes as the largest possible sum needs.
    """
    spec, (first_axis, *other_axes), unit = lookup_spec(spec_id), axes, UnitOptions(spec_id)
    in_sum = UnitSumOptions(spec_id, math.prod([a.size for a in axes]))
    payload, magnitudes = _encode_gradients(spec_id, axes, leaves)
    sums = _apply_row("sum_of_payloads", first_axis, unit, payload)
    for a in other_axes:
        (sums,) = apply(a.token, "psum", a.binding, NoOptions(), sums)
    payload = _apply_row("gather_flat", first_axis, unit, _apply_row("sum_bytes", first_axis, in_sum, sums))
    return view_leaves(spec, to_gradient_dtype(spec, _apply_row("unit_sum", first_axis, in_sum, payload, magnitudes)))


def encode_shard(spec_id: int, axes: Sequence[Axis], shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload of this rank's shard `[k]`, and this rank's part of the unit's magnitudes.

    Numbers are encoded as they would be on one rank.

    Args:
        spec_id: a unit with the codec as its `gather` and its `reduce`.
        axes: the axes over which the unit is sharded.
        shard: the shard.
    """
    axes = axes or [NO_AXIS]
    first, (payload, magnitudes) = axes[0], _encode_part(spec_id, axes, shard)
    padded = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[-1] % first.size))
    (part,) = apply(first.token, "own_part", first.binding, DimOptions(-1), padded)
    return payload, part


def decode_shard(spec_id: int, axes: Sequence[Axis], payload: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard `[k]`, float32, from the results of `encode_shard`, of this or of another replica."""
    spec, axes = lookup_spec(spec_id), axes or [NO_AXIS]
    codec = find_codec(spec, "reduce")
    (full,) = apply(axes[0].token, "all_gather", axes[0].binding, DimOptions(-1), magnitudes)
    codes = sum_payloads(payload.unsqueeze(0), codec.key, 1, spec.shard_numel)
    return _apply_row_to_part("own_sum", spec_id, axes, codes, full.narrow(-1, 0, quantized_blocks(spec, codec)))
