"""The plan of a step: its operations in order, live bytes and collectives, known before the step runs."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero._arguments import check_choice
from fzero._report import FigureReport
from fzero._torch import matrix_workspace_bytes, node_line
from fzero.graph.ir import (
    aten,
    collective_axes,
    collective_kind,
    display_name,
    flops,
    is_collective,
    is_input,
    is_move,
    moved_numel,
    nbytes,
    node_stand_ins,
    op_name,
)
from fzero.graph.loop import Loop, SentMessage, node_loop, sent_messages
from fzero.graph.planning import _views
from fzero.graph.planning._clocks import estimate_seconds, seconds_by_bound, timeline
from fzero.graph.planning._collective_units import infer_units
from fzero.graph.planning._hardware import Hardware
from fzero.graph.planning._phases import find_phases
from fzero.graph.planning.memory import (
    ITERATION,
    KINDS,
    AllocatorPeaks,
    Range,
    iteration_ranges,
    live_bytes,
    live_ranges,
    simulate_allocator,
)

__all__ = ["Plan", "PlanSettings", "RejectedSchedule", "make_plan"]


class _ListedOperation(NamedTuple):
    """An operation in a plan, and the number of times that it runs."""

    node: Node
    times: int


def _list_operations(graph: Graph) -> list[_ListedOperation]:
    """List a graph's operations, arguments included; those of a loop's body follow the loop."""
    operations = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        operations.append(_ListedOperation(node, 1))
        if loop := node_loop(node):
            operations += [_ListedOperation(n, loop.iterations) for n in loop.body.nodes if n.op == "call_function"]
    return operations


def _device_type(operations: Iterable[_ListedOperation]) -> str:
    """Return the type of the device on which values lie: the accelerator's, if one of them is there."""
    kinds = {x.device.type for n, _ in operations for x in node_stand_ins(n)}
    return min(sorted(kinds), key=("cpu", "meta").__contains__, default="cpu")


_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm}


def _workspace_bytes(operations: Iterable[_ListedOperation]) -> int:
    """Return the bytes that matrix products take for themselves, on the device of their results."""
    kinds = {
        node_stand_ins(n)[0].device.type
        for n, _ in operations
        if getattr(n.target, "overloadpacket", None) in _PRODUCTS
    }
    return max([matrix_workspace_bytes(kind) for kind in kinds], default=0)


def _plan_ranges(graph: Graph) -> list[Range]:
    """Return when each storage is alive, in positions of `_list_operations`."""
    first_positions: list[
        int
    ] = []  # each node's position in the list; `last_positions` has the position of its body's last operation
    last_positions: list[int] = []
    inner: list[Range] = []
    for node in graph.nodes:
        position, loop = last_positions[-1] + 1 if last_positions else 0, node_loop(node)
        body_ranges = [] if loop is None else _body_ranges(loop)
        first_positions.append(position)
        last_positions.append(position + (0 if loop is None else _body_length(loop)))
        inner += [r._replace(start=position + r.start, stop=position + r.stop) for r in body_ranges]
    last_positions.append(last_positions[-1] + 1)
    outer = [r for r in live_ranges(graph) if r.label != ITERATION]
    return inner + [
        r._replace(start=first_positions[r.start] if r.start >= 0 else -1, stop=last_positions[r.stop]) for r in outer
    ]


def _body_length(loop: Loop) -> int:
    return sum(n.op == "call_function" for n in loop.body.nodes)


def _body_ranges(loop: Loop) -> list[Range]:
    """Return when each storage of an iteration is alive, in positions relative to the loop's own."""
    arguments, length = sum(is_input(n) for n in loop.body.nodes) - 1, _body_length(loop)

    def position(i: int) -> int:
        return min(max(i - arguments, 0), length)

    return [r._replace(start=position(r.start), stop=position(r.stop)) for r in iteration_ranges(loop)]


_SPACES = ("device", "host")


class _Operation(NamedTuple):
    """One operation of a plan.

    Attributes:
        name: the name of its value in the graph, such as "mm_3".
        target: the function, such as "aten.mm.default"; for an argument, the argument's name.
        line: the source line that the operation was traced from.
        flops: the number of floating-point operations of one run.
        times: the number of runs: more than one in a loop over micro-batches.
        phase: "forward", "backward" or "update".
    """

    name: str
    target: str
    line: str
    flops: int
    times: int = 1
    phase: str = "forward"


PlanSettings = Mapping[str, bool | int | float | str]  # the arguments of the passes, by name


class RejectedSchedule(NamedTuple):
    """A schedule that was not chosen: its settings, its peak memory in bytes, and its seconds by the cost model."""

    settings: PlanSettings
    peak_bytes: int
    seconds: float


class _Collective(NamedTuple):
    """One collective of a plan.

    Attributes:
        position: the position of the operation that starts it.
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        unit: the unit whose parameters or gradients it moves; units of one bucket are joined by " + ". If the user's
            collective moves rows, such as tokens to experts or activations along "tp", it is the unit of the
            parameters that the rows meet. Other collectives of the user have "(metric)".
        elements: the number of elements of the full buffer, counted twice for an all_reduce.
        bytes: the bytes of these elements.
        times: the number of runs: more than one in a loop over micro-batches.
        axis: the mesh axis, or several joined by commas; "" if the process group belongs to no axis.
    """

    position: int
    kind: str
    unit: str
    elements: int
    bytes: int
    times: int = 1
    axis: str = ""


class _Transfer(NamedTuple):
    """A copy between the device's and the host's memory.

    Attributes:
        position: the position of the operation.
        kind: "to_host" or "to_device".
        bytes: the number of bytes that one run copies.
        times: the number of runs: more than one in a loop over micro-batches.
    """

    position: int
    kind: str
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class Plan(FigureReport):
    """The schedule of one step, with the live ranges of its values.

    `print` shows a summary. `plot` draws live bytes over the step, by kind, with passes and collectives.

    A plan does not see the memory that a step holds besides its values: most workspaces of kernels, and copies that a
    communication library makes. See docs/plan.md for measured sizes.

    Attributes:
        name: the name of the step.
        operations: the operations, in order.
        ranges: the storages, each with the positions between which it is alive, its size, kind and label.
        collectives: the collectives, in order.
        settings: the arguments of the passes that gave this schedule.
        seconds: the step's seconds by the cost model; good to compare schedules, not to predict a machine.
        rejected: the schedules that were not chosen.
        transfers: the copies from the device to the host and back, in order.
        messages: the messages that the rank sends to other ranks of its pipeline.
        workspace_bytes: the bytes that a GPU's matrix products take beside the peak, from the first product on.
        limits: the step's seconds by what bounds them: "products", "memory" (its bandwidth), "launches", "wire" (a
            wait for a collective), "host link", "host" or "pipeline". They add up to `seconds`.
        device_type: the type of the device on which the step's values lie, such as "cuda".
    """

    name: str
    operations: tuple[_Operation, ...]
    ranges: tuple[Range, ...]
    collectives: tuple[_Collective, ...]
    settings: PlanSettings
    seconds: float
    rejected: tuple[RejectedSchedule, ...] = ()
    transfers: tuple[_Transfer, ...] = ()
    messages: tuple[SentMessage, ...] = ()
    workspace_bytes: int = 0
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    device_type: str = "cpu"

    @cached_property
    def live(self) -> list[int]:
        """Live bytes on the device while each operation runs, arguments included."""
        return self.live_in("device")

    @property
    def peak_bytes(self) -> int:
        """Peak memory on the device in bytes, arguments included: `peak_of("device")`."""
        return max(self.live, default=0)

    def live_in(self, space: str) -> list[int]:
        """Return the live bytes in a memory, "device" or "host", while each operation runs, arguments included.

        Raises:
            ValueError: if `space` is neither.
        """
        check_choice("space", space, _SPACES)
        return live_bytes([r for r in self.ranges if r.space == space], len(self.operations))

    def peak_of(self, space: str) -> int:
        """Return the peak memory in bytes, of the "device" or the "host", arguments included.

        Raises:
            ValueError: if `space` is neither.
        """
        return max(self.live_in(space), default=0)

    def allocator_peaks(self, *, expandable_segments: bool = False) -> AllocatorPeaks:
        """Return what torch's caching allocator takes on a GPU for the step, in bytes, workspaces included.

        The allocator is simulated: its default settings, and the step's storages in their order. What else the program
        keeps on the device, and the memory that it took and freed before, are not known here.

        Args:
            expandable_segments: whether `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` is set.

        Example:
            >>> import fzero, torch
            >>> plan = fzero.plan(lambda x: x.exp() @ x, torch.randn(1024, 1024), hardware="cuda")
            >>> plan.peak_bytes, plan.workspace_bytes
            (12582912, 33554432)
            >>> plan.allocator_peaks()
            AllocatorPeaks(allocated_bytes=46137344, reserved_bytes=54525952)
        """
        storages = [r for r in self.ranges if r.space == "device"]
        return simulate_allocator(
            [*(r.bytes for r in storages if r.start < 0), self.workspace_bytes],
            [(r.start, r.stop, r.bytes) for r in storages if r.start >= 0],
            expandable_segments=expandable_segments,
        )

    @property
    def peak_at(self) -> int:
        """The position of the first operation at which live memory is at its peak."""
        return self.live.index(self.peak_bytes) if self.live else 0

    @property
    def argument_bytes(self) -> int:
        """Bytes of the step's arguments on the device."""
        return sum(r.bytes for r in self.ranges if r.start < 0 and r.space == "device")

    @property
    def added_bytes(self) -> int:
        """Peak memory on the device in bytes, without the arguments."""
        return self.peak_bytes - self.argument_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(o.flops * o.times for o in self.operations)

    def alive(self, position: int) -> list[Range]:
        """List the storages, on device and host, that are alive while an operation runs, the largest first."""
        return sorted((r for r in self.ranges if r.start <= position <= r.stop), key=lambda r: (-r.bytes, r.start))

    def live_of(self, kind: str, space: str = "device") -> list[int]:
        """Return the live bytes of one kind while each operation runs.

        Args:
            kind: one of "parameters", "optimizer state", "inputs", "gathered", "activations", "gradients", "buffers".
            space: the memory: "device" or "host".

        Raises:
            ValueError: if `kind` is none of these.
        """
        check_choice("kind", kind, KINDS)
        return live_bytes([r for r in self.ranges if r.kind == kind and r.space == space], len(self.operations))

    def __repr__(self) -> str:
        return f"Plan({_views.headline(self)})"

    def __str__(self) -> str:
        return _views.summary(self)

    def details(self) -> str:
        """Return all details as text: live values at the peak by leaf and line, each collective, rejected schedules."""
        return _views.details(self)

    _caption = "live bytes over the step"

    def _draw_figure(self) -> Any:
        return _views.draw(self)

    def to_json(self) -> str:
        """Return the plan as JSON: its fields, peak_bytes, peak_at, argument_bytes, flops, live and host_peak_bytes."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["settings"] = _finite_settings(self.settings)
        fields["rejected"] = [(_finite_settings(settings), peak, time) for settings, peak, time in self.rejected]
        for name in ("operations", "ranges", "collectives", "transfers", "messages"):
            fields[name] = [x._asdict() for x in fields[name]]
        totals = {name: getattr(self, name) for name in ("peak_bytes", "peak_at", "argument_bytes", "flops", "live")}
        totals["host_peak_bytes"] = self.peak_of("host")
        return json.dumps({**fields, **totals})


def make_plan(
    graph: Graph,
    name: str,
    settings: PlanSettings,
    rejected: Iterable[RejectedSchedule] = (),
    hardware: Hardware | None = None,
    groups: Mapping[str, str] | None = None,
) -> Plan:
    """Make the plan of a scheduled graph.

    Args:
        graph: the scheduled step.
        name: the name of the step.
        settings: the settings of the schedule.
        rejected: the schedules that were not chosen.
        hardware: the hardware whose seconds to estimate; by default a common one of the kind that the values lie on.
        groups: the axes of each process group, by its name.
    """
    ops, phase_of = _list_operations(graph), find_phases(graph)
    units = infer_units(graph)
    return Plan(
        name,
        operations=tuple([_planned_operation(n, times, phase_of[n]) for n, times in ops]),
        ranges=tuple(_plan_ranges(graph)),
        collectives=tuple(
            [_make_collective(i, n, k, units, groups) for i, (n, k) in enumerate(ops) if is_collective(n)]
        ),
        settings=settings,
        seconds=estimate_seconds(graph, hardware),
        rejected=tuple(rejected),
        transfers=tuple(
            [
                _Transfer(i, op_name(n), nbytes(*node_stand_ins(n)), times)
                for i, (n, times) in enumerate(ops)
                if is_move(n)
            ]
        ),
        messages=tuple(
            [
                m
                for i, (n, _) in enumerate(ops)
                if (loop := node_loop(n)) and loop.rank_schedule
                for m in sent_messages(loop, i)
            ]
        ),
        workspace_bytes=_workspace_bytes(ops),
        limits=seconds_by_bound(timeline(graph, hardware)),
        device_type=_device_type(ops),
    )


def _planned_operation(node: Node, times: int, phase: str) -> _Operation:
    loop = node_loop(node)
    target = display_name(node)
    if loop is not None:
        target = f"a {'loop' if loop.rank_schedule is None else 'pipeline'} of {loop.iterations} iterations"
    return _Operation(node.name, target=target, line=node_line(node), flops=flops(node), times=times, phase=phase)


def _make_collective(
    position: int, node: Node, times: int, units: Mapping[Node, str], groups: Mapping[str, str] | None
) -> _Collective:
    n, width = moved_numel(node), node_stand_ins(node)[0].element_size()
    unit = units.get(node) or node.meta.get("unit", "")
    return _Collective(
        position=position,
        kind=collective_kind(node),
        unit=unit,
        elements=n,
        bytes=n * width,
        times=times,
        axis=collective_axes(node, groups),
    )


def _finite_settings(settings: PlanSettings) -> dict[str, bool | int | float | str | None]:
    return {k: None if v == float("inf") else v for k, v in settings.items()}
