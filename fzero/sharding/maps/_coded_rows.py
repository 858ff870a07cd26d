"""Rows of the table of collectives that send a unit as codes: what differs by rank, and what is sent."""

from typing import Any

import torch

from fzero._torch import OneNode, c10d
from fzero._torch.types import Tensors
from fzero.axes import Binding
from fzero.codecs import (
    Codec,
    CodecKey,
    codes_to_float32,
    decode_blocks,
    encode_blocks,
    largest_magnitudes,
    pack,
    scale_blocks,
    unpack,
)
from fzero.collectives import (
    COPIES,
    LinearMap,
    RankOperation,
    UnitOptions,
    UnitPartOptions,
    UnitSumOptions,
    add_rows,
    group_all_to_all,
)
from fzero.sharding._spec import Spec, lookup_spec
from fzero.sharding.elements import UnitRange, block_range

__all__ = ["find_codec", "padded_numel", "quantized_blocks", "sum_payloads"]


@OneNode
def range_magnitudes(x: torch.Tensor, lists: list[Any], blocks: int, block: int) -> torch.Tensor:
    """Return the largest magnitude of each block of a unit `[.., blocks]`, as far as this range `[.., length]` has it.

    It is 0 for blocks outside the range.
    """
    unit_range = UnitRange.from_lists(lists)
    magnitudes = largest_magnitudes(unit_range.to_blocks(x, block))
    lead = magnitudes.shape[:-1]
    before, after = unit_range.first, blocks - unit_range.first - unit_range.count
    return torch.cat([magnitudes.new_zeros((*lead, before)), magnitudes, magnitudes.new_zeros((*lead, after))], -1)


@OneNode
def encode_range(
    x: torch.Tensor, magnitudes: torch.Tensor, lists: list[Any], key: CodecKey, ranks: int
) -> torch.Tensor:
    """Return the payload of a range `[.., length]`: uint8 `[.., ranks bytes]`, one for each of `ranks` parts."""
    unit_range, codec = UnitRange.from_lists(lists), Codec(*key)
    blocks = unit_range.to_blocks(x, codec.block)
    codes = unit_range.from_blocks(encode_blocks(codec, blocks, unit_range.own(magnitudes), unit_range.first))
    return pack(codec.code_kind, codes.unflatten(-1, (ranks, -1)).contiguous()).flatten(-2)


@OneNode
def decode_unit(
    payload: torch.Tensor, magnitudes: torch.Tensor, lists: list[Any], key: CodecKey, ranks: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a unit `[.., length]` in `dtype`, from the payloads of its `ranks` parts."""
    unit_range, codec = UnitRange.from_lists(lists), Codec(*key)
    codes = unpack(codec.code_kind, payload.unflatten(-1, (ranks, -1)), unit_range.length // ranks).flatten(-2)
    values = decode_blocks(codec, unit_range.to_blocks(codes, codec.block), magnitudes)
    return unit_range.from_blocks(values).to(dtype)


@OneNode
def sum_payloads(payloads: torch.Tensor, key: CodecKey, parts: int, length: int) -> torch.Tensor:
    """Return the sum of the codes of several ranks' payloads `[n, .., parts bytes]`: float32 `[.., parts length]`."""
    kind = Codec(*key).code_kind
    return codes_to_float32(kind, unpack(kind, payloads.unflatten(-1, (parts, -1)), length).flatten(-2)).sum(0)


@OneNode
def sums_to_bytes(sums: torch.Tensor, count: int) -> torch.Tensor:
    """Return sums of integer codes `[.., k]` as bytes `[.., count k]`, since NCCL sends no int16."""
    shifted_sums = sums.to(torch.int32) + (1 << (8 * count - 1))
    return torch.cat([((shifted_sums >> (8 * i)) & 0xFF).to(torch.uint8) for i in range(count)], -1)


@OneNode
def decode_sums(payload: torch.Tensor, count: int, ranks: int) -> torch.Tensor:
    """Return the sums `[.., ranks k]`, float32, that `ranks` ranks sent as bytes `[.., ranks count k]`."""
    parts = payload.unflatten(-1, (ranks, count, -1)).to(torch.int32)
    shifted_sums = torch.stack([parts[..., i, :] << (8 * i) for i in range(count)]).sum(0)
    return (shifted_sums - (1 << (8 * count - 1))).to(torch.float32).flatten(-2)


@OneNode
def add_sums(payloads: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum, float32 `[.., k]`, of the sums that several ranks sent as bytes `[n, .., count k]`."""
    return decode_sums.f(payloads, count, 1).sum(0)


@OneNode
def decode_sum(sums: torch.Tensor, magnitudes: torch.Tensor, lists: list[Any], key: CodecKey) -> torch.Tensor:
    """Return the numbers `[.., length]`, float32, of sums of the codes of a range."""
    unit_range, codec = UnitRange.from_lists(lists), Codec(*key)
    values = scale_blocks(codec, unit_range.to_blocks(sums, codec.block), unit_range.own(magnitudes))
    return unit_range.from_blocks(values)


def quantized_blocks(spec: Spec, codec: Codec) -> int:
    return sum([codec.num_blocks(size) for size in spec.sizes])


def find_codec(spec: Spec, name: str) -> Codec:
    assert spec.cast is not None
    codec = spec.cast.gather if name == "gather" else spec.cast.reduce
    assert codec is not None
    return codec


def _rank_range(spec: Spec, codec: Codec, rank: int, ranks: int) -> UnitRange:
    k = padded_numel(spec, ranks) // ranks
    return block_range(spec.sizes, codec.block, rank * k, rank * k + k)


def _unit_range(spec: Spec, codec: Codec, ranks: int) -> UnitRange:
    return block_range(spec.sizes, codec.block, 0, padded_numel(spec, ranks))


def padded_numel(spec: Spec, ranks: int) -> int:
    """Return the number of elements of a unit, with padding to whole shards of its own ranks, or of `ranks`."""
    k = max(spec.ranks, ranks)
    return -(-spec.numel // k) * k


def _operation_by_rank(f: Any) -> RankOperation:
    """Make an operation of `f(spec, rank, ranks, *xs) -> y`, which sends nothing."""

    def run(slowest: int, n: int, options: UnitPartOptions, xs: Tensors) -> torch.Tensor:
        spec_id, index, ranks = options
        return f(lookup_spec(spec_id), slowest * ranks + index, n * ranks, *xs)

    def all_ranks(n: int, options: UnitPartOptions, xs: Tensors) -> Tensors:
        return [torch.stack([run(r, n, options, [x[r] for x in xs]) for r in range(n)])]

    def local(binding: Binding, options: UnitPartOptions, xs: Tensors) -> Tensors:
        return [run(binding.rank, binding.size, options, xs)]

    return RankOperation("", all_ranks, local)


def _operation_alike_on_ranks(f: Any) -> RankOperation:
    """Make an operation of `f(options, ranks, *xs [..]) -> y [..]`, which sends nothing and does not depend on rank."""
    return RankOperation(
        "",
        all_ranks=lambda n, options, xs: [f(options, n, *xs)],
        local=lambda binding, options, xs: [f(options, binding.size, *xs)],
    )


def _operation_on_copies(f: Any) -> RankOperation:
    """Make an operation of `f(options, ranks, *xs) -> y` on values that are equal on all ranks; it sends nothing."""
    return RankOperation(
        "",
        all_ranks=lambda n, options, xs: [f(options, n, *[x[0] for x in xs])],
        local=lambda binding, options, xs: [f(options, binding.size, *xs)],
        uniform=lambda n, options, xs: [f(options, n, *xs)],
    )


def _own_magnitudes(spec: Spec, rank: int, ranks: int, x: torch.Tensor) -> torch.Tensor:
    codec = find_codec(spec, "gather")
    return range_magnitudes(
        x, _rank_range(spec, codec, rank, ranks).as_lists(), quantized_blocks(spec, codec), codec.block
    )


def _own_payload(spec: Spec, rank: int, ranks: int, x: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    codec = find_codec(spec, "gather")
    return encode_range(x, magnitudes, _rank_range(spec, codec, rank, ranks).as_lists(), codec.key, 1)


def _decoded_unit(options: UnitPartOptions, n: int, payload: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    spec, ranks = lookup_spec(options.spec_id), n * options.ranks
    codec = find_codec(spec, "gather")
    return decode_unit(payload, magnitudes, _unit_range(spec, codec, ranks).as_lists(), codec.key, ranks, spec.dtype)


def _unit_magnitudes(options: UnitOptions, ranks: int, buffer: torch.Tensor) -> torch.Tensor:
    spec = lookup_spec(options.spec_id)
    codec = find_codec(spec, "reduce")
    return range_magnitudes(
        buffer, _unit_range(spec, codec, ranks).as_lists(), quantized_blocks(spec, codec), codec.block
    )


def _unit_payload(options: UnitOptions, ranks: int, buffer: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    spec = lookup_spec(options.spec_id)
    codec = find_codec(spec, "reduce")
    return encode_range(
        buffer, magnitudes, _unit_range(spec, codec, ranks).as_lists(), codec.key, max(spec.ranks, ranks)
    )


def _own_sum(spec: Spec, rank: int, ranks: int, sums: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    codec = find_codec(spec, "reduce")
    return decode_sum(sums, magnitudes, _rank_range(spec, codec, rank, ranks).as_lists(), codec.key)


def _unit_sum(options: UnitSumOptions, ranks: int, payload: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    spec = lookup_spec(options.spec_id)
    codec = find_codec(spec, "reduce")
    sums = payload if codec.code_kind.is_float else decode_sums(payload, _bytes_per_sum(codec, options.ranks), ranks)
    return decode_sum(sums, magnitudes, block_range(spec.sizes, codec.block, 0, spec.numel).as_lists(), codec.key)


def _sum_bytes(options: UnitSumOptions, ranks: int, sums: torch.Tensor) -> torch.Tensor:
    codec = find_codec(lookup_spec(options.spec_id), "reduce")
    return sums.clone() if codec.code_kind.is_float else sums_to_bytes(sums, _bytes_per_sum(codec, options.ranks))


def _part_bytes(options: UnitSumOptions, ranks: int, sums: torch.Tensor) -> torch.Tensor:
    count = _bytes_per_sum(find_codec(lookup_spec(options.spec_id), "reduce"), options.ranks)
    return sums_to_bytes(sums.unflatten(-1, (ranks, -1)), count).flatten(-2)


def _bytes_per_sum(codec: Codec, ranks: int) -> int:
    """Return the number of bytes that holds the sum of `ranks` integer codes."""
    largest = int(codec.code_kind.largest) * ranks
    return next(count for count in (1, 2, 3) if largest < 1 << (8 * count - 1))


def _local_largest(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    return [c10d.wait_tensor(c10d.all_reduce(xs[0].contiguous(), "max", binding.group))]


def _split_payload(payload: torch.Tensor, n: int) -> torch.Tensor:
    """Return a payload `[.., n bytes]` as the parts for the n ranks of an axis: `[n, .., bytes]`."""
    return payload.unflatten(-1, (n, -1)).movedim(-2, 0)


def _sum_ranks(spec: Spec, ranks: int, payloads: torch.Tensor) -> torch.Tensor:
    """Sum the payloads of `ranks` ranks, each for one rank's part."""
    parts = max(spec.ranks // ranks, 1)
    return sum_payloads(payloads, find_codec(spec, "reduce").key, parts, padded_numel(spec, ranks) // ranks // parts)


def _all_ranks_sum(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    return [
        torch.stack([_sum_ranks(lookup_spec(options.spec_id), n, part) for part in _split_payload(xs[0], n).unbind()])
    ]


def _local_sum(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    parts = _split_payload(xs[0], binding.size)
    return [_sum_ranks(lookup_spec(options.spec_id), binding.size, group_all_to_all(parts.contiguous(), binding))]


def _add_sums(options: UnitSumOptions, payloads: torch.Tensor) -> torch.Tensor:
    return add_sums(payloads, _bytes_per_sum(find_codec(lookup_spec(options.spec_id), "reduce"), options.ranks))


def _all_ranks_add_sums(n: int, options: UnitSumOptions, xs: Tensors) -> Tensors:
    return [torch.stack([_add_sums(options, part) for part in _split_payload(xs[0], n).unbind()])]


def _local_add_sums(binding: Binding, options: UnitSumOptions, xs: Tensors) -> Tensors:
    parts = _split_payload(xs[0], binding.size)
    return [_add_sums(options, group_all_to_all(parts.contiguous(), binding))]


def _unit_name(options: UnitOptions) -> str:
    return lookup_spec(options.spec_id).unit


_LARGEST = RankOperation("all_reduce", lambda n, options, xs: [xs[0].amax(0)], _local_largest)
_SUM = RankOperation("all_to_all", _all_ranks_sum, _local_sum)
_ADD_SUMS = RankOperation("all_to_all", _all_ranks_add_sums, _local_add_sums)


# rows without a transpose: no derivative flows through codes
add_rows(
    LinearMap("largest", _LARGEST, "", output=COPIES, unit=_unit_name),
    LinearMap("own_magnitudes", _operation_by_rank(_own_magnitudes), ""),
    LinearMap("own_payload", _operation_by_rank(_own_payload), ""),
    LinearMap("decoded_unit", _operation_on_copies(_decoded_unit), "", output=COPIES),
    LinearMap("unit_magnitudes", _operation_alike_on_ranks(_unit_magnitudes), ""),
    LinearMap("unit_payload", _operation_alike_on_ranks(_unit_payload), ""),
    LinearMap("sum_of_payloads", _SUM, "", unit=_unit_name),
    LinearMap("part_bytes", _operation_alike_on_ranks(_part_bytes), ""),
    LinearMap("sum_of_sums", _ADD_SUMS, "", unit=_unit_name),
    LinearMap("own_sum", _operation_by_rank(_own_sum), ""),
    LinearMap("sum_bytes", _operation_alike_on_ranks(_sum_bytes), ""),
    LinearMap("unit_sum", _operation_on_copies(_unit_sum), "", output=COPIES),
)
