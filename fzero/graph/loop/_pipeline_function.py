"""A rank of a pipeline runs each region on a micro-batch, in the order of its row of the schedule."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.collectives import StageMessages
from fzero.graph.ir import graph_results, node_stand_ins
from fzero.graph.loop._loop import Loop
from fzero.graph.loop._rank_schedule import action_regions
from fzero.graph.loop._split import RegionGraph, Residual, StageLeaf
from fzero.parallel.schedules import Action, Value, programs

__all__ = ["pipeline_function"]


_Body = Callable[[list[Any]], Sequence[Any]]


def pipeline_function(
    loop: Loop, region_graphs: Sequence[RegionGraph], bodies: Sequence[_Body]
) -> Callable[..., list[torch.Tensor]]:
    """Return the function of a pipeline's loop: it maps the loop's arguments to its sums.

    Args:
        loop: the loop.
        region_graphs: the loop's body, split into regions.
        bodies: run the regions. Each writes the new sums over the old ones, and removes its arguments from the list.
    """
    assert loop.rank_schedule is not None
    rank_schedule, sums_start = loop.rank_schedule, len(loop.slices)
    regions = {g.region: (g, body) for g, body in zip(region_graphs, bodies, strict=True)}
    readers = Counter([x for g in region_graphs for x in g.inputs if isinstance(x, Residual)])
    leaves, device = _leaf_stand_ins(region_graphs)
    row = programs(rank_schedule.schedule)[rank_schedule.binding.rank]
    messages = {Value(m.kind, m.stage, m.micro_batch): m for m in rank_schedule.schedule.messages}

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run this rank's row of the pipeline schedule, and return the sums."""
        iterations = _Iterations(
            loop, inputs, dict(readers), StageMessages(rank_schedule.schedule, rank_schedule.binding, leaves, device)
        )
        for instruction in row:
            if not isinstance(instruction.operand, Action):
                iterations.messages.execute(instruction)
                continue
            for region in action_regions(instruction.operand):
                if region not in regions:  # the first stage has no gradient to send
                    continue
                value = iterations.run(*regions[region], instruction.operand.micro_batch)
                if value is not None and value in messages:
                    iterations.messages.send(messages[value])
        return list(inputs[sums_start : sums_start + loop.sum_count])

    run.__name__ = run.__qualname__ = "pipeline"
    return run


def _leaf_stand_ins(region_graphs: Sequence[RegionGraph]) -> tuple[list[torch.Tensor], torch.device]:
    """Return stand-ins of the leaves that stages send to one another, and the leaves' device."""
    leaves: dict[int, torch.Tensor] = {}
    for region_graph in region_graphs:
        outputs = [(value, n) for value, n in zip(region_graph.outputs, graph_results(region_graph.graph), strict=True)]
        inputs = [n for n in region_graph.graph.nodes if n.op == "placeholder"]
        for value, n in [*zip(region_graph.inputs, inputs, strict=True), *outputs]:
            if isinstance(value, StageLeaf):
                leaves[value.leaf] = node_stand_ins(n)[0]
    stand_ins = [torch.empty(leaves[i].shape, dtype=leaves[i].dtype, device="meta") for i in sorted(leaves)]
    return stand_ins, leaves[0].device if leaves else torch.device("cpu")


@dataclass
class _Iterations:
    """The iterations of a pipeline's loop that are in flight.

    Attributes:
        loop: the loop.
        inputs: the loop's arguments.
        readers: for each residual, the number of regions that read it.
        messages: the messages between stages.
        residuals: for each micro-batch and residual, its value and the number of regions that have yet to read it.
    """

    loop: Loop
    inputs: Sequence[torch.Tensor]
    readers: dict[Residual, int]
    messages: StageMessages
    residuals: dict[tuple[int, Residual], list[Any]] = field(default_factory=dict)

    def run(self, region: RegionGraph, body: _Body, m: int) -> Value | None:
        """Run a region on micro-batch m; return the value that it computes for another stage, if any."""
        received: dict[Value, list[torch.Tensor]] = {}
        args = [self._region_argument(x, m, received) for x in region.inputs]
        received.clear()
        out = list(body(args))
        by_value: dict[Value, list[torch.Tensor]] = {}
        for output, x in zip(region.outputs, out, strict=True):
            if isinstance(output, Residual):
                self.residuals[m, output] = [x, self.readers[output]]
            elif isinstance(output, StageLeaf):
                by_value.setdefault(Value(output.kind, output.stage, m), []).append(x)  # pyright: ignore[reportArgumentType]
        for value, xs in by_value.items():
            self.messages.put(value, xs)
        return next(iter(by_value), None)

    def _region_argument(
        self, source: int | Residual | StageLeaf, m: int, received: dict[Value, list[torch.Tensor]]
    ) -> Any:
        """Return an argument of a region: a residual, a leaf of a received value, or an input of the loop."""
        if isinstance(source, Residual):
            entry = self.residuals[m, source]
            entry[1] -= 1
            return self.residuals.pop((m, source))[0] if not entry[1] else entry[0]
        if isinstance(source, StageLeaf):
            value = Value(source.kind, source.stage, m)  # pyright: ignore[reportArgumentType]
            if value not in received:
                received[value] = self.messages.take(value)
            return received[value][source.leaf]
        if source == 0:
            return torch.tensor(m, device="cpu")
        x = self.inputs[source - 1]
        if source > len(self.loop.slices):
            return x
        loop_slice = self.loop.slices[source - 1]
        return x.narrow(loop_slice.dim, m * loop_slice.size, loop_slice.size)
