"""Pipelines: a model cut at its blocks, a loss that runs them by a schedule, and schedules as data."""

from fzero.schedules import Action, Message, Schedule, Timing, check, greedy, schedule

__all__ = ["Action", "Message", "Schedule", "Timing", "check", "greedy", "schedule"]
