"""Seconds of a step by the share of its optimizer's state that lies on the host: a model, with its assumptions."""

import math
import os
from dataclasses import dataclass

from fzero._notebook import shown
from fzero._tracebacks import api_boundary
from fzero.graph.plan._text import size
from fzero.tuning import _picture
from fzero.tuning._machines import Machine
from fzero.tuning._table_text import duration
from fzero.tuning._work import OffloadWork

__all__ = ["SCHEDULES", "WAYS", "OffloadCosts", "offload_costs"]

WAYS = ("host", "device", "deepspeed")
SCHEDULES = ("after", "during", "across")
# bytes of an element that DeepSpeed's passes take beside ours: float32 gradients written (fetched first) and read, a
# float32 parameter written and read
WIDENED = 4 + 4 + 4 + 4
ROWS = (*[("host", s) for s in SCHEDULES], ("device", "after"), ("device", "during"), ("deepspeed", "after"))


@dataclass(frozen=True)
class OffloadCosts:
    """What a step takes at each ratio of offload, made by `offload_costs`. Print it, with its assumptions, or plot it.

    Attributes:
        work: what the step does.
        machine: what it does it on.
        parts: ratios that fit are looked for in steps of `1 / parts`.
    """

    work: OffloadWork
    machine: Machine
    parts: int = 100

    def device_bytes(self, ratio: float) -> float:
        """Return the device's peak at a ratio, on the line between the peaks at 0 and 1.

        Raises:
            ValueError: if `ratio` is not from 0 to 1.
        """
        return _between(self.work.device_bytes, ratio)

    def host_bytes(self, ratio: float) -> float:
        """Return the host's peak for a rank at a ratio, on the line between the peaks at 0 and 1.

        Raises:
            ValueError: if `ratio` is not from 0 to 1.
        """
        return _between(self.work.host_bytes, ratio)

    @property
    def first_fit(self) -> float | None:
        """The smallest ratio, in steps of `1 / parts`, that fits the device; None if none does."""
        none, all_ = self.work.device_bytes
        over = none - self.machine.device_bytes
        if over <= 0:
            return 0.0
        k = math.ceil(round(self.parts * over / (none - all_), 9)) if none > all_ else self.parts + 1
        return k / self.parts if k <= self.parts else None

    def seconds(self, ratio: float, update: str = "host", schedule: str = "after") -> float:
        """Return the seconds of a step at a ratio.

        C is the time of the passes, its FLOPs over the machine's. D is that of the device's update, of all elements
        that it updates, by bytes that one loop reads and writes. H is that of the host's chain: down, update, up, unit
        by unit, so it takes the slowest of the three and of the others one unit's share.

        - "after": C + max(D, H). A clip by a global norm waits for the whole backward pass.
        - "during": F + max(B + D, H + B / units), of the forward and backward pass. Gradients of the host's units come
          first, and nothing waits for a norm.
        - "across": max(C + D, H). The host works beside a whole step, as with `optim.offload(delay=1)`.

        Args:
            ratio: from 0 to 1.
            update: "host", in one loop. "device", where the state comes up and goes back, both ways at once.
                "deepspeed", on the host with a pass to widen gradients and one to narrow parameters.
            schedule: "after"; "during" without DeepSpeed; "across" with "host" alone.

        Raises:
            ValueError: if an argument is none of these.
        """
        if update not in WAYS:
            raise ValueError(f"update={update!r}: expected one of {WAYS}")
        if (update, schedule) not in ROWS:
            known = " or ".join([repr(s) for way, s in ROWS if way == update])
            raise ValueError(f"schedule={schedule!r}: expected {known} with update={update!r}")
        work, machine = self.work, self.machine
        compute, forward = work.flops / machine.flops, work.forward_flops / machine.flops
        backward, chain = compute - forward, self.chain_seconds(ratio, update)
        mine = 1 if update == "device" else 1 - ratio
        device = mine * work.update_bytes / machine.device_memory
        if schedule == "after":
            return compute + max(device, chain)
        if schedule == "during":
            begun = backward / work.units if ratio else 0.0
            return forward + max(backward + device, chain + begun)
        return max(compute + device, chain)

    def chain_seconds(self, ratio: float, update: str = "host") -> float:
        """Return the seconds of the host's chain: down, update and up, unit by unit.

        Raises:
            ValueError: if `ratio` is not from 0 to 1.
        """
        work, machine = self.work, self.machine
        _between((0, 1), ratio)
        if update == "device":  # the host's memory serves both directions
            most = max(work.state_bytes / machine.link, 2 * work.state_bytes / (machine.host_copies / machine.ranks))
            return ratio * most * (1 + 2 / work.units)
        read = work.update_bytes + (WIDENED * work.elements if update == "deepspeed" else 0)
        parts = (
            work.down_bytes / machine.link,
            read / (machine.host_memory / machine.ranks),
            work.up_bytes / machine.link,
        )
        return ratio * (max(parts) + (sum(parts) - max(parts)) / work.units)

    def fastest(self, update: str = "host", schedule: str = "after") -> float:
        """Return the ratio that fits at which a step is fastest: larger than the first where the host is free.

        Raises:
            ValueError: if an argument is none of those of `seconds`, or no ratio fits.
        """
        first = round(self._fitting() * self.parts)
        ratios = [k / self.parts for k in range(first, self.parts + 1)]
        return min(ratios, key=lambda r: (round(self.seconds(r, update, schedule), 12), r))

    def speed_up(self, update: str = "host", schedule: str = "after", over: str = "deepspeed") -> float:
        """Return how many times as long a step takes with all offloaded, "after", as at the first ratio that fits.

        Args:
            update: of the step at the first ratio that fits, as of `seconds`.
            schedule: likewise.
            over: the update of the step with all offloaded.

        Raises:
            ValueError: if an argument is none of those of `seconds`, or no ratio fits.
        """
        return self.seconds(1, over) / self.seconds(self._fitting(), update, schedule)

    def _fitting(self) -> float:
        if (first := self.first_fit) is None:
            raise ValueError(
                f"{self.work.name} fits {self.machine.name} at no ratio: with all offloaded it takes "
                f"{size(self.device_bytes(1))} of {size(self.machine.device_bytes)}"
            )
        return first

    def __repr__(self) -> str:
        return f"OffloadCosts({self.work.name} on {self.machine.name}: first ratio that fits {self.first_fit})"

    def __str__(self) -> str:
        first = self.first_fit
        ratios: list[float] = sorted({0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, first or 0.0})
        rows = [("update, schedule", [f"{r:g}" for r in ratios])]
        rows += [(f"{way}, {s}", [duration(self.seconds(r, way, s)) for r in ratios]) for way, s in ROWS]
        rows += [("device", [size(self.device_bytes(r)) for r in ratios])]
        rows += [("host, for a rank", [size(self.host_bytes(r)) for r in ratios])]
        wide = max([len(cell) for _, cells in rows for cell in cells])
        table = [f"{name:<18}" + "".join([f"  {cell:>{wide}}" for cell in cells]) for name, cells in rows]
        return "\n".join([str(self.work), str(self.machine), *self._answer(), *table])

    def _answer(self) -> list[str]:
        room = size(self.machine.device_bytes)
        if self.first_fit is None:
            return [f"no ratio fits {room} of the device"]
        times, ours = self.speed_up("deepspeed"), self.speed_up()
        return [
            f"fits {room} from ratio {self.first_fit:g}. With all offloaded DeepSpeed's way takes {times:.1f} times as "
            f"long as at that ratio,\nand {ours:.1f} times as long as an update in one loop takes at that ratio"
        ]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw seconds by ratio into an image file, with the first ratio that fits marked (matplotlib).

        Args:
            path: of the file: its ending says the format, such as ".png" or ".svg".
        """
        _picture.draw(self).savefig(path, dpi=120)

    def _repr_html_(self) -> str:
        return shown(str(self), "seconds of a step by ratio", lambda: _picture.draw(self))


@api_boundary
def offload_costs(work: OffloadWork, machine: Machine, parts: int = 100) -> OffloadCosts:
    """Say how long a step takes at each ratio of offload, by a model; not what a machine was measured to take.

    The model knows FLOPs, bytes of each memory, and bytes of the link. Collectives are taken to run beside the passes,
    kernels to reach the speeds of `machine`, and copies to run beside work.

    Args:
        work: what the step does: `model_work` of a model's size, or `planned_work` of a step of yours.
        machine: what it runs on: `tuning.A100`, `H100`, `H200`, or a `Machine` of your measurements.
        parts: ratios that fit are looked for in steps of `1 / parts`.

    Returns:
        An `OffloadCosts`.

    Raises:
        TypeError: if `work` or `machine` is another thing.
        ValueError: if `parts` is no int from 1 on.

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
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise ValueError(f"parts={parts!r}: expected an int, at least 1")
    return OffloadCosts(work, machine, parts)


def _between(ends: tuple[float, float], ratio: float) -> float:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio={ratio!r}: expected a number from 0 to 1")
    return ends[0] + ratio * (ends[1] - ends[0])
