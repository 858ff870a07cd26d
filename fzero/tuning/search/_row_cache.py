"""Rows that were planned before, in the user's cache folder. The key of a row covers all that it depends on."""

import functools
import hashlib
import json
import pathlib
import platform
from dataclasses import asdict, dataclass

import torch

import fzero.tree
from fzero.tuning._row import TableRow, row_from
from fzero.tuning._search_space import Configuration
from fzero.tuning.machines import Machine, cache_folder, write_atomically

__all__ = ["RowCache"]


@dataclass(frozen=True)
class RowCache:
    """Reads and writes the cached rows of one step on one machine.

    Attributes:
        key: a string that covers all that the step depends on, besides the configuration.
        machine: the machine that the rows are planned for.
    """

    key: str
    machine: Machine

    def read(self, request: Configuration | TableRow) -> TableRow | None:
        """Return the cached row; None if there is none, or if it cannot be read."""
        try:
            return row_from(json.loads(self._path(request).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, request: Configuration | TableRow, row: TableRow) -> None:
        """Cache a row. Nothing is cached where the folder cannot be written, as in some containers."""
        try:
            write_atomically(self._path(request), json.dumps(row.record()))
        except OSError:
            return

    def _path(self, request: Configuration | TableRow) -> pathlib.Path:
        item = request.record() if isinstance(request, TableRow) else asdict(request)
        parts = [
            self.key,
            asdict(self.machine),
            item,
            _hash_source(),
            torch.version.__version__,
            platform.python_version(),
        ]
        name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return cache_folder() / "rows" / f"{name}.json"


@functools.cache
def _hash_source() -> str:
    """Return a hash of fzero's code. The version alone would not change while the code is edited."""
    folder = pathlib.Path(fzero.tree.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.read_bytes()!r}".encode())
    return digest.hexdigest()
