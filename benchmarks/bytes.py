"""Train the example GPT with fewer bytes, compare its loss with float32's, and time the update.

python benchmarks/bytes.py [--write]

500 steps of examples/train_gpt.py's model and data from one start, unsharded: the numbers of every stage. A row of
`WAYS` is a way to train, by its optimizer. `--write` keeps the tables in bytes.md; ten minutes.
"""

import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from examples.train_gpt import CONFIG, init, losses_of
from fzero import data, optim, random, tree

STEPS, BATCH, GOAL, LAST = 500, 16, 0.01, 50
ELEMENTS, ROUNDS = 2**23, 15


BFLOAT16 = fzero.Precision(param=torch.bfloat16, full=lambda path, leaf: "norm" in path)


class Way(NamedTuple):
    """A way to train: its optimizer, made from a rate, and the policy of dtypes if it is in half precision."""

    optimizer: Callable[[Any], optim.Optimizer]
    precision: fzero.Precision | None = None


def adamw(**options: Any) -> Callable[[Any], optim.Optimizer]:
    """Return a function from a rate to the example's AdamW."""
    return lambda rate: optim.adamw(rate, b2=0.99, weight_decay=0.1, **options)


def masters(rate: Any) -> optim.Optimizer:
    """Return AdamW on float32 masters of bfloat16 parameters."""
    return optim.master_weights(adamw()(rate), BFLOAT16)


def without_masters(moments: str) -> Callable[[Any], optim.Optimizer]:
    """Return a function from a rate to AdamW on bfloat16 parameters that it rounds stochastically."""
    return lambda rate: optim.stochastic_rounding(adamw(moments=moments)(rate), BFLOAT16, random.key(0))


WAYS = {
    "float32 moments": Way(adamw()),
    "bfloat16 moments": Way(adamw(moments="bfloat16")),
    "int8 moments": Way(adamw(moments="int8")),
    "int8 moments of all leaves": Way(adamw(moments=optim.Moments("int8", full=lambda path, leaf: False))),
    "bfloat16 parameters with masters": Way(masters, BFLOAT16),
    "bfloat16 parameters, stochastic rounding, bfloat16 moments": Way(without_masters("bfloat16"), BFLOAT16),
    "bfloat16 parameters, stochastic rounding, int8 moments": Way(without_masters("int8"), BFLOAT16),
}


MOMENTS: dict[str, Any] = {
    "float32 moments": None,
    "bfloat16 moments": "bfloat16",
    "int8 moments": "int8",
}  # of the times


class Run(NamedTuple):
    """The loss of each step, and the bytes of parameters and optimizer state for each parameter."""

    losses: list[float]
    state_bytes: float


def example_batches() -> Any:
    """Return the batches of the example: windows of the standard library's source."""
    mesh = fzero.mesh(dp=1)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return data.batches(text.long().unfold(0, CONFIG["context"] + 1, CONFIG["context"]), mesh, global_batch=BATCH)


def train(way: Way) -> Run:
    """Train the example GPT."""
    mesh, batches = fzero.mesh(dp=1), example_batches()
    rate = optim.warmup_cosine(1.5e-3, warmup_steps=STEPS // 10, total_steps=STEPS)
    opt = optim.chain(optim.clip_by_global_norm(1.0), way.optimizer(rate))

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss_of = fzero.value_and_grad(lambda p, x: losses_of(p, x).mean(), precision=way.precision)
        loss, grads = loss_of(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.jit(train_step, backend="inductor")
    params = init(CONFIG)
    params, opt_state = params if way.precision is None else way.precision.cast(params), opt.init(params)
    state = fzero.zero.state_bytes((params, opt_state), mesh) / tree.numel(params)
    losses = []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batches[i].value[0])
        losses.append(float(loss))
    return Run(losses, state)


def seconds_of_update(opt: optim.Optimizer, backend: str) -> Callable[[], float]:
    """Return a function that updates one leaf in a jitted step, and returns the seconds."""

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    generator = torch.Generator().manual_seed(0)
    params, grads = [{"w": torch.randn(4096, ELEMENTS // 4096, generator=generator)} for _ in range(2)]
    jitted, state = fzero.jit(update, backend=backend, donate=(0, 1)), [params, opt.init(params)]  # pyright: ignore[reportArgumentType]

    def run() -> float:
        start = time.perf_counter()
        state[:] = jitted(*state, grads)
        return time.perf_counter() - start

    run()
    return run


def main() -> None:
    runs = {name: train(way) for name, way in WAYS.items()}
    reference = statistics.fmean(next(iter(runs.values())).losses[-LAST:])
    rows = []
    for name, run in runs.items():
        loss = statistics.fmean(run.losses[-LAST:])
        goal = "met" if abs(loss / reference - 1) <= GOAL else "missed"
        rows.append([name, f"{run.state_bytes:.2f}", f"{loss:.4f}", f"{loss / reference - 1:+.2%}", goal])
    times = []
    for backend in ("fx", "inductor"):
        timers = {name: seconds_of_update(optim.adamw(1e-3, moments=m), backend) for name, m in MOMENTS.items()}
        rounds = [{name: run() for name, run in timers.items()} for _ in range(ROUNDS)]
        for name in timers:
            low, ratio, high = statistics.quantiles([r[name] / r["float32 moments"] for r in rounds])
            ms = statistics.median([r[name] for r in rounds]) * 1e3
            times.append([name, backend, f"{ms:.0f}", f"{ratio:.2f} ({low:.2f} to {high:.2f})"])
    publish(
        __file__,
        "python benchmarks/bytes.py",
        [
            "## The state: loss",
            f"The example GPT, {STEPS} steps, {BATCH} windows a step; the loss is the mean of the last {LAST} steps. "
            "Bytes are of parameters and optimizer state together, between steps.",
            table(["way", "bytes a parameter", "loss", "beside float32", f"goal: within {GOAL:.0%}"], rows),
            "## The state: time of the update",
            f"AdamW on one leaf of {ELEMENTS:,} elements, medians and quartiles of {ROUNDS} rounds that interleave the "
            "ways of a backend. On a CPU the arithmetic of bytes costs more than the memory traffic that it saves. "
            "No GPU was at hand.",
            table(["way", "backend", "ms", "of float32's"], times),
        ],
        "--write" in sys.argv,
    )


if __name__ == "__main__":
    main()
