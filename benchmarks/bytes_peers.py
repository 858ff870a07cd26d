"""Compare 8-bit moments with those of torchao and bitsandbytes: bytes, loss of the example GPT, time of the update.

python benchmarks/bytes_peers.py [--write]     (pip install torchao bitsandbytes)

All three start from the same parameters and see the same batches. Gradients come from one jitted function; the peers
are torch optimizers, which update the parameters in place. `--write` keeps the table in bytes_peers.md; ten minutes.
"""

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks.bytes import BATCH, ELEMENTS, GOAL, LAST, ROUNDS, STEPS, WAYS, example_batches, seconds_of_update, train
from benchmarks.report import publish, table
from examples.train_gpt import CONFIG, init, losses_of
from fzero import optim, tree

OPTIONS = {"betas": (0.9, 0.99), "weight_decay": 0.1}
Peer = Callable[[Sequence[torch.nn.Parameter], float], torch.optim.Optimizer]


def peers() -> dict[str, Peer]:
    """Return the optimizers of other libraries, each made from parameters and a rate."""
    try:
        torchao, bitsandbytes = importlib.import_module("torchao.optim"), importlib.import_module("bitsandbytes")
    except ImportError as error:
        sys.exit(f"{error}: pip install torchao bitsandbytes")
    return {
        "torch, float32": lambda params, rate: torch.optim.AdamW(params, lr=rate, fused=True, **OPTIONS),
        "torchao, 8 bits": lambda params, rate: torchao.AdamW8bit(params, lr=rate, **OPTIONS),
        "bitsandbytes, 8 bits": lambda params, rate: bitsandbytes.optim.AdamW8bit(params, lr=rate, **OPTIONS),
    }


def moment_bytes(value: Any) -> int:
    """Return the bytes of an optimizer's state: of the tensors that torchao's own tensors hold, too."""
    if isinstance(value, dict):
        return sum(moment_bytes(x) for name, x in value.items() if not str(name).startswith(("step", "qmap")))
    if hasattr(value, "__tensor_flatten__"):
        return sum(moment_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0] if name != "qmap")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a torch optimizer's group: torchao's is a tensor, which its compiled update reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def train_with(peer: Peer) -> tuple[list[float], float]:
    """Train the example GPT; return the loss of each step, and the bytes of moments for each parameter."""
    batches, schedule = example_batches(), optim.warmup_cosine(1.5e-3, warmup_steps=STEPS // 10, total_steps=STEPS)
    params = tree.map(lambda x: torch.nn.Parameter(x.clone()), init(CONFIG))
    leaves = tree.tensors(params)
    opt = peer(leaves, 0.0)
    gradients = fzero.jit(fzero.value_and_grad(lambda p, x: losses_of(p, x).mean()), backend="inductor")
    losses = []
    for i in range(STEPS):
        loss, grads = gradients(tree.map(lambda x: x.detach(), params), batches[i].value[0])
        for leaf, grad in zip(leaves, tree.tensors(grads), strict=True):
            leaf.grad = grad
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        set_rate(opt.param_groups[0], float(schedule(torch.tensor(i))))
        opt.step()
        losses.append(float(loss))
    return losses, moment_bytes(dict(enumerate(opt.state.values()))) / tree.numel(params)


def seconds_of_peer(peer: Peer) -> Callable[[], float]:
    """Return a function that updates one leaf, and returns the seconds."""
    generator = torch.Generator().manual_seed(0)
    param, grad = [torch.randn(4096, ELEMENTS // 4096, generator=generator) for _ in range(2)]
    leaf = torch.nn.Parameter(param)
    opt = peer([leaf], 1e-3)

    def run() -> float:
        leaf.grad = grad
        start = time.perf_counter()
        opt.step()
        return time.perf_counter() - start

    run()
    return run


def main() -> None:
    others = peers()
    runs: dict[str, tuple[list[float], float]] = {}
    for name in ("float32 moments", "bfloat16 moments", "int8 moments"):
        of_way = train(WAYS[name])
        runs[f"fzero, {name}"] = of_way.losses, of_way.state_bytes - 4
    runs |= {name: train_with(peer) for name, peer in others.items()}
    timers = {
        f"fzero, {name}": seconds_of_update(optim.adamw(1e-3, moments=moments), "inductor")
        for name, moments in (("float32 moments", None), ("bfloat16 moments", "bfloat16"), ("int8 moments", "int8"))
    } | {name: seconds_of_peer(peer) for name, peer in others.items()}
    rounds = [{name: run() for name, run in timers.items()} for _ in range(ROUNDS)]
    reference, rows = statistics.fmean(runs["fzero, float32 moments"][0][-LAST:]), []
    for name, (losses, size) in runs.items():
        loss = statistics.fmean(losses[-LAST:])
        ratio = statistics.median([r[name] / r["torch, float32"] for r in rounds])
        ms = statistics.median([r[name] for r in rounds]) * 1e3
        rows.append([name, f"{size:.2f}", f"{loss:.4f}", f"{loss / reference - 1:+.2%}", f"{ms:.0f}", f"{ratio:.2f}"])
    head = ["system", "bytes of moments a parameter", "loss", f"beside float32 (goal {GOAL:.0%})", "ms", "of torch's"]
    versions = ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in ("torchao", "bitsandbytes"))
    publish(
        __file__,
        "python benchmarks/bytes_peers.py",
        [
            f"AdamW of {versions} and fzero. The loss is that of the example GPT, {STEPS} steps of {BATCH} windows, "
            f"mean of the last {LAST} steps. The time is of the update of one leaf of {ELEMENTS:,} elements, median of "
            f"{ROUNDS} rounds that interleave all; fzero and torchao are compiled by Inductor, torch is fused. "
            "Steps and tables of codes are not counted as moments.",
            table(head, rows),
        ],
        "--write" in sys.argv,
    )


if __name__ == "__main__":
    main()
