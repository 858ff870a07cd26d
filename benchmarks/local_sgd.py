"""Train the example GPT with replicas that average seldom, and compare losses with the bytes between replicas.

python benchmarks/local_sgd.py [--write]

500 steps of examples/train_gpt.py's model and data, on 2 replicas of 2 simulated ranks, stage 2, float32, with the
default backend. Each run sees the same batches. `--write` keeps the table in local_sgd.md and the curves in
docs/local_sgd.png; about ten minutes.
"""

import pathlib
import sys
import sysconfig
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from examples.train_gpt import CONFIG, init, losses_of
from fzero import data, optim
from fzero.local_sgd import local_steps

ROOT = pathlib.Path(__file__).parents[1]
STEPS, BATCH, LAST, GOAL = 500, 16, 20, 0.01
RUNS: dict[str, dict[str, Any] | None] = {
    "each step (data parallel)": None,
    "every=10": {"every": 10},
    "every=50": {"every": 50},
    "every=50, parts=2, delay=5, mix=0.5": {"every": 50, "parts": 2, "delay": 5, "mix": 0.5},
    "every=50, momentum 0.5": {"every": 50, "outer": optim.sgd(0.7, momentum=0.5, nesterov=True)},
    "every=50, momentum 0.9 (DiLoCo's)": {"every": 50, "outer": optim.sgd(0.7, momentum=0.9, nesterov=True)},
}


def windows_of(context: int) -> torch.Tensor:
    """Return Python's own library as windows of bytes."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text.long().unfold(0, context + 1, context)


def train(options: dict[str, Any] | None) -> tuple[list[float], float, float]:
    """Train, and return each step's loss, the loss of the model on other windows, and its bytes between replicas."""
    mesh = fzero.mesh(replica=2, dp=2)
    windows = windows_of(CONFIG["context"])
    test, batches = windows[:64], data.batches(windows[64:], mesh, global_batch=BATCH)
    opt = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(optim.warmup_cosine(1.5e-3, STEPS // 10, STEPS), b2=0.99, weight_decay=0.1),
    )

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: losses_of(p, x).mean())(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    axis = ("replica", "dp") if options is None else "dp"
    step: Any = fzero.jit(fzero.shard(train_step, 2, mesh, axis=axis))
    step = step if options is None else local_steps(step, **options)
    params, state = step.init(init(CONFIG), opt)
    numel, losses = fzero.tree.numel(params if options is None else state.anchor), []
    for _, batch in batches.steps(0, STEPS):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss) if options is None else float(loss.value.mean()))
    full = step.gather(params if options is None else state.anchor)
    with torch.no_grad():
        held_out = losses_of(full, test).mean().item()
    sends = STEPS if options is None else STEPS // options["every"]
    return losses, held_out, sends * 2 * 4 * numel  # an all_reduce counts twice


def main() -> None:
    """Train, print and plot."""
    runs = {name: train(options) for name, options in RUNS.items()}
    (_, exact, most), *_ = runs.values()
    figure = Figure(figsize=(7, 4))
    axes, rows = figure.subplots(), []
    for name, (losses, held_out, moved) in runs.items():
        off = (held_out - exact) / exact
        rows.append([name, f"{moved / most:.3f}", f"{held_out:.4f}", f"{off:+.2%}", "met" if off <= GOAL else "missed"])
        smooth = torch.tensor(losses).unfold(0, LAST, 1).mean(1)
        axes.plot(torch.arange(LAST, STEPS + 1) * moved / STEPS / 1e9, smooth, label=name)
    axes.set(xscale="log", xlabel="gigabytes between replicas", ylabel="loss, nats per byte")
    axes.set(title="what a byte between replicas buys")
    axes.legend()
    if "--write" in sys.argv:
        figure.savefig(ROOT / "docs" / "local_sgd.png", dpi=100, bbox_inches="tight")
    parts = [
        f"The loss is of the shared model on 64 windows that no run saw, after {STEPS} steps. Bytes are those that "
        "each rank gives to collectives between replicas, beside data parallelism over all ranks. The goal: a loss at "
        "most 1% above.",
        table(["averages", "bytes", "loss", "beside data parallel", "goal"], rows),
    ]
    publish(__file__, "python benchmarks/local_sgd.py", parts, "--write" in sys.argv)


if __name__ == "__main__":
    main()
