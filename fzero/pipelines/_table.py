"""A pipeline by its table: each rank does what its row says, and sends and receives between.

The forward pass of the loss makes the gradients, and its derivative hands them out: residuals of a micro-batch die in
its backward pass, which comes as early as the schedule says. So a loss by a table is differentiated once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero import tree
from fzero.collectives.gloo import Sent, wait
from fzero.collectives.messages import start_receive, start_send
from fzero.pipelines._kinds import kinds_of
from fzero.pipelines._stages import Params, Stages
from fzero.schedules import Action, Message
from fzero.schedules._actions import Value, makes
from fzero.schedules._program import Deed, programs

__all__ = ["run_table"]

Tensors = list[torch.Tensor]


def run_table(stages: Stages, slots: Sequence[Any], rest: Any, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this rank's row of a schedule.

    Args:
        stages: what to run.
        slots: this rank's blocks, by slot.
        rest: all other parameters.
        backward: whether the loss is about to be differentiated.

    Returns:
        The total and the weight; zeros on all ranks but that of the last stage.
    """
    params = Params.of(slots, rest)
    return _Table.apply(_Row(stages, params, backward), *params.tensors)  # pyright: ignore[reportReturnType]


class _Table(torch.autograd.Function):
    """The loss of a row. Its forward pass makes the gradients, which its backward pass scales and hands out."""

    @staticmethod
    def forward(row: "_Row", *tensors: torch.Tensor) -> Any:
        return row.run(list(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.row = inputs[0]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor, weight: Any) -> Any:
        return (None, *ctx.row.handed_out(total))


@dataclass
class _Row:
    """One rank's row of a schedule, as it runs.

    Attributes:
        stages: the pipeline's.
        params: this rank's parameters.
        backward: whether to run backward passes, too.
        grads: by place of a parameter, the gradient so far.
        arrived: values for this rank's stages, or the messages that bring them.
        leaving: what is on its way to other ranks.
        pulls: by stage and micro-batch, its backward pass: what it holds is the residual.
        halves: by stage and micro-batch, the gradients that "I" has made for "W".
        sums: the total and the weight so far.
    """

    stages: Stages
    params: Params
    backward: bool
    grads: dict[int, torch.Tensor] = field(default_factory=dict)
    arrived: dict[Value, list[Any]] = field(default_factory=dict)
    leaving: dict[Message, list[Sent]] = field(default_factory=dict)
    pulls: dict[tuple[int, int], Callable[..., Any]] = field(default_factory=dict)
    halves: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    sums: list[torch.Tensor] = field(default_factory=list)

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Do all deeds of the row; returns the total and the weight."""
        self.tensors = [x.detach() for x in tensors]
        self.kinds = kinds_of(self.stages, self.params, self.tensors)
        for deed in programs(self.stages.schedule)[self.stages.axis.rank]:
            if self.backward or not _goes_back(deed):
                self._do(deed)
        del self.tensors
        zero = torch.zeros((), dtype=self.kinds.total, device=self.kinds.device)
        total, weight = self.sums or (zero, zero.clone())
        return total, weight

    def handed_out(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients, times that of the total, each freed as it is handed out."""
        if self.grads is None:
            raise RuntimeError("fzero.pipeline: its backward pass ran already; differentiate the loss once")
        grads, self.grads = self.grads, None  # pyright: ignore[reportAttributeAccessIssue]
        found: list[torch.Tensor | None] = []
        for place, like in enumerate(self.params.tensors):
            grad = grads.pop(place, None)
            found.append(None if grad is None else (grad * total.to(grad.dtype)).to(like.dtype))
        return found

    def _do(self, deed: Deed) -> None:
        if isinstance(deed.of, Action):
            self._act(deed.of)
        elif deed.kind == "receive":
            self.arrived[Value(*deed.of[2:])] = self._receives(deed.of)
        elif deed.kind == "send":
            self.leaving[deed.of] = self._sends(deed.of)
        else:
            for sent in self.leaving.pop(deed.of):
                wait(sent)

    # ------------------------------------------------------------ messages

    def _tag(self, message: Message, leaf: int) -> int:
        """Return a tag that no other message has: of a kind, a stage, a micro-batch, and a leaf of x."""
        number = message.stage * self.stages.schedule.micro_batches + message.micro_batch
        return (2 * number + (message.kind == "G")) * len(self._leaves()) + leaf

    def _leaves(self) -> Tensors:
        return tree.flatten(self.kinds.x)[0]

    def _sends(self, message: Message) -> list[Sent]:
        xs = self.arrived.pop(Value(*message[2:]))
        binding = self.stages.axis.binding
        return [start_send(x, message.receiver, self._tag(message, i), binding) for i, x in enumerate(xs)]

    def _receives(self, message: Message) -> list[Sent]:
        binding, device = self.stages.axis.binding, self.kinds.device
        return [
            start_receive(torch.empty_like(x, device=device), message.sender, self._tag(message, i), binding)
            for i, x in enumerate(self._leaves())
        ]

    def _taken(self, value: Value) -> Tensors:
        return [wait(x) if isinstance(x, Sent) else x for x in self.arrived.pop(value)]

    # ------------------------------------------------------------ actions

    def _act(self, action: Action) -> None:
        """Run an action, and keep what it makes where the next one, or a message, finds it."""
        stage, m = action.stage, action.micro_batch
        if action.kind == "F":
            made = self._forward(stage, m, self._taken(Value("F", stage - 1, m)) if stage else [])
        elif action.kind == "W":
            self._add(stage, self.halves.pop((stage, m)))
            return
        else:
            given = self._taken(Value("G", stage + 1, m)) if stage < self.stages.last else []
            made = self._backward(stage, m, given, half=action.kind == "I")
        if made:
            value = makes(action)
            assert value is not None
            self.arrived[value] = made

    def _forward(self, stage: int, m: int, given: Tensors) -> Tensors:
        """Run a stage on a micro-batch; returns what goes to the next stage."""
        structure = tree.flatten(self.kinds.x)[1]
        f = self.stages.function(stage, self.params, structure, self.stages.call_of(m))
        own = [self.tensors[i] for i in self.params.places(*self.stages.uses(stage))]
        if self.backward:
            made, pull, aux = torch.func.vjp(f, own, given, has_aux=True)
            self.pulls[stage, m] = pull
        else:
            made, aux = f(own, given)
        if stage < self.stages.last:
            return list(made)
        self.sums = [made, aux] if not self.sums else [x + y for x, y in zip(self.sums, (made, aux), strict=True)]
        return []

    def _backward(self, stage: int, m: int, given: Tensors, half: bool) -> Tensors:
        """Run a stage backward; returns the gradient of what it was given. Its residuals are freed."""
        cotangent: Any = torch.ones_like(self.sums[0]) if stage == self.stages.last else given
        own, x = self.pulls.pop((stage, m))(cotangent, retain_graph=False)
        if half:
            self.halves[stage, m] = list(own)
        else:
            self._add(stage, list(own))
        return list(x)

    def _add(self, stage: int, found: Tensors) -> None:
        """Add gradients of a stage's parameters, in float32 at least."""
        for place in self.params.places(*self.stages.uses(stage)):
            new = found.pop(0)
            if place in self.grads:
                self.grads[place] = self.grads[place].add_(new)
            else:
                wide = torch.promote_types(new.dtype, torch.float32)
                self.grads[place] = new.clone() if new.dtype == wide else new.to(wide)


def _goes_back(deed: Deed) -> bool:
    """Return whether a deed is a part of the backward pass."""
    return deed.of.kind != "F"
