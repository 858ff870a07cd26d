"""Pipelines: a loss function that runs the blocks of a model by a schedule, over the ranks of an axis."""

from fzero.parallel.pipeline._pipeline import Pipeline, pipeline

__all__ = ["Pipeline", "pipeline"]
