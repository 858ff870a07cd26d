"""Tables in the format of torch.distributed.pipelining, and of its visualizer."""

import csv
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule
from fzero.parallel.schedules._actions import Action, Kind

__all__ = ["ScheduleTable", "format_csv", "parse_rows"]


ScheduleTable = str | os.PathLike[str] | Mapping[int, Iterable[Any]] | Iterable[Iterable[Any]]

# messages follow from the order, and the ZeRO stage sets when ZeRO gathers and reduces; torch 2.15 writes waits, too
_SKIPPED_KINDS = (
    *("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"),
    *("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"),
)
_CELL = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse_rows(table: ScheduleTable) -> tuple[tuple[tuple[Action, ...], ...], tuple[int, ...]]:
    """Read a table, and return each rank's actions, and the rank of each stage.

    Raises:
        TypeError: if it is no table, or a row is no list of cells.
        ValueError: if a cell cannot be read, or a stage has actions on two ranks or on none.
    """
    rows = tuple([tuple(_parse_actions(row, rank)) for rank, row in enumerate(_table_cells(table))])
    rank_of_stage = dict[int, int]()
    for rank, row in enumerate(rows):
        for action in row:
            if rank_of_stage.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} has actions on ranks {rank_of_stage[action.stage]} and {rank}: {action}"
                )
    missing = [stage for stage in range(max(rank_of_stage, default=-1) + 1) if stage not in rank_of_stage]
    if missing:
        raise ValueError(f"stage {missing[0]} has no actions, but the table has stages {sorted(rank_of_stage)}")
    return rows, tuple([rank_of_stage[stage] for stage in range(len(rank_of_stage))])


def format_csv(schedule: "PipelineSchedule") -> str:
    """Write a schedule as CSV, one line per rank, as torch's `_load_csv` reads it."""
    return "".join([",".join(map(str, row)) + "\n" for row in schedule.rows])


def _table_cells(table: ScheduleTable) -> list[list[Any]]:
    """Return the cells of each rank's row."""
    if isinstance(table, os.PathLike) or (isinstance(table, str) and "\n" not in table and table.endswith(".csv")):
        table = pathlib.Path(table).read_text()
    if isinstance(table, str):
        return list(csv.reader(io.StringIO(table)))
    rows: Any = table
    if isinstance(rows, Mapping):  # torch's pipeline_order: rows by rank
        if set(rows) != {*range(len(rows))}:
            raise ValueError(f"the table has rows of {[*rows]}: expected ranks 0 to {len(rows) - 1}")
        rows = [rows[rank] for rank in range(len(rows))]
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"table={rows!r}: expected CSV with one line per rank, the path of such a file, or rows of cells"
        )
    return [_row_cells(row, rank) for rank, row in enumerate(rows)]


def _row_cells(row: Any, rank: int) -> list[Any]:
    if isinstance(row, str) or not isinstance(row, Iterable):
        raise TypeError(f"rank {rank} has the row {row!r}: expected a list of its cells, such as ['0F0', '0B0']")
    return list(row)


def _parse_actions(cells: Iterable[Any], rank: int) -> Iterator[Action]:
    for column, cell in enumerate(cells):
        text = "" if cell is None else str(cell).strip()
        pair = _PAIR.fullmatch(text)
        parts = pair[1].split(";") if pair else [text]
        for part in parts if text else []:
            action = _parse_action(part.strip(), f"rank {rank}, cell {column}, {text!r}")
            if action is not None:
                yield action


def _parse_action(text: str, label: str) -> Action | None:
    match = _CELL.fullmatch(text)
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if match and match[2] == kind and match[3]:
            return Action(kind, int(match[1]), int(match[3]))
    if match and match[2] in _SKIPPED_KINDS:
        return None
    raise ValueError(
        f"{label}: expected a stage, one of {', '.join(kinds)}, and a micro-batch, as in '0F1'; two of them as "
        f"'(0F1;3B0)OVERLAP_F_B'; or an action that is skipped ({', '.join(_SKIPPED_KINDS)})"
    )
