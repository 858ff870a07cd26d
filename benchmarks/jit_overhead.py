"""Print what a jitted call costs beside its operations: a function that returns its inputs, 200 small tensors.

python benchmarks/jit_overhead.py [--write]

Backend "fx": the graph is empty, so what is left is taking the arguments apart, looking the trace up, checking donated
memory and putting the results together. The goal, on an idle machine: less than 1 ms. `--write` keeps the table
in jit_overhead.md.
"""

import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table

LEAVES, CALLS, GOAL = 200, 1000, 1e-3


def same(values: Any) -> Any:
    """Return the argument."""
    return values


def successor(values: Any) -> Any:
    """Return new tensors: one small operation a leaf."""
    return {name: x + 1 for name, x in values.items()}


def successor_in_place(values: Any) -> Any:
    """Do what a step with donation does: write the results into the arguments."""
    for x in values.values():
        x.copy_(x + 1)
    return values


def seconds(f: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the seconds of a call that is given its last results."""
    values = {f"x{i}": torch.ones(4) for i in range(LEAVES)}
    for _ in range(CALLS // 10):
        values = f(values)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        values = f(values)
        times.append(time.perf_counter() - start)
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    rows = []
    for function, in_place in ((same, same), (successor, successor_in_place)):
        ways = {
            "jitted": (fzero.jit(function, backend="fx"), function),
            "jitted, donate=0": (fzero.jit(function, backend="fx", donate=0), in_place),
        }
        for way, (f, plain) in ways.items():
            (median, slow), base = seconds(f), seconds(plain)[0]
            numbers = [f"{x * 1e6:,.0f}" for x in (base, median, slow, median - base)]
            rows.append([function.__name__, way, *numbers, "met" if median - base < GOAL else "missed"])
    publish(
        __file__,
        "python benchmarks/jit_overhead.py",
        [
            f"Microseconds of a call with {LEAVES} leaves of 4 float32, of {CALLS} calls after warm-up. `same` returns "
            "its inputs; `successor` adds 1 to each, plainly with `x.copy_(x + 1)` where the argument is donated.",
            table(["function", "call", "plain", "jitted", "90th percentile", "overhead", "goal: < 1,000"], rows),
        ],
        "--write" in sys.argv,
    )


if __name__ == "__main__":
    main()
