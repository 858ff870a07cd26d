"""tune: tabulate the configurations of a step, and find the fastest that fits."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from fzero._arguments import check_callable, check_choice, check_int
from fzero._format import format_bytes, format_seconds
from fzero._report import FigureReport
from fzero._tracebacks import api_boundary, api_boundary_with
from fzero.tuning import _table_figure, _table_views
from fzero.tuning._configured_step import MakeStep, check_bytes
from fzero.tuning._row import TableRow, row_from
from fzero.tuning._search_space import PARALLEL, Configuration, FixedSettings, TuneOptions, make_search_space
from fzero.tuning._verdicts import Verdict, verdicts
from fzero.tuning.exports import EXPORTS, Export, PlannedRun, activation_bytes
from fzero.tuning.machines import Machine, find_machine
from fzero.tuning.models import Bounds, ModelStep
from fzero.tuning.search import (
    ConfigurationPlanner,
    RowCache,
    SkippedConfiguration,
    UnplannedConfiguration,
    plan_rows,
)
from fzero.zero import STAGES

__all__ = ["BestRow", "ConfigurationTable", "tune"]

# settings that are shown only if some row has another value than this default
_AXES = {**dict.fromkeys(PARALLEL, 1), "schedule": "1f1b", "stages_per_rank": None}
_AXES |= {**dict.fromkeys(("gather", "reduce", "moments", "float8")), "compiled": False}
_SettingsFilter = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class BestRow:
    """The fastest configuration that fits.

    Attributes:
        row: the row of the configuration.
        reason: why no faster configuration was chosen.
    """

    row: TableRow
    reason: str

    @property
    def config(self) -> Configuration:
        """The configuration: the argument of `make_step`."""
        return self.row.config

    def __str__(self) -> str:
        row = self.row
        seconds = format_seconds(row.seconds)
        return f"best: {row.config}: {format_bytes(row.peak_bytes)}, {seconds} a step. {self.reason}"


@dataclass(frozen=True)
class ConfigurationTable(FigureReport):
    """Configurations of a step with their memory and time, made by `fzero.tune`. Print it, plot it, or call `best()`.

    `plot` draws peak against seconds, with the budget as a line, and the frontier.

    Attributes:
        rows: the configurations that were planned.
        skipped: configurations that were not planned: one that needs no more memory already does not fit.
        machine: the machine that the rows are planned for.
        memory: the argument `memory` of `fzero.tune`: bytes of a device, or None.
        budget_bytes: the bytes of a device that a plan may use.
        unplanned: with `max_rows`, configurations that were not planned, with what they take and hold at least.
    """

    rows: tuple[TableRow, ...]
    skipped: tuple[SkippedConfiguration, ...]
    machine: Machine
    memory: float | None
    budget_bytes: float
    unplanned: tuple[UnplannedConfiguration, ...] = ()

    @property
    def left_out(self) -> list[UnplannedConfiguration]:
        """The configurations of `unplanned` that may fit and may be faster than the best row, by their bounds."""
        fastest = self.fitting[0].seconds if self.fitting else math.inf
        return [x for x in self.unplanned if x.bounds.bytes <= self.budget_bytes and x.bounds.seconds < fastest]

    @property
    def fitting(self) -> list[TableRow]:
        """The rows that fit, the fastest first."""
        return _sort_by_time([r for r in self.rows if r.peak_bytes <= self.budget_bytes])

    @property
    def too_large(self) -> list[TableRow]:
        """The rows that do not fit, the smallest first."""
        return sorted(
            [r for r in self.rows if r.peak_bytes > self.budget_bytes], key=lambda r: (r.peak_bytes, r.seconds)
        )

    @property
    def frontier(self) -> list[TableRow]:
        """The Pareto frontier: rows to which no other row is both faster and smaller. The fastest is first."""
        rows: list[TableRow] = []
        for row in _sort_by_time(self.rows):
            if not rows or row.peak_bytes < rows[-1].peak_bytes:
                rows.append(row)
        return rows

    def best(self) -> BestRow:
        """Return the fastest configuration that fits, and why no faster one was chosen.

        Raises:
            ValueError: if none fits. The message shows the smallest one, and settings that would need less memory.
        """
        if not self.fitting:
            raise ValueError(self._explain_no_fit())
        row = self.fitting[0]
        faster = [r for r in self.too_large if r.seconds < row.seconds]
        if not faster:
            return BestRow(row, "No planned configuration is faster")
        excess, largest = faster[0].peak_bytes - self.budget_bytes, _largest_kind(faster[0])
        return BestRow(
            row,
            f"Of {len(faster)} faster configurations that do not fit, the smallest, {faster[0].config}, is "
            f"{format_bytes(excess)} too large: it holds {largest}",
        )

    def rules(self) -> list[Verdict]:
        """Return the verdict of each expert rule on the best configuration; an empty list if nothing fits."""
        fitting = self.fitting
        return verdicts(fitting[0], fitting, self.machine.ranks) if fitting else []

    @api_boundary
    def export(self, system: str, row: TableRow | None = None, make_step: MakeStep | None = None) -> Export:
        """Return a row as the configuration of another system, for those who train there.

        Args:
            system: "deepspeed", "fsdp2", "accelerate", "torchtitan" or "megatron".
            row: a row of the table; by default that of `best()`.
            make_step: the function that the table was made with. From a model by name (`model_step`) the export takes
                its sizes and its length, and plans what the system is expected to hold.

        Returns:
            An `Export`. Print it, or write its `text` into a file. Its `differences` say what the system does
            otherwise.

        Raises:
            ValueError: if the system is unknown, or if no row is given and none fits.

        Example:
            >>> import fzero
            >>> from fzero import tuning
            >>> make_step = tuning.model_step("gpt2", length=1024)
            >>> dims = {"stages": (2,), "micro_batches": (4,), "remat": (False,), "depth": 2}
            >>> table = fzero.tune(make_step, world_size=8, global_batch=64, machine="h100", **dims)
            >>> export = table.export("deepspeed", make_step=make_step)
            >>> for line in (export.filename, *export.differences):
            ...     print(line)
            ds_config.json
            DeepSpeed is expected to hold 4.0 GB on a device, where fzero holds 2.9 GB: it fits.
            Gradients are summed in bfloat16; the row sums them in float32.
        """
        check_choice("system", system, tuple(EXPORTS))
        run = PlannedRun(row or self.best().row, self.machine, budget_bytes=self.budget_bytes)
        if isinstance(make_step, ModelStep):
            activations = partial(activation_bytes, make_step, self.machine)
            run = replace(run, shape=make_step.shape, length=make_step.length, activations=activations)
        return EXPORTS[system](run)

    def _explain_no_fit(self) -> str:
        """Explain by how much the smallest row does not fit, and which settings would need less memory."""
        row = self.too_large[0]
        c = row.config
        remedies = [
            (not STAGES[c.stage].shards_params, "stage 3"),
            (c.remat is not True, "remat=True"),
            (c.micro_batch > 1, "a smaller micro-batch"),
            (c.precision == "float32", 'precision "bfloat16"'),
            (c.offload < 1, "offload of more of the state"),
            (c.tp == 1, "tp=2, so that ranks share each matrix"),
            (c.cp == 1, "cp=2, so that ranks share each sequence"),
            (c.pp == 1, "pp=2, a pipeline"),
            (True, "more ranks"),
        ]
        parts = ", ".join([f"{format_bytes(n)} of {kind}" for kind, n in _bytes_by_kind(row)[:3]])
        return (
            f"no configuration fits {format_bytes(self.budget_bytes)}: the smallest, {c}, takes "
            f"{format_bytes(row.peak_bytes)}, {format_bytes(row.peak_bytes - self.budget_bytes)} too much: {parts}. "
            f"Try {', or '.join([x for y, x in remedies if y])}"
        )

    def __repr__(self) -> str:
        return f"ConfigurationTable({len(self.rows)} configurations for {self.machine.name}, {len(self.fitting)} fit)"

    def __str__(self) -> str:
        return _table_views.table_text(self)

    def __rich__(self) -> Any:
        return _table_views.render(self)

    _caption = "peak against seconds"

    def _draw_figure(self) -> Any:
        return _table_figure.draw(self)

    def records(self) -> list[dict[str, Any]]:
        """List the rows as flat dictionaries: the records that `to_csv` writes."""
        return [_row_record(row, self.budget_bytes, self._select_settings) for row in [*self.fitting, *self.too_large]]

    @property
    def _select_settings(self) -> _SettingsFilter:
        """Return a function that drops the axes that no configuration uses from a dict of settings."""
        configs = [x.config for x in (*self.rows, *self.skipped, *self.unplanned)]
        axes = {name for name, default in _AXES.items() if any(getattr(c, name) != default for c in configs)}
        return lambda settings: {k: v for k, v in settings.items() if k not in _AXES or k in axes}

    def to_csv(self) -> str:
        """Return the rows as CSV: rows that fit come first, the fastest at the top."""
        records, out = self.records(), io.StringIO()
        names = list(dict.fromkeys([name for record in records for name in record]))
        writer = csv.DictWriter(out, names, restval=0, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return out.getvalue()

    def to_json(self) -> str:
        """Return the table as JSON, with the machine's constants and the skipped configurations."""
        head = {"machine": asdict(self.machine), "memory": self.memory, "budget": self.budget_bytes}
        select = self._select_settings
        skipped = [{name: select(asdict(c)) for name, c in s._asdict().items()} for s in self.skipped]
        best = {"config": select(asdict(self.best().config)), "reason": self.best().reason} if self.fitting else None
        rows = [{**r.record(), "config": select(asdict(r.config))} for r in self.rows]
        unplanned = [{"config": select(asdict(x.config)), **x.bounds._asdict()} for x in self.unplanned]
        return json.dumps({**head, "best": best, "rows": rows, "skipped": skipped, "unplanned": unplanned})

    @classmethod
    def from_json(cls, text: str) -> "ConfigurationTable":
        """Read a table that `to_json` wrote.

        Raises:
            ValueError: if the text is not such a table.
        """
        try:
            data = json.loads(text)
            rows = [row_from(r) for r in data["rows"]]
            skipped = [
                SkippedConfiguration(Configuration(**s["config"]), Configuration(**s["smaller"]))
                for s in data["skipped"]
            ]
            unplanned = [
                UnplannedConfiguration(Configuration(**x["config"]), Bounds(x["seconds"], x["bytes"]))
                for x in data.get("unplanned", ())
            ]
            machine = Machine(**data["machine"])
            return cls(tuple(rows), tuple(skipped), machine, data["memory"], data["budget"], tuple(unplanned))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"expected the JSON of a table of fzero.tune, got {text[:60]!r}: {error}") from error


def _sort_by_time(rows: Iterable[TableRow]) -> list[TableRow]:
    return sorted(rows, key=lambda r: (r.seconds, r.peak_bytes))


def _bytes_by_kind(row: TableRow) -> list[tuple[str, float]]:
    return sorted(row.device_bytes.items(), key=lambda item: -item[1])


def _largest_kind(row: TableRow) -> str:
    kind, size = _bytes_by_kind(row)[0]
    return f"{format_bytes(size)} of {kind}"


def _row_record(row: TableRow, budget_bytes: float, select: _SettingsFilter) -> dict[str, Any]:
    return {
        **select(asdict(row.config)),
        "peak_bytes": row.peak_bytes,
        "over_bytes": max(row.peak_bytes - budget_bytes, 0),
        "seconds": row.seconds,
        "host_bytes": row.host_bytes,
        "flops": row.flops,
        "in_full": row.in_full,
        **{f"{kind} bytes": n for kind, n in row.device_bytes.items()},
        **{f"moved over {axis or '(unnamed)'}": n for axis, n in row.traffic_bytes.items()},
    }


# the share of a GPU's memory for its context, the communication library's buffers, and fragmentation
_GPU_MARGIN = 0.07


@api_boundary_with('for example, fzero.tune(make_step, world_size=8, global_batch=64, machine="h100")')
def tune(
    make_step: MakeStep,
    *,
    world_size: int,
    global_batch: int,
    machine: str | Machine,
    memory: float | None = None,
    margin: float | None = None,
    stages: Sequence[int] = tuple(range(len(STAGES))),
    micro_batches: Sequence[int] | None = None,
    remat: Sequence[bool | str] = (False, "matmuls", True),
    precision: Sequence[str] = ("bfloat16",),
    offload: Sequence[float] = (0.0,),
    ep: Sequence[int] = (1,),
    tp: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    cp: Sequence[int] = (1,),
    host: Sequence[int] = (1,),
    schedule: Sequence[str] = ("1f1b",),
    axis_bandwidths: Mapping[str, float] | None = None,
    depth: int | None = None,
    chunked_loss: bool = False,
    gather: str | None = None,
    reduce: str | None = None,
    moments: Literal["int8", "bfloat16"] | None = None,
    float8: Literal["tensorwise", "rowwise"] | None = None,
    compiled: bool = False,
    max_rows: int | None = None,
    workers: int = 1,
    cache: bool = True,
    on_result: Callable[[TableRow | SkippedConfiguration], None] | None = None,
) -> ConfigurationTable:
    """Plan a step in each configuration, and tabulate which fit, what memory they need, and how fast they are.

    Nothing runs, nothing is allocated, and no GPU is needed. Seconds are estimates by the cost model. A configuration
    that surely holds no less than another that does not fit is skipped. With `depth`, a model of many blocks is
    extrapolated from two models of few blocks where a third confirms the line, and else planned in full. The best three
    configurations, and those that may be as good, are planned in full, too.

    Args:
        make_step: a function from a `Configuration` to `(step, *args)`, the arguments of `fzero.plan`: the step on
            `fzero.mesh(**config.axes)`, and its arguments as meta tensors. It may return a `fzero.graph.Plan`.
        world_size: the number of all ranks. `world_size / (cp * tp * pp)` of them are data-parallel.
        global_batch: samples of one step, over all ranks.
        machine: "a100", "h100", "h200", "cpu", "calibrated", or a `Machine` of your measurements.
        memory: bytes of a device; by default the machine's `device_bytes`.
        margin: the share of `memory` that plans do not count: a GPU's context, the communication library's buffers,
            fragmentation. By default 0.07 on a GPU, and 0 on a CPU.
        stages: stages of ZeRO.
        micro_batches: sizes of a rank's micro-batch; by default 1, 2, 4, 8 and 16, as far as they divide.
        remat: what blocks recompute in the backward pass: False for nothing, "matmuls" for all but matrix products,
            "every-2" for all of every second block (no pipelines), True for all.
        precision: dtypes of parameters: "float32", "bfloat16", "float16".
        offload: shares of the optimizer state on the host.
        ep: sizes of the axis over which experts are split, within the data-parallel ranks.
        tp: sizes of the axis along which each rank holds part of every matrix. Combinations of axes that do not make up
            the world are left out.
        pp: sizes of the axis of a pipeline. It runs as many micro-batches as `accumulation`.
        cp: sizes of the axis along which each rank holds part of the tokens of every sequence. Parameters and state are
            sharded over it too.
        host: sizes of the axis of hosts, such as `(1, 8)`. With more than 1, at stages 1 to 3 without ep, cp and pp, a
            unit passes the link between hosts once a step: `fzero.shard(axis=("dp", "host"))`.
        schedule: names in the table of `fzero.parallel.schedules.schedule`, such as "1f1b" and "zb". "interleaved:4"
            has four stages on a rank, in place of the fewest that the schedule takes.
        axis_bandwidths: bytes a second that a device sends along an axis of the mesh, such as `{"dp": 40e9}`. By
            default they follow from the machine.
        depth: the number of blocks. With it, `make_step` must build `config.depth` blocks. Every second block may be of
            another kind. If all are alike, give `make_step` a true attribute `blocks_alike`: rows then take less time.
        chunked_loss: the `chunked_loss` of all configurations. With it, models by name compute their loss by
            `fzero.nn.linear_cross_entropy`, without logits as a whole.
        gather: the codec by which all configurations gather parameters, the name of a function of `fzero.codecs` such
            as "int8"; by default they are sent in their own dtype. `config.policy` has it, as it has `reduce`.
        reduce: the codec by which gradients are summed over ranks; by default they are sent in float32.
        moments: "int8" or "bfloat16", which models by name then have: `moments=` of `optim.adamw`.
        float8: "tensorwise" or "rowwise". With it, the linear layers of blocks of models by name multiply in float8, by
            `fzero.nn.float8_linear` of this scaling. Routers, experts, heads and embeddings keep their dtype.
        compiled: whether seconds are those of the kernels that Inductor makes of a step of the default backend. What it
            may fuse is one kernel, and no value within a kernel is written or read. Nothing is compiled.
        max_rows: the number of configurations to plan. Those come first whose steps have the least bound of seconds, by
            formulas; the search ends early when no other can be faster. Only models by name have bounds. By default all
            are planned.
        on_result: called with each row as soon as it is planned, and with each configuration that is skipped.
        cache: whether rows are read from the user's cache folder, and stored there. This needs an attribute `cache_key`
            of `make_step`: a string that covers all that its steps depend on. The result of `model_step` has one.
        workers: the number of processes to plan on. They are forked, so call this before the process uses a GPU.

    Returns:
        A `ConfigurationTable`. Print it, plot it, or call its `best()`.

    Raises:
        TypeError: if `make_step` is no such function, or `machine` no machine.
        ValueError: if a dimension does not take a value, a batch does not divide, axes do not make up the world, or a
            machine is unknown. Also if the step's mesh lacks an axis of its configuration.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> def make_step(config):
        ...     opt = optim.master_weights(optim.adam(1e-3), config.policy)
        ...     opt = optim.offload(opt, config.offload)
        ...
        ...     def loss_fn(params, x):
        ...         for p in params["blocks"]:
        ...             x = torch.tanh(x @ p["w"])
        ...         return x.float().square().mean()
        ...
        ...     def train_step(params, opt_state, x):
        ...         take = fzero.value_and_grad(loss_fn, precision=config.policy, micro_batches=config.accumulation)
        ...         loss, grads = take(params, x)
        ...         updates, opt_state = opt.update(grads, opt_state, params)
        ...         return optim.apply_updates(params, updates), opt_state, loss
        ...
        ...     step = fzero.shard(train_step, stage=config.stage, mesh=fzero.mesh(dp=config.ranks))
        ...     with torch.device("meta"):
        ...         params = {"blocks": [{"w": torch.zeros(4096, 4096)} for _ in range(config.depth)]}
        ...         x = torch.zeros(config.global_batch, 4096, dtype=torch.bfloat16)
        ...     return step, *step.init(params, opt), step.mesh.split(x)
        >>> options = {"world_size": 64, "global_batch": 64 * 8192, "machine": "h100", "depth": 24}
        >>> dims = {"stages": (1, 3), "micro_batches": (8192,), "remat": (False,)}
        >>> print(fzero.tune(make_step, **options, memory=3e9, **dims).best().config)
        stage 3, micro-batch 8192 x 1, bfloat16
    """
    machine = find_machine(machine)
    machine = replace(machine, axis_bandwidths=tuple((axis_bandwidths or {}).items()) or machine.axis_bandwidths)
    check_choice("chunked_loss", chunked_loss, (False, True))
    check_choice("compiled", compiled, (False, True))
    fixed = FixedSettings(
        chunked_loss=chunked_loss, gather=gather, reduce=reduce, moments=moments, float8=float8, compiled=compiled
    )
    options = TuneOptions(
        world_size=world_size,
        global_batch=global_batch,
        stages=stages,
        micro_batches=micro_batches,
        remat=remat,
        precision=precision,
        offload=offload,
        ep=ep,
        tp=tp,
        pp=pp,
        schedule=schedule,
        depth=depth,
        fixed=fixed,
        cp=cp,
        host=host,
    )
    space = make_search_space(options)
    if margin is not None and not (isinstance(margin, int | float) and 0 <= margin < 1):
        raise ValueError(f"margin={margin!r}: expected a share of the memory, from 0 to less than 1")
    check_int("workers", workers)
    if on_result is not None:
        check_callable("on_result", on_result, "a function of a row")
    bounds_of = None if max_rows is None else _make_bounds(make_step, machine, check_int("max_rows", max_rows))
    budget_bytes = _compute_budget(machine, memory, margin)
    key = getattr(make_step, "cache_key", None) if cache else None
    planner = ConfigurationPlanner(make_step, machine, None if key is None else RowCache(key, machine))
    rows, skipped, unplanned = plan_rows(
        space, planner, budget_bytes, workers=workers, bounds_of=bounds_of, max_rows=max_rows, on_result=on_result
    )
    return ConfigurationTable(
        rows=tuple(rows),
        skipped=tuple(skipped),
        machine=machine,
        memory=memory,
        budget_bytes=budget_bytes,
        unplanned=tuple(unplanned),
    )


def _make_bounds(make_step: Any, machine: Machine, max_rows: int) -> Callable[[Configuration], Bounds]:
    """Return the function from a configuration to its bounds.

    Raises:
        ValueError: if the step has none: then no configuration is known to be slower than another.
    """
    if isinstance(make_step, ModelStep):
        return partial(make_step.bounds, machine=machine)
    raise ValueError(
        f"max_rows={max_rows}: only models by name, from fzero.tuning.model_step, have bounds of their time: leave "
        "max_rows out, or give fewer values of each dimension"
    )


def _compute_budget(machine: Machine, memory: float | None, margin: float | None) -> float:
    """Return the bytes that a plan may use.

    Raises:
        ValueError: if `memory` is not a positive number of bytes.
    """
    if memory is None:
        return machine.device_bytes * (1 - (margin or 0))
    default = _GPU_MARGIN if machine.kind == "cuda" else 0.0
    return check_bytes("memory", memory) * (1 - (default if margin is None else margin))
