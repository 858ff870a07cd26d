"""Metrics of a run: kept where they are, brought to the host once in n steps, and written by rank 0."""

from fzero.metrics._log import MetricsLog, Rows, log
from fzero.metrics._writers import jsonl, progress, tensorboard

__all__ = ["MetricsLog", "Rows", "jsonl", "log", "progress", "tensorboard"]
