"""Configurations of a step: the dimensions of the search of `fzero.tune`, as data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from fzero._arguments import check_choice, check_int, is_int
from fzero.codecs import CODECS
from fzero.nn import SCALINGS
from fzero.optim import Precision
from fzero.parallel.schedules import NAMES
from fzero.zero import STAGES, StageLayouts

__all__ = [
    "EVERY_SECOND",
    "PARALLEL",
    "REMATS",
    "REMAT_WORDS",
    "USUAL_REMATS",
    "Configuration",
    "FixedSettings",
    "SearchSpace",
    "TuneOptions",
    "make_search_space",
    "min_stages_of",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY_SECOND = "every-2"
REMATS = (False, "matmuls", EVERY_SECOND, True)  # about from the most residuals to the fewest
USUAL_REMATS = (False, "matmuls", True)
REMAT_WORDS = {True: "remat", "matmuls": "remat but matmuls", EVERY_SECOND: "remat every second block"}
_DEFAULT_MICRO_BATCHES = (1, 2, 4, 8, 16)
PARALLEL = ("host", "ep", "cp", "tp", "pp")  # the axes whose sizes are searched


@dataclass(frozen=True)
class Configuration:
    """The settings of one step: the argument that `fzero.tune` passes to `make_step`.

    Attributes:
        stage: the stage of ZeRO; see `fzero.shard`.
        micro_batch: samples of a micro-batch on one rank.
        accumulation: micro-batches of a rank in one step: `micro_batches=` of `fzero.value_and_grad`, or of
            `fzero.pipeline` where there is a pipeline.
        remat: what blocks recompute in the backward pass: False for nothing, "matmuls" for all but matrix products,
            "every-2" for all of every second block, True for all.
        precision: the dtype of parameters: "float32", "bfloat16" or "float16".
        offload: the share of the optimizer state on the host: the ratio of `optim.offload`.
        ranks: the number of data-parallel ranks.
        depth: how many blocks to build; None if `fzero.tune` got no depth.
        ep: the size of the mesh axis over which experts are split, within the data-parallel ranks.
        tp: the size of the mesh axis along which each rank holds part of every matrix.
        pp: the size of the mesh axis along which the stages of a pipeline lie.
        cp: the size of the mesh axis along which each rank holds part of the tokens of every sequence. Parameters and
            state are sharded over it too.
        host: the size of the mesh axis of hosts, within the data-parallel ranks. With more than 1, a unit passes the
            link between hosts once a step: `fzero.shard(axis=("dp", "host"))`.
        schedule: the name of the pipeline schedule.
        stages_per_rank: the number of pipeline stages on a rank; None for as few as the schedule takes.
        chunked_loss: whether the loss is `fzero.nn.linear_cross_entropy`, whose logits never exist as a whole.
        gather: the codec by which parameters are gathered, such as "int8"; None for their own dtype.
        reduce: the codec by which gradients are summed over ranks; None for float32.
        moments: the kind of the optimizer's moments: "int8", "bfloat16", or None for float32.
        compiled: whether seconds count elementwise operations that Inductor may fuse as one kernel.
        float8: the scaling with which blocks multiply in float8, "tensorwise" or "rowwise"; None for their own dtype.

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
    chunked_loss: bool = False
    cp: int = 1
    stages_per_rank: int | None = None
    gather: str | None = None
    reduce: str | None = None
    moments: Literal["int8", "bfloat16"] | None = None
    float8: Literal["tensorwise", "rowwise"] | None = None
    compiled: bool = False
    host: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one step, over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def world(self) -> int:
        """The number of all ranks: the data-parallel ranks times `cp`, `tp` and `pp`."""
        return self.ranks * self.cp * self.tp * self.pp

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh, for `fzero.mesh(**config.axes)`. Ranks along the last axis are neighbours in a host."""
        sizes_within_host = {"dp": self.ranks // self.ep // self.host, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        sizes = {"pp": self.pp, "host": self.host, **sizes_within_host}
        return {name: n for name, n in sizes.items() if n > 1 or name == "dp"}

    @property
    def mean(self) -> tuple[str, ...]:
        """The axes over which losses are averaged, for `fzero.shard(axis=)`: those of data, and the pipeline's."""
        return tuple([name for name in ("dp", "host", "ep", "cp", "pp") if name in self.axes])

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The axes over which the samples of a batch are split, for `mesh.split`."""
        return tuple([name for name in ("host", "dp", "ep") if name in self.axes])

    @property
    def pipeline_stages(self) -> int:
        """How many pipeline stages a rank holds: `stages_per_rank=` of `fzero.pipeline`."""
        return self.stages_per_rank or NAMES[self.schedule].min_stages

    @property
    def schedule_setting(self) -> str:
        """The schedule as `fzero.tune(schedule=)` takes it, such as "1f1b" or "interleaved:4"."""
        return self.schedule if self.stages_per_rank is None else f"{self.schedule}:{self.stages_per_rank}"

    @property
    def layout(self) -> StageLayouts:
        """The layouts of the stage."""
        return STAGES[self.stage]

    @property
    def policy(self) -> Precision:
        """The precision, for `fzero.value_and_grad` and `optim.master_weights`.

        Shards of parameters, as at stage 3, are the master weights. With offload the masters lie in the state, for the
        host's share.
        """
        gather = None if self.gather is None else CODECS[self.gather]()
        reduce = torch.float32 if self.reduce is None else CODECS[self.reduce]()
        shard = torch.float32 if self.layout.shards_params and not self.offload else None
        return Precision(param=_DTYPES[self.precision], gather=gather, reduce=reduce, shard=shard)

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", f"micro-batch {self.micro_batch} x {self.accumulation}", self.precision]
        parts += [REMAT_WORDS[self.remat]] if self.remat else []
        parts += [f"offload {self.offload:g}"] if self.offload else []
        parts += [word for word, is_on in (("chunked loss", self.chunked_loss), ("compiled", self.compiled)) if is_on]
        words = [(name, getattr(self, name)) for name in ("gather", "reduce", "moments", "float8")]
        parts += [f"{name} {kind}" for name, kind in words if kind is not None]
        parts += [f"{name} {n}" for name in ("host", "ep", "cp", "tp") if (n := getattr(self, name)) > 1]
        return ", ".join([*parts, *([f"pp {self.pp} by {self.schedule_setting}"] if self.pp > 1 else [])])

    def holds_no_less_than(self, other: "Configuration") -> bool:
        """Return whether a rank surely holds as many parameters, states and activations as with `other`, or more."""
        return (
            (self.precision, self.depth, self._fixed_settings) == (other.precision, other.depth, other._fixed_settings)
            and self._dims == other._dims
            and self.stage <= other.stage
            and self.micro_batch >= other.micro_batch
            and (self.remat == other.remat or self.remat is False or other.remat is True)
            and self.offload <= other.offload
        )

    @property
    def _fixed_settings(self) -> "FixedSettings":
        return FixedSettings(*[getattr(self, name) for name in FixedSettings._fields])

    @property
    def _dims(self) -> "_ParallelDims":
        return _ParallelDims(
            ranks=self.ranks,
            ep=self.ep,
            tp=self.tp,
            pp=self.pp,
            schedule=self.schedule,
            cp=self.cp,
            host=self.host,
            stages_per_rank=self.stages_per_rank,
        )


class _ParallelDims(NamedTuple):
    """The sizes of the axes, and the schedule of the pipeline. The fields are those of `Configuration`."""

    ranks: int
    ep: int
    tp: int
    pp: int
    schedule: str
    cp: int
    host: int
    stages_per_rank: int | None = None

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline; 1 without a pipeline."""
        return self.pp * (self.stages_per_rank or NAMES[self.schedule].min_stages) if self.pp > 1 else 1


class FixedSettings(NamedTuple):
    """The settings that all configurations of a search share. The fields are those of `Configuration`."""

    chunked_loss: bool = False
    gather: str | None = None
    reduce: str | None = None
    moments: Literal["int8", "bfloat16"] | None = None
    float8: Literal["tensorwise", "rowwise"] | None = None
    compiled: bool = False


class TuneOptions(NamedTuple):
    """The options of a search, unchecked. The fields are the arguments of `fzero.tune`."""

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
    fixed: FixedSettings = FixedSettings()
    cp: Sequence[int] = (1,)
    host: Sequence[int] = (1,)


@dataclass(frozen=True)
class SearchSpace:
    """The values of each dimension, checked.

    Attributes:
        stages: the stages of ZeRO.
        micro_batches: sizes of micro-batches; ranks use the sizes that divide their samples.
        remat: as in `Configuration`.
        precision: as in `Configuration`.
        offload: as in `Configuration`.
        parallel_dims: the sizes of the axes, and the schedule.
        global_batch: samples of one step, over all ranks.
        depth: the number of blocks; None if it is not known.
        fixed: the settings that all configurations share.
    """

    stages: tuple[int, ...]
    micro_batches: tuple[int, ...]
    remat: tuple[bool | str, ...]
    precision: tuple[str, ...]
    offload: tuple[float, ...]
    parallel_dims: tuple[_ParallelDims, ...]
    global_batch: int
    depth: int | None
    fixed: FixedSettings

    def __iter__(self) -> Iterator[Configuration]:
        """Yield the configurations, the smallest first."""
        lean = (
            sorted(self.micro_batches),
            sorted(self.remat, key=REMATS.index, reverse=True),
            sorted(self.stages, reverse=True),
            sorted(self.offload, reverse=True),
            self.precision,
            sorted(self.parallel_dims, key=lambda x: (x.tp * x.pp * x.cp, x.tp, x.cp, x.ep, -x.host), reverse=True),
        )
        for m, remat, stage, offload, precision, dims in product(*lean):
            k, remainder = divmod(self.global_batch // dims.ranks, m)
            if not remainder and (stage > 0 or dims.host == 1):
                fixed_fields = {"depth": self.depth, **self.fixed._asdict()}
                yield Configuration(
                    stage=stage,
                    micro_batch=m,
                    accumulation=k,
                    remat=remat,
                    precision=precision,
                    offload=offload,
                    **dims._asdict(),
                    **fixed_fields,
                )


def make_search_space(options: TuneOptions) -> SearchSpace:
    """Check the dimensions of a search, and return its space.

    Raises:
        ValueError: if a dimension does not take a value, no sizes of the axes allow it, or a batch does not divide. The
            message shows the value.
    """
    for word in ("world_size", "global_batch", "depth"):
        if (value := getattr(options, word)) is not None or word != "depth":
            check_int(word, value)
    world = options.world_size
    _check_values(
        "stages", options.stages, lambda x: is_int(x) and x in range(len(STAGES)), f"ints from 0 to {len(STAGES) - 1}"
    )
    remats = f"values of {REMATS}"
    _check_values("remat", options.remat, lambda x: isinstance(x, bool | str) and x in REMATS, remats)
    _check_values("precision", options.precision, _DTYPES.__contains__, f"names of {', '.join(map(repr, _DTYPES))}")
    _check_values("offload", options.offload, lambda x: not isinstance(x, bool) and 0 <= x <= 1, "ratios from 0 to 1")
    for word in PARALLEL:
        values = getattr(options, word)
        _check_values(word, values, lambda x: _is_count(x) and world % x == 0, f"ints that divide world_size={world}")
    schedules = f"names of {', '.join(map(repr, NAMES))}, and the stages of a rank as in 'interleaved:4'"
    for word in ("gather", "reduce"):
        check_choice(word, getattr(options.fixed, word), (None, *CODECS))
    check_choice("moments", options.fixed.moments, (None, "int8", "bfloat16"))
    check_choice("float8", options.fixed.float8, (None, *SCALINGS))
    _check_values("schedule", options.schedule, _is_schedule, schedules)
    micro_batches = _DEFAULT_MICRO_BATCHES if options.micro_batches is None else options.micro_batches
    _check_values("micro_batches", micro_batches, _is_count, "ints of at least 1")
    if max(options.host) > 1 and max(options.stages) == 0:
        raise ValueError(
            f"host={tuple(options.host)}, stages={tuple(options.stages)}: at stage 0 nothing is sharded over hosts: "
            "choose host=(1,), or one of the stages 1 to 3"
        )
    parallel_dims = _parallel_dims(options)
    if options.micro_batches is not None:
        _check_micro_batches(options, parallel_dims)
    return SearchSpace(
        stages=tuple(options.stages),
        micro_batches=tuple(micro_batches),
        remat=tuple(options.remat),
        precision=tuple(options.precision),
        offload=tuple(options.offload),
        parallel_dims=tuple(parallel_dims),
        global_batch=options.global_batch,
        depth=options.depth,
        fixed=options.fixed,
    )


def _parallel_dims(options: TuneOptions) -> list[_ParallelDims]:
    """List the sizes of the axes, without the combinations of values that do not fit together.

    Raises:
        ValueError: if no combination has a value, or the batch divides over none.
    """
    world = options.world_size
    parallel_dims = []
    sizes = product(options.host, options.ep, options.tp, options.pp, options.cp, options.schedule)
    for host, ep, tp, pp, cp, schedule in sizes:
        ranks, remainder = divmod(world, tp * pp * cp)
        is_even = not remainder and ranks % (ep * host) == 0
        if is_even and (host == 1 or ep == pp == cp == 1) and (pp > 1 or schedule == options.schedule[0]):
            name, stages_per_rank = _parse_schedule(schedule) if pp > 1 else (Configuration.schedule, None)
            parallel_dims.append(
                _ParallelDims(
                    ranks=ranks,
                    ep=ep,
                    tp=tp,
                    pp=pp,
                    schedule=name,
                    cp=cp,
                    host=host,
                    stages_per_rank=stages_per_rank,
                )
            )
    _check_each(
        options,
        parallel_dims,
        f"world_size={world} is not a multiple of cp x tp x pp, or the rest is not a multiple of ep x host; hosts go "
        "without ep, cp and pp",
    )
    dividing = [x for x in parallel_dims if options.global_batch % x.ranks == 0]
    if not dividing:
        _raise_indivisible(options, parallel_dims)
    _check_each(options, dividing, f"global_batch={options.global_batch} does not divide over its data-parallel ranks")
    if options.depth is None:
        return dividing
    within_depth = [x for x in dividing if x.stages <= options.depth]
    _check_each(
        options, within_depth, f"a model of {options.depth} blocks has fewer blocks than its pipeline has stages"
    )
    return within_depth


def _parse_schedule(setting: str) -> tuple[str, int | None]:
    """Return the name of a schedule, and the number of stages on a rank; None if the setting leaves it open."""
    name, _, stages = setting.partition(":")
    return name, int(stages) if stages else None


def min_stages_of(setting: str) -> int:
    """Return the number of pipeline stages that a rank has at least with a schedule such as "interleaved:4"."""
    name, stages = _parse_schedule(setting)
    return stages or (NAMES[name].min_stages if name in NAMES else 1)


def _is_schedule(setting: str) -> bool:
    name, _, stages = setting.partition(":")
    if name not in NAMES or (":" in setting and not stages.isdecimal()):
        return False
    min_stages, max_stages = NAMES[name].min_stages, NAMES[name].max_stages
    return not stages or min_stages <= int(stages) <= (max_stages or int(stages))


def _check_each(options: TuneOptions, parallel_dims: Sequence[_ParallelDims], reason: str) -> None:
    """Check that some combination has each value.

    Raises:
        ValueError: if one does not. The message gives the reason.
    """
    searched_words = [word for word in PARALLEL if tuple(getattr(options, word)) != (1,)]
    for word in searched_words:
        for value in getattr(options, word):
            if not any(getattr(x, word) == value for x in parallel_dims):
                axes = [f"{w}={tuple(getattr(options, w))}" for w in searched_words]
                raise ValueError(f"{', '.join(axes)}: no configuration has {word}={value}: {reason}")


def _raise_indivisible(options: TuneOptions, parallel_dims: Sequence[_ParallelDims]) -> None:
    """Raise the error for a batch that divides over no data-parallel ranks."""
    min_ranks = min([x.ranks for x in parallel_dims])
    local = options.global_batch // min_ranks
    nearest = [f"{n * min_ranks}" for n in (local, local + 1) if n]
    ranks_text = f"world_size={options.world_size} ranks"
    if min_ranks != options.world_size:
        ranks_text = f"the {min_ranks} data-parallel ranks that world_size={options.world_size} has at least"
    raise ValueError(
        f"global_batch={options.global_batch} does not divide over {ranks_text}: "
        f"the nearest that do are {' and '.join(nearest)}"
    )


def _check_micro_batches(options: TuneOptions, parallel_dims: Sequence[_ParallelDims]) -> None:
    """Check that each micro-batch divides the samples of a rank in some combination.

    Raises:
        ValueError: if one does not.
    """
    assert options.micro_batches is not None
    for m in options.micro_batches:
        if all(options.global_batch // x.ranks % m for x in parallel_dims):
            ranks = min([x.ranks for x in parallel_dims])
            local = options.global_batch // ranks
            raise ValueError(
                f"micro_batches={tuple(options.micro_batches)}: {m} does not divide the {local} samples of a rank, "
                f"which are global_batch={options.global_batch} over {ranks} ranks; {_show_divisors(local)} do"
            )


def _is_count(value: Any) -> bool:
    return is_int(value) and value >= 1


def _check_values(word: str, values: Any, allows: Any, expected: str) -> None:
    """Check that the values of a dimension are a sequence, not empty, allowed, and different.

    Raises:
        ValueError: if they are not.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{word}={values!r}: expected a tuple of {expected}")
    for x in values:
        try:
            is_allowed = allows(x)
        except TypeError:
            is_allowed = False
        if not is_allowed:
            raise ValueError(f"{word}={tuple(values)}: {x!r} is not allowed: expected {expected}")
    if len(set(values)) < len(values):
        raise ValueError(f"{word}={tuple(values)}: a value occurs twice; leave one out")


def _show_divisors(n: int) -> str:
    divisors = [str(d) for d in range(1, n + 1) if n % d == 0]
    return ", ".join(divisors if len(divisors) < 9 else [*divisors[:8], "..."])
