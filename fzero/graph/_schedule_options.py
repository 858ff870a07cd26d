"""The schedule options of `fzero.jit`, and the values that each takes."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

__all__ = ["FITTING", "ScheduleOptions"]

_AUTO = "auto"  # the cost model chooses
FITTING = "fitting"  # a value of `prefetch`: one gather ahead, where there is room


class ScheduleOptions(NamedTuple):
    """The user's restrictions of the schedule; "auto" leaves a setting to the cost model."""

    prefetch: int | str = _AUTO
    in_flight: int | str = _AUTO
    bucket_bytes: int | str = _AUTO
    max_reuse_bytes: float | str = _AUTO
    memory_budget: float | None = None
    recompute: bool | str = _AUTO
    recast: bool | str = _AUTO
    # no arguments of fzero.jit: they are set to reproduce a given schedule
    across_iterations: bool | str = _AUTO
    send_early: bool | str = _AUTO

    @staticmethod
    def of(settings: Mapping[str, Any]) -> "ScheduleOptions":
        """Return the options that reproduce the schedule of a plan's settings."""
        values = {"recast": False, "across_iterations": False, "send_early": False, **settings}
        return ScheduleOptions(
            **{name: value for name, value in values.items() if name in ScheduleOptions._fields}
        ).validated()

    def validated(self) -> "ScheduleOptions":
        """Check the options, and return them with plain Python numbers.

        Raises:
            ValueError: if an option has a value that it does not take. The message lists the values that it takes.
        """
        return ScheduleOptions(
            **{name: _DOMAINS[name].validated(name, value) for name, value in self._asdict().items()}
        )


class _Domain(NamedTuple):
    """The values that an option takes: a few special values, and numbers from 0 on.

    Attributes:
        values: the special values.
        accepts: the kind of numbers that it takes, `_COUNT` or `_BYTES`; "" if it takes none.
    """

    values: tuple[Any, ...]
    accepts: str

    def validated(self, name: str, value: Any) -> Any:
        """Return the value if the option takes it, else raise `ValueError`."""
        if any(value is special or (isinstance(value, str) and value == special) for special in self.values):
            return value
        if self.accepts == _COUNT and isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
            return int(value)
        if self.accepts == _BYTES and isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0:
            return int(value) if isinstance(value, Integral) else float(value)
        raise ValueError(f"{name}={value!r}: expected {self}")

    def __str__(self) -> str:
        parts = [self.accepts] if self.accepts else []
        parts += [f'"{special}"' if isinstance(special, str) else str(special) for special in self.values]
        return " or ".join([", ".join(parts[:-1]), parts[-1]])


_COUNT = "an int from 0 on"


_BYTES = "a number of bytes from 0 on (such as 16e9)"


_DOMAINS = {
    "prefetch": _Domain((FITTING, _AUTO), _COUNT),
    "in_flight": _Domain((_AUTO,), _COUNT),
    "bucket_bytes": _Domain((_AUTO,), _COUNT),
    "max_reuse_bytes": _Domain((math.inf, _AUTO), _BYTES),
    "memory_budget": _Domain((None,), _BYTES),
    "recompute": _Domain((True, False, _AUTO), ""),
    "recast": _Domain((True, False, _AUTO), ""),
    "across_iterations": _Domain((True, False, _AUTO), ""),
    "send_early": _Domain((True, False, _AUTO), ""),
}
