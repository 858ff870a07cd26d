"""Pipelines: a model cut at its blocks, a loss that runs them by a schedule, and schedules as data."""

from fzero.parallel.pipeline._pipeline import Pipeline, pipeline

__all__ = ["Pipeline", "pipeline"]
