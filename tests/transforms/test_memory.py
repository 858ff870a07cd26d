"""Eager peaks by the allocator's events, on simulated ranks, where no process group frees late."""

import itertools
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from tests.helpers import train_step_for
from tests.memory import peak_bytes

LAYERS, WIDTH, N = 32, 64, 2
UNIT = WIDTH * WIDTH * 4  # bytes
SHARDS = LAYERS  # units: all ranks' shards of the parameters, or of the gradients
WHOLE = LAYERS * N  # units: all ranks' whole gradients


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["blocks"]:
        x = torch.tanh(x @ p["w"])
    return x.square().mean()


def inputs() -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(WIDTH, WIDTH, generator=g) / 8} for _ in range(LAYERS)]}
    return params, fzero.mesh(dp=N).split(torch.ones(N * 4, WIDTH))


@pytest.fixture(scope="module")
def gradient_peaks() -> dict[tuple[str, int], float]:
    """Return peaks in units, above the inputs: of partition and value_and_grad, by reduction and micro-batches."""
    params, batch = inputs()
    peaks = {}
    for reduce_grads, k in itertools.product(("once", "each"), (1, 4)):
        grad = fzero.mesh(dp=N).spmd(
            lambda p, x, reduce_grads=reduce_grads, k=k: fzero.value_and_grad(loss, micro_batches=k)(
                fzero.partition(p, reduce_grads=reduce_grads), x
            )
        )
        peaks[reduce_grads, k] = peak_bytes(lambda grad=grad: grad(params, batch)) / UNIT
    return peaks


FEW = 20  # units: a gradient of each rank, their sum, activations (in all 79 and 102; 110 if reduced at the end)


@pytest.mark.slow
def test_gradients_are_reduced_as_the_backward_pass_goes(gradient_peaks):
    """The parameters' shards, the gradients' shards and a few units; never the whole gradients."""
    assert gradient_peaks["each", 1] < 2 * SHARDS + FEW < SHARDS + WHOLE
    assert gradient_peaks["each", 4] < 3 * SHARDS + FEW < SHARDS + WHOLE + SHARDS


def test_stages_1_and_2_are_one_program_with_one_micro_batch(gradient_peaks):
    assert gradient_peaks["once", 1] == gradient_peaks["each", 1]


def test_stage_1_accumulates_whole_gradients(gradient_peaks):
    assert gradient_peaks["once", 4] > 2 * WHOLE - FEW


@pytest.mark.slow
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_peak_of_a_step_does_not_grow_from_stage_1_to_2(k):
    (params, batch), opt, peaks = inputs(), optim.adam(1e-3), []
    for stage in (1, 2):
        step = fzero.shard(train_step_for(loss, opt, micro_batches=k), stage=stage, mesh=fzero.mesh(dp=N))
        state = step.init(params, opt)
        peaks.append(peak_bytes(lambda step=step, state=state: step(*state, batch)))
    assert peaks[1] <= peaks[0]
