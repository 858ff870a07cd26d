"""Writers of metrics: a bar on the terminal, TensorBoard, a file of JSON lines."""

import json
import math
import os
from collections.abc import Iterable
from typing import Any

from fzero._arguments import check_path
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.observe._metrics import Rows

__all__ = ["jsonl", "progress", "tensorboard"]


@api_boundary
def progress(total: int | None = None) -> "_Progress":
    """Make a writer that shows a progress bar in a terminal or a notebook, and prints lines elsewhere.

    Args:
        total: the number of all steps, including those before a restart; None if it is not known.

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
            total = "" if self._total is None else f" of {self._total}"
            print(f"step {step}{total}: {text}", flush=True)
            return
        self._bar = self._bar or self._start(console)
        self._bar.update(self._bar.task_ids[0], completed=step, text=text)

    def _start(self, console: Any) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}")
        bar = Progress(*columns, console=console)
        bar.add_task("", total=self._total, text="")
        bar.start()
        return bar

    def close(self) -> None:
        """Stop the bar, so that later output appears below it."""
        if self._bar is not None:
            self._bar.stop()


@api_boundary
def tensorboard(folder: StrPath) -> "_TensorBoard":
    """Make a writer for TensorBoard. A run that resumes hides the earlier values of the steps that it repeats.

    Args:
        folder: the folder of the run, such as "runs/gpt". `tensorboard --logdir runs` shows it.

    Raises:
        ImportError: if the package tensorboard is not installed.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write = tensorboard(folder)
        >>> write([(1, {"loss": 2.0}), (2, {"loss": 1.5})])
        >>> write.close()
        >>> [name.split(".")[2] for name in os.listdir(folder)]
        ['tfevents']
    """
    folder = check_path("folder", folder, "the path of a folder, such as 'runs/gpt'")
    try:
        import torch.utils.tensorboard  # noqa: F401  so that it fails early, and not after some steps
    except ImportError as error:
        raise ImportError("fzero.observe.tensorboard needs the package tensorboard: pip install tensorboard") from error
    return _TensorBoard(folder)


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
        """Write the pending values, and close the file."""
        if self._writer is not None:
            self._writer.close()


@api_boundary
def jsonl(path: StrPath) -> "_JsonLines":
    """Make a writer of JSON lines, one for each step. `pandas.read_json(path, lines=True)` reads the file.

    A run that resumes removes the lines of the steps that it repeats. NaN and infinities become null.

    Args:
        path: the path of the file, such as "runs/gpt.jsonl". Its folder is created.

    Example:
        >>> import pathlib, tempfile
        >>> path = tempfile.mkdtemp() + "/run.jsonl"
        >>> jsonl(path)([(1, {"loss": 2.0}), (2, {"loss": 1.5})])
        >>> jsonl(path)([(2, {"loss": 1.25})])
        >>> print(pathlib.Path(path).read_text(), end="")
        {"step": 1, "loss": 2.0}
        {"step": 2, "loss": 1.25}
    """
    return _JsonLines(check_path("path", path, "the path of a file, such as 'runs/gpt.jsonl'"))


class _JsonLines:
    def __init__(self, path: str) -> None:
        self._path = path
        self._has_begun = False

    def __call__(self, rows: Rows) -> None:
        if not self._has_begun:
            self._truncate_from(rows[0][0])
        with open(self._path, "a") as f:
            f.writelines([json.dumps({"step": step, **_json_values(row)}) + "\n" for step, row in rows])

    def _truncate_from(self, first_step: int) -> None:
        """Remove the lines from step `first_step` on, and a last line that a kill cut off."""
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        if os.path.exists(self._path):
            with open(self._path) as f:
                lines = list(_lines_before(f, first_step))
            part = f"{self._path}.{os.getpid()}.tmp"
            with open(part, "w") as f:
                f.writelines(lines)
            os.replace(part, self._path)
        self._has_begun = True


def _lines_before(lines: Iterable[str], first_step: int) -> Iterable[str]:
    """Yield the lines of steps before step `first_step`."""
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # cut off
            continue
        if step < first_step:
            yield line


def _json_values(row: dict[str, float]) -> dict[str, float | None]:
    return {name: x if math.isfinite(x) else None for name, x in row.items()}
