"""Goodput: the share of a long run's time that trains, when devices fail, slow down, and state must be saved."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from fzero._arguments import check_int
from fzero._report import FigureReport, new_figure
from fzero._tracebacks import api_boundary
from fzero.tuning.long_runs._simulated_run import LOSSES, Reliability, SimulatedRun

__all__ = ["Goodput", "goodput", "save_interval"]

_DAY_SECONDS = 86400.0


@api_boundary
def save_interval(run_mtbf_seconds: float, save_seconds: float) -> float:
    """Return the time from the end of a save to the next one that loses least, in seconds.

    Young's formula is `sqrt(2 save mtbf)`; this is Daly's of higher order.

    Args:
        run_mtbf_seconds: the mean time between failures of the run, that of a device by the number of devices.
        save_seconds: how long steps stand still for a save.

    Raises:
        ValueError: if a time is no number, or is out of its range.

    Example:
        >>> from fzero import tuning
        >>> round(tuning.save_interval(run_mtbf_seconds=10_000, save_seconds=5))
        313

    References:
        Daly: A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), equation 37.
    """
    are_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (run_mtbf_seconds, save_seconds))
    if not are_numbers or not (run_mtbf_seconds > 0 and save_seconds >= 0):
        raise ValueError(
            f"run_mtbf_seconds={run_mtbf_seconds!r}, save_seconds={save_seconds!r}: expected a number above 0, "
            "and one of at least 0"
        )
    if save_seconds >= 2 * run_mtbf_seconds:
        return run_mtbf_seconds
    ratio = save_seconds / (2 * run_mtbf_seconds)
    return math.sqrt(2 * save_seconds * run_mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class _Quartiles(NamedTuple):
    """The quartiles of a number over simulated runs."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class Goodput(FigureReport):
    """The share of a run's time that trains, made by `fzero.tuning.goodput`. Print it, or plot it.

    `plot` draws the goodput against the time between saves, with its quartiles.

    Attributes:
        reliability: the assumptions.
        devices: the number of devices.
        days: the days of a simulated run.
        save_every_seconds: the time from one save to the next.
        formula_seconds: the same by `save_interval`.
        share: the quartiles of the goodput, from 0 to 1.
        losses: the mean share of each kind of lost time.
        failures: the mean number of failures in a run.
        by_interval: the quartiles for each time between saves that was simulated, in seconds.
    """

    reliability: Reliability
    devices: int
    days: float
    save_every_seconds: float
    formula_seconds: float
    share: _Quartiles
    losses: Mapping[str, float]
    failures: float
    by_interval: Mapping[float, _Quartiles]

    _caption = "goodput against the time between saves"

    @property
    def mean(self) -> float:
        """The mean goodput, from 0 to 1. With the shares of lost time it makes 1."""
        return max(1.0 - sum(self.losses.values()), 0.0)

    def __str__(self) -> str:
        losses_text = ", ".join([f"{name} {x:.1%}" for name, x in self.losses.items() if x >= 0.0005])
        low, _, high = self.share
        saves = f"a save every {_format_duration(self.save_every_seconds)}"
        return (
            f"goodput {self.mean:.1%} on average (quartiles {low:.1%} to {high:.1%}) over {self.days:g} days "
            f"on {self.devices:,} devices, with {self.failures:,.0f} failures and {saves} "
            f"(by Daly's formula {_format_duration(self.formula_seconds)}). "
            f"Lost: {losses_text or 'nothing'}"
        )

    def _draw_figure(self) -> Any:
        figure = new_figure(7, 4)
        axes = figure.subplots()
        minutes = [every / 60 for every in self.by_interval]
        low, median, high = zip(*self.by_interval.values(), strict=True)
        axes.fill_between(minutes, low, high, alpha=0.3, label="quartiles")
        axes.plot(minutes, median, marker="o", label="median")
        axes.axvline(self.formula_seconds / 60, color="gray", linestyle="--", label="Daly's formula")
        axes.set(xscale="log", xlabel="minutes between saves", ylabel="goodput")
        axes.legend()
        return figure


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else _format_hours(seconds)


def _format_hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"


_MAX_FAILURES = 20_000  # of a run: with more, the time between them is surely that of all devices
_INTERVAL_FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # of Daly's time between saves: the times that are simulated


@api_boundary
def goodput(
    step_seconds: float,
    devices: int,
    reliability: Reliability,
    *,
    save_every_seconds: float | None = None,
    days: float = 30.0,
    samples: int = 40,
    seed: int = 0,
) -> Goodput:
    """Simulate long runs with failures, slow devices and saves, and return the share of the time that trains.

    Failures of devices are independent, and each interrupts the run. It goes on from the last complete save. Lost are
    the steps since then, detection and restart, the time of saves, of steps that wait for a slow device, and of devices
    that are missing until their repair.

    Args:
        step_seconds: the seconds of a step, such as `table.best().row.seconds`.
        devices: the number of devices.
        reliability: the failures, and how long it takes to go on.
        save_every_seconds: the time of steps between saves, rounded to whole steps. By default the best of some times
            around Daly's.
        days: the days of each run.
        samples: the number of simulated runs.
        seed: the seed of the failures. All times between saves meet the same ones.

    Returns:
        A `Goodput`. Print it, or call its `plot(path)`.

    Raises:
        TypeError: if `reliability` is none.
        ValueError: if a number is out of its range, or runs fail so often that the time between failures must be that
            of all devices.

    Example:
        >>> from fzero import tuning
        >>> what_fails = tuning.Reliability(45_000 * 3600, save_seconds=4, restart_seconds=600)
        >>> result = tuning.goodput(6.0, 16384, what_fails, days=10, samples=8)
        >>> 0.85 < result.share.median < 0.95
        True
    """
    _check_run(step_seconds, devices, reliability, save_every_seconds, days, samples)
    formula = min(
        save_interval(reliability.device_mtbf_seconds / devices, reliability.save_seconds), days * _DAY_SECONDS
    )
    intervals = [save_every_seconds] if save_every_seconds is not None else [formula * x for x in _INTERVAL_FACTORS]
    rounded_intervals = sorted({max(round(x / step_seconds), 1) * step_seconds for x in intervals})

    def simulated(interval: float, sample: int) -> SimulatedRun:
        return SimulatedRun(
            reliability=reliability,
            devices=devices,
            save_every_seconds=interval,
            horizon_seconds=days * _DAY_SECONDS,
            rng=random.Random(f"{seed} {sample}"),
        ).simulate()

    runs = {interval: [simulated(interval, i) for i in range(samples)] for interval in rounded_intervals}
    shares = {
        interval: _Quartiles(*quantiles([x.share for x in results], method="inclusive"))
        for interval, results in runs.items()
    }
    best = max(shares, key=lambda interval: fmean([x.share for x in runs[interval]]))
    losses = {name: fmean([x.seconds[name] / (days * _DAY_SECONDS) for x in runs[best]]) for name in LOSSES}
    failures = fmean([x.failures for x in runs[best]])
    return Goodput(
        reliability=reliability,
        devices=devices,
        days=days,
        save_every_seconds=best,
        formula_seconds=formula,
        share=shares[best],
        losses=losses,
        failures=failures,
        by_interval=shares,
    )


def _check_run(
    step_seconds: float,
    devices: int,
    reliability: Reliability,
    save_every_seconds: float | None,
    days: float,
    samples: int,
) -> None:
    """Raise an error for a number that is out of its range, or failures that come too often to be a device's."""
    check_int("devices", devices)
    check_int("samples", samples, 2)
    if not isinstance(reliability, Reliability):
        raise TypeError(f"reliability={reliability!r}: expected a fzero.tuning.Reliability, such as Reliability(1e8)")
    numbers = {"step_seconds": step_seconds, "days": days}
    if save_every_seconds is not None:
        numbers["save_every_seconds"] = save_every_seconds
    for name, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: expected a number above 0")
    mtbf = reliability.device_mtbf_seconds
    failures = days * _DAY_SECONDS * devices / mtbf
    if failures > _MAX_FAILURES:
        raise ValueError(
            f"device_mtbf_seconds={mtbf!r}: expected the seconds between failures of one device; with these, "
            f"{devices} devices fail each {_format_duration(mtbf / devices)}, {failures:,.0f} times in {days:g} days"
        )
