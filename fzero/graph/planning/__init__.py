"""Plans: the bytes that a scheduled graph will hold and send, and its time, counted before it runs."""

from fzero.graph.planning._between_subgraphs import (
    needed_views,
    subgraph_exports,
    subgraph_operands,
    view_sources,
    views_to,
    written_argument,
)
from fzero.graph.planning._clocks import LIMITS, Interval, estimate_seconds, seconds_by_bound, timeline
from fzero.graph.planning._collective_seconds import transfer_seconds
from fzero.graph.planning._cost import product_seconds
from fzero.graph.planning._fused_values import is_pointwise_kernel, is_tensor_reduction
from fzero.graph.planning._hardware import HARDWARE, Hardware
from fzero.graph.planning._phases import find_phases
from fzero.graph.planning._plan import Plan, PlanSettings, RejectedSchedule, make_plan
from fzero.graph.planning._subgraphs import (
    argument_parts,
    find_scalars,
    read_by_kernels,
    resolve_alias,
    runs_alone,
    split_into_subgraphs,
)
from fzero.graph.planning._views import phase_spans, short_path
from fzero.graph.planning.memory import (
    KINDS,
    AllocatorPeaks,
    device_live_bytes,
    iteration_peak_bytes,
    live_bytes,
    live_ranges,
    peak_bytes,
    record_peak,
)

__all__ = [
    "HARDWARE",
    "KINDS",
    "LIMITS",
    "AllocatorPeaks",
    "Hardware",
    "Interval",
    "Plan",
    "PlanSettings",
    "RejectedSchedule",
    "argument_parts",
    "device_live_bytes",
    "estimate_seconds",
    "find_phases",
    "find_scalars",
    "is_pointwise_kernel",
    "is_tensor_reduction",
    "iteration_peak_bytes",
    "live_bytes",
    "live_ranges",
    "make_plan",
    "needed_views",
    "peak_bytes",
    "phase_spans",
    "product_seconds",
    "read_by_kernels",
    "record_peak",
    "resolve_alias",
    "runs_alone",
    "seconds_by_bound",
    "short_path",
    "split_into_subgraphs",
    "subgraph_exports",
    "subgraph_operands",
    "timeline",
    "transfer_seconds",
    "view_sources",
    "views_to",
    "written_argument",
]
