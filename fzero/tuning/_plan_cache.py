"""Rows that were planned before, in the user's cache folder, by all that they depend on."""

import functools
import hashlib
import json
import pathlib
import platform
from dataclasses import asdict, dataclass

import torch

import fzero.tree
from fzero.tuning._cache import cache_folder, written
from fzero.tuning._machines import Machine
from fzero.tuning._row import Row, row_from
from fzero.tuning._space import Configuration

__all__ = ["PlanCache"]


@dataclass(frozen=True)
class PlanCache:
    """Reads and writes rows of one step on one machine.

    Attributes:
        key: a string that says all that the step depends on beside the configuration.
        machine: that is planned for.
    """

    key: str
    machine: Machine

    def read(self, asked: Configuration | Row) -> Row | None:
        """Return the row that was planned before; None if there is none, or none that can be read."""
        try:
            return row_from(json.loads(self._path(asked).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, asked: Configuration | Row, row: Row) -> None:
        """Keep a row. Where the folder cannot be written, as in some containers, nothing is kept."""
        try:
            written(self._path(asked), json.dumps(row.record()))
        except OSError:
            return

    def _path(self, asked: Configuration | Row) -> pathlib.Path:
        what = asked.record() if isinstance(asked, Row) else asdict(asked)
        told = [self.key, asdict(self.machine), what, _source(), torch.version.__version__, platform.python_version()]
        name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        return cache_folder() / "rows" / f"{name}.json"


@functools.cache
def _source() -> str:
    """Return what tells one state of fzero's code from another: a version alone does not while it is written."""
    folder = pathlib.Path(fzero.tree.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.read_bytes()!r}".encode())
    return found.hexdigest()
