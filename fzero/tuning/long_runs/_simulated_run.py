"""One simulated run: its failures, and the uses of its time.

A run is simulated event by event. A heap holds the few kinds of events: a library of processes, such as SimPy, would
need more code and run slower, since nothing here waits for anything but time.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from fzero._arguments import check_int
from fzero._tracebacks import api_boundary_of_class

__all__ = ["LOSSES", "Reliability", "SimulatedRun"]

_USEFUL = "steps"
LOSSES = ("saves", "lost steps", "detection", "restart", "slow ranks", "fewer ranks")


@api_boundary_of_class
@dataclass(frozen=True)
class Reliability:
    """The failures of a run, and how long it takes to go on.

    Attributes:
        device_mtbf_seconds: the mean time between failures of one device, its host, network and software included. A
            run on n devices is interrupted each n-th part of it.
        save_seconds: how long steps stand still for a save.
        commit_seconds: how much longer a save takes in the background. A failure before its end loses the save.
        detection_seconds: the time until a failure is known.
        restart_seconds: the time from there to the next step: new processes, compilation, loading.
        repair_seconds: how long the run goes on without the devices that a failure takes away; 0 if spare ones take
            their place. When they are back, the run restarts with them.
        slow_mtbf_seconds: the mean time until one device becomes slow; infinity if none does.
        slow_factor: how many times as long a step takes while a device is slow.
        slow_seconds: how long a device stays slow.
        devices_lost: the number of devices that are missing from a failure to the repair. They are those of its host,
            or of its replica of the model (cp x tp x pp) if these are more.

    Raises:
        ValueError: if a number is out of its range.

    Example:
        >>> from fzero import tuning
        >>> tuning.Reliability(device_mtbf_seconds=45_000 * 3600, save_seconds=5).restart_seconds
        300.0
    """

    device_mtbf_seconds: float
    save_seconds: float = 5.0
    commit_seconds: float = 0.0
    detection_seconds: float = 60.0
    restart_seconds: float = 300.0
    repair_seconds: float = 0.0
    slow_mtbf_seconds: float = math.inf
    slow_factor: float = 1.05
    slow_seconds: float = 3600.0
    devices_lost: int = 8

    def __post_init__(self) -> None:
        """Check that each field is a number of seconds that it can be."""
        minimums = {"device_mtbf_seconds": 0.0, "slow_mtbf_seconds": 0.0, "slow_factor": 1.0}
        for field_ in fields(self):
            if (name := field_.name) == "devices_lost":
                continue
            value, above = getattr(self, name), name in ("device_mtbf_seconds", "slow_mtbf_seconds")
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
            if not is_number or value < minimums.get(name, 0.0) or (not value if above else value == math.inf):
                unit = "a factor" if name == "slow_factor" else "a number of seconds"
                raise ValueError(
                    f"Reliability: {name}={value!r}: expected {unit} "
                    f"{'above 0' if above else f'of at least {minimums.get(name, 0.0):g}'}"
                )
        check_int("devices_lost", self.devices_lost)


# Work is counted in seconds of steps at full speed. Between two events steps and saves alternate in
# equal cycles, and many of them are passed at once.
class _Saves(NamedTuple):
    """Saves that ended at equal distances.

    Attributes:
        first_end_seconds: the time at which the first one ended.
        work_seconds: the work in the first one.
        count: how many there are.
        cycle_seconds: the seconds between their ends.
        work_between: the work between them.
    """

    first_end_seconds: float
    work_seconds: float
    count: int
    cycle_seconds: float
    work_between: float

    def work_at(self, time: float) -> float | None:
        """Return the work in the last save that ended by a time; None if none did."""
        if time < self.first_end_seconds:
            return None
        index = int((time - self.first_end_seconds) // self.cycle_seconds) if self.count > 1 else 0
        return self.work_seconds + min(index, self.count - 1) * self.work_between


@dataclass
class SimulatedRun:
    """A run that is simulated.

    Attributes:
        reliability: the failures that are drawn.
        devices: the number of devices.
        save_every_seconds: the work between saves, in seconds.
        horizon_seconds: the length of the run.
        rng: draws the times of failures.
        seconds: the seconds of each use of time.
        failures: the number of failures.
        events: a heap of future events: the time, the number among all events, and the function.
        event_count: the number of events so far.
        now: the time.
        work_seconds: the work that the state contains.
        unsaved_work_seconds: the part of it that was done since the last save began.
        save_seconds_left: the seconds that a save under way still takes; None if steps run.
        saves: the saves since the last restart.
        committed_work_seconds: the work in the state from which the last restart began.
        down: the kind of lost time while no steps run; None while they do.
        slow_devices: how many devices are slow.
        absent_groups: how many groups of devices are missing.
        restarts: the number of restarts. What began before one has no effect after it.
    """

    reliability: Reliability
    devices: int
    save_every_seconds: float
    horizon_seconds: float
    rng: random.Random
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((_USEFUL, *LOSSES), 0.0))
    failures: int = 0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    event_count: int = 0
    now: float = 0.0
    work_seconds: float = 0.0
    unsaved_work_seconds: float = 0.0
    save_seconds_left: float | None = None
    saves: list[_Saves] = field(default_factory=list)
    committed_work_seconds: float = 0.0
    down: str | None = None
    slow_devices: int = 0
    absent_groups: int = 0
    restarts: int = 0

    @property
    def share(self) -> float:
        """The goodput of the run, from 0 to 1."""
        return self.seconds[_USEFUL] / self.horizon_seconds

    def simulate(self) -> "SimulatedRun":
        """Simulate the run, and return it."""
        self._schedule_after(self._draw_lifetime(self.reliability.device_mtbf_seconds), self._fail)
        self._schedule_after(self._draw_lifetime(self.reliability.slow_mtbf_seconds), self._become_slow)
        while self.events[0][0] < self.horizon_seconds:
            time, _, act = heapq.heappop(self.events)
            self._advance(time)
            act()
        self._advance(self.horizon_seconds)
        return self

    def _schedule_after(self, delay: float, act: Callable[[], None]) -> None:
        self.event_count += 1
        heapq.heappush(self.events, (self.now + delay, self.event_count, act))

    def _draw_lifetime(self, mtbf_seconds: float) -> float:
        """Draw the time until some device fails."""
        return self.rng.expovariate(1.0) * mtbf_seconds / self.devices

    @property
    def _present_share(self) -> float:
        """The share of the devices that take part. A failure takes a group away."""
        groups = -(-self.devices // self.reliability.devices_lost)
        return (groups - self.absent_groups) / groups

    @property
    def _work_speed(self) -> float:
        """Seconds of work in a second."""
        return self._present_share / (self.reliability.slow_factor if self.slow_devices else 1.0)

    def _advance(self, time: float) -> None:
        """Let the devices work, save or stand still until a time."""
        down = self.down or ("fewer ranks" if self._present_share == 0 else None)
        if down is not None:
            self.seconds[down] += time - self.now
            self.now = time
        while self.now < time:
            remaining = time - self.now
            if self.save_seconds_left is not None:
                self._go_on_saving(min(remaining, self.save_seconds_left))
            elif not self.unsaved_work_seconds and (count := int(remaining // self._cycle_seconds)):
                self._pass_cycles(count)
            else:
                until = (self.save_every_seconds - self.unsaved_work_seconds) / self._work_speed
                self._take_step(min(remaining, until))
                if until <= remaining:
                    self.save_seconds_left, self.unsaved_work_seconds = self.reliability.save_seconds, 0.0
            if time - self.now < 1e-9 * time:  # a rounding error
                self.now = time

    @property
    def _cycle_seconds(self) -> float:
        """The seconds from the end of a save to the end of the next one."""
        return self.save_every_seconds / self._work_speed + self.reliability.save_seconds

    def _take_step(self, seconds: float) -> None:
        work_seconds = seconds * self._work_speed
        self.work_seconds += work_seconds
        self.unsaved_work_seconds += work_seconds
        self.seconds[_USEFUL] += work_seconds
        self.seconds["fewer ranks"] += seconds * (1 - self._present_share)
        self.seconds["slow ranks"] += seconds * self._present_share - work_seconds
        self.now += seconds

    def _go_on_saving(self, seconds: float) -> None:
        """Go on with a save for some seconds, and note it once it ends."""
        assert self.save_seconds_left is not None
        self.seconds["saves"] += seconds
        self.now += seconds
        self.save_seconds_left -= seconds
        if self.save_seconds_left <= 0:
            self.save_seconds_left = None
            self.saves.append(
                _Saves(
                    first_end_seconds=self.now,
                    work_seconds=self.work_seconds,
                    count=1,
                    cycle_seconds=0.0,
                    work_between=0.0,
                )
            )

    def _pass_cycles(self, count: int) -> None:
        """Pass as many cycles of steps and a save at once."""
        begin, work, cycle = self.now, self.work_seconds, self._cycle_seconds
        self._take_step(count * self.save_every_seconds / self._work_speed)
        self.unsaved_work_seconds, self.now = 0.0, begin + count * cycle
        self.seconds["saves"] += count * self.reliability.save_seconds
        between = self.save_every_seconds
        self.saves.append(
            _Saves(
                first_end_seconds=begin + cycle,
                work_seconds=work + between,
                count=count,
                cycle_seconds=cycle,
                work_between=between,
            )
        )

    def _if_still(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return a function that acts unless the run has restarted since."""
        restarts = self.restarts
        return lambda: act() if self.restarts == restarts else None

    def _fail(self) -> None:
        """Lose a device, and all work since the last complete save."""
        self._schedule_after(self._draw_lifetime(self.reliability.device_mtbf_seconds), self._fail)
        if self.rng.random() >= self._present_share:
            return  # the device is missing already
        self.failures += 1
        complete = [saves.work_at(self.now - self.reliability.commit_seconds) for saves in self.saves]
        self._stop(max([work for work in complete if work is not None], default=self.committed_work_seconds))
        if self.reliability.repair_seconds:
            self.absent_groups += 1
            self._schedule_after(self.reliability.repair_seconds, self._rejoin)
        self.down = "detection"
        self._schedule_after(self.reliability.detection_seconds, self._if_still(self._restart))

    def _stop(self, committed: float) -> None:
        """Stop all devices, and return to a state."""
        lost_seconds = self.work_seconds - committed
        self.seconds[_USEFUL] -= lost_seconds
        self.seconds["lost steps"] += lost_seconds
        self.work_seconds = self.committed_work_seconds = committed
        self.save_seconds_left, self.unsaved_work_seconds, self.saves = None, 0.0, []
        self.restarts += 1

    def _restart(self) -> None:
        self.down = "restart"
        self._schedule_after(self.reliability.restart_seconds, self._if_still(self._resume))

    def _resume(self) -> None:
        self.down = None

    def _rejoin(self) -> None:
        """Take repaired devices back at the end of a step. The state is kept, so only a restart's time is lost."""
        self.absent_groups -= 1
        if self.down is None:
            self._stop(self.work_seconds)
            self._restart()

    def _become_slow(self) -> None:
        self._schedule_after(self._draw_lifetime(self.reliability.slow_mtbf_seconds), self._become_slow)
        self.slow_devices += 1
        self._schedule_after(self.reliability.slow_seconds, self._recover)

    def _recover(self) -> None:
        self.slow_devices -= 1
