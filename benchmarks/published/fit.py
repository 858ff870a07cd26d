"""Fit the constants of each card to half of the runs of llm-foundry.

python -m benchmarks.published.fit

A plan takes seconds, and a fit thousands of evaluations. So this evaluates the terms of the cost model in a closed
formula: the same products by shape, attention, memory-bound bytes, collectives beside the work of a block, the update.
Four constants are fitted for each card; all others are those of `fzero.tuning.Machine`, from data sheets.
"""

import math
from collections.abc import Mapping

from benchmarks.published.runs import CARDS, Run, runs
from fzero.tuning import Machine

__all__ = ["fit", "formula"]

PEAK = {"a100_40gb": 312e12, "a100_80gb": 312e12, "h100_80gb": 989e12}
START = {"product_flops": 0.75, "half_depth": 300.0, "attention_flops": 0.5, "network_bandwidth": 1e10}
LIMITS = {
    "product_flops": (0.3, 1.0),
    "half_depth": (1.0, 2000.0),
    "attention_flops": (0.05, 1.0),
    "network_bandwidth": (1e9, 5e10),
}
FORWARD, BACKWARD, LOSS = 18, 34, 22  # numbers that unfused operations read and write, by token and width or class
UPDATE = 250  # bytes that unfused operations of the update read and write, by parameter


def formula(run: Run, machine: Machine, c: Mapping[str, float]) -> float:
    """Return the seconds of a step of an MPT model by the terms of the cost model."""
    d, layers, vocab = run.shape.width, run.shape.depth, run.shape.vocab
    config, peak = run.config, PEAK[run.card]
    tokens, n, memory = config.micro_batch * run.length, config.ranks, machine.memory_bandwidth

    def product(m: int, k: int, o: int) -> float:
        tiles = math.ceil(m / 128) * math.ceil(o / 256)
        waves = math.ceil(tiles / machine.processors) * machine.processors
        rate = c["product_flops"] * peak * k / (k + c["half_depth"]) * m * o / (waves * 128 * 256)
        return max(2 * m * k * o / rate, 2 * (m * k + k * o + m * o) / memory, machine.launch_seconds)

    def both(m: int, k: int, o: int) -> float:
        return product(m, o, k) + product(k, m, o)

    shapes = [*[(tokens, d, d)] * 4, (tokens, d, 4 * d), (tokens, 4 * d, d)]
    attention = 4 * tokens * run.length * d / (c["attention_flops"] * peak)
    unfused = 2 * tokens * d / memory
    forward = sum(product(*s) for s in shapes) + attention + FORWARD * unfused
    backward = sum(both(*s) for s in shapes) + 2.5 * attention + BACKWARD * unfused + 10 * 12 * d * d / memory
    # a block that runs again needs no result: its last product and sum are left out
    backward += forward - product(*shapes[-1]) - 3 * unfused if config.remat else 0.0
    head = product(tokens, d, vocab) + both(tokens, d, vocab) + LOSS * 2 * tokens * vocab / (2 * memory)
    machines = math.ceil(n / machine.ranks)
    speed = (
        machine.link_bandwidth if machines == 1 else min(machine.link_bandwidth, machine.ranks * c["network_bandwidth"])
    )
    hops = (min(n, machine.ranks) * machines - machines) * machine.hop_seconds + (
        machines - 1
    ) * machine.network_hop_seconds
    gather = 24 * d * d * (n - 1) / n / speed + machine.latency_seconds + hops if n > 1 else 0.0
    if config.stage == 3:
        micro = layers * (max(forward, gather) + max(backward, 2 * gather)) + 2 * gather
    else:
        micro = layers * (forward + max(backward, gather)) + gather
    update = UPDATE * (12 * d * d * layers + vocab * d) / n / memory + (0.0 if config.stage == 3 else layers * gather)
    return config.accumulation * (micro + head) + update


def fit(card: str) -> dict[str, float]:
    """Return the constants of a card that fit its half best: the least mean of |log(predicted / measured)|."""
    own = [r for r in runs()[0] if r.card == card and not r.is_held]

    def loss(c: Mapping[str, float]) -> float:
        logs = [
            abs(
                math.log(
                    r.config.micro_batch * r.config.accumulation * r.length / formula(r, CARDS[card], c) / r.tokens
                )
            )
            for r in own
        ]
        return sum([min(x, 0.6) for x in logs]) / len(logs)

    best, step = dict(START), 0.5
    while step > 0.002:
        tries = [
            {**best, name: min(max(best[name] * (1 + s), LIMITS[name][0]), LIMITS[name][1])}
            for name in best
            for s in (step, -step / (1 + step))
        ]
        nearest = min(tries, key=loss)
        if loss(nearest) < loss(best) - 1e-7:
            best = nearest
        else:
            step /= 1.6
    return best


if __name__ == "__main__":
    for card, peak in PEAK.items():
        c = fit(card)
        print(card, {name: f"{x * peak if name.endswith('flops') else x:.4g}" for name, x in c.items()})
        for half in (False, True):
            some = [r for r in runs()[0] if r.card == card and r.is_held == half and not r.config.float8]
            errors = sorted(
                [
                    abs(
                        r.config.micro_batch * r.config.accumulation * r.length / formula(r, CARDS[card], c) / r.tokens
                        - 1
                    )
                    for r in some
                ]
            )
            print(
                "  held" if half else "  fit",
                len(some),
                f"median {errors[len(errors) // 2]:.3f}, largest {errors[-1]:.2f}",
            )
