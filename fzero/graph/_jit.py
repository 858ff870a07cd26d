"""jit: compile a pure function of tensors, or a sharded step, to one scheduled graph."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

from fzero import _torch
from fzero._arguments import check_choice
from fzero._liveness import current_heartbeat, publish_step
from fzero._notice import trouble_link, warn_once
from fzero._tracebacks import UserFrames, api_boundary
from fzero.axes import in_lockstep
from fzero.graph._any_length import AnyLength, differ_in_sizes
from fzero.graph._dump import make_folder
from fzero.graph._entry import Entry, JitOptions, build_entry
from fzero.graph._polynomials import argument_shapes
from fzero.graph._schedule_options import ScheduleOptions
from fzero.graph._step import as_step
from fzero.graph.planning import Hardware, Interval, Plan, PlanSettings, estimate_seconds, seconds_by_bound, timeline
from fzero.graph.run import BACKENDS, Lengths
from fzero.graph.trace import Arguments, Key, call_key, flatten_arguments, recompilation_reason, refuse_python_state

__all__ = ["Jitted", "jit"]

_log = logging.getLogger("fzero.jit")


@api_boundary
def jit(
    step: Callable[..., Any],
    *,
    donate: int | Sequence[int] | None = None,
    backend: Literal["inductor", "auto", "fx", "inductor-whole"] = "inductor",
    memory_budget: float | None = None,
    prefetch: int | Literal["auto", "fitting"] = "auto",
    in_flight: int | Literal["auto"] = "auto",
    bucket_bytes: int | Literal["auto"] = "auto",
    max_reuse_bytes: float | Literal["auto"] = "auto",
    recompute: bool | Literal["auto"] = "auto",
    recast: bool | Literal["auto"] = "auto",
    dump: str | os.PathLike[str] | None = None,
    loop: bool = True,
    strict: bool = False,
    dynamic: bool = True,
    device_graph: bool = False,
) -> "Jitted":
    """Compile a step (forward, backward, collectives and update) to one graph in a planned order.

    The step is traced at its first call, and again for arguments of another structure, shape, dtype or plain value, as
    `jax.jit` does. Lengths of a batch are an exception (`dynamic`). Random operations draw anew at each call. Ranks
    simulated in lockstep run the step uncompiled.

    Args:
        step: a sharded step, or any pure function of trees of tensors.
        donate: the positions of arguments whose memory the results may reuse. A donated box or tensor raises
            `DonatedError` when it is used afterwards. By default a sharded step donates its parameters, its optimizer
            state, and any other tree that it returns in the position where it received it; the logger "fzero.jit"
            lists them. Any other function donates nothing by default. `()` donates nothing.
        backend: "inductor" compiles each distinct segment between collectives once, before the first step. "auto"
            compiles in another process: steps run at once as with "fx", and compiled as soon as all ranks can. "fx"
            runs torch's own operations one by one, bit for bit as the eager step does. "inductor-whole" compiles the
            graph as a whole.
        memory_budget: the bytes that a rank may hold at its peak, arguments included. jit takes the fastest schedule,
            by the cost model, that fits. By default it takes the fastest schedule within 3% of the smallest peak.
        prefetch: how many gathers of parameters start ahead of the one in use. "fitting" starts one ahead wherever
            there is room below the peak of the smallest schedule, or up to `memory_budget`.
        in_flight: how many reductions may be in flight while work goes on. Each holds a unit's gradients.
        bucket_bytes: up to what size collectives of small units are joined; 0 for never.
        max_reuse_bytes: a gathered unit is freed, and gathered again, if more than this many bytes of other units are
            used between two of its uses. 0 always frees it, `math.inf` never.
        recompute: whether cheap operations, such as an activation function, run again for the backward pass, so that
            their results need not be saved.
        recast: whether a gradient is cast to float32 again for an update that waits for the global norm, so that only
            one unit's copy is live at a time. "auto" casts again where that takes less memory.
        dump: a folder for the graph after each pass as text, and for a table of the peaks in the order of the passes,
            `peaks.txt`. It is made if it does not exist. Under torchrun each rank writes into its own subfolder, as
            does each trace but the first.
        loop: whether micro-batches, if there are 3 or more, become a loop whose body is traced, scheduled and compiled
            once. If they cannot become a loop, a notice gives the reason; docs/jit.md lists the cases.
        strict: whether a segment that cannot run compiled is an error. By default it runs operation by operation on all
            ranks, and a notice names the segment, the reason and the cost.
        dynamic: whether a trace serves several lengths of a batch. From the second length on, segments are compiled
            once for all lengths ("inductor"). From the fourth on, only lengths for which the step decides otherwise
            are traced.
        device_graph: whether the third call of each shape records the step as one graph of the GPU (a CUDA graph).
            Each later call starts all its work at once. Counts of an optimizer move to the GPU. On a CPU the step runs
            unrecorded. docs/jit.md lists what cannot be recorded.

    Returns:
        A `Jitted` step: call it like `step`.

    Raises:
        TypeError: if `step` is not a function, is jitted already or decides in Python, as `local_steps` does; if `dump`
            is not a path.
        ValueError: if an argument has a value that it does not take, or if `dump` is not a writable folder.

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
        raise TypeError(f"step is jitted already: {step!r}; call it, or jit the function that it was made from")
    reason: str = getattr(step, "jit_error", "")  # that of local_steps, which lies above this package
    if reason:
        raise TypeError(f"step is {step!r}: {reason}")
    check_choice("backend", backend, tuple(BACKENDS))
    for name, value in (("loop", loop), ("strict", strict), ("dynamic", dynamic), ("device_graph", device_graph)):
        check_choice(name, value, (True, False))
    if device_graph and backend == "auto":
        raise ValueError(
            'device_graph=True: backend="auto" changes its code while the step runs; use "inductor" or "fx"'
        )
    if strict and backend == "auto":
        raise ValueError('strict=True: backend="auto" compiles while the step runs, and cannot raise; use "inductor"')
    schedule_options = ScheduleOptions(
        prefetch=prefetch,
        in_flight=in_flight,
        bucket_bytes=bucket_bytes,
        max_reuse_bytes=max_reuse_bytes,
        memory_budget=memory_budget,
        recompute=recompute,
        recast=recast,
    )
    folder = None if dump is None else make_folder(dump)
    options = JitOptions(
        step=as_step(step),
        donate=_donated_argnums(donate),
        backend=backend,
        schedule_options=schedule_options.validated(),
        dump=folder,
        loop=loop,
        strict=strict,
        dynamic=dynamic,
        recordings=[] if device_graph else None,
    )
    return Jitted(step, options)


def _donated_argnums(donate: Any) -> tuple[int, ...] | None:
    """Return the positions of donated arguments as a tuple; None for the default."""
    if donate is None:
        return None
    argnums = tuple(donate) if isinstance(donate, Iterable) else (donate,)
    if any(not isinstance(i, Integral) or isinstance(i, bool) or i < 0 for i in argnums):
        raise ValueError(
            f"donate={donate!r}: expected positions of arguments, counted from 0: an int or a sequence of ints"
        )
    return tuple([int(i) for i in argnums])


@dataclass(frozen=True)
class Jitted:
    """A compiled step, made by `fzero.jit`. Call it like the step. It has the sharded step's other methods too.

    Attributes:
        step: the step to compile.
        options: the options of `fzero.jit`. A step whose options have `hardware` is planned, never run.
    """

    step: Callable[..., Any]
    options: JitOptions
    _entries: dict[Key, Entry] = field(default_factory=dict, repr=False, compare=False)
    _lengths: Lengths = field(default_factory=Lengths, repr=False, compare=False)
    _any_length: AnyLength = field(default_factory=AnyLength, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        """Forward to the sharded step: init, gather, layout, mesh and its other attributes.

        A list of them here would have to be kept up to date. The step itself raises for an attribute that it lacks.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.step, name)

    def __repr__(self) -> str:
        step = self.step if hasattr(self.step, "stage") else self.name
        return f"Jitted({step}, backend={self.options.backend!r}, traced {self.traces} times)"

    def with_options(self, step: Callable[..., Any] | None = None, **changes: Any) -> "Jitted":
        """Return the step, or another one, with other options and without traces.

        Args:
            step: the other step; by default the same.
            **changes: fields of `JitOptions`.
        """
        function = self.step if step is None else step
        recordings = None if self.options.recordings is None else []
        return Jitted(function, self.options._replace(step=as_step(function), recordings=recordings, **changes))

    @property
    def traces(self) -> int:
        """How often the step was traced."""
        return sum(entry.is_traced for entry in self._entries.values())

    def plans(self, hardware: Hardware | None = None) -> list[Plan]:
        """List the plans of all calls that were traced so far, in order.

        Args:
            hardware: whose seconds the plans give; by default those of a common device of the arguments' kind.
        """
        mesh = self.options.step.mesh
        if hardware is not None and mesh is not None:
            hardware = hardware._replace(axes=mesh.shape, group_axes=tuple(mesh.groups().items()))
        plans = [(e.plan, e.best.graph) for e in self._entries.values()]
        if hardware is None:
            return [p for p, _ in plans]
        return [
            replace(p, seconds=estimate_seconds(graph, hardware), limits=seconds_by_bound(timeline(graph, hardware)))
            for p, graph in plans
        ]

    @property
    def name(self) -> str:
        """The name of the step's function."""
        return self.options.step.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Args:
            *args: the step's arguments. Donated arguments must not be used afterwards.
            **kwargs: the step's arguments by name; they are never donated.

        Returns:
            The step's results, as new tensors.

        Raises:
            DonatedError: if an argument was donated to an earlier call. The message names the argument.
            RuntimeError: while tracing, if the step reads a tensor's value in Python, or writes into a tensor that it
                did not make, or if the ranks trace different steps. The message names the line.
            ValueError: if a donated argument shares memory with another tensor, or an argument requires grad. The
                message names the argument.
            TypeError: if a result is not a tensor, if an argument is of a tensor subclass, or if an argument that is
                not a tensor has no hash. The message names the result or the argument.
        """
        if _torch.in_transform():  # the step is a part of a larger trace, or of a transform of torch.func
            return self.step(*args, **kwargs)
        step = self.options.step
        if in_lockstep() or (step.mesh is not None and step.mesh.simulation == "lockstep"):
            warn_once(
                "fzero.jit: ranks in lockstep run eagerly, for debugging: threads cannot be compiled into one graph"
            )
            return self.step(*args, **kwargs)
        with UserFrames():
            arguments = self._call_arguments(args, kwargs)
            arguments.check_plain()
            if self.options.backend in ("inductor", "inductor-whole"):
                on_cpu = step.mesh is None or step.mesh.device.type == "cpu"
                (_torch.start_cpu_probe if on_cpu else _torch.start_import)()
            entry, lengths = self._find_entry(arguments, args), self._lengths if self.options.dynamic else None
            with publish_step(step.name):

                def run(*values: Any, **named: Any) -> Any:
                    is_first = [id(x) for x in values] == [id(x) for x in args]  # else a check runs it on copies
                    return entry.run(arguments if is_first else self._call_arguments(values, named), values, lengths)

                return step.run_checked(run, *args, **kwargs)

    @api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan a call with these arguments without running it.

        Args:
            *args: the step's arguments, real or meta tensors.
            **kwargs: the step's arguments by name, likewise.

        Returns:
            A `Plan`. In a simulation it covers the whole world in one process; `fzero.plan` plans one rank.
        """
        return self._find_entry(self._call_arguments(args, kwargs), args).plan

    def timeline(self, *args: Any, **kwargs: Any) -> list[Interval]:
        """List when compute, collectives and the host are busy in a planned step, by the cost model.

        Args:
            *args: the step's arguments, real or meta tensors.
            **kwargs: the step's arguments by name, likewise.
        """
        entry = self._find_entry(self._call_arguments(args, kwargs), args)
        return timeline(entry.best.graph, self.options.hardware)

    def plan_as(self, settings: PlanSettings, *args: Any, **kwargs: Any) -> Plan:
        """Plan a call in the schedule of another plan's settings. A call that was planned before is not traced again.

        Args:
            settings: the settings of the schedule, as in `Plan.settings`.
            *args: the step's arguments, real or meta tensors.
            **kwargs: the step's arguments by name, likewise.
        """
        options = ScheduleOptions.of(settings)
        entry = self._entries.get(call_key(self._call_arguments(args, kwargs)))
        if entry is None:  # only this schedule is needed
            return self.with_options(schedule_options=options).plan(*args, **kwargs)
        return entry.with_schedule(options).plan

    def _call_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        arguments = flatten_arguments(args, kwargs)
        return arguments if self.options.recordings is None else arguments.with_scalars_on_device()

    def __str__(self) -> str:
        return str(self.options)

    def _find_entry(self, arguments: Arguments, args: tuple[Any, ...]) -> Entry:
        """Return the entry for arguments like these. Trace the step if there is none."""
        key = call_key(arguments)
        entry = self._entries.get(key)
        if entry is None:
            for i in self.options.donate or ():
                if i >= len(args):
                    raise ValueError(
                        f"donate={self.options.donate}: the step was called with {len(args)} positional arguments"
                    )
            entry = self._find_entry_at_length(key, arguments, args) if self.options.dynamic else None
            self._entries[key] = entry = self._trace_entry(self.options, arguments, args) if entry is None else entry
            if entry.is_traced:
                self._lengths.planned_graphs.append((argument_shapes(arguments.tensors), entry.best.graph))
        entry.check_splits(arguments, args)
        return entry

    def _find_entry_at_length(self, key: Key, arguments: Arguments, args: tuple[Any, ...]) -> Entry | None:
        """Return the entry of a call at another length, untraced or with the schedule settings of the first length."""
        length = self._lengths.call_length(argument_shapes(arguments.tensors))
        if length is None or not self._entries or self.options.schedule_options.memory_budget is not None:
            return None
        (first_key, first_entry), *_ = self._entries.items()
        if not differ_in_sizes(first_key, key):
            return None
        self._any_length.learn(self._lengths.first_length, first_key, first_entry, self.options, arguments)
        entry = self._any_length.entry(self.options, length, arguments)
        if entry is None:
            options = self.options._replace(schedule_options=ScheduleOptions.of(first_entry.best.settings))
            entry = self._trace_entry(options, arguments, args)
            self._any_length.learn(length, key, entry, self.options, arguments)
        return entry

    def _trace_entry(self, options: JitOptions, arguments: Arguments, args: tuple[Any, ...]) -> Entry:
        self._log_trace(arguments)
        if (heartbeat := current_heartbeat()) is not None:
            heartbeat.publish(f"tracing {options.step.name}")
        with refuse_python_state(options.step.name, options.step.train_step):
            entry = build_entry(options, arguments, args, len(self._entries))
        self._log_donation(entry)
        return entry

    def _log_trace(self, arguments: Arguments) -> None:
        if not self._entries:
            _log.info("%s: traced for the first time", self)
            return
        last = next(reversed(self._entries))
        reason = recompilation_reason(last, arguments) + trouble_link("recompilation")
        _log.warning("%s: traced again (%d times now): %s", self, len(self._entries) + 1, reason)

    def _log_donation(self, entry: Entry) -> None:
        if entry.donated_argnums:
            params = self.options.step.param_argnums
            texts = [f"argument {p}{' (parameters)' if p in params else ''}" for p in entry.donated_argnums]
            _log.info("%s: the results take over the memory of %s", self, ", ".join(texts))
