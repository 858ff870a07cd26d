"""Executors: a scheduled graph is split at its collectives into segments, which are compiled and run."""

from fzero.graph.run._backends import BACKENDS, LoweringOptions, lower
from fzero.graph.run._clock import TimedOperation, record_operations
from fzero.graph.run._device_graph import RecordedStep, check_recordable
from fzero.graph.run._executable import Executable
from fzero.graph.run._lengths import Lengths

__all__ = [
    "BACKENDS",
    "Executable",
    "Lengths",
    "LoweringOptions",
    "RecordedStep",
    "TimedOperation",
    "check_recordable",
    "lower",
    "record_operations",
]
