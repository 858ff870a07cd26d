"""jit: a pure function of tensors, or a sharded step, as one scheduled graph."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fzero import _torch, tree
from fzero._donated import empty
from fzero._notice import notice
from fzero.axes.lockstep import in_lockstep
from fzero.graph import _dump
from fzero.graph._agree import agreed
from fzero.graph._choose import Candidate, Knobs, candidates, choose
from fzero.graph._pipeline import FITTING, Given, Pipeline
from fzero.graph._step import Step, step_of
from fzero.graph.ir import is_input, results
from fzero.graph.plan._plan import Plan, Rejected, plan_of
from fzero.graph.run._lower import BACKENDS, Executable, lower
from fzero.graph.trace._signature import Call, call_of, changed
from fzero.graph.trace._trace import Traced, trace
from fzero.layout.boxes import PerRank, Shard, give_up, is_box

__all__ = ["Jitted", "jit"]

log = logging.getLogger("fzero.jit")


def jit(
    step: Callable[..., Any],
    *,
    donate: int | Sequence[int] | None = None,
    backend: str = "inductor",
    memory_budget: int | None = None,
    prefetch: int | str = "auto",
    in_flight: int | str = "auto",
    bucket_bytes: int | str = "auto",
    max_reuse_bytes: float | str = "auto",
    recompute: bool | str = "auto",
    dump: str | os.PathLike[str] | None = None,
) -> "Jitted":
    """Compile a step, forward, backward, collectives and update, as one graph in a planned order.

    The step is traced at its first call, and again for arguments of another structure, shape, dtype or plain value (as
    `jax.jit` does). Random operations draw anew at each call. Ranks simulated in lockstep run the step as it is.

    Args:
        step: a sharded step, or any pure function of trees of tensors.
        donate: the positions of arguments whose memory the results may take over: afterwards they are gone. Boxes, and
            fzero's functions given them, raise `DonatedError`; plain tensors are left empty. By default the parameters
            and the optimizer's state of a sharded step (what it takes and returns at one position), and nothing of any
            other function; `()` for none.
        backend: "inductor" compiles each distinct segment between collectives once; "inductor-whole" the graph as a
            whole; "fx" runs torch's own operations one by one, bit for bit as the eager step does.
        memory_budget: the bytes that a rank may hold at its peak, arguments included. The fastest schedule that fits,
            by the cost model, is kept. By default the fastest of those within 3% of the smallest.
        prefetch: how many gathers of parameters start ahead of the one in use; with "fitting" one, wherever there is
            room below the peak of the smallest schedule, or up to `memory_budget`.
        in_flight: how many reductions may be on their way while work goes on. Each holds a unit's gradients.
        bucket_bytes: up to what size collectives of small units are joined; 0 for never.
        max_reuse_bytes: a gathered unit is let go, and gathered again, when more bytes than these of other units are
            used between two of its uses; 0 for always, `math.inf` for never.
        recompute: whether what is cheap, such as an activation function, is computed again for the backward pass
            instead of kept.
        dump: a folder, made if it is not there, for the graph after each pass as text, and a table of their peaks in
            `peaks.txt`. Under torchrun each rank writes into its own folder in it; so does each trace but the first.

    Returns:
        A `Jitted` step: call it like `step`.

    Raises:
        TypeError: if `step` is no function, or is jitted already, or if `dump` is no path.
        ValueError: if an argument here is none of its values, or if `dump` names no folder that can be written into.

    Example:
        >>> import fzero, torch
        >>> double = fzero.jit(lambda x: {"y": 2 * x}, backend="fx")
        >>> double(torch.ones(2))
        {'y': tensor([2., 2.])}
        >>> print(double.plan(torch.ones(2)).peak_bytes)
        16
    """
    if not callable(step):
        raise TypeError(f"step is {step!r}: expected a function")
    if isinstance(step, Jitted):
        raise TypeError(f"step is jitted already: {step!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    for name, value, kinds in (
        ("prefetch", prefetch, int),
        ("in_flight", in_flight, int),
        ("bucket_bytes", bucket_bytes, int),
        ("max_reuse_bytes", max_reuse_bytes, int | float),
        ("memory_budget", "auto" if memory_budget is None else memory_budget, int | float),
    ):
        number: Any = value
        if value == "auto" and (name != "memory_budget" or memory_budget is None):
            continue
        if name == "prefetch" and value == FITTING:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or not number >= 0:
            words = '"fitting" or "auto"' if name == "prefetch" else '"auto"'
            raise ValueError(f"{name}={value!r}: expected a number, at least 0, or {words}")
    if not isinstance(recompute, bool) and recompute != "auto":
        raise ValueError(f'recompute={recompute!r}: expected True, False or "auto"')
    if donate is not None:
        donate = (donate,) if isinstance(donate, int) else tuple(donate)
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in donate):
            raise ValueError(f"donate={donate!r}: expected positions of arguments, counted from 0")
    knobs = Knobs(prefetch, in_flight, bucket_bytes, max_reuse_bytes, memory_budget, recompute)
    return Jitted(step, donate, backend, knobs, None if dump is None else _dump.checked_folder(dump))


@dataclass
class _Entry:
    """One traced and scheduled call, and its executable once it has run."""

    traced: Traced
    chosen: Candidate
    plan: Plan
    structure: Any  # of the results
    into: dict[int, int]  # result -> donated argument that it is written into
    kept: list[int]  # results that are arguments, not donated
    donated: list[tuple[int, str]]  # argument, and what to say when it is read
    boxed: list[int]  # donated arguments that hold boxes
    run: Executable | None = None


@dataclass(frozen=True)
class Jitted:
    """A compiled step, made by `fzero.jit`. Call it like the step; what else a sharded step offers, it offers too.

    Attributes:
        step: what it compiles.
        donate: the positions of donated arguments, or None for the default.
        backend: "inductor", "fx" or "inductor-whole".
        knobs: what was asked of the schedule.
        dump: the folder for the graph after each pass, if one was asked for.
    """

    step: Callable[..., Any]
    donate: tuple[int, ...] | None
    backend: str
    knobs: Knobs
    dump: str | None = None
    _entries: dict[Any, _Entry] = field(default_factory=dict, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.step, name)  # init, gather, layout, mesh, ... of a sharded step

    @property
    def traces(self) -> int:
        """How often the step was traced."""
        return len(self._entries)

    @property
    def name(self) -> str:
        """The name of the step's function."""
        return self._asked.name

    @cached_property
    def _asked(self) -> Step:
        """The step, as far as it can be asked."""
        return step_of(self.step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Args:
            *args: the step's arguments. Donated ones are gone afterwards.
            **kwargs: likewise; never donated.

        Returns:
            The step's results, as new tensors.

        Raises:
            DonatedError: if an argument was donated to an earlier call. Names it.
            RuntimeError: while tracing, if the step reads a tensor's value in Python or writes into an argument, or if
                the ranks trace different steps. Names the line.
            ValueError: if two arguments share memory that is donated, or an argument requires grad. Names them.
            TypeError: if the step returns something that is no tensor. Names it.
        """
        if _torch.in_transform():  # of a larger trace, or of torch.func's, it is a part like any other
            return self.step(*args, **kwargs)
        mesh = self._asked.mesh
        if in_lockstep() or (mesh is not None and mesh.simulation == "lockstep"):
            notice("fzero.jit: ranks in lockstep run eagerly, for debugging; threads cannot be compiled into one graph")
            return self.step(*args, **kwargs)
        call = call_of(args, kwargs)
        call.check_real()
        entry = self._entries.get(call.key) or self._trace(call, args, kwargs)
        if entry.run is None:
            entry.run = lower(entry.chosen.graph, self.backend)
        return self._asked._checked(lambda *args, **kwargs: self._run(entry, call, args), *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan what a call with these arguments will do, without running it.

        Args:
            *args: the step's arguments, real or without memory (meta tensors).
            **kwargs: likewise.

        Returns:
            A `Plan`. In a simulation it is that of the whole world in one process; `fzero.plan` makes one rank's.
        """
        call = call_of(args, kwargs)
        entry = self._entries.get(call.key) or self._trace(call, args, kwargs)
        return entry.plan

    def _run(self, entry: _Entry, call: Call, args: tuple[Any, ...]) -> Any:
        tensors = call.tensors
        if entry.donated:
            call.check_separate([i for i, _ in entry.donated])
        assert entry.run is not None
        given = [x.detach() if x.requires_grad else x for x in tensors]  # under no_grad they may
        try:
            with torch.enable_grad():  # as under torch.func.grad: some kernels keep less without (mkldnn_rnn_layer)
                out = list(entry.run([*given, *entry.traced.constants]))
        except BaseException:
            for i, note in entry.donated:
                empty(tensors[i], f"{note}, which failed midway")
            raise
        handed_on = {id(out[i]): out[i].detach() for i in entry.kept}  # tied results stay tied
        for i in entry.kept:
            out[i] = handed_on[id(out[i])]
        taken = {i: empty(tensors[i], note) for i, note in entry.donated}
        for i, j in entry.into.items():
            out[i] = taken[j]
        self._give_up_boxes(entry, args)
        return tree.unflatten(entry.structure, out)

    def _give_up_boxes(self, entry: _Entry, args: tuple[Any, ...]) -> None:
        for i in entry.boxed:
            for x in _torch.pytree.tree_leaves(args[i], is_leaf=is_box):
                if isinstance(x, Shard | PerRank):
                    give_up(x, f"argument {i} was donated to {self}")

    def __str__(self) -> str:
        return f"jit({self.name})"

    # ------------------------------------------------------------ tracing

    def _trace(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        for i in self.donate or ():
            if i >= len(args):
                raise ValueError(f"donate={self.donate}: the step was called with {len(args)} positional arguments")
        call.check_traceable()
        self._log(call)
        found: list[Any] = []

        def flat(*tensors: torch.Tensor) -> list[Any]:
            args, kwargs = call.rebuild(tensors)
            out = self.step(*args, **kwargs)
            paths, leaves, structure = tree.flatten_with_paths(out)
            _check_results(paths, leaves)
            found.append((out, leaves, structure, self._donated(args, out)))
            return leaves

        labels = self._labels(call, args)
        with _torch.TRACING:
            traced = trace(flat, _torch.fake_like(call.tensors), labels)
        out, leaves, structure, positions = found.pop()
        donated = [i for i, p in enumerate(call.owners) if p in positions]
        into = call.pairs(positions, out, leaves)
        functional = self.backend == "inductor-whole"  # Inductor says itself what is overwritten
        given = Given(tuple(sorted(into.items())), tuple(donated), functional)
        found = candidates(traced.graph, given, self.knobs)
        asked = f"jit with backend {self.backend}, donate={positions}, {self.knobs}"
        offers = agreed(traced.graph, asked, found, self._asked.mesh, self.name)
        index = choose(offers, self.knobs.memory_budget, self.name)
        kept = offers[index]
        if self.dump is not None:
            folder = _dump.folder_of(self.dump, self._asked.mesh, len(self._entries))
            _dump.dump(folder, Pipeline(traced.graph, given), kept.choice, self.name)
        rejected = [Rejected(c.settings, c.peak_bytes, c.seconds) for i, c in enumerate(offers) if i != index]
        entry = _Entry(
            traced=traced,
            chosen=kept,
            plan=plan_of(kept.graph, self.name, kept.settings, rejected),
            structure=structure,
            into=into,
            kept=_unchanged(traced, into),
            donated=[(i, f"argument {call.places[i]} was donated to {self}") for i in donated],
            boxed=[p for p in positions if any(is_box(x) for x in tree.flatten(args[p], is_box)[0])],
        )
        self._entries[call.key] = entry
        return entry

    def _donated(self, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
        return self._asked._handed_on(args, out) if self.donate is None else self.donate

    def _labels(self, call: Call, args: tuple[Any, ...]) -> list[dict[str, str]]:
        """Say of each distinct tensor what it is, for the plan."""
        params = self._asked.params
        kinds = ["inputs"] * len(args)
        if params:
            for p, x in enumerate(args):
                rank_own = any(isinstance(v, PerRank) for v in tree.flatten(x, is_box)[0])
                kinds[p] = "parameters" if p in params else "inputs" if rank_own else "optimizer state"
        return [
            {"label": f"argument {place}", "kind": "inputs" if p is None else kinds[p], "block": block}
            for place, p, block in zip(call.places, call.owners, call.blocks, strict=True)
        ]

    def _log(self, call: Call) -> None:
        if not self._entries:
            log.info("%s: traced for the first time", self)
            return
        last = next(reversed(self._entries))
        log.warning("%s: traced again (%d times now): %s", self, len(self._entries) + 1, changed(last, call))


def _unchanged(traced: Traced, into: dict[int, int]) -> list[int]:
    """List the results that are arguments, handed on."""
    return [i for i, n in enumerate(results(traced.graph)) if n is not None and is_input(n) and i not in into]


def _check_results(paths: list[str], leaves: list[Any]) -> None:
    for path, x in zip(paths, leaves, strict=True):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(
                f"fzero.jit: {tree.place('result', path)} is {x!r}: a jitted step returns tensors (and None). "
                "Make it a torch.tensor, or leave it out"
            )
