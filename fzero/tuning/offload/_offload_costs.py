"""A cost model of offload: seconds of a step by the share of the optimizer state that lies on the host."""

import math
from dataclasses import dataclass
from typing import Any

from fzero._arguments import check_choice, check_int
from fzero._format import format_bytes, format_seconds
from fzero._report import FigureReport, new_figure
from fzero._tracebacks import api_boundary
from fzero.tuning.machines import Machine
from fzero.tuning.offload._offload_work import OffloadWork

__all__ = ["OffloadCosts", "offload_costs"]

_UPDATES = ("host", "device", "deepspeed")
_SCHEDULES = ("after", "during", "across")
# bytes an element that DeepSpeed's passes move in addition: a float32 gradient written (and fetched first) and read, a
# float32 parameter written and read
_WIDENING_BYTES = 4 + 4 + 4 + 4
_ROWS = (*[("host", s) for s in _SCHEDULES], ("device", "after"), ("device", "during"), ("deepspeed", "after"))
_CURVES = (  # the curves of the picture: update, schedule, colour, style, name
    ("deepspeed", "after", "C7", "-", "DeepSpeed's update"),
    ("host", "after", "C0", "-", 'update="host"'),
    ("host", "during", "C0", "--", "  without a clip by the norm"),
    ("host", "across", "C0", ":", "  delay=1"),
    ("device", "after", "C1", "-", 'update="device"'),
    ("device", "during", "C1", "--", "  without a clip by the norm"),
)


@dataclass(frozen=True)
class OffloadCosts(FigureReport):
    """The costs of a step by the ratio of offload, made by `offload_costs`. Print or plot them.

    `plot` draws the seconds by ratio. Ratios that do not fit are grey.

    Attributes:
        work: the work of the step.
        machine: the machine that it runs on.
        parts: the search for ratios that fit goes in steps of `1 / parts`.
    """

    work: OffloadWork
    machine: Machine
    parts: int = 100

    def device_bytes(self, ratio: float) -> float:
        """Return the peak bytes on the device at a ratio, interpolated between the peaks at 0 and 1.

        Raises:
            ValueError: if `ratio` is not from 0 to 1.
        """
        return _interpolate_ends(self.work.device_bytes, ratio)

    def host_bytes(self, ratio: float) -> float:
        """Return the peak bytes on the host for a rank at a ratio, interpolated between the peaks at 0 and 1.

        Raises:
            ValueError: if `ratio` is not from 0 to 1.
        """
        return _interpolate_ends(self.work.host_bytes, ratio)

    @property
    def first_fit(self) -> float | None:
        """The smallest ratio, in steps of `1 / parts`, at which the step fits the device; None if there is none."""
        none, all_ = self.work.device_bytes
        excess_bytes = none - self.machine.device_bytes
        if excess_bytes <= 0:
            return 0.0
        k = math.ceil(round(self.parts * excess_bytes / (none - all_), 9)) if none > all_ else self.parts + 1
        return k / self.parts if k <= self.parts else None

    def seconds(self, ratio: float, update: str = "host", schedule: str = "after") -> float:
        """Return the seconds of a step at a ratio.

        C = F + B is the time of the forward and the backward pass: the step's FLOPs over the machine's FLOP/s. D is the
        time of the update on the device: the bytes that one loop over its elements moves, over the memory bandwidth. H
        is the time of the host's chain of copy down, update and copy up. The chain is pipelined by units: it takes the
        slowest of the three, and one unit of the other two.

        - "after": C + max(D, H). A clip by the global norm waits for the entire backward pass.
        - "during": F + max(B + D, H + B / units). The gradients of offloaded units come first, and nothing waits for a
          norm.
        - "across": max(C + D, H). The host works beside an entire step, as with `optim.offload(delay=1)`.

        Args:
            ratio: from 0 to 1.
            update: "host": on the host, in one loop. "device": on the device, while the state is copied up and back,
                both ways at once. "deepspeed": on the host, with extra passes that widen gradients and narrow
                parameters.
            schedule: "after" with any update; "during" with "host" or "device"; "across" with "host".

        Raises:
            ValueError: if `ratio` is not from 0 to 1, or another argument is not one of these.
        """
        check_choice("update", update, _UPDATES)
        if (update, schedule) not in _ROWS:
            schedules = " or ".join([repr(s) for name, s in _ROWS if name == update])
            raise ValueError(f"schedule={schedule!r}: expected {schedules} with update={update!r}")
        work, machine = self.work, self.machine
        compute, forward = work.flops / machine.flops, work.forward_flops / machine.flops
        backward, chain = compute - forward, self.chain_seconds(ratio, update)
        share = 1 if update == "device" else 1 - ratio
        device = share * work.update_bytes / machine.memory_bandwidth
        if schedule == "after":
            return compute + max(device, chain)
        if schedule == "during":
            first_unit = backward / work.units if ratio else 0.0
            return forward + max(backward + device, chain + first_unit)
        return max(compute + device, chain)

    def chain_seconds(self, ratio: float, update: str = "host") -> float:
        """Return the seconds of the host's chain of copy down, update and copy up, unit by unit.

        Raises:
            ValueError: if `ratio` is not from 0 to 1.
        """
        work, machine = self.work, self.machine
        _interpolate_ends((0, 1), ratio)
        if update == "device":  # the host's memory serves both directions
            seconds = max(
                work.state_bytes / machine.host_link_bandwidth,
                2 * work.state_bytes / (machine.host_copy_bandwidth / machine.ranks),
            )
            return ratio * seconds * (1 + 2 / work.units)
        read_bytes = work.update_bytes + (_WIDENING_BYTES * work.elements if update == "deepspeed" else 0)
        parts = (
            work.down_bytes / machine.host_link_bandwidth,
            read_bytes / (machine.host_memory_bandwidth / machine.ranks),
            work.up_bytes / machine.host_link_bandwidth,
        )
        return ratio * (max(parts) + (sum(parts) - max(parts)) / work.units)

    def fastest(self, update: str = "host", schedule: str = "after") -> float:
        """Return the fastest ratio that fits. It is above the first fit where the host has time to spare.

        Raises:
            ValueError: if `seconds` does not take an argument, or no ratio fits.
        """
        first = round(self._smallest_fitting_ratio() * self.parts)
        ratios = [k / self.parts for k in range(first, self.parts + 1)]
        return min(ratios, key=lambda r: (round(self.seconds(r, update, schedule), 12), r))

    def speed_up(self, update: str = "host", schedule: str = "after", over: str = "deepspeed") -> float:
        """Return the speed-up of the first ratio that fits over a step that offloads all state, with schedule "after".

        Args:
            update: the update at the first ratio that fits, as in `seconds`.
            schedule: the schedule at the first ratio that fits, as in `seconds`.
            over: the update of the step that offloads all state.

        Raises:
            ValueError: if `seconds` does not take an argument, or no ratio fits.
        """
        return self.seconds(1, over) / self.seconds(self._smallest_fitting_ratio(), update, schedule)

    def _smallest_fitting_ratio(self) -> float:
        if (first := self.first_fit) is None:
            raise ValueError(
                f"{self.work.name} fits {self.machine.name} at no ratio: with all state offloaded it takes "
                f"{format_bytes(self.device_bytes(1))} of {format_bytes(self.machine.device_bytes)}"
            )
        return first

    def __repr__(self) -> str:
        return f"OffloadCosts({self.work.name} on {self.machine.name}: first ratio that fits {self.first_fit})"

    def __str__(self) -> str:
        first = self.first_fit
        ratios: list[float] = sorted({0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, first or 0.0})
        rows = [("update, schedule", [f"{r:g}" for r in ratios])]
        rows += [(f"{name}, {s}", [format_seconds(self.seconds(r, name, s)) for r in ratios]) for name, s in _ROWS]
        rows += [("device", [format_bytes(self.device_bytes(r)) for r in ratios])]
        rows += [("host, for a rank", [format_bytes(self.host_bytes(r)) for r in ratios])]
        width = max([len(cell) for _, cells in rows for cell in cells])
        table = [f"{name:<18}" + "".join([f"  {cell:>{width}}" for cell in cells]) for name, cells in rows]
        return "\n".join([str(self.work), str(self.machine), *self._conclusion_lines(), *table])

    def _conclusion_lines(self) -> list[str]:
        room = format_bytes(self.machine.device_bytes)
        if self.first_fit is None:
            return [f"no ratio fits {room} of the device"]
        times, ours = self.speed_up("deepspeed"), self.speed_up()
        return [
            f"fits {room} from ratio {self.first_fit:g}. With all state offloaded, DeepSpeed's update takes "
            f"{times:.1f} times as long as at that ratio,\n"
            f"and {ours:.1f} times as long as an update in one loop at that ratio"
        ]

    _caption = "seconds of a step by ratio"

    def _draw_figure(self) -> Any:
        """Draw the seconds of a step against the ratio, with the ratios that do not fit in grey."""
        figure = new_figure(9, 4.5)
        axes: Any = figure.subplots()
        ratios = [k / 200 for k in range(201)]
        for update, schedule, colour, style, name in _CURVES:
            seconds = [self.seconds(r, update, schedule) for r in ratios]
            axes.plot(ratios, seconds, style, color=colour, label=name)
        top = 1.05 * self.seconds(1, "deepspeed")
        first = 1.0 if self.first_fit is None else self.first_fit
        axes.axvspan(0, first, color="black", alpha=0.12, linewidth=0)
        if self.first_fit is not None:
            axes.axvline(first, color="black", linewidth=0.8, linestyle="--")
        x, side = (first, "right") if first > 0.5 else (first, "left")
        room = format_bytes(self.machine.device_bytes)
        label_text = f"no ratio fits {room}" if self.first_fit is None else f"fits {room} from {first:g}"
        axes.text(x, 0.97 * top, f" {label_text} ", ha=side, va="top")
        axes.set(
            xlim=(0, 1),
            ylim=(0, top),
            xlabel="ratio of the state on the host",
            ylabel="seconds of a step, by the model",
        )
        axes.set(title=f"{self.work.name} on {self.machine.name}")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


@api_boundary
def offload_costs(work: OffloadWork, machine: Machine, parts: int = 100) -> OffloadCosts:
    """Estimate the seconds of a step at each ratio of offload, by a cost model; nothing is measured.

    The model counts FLOPs, bytes of each memory, and bytes of the link. It assumes that collectives overlap with the
    passes, that copies overlap with work, and that kernels reach the speeds of `machine`.

    Args:
        work: the work of the step: `model_work` for a model by its size, or `planned_work` for a step of yours.
        machine: the machine that it runs on: `tuning.A100`, `H100`, `H200`, or a `Machine` of your measurements.
        parts: the search for ratios that fit goes in steps of `1 / parts`.

    Returns:
        An `OffloadCosts`.

    Raises:
        TypeError: if `work` is not an `OffloadWork`, or `machine` is not a `Machine`.
        ValueError: if `parts` is not an int of at least 1.

    Example:
        >>> from fzero import tuning
        >>> work = tuning.model_work(30e9, ranks=8, tokens=2048, overhead_bytes=16e9, name="OPT-30B")
        >>> costs = tuning.offload_costs(work, tuning.H100)
        >>> costs.first_fit, round(costs.speed_up("deepspeed"), 1)
        (0.04, 3.1)
        >>> [round(costs.seconds(1, update), 2) for update in ("host", "device", "deepspeed")]
        [3.11, 2.79, 4.11]
    """
    for word, value, kind in (("work", work, OffloadWork), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            raise TypeError(f"{word}={value!r}: expected a fzero.tuning.{kind.__name__}")
    check_int("parts", parts)
    return OffloadCosts(work, machine, parts)


def _interpolate_ends(ends: tuple[float, float], ratio: float) -> float:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio={ratio!r}: expected a number from 0 to 1")
    return ends[0] + ratio * (ends[1] - ends[0])
