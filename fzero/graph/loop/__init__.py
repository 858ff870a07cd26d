"""Loops over micro-batches: how they are traced, planned and run."""

from fzero.graph.loop._insert_loops import insert_loops
from fzero.graph.loop._loop import Loop, LoopSlice, graphs_in, new_loop_function, node_loop, set_body, shared_graphs
from fzero.graph.loop._loop_function import loop_function
from fzero.graph.loop._loop_marks import (
    OPERATIONS,
    LoopSum,
    NotScannableError,
    check_equal_runs,
    is_loop_slice,
    iteration,
    loop_slice,
    record_loops,
    records_loops,
    records_pipelines,
    rows,
    run_again,
)
from fzero.graph.loop._loop_memory import SentMessage, peak_by_region, pipeline_seconds, sent_messages
from fzero.graph.loop._pipeline_function import pipeline_function
from fzero.graph.loop._pipeline_marks import (
    BEGIN_REGION,
    MARKERS,
    SEND,
    begin_region,
    begin_shapes_only,
    end_shapes_only,
    is_marker,
    mark_pipeline,
    receive,
    send,
)
from fzero.graph.loop._rank_schedule import (
    LoopRegion,
    RankSchedule,
    action_regions,
    find_rank_schedule,
    rank_schedule_id,
)
from fzero.graph.loop._split import RegionGraph, region_positions, split

__all__ = [
    "BEGIN_REGION",
    "MARKERS",
    "OPERATIONS",
    "SEND",
    "Loop",
    "LoopRegion",
    "LoopSlice",
    "LoopSum",
    "NotScannableError",
    "RankSchedule",
    "RegionGraph",
    "SentMessage",
    "action_regions",
    "begin_region",
    "begin_shapes_only",
    "check_equal_runs",
    "end_shapes_only",
    "find_rank_schedule",
    "graphs_in",
    "insert_loops",
    "is_loop_slice",
    "is_marker",
    "iteration",
    "loop_function",
    "loop_slice",
    "mark_pipeline",
    "new_loop_function",
    "node_loop",
    "peak_by_region",
    "pipeline_function",
    "pipeline_seconds",
    "rank_schedule_id",
    "receive",
    "record_loops",
    "records_loops",
    "records_pipelines",
    "region_positions",
    "rows",
    "run_again",
    "send",
    "sent_messages",
    "set_body",
    "shared_graphs",
    "split",
]
