"""Pipeline schedules as data: made, checked, timed, drawn."""

from fzero.pipelines._actions import Action, Message
from fzero.pipelines._check import check
from fzero.pipelines._greedy import greedy
from fzero.pipelines._named import schedule
from fzero.pipelines._schedule import Schedule
from fzero.pipelines._timing import Timing

__all__ = ["Action", "Message", "Schedule", "Timing", "check", "greedy", "schedule"]
