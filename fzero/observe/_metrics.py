"""Log the metrics of a run, waiting for the device once in n steps only, and write them to writers."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_int
from fzero._notice import trouble_link, warn_once
from fzero._tracebacks import api_boundary
from fzero.ranks import Mesh, is_leader
from fzero.sharding import is_box
from fzero.tree import Tree

__all__ = ["MetricsLog", "Rows", "log"]


Rows = Sequence[tuple[int, dict[str, float]]]
"""The argument of a writer: the number and the metrics of each step since its last call."""


@api_boundary
def log(*writers: Callable[[Rows], None], every: int = 10, mesh: Mesh | None = None) -> "MetricsLog":
    """Make a log. Call it with the number and the metrics of a step; it writes them once in `every` steps.

    The results of a step are on its device, and may not be computed yet. Reading them waits for the device. So the log
    collects the metrics of `every` steps, and copies them to the host when the next step comes. No step is lost.

    Args:
        *writers: functions of rows: `progress`, `tensorboard`, `jsonl`, or your own, such as one that calls
            `wandb.log(row, step=i)` for each `i, row`. If a writer has a method `close`, it is called at the end.
        every: how many steps there are between two waits.
        mesh: the mesh of a distributed run, whose rank 0 writes; None for one process.

    Returns:
        A `MetricsLog`. As a context manager it writes the pending metrics and closes its writers, also after an error.

    Raises:
        ValueError: if `every` is not a number of steps.
        TypeError: if a writer is not a function.

    Example:
        >>> import torch
        >>> with log(print, every=2) as write:
        ...     for i in range(3):
        ...         write(i, {"loss": torch.tensor(1.0 / (i + 1)), "lr": 0.5})
        [(0, {'loss': 1.0, 'lr': 0.5}), (1, {'loss': 0.5, 'lr': 0.5, 'steps/s': ...})]
        [(2, {'loss': 0.333..., 'lr': 0.5, 'steps/s': ...})]
    """
    check_int("every", every, 1, "a number of steps")
    for writer in writers:
        if not callable(writer):
            raise TypeError(f"writer {writer!r}: expected a function of rows, such as fzero.observe.progress()")
    return MetricsLog(writers, every, is_leader(mesh))


class MetricsLog:
    """The log of a run. Make it with `fzero.observe.log`."""

    def __init__(self, writers: Sequence[Callable[[Rows], None]], every: int, is_leader: bool) -> None:
        self._writers, self._every, self._is_leader = writers, every, is_leader
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._first = math.nan  # the time of the first call, in seconds
        self._last_flush = math.nan  # the time of the last wait, in seconds
        self._reported: set[str] = set()  # the metrics that were reported as not finite

    def __call__(self, step: int, values: Tree) -> None:
        """Keep the metrics of a step, and first write the pending ones if there are `every` steps.

        A second call with the same number adds metrics to the step.

        Args:
            step: the number of the step.
            values: a tree of 0-d tensors and numbers, such as `{"loss": loss, "lr": 1e-3}`. Metrics are named by their
                paths.

        Raises:
            TypeError: if a value is not a number, or differs by rank. The message names the metric.
        """
        if not self._is_leader:
            return
        metrics = _metrics_by_path(values)
        if self._pending and self._pending[-1][0] == step:  # further metrics of the same step, as after an evaluation
            self._pending[-1][1].update(metrics)
            return
        if len(self._pending) >= self._every:  # by now the device had one step's time to compute the last metrics
            self.flush()
        self._first = time.perf_counter() if math.isnan(self._first) else self._first
        self._pending.append((int(step), metrics))

    def flush(self) -> None:
        """Wait for the pending metrics, and write them."""
        if not self._pending:
            return
        rows, self._pending = _copy_to_host(self._pending), []
        now = time.perf_counter()
        if not math.isnan(self._last_flush):
            rows[-1][1].setdefault("steps/s", len(rows) / max(now - self._last_flush, 1e-9))
        elif len(rows) > 1:  # the first step may have included compilation, so its time does not count
            rows[-1][1].setdefault("steps/s", (len(rows) - 1) / max(now - self._first, 1e-9))
        self._last_flush = now
        self._report_nonfinite(rows)
        for writer in self._writers:
            writer(rows)

    def _report_nonfinite(self, rows: Rows) -> None:
        """Print a notice, once for each metric, if it is not finite, with the number of the step."""
        for step, row in rows:
            for name, x in row.items():
                if not math.isfinite(x) and name not in self._reported:
                    self._reported.add(name)
                    warn_once(
                        f"fzero: the metric {name!r} is {x} at step {step} of the log (reported once): "
                        "fzero.observe.nonfinite(step)(*args) shows the rank, the leaf and the line where it began"
                        + trouble_link("nan-on-one-rank")
                    )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.flush()
        finally:
            for writer in self._writers:
                getattr(writer, "close", lambda: None)()


def _metrics_by_path(values: Any) -> dict[str, Any]:
    """Return the metrics of a tree by their paths.

    Raises:
        TypeError: if a metric has no name, is not a number, or differs by rank.
    """
    paths, leaves, _ = tree.flatten_with_paths(values, is_box)
    if "" in paths:
        raise TypeError(f'metrics need names: pass {{"loss": ...}} instead of a bare {tree.show(leaves[0])}')
    for path, x in zip(paths, leaves, strict=True):
        if is_box(x):
            raise TypeError(
                f"the metric {path!r} differs by rank: average it in the step by fzero.collectives.pmean(x)"
            )
        if not (isinstance(x, (int, float)) or (isinstance(x, torch.Tensor) and x.numel() == 1)):
            raise TypeError(f"the metric {path!r} is {tree.show(x)}: expected one number")
    return {p: x.detach() if isinstance(x, torch.Tensor) else x for p, x in zip(paths, leaves, strict=True)}


def _copy_to_host(pending: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, float]]]:
    """Copy all tensors to the host, in one copy for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, row in pending:
        for x in row.values():
            if isinstance(x, torch.Tensor):
                groups.setdefault((x.device, x.dtype), []).append(x.reshape(()))
    copies = {kind: iter(torch.stack(tensors).tolist()) for kind, tensors in groups.items()}

    def to_number(x: Any) -> float:
        return next(copies[x.device, x.dtype]) if isinstance(x, torch.Tensor) else x

    return [(step, {name: to_number(x) for name, x in row.items()}) for step, row in pending]
