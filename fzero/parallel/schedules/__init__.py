"""Pipeline schedules as data: make, check, time and draw them."""

from fzero.parallel.schedules._actions import Action, Message, Value, action_output
from fzero.parallel.schedules._greedy import greedy
from fzero.parallel.schedules._instructions import Instruction, programs
from fzero.parallel.schedules._named_schedules import NAMES, NamedSchedule, check_name, one_f_one_b, schedule
from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule
from fzero.parallel.schedules._simulation import check
from fzero.parallel.schedules._timing import Timing

__all__ = ["Action", "Message", "PipelineSchedule", "Timing", "check", "greedy", "schedule"]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "NAMES",
    "Instruction",
    "NamedSchedule",
    "Value",
    "action_output",
    "check_name",
    "one_f_one_b",
    "programs",
]
