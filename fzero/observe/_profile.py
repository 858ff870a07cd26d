"""profile: measure where the time of a step goes."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero import tree
from fzero._arguments import check_callable, check_int, check_path
from fzero._report import FigureReport
from fzero._torch import is_profiling, wait_for_device
from fzero._tracebacks import api_boundary
from fzero.graph import only_copies, short_path
from fzero.observe._flame_chart import draw
from fzero.observe._lines import LineCost, Span, StackCost, record_spans, sum_by_line, sum_by_stack

__all__ = ["Cost", "Profile", "profile"]

_LEAST_ROW = 0.02  # functions below this share of the step are not printed
_MAX_ROWS = 24  # the largest number of printed functions


_STEP_MARK = "fzero.profile: step"
_KINDS = ("compute", "compiled", "collectives", "waits", "copies", "Python")


class Cost(NamedTuple):
    """The time of one kind of work, or of one operation, in a step.

    Attributes:
        name: "compute", "compiled" (code by Inductor), "collectives" (to start them), "waits" (for them), "copies"
            (and fills), "Python" (the time between operations); or the name of an operation.
        kind: one of these kinds; for an operation, the kind that it counts as.
        seconds: seconds in one step on the thread of the step, without nested operations.
        calls: the number of calls in one step.
        device_seconds: seconds of an accelerator's kernels in one step; 0 if there is none.
    """

    name: str
    kind: str
    seconds: float
    calls: float
    device_seconds: float = 0.0


@dataclass(frozen=True)
class Profile(FigureReport):
    """The time of a step on this rank, by kind of work, operation, function or module, and source line. Print it.

    `plot` draws a flame chart of one step: passes, functions and modules as they nest, lines, operations.

    Attributes:
        name: the name of the step.
        seconds: the median seconds of a step, without the profiler.
        profiled_seconds: the mean seconds of a step with the profiler, which slows each operation a little.
        kinds: the profiled time by kind of work; it adds up to `profiled_seconds`.
        operations: the profiled time by operation, the most expensive first.
        spans: the operations of one more step, in order. It runs one operation at a time, so overheads differ.
    """

    name: str
    seconds: float
    profiled_seconds: float
    kinds: tuple[Cost, ...]
    operations: tuple[Cost, ...]
    spans: tuple[Span, ...]

    @property
    def lines(self) -> tuple[LineCost, ...]:
        """The cost of each source line by `spans`, the most expensive first."""
        return sum_by_line(self.spans)

    @property
    def stacks(self) -> tuple[StackCost, ...]:
        """The cost of each function and module by `spans`, each followed by those that it calls."""
        return sum_by_stack(self.spans)

    def __repr__(self) -> str:
        return f"Profile({self.name}: {self.seconds * 1e3:.2f} ms a step)"

    def __str__(self) -> str:
        device = any(c.device_seconds for c in self.kinds)
        head = f"{self.name}: {self.seconds * 1e3:.2f} ms a step, {self.profiled_seconds * 1e3:.2f} with the profiler"
        lines = [head, _table_line("", "ms", "share", "calls", "device ms" if device else "")]
        lines += [self._format_row(c, device) for c in self.kinds]
        lines += ["", "the most expensive operations"]
        lines += [self._format_row(c, device) for c in self.operations[:8]]
        return "\n".join([*lines, "", *self._format_stacks(), *self._format_lines()])

    def _format_stacks(self) -> list[str]:
        """Format the functions and modules of one step as a tree, without those below 2% of it."""
        total = sum([s.seconds for s in self.spans]) or 1.0
        costs = [c for c in self.stacks if c.seconds >= _LEAST_ROW * total]
        if not costs:
            return []
        rows = [
            "functions and modules, each with all that it calls",
            _table_line("", "ms", "share", "calls", "backward"),
        ]
        for c in costs[:_MAX_ROWS]:
            label_text = "  " * (len(c.stack) - 1) + c.stack[-1]
            share, backward = f"{c.seconds / total:.1%}", f"{c.backward_seconds * 1e3:.2f}"
            rows.append(_table_line(label_text, f"{c.seconds * 1e3:.2f}", share, f"{c.calls:,}", backward))
        rest_count = len(costs) - _MAX_ROWS
        return [*rows, *([f"      and {rest_count} more in Profile.stacks"] if rest_count > 0 else []), ""]

    def _format_lines(self) -> list[str]:
        """Format the most expensive source lines of one step."""
        total = sum([s.seconds for s in self.spans]) or 1.0
        rows = ["the most expensive lines", _table_line("", "ms", "share", "calls", "backward")]
        for c in self.lines[:8]:
            label_text = f"{short_path(c.line)} {c.function}".strip() or "fzero, or without a line"
            cells = (
                f"{c.seconds * 1e3:.2f}",
                f"{c.seconds / total:.1%}",
                f"{c.calls:,}",
                f"{c.backward_seconds * 1e3:.2f}",
            )
            rows += [_table_line(label_text, *cells), *([f"      {c.code[:90]}"] if c.code else [])]
        return rows

    _caption = "a flame chart of one step"

    def _draw_figure(self) -> Any:
        return draw(self.name, self.spans)

    def _format_row(self, cost: Cost, device: bool) -> str:
        share = f"{cost.seconds / self.profiled_seconds:.1%}"
        on_device = f"{cost.device_seconds * 1e3:.2f}" if device else ""
        return _table_line(_user_name(cost.name), f"{cost.seconds * 1e3:.2f}", share, f"{cost.calls:,.0f}", on_device)


@api_boundary
def profile(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 5,
    warmup: int = 2,
    trace: str | Path | None = None,
    **kwargs: Any,
) -> Profile:
    """Run a step a few times with the same arguments, and measure where its time goes.

    Each run gets a copy of the arguments, so that donation leaves yours intact. The copies are not timed. In a
    distributed run every rank must call it, and gets its own profile: one rank waits while another computes.

    Args:
        step: a function, a sharded step, or a jitted one.
        *args: the positional arguments of the step.
        steps: how many runs are timed. As many runs are profiled afterwards.
        warmup: how many runs come first, to compile.
        trace: a file to write the profiled runs to, for https://ui.perfetto.dev. With several processes each writes a
            file of its own, such as `trace.rank0.json` for `trace.json`.
        **kwargs: the keyword arguments of the step.

    Returns:
        A `Profile`.

    Raises:
        ValueError: if `steps` or `warmup` is not a number of runs, or the folder of `trace` does not exist. Also if the
            step's ranks are threads (lockstep), since torch's profiler would show one of them only.
        RuntimeError: if a torch profiler is running, since this one would end it.

    Example:
        >>> import fzero, torch
        >>> profile = fzero.profile(fzero.jit(lambda x: x @ x, backend="fx"), torch.ones(64, 64))
        >>> [c.name for c in profile.kinds]
        ['compute', 'compiled', 'collectives', 'waits', 'copies', 'Python']
        >>> next(c.calls for c in profile.operations if c.name == "aten::mm")
        1.0
    """
    _check_profiled(step, steps, warmup, trace)
    for _ in range(warmup):
        _time_step(step, args, kwargs)
    seconds = statistics.median([_time_step(step, args, kwargs) for _ in range(steps)])
    profiler = _run_with_profiler(lambda: _time_step(step, args, kwargs), steps)
    if trace is not None:
        profiler.export_chrome_trace(str(_rank_path(Path(trace))))
    events, operations = _sum_by_operation(profiler.events() or [], steps)
    f = getattr(step, "train_step", step)  # a sharded step is named after its function
    name = str(step) if hasattr(step, "step") else getattr(f, "__name__", type(step).__name__)
    _run_one_by_one(step, args, kwargs)  # warm up: a first run takes longer
    return Profile(
        name,
        seconds=seconds,
        profiled_seconds=events,
        kinds=_sum_by_kind(operations, events),
        operations=operations,
        spans=_run_one_by_one(step, args, kwargs),
    )


def _time_step(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Run a step on copies of its arguments, under the mark of a step, and return its seconds."""
    args_copy, kwargs_copy = _copy_tensors(args), _copy_tensors(kwargs)
    _start_together()
    start = time.perf_counter()
    with torch.profiler.record_function(_STEP_MARK):
        out = step(*args_copy, **kwargs_copy)
        wait_for_device()
    seconds = time.perf_counter() - start
    del out
    return seconds


def _run_with_profiler(run: Callable[[], Any], steps: int) -> torch.profiler.profile:
    activities = {torch.profiler.ProfilerActivity.CPU}
    if torch.accelerator.is_available():
        activities |= torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:  # without, torch 2.11 warns
        for _ in range(steps):
            run()
    return profiler


def _run_one_by_one(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Span, ...]:
    """Run a step on copies of its arguments, one operation at a time, and return its operations."""
    args_copy, kwargs_copy = _copy_tensors(args), _copy_tensors(kwargs)
    _start_together()
    with record_spans(__file__, _run_one_by_one.__name__) as results:
        step(*args_copy, **kwargs_copy)
    return tuple(results)


def _check_profiled(step: Callable[..., Any], steps: int, warmup: int, trace: str | Path | None) -> None:
    """Raise an error for numbers, a path or a step that cannot be profiled."""
    check_callable("step", step, "a function, as in fzero.profile(step, params, opt_state, batch)")
    check_int("steps", steps)
    check_int("warmup", warmup, 0)
    if trace is not None and not Path(check_path("trace", trace, "the path of a file")).absolute().parent.is_dir():
        raise ValueError(f"trace={str(trace)!r}: there is no folder {Path(trace).parent}: create it first")
    if getattr(getattr(step, "mesh", None), "simulation", "") == "lockstep":
        raise ValueError(
            "step: its ranks run in lockstep, as threads: profile it on fzero.mesh(dp=...) or on real processes"
        )
    if is_profiling():
        raise RuntimeError(
            "fzero.profile: torch's profiler runs already, and fzero.profile would end it: leave it first"
        )


def _copy_tensors(values: Any) -> Any:
    def copy(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tree.map(copy, values)


def _start_together() -> None:
    """Synchronize all ranks. Otherwise the first collective would also wait for late ranks."""
    wait_for_device()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _rank_path(path: Path) -> Path:
    if not (dist.is_available() and dist.is_initialized()):
        return path
    return path.with_name(f"{path.stem}.rank{dist.get_rank()}{path.suffix or '.json'}")


def _sum_by_operation(events: Iterable[Any], steps: int) -> tuple[float, tuple[Cost, ...]]:
    """Add up the operations within the marks, on the thread of the marks. Return the seconds of a step with them."""
    events = list(events)
    marks = [e for e in events if e.name == _STEP_MARK]
    threads = {e.thread for e in marks}
    spans = [(e.time_range.start, e.time_range.end) for e in marks]
    sums_by_name: dict[str, list[float]] = {}
    for e in events:
        if e.thread in threads and any(start <= e.time_range.start <= end for start, end in spans):
            sums = sums_by_name.setdefault(e.name, [0.0, 0.0, 0.0])
            for i, value in enumerate((e.self_cpu_time_total, 1e6, getattr(e, "self_device_time_total", 0))):
                sums[i] += value / 1e6 / steps
    # a user's record_function is not an operation: its own time is the time between the operations within
    user_marks = {e.name for e in events if e.is_user_annotation and _operation_kind(e.name) in ("compute", "copies")}
    kinds = {name: "Python" if name in user_marks else _operation_kind(name) for name in sums_by_name}
    costs = [
        Cost(name, kind=kinds[name], seconds=s, calls=calls, device_seconds=device)
        for name, (s, calls, device) in sums_by_name.items()
    ]
    seconds = sum([end - start for start, end in spans]) / 1e6 / steps
    return seconds, tuple(
        sorted([c for c in costs if c.name != _STEP_MARK], key=lambda c: -max(c.seconds, c.device_seconds))
    )


def _sum_by_kind(operations: Iterable[Cost], seconds: float) -> tuple[Cost, ...]:
    kinds = []
    for kind in _KINDS[:-1]:
        costs = [c for c in operations if c.kind == kind]
        calls, device = sum([c.calls for c in costs]), sum([c.device_seconds for c in costs])
        kinds.append(Cost(kind, kind=kind, seconds=sum([c.seconds for c in costs]), calls=calls, device_seconds=device))
    rest = seconds - sum([c.seconds for c in kinds])
    return (*kinds, Cost("Python", "Python", rest, 0.0))


def _operation_kind(name: str) -> str:
    """Return the kind of work of an operation, by its name in the profiler."""
    space, _, op = name.partition("::")
    if op == "wait_tensor" or name == "fzero::wait":
        return "waits"
    if space in ("c10d", "_c10d_functional", "gloo", "nccl") or name.startswith(("gloo:", "nccl:", "record_param")):
        return "collectives"
    if space == "fzero" or name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph")):
        return "compiled"
    return "copies" if only_copies(op) else "compute"


_WORDS = {
    "fzero::segment": "compiled code of fzero.jit",
    "fzero::wait": "a wait for messages",
    "_c10d_functional::wait_tensor": "a wait for a collective",
}
_SPACES = ("aten::", "_c10d_functional::", "c10d::", "fzero::")


def _user_name(name: str) -> str:
    """Return the name of an operation for users: without its namespace, and "compiled code" for compiled regions."""
    if name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph")):
        return "compiled code"
    space = next((s for s in _SPACES if name.startswith(s)), "")
    return _WORDS.get(name, name.removeprefix(space))


def _table_line(name: str, *cells: str) -> str:
    return (f"  {name[:44]:<44}" + "".join([f"{cell:>11}" for cell in cells])).rstrip()
