"""Pipeline schedules as data: make, check, time and draw them."""

from fzero.parallel.schedules._actions import Action, Message, Value, makes
from fzero.parallel.schedules._check import check
from fzero.parallel.schedules._greedy import greedy
from fzero.parallel.schedules._named import NAMES, check_name, schedule
from fzero.parallel.schedules._program import Instruction, programs
from fzero.parallel.schedules._schedule import Schedule
from fzero.parallel.schedules._timing import Timing

__all__ = [
    "NAMES",
    "Action",
    "Instruction",
    "Message",
    "Schedule",
    "Timing",
    "Value",
    "check",
    "check_name",
    "greedy",
    "makes",
    "programs",
    "schedule",
]
