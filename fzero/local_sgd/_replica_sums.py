"""Sums over replicas: their pseudo-gradients, in full precision or in the codes of a codec."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.axes import axis_names, join_axes
from fzero.codecs import Codec
from fzero.collectives import start_all_gather, start_psum, wait_tensor
from fzero.sharding import (
    PerRank,
    Shard,
    decode_shard,
    encode_shard,
    intern_parts,
    is_box,
    traced_spec,
    unit_axes,
    with_cast,
)

__all__ = ["start_sum", "wait_sum"]


class _CodedSum(NamedTuple):
    """A sum over replicas that is still encoded.

    Attributes:
        payloads: for each unit and each plain leaf, the codes of all replicas, one after the other.
        magnitudes: for each of them, the largest magnitudes of its blocks, likewise.
    """

    payloads: list[Any]
    magnitudes: list[Any]


def start_sum(values: Any, over: str, codec: Codec | None) -> Any:
    """Start to sum a tree over the replicas, in a rank program. On processes the result may be under way.

    Returns:
        A tree like `values`, or with a codec a `_CodedSum`.
    """
    if codec is None:
        return tree.map(lambda x: start_psum(x, over), values)
    coded_sum = _CodedSum([], [])
    for spec_id, x in _unit_messages(values, codec):
        payload = encode_shard(spec_id, join_axes(unit_axes(spec_id)), x.reshape(-1))
        for boxes, part in zip(coded_sum, payload, strict=True):
            pending_gather, varies = start_all_gather(part, over), traced_spec(spec_id).varies
            boxes.append(PerRank(pending_gather, varies) if varies else pending_gather)
    return coded_sum


def wait_sum(pending_sum: Any, like: Any, replicas: int, codec: Codec | None) -> Any:
    """Return the sum that `start_sum` started, in a rank program.

    Args:
        pending_sum: its result, without boxes around values that differ by rank.
        like: a tree in the layout of the sum.
        replicas: the number of replicas.
        codec: the codec.
    """
    if codec is None or not isinstance(pending_sum, _CodedSum):  # a loaded sum is decoded already
        return tree.map(wait_tensor, pending_sum)
    sums: dict[int, torch.Tensor] = {}
    for (spec_id, x), payload, magnitudes in zip(_unit_messages(like, codec), *pending_sum, strict=True):
        parts = zip(
            *[wait_tensor(y).unflatten(-1, (replicas, -1)).unbind(-2) for y in (payload, magnitudes)], strict=True
        )
        axes = join_axes(unit_axes(spec_id))
        values = [decode_shard(spec_id, axes, *part) for part in parts]
        sums[id(x)] = torch.stack(values).sum(0).view(x.shape).to(x.dtype)
    return tree.map(lambda x: sums.get(id(x), x), like)  # an empty leaf is not sent


def _unit_messages(values: Any, codec: Codec) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each unit's shard, and each distinct plain leaf, with the spec of its message."""
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    visited: set[int] = set()
    for path, entry in zip(paths, entries, strict=True):
        x = entry.data if isinstance(entry, Shard) else entry
        if not isinstance(x, torch.Tensor) or id(x) in visited or not x.numel():
            continue
        visited.add(id(x))
        spec_id = (
            entry.spec_id
            if isinstance(entry, Shard)
            else intern_parts(
                unit=path,
                sharded_over=(),
                paths=(path,),
                shapes=(tuple(x.shape),),
                dtype=x.dtype,
                reduce_grads="each",
                split=(),
                bound=axis_names(),
            )
        )
        yield with_cast(spec_id, torch.float32, torch.float32, codec.key, codec.key), x
