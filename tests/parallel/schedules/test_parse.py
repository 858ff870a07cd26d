"""Tables of torch's form: its own are read and checked, and its wrong one is refused by name."""

import contextlib
import io
from typing import Any

import pytest
from hypothesis import given
from torch.distributed.pipelining import schedules as torchs  # private: here alone
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from fzero.parallel.schedules import PipelineSchedule, schedule
from tests.parallel.schedules.strategies import schedules


def torch_table(name: str, ranks: int, micro_batches: int, stages: int = 1, with_comms: bool = False) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return get_schedule_ops(name, ranks, micro_batches, stages if stages > 1 else None, with_comms=with_comms)


# (ranks, micro-batches): the efficiencies of torch's tables, and what rank 0 has in flight
NAMES = {
    "GPipe": (1, {(4, 8): (0.727, 8), (8, 64): (0.901, 64)}),
    "Interleaved1F1B": (2, {(4, 8): (0.842, 11), (4, 32): (0.955, 11)}),
    "LoopedBFS": (2, {(4, 8): (0.842, 16)}),
    "InterleavedZeroBubble": (2, {(4, 8): (0.941, 8), (4, 32): (0.985, 8), (8, 64): (0.982, 16)}),
    "ZBVZeroBubble": (2, {(4, 8): (0.941, 8), (4, 32): (0.985, 8), (8, 64): (0.982, 16)}),
    "DualPipeV": (2, {(4, 8): (0.941, 9), (4, 32): (0.985, 9), (8, 64): (0.982, 17)}),
}


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_torch_are_parsed_with_their_efficiency(name):
    stages, expected = NAMES[name]
    for (ranks, micro_batches), (efficiency, in_flight) in expected.items():
        read = PipelineSchedule.parse(torch_table(name, ranks, micro_batches, stages), name)
        assert (read.ranks, read.stages, read.micro_batches) == (ranks, ranks * stages, micro_batches)
        assert (round(read.timing().efficiency, 3), read.in_flight(0)) == (efficiency, in_flight)


@pytest.mark.parametrize(
    "name,ours", [("Interleaved1F1B", "interleaved"), ("InterleavedZeroBubble", "zb"), ("ZBVZeroBubble", "zbv")]
)
def test_named_schedules_have_torchs_orders(name, ours):
    for ranks, micro_batches in ((2, 4), (4, 8), (3, 9)):
        read = PipelineSchedule.parse(torch_table(name, ranks, micro_batches, 2), ours)
        assert read == schedule(ours, ranks, micro_batches, 2)


def test_messages_in_a_table_of_torch_are_those_that_fzero_derives():
    table = torch_table("InterleavedZeroBubble", 4, 8, 2, with_comms=True)
    read = PipelineSchedule.parse(table)
    assert read == PipelineSchedule.parse(torch_table("InterleavedZeroBubble", 4, 8, 2))
    sends = {str(a) for row in table for a in row if "SEND" in str(a) and "WAIT" not in str(a)}
    assert sends == {f"{s}SEND_{'F' if kind == 'F' else 'B'}{m}" for _, _, kind, s, m in read.messages}


def test_the_deadlocking_1f1b_of_torch_is_refused_by_name():
    table = torch_table("1F1B", 4, 8)
    with pytest.raises(ValueError, match=r"3F0, .* missing on rank 3.* 1 to 8 in place of 0 to 7, as torch 2.13's own"):
        PipelineSchedule.parse(table)


def test_torch_reads_the_csv_of_a_schedule():
    schedule_ = schedule("zbv", 3, 5, 2)
    rows = [[torchs._Action.from_str(cell) for cell in line.split(",")] for line in schedule_.to_csv().splitlines()]
    assert PipelineSchedule.parse(rows, "zbv") == schedule_


@given(schedules())
def test_a_table_written_and_read_is_the_same(schedule_):
    assert PipelineSchedule.parse(schedule_.to_csv(), "greedy") == schedule_


def test_a_table_is_rows_or_a_dict_or_a_text_or_a_file(tmp_path):
    schedule_ = schedule("1f1b", 2, 3)
    cells = [[str(a) for a in row] for row in schedule_.rows]
    (tmp_path / "table.csv").write_text(schedule_.to_csv())
    tables = [cells, dict(enumerate(cells)), schedule_.to_csv(), tmp_path / "table.csv", str(tmp_path / "table.csv")]
    assert all(PipelineSchedule.parse(table, "1f1b") == schedule_ for table in tables)


def test_overlapped_actions_of_torch_are_parsed_in_sequence():
    read = PipelineSchedule.parse("0F0,(0F1;0B0)OVERLAP_F_B,0UNSHARD, 0B1 ,0REDUCE_GRAD")
    assert [str(a) for a in read.rows[0]] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    "table,words",
    [
        ("0F0,0X0", r"rank 0, cell 1, '0X0': expected a stage, one of F, B, I, W, and a micro-batch, as in '0F1'"),
        ("0F0,0B", "rank 0, cell 1, '0B'"),
        ("(0F0;0Q0)OVERLAP_F_B", "'(0F0;0Q0)OVERLAP_F_B'".replace("(", r"\(").replace(")", r"\)")),
        ("0F0\n0B0", "stage 0 has actions on ranks 0 and 1: 0B0"),
        ("0F0,0B0\n2F0,2B0", r"stage 1 has no actions, but the table has stages \[0, 2\]"),
        ({0: ["0F0"], 2: ["1F0"]}, r"rows of \[0, 2\]: expected ranks 0 to 1"),
        (["0F0", "0B0"], r"rank 0 has the row '0F0': expected a list of its cells, such as"),
        ({0: "0F0"}, "rank 0 has the row '0F0': expected a list of its cells"),
        ([5], "rank 0 has the row 5: expected a list of its cells"),
        (5, "table=5: expected CSV with one line per rank, the path of such a file, or rows"),
        ("0F0", "schedule 'mine': 0B0, or 0I0 and 0W0"),
        ("", "schedule 'mine': it has 0 ranks and 0 stages"),
    ],
)
def test_a_table_that_cannot_be_read_says_why(table, words):
    with pytest.raises((TypeError, ValueError), match=words):
        PipelineSchedule.parse(table, "mine")
