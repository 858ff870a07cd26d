"""Configurations of a step: the dimensions over which `fzero.tune` looks, as data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from fzero.precision import Precision

__all__ = ["Configuration", "Space"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REMATS = (False, "matmuls", True)  # from the most that is kept for the backward pass to the least
USUAL = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Configuration:
    """How one step is to be made: what `fzero.tune` hands to `make_step`.

    Attributes:
        stage: of ZeRO, 0 to 3.
        micro_batch: samples that a rank differentiates at once.
        accumulation: micro-batches of a rank in one step: `micro_batches=` of `fzero.value_and_grad`.
        remat: what blocks run again for the backward pass: nothing, all but "matmuls", or all.
        precision: the dtype of parameters: "float32", "bfloat16" or "float16".
        offload: the share of the optimizer's state on the host: the ratio of `optim.offload`.
        ranks: data-parallel ranks.
        depth: how many blocks to make; None where `fzero.tune` was given no depth.
        ep: the size of the mesh's axis that experts are split over: `fzero.mesh(dp=ranks // ep, ep=ep)`.
    """

    stage: int
    micro_batch: int
    accumulation: int
    remat: bool | str = False
    precision: str = "bfloat16"
    offload: float = 0.0
    ranks: int = 1
    depth: int | None = None
    ep: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one step, over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def policy(self) -> Precision:
        """The precision as `fzero.value_and_grad` and `optim.master_weights` take it."""
        return Precision(param=DTYPES[self.precision])

    def __str__(self) -> str:
        said = [f"stage {self.stage}", f"micro-batch {self.micro_batch} x {self.accumulation}", self.precision]
        said += [] if self.remat is False else ["remat" if self.remat is True else f"remat but {self.remat}"]
        said += [f"offload {self.offload:g}"] if self.offload else []
        return ", ".join([*said, *([f"ep {self.ep}"] if self.ep > 1 else [])])

    def holds_no_less_than(self, other: "Configuration") -> bool:
        """Return whether a rank surely holds no fewer parameters, states and activations than that of another."""
        return (
            (self.precision, self.ranks, self.depth, self.ep) == (other.precision, other.ranks, other.depth, other.ep)
            and self.stage <= other.stage
            and self.micro_batch >= other.micro_batch
            and REMATS.index(self.remat) <= REMATS.index(other.remat)
            and self.offload <= other.offload
        )


@dataclass(frozen=True)
class Space:
    """The values of each dimension, checked.

    Attributes:
        stages: of ZeRO.
        micro_batches: samples that a rank differentiates at once.
        remat: as of `Configuration`.
        precision: likewise.
        offload: likewise.
        ep: likewise.
        ranks: data-parallel ranks.
        local_batch: samples of a rank in one step.
        depth: the number of blocks, if it is known.
    """

    stages: tuple[int, ...]
    micro_batches: tuple[int, ...]
    remat: tuple[bool | str, ...]
    precision: tuple[str, ...]
    offload: tuple[float, ...]
    ep: tuple[int, ...]
    ranks: int
    local_batch: int
    depth: int | None

    def __iter__(self) -> Iterator[Configuration]:
        """List the configurations, those that hold least first."""
        lean = (
            sorted(self.micro_batches),
            sorted(self.remat, key=REMATS.index, reverse=True),
            sorted(self.stages, reverse=True),
            sorted(self.offload, reverse=True),
            self.precision,
            sorted(self.ep, reverse=True),
        )
        for m, remat, stage, offload, precision, ep in product(*lean):
            k = self.local_batch // m
            yield Configuration(stage, m, k, remat, precision, offload, self.ranks, self.depth, ep)


def space_of(
    world_size: int,
    global_batch: int,
    stages: Sequence[int],
    micro_batches: Sequence[int] | None,
    remat: Sequence[bool | str],
    precision: Sequence[str],
    offload: Sequence[float],
    ep: Sequence[int],
    depth: int | None,
) -> Space:
    """Check the dimensions of a search.

    Raises:
        ValueError: if a value is none of its dimension's, or a batch does not divide. Names what was given.
    """
    for word, value in (("world_size", world_size), ("global_batch", global_batch), ("depth", depth)):
        if not (_counts(value) or (word == "depth" and value is None)):
            raise ValueError(f"{word}={value!r}: expected an int, at least 1")
    local, rest = divmod(global_batch, world_size)
    if rest or not local:
        near = [f"{n * world_size}" for n in (local, local + 1) if n]
        raise ValueError(
            f"global_batch={global_batch} does not divide over world_size={world_size} ranks: the nearest that do are "
            f"{' and '.join(near)}"
        )
    _checked("stages", stages, lambda x: x in range(4) and type(x) is int, "of 0 to 3")
    _checked("remat", remat, lambda x: any(x is known or x == known == "matmuls" for known in REMATS), f"of {REMATS}")
    _checked("precision", precision, DTYPES.__contains__, f"of {', '.join(map(repr, DTYPES))}")
    _checked("offload", offload, lambda x: not isinstance(x, bool) and 0 <= x <= 1, "ratios from 0 to 1")
    _checked("ep", ep, lambda x: _counts(x) and world_size % x == 0, f"that divides world_size={world_size}")
    own = USUAL if micro_batches is None else micro_batches
    _checked("micro_batches", own, _counts, "ints, at least 1")
    even = [m for m in own if local % m == 0]
    if micro_batches is not None and len(even) < len(own):
        odd = next(m for m in own if local % m)
        raise ValueError(
            f"micro_batches={tuple(own)}: {odd} does not divide the {local} samples of a rank, which are "
            f"global_batch={global_batch} over {world_size} ranks; {_divisors(local)} do"
        )
    return Space(
        stages=tuple(stages),
        micro_batches=tuple(even),
        remat=tuple(remat),
        precision=tuple(precision),
        offload=tuple(offload),
        ep=tuple(ep),
        ranks=world_size,
        local_batch=local,
        depth=depth,
    )


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _checked(word: str, values: Any, takes: Any, said: str) -> None:
    """Check that values of a dimension are some, and each one that it takes."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{word}={values!r}: expected a tuple {said}")
    for x in values:
        try:
            known = takes(x)
        except TypeError:
            known = False
        if not known:
            raise ValueError(f"{word}={tuple(values)}: {x!r} is none {said}")
    if len(set(values)) < len(values):
        raise ValueError(f"{word}={tuple(values)}: a value stands twice")


def _divisors(n: int) -> str:
    found = [str(d) for d in range(1, n + 1) if n % d == 0]
    return ", ".join(found if len(found) < 9 else [*found[:8], "..."])
