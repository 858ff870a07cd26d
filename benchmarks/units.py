"""Count the units and collectives of a mixture with a module per expert, and time its step, by the rule of units.

python benchmarks/units.py [--write] [--layers 2] [--rounds 3]

The model is that of DeepSpeed's pull request 6649: 64 experts of three matrices in each layer, 197 leaves. Units are
counted for 48 layers. Collectives and times are those of an eager step at stage 3 with `--layers`, on rank 0 of 2 whose
other rank does not exist, so nothing is sent: what is left is what the host does. `--write` keeps units.md.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.one_rank import alone
from benchmarks.report import publish, table
from fzero import optim, sharding, tree

DEEP, WIDTH, HIDDEN, EXPERTS, VOCAB = 48, 16, 8, 64, 64
OPT = optim.sgd(0.1)
GOALS = "Goals: by_size has at most 1/100 of the collectives of a unit a leaf, and is at least 10 times as fast."


def model(layers: int, device: str) -> Any:
    """Make the parameters."""

    def w(*shape: int) -> dict[str, torch.Tensor]:
        return {"weight": torch.full(shape, 0.01, device=device)}

    def expert() -> Any:
        return {"gate": w(WIDTH, HIDDEN), "up": w(WIDTH, HIDDEN), "down": w(HIDDEN, WIDTH)}

    def layer() -> Any:
        dense = {name: w(WIDTH, WIDTH) for name in "qkvo"}
        return {**dense, "router": w(WIDTH, EXPERTS), "experts": [expert() for _ in range(EXPERTS)]}

    return {"embed": w(VOCAB, WIDTH), "layers": [layer() for _ in range(layers)]}


def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Run each token through all experts, weighed by the router."""
    y = params["embed"]["weight"][tokens]
    for layer in params["layers"]:
        q, k, v, o = (layer[name]["weight"] for name in "qkvo")
        y = y + torch.tanh(y @ q + y @ k + y @ v) @ o
        gate, up, down = (torch.stack([e[name]["weight"] for e in layer["experts"]]) for name in ("gate", "up", "down"))
        h = torch.tanh(torch.einsum("td,edf->etf", y, gate)) * torch.einsum("td,edf->etf", y, up)
        y = y + torch.einsum("etf,efd,te->td", h, down, torch.softmax(y @ layer["router"]["weight"], -1))
    return y.square().mean()


def train_step(params: Any, opt_state: Any, tokens: torch.Tensor) -> Any:
    """Take one unsharded step."""
    value, grads = fzero.value_and_grad(loss)(params, tokens)
    updates, opt_state = OPT.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, value


RULES: dict[str, Callable[[Any], Any]] = {
    "a unit a leaf": lambda params: lambda path, leaf: path,
    "by_granularity(100)": lambda params: sharding.by_granularity(params, 100),
    "by_granularity(101)": lambda params: sharding.by_granularity(params, 101),
    "by_size(1,000)": lambda params: sharding.by_size(params, 1_000),
    "by_size(20,000)": lambda params: sharding.by_size(params, 20_000),
    "default": lambda params: None,
}


def count(rule: Any, params: Any) -> tuple[int, int]:
    """Count the units of a rule, and the elements of the largest."""
    sizes: dict[str, int] = {}
    for path, x in zip(*tree.flatten_with_paths(params)[:2], strict=True):
        name = (rule or fzero.sharding.default_units)(path, x)
        sizes[name] = sizes.get(name, 0) + x.numel()
    return len(sizes), max(sizes.values())


def measure(rule: Any, params: Any, rounds: int) -> tuple[int, list[float]]:
    """Return the collectives of an eager step, and the milliseconds of some."""
    with alone(dp=2) as mesh:
        step = fzero.shard(train_step, stage=3, mesh=mesh, check=False, units=rule)
        state = step.init(params, OPT)
        tokens, times = mesh.local(torch.randint(VOCAB, (8,))), []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            state = step(*state, tokens)[:2]
            times.append((time.perf_counter() - begun) * 1e3)
        with fzero.collectives.record() as log:
            step(*state, tokens)
    return len(log.unit_events), times[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deep, small = model(DEEP, "meta"), model(args.layers, "cpu")
    rows, first = [], (0, 0.0)
    for name, make in RULES.items():
        counted, largest = count(make(deep), deep)
        collectives, times = measure(make(small), small, args.rounds)
        ms = statistics.median(times)
        first = first if first[0] else (collectives, ms)
        ratios = f"1/{first[0] / collectives:.0f}", f"{first[1] / ms:.1f} x"
        rows.append([name, f"{counted:,}", f"{largest:,}", f"{collectives:,}", ratios[0], f"{ms:.0f}", ratios[1]])
    head = [
        "units",
        f"units of {DEEP} layers",
        "elements of the largest",
        f"collectives of an eager step, {args.layers} layers",
        "of the first row's",
        "ms",
        "faster",
    ]
    publish(
        __file__, "python benchmarks/units.py --write", [__doc__.split("\n\n")[2], GOALS, table(head, rows)], args.write
    )


if __name__ == "__main__":
    main()
