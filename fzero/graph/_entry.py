"""One traced call of a step: its schedule, which arguments its results take the memory of, and how it runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import _torch, tree
from fzero._donated import check_not_donated, empty
from fzero._notice import notice
from fzero.graph import _dump
from fzero.graph._agree import agreed
from fzero.graph._candidates import Candidate, candidates, choose
from fzero.graph._collector import paused_collector
from fzero.graph._ir import is_input, results, values
from fzero.graph._ops import name_of
from fzero.graph._pass_manager import Knobs, PassContext, PassManager
from fzero.graph._polynomials import shapes_of
from fzero.graph._step import TrainStep
from fzero.graph._storages import check_spaces, moves
from fzero.graph.loop._scan import NotScannable, graphs_in, recorded
from fzero.graph.planning._cost import Device
from fzero.graph.planning._plan import Plan, Rejected, plan_of
from fzero.graph.run._backends import Demand, lower
from fzero.graph.run._compiled import Executable
from fzero.graph.run._lengths import Lengths
from fzero.graph.trace._arguments import Arguments, LeafPlace, blocks_of
from fzero.graph.trace._donation import check_separate, pairs
from fzero.graph.trace._trace import Traced, trace
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, Slot, give_up, is_box

__all__ = ["Entry", "JitOptions", "entry_of"]


class JitOptions(NamedTuple):
    """What `fzero.jit` was asked for.

    Attributes:
        step: what it compiles.
        donate: the positions of donated arguments, or None for what the step hands on.
        backend: one of `BACKENDS`.
        knobs: of the schedule.
        dump: the folder for the graph after each pass, if one was asked for.
        loop: whether micro-batches become a loop.
        device: that it is planned for, if it is not the one at hand.
        strict: whether what cannot run compiled is an error.
    """

    step: TrainStep
    donate: tuple[int, ...] | None
    backend: str
    knobs: Knobs
    dump: str | None
    loop: bool
    device: Device | None = None
    strict: bool = False

    def __str__(self) -> str:
        return f"jit({self.step.name})"


@dataclass
class Entry:
    """One traced and scheduled call.

    Attributes:
        asked: what `fzero.jit` was asked for.
        traced: the graph as it was traced, and what it captured.
        chosen: the schedule that was kept.
        rejected: the others.
        structure: of the results.
        into: for results that are written into donated tensors, the tensor's number.
        kept: the numbers of the results that are arguments, handed on and not donated.
        positions: of the donated arguments.
        donated: the numbers of the donated tensors, with what to say when one is read.
        boxed: the positions of donated arguments that hold boxes.
        written: the numbers of the donated tensors that are not handed on as they came.
        executable: the schedule made runnable, once it has run.
        is_traced: whether the step was traced for it; else its graph follows from those of other lengths.
    """

    asked: JitOptions
    traced: Traced
    chosen: Candidate
    rejected: list[Rejected]
    structure: Any
    into: dict[int, int]
    kept: list[int]
    positions: tuple[int, ...]
    donated: dict[int, str]
    boxed: list[int]
    written: list[int]
    executable: Executable | None = None
    is_traced: bool = True

    @cached_property
    def plan(self) -> Plan:
        """What the schedule does, to read."""
        step, kept = self.asked.step, self.chosen
        groups = None if step.mesh is None else step.mesh.groups()
        return plan_of(kept.graph, step.name, kept.settings, self.rejected, self.asked.device, groups)

    def run(self, arguments: Arguments, args: tuple[Any, ...], lengths: Lengths | None = None) -> Any:
        """Run the step, and give the donated arguments' memory to the results.

        Args:
            arguments: of the call, taken apart.
            args: those by position, as they were given.
            lengths: what was compiled for calls of other lengths.
        """
        tensors, captured = arguments.tensors, self.traced.constants
        check_not_donated(captured)
        if self.written:
            check_separate(arguments, self.written, captured)
        if self.executable is None:
            arguments.check_real()  # the device is part of what an entry is kept by
            demand = Demand(self.asked.step.mesh, self.asked.strict, lengths, shapes_of(tensors), not self.is_traced)
            self.executable = lower(self.chosen.graph, self.asked.backend, demand)
        given = [x.detach() if x.requires_grad else x for x in tensors]  # under no_grad they may
        try:
            with torch.enable_grad():  # as under torch.func.grad: some kernels keep less without (mkldnn_rnn_layer)
                out = list(self.executable([*given, *captured]))
        except BaseException:
            for i, note in self.donated.items():
                empty(tensors[i], f"{note}, which failed midway")
            raise
        handed_on = {id(out[i]): out[i].detach() for i in self.kept}  # tied results stay tied
        for i in self.kept:
            out[i] = handed_on[id(out[i])]
        taken = {i: empty(tensors[i], note) for i, note in self.donated.items()}
        for i, j in self.into.items():
            out[i] = taken[j]
        self._give_up_boxes(args)
        return tree.unflatten(self.structure, out)

    def _give_up_boxes(self, args: tuple[Any, ...]) -> None:
        for i in self.boxed:
            for x in _torch.pytree.tree_leaves(args[i], is_leaf=is_box):
                if isinstance(x, Shard | Slot | PerRank):
                    give_up(x, f"argument {i} was donated to {self.asked}")


@paused_collector()
def entry_of(asked: JitOptions, arguments: Arguments, args: tuple[Any, ...], before: int) -> Entry:
    """Trace a call, schedule its graph in several ways, and keep the best.

    Args:
        asked: what `fzero.jit` was asked for.
        arguments: of the call, taken apart.
        args: those by position, as they were given.
        before: how many calls were traced before it.

    Raises:
        RuntimeError: if the step reads a tensor's value in Python or writes into what is not its own, or if the ranks
            traced different steps.
        TypeError: if it returns something that is no tensor.
        ValueError: if an argument requires grad, or a captured tensor does.
    """
    arguments.check_traceable()
    returned: list[Any] = []

    def flat(*tensors: torch.Tensor) -> list[Any]:
        given, named = arguments.rebuild(tensors)
        out = asked.step(*given, **named)
        paths, leaves, structure = tree.flatten_with_paths(out)
        _check_results(paths, leaves)
        donate = asked.step._handed_on(given, out) if asked.donate is None else asked.donate
        returned.append((out, leaves, structure, donate))
        return leaves

    with _torch.TRACING:
        traced = _traced(flat, arguments, _labels(asked.step, arguments, args), asked)
    check_spaces(traced.graph)
    if asked.device is not None:
        _torch.fakes_on([x for g in graphs_in(traced.graph) for n in g.nodes for x in values(n)], asked.device.kind)
    out, leaves, structure, positions = returned.pop()
    donated = {
        i: f"{place} was donated to {asked}" for i, place in enumerate(arguments.places) if place.position in positions
    }
    into = pairs(arguments, positions, out, leaves)
    functional = asked.backend == "inductor-whole"  # Inductor says itself what is overwritten
    mesh, name = asked.step.mesh, asked.step.name
    given = PassContext(
        tuple(sorted(into.items())),
        tuple(donated),
        functional,
        () if mesh is None else mesh.places(),
        moves(traced.graph),
        asked.device,
        _groups_of_one(mesh),
        asked.backend == "inductor",
    )
    said = f"jit with backend {asked.backend}, donate={positions}, {asked.knobs}"
    offers = agreed(traced.graph, said, candidates(traced.graph, given, asked.knobs), mesh, name)
    index = choose(offers, asked.knobs.memory_budget, name)
    kept = offers[index]
    for graph in graphs_in(kept.graph):
        graph.lint()
    if asked.dump is not None:
        folder = _dump.folder_of(asked.dump, mesh, before)
        _dump.dump(folder, PassManager(traced.graph, given), kept.choice, name)
    rejected = [Rejected(c.settings, c.peak_bytes, c.seconds) for i, c in enumerate(offers) if i != index]
    return Entry(
        asked=asked,
        traced=traced,
        chosen=kept,
        rejected=rejected,
        structure=structure,
        into=into,
        kept=_unchanged(traced, into),
        positions=tuple(positions),
        donated=donated,
        boxed=[p for p in positions if any(is_box(x) for x in tree.flatten(args[p], is_box)[0])],
        written=_written(traced, into, donated),
    )


def _groups_of_one(mesh: Mesh | None) -> tuple[str, ...]:
    """List the process groups that have no rank but this; none in a simulation."""
    if mesh is None or mesh.simulated:
        return ()
    return tuple([a.group for axes in mesh.bound_axes() for a in axes if a.size == 1])


def _traced(f: Any, arguments: Arguments, labels: list[dict[str, str]], asked: JitOptions) -> Traced:
    """Trace a step with its loops, or without where they cannot be. Inductor takes a whole graph without them."""
    fakes, whole = _torch.fake_like(arguments.tensors), asked.backend == "inductor-whole"
    try:
        with recorded(asked.loop and not whole, pipelines=not whole):
            return trace(f, fakes, labels)
    except NotScannable as error:
        notice(
            f"fzero.{asked}: {error}. So each micro-batch is traced by itself, which takes longer for many of them. "
            "What Python counted outside of the step until here stays counted; loop=False traces them so at once"
        )
    with recorded(False, pipelines=not whole):
        return trace(f, fakes, labels)


def _labels(step: TrainStep, arguments: Arguments, args: tuple[Any, ...]) -> list[dict[str, str]]:
    """Say of each distinct tensor what it is, for the plan."""
    kinds = dict.fromkeys([None, *range(len(args))], "inputs")
    for p, x in enumerate(args if step.params else ()):
        rank_own = any(isinstance(v, PerRank) for v in tree.flatten(x, is_box)[0])
        kinds[p] = "parameters" if p in step.params else "inputs" if rank_own else "optimizer state"
    places = arguments.places
    return [
        {"label": str(place), "kind": kinds[place.position], "block": block} | _space(place, x)
        for place, block, x in zip(places, blocks_of(places, step.params), arguments.tensors, strict=True)
    ]


def _space(place: LeafPlace, x: torch.Tensor) -> dict[str, str]:
    """Say which memory an argument lies in; a number is small enough to lie in either."""
    return {"space": place.space} if x.dim() or place.space == "host" else {}


def _unchanged(traced: Traced, into: dict[int, int]) -> list[int]:
    """List the results that are arguments, handed on."""
    return [i for i, n in enumerate(results(traced.graph)) if n is not None and is_input(n) and i not in into]


def _written(traced: Traced, into: dict[int, int], donated: Iterable[int]) -> list[int]:
    """List the donated tensors whose memory may get other values. The others may share it with whom they like."""
    inputs, out = [n for n in traced.graph.nodes if is_input(n)], results(traced.graph)
    same = {i for k, i in into.items() if _viewed(out[k]) is inputs[i]}  # which has the result's shape
    return [i for i in donated if i not in same]


def _viewed(node: Any) -> Any:
    """Return what a node shows in another shape, element for element: a simulation of ranks leaves such views."""
    while node is not None and name_of(node) in ("view", "alias", "detach"):
        node = node.args[0]
    return node


def _check_results(paths: list[str], leaves: list[Any]) -> None:
    for path, x in zip(paths, leaves, strict=True):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(
                f"fzero.jit: {tree.place('result', path)} is {x!r}: a jitted step returns tensors (and None). "
                "Make it a torch.tensor, or leave it out"
            )
