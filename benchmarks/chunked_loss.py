"""Time the loss of a language model's head, and its gradients, beside torch's own ways not to hold all logits.

python benchmarks/chunked_loss.py [--write] [--rounds 7] [--threads 2]

All ways run in one process, in rounds that begin with another each time. The peak is the CPU allocator's, above what
was held before: the gradients of hidden states and head are in it. `--write` keeps chunked_loss.md; five minutes.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.allocator import peak_bytes  # first: it counts tensors that are made after it

# isort: split
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fzero
from benchmarks.report import publish, table
from fzero import nn

CASES = (
    ("float32, 2,048 tokens, width 256, 32,000 classes", 2048, 256, 32_000, torch.float32),
    ("float32, 512 tokens, width 512, 50,000 classes", 512, 512, 50_000, torch.float32),
    ("bfloat16, 2,048 tokens, width 256, 32,000 classes", 2048, 256, 32_000, torch.bfloat16),
)
PARTS = 8  # torchtitan's default
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_full(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of whole logits, in float32 as in training."""
    return F.cross_entropy((hidden @ weight.mT).float(), labels)


def in_parts(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss as torchtitan computes it: tokens in parts, and each part's logits twice."""

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((h @ weight.mT).float(), y, reduction="sum")

    pairs = zip(hidden.chunk(PARTS), labels.chunk(PARTS), strict=True)
    losses = [checkpoint(part, h, y, use_reentrant=False) for h, y in pairs]
    return torch.stack(losses).sum() / len(labels)


def of_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of torch's own chunked form, with its default options."""
    options: Any = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def by_backward(loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Make a way of torch.autograd."""

    def run(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        value = loss(*leaves, labels)
        return value.detach(), torch.autograd.grad(value, leaves)

    return run


def ways() -> dict[str, Callable[..., Any]]:
    """Make the ways: each returns the loss and the gradients of hidden states and head."""
    programs = {
        "whole logits": by_backward(in_full),
        "whole logits, torch.compile": by_backward(torch.compile(in_full)),
    }
    programs |= {f"torchtitan's way, {PARTS} parts": by_backward(in_parts)}
    if hasattr(F, "linear_cross_entropy"):
        programs["torch's F.linear_cross_entropy"] = by_backward(of_torch)
    ours = fzero.value_and_grad(nn.linear_cross_entropy, argnums=(0, 1))
    programs |= {"fzero, eager": ours, "fzero, fx": fzero.jit(ours, backend="fx", donate=())}
    return programs | {"fzero, inductor": fzero.jit(ours, backend="inductor", donate=())}


def inputs_of(tokens: int, width: int, classes: int, dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, width, generator=g), torch.randn(classes, width, generator=g) / width**0.5
    return hidden.to(dtype), weight.to(dtype), torch.randint(classes, (tokens,), generator=g)


def check(results: dict[str, Any], inputs: Inputs) -> None:
    """Check that all ways have the numbers of float64."""
    hidden, weight, labels = inputs
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].mT, labels)
    expected = [exact.detach(), *torch.autograd.grad(exact, wide)]
    for name, (loss, grads) in results.items():
        for x, y in zip((loss, *grads), expected, strict=True):
            error = (x.double() - y).norm() / y.norm()
            assert error < (2e-2 if hidden.dtype == torch.bfloat16 else 1e-4), (name, error)


def measure(case: Any, rounds: int) -> tuple[str, list[list[str]]]:
    """Return a case's table and its rows of goals."""
    title, *sizes = case
    inputs, runs = inputs_of(*sizes), ways()
    check({name: run(*inputs) for name, run in runs.items()}, inputs)  # and compile
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in (names[i % len(names) :] + names[: i % len(names)])[:: 1 if i % 2 else -1]:
            start, cpu = time.perf_counter(), time.process_time()
            runs[name](*inputs)
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - cpu)
    gradients = sum([x.nbytes for x in inputs[:2]])
    peaks = {name: peak_bytes(lambda run=run: run(*inputs)) - gradients for name, run in runs.items()}
    rows = []
    for name in names:
        first, median, third = statistics.quantiles([1e3 * x for x in seconds[name]], n=4, method="inclusive")
        cpu = 1e3 * statistics.median(processor[name])
        rows.append(
            [name, f"{median:,.0f}", f"{first:,.0f} to {third:,.0f}", f"{cpu:,.0f}", f"{peaks[name] / 1e6:,.1f}"]
        )
    return f"## {title}\n\n" + table(HEAD, rows), goals(title, names, seconds, peaks)


HEAD = ["way", "ms", "quartiles", "processor ms", "MB above the gradients"]


def goals(title: str, names: list[str], seconds: dict[str, list[float]], peaks: dict[str, int]) -> list[list[str]]:
    """Compare the compiled way with the best peer of each number that does not hold all logits."""
    own, peers = "fzero, inductor", [name for name in names if not name.startswith(("fzero", "whole"))]
    quickest = min(peers, key=lambda name: statistics.median(seconds[name]))
    smallest = min(peers, key=lambda name: peaks[name])
    ratios = [a / b for a, b in zip(seconds[own], seconds[quickest], strict=True)]
    first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return [
        [title, f"time / {quickest}", f"{median:.2f} ({first:.2f} to {third:.2f})"],
        [title, f"peak / {smallest}", f"{peaks[own] / peaks[smallest]:.2f}"],
    ]


NOTE = (
    "Each way computes the loss of a linear head and the gradients of hidden states and head. torchtitan's way takes "
    "the tokens in parts under a checkpoint. torch's own form, of torch 2.13, takes tokens in parts and computes "
    "gradients in the forward pass; it has no derivatives under torch.func, of second order or with torch.compile. "
    "fzero takes classes in parts of 2,048 and computes their logits twice. So it has a third more products than "
    "torch's form, and derivatives of any order. torch advises its form where tokens are at least as many as the "
    "width, as here. All numbers are checked against float64."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep benchmarks/chunked_loss.md")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tables, compared = zip(*[measure(case, args.rounds) for case in CASES], strict=True)
    goal_table = table(["case", "what", "ratio"], [row for rows in compared for row in rows])
    publish(
        __file__,
        "python benchmarks/chunked_loss.py --write",
        [NOTE, *tables, "## Beside the best peer", goal_table],
        args.write,
    )


if __name__ == "__main__":
    main()
