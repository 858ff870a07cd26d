"""Speeds: the constants of the cost model, measured on this machine as `fzero calibrate` does."""

from benchmarks.gpu.case import Case, Setting, Values
from fzero import tuning

__all__ = ["NEEDS_ALL_RANKS", "cases"]

NEEDS_ALL_RANKS = True


def cases(setting: Setting) -> list[Case]:
    """List the one measurement."""

    def run() -> list[Values]:
        machine = tuning.calibrate(0.2 if setting.toy else 5.0)
        return [{"constant": c.name, "value": c.value, "source": c.source} for c in machine.constants()]

    return [Case("fzero calibrate", run)]
