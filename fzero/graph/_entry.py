"""One traced call of a step: its schedule, the arguments whose memory its results reuse, and how it runs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.fx import Graph

from fzero import _torch, tree
from fzero._donated import check_not_donated, donate_memory
from fzero._notice import warn_once
from fzero.axes import BatchSplit
from fzero.graph import _dump
from fzero.graph._candidates import Candidate, candidates, choose
from fzero.graph._collector import pause_collector
from fzero.graph._pass_manager import PassContext, PassManager
from fzero.graph._polynomials import argument_shapes
from fzero.graph._schedule_options import ScheduleOptions
from fzero.graph._step import TrainStep
from fzero.graph._trace_agreement import common_schedules
from fzero.graph.ir import check_order, check_spaces, graph_results, has_moves, is_input, node_stand_ins, op_name
from fzero.graph.loop import NotScannableError, graphs_in, record_loops
from fzero.graph.planning import Hardware, Plan, RejectedSchedule, make_plan
from fzero.graph.run import Executable, Lengths, LoweringOptions, RecordedStep, check_recordable, lower
from fzero.graph.trace import Arguments, LeafName, TracedGraph, block_numbers, check_separate, match_results, trace
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, Slot, is_box, mark_donated

__all__ = ["Entry", "JitOptions", "build_entry"]


class JitOptions(NamedTuple):
    """The options of `fzero.jit`.

    Attributes:
        step: the step to compile, with its mesh, its parameters and its checks.
        donate: the positions of donated arguments; None donates the arguments that the step's results replace.
        backend: one of `BACKENDS`.
        schedule_options: the options of the schedule.
        dump: the folder for the graph after each pass, or None.
        loop: whether micro-batches become a loop.
        hardware: the hardware to plan for; None for that of the arguments.
        strict: whether a segment that cannot run compiled is an error.
        dynamic: whether traces and code serve several lengths of a batch.
        recordings: the device graphs of the step's entries; None if it is not recorded.
    """

    step: TrainStep
    donate: tuple[int, ...] | None
    backend: str
    schedule_options: ScheduleOptions
    dump: str | None
    loop: bool
    hardware: Hardware | None = None
    strict: bool = False
    dynamic: bool = True
    recordings: list[_torch.DeviceGraph] | None = None

    def __str__(self) -> str:
        return f"jit({self.step.name})"


@dataclass
class Entry:
    """One traced and scheduled call.

    Attributes:
        options: the options of `fzero.jit`.
        traced: the graph as traced, and the constants that it captured.
        context: the inputs of the passes that follow from the call.
        best: the best schedule.
        rejected: the other schedules.
        structure: the tree structure of the results.
        overwrites: for each result that is written into a donated tensor, the tensor's number.
        passthrough: the numbers of the results that are arguments and are not written into donated tensors.
        donated_argnums: the positions of the donated arguments.
        donation_notes: for each donated tensor's number, the message for a later read of the tensor.
        donated_box_argnums: the positions of donated arguments that hold boxes.
        reused_tensors: the numbers of the donated tensors whose memory may receive other values.
        per_rank_nodes: where the structure of the arguments has `PerRank` boxes.
        splits: how these boxes were split in the calls that the step accepted.
        executable: the runnable schedule, from the first call on.
        is_traced: whether the step was traced for this entry; if not, its graph follows from other lengths.
    """

    options: JitOptions
    traced: TracedGraph
    context: PassContext
    best: Candidate
    rejected: list[RejectedSchedule]
    structure: Any
    overwrites: dict[int, int]
    passthrough: list[int]
    donated_argnums: tuple[int, ...]
    donation_notes: dict[int, str]
    donated_box_argnums: list[int]
    reused_tensors: list[int]
    per_rank_nodes: tuple[tuple[int, ...], ...]
    splits: set[tuple[BatchSplit | None, ...]]
    executable: Executable | RecordedStep | None = None
    is_traced: bool = True

    @cached_property
    def plan(self) -> Plan:
        """The readable plan of the schedule."""
        step, best = self.options.step, self.best
        groups = None if step.mesh is None else step.mesh.groups()
        return make_plan(best.graph, step.name, best.settings, self.rejected, self.options.hardware, groups)

    def with_schedule(self, schedule_options: ScheduleOptions) -> "Entry":
        """Return the entry with the best schedule of other options, from the same trace."""
        options = self.options._replace(schedule_options=schedule_options)
        schedules = candidates(self.traced.graph, self.context, schedule_options)
        best, rejected = _choose_schedule(options, self.traced.graph, schedules, self.donated_argnums)
        return replace(self, options=options, best=best, rejected=rejected, executable=None)

    def check_splits(self, arguments: Arguments, args: tuple[Any, ...]) -> None:
        """Check that the step accepts a batch that was split in this way, such as into samples and not into tokens.

        A graph has no such check, so the step is traced once more for each other way.

        Raises:
            ValueError: as the step's first call does.
        """
        splits = arguments.splits(self.per_rank_nodes)
        if splits not in self.splits:
            _trace_call(self.options, arguments, args)
            self.splits.add(splits)

    def run(self, arguments: Arguments, args: tuple[Any, ...], lengths: Lengths | None = None) -> Any:
        """Run the step, and write its results into the memory of the donated arguments.

        Args:
            arguments: the call's flattened arguments.
            args: the call's positional arguments.
            lengths: the code that was compiled for calls of other lengths.
        """
        tensors, constants = arguments.tensors, self.traced.constants
        check_not_donated(constants)
        if self.executable is None:
            arguments.check_real()  # the device is part of an entry's key
        if self.reused_tensors:
            check_separate(arguments, self.reused_tensors, constants)
        inputs = [x.detach() if x.requires_grad else x for x in tensors]  # under no_grad arguments may require grad
        with _torch.without_autocast():  # the graph holds the casts of the trace
            if self.executable is None:
                options = LoweringOptions(
                    mesh=self.options.step.mesh,
                    strict=self.options.strict,
                    lengths=lengths,
                    shapes=argument_shapes(tensors),
                    alone=not self.is_traced,
                )
                self.executable = self._with_recording(lower(self.best.graph, self.options.backend, options), arguments)
            out = self._run_graph(self.executable, [*inputs, *constants], tensors)
        aliases = {id(out[i]): out[i].detach() for i in self.passthrough}  # tied results stay tied
        for i in self.passthrough:
            out[i] = aliases[id(out[i])]
        buffers = {i: donate_memory(tensors[i], note) for i, note in self.donation_notes.items()}
        for i, j in self.overwrites.items():
            out[i] = buffers[j]
        self._mark_boxes_donated(args)
        return tree.unflatten(self.structure, out)

    def _run_graph(
        self, executable: Executable | RecordedStep, inputs: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the graph; if it fails midway, the donated tensors are lost."""
        try:
            with torch.enable_grad():  # as under torch.func.grad: without, some kernels save less (mkldnn_rnn_layer)
                return list(executable(inputs))
        except BaseException:
            for i, note in self.donation_notes.items():
                donate_memory(tensors[i], f"{note}, which failed midway")
            raise

    def _with_recording(self, executable: Executable, arguments: Arguments) -> Executable | RecordedStep:
        """Return the step as one that records itself, if that is asked for and its arguments lie on a GPU.

        Raises:
            ValueError: if it cannot be recorded.
        """
        if self.options.recordings is None:
            return executable
        if not _torch.can_record(arguments.tensors):
            warn_once(f"fzero.{self.options}: device_graph=True, but no argument lies on a GPU: it runs unrecorded")
            return executable
        step, names = self.options.step, arguments.tensor_names
        check_recordable(self.best.graph, arguments, step.mesh, step.name)
        params = {i for i, name in enumerate(names) if name.arg_index in step.param_argnums}
        constants = range(len(names), len(names) + len(self.traced.constants))
        fixed_indices = {*self.overwrites.values(), *params, *constants}
        return RecordedStep(executable, fixed_indices, {*self.overwrites}, self.options.recordings)

    def _mark_boxes_donated(self, args: tuple[Any, ...]) -> None:
        for i in self.donated_box_argnums:
            for x in _torch.pytree.tree_leaves(args[i], is_leaf=is_box):
                if isinstance(x, Shard | Slot | PerRank):
                    mark_donated(x, f"argument {i} was donated to {self.options}")


@pause_collector()
def build_entry(options: JitOptions, arguments: Arguments, args: tuple[Any, ...], traces: int) -> Entry:
    """Trace a call, schedule its graph in several ways, and choose the best schedule.

    Args:
        options: the options of `fzero.jit`.
        arguments: the call's flattened arguments.
        args: the call's positional arguments.
        traces: how many calls were traced before this one.

    Raises:
        RuntimeError: if the step reads a tensor's value in Python or writes into a tensor that it did not make, or if
            the ranks traced different steps.
        TypeError: if the step returns a value that is not a tensor.
        ValueError: if an argument or a captured tensor requires grad.
    """
    arguments.check_traceable()
    traced, out, leaves, structure, donated_argnums = _trace_call(options, arguments, args)
    overwrites = match_results(arguments, donated_argnums, out, leaves)
    donation_notes = {
        i: f"{name} was donated to {options}"
        for i, name in enumerate(arguments.tensor_names)
        if name.arg_index in donated_argnums
    }
    context = _pass_context(options, traced, overwrites, donation_notes)
    schedules = candidates(traced.graph, context, options.schedule_options)
    best, rejected = _choose_schedule(options, traced.graph, schedules, donated_argnums)
    if options.dump is not None:
        folder = _dump.dump_folder(options.dump, options.step.mesh, traces)
        _dump.dump(folder, PassManager(traced.graph, context), best.pass_settings, options.step.name)
    return Entry(
        options=options,
        traced=traced,
        context=context,
        best=best,
        rejected=rejected,
        structure=structure,
        overwrites=overwrites,
        passthrough=_unchanged_results(traced, overwrites),
        donated_argnums=tuple(donated_argnums),
        donation_notes=donation_notes,
        donated_box_argnums=[i for i in donated_argnums if any(is_box(x) for x in tree.flatten(args[i], is_box)[0])],
        reused_tensors=_reused_tensors(traced, overwrites, donation_notes),
        per_rank_nodes=arguments.per_rank_nodes,
        splits={arguments.splits(arguments.per_rank_nodes)},
    )


class _CallTrace(NamedTuple):
    """A traced call: its graph, its results, their leaves and structure, and the positions of the donated arguments."""

    traced: TracedGraph
    results: Any
    leaves: list[Any]
    structure: Any
    donated_argnums: tuple[int, ...]


def _trace_call(options: JitOptions, arguments: Arguments, args: tuple[Any, ...]) -> _CallTrace:
    """Trace a call of the step, and check that a graph can hold it."""
    result: Any = None  # a trace returns tensors only

    def flat(*tensors: torch.Tensor) -> list[Any]:
        nonlocal result
        inputs, kwargs = arguments.rebuild(tensors)
        out = options.step(*inputs, **kwargs)
        paths, leaves, structure = tree.flatten_with_paths(out)
        _check_results(paths, leaves)
        donate = options.step.state_argnums(inputs, out) if options.donate is None else options.donate
        result = out, leaves, structure, donate
        return leaves

    with _torch.TRACING:
        traced = _trace_step(flat, arguments, _argument_labels(options.step, arguments, args), options)
    check_spaces(traced.graph)
    if options.hardware is not None:
        _torch.set_stand_in_device(
            [x for g in graphs_in(traced.graph) for n in g.nodes for x in node_stand_ins(n)], options.hardware.kind
        )
    return _CallTrace(traced, *result)


def _pass_context(
    options: JitOptions, traced: TracedGraph, overwrites: dict[int, int], donated: Iterable[int]
) -> PassContext:
    """Return the inputs of the passes that follow from a call."""
    mesh = options.step.mesh
    return PassContext(
        overwrites=tuple(sorted(overwrites.items())),
        donated=tuple(donated),
        functional=options.backend == "inductor-whole",  # Inductor itself decides which values are overwritten
        group_ranks=() if mesh is None else mesh.group_ranks(),
        has_moves=has_moves(traced.graph),
        hardware=options.hardware,
        lone_groups=_one_rank_groups(mesh),
        fuses=options.backend == "inductor",
    )


def _choose_schedule(
    options: JitOptions, graph: Graph, schedules: list[Candidate], donated_argnums: tuple[int, ...]
) -> tuple[Candidate, list[RejectedSchedule]]:
    """Return the best of the schedules that all ranks have, and the others."""
    name, schedule_options = options.step.name, options.schedule_options
    options_text = f"jit with backend {options.backend}, donate={donated_argnums}, {schedule_options}"
    schedules = common_schedules(graph, options_text, schedules, options.step.mesh, name)
    index = choose(schedules, schedule_options.memory_budget, name)
    for part in graphs_in(schedules[index].graph):
        check_order(part)
    return schedules[index], [
        RejectedSchedule(c.settings, c.peak_bytes, c.seconds) for i, c in enumerate(schedules) if i != index
    ]


def _one_rank_groups(mesh: Mesh | None) -> tuple[str, ...]:
    """List the process groups that consist of this rank alone; none in a simulation."""
    if mesh is None or mesh.simulated:
        return ()
    return tuple([a.group for axes in mesh.bound_axes() for a in axes if a.size == 1])


def _trace_step(f: Any, arguments: Arguments, labels: list[dict[str, str]], options: JitOptions) -> TracedGraph:
    """Trace a step with loops if its micro-batches can be one, else without. "inductor-whole" has no loops."""
    stand_ins, is_full_graph = _torch.stand_ins_like(arguments.tensors), options.backend == "inductor-whole"
    is_fused = options.backend in ("inductor", "inductor-whole")
    try:
        with record_loops(options.loop and not is_full_graph, pipelines=not is_full_graph), _torch.set_fused(is_fused):
            return trace(f, stand_ins, labels)
    except NotScannableError as error:
        warn_once(
            f"fzero.{options}: {error}. So each micro-batch is traced by itself, which takes longer for many of them. "
            "This attempt ran the step's Python code: its side effects outside the step remain. loop=False skips it"
        )
    with record_loops(False, pipelines=not is_full_graph), _torch.set_fused(is_fused):
        return trace(f, stand_ins, labels)


def _argument_labels(step: TrainStep, arguments: Arguments, args: tuple[Any, ...]) -> list[dict[str, str]]:
    """Return labels of each distinct tensor for the plan: its path, kind, block and space."""
    kinds = dict.fromkeys([None, *range(len(args))], "inputs")
    for p, x in enumerate(args if step.param_argnums else ()):
        if p in step.param_argnums:
            kinds[p] = "parameters"
        elif not any(isinstance(v, PerRank) for v in tree.flatten(x, is_box)[0]):
            kinds[p] = "optimizer state"
    names = arguments.tensor_names
    return [
        {"label": str(name), "kind": kinds[name.arg_index], "block": block} | _space_label(name, x)
        for name, block, x in zip(names, block_numbers(names, step.param_argnums), arguments.tensors, strict=True)
    ]


def _space_label(name: LeafName, x: torch.Tensor) -> dict[str, str]:
    """Return the memory that an argument lies in. A 0-d tensor counts for both memories, unless it is on the host."""
    return {"space": name.space} if x.dim() or name.space == "host" else {}


def _unchanged_results(traced: TracedGraph, overwrites: dict[int, int]) -> list[int]:
    """List the results that are arguments and are not written into a donated tensor."""
    return [
        i for i, n in enumerate(graph_results(traced.graph)) if n is not None and is_input(n) and i not in overwrites
    ]


def _reused_tensors(traced: TracedGraph, overwrites: dict[int, int], donated: Iterable[int]) -> list[int]:
    """List the donated tensors whose memory may receive other values. The other tensors may share their memory."""
    inputs, out = [n for n in traced.graph.nodes if is_input(n)], graph_results(traced.graph)
    # the input has the result's shape
    reused_indices = {i for k, i in overwrites.items() if _view_base(out[k]) is inputs[i]}
    return [i for i in donated if i not in reused_indices]


def _view_base(node: Any) -> Any:
    """Return the value that a node views with all its elements. A simulation of ranks traces such views."""
    while node is not None and op_name(node) in ("view", "alias", "detach"):
        node = node.args[0]
    return node


def _check_results(paths: list[str], leaves: list[Any]) -> None:
    for path, x in zip(paths, leaves, strict=True):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(
                f"fzero.jit: {tree.leaf_name('result', path)} is {x!r}: a jitted step returns tensors (and None). "
                "Make it a torch.tensor, or leave it out"
            )
