"""The memory of blocks of remat: one input a layer, on the device or on the host."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import fzero
from fzero import tree
from tests.helpers import train_step_for
from tests.memory import peak_bytes
from tests.transforms.helpers import needs_compiler

WIDTH, ROWS = 32, 512
UNIT = ROWS * WIDTH * 4  # bytes of a block's input


def deep_loss(f: Any) -> Any:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = f(p, x)
        return x.square().mean()

    return loss


def deep(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(F.gelu(F.gelu(x @ p["a"]) @ p["b"]) @ p["c"])


def deep_inputs(layers: int) -> Any:
    g = torch.Generator().manual_seed(0)
    params = [{k: torch.randn(WIDTH, WIDTH, generator=g) / 8 for k in "abc"} for _ in range(layers)]
    return params, torch.randn(ROWS, WIDTH, generator=g)


def growth(peak: Any) -> float:
    """Return how many block inputs a layer costs."""
    small, large = (peak(*deep_inputs(layers)) for layers in (4, 12))
    return (large - small) / 8 / UNIT


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_a_plan_with_remat_holds_one_input_per_layer(backend):
    def peak(f):
        # remat alone: jit's own recomputation of what is cheap would take some of what it saves
        step = fzero.jit(grad(deep_loss(f)), backend=backend, recompute=False)
        return lambda *args: step.plan(*args).added_bytes

    gradients = 3 * WIDTH * WIDTH * 4 / UNIT
    assert growth(peak(deep)) > 5
    assert growth(peak(fzero.remat(deep))) < 1.05 + gradients
    assert 3 < growth(peak(fzero.remat(deep, "matmuls"))) < 4.05 + gradients


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 4])  # of 4 micro-batches there is a loop
@pytest.mark.parametrize(
    "stage,whole",
    [
        (2, True),
        *[pytest.param(s, w, marks=pytest.mark.slow) for s, w in ((0, True), (1, True), (3, True), (3, False))],
    ],
)
def test_a_plan_with_offloaded_activations_holds_them_on_the_host(stage, k, whole):
    """One input a layer lies there, and of the parameters none; each goes down once, and comes up once."""

    def make_plan(layers: int, save: str | None) -> fzero.graph.Plan:
        params, x = deep_inputs(layers)
        f, opt = fzero.remat(deep, save), fzero.optim.sgd(0.1)
        loss = deep_loss(lambda p, x: f(tree.map(lambda w: w.t(), p) if whole else p, x))  # a view of a leaf
        step = fzero.shard(train_step_for(loss, opt, micro_batches=k, gather=whole), stage=stage, mesh=fzero.mesh(dp=2))
        args = (*step.init(params, opt), step.mesh.split(x))
        return fzero.jit(step, backend="fx", recompute=False, prefetch=0, in_flight=0).plan(*args)

    few, many = (make_plan(layers, "host") for layers in (4, 12))
    up, down = (sum(t.bytes * t.times for t in many.transfers if t.kind == kind) for kind in ("to_device", "to_host"))
    assert up == down == 11 * UNIT  # the first input is the batch
    assert many.peak_of("host") - few.peak_of("host") == 8 * UNIT / k
    assert make_plan(12, None).peak_of("device") - many.peak_of("device") > (11 - 4) * UNIT / k - UNIT


def test_a_plan_with_remat_counts_the_flops_of_the_second_run():
    args = deep_inputs(4)
    flops = [fzero.jit(grad(deep_loss(f)), backend="fx").plan(*args).flops for f in (deep, fzero.remat(deep))]
    assert flops[1] / flops[0] > 1.3


@pytest.mark.slow
@needs_compiler
def test_inductor_does_not_merge_the_two_runs_of_a_block():
    args = deep_inputs(4)
    step = fzero.jit(grad(deep_loss(fzero.remat(deep))), backend="inductor")
    step(*args)
    assert peak_bytes(lambda: step(*args)) < step.plan(*args).added_bytes + 2 * UNIT


def test_remat_lowers_the_peak_of_an_eager_gradient():
    """torch.func.grad keeps what a second derivative would need: the block's input, and its result's gradient."""

    def peak_by_grad(f):
        return lambda *args: peak_bytes(lambda: grad(deep_loss(f))(*args))

    def peak_by_autograd(f):
        def run(params, x):
            params = [{k: v.requires_grad_() for k, v in p.items()} for p in params]
            return peak_bytes(lambda: deep_loss(f)(params, x).backward())

        return run

    gradients = 3 * WIDTH * WIDTH * 4 / UNIT
    assert growth(peak_by_grad(deep)) > 10 and growth(peak_by_grad(fzero.remat(deep))) < 2.1 + gradients
    assert growth(peak_by_autograd(deep)) > 5 and growth(peak_by_autograd(fzero.remat(deep))) < 1.1 + gradients


def test_stage_3_with_remat_holds_one_full_block():
    """It runs on one rank of a world whose others are absent, so that no collective frees its memory late."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layers, width = 24, 64
    f = fzero.remat(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(params, x):
        for p in params["blocks"]:
            x = f(p, x)
        return x.square().mean()

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = fzero.mesh(dp=2, simulate=False)
        boxes = mesh.spmd(fzero.partition)({"blocks": [{"w": torch.eye(width)} for _ in range(layers)]})
        peaks = []
        for whole in (True, False):
            step = mesh.spmd(fzero.value_and_grad(loss, gather=whole))
            peak = peak_bytes(lambda step=step: step(boxes, mesh.local(torch.ones(4, width))))
            peaks.append(peak / (width * width * 4))
    finally:
        torch.distributed.destroy_process_group()
    # all units whole, and gradients' shards; or these, one unit and its gradient
    assert peaks[0] > 1.5 * layers and peaks[1] < layers / 2 + 6, peaks
