"""The actions of a pipeline's ranks, the values that they compute and need, and tables of actions as text."""

import csv
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule

__all__ = [
    "IN_FLIGHT_CHANGE",
    "KINDS",
    "Action",
    "Kind",
    "Message",
    "ScheduleTable",
    "Value",
    "format_csv",
    "inputs_of",
    "output_of",
    "parse_rows",
    "stages_on",
]

Kind = Literal["F", "B", "I", "W"]
# change of the number of passes in flight: residuals live until the weight half ends
IN_FLIGHT_CHANGE = {
    "F": 1,
    "B": -1,
    "I": 0,
    "W": -1,
}
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of a rank's work: the forward or backward pass of one pipeline stage for one micro-batch.

    It prints as in torch's tables: `2B0` is the backward pass of stage 2 for micro-batch 0.

    Attributes:
        kind: "F" for forward; "B" for a full backward pass, or one of its halves. "I" computes the gradient of the
            stage's input, and "W", at any later time, the gradient of its weights.
        stage: the pipeline stage, from 0.
        micro_batch: the micro-batch, from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        numbers = (self.stage, self.micro_batch)
        if self.kind not in KINDS or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(
                f"Action({self.kind!r}, {self.stage!r}, {self.micro_batch!r}): expected one of {', '.join(KINDS)}, a "
                "stage and a micro-batch, both ints from 0"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Value(NamedTuple):
    """A value that one action computes and another one needs.

    Attributes:
        kind: "F" for the output of a stage; "G" for the gradient of its input, which goes to the previous stage.
        stage: the stage that computes it.
        micro_batch: the micro-batch.
    """

    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """A value that one rank sends to another.

    Attributes:
        sender: the rank that computes it.
        receiver: the rank that needs it.
        kind: "F" for the output of a stage; "G" for the gradient of its input.
        stage: the stage that computes it: "F" goes to stage + 1, and "G" to stage - 1.
        micro_batch: the micro-batch.
    """

    sender: int
    receiver: int
    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


def output_of(action: Action) -> Value | None:
    """Return the value that an action computes for other actions; None for the weight half of a backward pass."""
    if action.kind == "W":
        return None
    return Value("F" if action.kind == "F" else "G", action.stage, action.micro_batch)


def stages_on(rank: int, rank_of_stage: Sequence[int]) -> list[int]:
    """List the pipeline stages that a rank holds, given the rank of each stage."""
    return [stage for stage, holder in enumerate(rank_of_stage) if holder == rank]


def inputs_of(action: Action, stages: int) -> tuple[Value, ...]:
    """Return the values that an action needs before it starts, in a pipeline of this many stages."""
    s, m = action.stage, action.micro_batch
    if action.kind == "F":
        return (Value("F", s - 1, m),) if s else ()
    if action.kind == "W":
        return (Value("G", s, m),)
    after = (Value("G", s + 1, m),) if s + 1 < stages else ()
    return (Value("F", s, m), *after)


# Tables in the format of torch.distributed.pipelining, and of its visualizer.

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
        ValueError: if a cell cannot be read, or a stage has actions on two ranks or on none.
    """
    rows = tuple([tuple(_actions(row, rank)) for rank, row in enumerate(_cells(table))])
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


def _cells(table: ScheduleTable) -> list[list[Any]]:
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
