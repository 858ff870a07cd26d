"""The knobs of `fzero.jit`: what may be asked of a schedule, and what each knob takes."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from fzero.graph._pipeline import FITTING

__all__ = ["AUTO", "Knobs"]

AUTO = "auto"  # the cost model chooses


class Knobs(NamedTuple):
    """What the user asks of the schedule; "auto" leaves it to the cost model."""

    prefetch: int | str = AUTO
    in_flight: int | str = AUTO
    bucket_bytes: int | str = AUTO
    max_reuse_bytes: float | str = AUTO
    memory_budget: float | None = None
    recompute: bool | str = AUTO
    recast: bool | str = AUTO
    across_turns: bool | str = AUTO  # no argument of fzero.jit: asked for where a known schedule is made again

    @staticmethod
    def of(settings: Mapping[str, Any]) -> "Knobs":
        """Return what asks for a schedule that is known by its settings, which tell some only where they are True."""
        told = {"recast": False, "across_turns": False, **settings}
        return Knobs(**{name: value for name, value in told.items() if name in Knobs._fields}).checked()

    def checked(self) -> "Knobs":
        """Return the knobs as plain numbers of Python.

        Raises:
            ValueError: if one is set to none of its values. Says which those are.
        """
        return Knobs(**{name: TAKES[name].checked(name, value) for name, value in self._asdict().items()})


class _Takes(NamedTuple):
    """What a knob takes: a few values of its own, and numbers from 0 on.

    Attributes:
        values: its own values.
        number: what to call the numbers that it takes: `COUNT`, `AMOUNT`, or "" for none.
    """

    values: tuple[Any, ...]
    number: str

    def checked(self, name: str, value: Any) -> Any:
        """Return the value, if the knob takes it."""
        if any(value is own or (isinstance(value, str) and value == own) for own in self.values):
            return value
        if self.number == COUNT and isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
            return int(value)
        if self.number == AMOUNT and isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0:
            return int(value) if isinstance(value, Integral) else float(value)
        raise ValueError(f"{name}={value!r}: expected {self}")

    def __str__(self) -> str:
        said = [self.number] if self.number else []
        said += [f'"{own}"' if isinstance(own, str) else str(own) for own in self.values]
        return " or ".join([", ".join(said[:-1]), said[-1]])


COUNT = "an int from 0 on"
AMOUNT = "a number from 0 on"

TAKES = {
    "prefetch": _Takes((FITTING, AUTO), COUNT),
    "in_flight": _Takes((AUTO,), COUNT),
    "bucket_bytes": _Takes((AUTO,), COUNT),
    "max_reuse_bytes": _Takes((math.inf, AUTO), AMOUNT),
    "memory_budget": _Takes((None,), AMOUNT),
    "recompute": _Takes((True, False, AUTO), ""),
    "recast": _Takes((True, False, AUTO), ""),
    "across_turns": _Takes((True, False, AUTO), ""),
}
