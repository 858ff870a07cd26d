"""Boxes where tensors belong, and results that differ by rank: each error names the value and says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import nn, optim
from tests.errors.helpers import (
    OPT,
    PIECES,
    SHARD,
    SLOT,
    STAGES,
    TRAIN_STEP,
    TWO,
    Row,
    X,
    check,
    init,
    loss_of,
    run,
    spmd,
)

NOT_A_TENSOR = r"Shard\('a', float32 \[3, 2\], 4 of 8 elements, dp=2\).*fzero\.value_and_grad.*fzero\.gather"


PLAIN: dict[str, Callable[[Any], Any]] = {
    "torch.sum(box)": lambda box: torch.sum(box),
    "torch.stack([box])": lambda box: torch.stack([box]),
    "linear(x, box)": lambda box: torch.nn.functional.linear(X, box),
    "layer_norm(x, weight=box)": lambda box: torch.nn.functional.layer_norm(X, (3,), weight=box),
    "torch.zeros_like(box)": lambda box: torch.zeros_like(box),
    "torch.where(c, box, 0)": lambda box: torch.where(X > 0, box, 0.0),
    "x.add(box)": lambda box: X.add(box),
    "x @ box": lambda box: X @ box,
    "box @ x": lambda box: box @ X,
    "x + box": lambda box: X + box,
    "x - box": lambda box: X - box,
    "x * box": lambda box: X * box,
    "x / box": lambda box: X / box,
    "x ** box": lambda box: X**box,
    "box < x": lambda box: box < X,
    "2 * box": lambda box: 2 * box,
    "box + 1": lambda box: box + 1,
    "box / 2": lambda box: box / 2,
    "-box": lambda box: -box,
    "box[0]": lambda box: box[0],
    "box.T": lambda box: box.T,
    "box.sum()": lambda box: box.sum(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_box_in_plain_torch_is_refused(name):
    with pytest.raises((TypeError, AttributeError), match=NOT_A_TENSOR):
        PLAIN[name](SHARD)


@pytest.mark.parametrize("name", ["torch.sum(box)", "linear(x, box)", "x @ box", "x + box"])
def test_a_slot_in_plain_torch_is_refused(name):
    with pytest.raises(TypeError, match=r"Slot\('a', 1, float32 \[2\]\).*fzero\.value_and_grad.*fzero\.gather"):
        PLAIN[name](SLOT)


@pytest.mark.parametrize("name", ["torch.sum(box)", "x @ box", "2 * box", "box.sum()"])
def test_a_batch_in_plain_torch_is_refused(name):
    with pytest.raises((TypeError, AttributeError), match=r"PerRank\(.*mesh\.spmd|PerRank\(.*fzero\.shard"):
        PLAIN[name](PIECES)


def test_a_box_answers_hasattr_equality_and_truth_as_any_object():
    assert not hasattr(SHARD, "__len__") and not hasattr(SHARD, "no_such_attribute")
    assert SHARD == SHARD and bool(SHARD)


APPLY, WEIGHTS, BUFFERS = nn.functional(torch.nn.Sequential(torch.nn.Linear(3, 2)))


INTO_MODULES: dict[str, Row] = {
    "parameters": (
        lambda: APPLY(fzero.mesh(dp=2).spmd(fzero.partition)(WEIGHTS), BUFFERS, X),
        TypeError,
        r"Sequential was given Shard\('0', float32 \[2, 3\], .* for '0.weight'.*fzero.gather\(params\)",
    ),
    "buffers": (
        lambda: APPLY(WEIGHTS, TWO.split({"mean": torch.ones(2)}), X),  # pyright: ignore
        TypeError,
        r"buffers is a PerRank.*expected a dict",
    ),
    "input": (lambda: APPLY(WEIGHTS, BUFFERS, PIECES), TypeError, r"PerRank\(float32 \[2, 4, 3\]\)"),
}


@pytest.mark.parametrize("name", INTO_MODULES)
def test_a_box_in_a_module_is_refused(name):
    check(INTO_MODULES[name])


DIFFERS = (
    r"differs by rank, and a plain result must be replicated: "
    r"reduce it with fzero.collectives.pmean.*fzero.axes.assume_replicated"
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_result_that_differs_by_rank_is_named(stage):
    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        params, state, loss = TRAIN_STEP(params, state, x)
        return params, state, {"loss": loss, "accuracy": x.mean()}  # a forgotten pmean

    with pytest.raises(ValueError, match=f"result 2, leaf 'accuracy' {DIFFERS}"):
        run(stage, *init(stage), train_step=train_step)


def test_a_rank_programs_only_result_that_differs_by_rank_is_refused():
    with pytest.raises(ValueError, match=DIFFERS):
        spmd(lambda x: x.sum(), PIECES)


def test_an_update_with_unreduced_gradients_is_refused_by_leaf():
    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        updates, state = OPT.update(torch.func.grad(loss_of)(params, x), state, params)
        return optim.apply_updates(params, updates), state

    with pytest.raises(ValueError, match=f"result 0, leaf 'a.w' {DIFFERS}"):
        run(0, *init(0), train_step=train_step)
