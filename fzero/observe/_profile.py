"""profile: where the time of a step goes, measured."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero import tree
from fzero._notebook import shown
from fzero._torch import profiling
from fzero._tracebacks import api_boundary
from fzero.graph import copies, short
from fzero.observe._lines import LineCost, Span, by_line, spans

__all__ = ["Cost", "Profile", "bars", "colours", "draw", "in_words", "kind_of", "label", "profile"]

# A flame chart of one step: its passes, the functions in them, their lines, and their operations.


PASSES = {"forward": "#4c78a8", "backward": "#f58518", "update": "#54a24b"}
FUNCTIONS = ("#b279a2", "#72b7b2", "#eeca3b", "#e45756", "#9d755d")
OPERATIONS = ("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9", "#ff9d98", "#bab0ac")
OTHERS = "#dddddd"
ROWS = ("pass", "function", "line", "operation")
LEAST = 0.0005  # of the step: what is narrower is not seen
LETTERS = 170  # that fit into the whole width


class Bar(NamedTuple):
    """A bar of the chart: its row, its name after the names above it, and its place in seconds. Row 0 is the pass."""

    row: int
    names: tuple[str, ...]
    start: float
    seconds: float

    @property
    def text(self) -> str:
        """Its own name."""
        return self.names[-1]


def bars(spans: Sequence[Span]) -> Iterator[Bar]:
    """Yield the bars of a chart. Neighbours of one name are one bar, if that above them is one."""
    for row in range(len(ROWS)):
        for names, group in groupby(spans, key=lambda s: _names(s)[: row + 1]):
            mine = list(group)
            yield Bar(row, names, mine[0].start, sum([s.seconds for s in mine]))


def _names(span: Span) -> tuple[str, ...]:
    operation = span.name.partition("::")[2] or span.name
    return span.phase, span.function or "fzero", os.path.basename(span.line) or "-", operation


def colours(spans: Sequence[Span]) -> tuple[dict[str, str], ...]:
    """Return the colours of passes, of the dearest functions, and of the dearest operations, by their names."""
    return PASSES, _of_dearest(spans, 1, FUNCTIONS), _of_dearest(spans, 3, OPERATIONS)


def _of_dearest(spans: Sequence[Span], row: int, chosen: Sequence[str]) -> dict[str, str]:
    sums: dict[str, float] = {}
    for span in spans:
        name = _names(span)[row]
        sums[name] = sums.get(name, 0.0) + span.seconds
    return dict(zip(sorted(sums, key=lambda name: -sums[name]), chosen, strict=False))


def label(text: str, share: float) -> str:
    """Return what of a text fits into a share of the width: "" where not even its beginning does."""
    room = int(LETTERS * share)
    return text if len(text) <= room else text[: room - 1] + "\N{HORIZONTAL ELLIPSIS}" if room >= 4 else ""


def draw(name: str, spans: Sequence[Span]) -> Any:
    """Draw a flame chart as a figure of matplotlib. A line has the colour of its function."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    passes, functions, operations = colours(spans)
    of = (passes, functions, functions, operations)
    whole = sum([s.seconds for s in spans]) or 1.0
    for bar in bars(spans):
        if bar.seconds < LEAST * whole:
            continue
        box = [(bar.start * 1e3, bar.seconds * 1e3)]
        colour = of[bar.row].get(bar.names[1 if bar.row == 2 else bar.row], OTHERS)
        axes.broken_barh(box, (-bar.row - 0.9, 0.9), facecolor=colour, edgecolor="white", linewidth=0.4)
        middle, text = (bar.start + bar.seconds / 2) * 1e3, label(bar.text, bar.seconds / whole)
        axes.text(middle, -bar.row - 0.45, text, ha="center", va="center", fontsize=6.5, clip_on=True)
    axes.set(xlabel="ms of operations, one after the other", xlim=(0, whole * 1e3), ylim=(-len(ROWS), 0), title=name)
    axes.set_yticks([-row - 0.45 for row in range(len(ROWS))], ROWS)
    named = {**{f"in {text}": colour for text, colour in functions.items()}, **operations, "others": OTHERS}
    patches = [Patch(color=colour, label=text) for text, colour in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    return figure


MARK = "fzero.profile: step"
KINDS = ("compute", "compiled", "collectives", "waits", "copies", "Python")


class Cost(NamedTuple):
    """The time of one kind of work, or of one operation, in a step.

    Attributes:
        name: "compute", "compiled" (code made by Inductor), "collectives" (to start them), "waits" (for them), "copies"
            (and fills), "Python" (all that is between operations); or an operation.
        kind: one of these; of an operation, the one that it is counted in.
        seconds: in one step, of the thread that runs it, without the operations that it calls.
        calls: in one step.
        device_seconds: of an accelerator's kernels, in one step; 0 if there is none.
    """

    name: str
    kind: str
    seconds: float
    calls: float
    device_seconds: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went, on this rank. Print it.

    Attributes:
        name: of the step.
        seconds: of a step, the median, without the profiler.
        profiled_seconds: of a step, the mean, with the profiler, which slows each operation a little.
        kinds: the profiled time by kind of work; it adds up to `profiled_seconds`.
        operations: by operation, the dearest first.
        spans: the operations of one more step, in their order. It runs one operation at a time, with other overheads.
    """

    name: str
    seconds: float
    profiled_seconds: float
    kinds: tuple[Cost, ...]
    operations: tuple[Cost, ...]
    spans: tuple[Span, ...]

    @property
    def lines(self) -> tuple[LineCost, ...]:
        """What each source line took, the dearest first, by `spans`."""
        return by_line(self.spans)

    def __repr__(self) -> str:
        return f"Profile({self.name}: {self.seconds * 1e3:.2f} ms a step)"

    def __str__(self) -> str:
        device = any(c.device_seconds for c in self.kinds)
        head = f"{self.name}: {self.seconds * 1e3:.2f} ms a step, {self.profiled_seconds * 1e3:.2f} with the profiler"
        lines = [head, _line("", "ms", "share", "calls", "device ms" if device else "")]
        lines += [self._row(c, device) for c in self.kinds]
        lines += ["", "the dearest operations"]
        lines += [self._row(c, device) for c in self.operations[:8]]
        return "\n".join([*lines, "", *self._by_line()])

    def _by_line(self) -> list[str]:
        """List the dearest source lines, by the operations of one step."""
        whole = sum([s.seconds for s in self.spans]) or 1.0
        rows = ["the dearest lines", _line("", "ms", "share", "calls", "backward")]
        for c in self.lines[:8]:
            place = f"{short(c.line)} {c.function}".strip() or "fzero, or without a line"
            cells = (
                f"{c.seconds * 1e3:.2f}",
                f"{c.seconds / whole:.1%}",
                f"{c.calls:,}",
                f"{c.backward_seconds * 1e3:.2f}",
            )
            rows += [_line(place, *cells), *([f"      {c.code[:90]}"] if c.code else [])]
        return rows

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a flame chart of one step into an image file: passes, functions, lines, operations (matplotlib).

        Args:
            path: of the file: its ending says the format, such as ".png" or ".svg".
        """
        draw(self.name, self.spans).savefig(path, dpi=120)

    def _repr_html_(self) -> str:
        return shown(str(self), "a flame chart of one step", lambda: draw(self.name, self.spans))

    def _row(self, cost: Cost, device: bool) -> str:
        share = f"{cost.seconds / self.profiled_seconds:.1%}"
        on_device = f"{cost.device_seconds * 1e3:.2f}" if device else ""
        return _line(in_words(cost.name), f"{cost.seconds * 1e3:.2f}", share, f"{cost.calls:,.0f}", on_device)


@api_boundary
def profile(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 5,
    warmup: int = 2,
    trace: str | Path | None = None,
    **kwargs: Any,
) -> Profile:
    """Run a step a few times with the same arguments, and say where its time goes.

    Each run is given a copy of the arguments, so that donated ones stay yours; the copies are not timed. In a
    distributed run every rank calls it, and each gets its own profile: one waits while another computes.

    Args:
        step: a function, a sharded step, or a jitted one.
        *args: its arguments.
        steps: how many runs are timed, and then as many profiled.
        warmup: how many run before, to compile.
        trace: a file to write the profiled runs to, for https://ui.perfetto.dev; with several processes each writes its
            own, `trace.rank0.json` for `trace.json`.
        **kwargs: its keyword arguments.

    Returns:
        A `Profile`.

    Raises:
        ValueError: if `steps` or `warmup` is no number of runs, `trace` lies in no folder, or the step's ranks are
            threads (lockstep), of which torch's profiler would show one.
        RuntimeError: while a profiler of torch runs, which this one would end.

    Example:
        >>> import fzero, torch
        >>> found = fzero.profile(fzero.jit(lambda x: x @ x, backend="fx"), torch.ones(64, 64))
        >>> [c.name for c in found.kinds]
        ['compute', 'compiled', 'collectives', 'waits', 'copies', 'Python']
        >>> next(c.calls for c in found.operations if c.name == "aten::mm")
        1.0
    """
    _check(step, steps, warmup, trace)

    def run() -> float:
        mine, named = _copy(args), _copy(kwargs)
        _ready()
        start = time.perf_counter()
        with torch.profiler.record_function(MARK):
            out = step(*mine, **named)
            _synchronize()
        seconds = time.perf_counter() - start
        del out
        return seconds

    def one_by_one() -> tuple[Span, ...]:
        mine, named = _copy(args), _copy(kwargs)
        _ready()
        with spans() as found:
            step(*mine, **named)
        return tuple(found)

    for _ in range(warmup):
        run()
    seconds = statistics.median([run() for _ in range(steps)])
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            run()
    if trace is not None:
        profiler.export_chrome_trace(str(_of_rank(Path(trace))))
    profiled, operations = _by_operation(profiler.events() or [], steps)
    f = getattr(step, "train_step", step)  # of a sharded step, the function that was sharded
    name = str(step) if hasattr(step, "step") else getattr(f, "__name__", type(step).__name__)
    one_by_one()  # what runs for the first time takes longer
    return Profile(name, seconds, profiled, _by_kind(operations, profiled), operations, one_by_one())


def _check(step: Callable[..., Any], steps: int, warmup: int, trace: str | Path | None) -> None:
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: expected an int, at least {least}")

    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise ValueError(f"trace={str(trace)!r}: there is no folder {Path(trace).parent}")
    if getattr(getattr(step, "mesh", None), "simulation", "") == "lockstep":
        raise ValueError(
            "step: its ranks run in lockstep, as threads. Profile it on fzero.mesh(dp=...) or real processes"
        )
    if profiling():
        raise RuntimeError("fzero.profile: torch's profiler runs already, and would be ended")


def _copy(values: Any) -> Any:
    def own(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tree.map(own, values)


def _ready() -> None:
    """Begin together: else the first collective also waits for whoever is late."""
    _synchronize()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_rank(path: Path) -> Path:
    if not (dist.is_available() and dist.is_initialized()):
        return path
    return path.with_name(f"{path.stem}.rank{dist.get_rank()}{path.suffix or '.json'}")


def _by_operation(events: Iterable[Any], steps: int) -> tuple[float, tuple[Cost, ...]]:
    """Add up the operations inside the marks on their thread; return a step's seconds too."""
    events = list(events)
    marks = [e for e in events if e.name == MARK]
    threads = {e.thread for e in marks}
    spans = [(e.time_range.start, e.time_range.end) for e in marks]
    found: dict[str, list[float]] = {}
    for e in events:
        if e.thread in threads and any(start <= e.time_range.start <= end for start, end in spans):
            sums = found.setdefault(e.name, [0.0, 0.0, 0.0])
            for i, value in enumerate((e.self_cpu_time_total, 1e6, getattr(e, "self_device_time_total", 0))):
                sums[i] += value / 1e6 / steps
    # a user's mark, by record_function, is no operation: its own time is that between the operations in it
    marked = {e.name for e in events if e.is_user_annotation and kind_of(e.name) in ("compute", "copies")}
    kinds = {name: "Python" if name in marked else kind_of(name) for name in found}
    costs = [Cost(name, kinds[name], s, calls, device) for name, (s, calls, device) in found.items()]
    seconds = sum([end - start for start, end in spans]) / 1e6 / steps
    return seconds, tuple(sorted([c for c in costs if c.name != MARK], key=lambda c: -max(c.seconds, c.device_seconds)))


def _by_kind(operations: Iterable[Cost], seconds: float) -> tuple[Cost, ...]:
    kinds = []
    for kind in KINDS[:-1]:
        mine = [c for c in operations if c.kind == kind]
        calls, device = sum([c.calls for c in mine]), sum([c.device_seconds for c in mine])
        kinds.append(Cost(kind, kind, sum([c.seconds for c in mine]), calls, device))
    rest = seconds - sum([c.seconds for c in kinds])
    return (*kinds, Cost("Python", "Python", rest, 0.0))


def kind_of(name: str) -> str:
    """Return the kind of work that an operation of this name, as the profiler shows it, is."""
    space, _, op = name.partition("::")
    if op == "wait_tensor" or name == "fzero::wait":
        return "waits"
    if space in ("c10d", "_c10d_functional", "gloo", "nccl") or name.startswith(("gloo:", "nccl:", "record_param")):
        return "collectives"
    if space == "fzero" or name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph")):
        return "compiled"
    return "copies" if copies(op) else "compute"


WORDS = {
    "fzero::segment": "compiled code of fzero.jit",
    "fzero::wait": "a wait for messages",
    "_c10d_functional::wait_tensor": "a wait for a collective",
}
_SPACES = ("aten::", "_c10d_functional::", "c10d::", "fzero::")


def in_words(name: str) -> str:
    """Name an operation as a user does: without its namespace, and compiled code as that."""
    if name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph")):
        return "compiled code"
    space = next((s for s in _SPACES if name.startswith(s)), "")
    return WORDS.get(name, name.removeprefix(space))


def _line(name: str, *cells: str) -> str:
    return (f"  {name[:44]:<44}" + "".join([f"{cell:>11}" for cell in cells])).rstrip()
