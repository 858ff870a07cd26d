"""Run one rank's part of a schedule: action by action, and the messages between them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fzero import tree
from fzero._dtypes import sum_dtype
from fzero._torch import rank_group
from fzero.axes import is_lockstep
from fzero.collectives import StageMessages
from fzero.parallel.pipeline._stage_functions import FlatParams, PipelineStages
from fzero.parallel.pipeline._value_specs import loss_cotangent, probe_value_spec
from fzero.parallel.schedules import Action, Value, action_output, programs

__all__ = ["RankExecutor"]


@dataclass
class RankExecutor:
    """One rank's part of a schedule, as it runs.

    Attributes:
        stages: the pipeline's stages.
        params: this rank's parameters.
        backward: whether backward passes run too.
        scale: the loss scale, by which gradients are multiplied from the backward passes until they are returned.
        grads: by the index of a parameter, the gradient so far; None once the gradients are returned.
        vjp_fns: by stage and micro-batch, the function of the backward pass. It holds the residuals.
        deferred_grads: by stage and micro-batch, the gradients that "I" computed, which "W" will add.
        sums: the total and the weight so far.
    """

    stages: PipelineStages
    params: FlatParams
    backward: bool
    scale: torch.Tensor | None = None
    grads: dict[int, torch.Tensor] | None = field(default_factory=dict)
    vjp_fns: dict[tuple[int, int], Callable[..., Any]] = field(default_factory=dict)
    deferred_grads: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    sums: list[torch.Tensor] = field(default_factory=list)

    def run(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all instructions of the rank, and return the total and the weight."""
        tensors, stages = [x.detach() for x in tensors], self.stages
        _check_same_schedule(stages, tensors[0].device)
        spec = probe_value_spec(stages, self.params, tensors)
        leaves, structure = tree.flatten(spec.x)
        messages = StageMessages(stages.schedule, stages.axis.binding, leaves, spec.device)
        for instruction in programs(stages.schedule)[stages.axis.rank]:
            if isinstance(instruction.operand, Action) and (self.backward or instruction.operand.kind == "F"):
                self._run_action(instruction.operand, tensors, messages, structure)
            elif self.backward or instruction.operand.kind == "F":
                messages.execute(instruction)
        zero = torch.zeros((), dtype=spec.total, device=spec.device)
        total, weight = self.sums or (zero, zero.clone())
        return total, weight

    def scaled_grads(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients, multiplied by the gradient of the total. Each is freed as it is returned."""
        if self.grads is None:
            raise RuntimeError(
                "fzero.pipeline: this loss was differentiated before; differentiate it once, or call it again"
            )
        grads, self.grads = self.grads, None
        total = total if self.scale is None else total / self.scale
        results: list[torch.Tensor | None] = []
        for index, like in enumerate(self.params.tensors):
            grad = grads.pop(index, None)
            results.append(None if grad is None else (grad * total.to(grad.dtype)).to(like.dtype))
        return results

    def _run_action(self, action: Action, tensors: list[torch.Tensor], messages: StageMessages, structure: Any) -> None:
        """Run an action, and pass its result to the next stage, or to a message."""
        stage, m = action.stage, action.micro_batch
        if action.kind == "W":
            self._add_grads(stage, self.deferred_grads.pop((stage, m)))
            return
        if action.kind == "F":
            inputs = messages.take(Value("F", stage - 1, m)) if stage else []
            f = self.stages.function(stage, self.params, structure, self.stages.make_call(m))
            outputs = self._run_forward(stage, m, f, [tensors[i] for i in self._stage_indices(stage)], inputs)
        else:
            inputs = messages.take(Value("G", stage + 1, m)) if stage < self.stages.last else []
            outputs = self._run_backward(stage, m, inputs, is_input_only=action.kind == "I")
        if outputs and (value := action_output(action)):
            messages.put(value, outputs)

    def _stage_indices(self, stage: int) -> list[int]:
        return self.params.indices(*self.stages.uses(stage))

    def _run_forward(
        self, stage: int, m: int, f: Callable[..., Any], weights: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a stage on a micro-batch, and return the output for the next stage."""
        if self.backward:
            outputs, vjp_fn, aux = torch.func.vjp(f, weights, inputs, has_aux=True)  # pyright: ignore[reportAssignmentType]
            self.vjp_fns[stage, m] = vjp_fn
        else:
            outputs, aux = f(weights, inputs)
        if stage < self.stages.last:
            return list(outputs)
        self.sums = [outputs, aux] if not self.sums else [x + y for x, y in zip(self.sums, (outputs, aux), strict=True)]
        return []

    def _run_backward(self, stage: int, m: int, inputs: list[torch.Tensor], is_input_only: bool) -> list[torch.Tensor]:
        """Run a stage backward, and return the gradient of its input. Its residuals are freed."""
        cotangent: Any = loss_cotangent(self.sums[0], self.scale) if stage == self.stages.last else inputs
        weight_grads, x = self.vjp_fns.pop((stage, m))(cotangent, retain_graph=False)
        if is_input_only:
            self.deferred_grads[stage, m] = list(weight_grads)
        else:
            self._add_grads(stage, list(weight_grads))
        return list(x)

    def _add_grads(self, stage: int, new_grads: list[torch.Tensor]) -> None:
        """Add gradients of a stage's parameters, at least in float32."""
        assert self.grads is not None
        for index in self._stage_indices(stage):
            new_grad = new_grads.pop(0)
            if index in self.grads:
                self.grads[index] = self.grads[index].add_(new_grad)
            else:
                dtype = sum_dtype(new_grad.dtype)
                self.grads[index] = new_grad.clone() if new_grad.dtype == dtype else new_grad.to(dtype)


def _check_same_schedule(stages: PipelineStages, device: torch.device) -> None:
    """Check once that the processes along the axis have the same schedule, since they would deadlock otherwise.

    Raises:
        ValueError: on all ranks, if two schedules differ. The message names the two ranks.
    """
    binding, table = stages.axis.binding, stages.schedule
    if is_lockstep(binding.group) or binding.group in stages.cache.checked_groups:
        return  # in lockstep, an error names the ranks that wait
    text = repr((table.rows, table.rank_of_stage, stages.placement.blocks))
    schedule_hash = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    hashes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(stages.axis.size)]
    dist.all_gather(hashes, torch.tensor([schedule_hash], device=device), group=rank_group(binding.group))
    values = [x.item() for x in hashes]
    for rank, number in enumerate(values):
        if number != values[0]:
            raise ValueError(
                f"fzero.pipeline: the ranks along {stages.axis.name!r} have different schedules: rank {rank} "
                f"differs from rank 0. This rank has {table.name!r} of {table.micro_batches} micro-batches. Use the "
                "same schedule on all ranks: if it depends on measured durations, take those of one rank"
            )
    stages.cache.checked_groups.add(binding.group)
