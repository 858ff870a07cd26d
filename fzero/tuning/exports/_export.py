"""What an export is made of, and what it is: a row of a plan, and the configuration of another system."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fzero._report import Report
from fzero.tuning._machines import Machine
from fzero.tuning._models import ModelShape
from fzero.tuning._row import TableRow
from fzero.tuning._space import Configuration

__all__ = ["Export", "PlannedRun", "comment", "without"]


@dataclass(frozen=True)
class PlannedRun:
    """A row of a plan, with what is known about its model and its machine.

    Attributes:
        row: the row.
        machine: the machine that the row was planned for.
        shape: the sizes of the model; None for a model of the user's own `make_step`.
        length: the tokens of a sequence; None as for `shape`.
    """

    row: TableRow
    machine: Machine
    shape: ModelShape | None = None
    length: int | None = None

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
            where its format has comments.
    """

    system: str
    filename: str
    text: str
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return self.text.rstrip()


def comment(run: PlannedRun, system: str, differences: Sequence[str]) -> str:
    """Write the head of a file whose comments begin with `#`: the system, the row, and what is otherwise there."""
    lines = [f"{system}. Written by fzero plan.", run.title, *differences]
    return "".join([f"# {line}\n" for line in lines])


def without(config: Configuration, remedies: Mapping[str, str]) -> tuple[str, ...]:
    """List the settings of a configuration that a system does not take from its file, each with what to do instead.

    Args:
        config: the configuration.
        remedies: what to do instead, by the name of the setting: "remat", "offload", "ep", "cp", "tp", "pp",
            "chunked_loss". A setting that is left out is expressed.
    """
    values = {
        "remat": {False: "", True: "remat", "matmuls": "remat but matmuls"}[config.remat],
        "offload": f"offload {config.offload:g}" if config.offload else "",
        "ep": f"ep {config.ep}" if config.ep > 1 else "",
        "cp": f"cp {config.cp}" if config.cp > 1 else "",
        "tp": f"tp {config.tp}" if config.tp > 1 else "",
        "pp": f"pp {config.pp} by {config.schedule}" if config.pp > 1 else "",
        "chunked_loss": "chunked loss" if config.chunked_loss else "",
    }
    return tuple([f"{values[name]}: {remedy}." for name, remedy in remedies.items() if values[name]])
