"""The work of a step on one rank, at offload ratios 0 and 1: from the size of a model, or from the plans of a step."""

from dataclasses import dataclass

from fzero._format import format_bytes
from fzero._tracebacks import api_boundary
from fzero.graph import Plan
from fzero.tuning._configured_step import MakeStep, World, plan_at

__all__ = ["OffloadWork", "model_work", "planned_work"]


_ADAM_BYTES = 12  # for each parameter: a master weight and two moments, in float32


@dataclass(frozen=True)
class OffloadWork:
    """The work of one rank in a step, as far as offload matters. Each number is linear in the ratio.

    Attributes:
        name: the name of the model or the step.
        assumptions: the assumptions behind the numbers, as text.
        elements: how many parameters the rank's share of the optimizer state covers.
        flops: floating-point operations of a step.
        forward_flops: floating-point operations of the forward pass.
        device_bytes: peak bytes on the device, at ratios 0 and 1.
        host_bytes: peak bytes on the host for this rank, at ratios 0 and 1.
        state_bytes: bytes of optimizer state on the host between steps, at ratio 1.
        down_bytes: bytes of gradients (and other inputs of the update) that are copied to the host at ratio 1.
        up_bytes: bytes of results that are copied to the device at ratio 1.
        units: how many units pass through the chain of copy down, update and copy up. The copies of one unit overlap
            with the update of another.
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

        A result counts twice, since a write to memory that was not read fetches it first. With bfloat16 and Adam the
        sum is 2 + 12 + 12 + 2 + 2 = 30 bytes an element.
        """
        return self.down_bytes + 2 * self.state_bytes + 2 * self.up_bytes

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops / 1e12:,.3g} TFLOP, {format_bytes(self.state_bytes)} of state a rank; "
            f"{format_bytes(self.down_bytes)} down, {format_bytes(self.up_bytes)} up, in {self.units:,.0f} units\n"
            f"({self.assumptions})"
        )


@api_boundary
def model_work(
    num_params: float,
    *,
    ranks: int,
    tokens: float,
    stage: int = 3,
    remat: bool = True,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    state_bytes: int = _ADAM_BYTES,
    overhead_bytes: float = 0.0,
    units: int = 48,
    name: str = "",
) -> OffloadWork:
    """Estimate the work of a step on each rank from the size of the model, by formulas alone.

    Bytes on the device are from table 1 of ZeRO (arXiv:1910.02054). The forward pass takes 2 FLOPs for each parameter
    and token, and the backward pass 4 (arXiv:2001.08361). Remat adds 2 for the second forward pass. For each element
    the host holds the state, the gradient on its way down, and the parameter on its way up: 12 + 2 + 2 bytes.

    Args:
        num_params: the number of parameters of the model.
        ranks: the number of ranks over which the state is sharded.
        tokens: tokens of a rank in a step.
        stage: the stage of ZeRO, 1 to 3.
        remat: whether the backward pass recomputes the forward pass.
        parameter_bytes: bytes of a parameter.
        gradient_bytes: bytes of its gradient.
        state_bytes: bytes of its optimizer state; 12 for Adam with master weights.
        overhead_bytes: bytes on the device for activations, gathered units and workspaces.
        units: the number of units in which gradients go down and parameters come up.
        name: the name of the model.

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
    numbers = {"num_params": num_params, "ranks": ranks, "tokens": tokens, "units": units, "state_bytes": state_bytes}
    numbers |= {"parameter_bytes": parameter_bytes, "gradient_bytes": gradient_bytes}
    for argument, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{argument}={value!r}: expected a number above 0")
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage!r}: expected 1, 2 or 3")
    share = num_params / ranks
    params = (num_params if stage < 3 else share) * parameter_bytes + overhead_bytes
    grads = (num_params if stage < 2 else share) * gradient_bytes
    device_grads = grads if stage < 2 else 0.0  # full gradients stay on the device
    return OffloadWork(
        name or f"{num_params / 1e9:g} B parameters",
        assumptions=", ".join(
            [
                f"{num_params / 1e9:g} B parameters on {ranks} {'rank' if ranks == 1 else 'ranks'} at stage {stage}",
                f"{tokens:,.0f} tokens a rank and step",
                f"{8 if remat else 6} FLOPs a parameter and token{' with remat' if remat else ''}",
                f"{parameter_bytes} + {gradient_bytes} + {state_bytes} bytes a parameter",
                f"{format_bytes(overhead_bytes)} of overhead",
            ]
        ),
        elements=share,
        flops=(8 if remat else 6) * num_params * tokens,
        forward_flops=2 * num_params * tokens,
        device_bytes=(params + grads + state_bytes * share, params + device_grads),
        host_bytes=(0.0, (state_bytes + gradient_bytes + parameter_bytes) * share),
        state_bytes=state_bytes * share,
        down_bytes=gradient_bytes * share,
        up_bytes=parameter_bytes * share,
        units=units,
    )


@api_boundary
def planned_work(make_step: MakeStep, world_size: World = None) -> OffloadWork:
    """Derive the work of a step on each rank from its plans at ratios 0 and 1.

    Transfers at ratio 0, such as activations of `remat(save="host")`, are assumed to overlap with the passes.

    Args:
        make_step: as in `offload_ratio`: a function from a ratio to `(step, *args)`, or to a plan. The step must not
            use `delay`; the costs cover the schedule of a delayed update as well.
        world_size: as in `fzero.plan`.

    Returns:
        An `OffloadWork`. Its number of elements assumes 12 bytes of state for each.

    Raises:
        TypeError: if `make_step` is no such function.
        ValueError: if the step offloads nothing at ratio 1, or updates on the device. The costs of `update="device"`
            follow from a plan with `update_on="host"`, but not the other way round.

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
    state = _host_argument_bytes(all_) - _host_argument_bytes(none)
    to_host_bytes, to_device_bytes = (
        _transfer_bytes(all_, kind) - _transfer_bytes(none, kind) for kind in ("to_host", "to_device")
    )
    if min(state, to_host_bytes, to_device_bytes) <= 0:
        raise ValueError(
            "make_step: its plan at ratio 1 holds no more state on the host than the plan at ratio 0: does it pass its "
            "argument to optim.offload, around an optimizer that has a state?"
        )
    if not _computes_on_host(all_):
        raise ValueError(
            'make_step: its step updates on the device: use update_on="host", from which both costs follow'
        )
    largest = max([t.bytes for t in all_.transfers if t.kind == "to_device"])
    return OffloadWork(
        all_.name,
        assumptions="by its plans at ratios 0 and 1; 12 bytes of state an element",
        elements=state / _ADAM_BYTES,
        flops=none.flops,
        forward_flops=sum([o.flops * o.times for o in none.operations if o.phase == "forward"]),
        device_bytes=(none.peak_bytes, all_.peak_bytes),
        host_bytes=(none.peak_of("host"), all_.peak_of("host")),
        state_bytes=state,
        down_bytes=to_host_bytes,
        up_bytes=to_device_bytes,
        units=max(_transfer_bytes(all_, "to_device") / largest, 1),
    )


def _host_argument_bytes(plan: Plan) -> int:
    return sum([r.bytes for r in plan.ranges if r.space == "host" and r.start < 0])


def _transfer_bytes(plan: Plan, kind: str) -> int:
    return sum([t.bytes * t.times for t in plan.transfers if t.kind == kind])


def _computes_on_host(plan: Plan) -> bool:
    """Return whether values on the host are neither arguments nor copies from the device; scalars do not count."""
    arrivals = {t.position for t in plan.transfers}
    return any(r.space == "host" and r.start >= 0 and r.start not in arrivals and r.bytes > 8 for r in plan.ranges)
