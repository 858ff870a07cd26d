"""A table of configurations: what fits, which is the fastest, and why."""

import csv
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fzero._report import FigureReport
from fzero.graph import size
from fzero.tuning import _table_views
from fzero.tuning._machines import Machine
from fzero.tuning._row import Row, row_from
from fzero.tuning._rules import Verdict, verdicts
from fzero.tuning._search import Skipped
from fzero.tuning._space import Configuration

__all__ = ["Best", "Table"]

AXES = {"ep": 1, "tp": 1, "pp": 1, "schedule": "1f1b"}  # shown only if some row has another value than this default
SettingsFilter = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Best:
    """The fastest configuration that fits.

    Attributes:
        row: the row of the configuration.
        reason: why no faster configuration was chosen.
    """

    row: Row
    reason: str

    @property
    def config(self) -> Configuration:
        """The configuration: the argument of `make_step`."""
        return self.row.config

    def __str__(self) -> str:
        row = self.row
        return f"best: {row.config}: {size(row.peak_bytes)}, {_table_views.duration(row.seconds)} a step. {self.reason}"


@dataclass(frozen=True)
class Table(FigureReport):
    """Configurations of a step with their memory and time, made by `fzero.tune`. Print it, plot it, or call `best()`.

    `plot` draws peak against seconds, with the budget as a line, and the frontier.

    Attributes:
        rows: the configurations that were planned.
        skipped: configurations that were not planned: one that needs no more memory already does not fit.
        machine: the machine that the rows are planned for.
        memory: the argument `memory` of `fzero.tune`: bytes of a device, or None.
        budget: the bytes of a device that a plan may use.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    machine: Machine
    memory: float | None
    budget: float

    @property
    def fitting(self) -> list[Row]:
        """The rows that fit, the fastest first."""
        return _by_time([r for r in self.rows if r.peak_bytes <= self.budget])

    @property
    def too_large(self) -> list[Row]:
        """The rows that do not fit, the smallest first."""
        return sorted([r for r in self.rows if r.peak_bytes > self.budget], key=lambda r: (r.peak_bytes, r.seconds))

    @property
    def frontier(self) -> list[Row]:
        """The Pareto frontier: rows to which no other row is both faster and smaller. The fastest is first."""
        rows: list[Row] = []
        for row in _by_time(self.rows):
            if not rows or row.peak_bytes < rows[-1].peak_bytes:
                rows.append(row)
        return rows

    def best(self) -> Best:
        """Return the fastest configuration that fits, and why no faster one was chosen.

        Raises:
            ValueError: if none fits. The message shows the smallest one, and settings that would need less memory.
        """
        if not self.fitting:
            raise ValueError(self._nothing_fits())
        row = self.fitting[0]
        faster = [r for r in self.too_large if r.seconds < row.seconds]
        if not faster:
            return Best(row, "No planned configuration is faster")
        lacks, kind = faster[0].peak_bytes - self.budget, _largest(faster[0])
        return Best(
            row,
            f"Of {len(faster)} faster configurations that do not fit, the smallest, {faster[0].config}, is "
            f"{size(lacks)} too large: it holds {kind}",
        )

    def rules(self) -> list[Verdict]:
        """Return the verdict of each expert rule on the best configuration; an empty list if nothing fits."""
        fitting = self.fitting
        return verdicts(fitting[0], fitting, self.machine.ranks) if fitting else []

    def _nothing_fits(self) -> str:
        """Explain by how much the smallest row does not fit, and which settings would need less memory."""
        row = self.too_large[0]
        c = row.config
        remedies = [
            (c.stage < 3, "stage 3"),
            (c.remat is not True, "remat=True"),
            (c.micro_batch > 1, "a smaller micro-batch"),
            (c.precision == "float32", 'precision "bfloat16"'),
            (c.offload < 1, "offload of more of the state"),
            (c.tp == 1, "tp=2, so that ranks share each matrix"),
            (c.pp == 1, "pp=2, a pipeline"),
            (True, "more ranks"),
        ]
        parts = ", ".join([f"{size(n)} of {kind}" for kind, n in _parts(row)[:3]])
        return (
            f"no configuration fits {size(self.budget)}: the smallest, {c}, takes {size(row.peak_bytes)}, "
            f"{size(row.peak_bytes - self.budget)} too much: {parts}. Try {', or '.join([x for y, x in remedies if y])}"
        )

    def __repr__(self) -> str:
        return f"Table({len(self.rows)} configurations for {self.machine.name}, {len(self.fitting)} fit)"

    def __str__(self) -> str:
        return _table_views.text(self)

    def __rich__(self) -> Any:
        return _table_views.render(self)

    _caption = "peak against seconds"

    def _figure(self) -> Any:
        return _table_views.draw(self)

    def records(self) -> list[dict[str, Any]]:
        """List the rows as flat dictionaries: the records that `to_csv` writes."""
        return [_record(row, self.budget, self._select_settings) for row in [*self.fitting, *self.too_large]]

    @property
    def _select_settings(self) -> SettingsFilter:
        """Return a function that drops the axes that no configuration uses from a dict of settings."""
        configs = [x.config for x in (*self.rows, *self.skipped)]
        axes = {name for name, default in AXES.items() if any(getattr(c, name) != default for c in configs)}
        return lambda settings: {k: v for k, v in settings.items() if k not in AXES or k in axes}

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
        head = {"machine": asdict(self.machine), "memory": self.memory, "budget": self.budget}
        select = self._select_settings
        skipped = [{name: select(asdict(c)) for name, c in s._asdict().items()} for s in self.skipped]
        best = {"config": select(asdict(self.best().config)), "reason": self.best().reason} if self.fitting else None
        rows = [{**r.record(), "config": select(asdict(r.config))} for r in self.rows]
        return json.dumps({**head, "best": best, "rows": rows, "skipped": skipped})

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """Read a table that `to_json` wrote.

        Raises:
            ValueError: if the text is not such a table.
        """
        try:
            data = json.loads(text)
            rows = [row_from(r) for r in data["rows"]]
            skipped = [
                Skipped(Configuration(**s["config"]), Configuration(**s["as_little_as"])) for s in data["skipped"]
            ]
            return cls(tuple(rows), tuple(skipped), Machine(**data["machine"]), data["memory"], data["budget"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"expected the JSON of a table of fzero.tune, got {text[:60]!r}: {error}") from error


def _by_time(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: (r.seconds, r.peak_bytes))


def _parts(row: Row) -> list[tuple[str, float]]:
    return sorted(row.held.items(), key=lambda item: -item[1])


def _largest(row: Row) -> str:
    kind, most = _parts(row)[0]
    return f"{size(most)} of {kind}"


def _record(row: Row, budget: float, select: SettingsFilter) -> dict[str, Any]:
    return {
        **select(asdict(row.config)),
        "peak_bytes": row.peak_bytes,
        "over_bytes": max(row.peak_bytes - budget, 0),
        "seconds": row.seconds,
        "host_bytes": row.host_bytes,
        "flops": row.flops,
        "in_full": row.in_full,
        **{f"{kind} bytes": n for kind, n in row.held.items()},
        **{f"moved over {axis or '(unnamed)'}": n for axis, n in row.moved.items()},
    }
