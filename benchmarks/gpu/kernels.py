"""Kernels: where the time of a step goes, by kind of work, by operation, and by the function of the model."""

from collections import Counter
from typing import Any, NamedTuple

import torch

import fzero
from benchmarks.gpu.case import Case, Setting, Values
from benchmarks.gpu.encoder import HALF, Config, batch_of, init, train_step_of
from fzero import optim
from fzero._torch import wait_for_device
from fzero.observe._lines import _mark_functions

__all__ = ["NEEDS_ALL_RANKS", "cases"]

NEEDS_ALL_RANKS = False
STAGE = 3
MODEL, TOY = Config(1024, 4, 16, 4096, 512, 30522, 0, 16), Config(64, 2, 4, 256, 16, 256, 0, 4)
MARK = "of the model: "


class Run(NamedTuple):
    """A step with its arguments."""

    step: Any
    args: tuple[Any, ...]


def cases(setting: Setting) -> list[Case]:
    """List the profiles."""
    return [
        Case(f"jitted step, {setting.backend}", lambda: by_kind(setting), compiles=setting.backend == "inductor"),
        Case("eager step, by function", lambda: by_function(setting)),
    ]


def prepare(setting: Setting) -> Run:
    """Make a sharded step and its arguments."""
    c, mesh = TOY if setting.toy else MODEL, setting.mesh
    opt = optim.master_weights(optim.adamw(1e-4), HALF)
    step = fzero.shard(train_step_of(c, opt, HALF), stage=STAGE, mesh=mesh, check=False)
    with mesh.device:
        return Run(step, (*step.init(lambda: init(c), opt), mesh.local(batch_of(c))))


def by_kind(setting: Setting) -> list[Values]:
    """Return the kinds of work of a jitted step, and its most expensive operations and kernels."""
    step, args = prepare(setting)
    profile = fzero.profile(fzero.jit(step, backend=setting.backend), *args)

    def row(kind: str, cost: Any) -> Values:
        times = {"ms of the host": cost.seconds * 1e3, "ms of the device": cost.device_seconds * 1e3}
        return {"what": kind, "name": cost.name[:70].replace("|", "/"), **times, "calls": round(cost.calls)}

    return [row("kind", c) for c in profile.kinds] + [row("operation", c) for c in profile.operations[:8]]


def by_function(setting: Setting) -> list[Values]:
    """Return the time of the kernels that each function of the model starts, forward and backward, and their names."""
    step, args = prepare(setting)
    step(*args)
    kinds = {torch.profiler.ProfilerActivity.CPU}
    if torch.accelerator.is_available():
        kinds |= torch.profiler.supported_activities()
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler, _mark_functions(MARK):
        step(*args)
        wait_for_device()
    events = list(profiler.events() or [])
    has_kernels = any(event.kernels for event in events)
    sums: dict[str, Counter[str]] = {}
    for event in events:
        if event.name.startswith(MARK):
            sums.setdefault(event.name.removeprefix(MARK), Counter()).update(kernels_of(event, has_kernels))
    total = sum(c.total() for c in sums.values()) or 1
    rows = []
    for name, kernels in sorted(sums.items(), key=lambda item: -item[1].total()):
        function, _, phase = name.partition(", ")
        names = ", ".join([f"{k[:60]} ({n / 1e3:.2f} ms)".replace("|", "/") for k, n in kernels.most_common(3)])
        share = f"{kernels.total() / total:.1%}"
        rows.append(
            {"function": function, "pass": phase, "ms": kernels.total() / 1e3, "share": share, "kernels": names}
        )
    return rows


def kernels_of(event: Any, has_kernels: bool) -> Counter[str]:
    """Return the microseconds of the kernels that an event and those within it started, by name.

    Where nothing notes kernels, as on a CPU, an operation of torch stands for its kernel.
    """
    durations: Counter[str] = Counter()
    for kernel in event.kernels:
        durations[kernel.name] += kernel.duration
    if not has_kernels and not event.name.startswith(MARK):
        durations[event.name] += event.self_cpu_time_total
    for child in event.cpu_children:
        durations.update(kernels_of(child, has_kernels))
    return durations
