"""Pipeline schedules as data: made, checked, timed, drawn."""

from fzero.schedules._actions import Action, Message
from fzero.schedules._check import check
from fzero.schedules._greedy import greedy
from fzero.schedules._named import schedule
from fzero.schedules._schedule import Schedule
from fzero.schedules._timing import Timing

__all__ = ["Action", "Message", "Schedule", "Timing", "check", "greedy", "schedule"]
