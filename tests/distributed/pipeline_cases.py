"""Pipelines on real processes: by tables, eager and jitted, training is that without a pipeline; see test_gloo.py."""

import time
from typing import Any

import torch

import fzero
from fzero import moe, optim
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.memory import peak_bytes
from tests.pipelines import test_axes as axes_tests
from tests.pipelines.model import OPT, batch_of, block, loss_of, params_of, step_of, trained, trained_on
from tests.tiny_gpt import gpt_block, gpt_params

CASES: Cases = {}
SLOW: Cases = {}
case = into(CASES)
slow = into(CASES, SLOW)
NAMED = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zbv": 2}


def mesh_of(world: fzero.Mesh) -> fzero.Mesh:
    return fzero.mesh(dp=-1, pp=2)


def check(mesh: fzero.Mesh, stage: int, loss: fzero.Pipeline, depth: int, **options: Any) -> None:
    params, size = params_of(depth), 8 * dict(mesh.shape)["dp"]
    found = trained_on(mesh, stage, loss, params, size, **options)
    assert_trees_close(found, trained(loss, params, size), 1e-9)


@case
def tables_train_as_the_model_does(world: fzero.Mesh) -> None:
    """At each stage of ZeRO some schedule; eagerly, and as one graph a rank, whose stages differ."""
    for stage, name in enumerate(("1f1b", "zbv", "interleaved", "gpipe")):
        loss = loss_of(4, schedule=name, stages=NAMED[name], depth=5)
        check(mesh_of(world), stage, loss, 5)
        check(mesh_of(world), stage, loss, 5, jit={"backend": "fx"})


@case
def each_action_may_gather_and_reduce(world: fzero.Mesh) -> None:
    loss = loss_of(4, remat=True)
    check(mesh_of(world), 3, loss, 4, gather=False)
    check(mesh_of(world), 3, loss, 4, gather=False, jit={"backend": "fx"})


@slow
def every_schedule_at_every_stage(world: fzero.Mesh) -> None:
    for name, stages in NAMED.items():
        for stage in range(4):
            loss = loss_of(4, schedule=name, stages=stages, depth=6)
            check(mesh_of(world), stage, loss, 6)
            for gather in (True, False):
                check(mesh_of(world), stage, loss, 6, gather=gather, jit={"backend": "fx"})


@slow
def with_tensor_parallelism_and_with_experts(world: fzero.Mesh) -> None:
    """Collectives along other axes lie within the stages, and none of them leaves its phase."""
    for axes, rule, experts in (({"tp": 2}, axes_tests.TENSOR, 0), ({"ep": 2}, moe.split("experts"), 4)):
        mesh = fzero.mesh(dp=1, pp=-1, **axes)
        loss = fzero.pipeline(
            block=axes_tests.block, first=axes_tests.first, last=axes_tests.last, micro_batches=4, split=rule
        )
        for stage in (1, 3):
            axes_tests.check(mesh, stage, loss, axes_tests.params_of(4, experts))
            axes_tests.check(mesh, stage, loss, axes_tests.params_of(4, experts), jit={"backend": "fx"})


@slow
def compiled_stages_train_as_the_model_does(world: fzero.Mesh) -> None:
    check(mesh_of(world), 2, loss_of(4, schedule="zb"), 4, jit={"backend": "inductor"})


@case
def masks_are_those_without_a_pipeline(world: fzero.Mesh) -> None:
    def dropping(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.4)

    key, params = fzero.random.key(5), params_of(4)
    loss = loss_of(4, block=dropping)
    size = 8 * dict(mesh_of(world).shape)["dp"]
    eager = trained_on(mesh_of(world), 2, loss, params, size, key)
    assert_trees_close(trained_on(mesh_of(world), 2, loss, params, size, key, jit={"backend": "fx"}), eager, 1e-9)
    if world.size == 2:
        assert_trees_close(eager, trained(loss, params, size, key), 1e-9)


def gpt_loss_of(micro_batches: int, schedule: str) -> fzero.Pipeline:
    def first(rest: Any, tokens: torch.Tensor) -> torch.Tensor:
        return rest["wte"][tokens] + rest["wpe"][: tokens.shape[1]]

    def last(rest: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ rest["head"]).flatten(0, 1), tokens.flatten())

    stages = NAMED[schedule]
    return fzero.pipeline(
        block=gpt_block, first=first, last=last, micro_batches=micro_batches, schedule=schedule, stages=stages
    )


@case
def a_plan_of_each_rank_is_what_its_allocator_sees(world: fzero.Mesh) -> None:
    """To the byte, whatever is in flight; and 1F1B holds as much for 8 micro-batches as for 4."""
    mesh, opt, peaks = fzero.mesh(dp=1, pp=-1), optim.sgd(0.1), {}
    depth = 2 * mesh.size
    for schedule, micro_batches in (("1f1b", 4), ("1f1b", 8), ("gpipe", 8), ("zb", 4), ("interleaved", 4)):
        loss = gpt_loss_of(micro_batches, schedule)
        step: Any = fzero.shard(step_of(loss, opt), 1, mesh, split=loss.split)
        state = list(step.init(loss.stack(gpt_params(layers=depth), mesh), opt, donate=True))
        step = fzero.jit(step, backend="fx")
        tokens = torch.zeros(2 * micro_batches, 16, dtype=torch.int64)
        planned = step.plan(*state, tokens).added_bytes

        def train(state: Any = state, step: Any = step, tokens: Any = tokens) -> None:
            state[:] = step(*state, tokens)[:2]

        train()
        assert planned == peak_bytes(train), (schedule, micro_batches, world.rank)
        peaks[schedule, micro_batches] = planned
    assert peaks["1f1b", 4] == peaks["1f1b", 8] < peaks["gpipe", 8]


class Sleeps(torch.autograd.Function):
    """A block that takes its time, and no processor."""

    @staticmethod
    def forward(x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seconds = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return g.clone(), None


@slow
def efficiency_is_the_formulas(world: fzero.Mesh) -> None:
    """Of stages that sleep, M / (M + P - 1) for GPipe and 1F1B, within 5%."""
    mesh, seconds, params = fzero.mesh(dp=1, pp=-1), 0.2, params_of(world.size)

    def sleeping(p: Any, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(block(p, x), seconds)  # pyright: ignore[reportReturnType]

    for name in ("gpipe", "1f1b"):
        loss = loss_of(8, schedule=name, block=sleeping)
        step: Any = fzero.shard(step_of(loss), 1, mesh, split=loss.split)
        state = step.init(loss.stack(params, mesh), OPT)
        *state, _ = step(*state, batch_of(8))
        torch.distributed.barrier()
        begin = time.perf_counter()
        *state, _ = step(*state, batch_of(8))
        torch.distributed.barrier()
        efficiency = 8 * 3 * seconds / (time.perf_counter() - begin)
        expected = loss.schedule(mesh).timing().efficiency
        assert abs(efficiency / expected - 1) < 0.05, (name, efficiency, expected)
        assert abs(expected - 8 / (8 + world.size - 1)) < 1e-9


def dies(world: fzero.Mesh) -> None:
    """Raise on the last rank in the midst of a schedule: the others must not wait for it."""
    mesh = fzero.mesh(dp=1, pp=-1, timeout=60)

    def stops(p: Any, x: torch.Tensor, index: int, batch: Any) -> torch.Tensor:
        if index == mesh.size - 1 and batch["tokens"][0] == batch_of(8)["tokens"][6]:
            raise RuntimeError("planted in a stage")
        return block(p, x)

    trained_on(mesh, 1, loss_of(8, block=stops), params_of(mesh.size), 8)


if __name__ == "__main__":
    run({**CASES, "dies": dies})
