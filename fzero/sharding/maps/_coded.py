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
from fzero.collectives import NO_AXIS, DimOptions, NoOptions, UnitOptions, UnitSumOptions, apply
from fzero.sharding._spec import spec_of
from fzero.sharding.maps._coded_rows import codec_of, padded_numel, quantized_blocks, sum_payloads
from fzero.sharding.maps._flat import flatten_leaves, view_leaves
from fzero.sharding.maps._unit_dtypes import to_gradient_dtype

__all__ = ["coded_all_reduce", "coded_gather", "coded_reduce_scatter", "decode_shard", "encode_shard"]


def _run(name: str, axis: Axis, options: UnitOptions | UnitSumOptions, *xs: torch.Tensor) -> torch.Tensor:
    (y,) = apply(axis.token, name, axis.binding, options, *xs)
    return y


def _gather_slow_axes(axes: Sequence[Axis], shard: torch.Tensor) -> tuple[Axis, torch.Tensor]:
    """Return the axis along which codes are sent, and the shard, gathered over all other axes as it is."""
    (first, *rest), x = axes or [NO_AXIS], shard.detach()
    for a in rest[::-1]:
        (x,) = apply(a.token, "all_gather", a.binding, DimOptions(-1), x)
    return first, x


def coded_gather(spec_id: int, axes: Sequence[Axis], shard: torch.Tensor) -> Tensors:
    """Return the decoded leaves of a unit, from this rank's shard `[k]`.

    If there is no group for all axes, the shards are gathered as they are over all axes but the slowest.
    """
    first, x = _gather_slow_axes(axes, shard)
    unit = UnitOptions(spec_id)
    magnitudes = _run("largest", first, unit, _run("own_magnitudes", first, unit, x))
    payload = _run("gather_flat", first, unit, _run("own_payload", first, unit, x, magnitudes))
    return view_leaves(spec_of(spec_id), _run("decoded_unit", first, unit, payload, magnitudes))


def _encode_gradients(spec_id: int, axes: Sequence[Axis], leaves: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payloads of a unit's gradient for all ranks, and the magnitudes that the ranks share."""
    spec, first, unit = spec_of(spec_id), axes[0], UnitOptions(spec_id)
    padding = padded_numel(spec, first.size) - spec.numel
    leading = leaves[0].ndim - len(spec.shapes[0])
    buffer = flatten_leaves([x.detach() for x in leaves], leading, padding)
    magnitudes = _run("unit_magnitudes", first, unit, buffer)
    for a in axes:
        magnitudes = _run("largest", a, unit, magnitudes)
    return _run("unit_payload", first, unit, buffer, magnitudes), magnitudes


def coded_reduce_scatter(spec_id: int, axes: Sequence[Axis], leaves: Tensors) -> Tensors:
    """Return this rank's shard `[k]` of the sum of all ranks' gradients of a unit.

    If there is no group for all axes, the sums over the slowest axis are added as they are over the other axes.
    """
    (first, *rest), unit = axes, UnitOptions(spec_id)
    payload, magnitudes = _encode_gradients(spec_id, axes, leaves)
    total = _run("own_sum", first, unit, _run("sum_of_payloads", first, unit, payload), magnitudes)
    for a in rest:
        (total,) = apply(a.token, "psum_scatter", a.binding, DimOptions(-1), total)
    return [to_gradient_dtype(spec_of(spec_id), total)]


def coded_all_reduce(spec_id: int, axes: Sequence[Axis], leaves: Tensors) -> Tensors:
    """Return the sum of all ranks' gradients of a unit, on every rank.

    The sums of integer codes are integers. So they are gathered in as few bytes as the largest possible sum needs.
    """
    spec, (first, *rest), unit = spec_of(spec_id), axes, UnitOptions(spec_id)
    in_sum = UnitSumOptions(spec_id, math.prod([a.size for a in axes]))
    payload, magnitudes = _encode_gradients(spec_id, axes, leaves)
    sums = _run("sum_of_payloads", first, unit, payload)
    for a in rest:
        (sums,) = apply(a.token, "psum", a.binding, NoOptions(), sums)
    payload = _run("gather_flat", first, unit, _run("sum_bytes", first, in_sum, sums))
    return view_leaves(spec, to_gradient_dtype(spec, _run("unit_sum", first, in_sum, payload, magnitudes)))


def encode_shard(spec_id: int, axes: Sequence[Axis], shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload of this rank's shard `[k]`, and this rank's part of the unit's magnitudes.

    Numbers are encoded as they would be on one rank. If there is no group for all axes, shards are gathered as they are
    over all axes but the slowest.

    Args:
        spec_id: a unit with the codec as its `gather` and its `reduce`.
        axes: the axes over which the unit is sharded.
        shard: the shard.
    """
    first, x = _gather_slow_axes(axes, shard)
    unit = UnitOptions(spec_id)
    magnitudes = _run("largest", first, unit, _run("own_magnitudes", first, unit, x))
    payload = _run("own_payload", first, unit, x, magnitudes)
    padded = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[-1] % first.size))
    (part,) = apply(first.token, "own_part", first.binding, DimOptions(-1), padded)
    return payload, part


def decode_shard(spec_id: int, axes: Sequence[Axis], payload: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard `[k]`, float32, from the results of `encode_shard`, of this or of another replica."""
    spec, (first, *rest), unit = spec_of(spec_id), axes or [NO_AXIS], UnitOptions(spec_id)
    codec = codec_of(spec, "reduce")
    (full,) = apply(first.token, "all_gather", first.binding, DimOptions(-1), magnitudes)
    codes = sum_payloads(payload.unsqueeze(0), codec.key, 1, padded_numel(spec, first.size) // first.size)
    x = _run("own_sum", first, unit, codes, full.narrow(-1, 0, quantized_blocks(spec, codec)))
    for a in rest:
        (x,) = apply(a.token, "own_part", a.binding, DimOptions(-1), x)
    return x
