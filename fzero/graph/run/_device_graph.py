"""A step that is recorded as a device graph after a few calls: each later call starts all its work at once.

The work reads and writes the same memory at each call. Donated arguments keep theirs, since the results lie in it, and
so do parameters. All other arguments are copied into memory of the recording, and all other results out of it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph

from fzero._notice import warn_once
from fzero._torch import DeviceGraph, copy_together, has_recordable_collectives, node_line
from fzero.graph.ir import display_name, is_move
from fzero.graph.loop import graphs_in
from fzero.graph.run._clock import current_recorder
from fzero.graph.run._executable import Executable
from fzero.graph.trace import Arguments
from fzero.ranks import Mesh

__all__ = ["RecordedStep", "check_recordable"]

_WARM_UP = 2  # calls before the recording: they load libraries, make communicators and choose algorithms
_MAX_RECORDINGS = 8  # of one step, of all shapes of its arguments


def check_recordable(graph: Graph, arguments: Arguments, mesh: Mesh | None, name: str) -> None:
    """Check that a step can be recorded as a device graph.

    Raises:
        ValueError: if the step copies values to or from the host, or its ranks communicate by gloo. The message names
            the operation and its source line.
    """
    device = next(x.device for x in arguments.tensors if x.device.type != "cpu")
    for node in [n for g in graphs_in(graph) for n in g.nodes if is_move(n)]:
        raise ValueError(
            f"fzero.jit: device_graph=True cannot record {name}: {display_name(node)} at "
            f"{node_line(node) or 'no known line'} moves a value to or from host memory, for which the host waits. "
            "Leave out device_graph, or what needs the host: offload, or experts without a capacity in another dtype "
            "than bfloat16"
        )
    groups = [] if mesh is None or not mesh.distributed else [a.group for axes in mesh.bound_axes() for a in axes]
    if not all(has_recordable_collectives(group, device) for group in groups):
        raise ValueError(
            f"fzero.jit: device_graph=True cannot record {name}: its ranks communicate by gloo, on the host; "
            'initialise the process group with backend="nccl"'
        )


@dataclass
class _GraphMemory:
    """A recording of a step, and the memory that it reads and writes.

    Attributes:
        graph: the recorded work.
        inputs: the arguments' tensors; None for one that stays where it is.
        addresses: where those lie.
        outputs: the positions of the results that must be copied out.
    """

    graph: DeviceGraph
    inputs: list[torch.Tensor | None]
    addresses: dict[int, int]
    outputs: list[int]


@dataclass
class RecordedStep:
    """A runnable step that records itself.

    Attributes:
        executable: the step.
        fixed: the positions of the arguments whose memory stays: parameters, tensors from outside the arguments, and
            donated ones that hold a result after the step.
        in_place: the positions of the results that lie in donated arguments.
        recordings: of all shapes of the step's arguments; they share memory, and their number is limited.
    """

    executable: Executable
    fixed: Collection[int]
    in_place: Collection[int]
    recordings: list[DeviceGraph] = field(repr=False)
    calls: int = 0
    recording: _GraphMemory | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the step: as recorded if it is, and if its donated arguments lie where they lay."""
        self.calls += 1
        if self.calls <= _WARM_UP or current_recorder() is not None:
            return self.executable(args)
        if self.recording is None or self._addresses(args) != self.recording.addresses:
            if len(self.recordings) >= _MAX_RECORDINGS:
                warn_once(
                    f"fzero.jit: device_graph=True made {_MAX_RECORDINGS} recordings of one step, and makes no more: "
                    "calls of other shapes, or with donated arguments in other memory, run unrecorded. Pad batches "
                    "to fewer lengths (fzero.data), and continue with the results of the step"
                )
                return self.executable(args)
            self.recording = self._record_graph(args)
        return self._replay(self.recording, args)

    def _addresses(self, args: Sequence[torch.Tensor]) -> dict[int, int]:
        return {i: args[i].data_ptr() for i in self.fixed}

    def _record_graph(self, args: Sequence[torch.Tensor]) -> _GraphMemory:
        """Record the executable as a device graph, on memory of its own for the arguments that change."""
        inputs = [None if i in self.fixed else torch.empty_like(x) for i, x in enumerate(args)]
        arguments = [x.detach() if static is None else static for x, static in zip(args, inputs, strict=True)]
        positions = {id(x): i for i, x in enumerate(arguments)}

        def run() -> list[Any]:
            out = enumerate(self.executable([*arguments]))
            return [None if i in self.in_place else positions.get(id(x), x) for i, x in out]  # an argument by position

        graph = DeviceGraph(run, self.recordings[0] if self.recordings else None)
        self.recordings.append(graph)
        outputs = [i for i, x in enumerate(graph.results) if isinstance(x, torch.Tensor)]
        return _GraphMemory(graph, inputs, self._addresses(args), outputs)

    def _replay(self, recording: _GraphMemory, args: Sequence[torch.Tensor]) -> Sequence[Any]:
        pairs = [(static, x) for static, x in zip(recording.inputs, args, strict=True) if static is not None]
        copy_together([static for static, _ in pairs], [x for _, x in pairs])
        recording.graph.run()
        results = [args[x] if isinstance(x, int) else x for x in recording.graph.results]
        graph_outputs = [results[i] for i in recording.outputs]
        copies = [torch.empty_like(x) for x in graph_outputs]
        copy_together(copies, graph_outputs)
        for i, x in zip(recording.outputs, copies, strict=True):
            results[i] = x
        return results
