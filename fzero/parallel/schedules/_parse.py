"""Read and write tables in the format of torch.distributed.pipelining, and of its visualizer."""

import csv
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from fzero.parallel.schedules._actions import Action, Kind

if TYPE_CHECKING:
    from fzero.parallel.schedules._schedule import Schedule

__all__ = ["Table", "csv_of", "rows_of"]

Table = str | os.PathLike[str] | Mapping[int, Iterable[Any]] | Iterable[Iterable[Any]]

# messages follow from the order, and the ZeRO stage sets when ZeRO gathers and reduces; torch 2.15 writes waits, too
SKIPPED_KINDS = (
    *("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"),
    *("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"),
)
CELL = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def rows_of(table: Table) -> tuple[tuple[tuple[Action, ...], ...], tuple[int, ...]]:
    """Read a table, and return each rank's actions, and the rank of each stage.

    Raises:
        ValueError: if a cell cannot be read, or a stage has actions on two ranks or on none.
    """
    rows = tuple([tuple(_actions(row, rank)) for rank, row in enumerate(_cells(table))])
    home = dict[int, int]()
    for rank, row in enumerate(rows):
        for action in row:
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} has actions on ranks {home[action.stage]} and {rank}: {action}")
    missing = [stage for stage in range(max(home, default=-1) + 1) if stage not in home]
    if missing:
        raise ValueError(f"stage {missing[0]} has no actions, but the table has stages {sorted(home)}")
    return rows, tuple([home[stage] for stage in range(len(home))])


def csv_of(schedule: "Schedule") -> str:
    """Write a schedule as CSV, one line per rank, as torch's `_load_csv` reads it."""
    return "".join([",".join(map(str, row)) + "\n" for row in schedule.rows])


def _cells(table: Table) -> list[list[Any]]:
    if isinstance(table, os.PathLike) or (isinstance(table, str) and "\n" not in table and table.endswith(".csv")):
        table = pathlib.Path(table).read_text()
    if isinstance(table, str):
        return list(csv.reader(io.StringIO(table)))
    rows: Any = table
    if isinstance(rows, Mapping):  # torch's pipeline_order: rows by rank
        if set(rows) != {*range(len(rows))}:
            raise ValueError(f"the table has rows of {[*rows]}: expected ranks 0 to {len(rows) - 1}")
        return [list(rows[rank]) for rank in range(len(rows))]
    return [list(row) for row in rows]


def _actions(cells: Iterable[Any], rank: int) -> Iterator[Action]:
    for column, cell in enumerate(cells):
        text = "" if cell is None else str(cell).strip()
        pair = PAIR.fullmatch(text)
        for part in pair[1].split(";") if pair else [text] if text else []:
            action = _action(part.strip(), f"rank {rank}, cell {column}, {text!r}")
            if action is not None:
                yield action


def _action(text: str, label: str) -> Action | None:
    match = CELL.fullmatch(text)
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if match and match[2] == kind and match[3]:
            return Action(kind, int(match[1]), int(match[3]))
    if match and match[2] in SKIPPED_KINDS:
        return None
    raise ValueError(
        f"{label}: expected a stage, one of {', '.join(kinds)}, and a micro-batch, as in '0F1'; two of them as "
        f"'(0F1;3B0)OVERLAP_F_B'; or an action that is skipped ({', '.join(SKIPPED_KINDS)})"
    )
