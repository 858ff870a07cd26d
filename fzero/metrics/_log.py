"""A log of a run's metrics, which waits for the device once in n steps."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import notice, see
from fzero.layout.boxes import is_box
from fzero.ranks.mesh import Mesh

__all__ = ["MetricsLog", "Rows", "log"]

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
            raise TypeError(f"a writer is a function of rows, such as fzero.metrics.progress(); this one is {writer!r}")
    return MetricsLog(writers, every, mesh is None or mesh.rank == 0)


class MetricsLog:
    """The log of a run. Make it with `fzero.metrics.log`."""

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
                        "fzero.debug.nonfinite(step)(*args) names the rank, the leaf and the line where it began"
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
            raise TypeError(f"the metric {path!r} differs by rank: average it in the step, fzero.pmean(x)")
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
