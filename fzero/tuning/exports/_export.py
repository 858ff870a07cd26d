"""An export: the configuration of another system, made of a row of a plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fzero._format import format_bytes
from fzero._report import Report
from fzero.tuning._row import TableRow
from fzero.tuning._search_space import REMAT_WORDS, Configuration
from fzero.tuning.exports._peaks import ParameterCounts, StateBytes, count_parameters
from fzero.tuning.machines import Machine
from fzero.tuning.models import ModelShape

__all__ = ["Export", "PlannedRun", "applicable_lines", "expected_bytes", "make_export", "unsupported_settings"]


@dataclass(frozen=True)
class PlannedRun:
    """A row of a plan, with its machine, and its model as far as that is known.

    Attributes:
        row: the row.
        machine: the machine that the row was planned for.
        shape: the sizes of the model; None for a model of the user's own `make_step`.
        length: the tokens of a sequence; None as for `shape`.
        budget_bytes: the bytes of a device that a plan may use.
        activations: a function that returns the bytes of activations of an eager system in a configuration; None where
            the model is not known.
    """

    row: TableRow
    machine: Machine
    shape: ModelShape | None = None
    length: int | None = None
    budget_bytes: float = 0.0
    activations: Callable[[Configuration], float] | None = None

    @property
    def config(self) -> Configuration:
        """The configuration of the row."""
        return self.row.config

    @property
    def hosts(self) -> int:
        """The number of hosts that the ranks take."""
        return -(-self.config.world // self.machine.ranks)

    @property
    def title(self) -> str:
        """The row in a line."""
        c, name = self.config, f"{self.shape.name}, " if self.shape else ""
        return f"{name}{c}: {c.global_batch} samples a step on {c.world} ranks"


@dataclass(frozen=True)
class Export(Report):
    """A row of a plan as the configuration of another system. Print it, or write its `text` into a file.

    Attributes:
        system: the system and its version.
        filename: the usual name of the file.
        text: the text of the file.
        differences: what the system does otherwise than the row says, a sentence each. The text holds them as comments,
            where its format has comments. The first says what the system is expected to hold, if that is known.
        peak_bytes: the bytes that the system is expected to hold on a device; None if that is not known.
        fits: whether they are within the budget of the plan; None if they are not known.
    """

    system: str
    filename: str
    text: str
    differences: tuple[str, ...]
    peak_bytes: float | None = None
    fits: bool | None = None

    def __str__(self) -> str:
        return self.text.rstrip()


def make_export(
    run: PlannedRun,
    system: str,
    filename: str,
    body: str,
    differences: Sequence[str],
    peak: float | None = None,
    *,
    comments: bool = True,
) -> Export:
    """Make an export, whose text has the differences as comments that begin with `#`.

    Args:
        run: the run.
        system: the system and its version.
        filename: the usual name of the file.
        body: the text without its comments.
        differences: the differences of the system from the row.
        peak: the bytes that the system is expected to hold; None if that is not known.
        comments: whether the format has comments.
    """
    fits = None if peak is None else peak <= run.budget_bytes
    if peak is not None:
        differences = [_peak_expectation(run, system, peak), *differences]
    lines = [f"{system}. Written by fzero plan.", run.title, *differences]
    head = "".join([f"# {line}\n" for line in lines]) if comments else ""
    return Export(
        system=system, filename=filename, text=head + body, differences=tuple(differences), peak_bytes=peak, fits=fits
    )


def _peak_expectation(run: PlannedRun, system: str, peak: float) -> str:
    name = system.split(",")[0].split(" ")[0]
    verdict = "fits" if peak <= run.budget_bytes else f"does not fit, by {format_bytes(peak - run.budget_bytes)}"
    return (
        f"{name} is expected to hold {format_bytes(peak)} on a device, where fzero holds "
        f"{format_bytes(run.row.peak_bytes)}: it {verdict}."
    )


def expected_bytes(
    run: PlannedRun, states: Callable[[ParameterCounts, Configuration], StateBytes], config: Configuration | None = None
) -> float | None:
    """Return the bytes that a system is expected to hold at its peak; None where the model is not known.

    Args:
        run: the run.
        states: the states of the system.
        config: the configuration as the system runs it; by default that of the row.
    """
    if run.activations is None or run.shape is None:
        return None
    config = config or run.config
    return states(count_parameters(run.shape, config), config).peak(run.activations(config), config.accumulation > 1)


def applicable_lines(rows: Iterable[str | tuple[Any, str]]) -> list[str]:
    """List the lines of a table whose conditions are true, in order; a row is a line, or a condition and its line."""
    return [row if isinstance(row, str) else row[1] for row in rows if isinstance(row, str) or row[0]]


_UNSUPPORTED_DTYPES = {  # settings that no system takes from its file, and its behaviour instead
    "gather": "parameters are sent in their own dtype",
    "reduce": "gradients are sent in the dtype of the file",
    "float8": "layers multiply in the precision of the file",
    "moments": "moments are in float32, unless the program makes another optimizer",
}


def unsupported_settings(config: Configuration, remedies: Mapping[str, str]) -> tuple[str, ...]:
    """List the settings of a configuration that a system does not take from its file, each with what to do instead.

    Args:
        config: the configuration.
        remedies: what to do instead, by the name of the setting: "remat", "offload", "host", "ep", "cp", "tp", "pp",
            "chunked_loss". A setting that is left out is expressed.
    """
    values = {
        "remat": REMAT_WORDS.get(config.remat, ""),
        "offload": f"offload {config.offload:g}" if config.offload else "",
        "host": f"host {config.host}" if config.host > 1 else "",
        "ep": f"ep {config.ep}" if config.ep > 1 else "",
        "cp": f"cp {config.cp}" if config.cp > 1 else "",
        "tp": f"tp {config.tp}" if config.tp > 1 else "",
        "pp": f"pp {config.pp} by {config.schedule_setting}" if config.pp > 1 else "",
        "chunked_loss": "chunked loss" if config.chunked_loss else "",
        "compiled": "compiled" if config.compiled else "",
    }
    remedies = {
        "host": "ranks send over all hosts at once",
        **remedies,
        "compiled": "the seconds are those of compiled code, which the system must be told to run",
    }
    lines = [f"{values[name]}: {remedy}." for name, remedy in remedies.items() if values[name]]
    kinds = {name: getattr(config, name) for name in _UNSUPPORTED_DTYPES}
    return (*lines, *[f"{name} {kinds[name]}: {text}." for name, text in _UNSUPPORTED_DTYPES.items() if kinds[name]])
