"""What a step does on one rank, at ratio 0 of offload and at 1: of a model by its size, or of a step by its plans."""

from dataclasses import dataclass

from fzero._tracebacks import api_boundary
from fzero.graph.plan._plan import Plan
from fzero.graph.plan._text import size
from fzero.tuning._planned import MakeStep, World, planned_at

__all__ = ["ADAM_BYTES", "OffloadWork", "model_work", "planned_work"]

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
    none, all_ = (planned_at(make_step, ratio, world_size) for ratio in (0, 1))
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
