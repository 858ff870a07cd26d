"""The sizes of the mesh's axes that a model by name, the ranks and the batch allow: what "auto" stands for."""

import itertools
import math
from collections.abc import Mapping, Sequence

from fzero.tuning.models._model_names import ModelShape

__all__ = ["largest_sizes", "powers_of_two", "usable_sizes"]


def largest_sizes(shape: ModelShape, length: int, ranks_per_machine: int, depth: int) -> dict[str, int]:
    """Return the largest power of two along each axis, by the axis's name.

    Ranks along "tp" lie on one machine, and divide heads and hidden units. Ranks along "cp" hold two equal parts of
    each sequence. Ranks along "pp" hold a block at least.
    """
    common_divisor = math.gcd(shape.heads, shape.kv_heads or shape.heads, shape.mlp)
    tp = min(_power_in(common_divisor), powers_of_two(ranks_per_machine)[-1])
    return {"cp": 1 if shape.task == "image" else max(_power_in(length) // 2, 1), "tp": tp, "pp": depth}


def _power_in(n: int) -> int:
    """Return the largest power of two that divides a number."""
    return n & -n


def powers_of_two(largest: int) -> tuple[int, ...]:
    """List the powers of two up to a number."""
    return tuple([2**i for i in range(largest.bit_length())])


def usable_sizes(sizes: Mapping[str, Sequence[int]], world: int, batch: int) -> dict[str, tuple[int, ...]]:
    """Drop sizes with which no data-parallel ranks are left that divide the batch.

    Raises:
        ValueError: if no sizes are left.
    """
    usable = [
        dict(zip(sizes, values, strict=True))
        for values in itertools.product(*sizes.values())
        if world % math.prod(values) == 0 and batch % (world // math.prod(values)) == 0
    ]
    if not usable:
        raise ValueError(
            f"--batch {batch}: no sizes of the axes leave data-parallel ranks of --world {world} that divide it: give "
            "more samples, or a power of two"
        )
    return {name: tuple(sorted({x[name] for x in usable})) for name in sizes}
