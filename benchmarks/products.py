"""Train the example GPT with products in float8, and compare its loss and its memory with exact products'.

python benchmarks/products.py [--write]

500 steps of examples/train_gpt.py's model and data from one start, unsharded: the numbers of every stage. `--write`
keeps the tables in products.md; a quarter of an hour.
"""

import statistics
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from examples.train_gpt import CONFIG, init, losses_of
from fzero import data, optim

STEPS, BATCH, GOAL, LAST, WINDOW = 500, 16, 0.01, 50, 20
WIDE = {"layers": 8, "heads": 8, "width": 512, "context": 512}  # of the memory
BFLOAT16 = fzero.Precision(param=torch.bfloat16, full=lambda path, leaf: "norm" in path)
LINEARS: dict[str, Callable[..., torch.Tensor]] = {
    "exact": F.linear,
    "float8, tensorwise": fzero.nn.float8_linear,
    "float8, rowwise": partial(fzero.nn.float8_linear, scaling="rowwise"),
}


def train_step_of(opt: optim.Optimizer, linear: Any, precision: fzero.Precision | None = None) -> Any:
    """Return the example's train step with this function in place of `torch.nn.functional.linear`."""

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        grad_of = fzero.value_and_grad(lambda p, x: losses_of(p, x, linear=linear).mean(), precision=precision)
        loss, grads = grad_of(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step


def train(linear: Callable[..., torch.Tensor]) -> list[float]:
    """Train the example GPT, and return the loss of each step."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = text.long().unfold(0, CONFIG["context"] + 1, CONFIG["context"])
    batches = data.batches(windows, fzero.mesh(dp=1), global_batch=BATCH)
    rate = optim.warmup_cosine(1.5e-3, warmup_steps=STEPS // 10, total_steps=STEPS)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.99, weight_decay=0.1))
    step = fzero.jit(train_step_of(opt, linear), backend="inductor")
    params = init(CONFIG)
    opt_state, losses = opt.init(params), []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batches[i].value[0])
        losses.append(float(loss))
    return losses


def peak_bytes(linear: Callable[..., torch.Tensor]) -> int:
    """Return the planned peak of a rank: bfloat16, stage 3, 8 ranks, 8 windows each."""
    opt = optim.master_weights(optim.adamw(1e-3), BFLOAT16)
    step = fzero.shard(train_step_of(opt, linear, BFLOAT16), stage=3, mesh=fzero.mesh(dp=8))
    params, opt_state = step.init(init(WIDE), opt)
    batch = step.mesh.split(torch.zeros(8 * 8, WIDE["context"] + 1, dtype=torch.int64))
    return fzero.plan(step, params, opt_state, batch).peak_bytes


def apart(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves, each step's as the mean of the last steps."""
    means = [torch.tensor(x).unfold(0, WINDOW, 1).mean(1) for x in (losses, reference)]
    return ((means[0] - means[1]).abs() / means[1]).max().item()


def main() -> None:
    curves = {name: train(linear) for name, linear in LINEARS.items()}
    peaks = {name: peak_bytes(linear) for name, linear in LINEARS.items()}
    exact, rows = statistics.fmean(curves["exact"][-LAST:]), []
    for name, losses in curves.items():
        loss = statistics.fmean(losses[-LAST:])
        goal = "met" if abs(loss / exact - 1) <= GOAL else "missed"
        largest = f"{apart(losses, curves['exact']):.2%}"
        memory = f"{peaks[name] / 1e6:,.0f} MB", f"{peaks[name] / peaks['exact']:.2f}"
        rows.append([name, f"{loss:.4f}", f"{loss / exact - 1:+.2%}", largest, goal, *memory])
    head = ["products", "loss", "beside exact", "largest", f"goal: within {GOAL:.0%}", "peak", "of exact's"]
    publish(
        __file__,
        "python benchmarks/products.py",
        [
            f"The example GPT, {STEPS} steps, {BATCH} windows a step, float32 beside the products. The loss is the "
            f"mean of the last {LAST} steps. The largest difference is that of means of {WINDOW} steps anywhere on "
            "the curve.",
            table(head, rows),
            f"The peak is a plan's for a rank of 8 at stage 3: {WIDE['layers']} layers of width {WIDE['width']}, 8 "
            f"windows of {WIDE['context']} tokens, bfloat16 with masters. `fzero.jit` computes most inputs of layers "
            "again in either case, so a byte in place of two saves little. There is no time: a CPU emulates these "
            "products, and no card was at hand.",
        ],
        "--write" in sys.argv,
    )


if __name__ == "__main__":
    main()
