"""The published runs: how they are read and halved, and that the constants of the cards meet their goals."""

import math
import statistics

import pytest

from benchmarks.published.__main__ import spearman
from benchmarks.published.fit import PEAK, formula
from benchmarks.published.runs import CARDS, Run, runs


def constants(card: str) -> dict[str, float]:
    """Return the fitted constants of a card, as shares of its peak."""
    machine = CARDS[card]
    shares = {
        "product_flops": machine.product_flops / PEAK[card],
        "attention_flops": machine.attention_flops / PEAK[card],
    }
    return {**shares, "half_depth": machine.half_depth, "network_bandwidth": machine.network_bandwidth}


def predict_speed(run: Run) -> float:
    """Return the tokens a second of one card by the terms of the cost model."""
    samples = run.config.micro_batch * run.config.accumulation
    return samples * run.length / formula(run, CARDS[run.card], constants(run.card))


def test_every_published_run_is_planned_or_left_out_with_a_reason():
    actual, left = runs()
    assert len(actual) == 216 + 8 + 3 and len(left) == 18 + 3
    assert all("not built: " in line or line.endswith(": in benchmarks/published/parallel.md") for line in left)
    assert all(run.config.depth == run.shape.depth for run in actual)
    assert all(not math.isnan(run.tokens) or not math.isnan(run.memory) for run in actual)


def test_whether_a_published_run_is_held_out_depends_on_its_name_alone():
    results = [r for r in runs()[0] if r.family == "llm-foundry"]
    assert 0.4 < sum(r.is_held for r in results) / len(results) < 0.6
    names: dict[str, bool] = {}
    assert all(names.setdefault(r.name, r.is_held) == r.is_held for r in results)


@pytest.mark.parametrize("card", PEAK)
def test_a_cards_constants_meet_their_goals_on_the_held_half(card):
    held = [r for r in runs()[0] if r.card == card and r.is_held and not r.config.float8]
    errors = [abs(predict_speed(r) / r.tokens - 1) for r in held]
    assert len(held) > 25 and statistics.median(errors) <= 0.1
    assert sum(e <= 0.25 for e in errors) >= 0.9 * len(held)
    assert spearman([predict_speed(r) for r in held], [r.tokens for r in held]) >= 0.97
