"""Rows of a plan as the configurations of other systems, for those who train elsewhere.

To add a system, write a function from a `PlannedRun` to an `Export`, and add its row to `EXPORTS`.
"""

from collections.abc import Callable

from fzero.tuning.exports._accelerate import accelerate
from fzero.tuning.exports._deepspeed import deepspeed
from fzero.tuning.exports._export import Export, PlannedRun
from fzero.tuning.exports._fsdp2 import fsdp2
from fzero.tuning.exports._megatron import megatron
from fzero.tuning.exports._peaks import activation_bytes
from fzero.tuning.exports._torchtitan import torchtitan

__all__ = ["EXPORTS", "Export", "PlannedRun", "activation_bytes"]

EXPORTS: dict[str, Callable[[PlannedRun], Export]] = {
    "deepspeed": deepspeed,
    "fsdp2": fsdp2,
    "accelerate": accelerate,
    "torchtitan": torchtitan,
    "megatron": megatron,
}
