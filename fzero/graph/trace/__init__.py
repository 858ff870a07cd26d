"""A call of a step, recorded as one flat graph."""

from fzero.graph.trace._call_arguments import Arguments, LeafName, block_numbers, flatten_arguments
from fzero.graph.trace._call_key import Key, call_key, recompilation_reason
from fzero.graph.trace._donation import check_separate, match_results
from fzero.graph.trace._python_state import refuse_python_state
from fzero.graph.trace._trace import TracedGraph, trace
from fzero.graph.trace._writes import other_memory, refuse_writes_into

__all__ = [
    "Arguments",
    "Key",
    "LeafName",
    "TracedGraph",
    "block_numbers",
    "call_key",
    "check_separate",
    "flatten_arguments",
    "match_results",
    "other_memory",
    "recompilation_reason",
    "refuse_python_state",
    "refuse_writes_into",
    "trace",
]
