"""A pipeline in a trace: each of a rank's stages is recorded once, forward and backward, as one iteration of a loop."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._dtypes import sum_dtype
from fzero.graph import loop
from fzero.parallel.pipeline._stage_functions import FlatParams, PipelineStages, ValueSpec
from fzero.parallel.pipeline._value_specs import loss_cotangent, probe

__all__ = ["RankRecorder"]


class RankRecorder:
    """Records one rank's part of a schedule, for a graph that will run it.

    Attributes:
        stages: the pipeline's stages.
        params: this rank's parameters.
        scale: the loss scale, by which gradients are multiplied from the backward passes until they are returned.
        sums: by the index of a parameter, the sums of its gradient: one for each of the rank's stages that may use it.
    """

    def __init__(self, stages: PipelineStages, params: FlatParams, scale: torch.Tensor | None) -> None:
        self.stages, self.params, self.scale = stages, params, scale
        self.sums: dict[int, list[torch.Tensor]] = {}

    def run(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Record an iteration, and return the total and the weight."""
        tensors = [x.detach() for x in tensors]
        loop.begin_shapes_only()
        spec = self.stages.make_call(0).run(probe, self.stages, self.params, tensors)
        loop.end_shapes_only()
        rank_schedule = loop.RankSchedule(self.stages.schedule, self.stages.axis.binding)
        iteration = loop.iteration(self.stages.schedule.micro_batches)
        loop.mark_pipeline(
            iteration,
            loop.rank_schedule_id(rank_schedule),
            tensors if self.scale is None else [*tensors, self.scale],
        )
        shares: dict[int, list[loop.LoopSum]] = {index: [] for index in range(len(tensors))}
        totals: list[loop.LoopSum] = []
        for stage in self.stages.rank_stages:
            totals += self._record_stage(stage, iteration, spec, tensors, shares)
        zero = torch.zeros((), dtype=spec.total, device=spec.device)
        totals = totals or [_without_share(zero, iteration), _without_share(zero, iteration)]
        for index, like in enumerate(tensors):
            count = self._sum_count(index) - len(shares[index])
            shares[index] += [_without_share(like, iteration) for _ in range(count)]
        # all ranks' loops return their sums in the same order, in whatever order stages compute them
        total, weight = [x.after() for x in totals]
        self.sums = {index: [x.after() for x in sums] for index, sums in shares.items()}
        return total, weight

    def scaled_grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients, multiplied by the gradient of the total."""
        grads, total = [], total if self.scale is None else total / self.scale
        for index, like in enumerate(self.params.tensors):
            first, *rest = self.sums.pop(index)
            for grad in rest:
                first = first + grad
            grads.append((first * total.to(first.dtype)).to(like.dtype))
        return grads

    def _sum_count(self, index: int) -> int:
        """Return the number of sums for a parameter: that of the rank with the most stages that use it."""
        if index < sum(self.params.sizes):
            return 1
        end_ranks = [self.stages.schedule.rank_of_stage[s] for s in {0, self.stages.last}]
        return len(end_ranks) - len(set(end_ranks)) + 1

    def _record_stage(
        self,
        stage: int,
        iteration: torch.Tensor,
        spec: ValueSpec,
        tensors: list[torch.Tensor],
        shares: dict[int, list[loop.LoopSum]],
    ) -> list[loop.LoopSum]:
        """Record a stage forward and backward. For the last stage, return the sums of the total and the weight."""
        leaves, structure = tree.flatten(spec.x)
        indices = self.params.indices(*self.stages.uses(stage))
        weights = [tensors[i] for i in indices]
        is_last = stage == self.stages.last
        loop.begin_region("F", stage)
        inputs = [] if stage == 0 else _record_receive("F", stage - 1, leaves, spec.device)
        f = self.stages.function(stage, self.params, structure, self.stages.make_call(iteration, in_loop=True))
        outputs, vjp_fn, aux = torch.func.vjp(f, weights, inputs, has_aux=True)  # pyright: ignore[reportAssignmentType]
        if not is_last:
            loop.send("F", stage, list(outputs))
        loop.begin_region("B", stage)
        cotangent: Any = (
            loss_cotangent(outputs, self.scale) if is_last else _record_receive("G", stage + 1, leaves, spec.device)
        )
        grads, x = vjp_fn(cotangent, retain_graph=False)
        if stage:
            loop.send("G", stage, list(x))
        for index, g in zip(indices, grads, strict=True):
            shares[index].append(_with_share(g, iteration))
        return [_with_share(x, iteration) for x in (outputs, aux)] if is_last else []


def _record_receive(kind: str, stage: int, leaves: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [
        loop.receive(kind, stage, leaf=i, sizes=list(x.shape), dtype=x.dtype, device=device)
        for i, x in enumerate(leaves)
    ]


def _with_share(share: torch.Tensor, iteration: torch.Tensor) -> loop.LoopSum:
    return loop.LoopSum.with_share(share, iteration, sum_dtype(share.dtype))


def _without_share(like: torch.Tensor, iteration: torch.Tensor) -> loop.LoopSum:
    return loop.LoopSum.without_share(like, iteration, sum_dtype(like.dtype))
