"""Configurations of a step: the dimensions over which `fzero.tune` looks, as data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from fzero.optim import Precision
from fzero.parallel.schedules import NAMES

__all__ = ["Configuration", "Dimensions", "Space", "space_of"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REMATS = (False, "matmuls", True)  # from the most that is kept for the backward pass to the least
USUAL = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Configuration:
    """How one step is to be made: what `fzero.tune` hands to `make_step`.

    Attributes:
        stage: of ZeRO, 0 to 3.
        micro_batch: samples that a rank differentiates at once.
        accumulation: micro-batches of a rank in one step: `micro_batches=` of `fzero.value_and_grad`, or, of a
            pipeline, of `fzero.pipeline`.
        remat: what blocks run again for the backward pass: nothing, all but "matmuls", or all.
        precision: the dtype of parameters: "float32", "bfloat16" or "float16".
        offload: the share of the optimizer's state on the host: the ratio of `optim.offload`.
        ranks: data-parallel ranks.
        depth: how many blocks to make; None where `fzero.tune` was given no depth.
        ep: the size of the mesh's axis that experts are split over, within the data-parallel ranks.
        tp: the size of the mesh's axis along which each rank has a part of every matrix.
        pp: the size of the mesh's axis along which the stages of a pipeline lie.
        schedule: of a pipeline, by its name.

    Example:
        >>> import fzero
        >>> config = fzero.tuning.Configuration(stage=1, micro_batch=1, accumulation=16, ranks=4, tp=2, pp=2)
        >>> fzero.mesh(**config.axes), config.world, config.global_batch
        (Mesh(pp=2, dp=4, tp=2, simulated), 16, 64)
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
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"

    @property
    def global_batch(self) -> int:
        """Samples of one step, over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def world(self) -> int:
        """All ranks: the data-parallel ones, times those along `tp` and `pp`."""
        return self.ranks * self.tp * self.pp

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh, for `fzero.mesh(**config.axes)`: ranks along the last are neighbours in a machine."""
        own = {"pp": self.pp, "dp": self.ranks // self.ep, "ep": self.ep, "tp": self.tp}
        return {name: n for name, n in own.items() if n > 1 or name == "dp"}

    @property
    def mean(self) -> tuple[str, ...]:
        """The axes of the mean, for `fzero.shard(axis=)`: those of the data, and that of a pipeline."""
        return tuple([name for name in ("dp", "ep", "pp") if name in self.axes])

    @property
    def pipeline_stages(self) -> int:
        """How many stages of a pipeline a rank holds: `stages=` of `fzero.pipeline`."""
        return max(NAMES[self.schedule].least, 1)

    @property
    def policy(self) -> Precision:
        """The precision as `fzero.value_and_grad` and `optim.master_weights` take it."""
        return Precision(param=DTYPES[self.precision])

    def __str__(self) -> str:
        said = [f"stage {self.stage}", f"micro-batch {self.micro_batch} x {self.accumulation}", self.precision]
        said += [] if self.remat is False else ["remat" if self.remat is True else f"remat but {self.remat}"]
        said += [f"offload {self.offload:g}"] if self.offload else []
        said += [f"{name} {n}" for name, n in (("ep", self.ep), ("tp", self.tp)) if n > 1]
        return ", ".join([*said, *([f"pp {self.pp} by {self.schedule}"] if self.pp > 1 else [])])

    def holds_no_less_than(self, other: "Configuration") -> bool:
        """Return whether a rank surely holds no fewer parameters, states and activations than that of another."""
        return (
            (self.precision, self.depth, self._places) == (other.precision, other.depth, other._places)
            and self.stage <= other.stage
            and self.micro_batch >= other.micro_batch
            and REMATS.index(self.remat) <= REMATS.index(other.remat)
            and self.offload <= other.offload
        )

    @property
    def _places(self) -> "Places":
        return Places(self.ranks, self.ep, self.tp, self.pp, self.schedule)


class Places(NamedTuple):
    """How ranks are laid out, in the words of `Configuration`."""

    ranks: int
    ep: int
    tp: int
    pp: int
    schedule: str


class Dimensions(NamedTuple):
    """The dimensions of a search as they were given, in the words of `fzero.tune`."""

    world_size: int
    global_batch: int
    stages: Sequence[int]
    micro_batches: Sequence[int] | None
    remat: Sequence[bool | str]
    precision: Sequence[str]
    offload: Sequence[float]
    ep: Sequence[int] = (1,)
    tp: Sequence[int] = (1,)
    pp: Sequence[int] = (1,)
    schedule: Sequence[str] = ("1f1b",)
    depth: int | None = None


@dataclass(frozen=True)
class Space:
    """The values of each dimension, checked.

    Attributes:
        stages: of ZeRO.
        micro_batches: samples that a rank differentiates at once; each layout has those that divide.
        remat: as of `Configuration`.
        precision: likewise.
        offload: likewise.
        places: the layouts of the ranks.
        global_batch: samples of one step.
        depth: the number of blocks, if it is known.
    """

    stages: tuple[int, ...]
    micro_batches: tuple[int, ...]
    remat: tuple[bool | str, ...]
    precision: tuple[str, ...]
    offload: tuple[float, ...]
    places: tuple[Places, ...]
    global_batch: int
    depth: int | None

    def __iter__(self) -> Iterator[Configuration]:
        """List the configurations, those that hold least first."""
        lean = (
            sorted(self.micro_batches),
            sorted(self.remat, key=REMATS.index, reverse=True),
            sorted(self.stages, reverse=True),
            sorted(self.offload, reverse=True),
            self.precision,
            sorted(self.places, key=lambda x: (x.tp * x.pp, x.tp, x.ep), reverse=True),
        )
        for m, remat, stage, offload, precision, places in product(*lean):
            k, rest = divmod(self.global_batch // places.ranks, m)
            if not rest:
                yield Configuration(stage, m, k, remat, precision, offload, depth=self.depth, **places._asdict())


def space_of(asked: Dimensions) -> Space:
    """Check the dimensions of a search.

    Raises:
        ValueError: if a value is none of its dimension's, no layout of the ranks has it, or a batch does not divide.
            Names what was given.
    """
    for word in ("world_size", "global_batch", "depth"):
        if not (_counts(value := getattr(asked, word)) or (word == "depth" and value is None)):
            raise ValueError(f"{word}={value!r}: expected an int, at least 1")
    world = asked.world_size
    _checked("stages", asked.stages, lambda x: x in range(4) and type(x) is int, "of 0 to 3")
    kept = f"of {REMATS}"
    _checked("remat", asked.remat, lambda x: any(x is known or x == known == "matmuls" for known in REMATS), kept)
    _checked("precision", asked.precision, DTYPES.__contains__, f"of {', '.join(map(repr, DTYPES))}")
    _checked("offload", asked.offload, lambda x: not isinstance(x, bool) and 0 <= x <= 1, "ratios from 0 to 1")
    for word in ("ep", "tp", "pp"):
        values = getattr(asked, word)
        _checked(word, values, lambda x: _counts(x) and world % x == 0, f"that divides world_size={world}")
    _checked("schedule", asked.schedule, NAMES.__contains__, f"of {', '.join(map(repr, NAMES))}")
    own = USUAL if asked.micro_batches is None else asked.micro_batches
    _checked("micro_batches", own, _counts, "ints, at least 1")
    places = _layouts(asked)
    if asked.micro_batches is not None:
        _check_micro_batches(asked, places)
    return Space(
        stages=tuple(asked.stages),
        micro_batches=tuple(own),
        remat=tuple(asked.remat),
        precision=tuple(asked.precision),
        offload=tuple(asked.offload),
        places=tuple(places),
        global_batch=asked.global_batch,
        depth=asked.depth,
    )


def _layouts(asked: Dimensions) -> list[Places]:
    """List the layouts of the ranks. Where values do not go together, that pair is left out.

    Raises:
        ValueError: if a value goes with no other, or the batch divides over none.
    """
    world = asked.world_size
    found = []
    for ep, tp, pp, schedule in product(asked.ep, asked.tp, asked.pp, asked.schedule):
        ranks, rest = divmod(world, tp * pp)
        if not rest and ranks % ep == 0 and (pp > 1 or schedule == asked.schedule[0]):
            found.append(Places(ranks, ep, tp, pp, schedule if pp > 1 else Configuration.schedule))
    _check_each(asked, found, f"world_size={world} is no multiple of tp x pp, and of ep in what they leave")
    even = [x for x in found if asked.global_batch % x.ranks == 0]
    if not even:
        _say_which_divide(asked, found)
    _check_each(
        asked, even, f"global_batch={asked.global_batch} does not divide over the data-parallel ranks it leaves"
    )
    if asked.depth is None:
        return even
    deep = [x for x in even if x.pp == 1 or x.pp * max(NAMES[x.schedule].least, 1) <= asked.depth]
    _check_each(asked, deep, f"a model of {asked.depth} blocks has fewer than the stages of its pipeline")
    return deep


def _check_each(asked: Dimensions, places: Sequence[Places], why: str) -> None:
    """Check that each value stands in some layout.

    Raises:
        ValueError: if one does not. Says why.
    """
    for word in ("ep", "tp", "pp"):
        for value in getattr(asked, word):
            if not any(getattr(x, word) == value for x in places):
                axes = [
                    f"{w}={tuple(getattr(asked, w))}" for w in ("ep", "tp", "pp") if tuple(getattr(asked, w)) != (1,)
                ]
                raise ValueError(f"{', '.join(axes)}: no configuration has {word}={value}: {why}")


def _say_which_divide(asked: Dimensions, places: Sequence[Places]) -> None:
    """Raise the error of a batch that no layout divides."""
    least = min([x.ranks for x in places])
    local = asked.global_batch // least
    near = [f"{n * least}" for n in (local, local + 1) if n]
    over = f"world_size={asked.world_size} ranks"
    if least != asked.world_size:
        over = f"the {least} data-parallel ranks that world_size={asked.world_size} has at the least"
    raise ValueError(
        f"global_batch={asked.global_batch} does not divide over {over}: the nearest that do are {' and '.join(near)}"
    )


def _check_micro_batches(asked: Dimensions, places: Sequence[Places]) -> None:
    """Check that each micro-batch divides the samples of a rank in some layout."""
    assert asked.micro_batches is not None
    for m in asked.micro_batches:
        if all(asked.global_batch // x.ranks % m for x in places):
            ranks = min([x.ranks for x in places])
            local = asked.global_batch // ranks
            raise ValueError(
                f"micro_batches={tuple(asked.micro_batches)}: {m} does not divide the {local} samples of a rank, which "
                f"are global_batch={asked.global_batch} over {ranks} ranks; {_divisors(local)} do"
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
