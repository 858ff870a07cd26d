"""Pipelines: a model cut at its blocks, a loss that runs them by a schedule, and schedules as data."""

from fzero.pipelines._pipeline import Pipeline, pipeline
from fzero.schedules import Action, Message, Schedule, Timing, check, greedy, schedule

__all__ = ["Action", "Message", "Pipeline", "Schedule", "Timing", "check", "greedy", "pipeline", "schedule"]
