"""A log of a run's metrics, which waits for the device once in n steps, and the writers that show it."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import notice, see
from fzero.ranks import Mesh
from fzero.sharding import is_box

__all__ = ["MetricsLog", "Rows", "jsonl", "log", "progress", "tensorboard"]

# A log of a run's metrics, which waits for the device once in n steps.


Rows = Sequence[tuple[int, dict[str, float]]]
"""What a writer is given: the number and the metrics of each step since it was last called."""


def log(*writers: Callable[[Rows], None], every: int = 10, mesh: Mesh | None = None) -> "MetricsLog":
    """Make a log: call it with a step's number and metrics, and it writes them once in `every` steps.

    What a step returns is on its device, and perhaps not computed yet. To look at it waits for it. So a log keeps the
    metrics of some steps, and brings them to the host in one copy when the next one comes. No step is lost.

    Args:
        *writers: functions of rows: `progress`, `tensorboard`, `jsonl`, or your own, such as one that calls
            `wandb.log(row, step=i)` for each `i, row`. One with a method `close` is closed at the end.
        every: how many steps there are between two waits.
        mesh: the ranks, of which rank 0 writes; None for one process.

    Returns:
        A `MetricsLog`. As a context it writes what is left, and closes its writers, also after an error.

    Raises:
        ValueError: if `every` is no number of steps.
        TypeError: if a writer is no function.

    Example:
        >>> import torch
        >>> with log(print, every=2) as write:
        ...     for i in range(3):
        ...         write(i, {"loss": torch.tensor(1.0 / (i + 1)), "lr": 0.5})
        [(0, {'loss': 1.0, 'lr': 0.5}), (1, {'loss': 0.5, 'lr': 0.5, 'steps/s': ...})]
        [(2, {'loss': 0.333..., 'lr': 0.5, 'steps/s': ...})]
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"every={every!r}: expected a number of steps, 1 or more")
    for writer in writers:
        if not callable(writer):
            raise TypeError(f"a writer is a function of rows, such as fzero.observe.progress(); this one is {writer!r}")
    return MetricsLog(writers, every, mesh is None or mesh.rank == 0)


class MetricsLog:
    """The log of a run. Make it with `fzero.observe.log`."""

    def __init__(self, writers: Sequence[Callable[[Rows], None]], every: int, leads: bool) -> None:
        self._writers, self._every, self._leads = writers, every, leads
        self._kept: list[tuple[int, dict[str, Any]]] = []
        self._first = math.nan  # the time of the first call, in seconds
        self._since = math.nan  # that of the last wait
        self._told: set[str] = set()  # the metrics of which it was said that they are no numbers

    def __call__(self, step: int, values: Any) -> None:
        """Keep the metrics of a step, and write those of the steps before if there are enough.

        Called again with the same number it adds to the step's metrics.

        Args:
            step: its number.
            values: a tree of 0-d tensors and numbers, such as `{"loss": loss, "lr": 1e-3}`; named by their paths.

        Raises:
            TypeError: if a value is no number, or differs by rank. The message names it.
        """
        if not self._leads:
            return
        found = _named(values)
        if self._kept and self._kept[-1][0] == step:  # more of the same step, as after an evaluation
            self._kept[-1][1].update(found)
            return
        if len(self._kept) >= self._every:  # and the device has had a step's time to compute the last
            self.flush()
        self._first = time.perf_counter() if math.isnan(self._first) else self._first
        self._kept.append((int(step), found))

    def flush(self) -> None:
        """Wait for the metrics that are kept, and write them."""
        if not self._kept:
            return
        rows, self._kept = _on_host(self._kept), []
        now = time.perf_counter()
        if not math.isnan(self._since):
            rows[-1][1].setdefault("steps/s", len(rows) / max(now - self._since, 1e-9))
        elif len(rows) > 1:  # the first step may have been compiled, so its time is no one's
            rows[-1][1].setdefault("steps/s", (len(rows) - 1) / max(now - self._first, 1e-9))
        self._since = now
        self._tell_nonfinite(rows)
        for writer in self._writers:
            writer(rows)

    def _tell_nonfinite(self, rows: Rows) -> None:
        """Say so, once for each metric, if one is no number: at which step, by the number that was given to the log."""
        for step, row in rows:
            for name, x in row.items():
                if not math.isfinite(x) and name not in self._told:
                    self._told.add(name)
                    notice(
                        f"fzero: the metric {name!r} is {x} at step {step} of the log (told once): "
                        "fzero.observe.nonfinite(step)(*args) names the rank, the leaf and the line where it began"
                        + see("nan-on-one-rank")
                    )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.flush()
        finally:
            for writer in self._writers:
                getattr(writer, "close", lambda: None)()


def _named(values: Any) -> dict[str, Any]:
    """Return the metrics of a tree by their paths.

    Raises:
        TypeError: if one is no number.
    """
    paths, leaves, _ = tree.flatten_with_paths(values, is_box)
    if "" in paths:
        raise TypeError(f'metrics need names: give {{"loss": ...}}, and not a lone {tree.show(leaves[0])}')
    for path, x in zip(paths, leaves, strict=True):
        if is_box(x):
            raise TypeError(f"the metric {path!r} differs by rank: average it in the step, fzero.collectives.pmean(x)")
        if not (isinstance(x, (int, float)) or (isinstance(x, torch.Tensor) and x.numel() == 1)):
            raise TypeError(f"the metric {path!r} is {tree.show(x)}: expected one number")
    return {p: x.detach() if isinstance(x, torch.Tensor) else x for p, x in zip(paths, leaves, strict=True)}


def _on_host(kept: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, float]]]:
    """Bring all tensors to the host, in one copy for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, row in kept:
        for x in row.values():
            if isinstance(x, torch.Tensor):
                kinds.setdefault((x.device, x.dtype), []).append(x.reshape(()))
    copies = {kind: iter(torch.stack(found).tolist()) for kind, found in kinds.items()}

    def number(x: Any) -> float:
        return next(copies[x.device, x.dtype]) if isinstance(x, torch.Tensor) else x

    return [(step, {name: number(x) for name, x in row.items()}) for step, row in kept]


# Where metrics go: a bar on the terminal, TensorBoard, a file of JSON lines.


def progress(total: int | None = None) -> "_Progress":
    """Make a writer that shows a bar on a terminal, or in a notebook; elsewhere a line each time.

    Args:
        total: the number of all steps, also those before a restart; None if it is not known.

    Example:
        >>> progress(total=100)([(9, {"loss": 2.31, "lr": 1e-3}), (10, {"loss": 2.3, "lr": 1e-3, "steps/s": 12.5})])
        step 10 of 100: loss 2.3, lr 0.001, steps/s 12.5
    """
    return _Progress(total)


class _Progress:
    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar: Any = None

    def __call__(self, rows: Rows) -> None:
        from rich.console import Console

        step, row = rows[-1]
        text = ", ".join([f"{name} {x:.4g}" for name, x in row.items()])
        console = Console()
        if not (console.is_terminal or console.is_jupyter):
            of = "" if self._total is None else f" of {self._total}"
            print(f"step {step}{of}: {text}", flush=True)
            return
        self._bar = self._bar or self._started(console)
        self._bar.update(self._bar.task_ids[0], completed=step, text=text)

    def _started(self, console: Any) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}")
        bar = Progress(*columns, console=console)
        bar.add_task("", total=self._total, text="")
        bar.start()
        return bar

    def close(self) -> None:
        """Leave the bar as it is, below which others print."""
        if self._bar is not None:
            self._bar.stop()


def tensorboard(folder: Any) -> "_TensorBoard":
    """Make a writer for TensorBoard. A run that goes on hides what it does again.

    Args:
        folder: of the run, such as "runs/gpt". `tensorboard --logdir runs` shows it.

    Raises:
        ImportError: if the package tensorboard is not there.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write = tensorboard(folder)
        >>> write([(1, {"loss": 2.0}), (2, {"loss": 1.5})])
        >>> write.close()
        >>> [name.split(".")[2] for name in os.listdir(folder)]
        ['tfevents']
    """
    try:
        import torch.utils.tensorboard  # noqa: F401  early, and not after some steps
    except ImportError as error:
        raise ImportError("fzero.observe.tensorboard needs a package: pip install tensorboard") from error
    return _TensorBoard(os.fspath(folder))


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def __call__(self, rows: Rows) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=rows[0][0])
        for step, row in rows:
            for name, x in row.items():
                self._writer.add_scalar(name, x, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def jsonl(path: Any) -> "_JsonLines":
    """Make a writer of a file with a line of JSON a step, which `pandas.read_json(path, lines=True)` reads.

    A run that goes on removes the lines of the steps that it does again. NaN and infinities are null.

    Args:
        path: of the file, such as "runs/gpt.jsonl". Its folder is made.

    Example:
        >>> import pathlib, tempfile
        >>> path = tempfile.mkdtemp() + "/run.jsonl"
        >>> jsonl(path)([(1, {"loss": 2.0}), (2, {"loss": 1.5})])
        >>> jsonl(path)([(2, {"loss": 1.25})])
        >>> print(pathlib.Path(path).read_text(), end="")
        {"step": 1, "loss": 2.0}
        {"step": 2, "loss": 1.25}
    """
    return _JsonLines(os.fspath(path))


class _JsonLines:
    def __init__(self, path: str) -> None:
        self._path = path
        self._began = False

    def __call__(self, rows: Rows) -> None:
        if not self._began:
            self._begin(rows[0][0])
        with open(self._path, "a") as f:
            f.writelines([json.dumps({"step": step, **_finite(row)}) + "\n" for step, row in rows])

    def _begin(self, first: int) -> None:
        """Remove the lines from a step on, and a last one that a kill cut off."""
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        if os.path.exists(self._path):
            with open(self._path) as f:
                kept = list(_before(f, first))
            part = f"{self._path}.{os.getpid()}.tmp"
            with open(part, "w") as f:
                f.writelines(kept)
            os.replace(part, self._path)
        self._began = True


def _before(lines: Iterable[str], first: int) -> Iterable[str]:
    """Yield the lines of steps before one."""
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # cut off
            continue
        if step < first:
            yield line


def _finite(row: dict[str, float]) -> dict[str, float | None]:
    return {name: x if math.isfinite(x) else None for name, x in row.items()}
