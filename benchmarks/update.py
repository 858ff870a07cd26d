"""Time the jitted update of one large leaf beside a plain loop, torch's fused AdamW and DeepSpeed's CPUAdam.

python benchmarks/update.py [--write] [--rounds 15] [--numel 33554432] [--threads 1 2]

The loop is compiled, too: it reads and writes the same tensors and does nothing but add, so it goes at the memory's
speed. All ways of a table run in one process, in rounds that begin with another each time. The peers take and leave
what ours does, with the casts that they need. After the last round all must have the same weights. The goal: 90% of
the loop's bandwidth. `--write` keeps the tables in update.md; three minutes, on an idle machine.
"""

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from fzero import optim
from fzero.transforms import step

RATE, DECAY, GOAL, WARM = 1e-3, 0.01, 0.9, 2
HALF = fzero.Precision(param=torch.bfloat16, grad=torch.bfloat16)


class Way(NamedTuple):
    """A way to update: what does it once, and what returns the weights, in the tensors that they live in."""

    update: Callable[[], object]
    weights: Callable[[], torch.Tensor] | None


class Case(NamedTuple):
    """What is compared in one table.

    Attributes:
        title: of the table.
        moved: bytes an element that must be read and written.
        optimizer: makes ours.
        is_half: whether parameters and gradients are bfloat16, and masters are float32.
        moments: how many there are.
        has_peers: whether torch and DeepSpeed have it.
    """

    title: str
    moved: int
    optimizer: Callable[[], optim.Optimizer]
    is_half: bool
    moments: int
    has_peers: bool


CASES = (
    Case("AdamW, bfloat16 with float32 masters", 28, lambda: optim.adamw(RATE, weight_decay=DECAY), True, 2, True),
    Case("AdamW, float32", 28, lambda: optim.adamw(RATE, weight_decay=DECAY), False, 2, True),
    Case("Lion, bfloat16 with float32 masters", 20, lambda: optim.lion(RATE, weight_decay=DECAY), True, 1, False),
    Case("Lion, float32", 20, lambda: optim.lion(RATE, weight_decay=DECAY), False, 1, False),
)


def values(case: Case, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the weights in float32, and the gradient in the dtype that it arrives in."""
    g = torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(numel, generator=g), torch.randn(numel, generator=g) * 1e-3
    return weights, gradient.bfloat16() if case.is_half else gradient


def ours(case: Case, numel: int) -> Way:
    """Make the jitted update."""
    weights, gradient = values(case, numel)
    opt = optim.master_weights(case.optimizer(), HALF) if case.is_half else case.optimizer()
    params: Any = {"w": weights}
    state = [params, opt.init(params)]
    if case.is_half:
        state[0] = HALF.cast(params)
    jitted = fzero.jit(lambda params, state, grads: step(opt)(params, grads, state), donate=(0, 1))

    def update() -> None:
        state[:] = jitted(*state, {"w": gradient})

    return Way(update, lambda: optim.master_params(*state)["w"] if case.is_half else state[0]["w"])


def loop(case: Case, numel: int) -> Way:
    """Make the compiled loop that reads and writes the same tensors."""
    weights, gradient = values(case, numel)
    states = [weights, *[torch.zeros(numel) for _ in range(case.moments)]]
    narrow = [weights.bfloat16()] if case.is_half else []

    @functools.partial(torch.compile, dynamic=False)
    def run(gradient: torch.Tensor, states: list[torch.Tensor], narrow: list[torch.Tensor]) -> None:
        new = [x + gradient for x in states]
        for x, y in zip([*states, *narrow], [*new, *new[: len(narrow)]], strict=True):
            x.copy_(y)

    return Way(lambda: run(gradient, states, narrow), None)


def peer(case: Case, numel: int, made: Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]) -> Way:
    """Make a peer's update in float32 of weights and a gradient, with a cast of each if they are bfloat16 outside."""
    weights, gradient = values(case, numel)
    wide = torch.empty(numel) if case.is_half else gradient
    narrow, run = weights.bfloat16(), made(weights, wide)

    def update() -> None:
        if case.is_half:
            wide.copy_(gradient)
        run()
        if case.is_half:
            narrow.copy_(weights)

    return Way(update, lambda: weights)


def fused(weights: torch.Tensor, gradient: torch.Tensor) -> Callable[[], object]:
    """Use torch's fused AdamW."""
    param = torch.nn.Parameter(weights)
    param.grad = gradient
    return torch.optim.AdamW([param], lr=RATE, weight_decay=DECAY, fused=True).step


def cpu_adam(weights: torch.Tensor, gradient: torch.Tensor) -> Callable[[], object]:
    """Use DeepSpeed's CPUAdam, which a C++ compiler and ninja build at its first use."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(weights)
    param.grad = gradient
    opt = DeepSpeedCPUAdam([param], lr=RATE, weight_decay=DECAY, adamw_mode=True)  # pyright: ignore[reportArgumentType]
    return opt.step


def ways_of(case: Case, numel: int) -> dict[str, Way]:
    """Make all ways of a table."""
    timings = {"plain loop": loop(case, numel), "fzero.jit": ours(case, numel)}
    if case.has_peers:
        casts = ", with casts" if case.is_half else ""
        timings[f"torch, fused{casts}"] = peer(case, numel, fused)
        try:
            timings[f"DeepSpeed, CPUAdam{casts}"] = peer(case, numel, cpu_adam)
        except Exception as error:  # it is not installed, or cannot be built
            print(f"without CPUAdam: {error!r}", file=sys.stderr)
    return timings


def time_ways(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after some that warm up."""
    names, times = list(ways), {name: list[float]() for name in ways}
    for i in range(WARM + rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            begun = time.perf_counter()
            ways[name].update()
            times[name].append(time.perf_counter() - begun)
    return {name: x[WARM:] for name, x in times.items()}


def show(xs: Sequence[float], unit: str) -> str:
    """Show a median and its quartiles."""
    low, middle, high = statistics.quantiles(xs, n=4)
    return f"{middle:{unit}} ({low:{unit}} to {high:{unit}})"


def rows_of(case: Case, numel: int, rounds: int) -> list[list[str]]:
    """Measure the ways of a case.

    Raises:
        AssertionError: if two of them have other weights in the end.
    """
    ways = ways_of(case, numel)
    times = time_ways(ways, rounds)
    expected, *others = [way.weights() for way in ways.values() if way.weights]
    for other in others:
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)
    rows = []
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(times["plain loop"], seconds, strict=True)]
        goal = "" if name != "fzero.jit" else "met" if statistics.median(ratios) >= GOAL else "missed"
        rate = case.moved * numel / statistics.median(seconds) / 1e9
        rows.append([name, show([x * 1e3 for x in seconds], ".1f"), f"{rate:.1f}", show(ratios, ".0%"), goal])
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--numel", type=int, default=32 << 20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    head = ["way", "ms", "GB/s", "of the loop's bandwidth", f"goal: {GOAL:.0%}"]
    parts = [
        f"One leaf of {args.numel:,} elements. Medians and quartiles of {args.rounds} rounds that interleave the ways "
        f"of a table. GB/s counts the bytes that must be moved. The machine's load was {os.getloadavg()[0]:.1f} at the "
        "start."
    ]
    for threads in args.threads:
        torch.set_num_threads(threads)
        for case in CASES:
            title = f"## {case.title}, {case.moved} bytes an element, {threads} thread{'s' * (threads > 1)}"
            parts += [title, table(head, rows_of(case, args.numel, args.rounds))]
    publish(__file__, "python benchmarks/update.py --write", parts, args.write)


if __name__ == "__main__":
    main()
