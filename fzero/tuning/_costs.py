"""Seconds of a step by the share of its optimizer's state that lies on the host: a model, with its assumptions."""

import math
import os
from dataclasses import dataclass

from fzero._notebook import shown
from fzero._tracebacks import api_boundary
from fzero.graph import Plan, size
from fzero.tuning import _costs_picture
from fzero.tuning._machines import Machine
from fzero.tuning._row import MakeStep, World, plan_at
from fzero.tuning._table_views import duration

__all__ = [
    "ADAM_BYTES",
    "SCHEDULES",
    "WAYS",
    "OffloadCosts",
    "OffloadWork",
    "model_work",
    "offload_costs",
    "planned_work",
]

# What a step does on one rank, at ratio 0 of offload and at 1: of a model by its size, or of a step by its plans.


ADAM_BYTES = 12  # of a parameter: its master weight and two moments, in float32


@dataclass(frozen=True)
class OffloadWork:
    """What one rank does in a step, as far as offload matters. Between ratios 0 and 1 each number lies on a line.

    Attributes:
        name: of the model or the step.
        assumptions: what the numbers are made of, in words.
        elements: of the rank's share of the optimizer's state.
        flops: floating-point operations of a step.
        forward_flops: those of the forward pass.
        device_bytes: the device's peak, at ratio 0 and at 1.
        host_bytes: the host's peak for this rank, at ratio 0 and at 1.
        state_bytes: that lie on the host at ratio 1 between steps.
        down_bytes: of gradients (and what else the host reads) that go down at ratio 1.
        up_bytes: of results that come up at ratio 1.
        units: how many turns the chain down, update, up takes, in which one turn's copies are beside another's update.
    """

    name: str
    assumptions: str
    elements: float
    flops: float
    forward_flops: float
    device_bytes: tuple[float, float]
    host_bytes: tuple[float, float]
    state_bytes: float
    down_bytes: float
    up_bytes: float
    units: float

    @property
    def update_bytes(self) -> float:
        """Bytes that one loop over all elements reads and writes: gradient in, state in and out, result out.

        A result's memory counts twice: a write to what was not read fetches it first. With bfloat16 and Adam these are
        2 + 12 + 12 + 2 + 2 = 30 bytes an element.
        """
        return self.down_bytes + 2 * self.state_bytes + 2 * self.up_bytes

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops / 1e12:,.3g} TFLOP, {size(self.state_bytes)} of state a rank; "
            f"{size(self.down_bytes)} down, {size(self.up_bytes)} up, in {self.units:,.0f} turns\n({self.assumptions})"
        )


@api_boundary
def model_work(
    parameters: float,
    *,
    ranks: int,
    tokens: float,
    stage: int = 3,
    remat: bool = True,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    state_bytes: int = ADAM_BYTES,
    overhead_bytes: float = 0.0,
    units: int = 48,
    name: str = "",
) -> OffloadWork:
    """Say what a step of a model of a size does on each rank, by formulas alone.

    Bytes of the device are those of table 1 of ZeRO (arXiv:1910.02054). Work is 2 FLOPs a parameter and token forward,
    4 backward (arXiv:2001.08361), and with remat 2 for the forward pass again. The host has, of each element, the
    state, the gradient on its way down, and the parameter on its way up: 12 + 2 + 2 bytes.

    Args:
        parameters: of the model.
        ranks: over which the state is cut.
        tokens: of a rank in a step.
        stage: of ZeRO, 1 to 3.
        remat: whether the forward pass runs again for the backward pass.
        parameter_bytes: of a parameter.
        gradient_bytes: of its gradient.
        state_bytes: of its optimizer state; 12 are Adam's with master weights.
        overhead_bytes: of the device, for activations, gathered units and workspaces.
        units: in which gradients go down and parameters come up.
        name: of the model.

    Returns:
        An `OffloadWork`.

    Raises:
        ValueError: if a number is not above 0, or `stage` is not 1, 2 or 3.

    Example:
        >>> from fzero import tuning
        >>> work = tuning.model_work(10e9, ranks=1, tokens=2048, stage=2, name="10 B parameters")
        >>> work.host_bytes[1] / 10e9, work.device_bytes[1] / 10e9  # bytes a parameter, with all of the state offloaded
        (16.0, 2.0)
    """
    asked = {"parameters": parameters, "ranks": ranks, "tokens": tokens, "units": units, "state_bytes": state_bytes}
    asked |= {"parameter_bytes": parameter_bytes, "gradient_bytes": gradient_bytes}
    for word, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{word}={value!r}: expected a number above 0")
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage!r}: expected 1, 2 or 3")
    share = parameters / ranks
    whole = (parameters if stage < 3 else share) * parameter_bytes + overhead_bytes
    grads = (parameters if stage < 2 else share) * gradient_bytes
    left = grads if stage < 2 else 0.0  # a whole gradient stays where it is
    return OffloadWork(
        name or f"{parameters / 1e9:g} B parameters",
        ", ".join(
            [
                f"{parameters / 1e9:g} B parameters on {ranks} {'rank' if ranks == 1 else 'ranks'} at stage {stage}",
                f"{tokens:,.0f} tokens a rank and step",
                f"{8 if remat else 6} FLOPs a parameter and token{' with remat' if remat else ''}",
                f"{parameter_bytes} + {gradient_bytes} + {state_bytes} bytes a parameter",
                f"{size(overhead_bytes)} besides",
            ]
        ),
        share,
        (8 if remat else 6) * parameters * tokens,
        2 * parameters * tokens,
        (whole + grads + state_bytes * share, whole + left),
        (0.0, (state_bytes + gradient_bytes + parameter_bytes) * share),
        state_bytes * share,
        gradient_bytes * share,
        parameter_bytes * share,
        units,
    )


@api_boundary
def planned_work(make_step: MakeStep, world_size: World = None) -> OffloadWork:
    """Say what a step of yours does on each rank, by its plans at ratios 0 and 1.

    What moves at ratio 0 already, such as activations of `remat(save="host")`, is taken to go on beside the passes.

    Args:
        make_step: as of `offload_ratio`: a function from a ratio to `(step, *args)`, or to a plan. Its step is one
            without `delay`; the costs have that schedule too.
        world_size: as of `fzero.plan`.

    Returns:
        An `OffloadWork`. Its elements are counted as of 12 bytes of state each.

    Raises:
        TypeError: if `make_step` is no such function.
        ValueError: if its step moves nothing at ratio 1, or updates on the device. The costs of `update="device"` are
            told from those of "host", and not the other way round.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim, tuning
        >>> def make_step(ratio):
        ...     opt = optim.offload(optim.adam(1e-3), ratio)
        ...
        ...     def train_step(params, opt_state, x):
        ...         grads = torch.func.grad(lambda p: (x @ p["w"]).square().mean())(params)
        ...         updates, opt_state = opt.update(grads, opt_state, params)
        ...         return optim.apply_updates(params, updates), opt_state
        ...
        ...     params = {"w": torch.zeros(256, 256, device="meta")}
        ...     return fzero.jit(train_step), params, opt.init(params), torch.zeros(16, 256, device="meta")
        >>> work = tuning.planned_work(make_step)
        >>> work.state_bytes, work.down_bytes, work.up_bytes
        (524288, 262144, 262144)
    """
    none, all_ = (plan_at(make_step, ratio, world_size) for ratio in (0, 1))
    state = _given_on_host(all_) - _given_on_host(none)
    down, up = (_moved(all_, kind) - _moved(none, kind) for kind in ("to_host", "to_device"))
    if min(state, down, up) <= 0:
        raise ValueError(
            "make_step: its plan at ratio 1 has no more on the host than that at 0: does it hand its argument to "
            "optim.offload, around a pair that has a state?"
        )
    if not _computes_on_host(all_):
        raise ValueError('make_step: its step updates on the device: plan it with update="host", the costs have both')
    largest = max([t.bytes for t in all_.transfers if t.kind == "to_device"])
    return OffloadWork(
        all_.name,
        "by its plans at ratios 0 and 1; elements of 12 bytes of state",
        state / ADAM_BYTES,
        none.flops,
        sum([o.flops * o.times for o in none.operations if o.phase == "forward"]),
        (none.peak_bytes, all_.peak_bytes),
        (none.peak_of("host"), all_.peak_of("host")),
        state,
        down,
        up,
        max(_moved(all_, "to_device") / largest, 1),
    )


def _given_on_host(plan: Plan) -> int:
    return sum([r.bytes for r in plan.ranges if r.space == "host" and r.start < 0])


def _moved(plan: Plan, kind: str) -> int:
    return sum([t.bytes * t.times for t in plan.transfers if t.kind == kind])


def _computes_on_host(plan: Plan) -> bool:
    """Return whether the host has values that were neither given nor sent to it; numbers do not count."""
    arrived = {t.position for t in plan.transfers}
    return any(r.space == "host" and r.start >= 0 and r.start not in arrived and r.bytes > 8 for r in plan.ranges)


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
        _costs_picture.draw(self).savefig(path, dpi=120)

    def _repr_html_(self) -> str:
        return shown(str(self), "seconds of a step by ratio", lambda: _costs_picture.draw(self))


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
