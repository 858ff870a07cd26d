"""Print how the costs of training grow: with layers, leaves, ranks and micro-batches.

python benchmarks/scale.py [--axes NAME ...] [--rounds 3] [--write]

A narrow GPT (width 64, 32 tokens) at stage 3 with AdamW; of leaves, a sum of vectors of 8. Each size is measured in a
process of its own, after a small one of its kind that imports everything, with an empty cache of Inductor. Trace, plan
and compile are seconds of the processor, and so is a step; a save is by the clock. Sizes that take long run once.

The exponent e is that of seconds ~ size^e, by least squares: over all sizes, and over the larger half of them. Fixed
costs hide growth at small sizes, so the larger half counts: at most 1 is linear.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import fzero
from benchmarks.jit_compile import step_of
from benchmarks.report import publish, table
from fzero import optim
from tests.helpers import train_step_for

STEPS = 7  # of which the first compiles
LONG = 60.0  # seconds of a size's phases, from which it runs once
GOAL, FLAT_GOAL = 1.05, 0.05  # exponents

FINDINGS = """## What it says

- A plan does not grow with the ranks: 65,536 take what 2 take.
- What there is to compile does not grow with the layers or with the micro-batches. 10,000 leaves that differ in
  nothing but their place still take five minutes, because each has operations of its own in its unit's segment.
- Plans and traces hardly grow with the micro-batches, which are a loop. A step grows with them as its work does.

## What it found

`fzero.plan` converted the description of a unit anew for each of its leaves, and a description has a row for each
leaf: the square of their number.
With 1,000 leaves in a unit this took 9 of 17 seconds. Now a unit is converted once: 16.7 s became 7.8."""

Case = tuple[Any, tuple[Any, ...]]  # a sharded step, and its arguments


def layers(size: int, mesh: fzero.ranks.Mesh) -> Case:
    """Make a GPT of so many layers."""
    return step_of(size, 3, mesh)


def micro_batches(size: int, mesh: fzero.ranks.Mesh) -> Case:
    """Make a GPT of four layers, whose step has so many micro-batches."""
    return step_of(4, 3, mesh, size)


def leaves(size: int, mesh: fzero.ranks.Mesh) -> Case:
    """Make a model of so many vectors, in ten units."""

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return (batch * sum(torch.stack(block).sum(0) for block in params["blocks"])).square().mean()

    opt = optim.adamw(1e-3)
    step = fzero.shard(train_step_for(loss, opt), stage=3, mesh=mesh, check=False)
    params = {"blocks": [[torch.ones(8) for _ in range(size // 10)] for _ in range(10)]}
    return step, (*step.init(params, opt), mesh.split(torch.ones(2 * mesh.size, 8)))


def ranks(size: int, mesh: fzero.ranks.Mesh) -> Case:
    """Make a GPT of four layers; the size is that of the world."""
    return step_of(4, 3, mesh)


class Axis(NamedTuple):
    """What grows: how a case is made, the sizes to plan, and those to compile and to run."""

    make: Callable[[int, fzero.ranks.Mesh], Case]
    sizes: tuple[int, ...]
    run: tuple[int, ...]


AXES = {
    "layers": Axis(layers, (2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16, 32, 64, 128)),
    "leaves": Axis(leaves, (10, 100, 1000, 10_000), (10, 100, 1000, 10_000)),
    "ranks": Axis(ranks, (2, 16, 128, 1024, 8192, 65_536), (2, 4, 8)),
    "micro-batches": Axis(micro_batches, (1, 4, 16, 64, 256), (1, 4, 16, 64, 256)),
}


# In a process of its own.


def plan_step(axis: str, size: int) -> dict[str, float]:
    """Trace and plan a step for a world that is not at hand."""
    world = size if axis == "ranks" else 8
    mesh = fzero.mesh(dp=2, simulate=True)
    small, args = AXES[axis].make(10 if axis == "leaves" else 1, mesh)
    fzero.plan(small, *args, world_size=2)  # imports
    step, args = AXES[axis].make(size, mesh)
    with timed_traces() as seconds:
        start = time.process_time()
        fzero.plan(step, *args, world_size=world)
        total = time.process_time() - start
    return {"trace": sum(seconds), "plan": total - sum(seconds)}


@contextlib.contextmanager
def timed_traces() -> Iterator[list[float]]:
    """Collect the processor's seconds of each trace."""
    from fzero.graph import _entry

    seconds: list[float] = []
    trace = _entry.trace

    def timed(*args: Any) -> Any:
        start = time.process_time()
        traced = trace(*args)
        seconds.append(time.process_time() - start)
        return traced

    with unittest.mock.patch.object(_entry, "trace", timed):
        yield seconds


def ran(axis: str, size: int) -> dict[str, float]:
    """Compile, run and save in a world of this process; along ranks, simulate them, uncompiled."""
    import torch._inductor.compile_fx  # noqa: F401  imported before the clock starts

    if axis == "ranks":
        step, args = AXES[axis].make(size, fzero.mesh(dp=size, simulate=True))
        run = fzero.jit(step, backend="fx")
    else:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        step, args = AXES[axis].make(size, fzero.mesh(dp=1))
        run = fzero.jit(step)
        run.plan(*args)
    *state, batch = args
    seconds = []
    for _ in range(STEPS):
        start, children = time.process_time(), sum(os.times()[2:4])
        *state, _ = run(*state, batch)
        seconds.append(time.process_time() - start + sum(os.times()[2:4]) - children)
    usual = statistics.median(seconds[1:])
    phases = {"step": usual} if axis == "ranks" else {"compile": seconds[0] - usual, "step": usual}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        fzero.save(pathlib.Path(folder) / "step", {"params": state[0], "opt_state": state[1]}, mesh=step.mesh)
        phases["save"] = time.perf_counter() - start
    return phases


def elsewhere(kind: str, axis: str, size: int) -> dict[str, float]:
    """Do one of the two in a new process, from an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--measure", kind, axis, str(size)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    print(axis, size, done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def sizes_and_seconds(axis: str, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Measure an axis: for each phase and size the seconds of each round, in turns."""
    phases: dict[str, dict[int, list[float]]] = {}
    for number in range(rounds):
        for kind, sizes in (("planned", AXES[axis].sizes), ("ran", AXES[axis].run)):
            for size in sizes:
                if number and sum(sum(f.get(size, ())) for f in phases.values()) > LONG * number:
                    continue
                for phase, seconds in elsewhere(kind, axis, size).items():
                    phases.setdefault(phase, {}).setdefault(size, []).append(seconds)
    return phases


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Fit the exponent of seconds by size."""
    x, y = zip(*[(math.log(size), math.log(max(seconds, 1e-3))) for size, seconds in points], strict=True)
    return statistics.linear_regression(x, y).slope


def rows_of(axis: str, rounds: int) -> list[list[Any]]:
    """Make the rows of an axis, a phase each."""
    rows = []
    for phase, by_size in sizes_and_seconds(axis, rounds).items():
        points = [(size, statistics.median(seconds)) for size, seconds in by_size.items()]
        larger = slope(points[len(points) // 2 :])
        goal = FLAT_GOAL if axis == "ranks" and phase in ("trace", "plan") else GOAL
        verdict = "met" if larger <= goal else "missed"
        listed = ", ".join([f"{size:,}: {seconds:.3g}" for size, seconds in points])
        rows.append([axis, phase, listed, f"{slope(points):.2f}", f"{larger:.2f}", f"≤ {goal:g}: {verdict}"])
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=3)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        what, name, count = options.measure
        print(json.dumps({"planned": plan_step, "ran": ran}[what](name, int(count))))
    else:
        head = ["what grows", "phase", "seconds by size", "e, all sizes", "e, larger half", "its goal"]
        rows = [row for name in options.axes for row in rows_of(name, options.rounds)]
        command = " ".join(["python benchmarks/scale.py", *[x for x in sys.argv[1:] if x != "--write"]])
        parts = [(__doc__ or "").split("\n\n", 2)[2].strip(), table(head, rows), FINDINGS]
        publish(__file__, command, parts, options.write)
