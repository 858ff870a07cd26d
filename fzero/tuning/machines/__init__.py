"""Machines: speeds from data sheets, or measured on this one."""

from fzero.tuning.machines._cache_folder import cache_folder, write_atomically
from fzero.tuning.machines._calibrate import calibrate
from fzero.tuning.machines._machine import Constant, Machine
from fzero.tuning.machines._named_machines import A100, A100_80GB, CPU, H100, H200, MACHINES, find_machine, save

__all__ = [
    "A100",
    "A100_80GB",
    "CPU",
    "H100",
    "H200",
    "MACHINES",
    "Constant",
    "Machine",
    "cache_folder",
    "calibrate",
    "find_machine",
    "save",
    "write_atomically",
]
