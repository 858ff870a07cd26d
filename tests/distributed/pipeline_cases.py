"""Pipelines on real processes: by tables, eager and jitted, training is that without a pipeline; see test_gloo.py."""

import time
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.checkpoint import _files
from fzero.checkpoint.layout import PAGE_BYTES
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.checkpoint.states import same_bits
from tests.distributed.checkpoint_cases import folder
from tests.distributed.harness import Cases, into, run
from tests.helpers import ALL_STAGES, either
from tests.memory import peak_bytes
from tests.parallel.pipeline import helpers as split_model
from tests.parallel.pipeline.model import (
    OPT,
    block,
    fill,
    make_batch,
    make_loss,
    make_params,
    make_step,
    train_by_small_gradients,
    train_on,
    train_plainly,
)
from tests.parallel.schedules.named import NAMED
from tests.tiny_gpt import gpt_block, gpt_params

CASES: Cases = {}
SLOW: Cases = {}
case = into(CASES)
slow = into(CASES, SLOW)


def mesh_of(world: fzero.ranks.Mesh) -> fzero.ranks.Mesh:
    return fzero.mesh(dp=-1, pp=2)


def check(
    mesh: fzero.ranks.Mesh, stage: int, loss: fzero.parallel.pipeline.Pipeline, depth: int, **options: Any
) -> None:
    params, size = make_params(depth), 8 * dict(mesh.shape)["dp"]
    result = train_on(mesh, stage, loss, params, size, **options)
    assert_trees_close(result, train_plainly(loss, params, size), 1e-9)


@case
def tables_train_as_the_model_does(world: fzero.ranks.Mesh) -> None:
    """Each stage of ZeRO runs some schedule: eagerly, and as one graph a rank, whose stages differ."""
    tables = [*enumerate(("1f1b", "zbv", "interleaved", "gpipe"))]
    for stage, name in either(tables[1:2], tables):
        loss = make_loss(4, schedule=name, stages_per_rank=NAMED[name], depth=5)
        for jit in either((None,) if stage in (1, 2) else ({"backend": "fx"},), (None, {"backend": "fx"})):
            check(mesh_of(world), stage, loss, 5, jit=jit)


@case
def each_action_may_gather_and_reduce(world: fzero.ranks.Mesh) -> None:
    loss = make_loss(4, remat=True)
    early = {"backend": "fx", "memory_budget": 1e12}  # the previous stage's gradient is sent before weights' gradients
    for jit in either((early,), (None, {"backend": "fx"}, early)):
        check(mesh_of(world), 3, loss, 4, gather=False, jit=jit)


@slow
def small_gradients_in_float16_are_kept_by_a_loss_scale(world: fzero.ranks.Mesh) -> None:
    mesh = mesh_of(world)
    expected = train_by_small_gradients(fzero.mesh(dp=1, simulate="lockstep"), 2.0**15)
    for jit in either(({"backend": "fx"},), (None, {"backend": "fx"})):
        assert_trees_close(train_by_small_gradients(mesh, 2.0**15, jit), expected, 5e-3)


@case
def a_jitted_evaluation_gives_what_an_eager_one_does(world: fzero.ranks.Mesh) -> None:
    """Its messages are permutations, of which each rank's graph has its own part."""
    mesh, params = mesh_of(world), make_params(5)
    loss = make_loss(2, schedule="interleaved", stages_per_rank=2, depth=5)
    step: Any = fzero.shard(make_step(loss), 3, mesh, split=loss.split)
    sharded, _ = step.init(loss.stack(params, mesh), OPT)
    predict = fzero.jit(fzero.predict(step, loss.outputs(lambda rest, x, batch: x @ rest["table"].T)), backend="fx")
    result = predict(sharded, mesh.split(make_batch(8), "dp"))
    assert_trees_close(
        result, make_loss(1).outputs(lambda rest, x, batch: x @ rest["table"].T)(params, make_batch(8)), 1e-9
    )


@case
def schedules_that_differ_by_rank_are_refused(world: fzero.ranks.Mesh) -> None:
    """Such as those made of durations that each rank has measured: they would wait for ever."""
    mesh = mesh_of(world)
    place = dict(zip(mesh.axis_names, mesh.coordinates(mesh.rank), strict=True))["pp"]
    ways = (None, {"backend": "fx"})
    for i, different in enumerate(({"schedule": ("1f1b", "gpipe")[place]}, {"micro_batches": 4 * (place + 1)})):
        loss = make_loss(**{"micro_batches": 4, **different})
        for jit in either(ways[i : i + 1], ways):
            with pytest.raises((ValueError, RuntimeError), match=r"different schedules|not the same step on all ranks"):
                train_on(mesh, 1, loss, make_params(4), 8 * dict(mesh.shape)["dp"], jit=jit)


@slow
def every_schedule_at_every_stage(world: fzero.ranks.Mesh) -> None:
    for name, stages in NAMED.items():
        for stage in ALL_STAGES:
            loss = make_loss(4, schedule=name, stages_per_rank=stages, depth=6)
            check(mesh_of(world), stage, loss, 6)
            for gather in (True, False):
                check(mesh_of(world), stage, loss, 6, gather=gather, jit={"backend": "fx"})


@slow
def with_tensor_parallelism_and_with_experts(world: fzero.ranks.Mesh) -> None:
    """Collectives along other axes lie within the stages, and none of them leaves its region."""
    for axes, rule, experts in (({"tp": 2}, split_model.TENSOR, 0), ({"ep": 2}, moe.split_rule("experts"), 4)):
        mesh = fzero.mesh(dp=1, pp=-1, **axes)
        loss = fzero.pipeline(
            block=split_model.block, first=split_model.first, last=split_model.last, micro_batches=4, split=rule
        )
        for stage in (1, 3):
            split_model.check(mesh, stage, loss, split_model.params_of(4, experts))
            split_model.check(mesh, stage, loss, split_model.params_of(4, experts), jit={"backend": "fx"})


@slow
def compiled_stages_train_as_the_model_does(world: fzero.ranks.Mesh) -> None:
    check(mesh_of(world), 2, make_loss(4, schedule="zb"), 4, jit={"backend": "inductor"})


@slow
def masks_are_those_without_a_pipeline(world: fzero.ranks.Mesh) -> None:
    def dropping(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.4)

    key, params = fzero.random.key(5), make_params(4)
    loss = make_loss(4, block=dropping)
    size = 8 * dict(mesh_of(world).shape)["dp"]
    eager = train_on(mesh_of(world), 2, loss, params, size, key)
    assert_trees_close(train_on(mesh_of(world), 2, loss, params, size, key, jit={"backend": "fx"}), eager, 1e-9)
    if world.size == 2:
        assert_trees_close(eager, train_plainly(loss, params, size, key), 1e-9)


def gpt_loss_of(micro_batches: int, schedule: str) -> fzero.parallel.pipeline.Pipeline:
    def first(rest: Any, tokens: torch.Tensor) -> torch.Tensor:
        return rest["wte"][tokens] + rest["wpe"][: tokens.shape[1]]

    def last(rest: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ rest["head"]).flatten(0, 1), tokens.flatten())

    stages = NAMED[schedule]
    return fzero.pipeline(
        block=gpt_block, first=first, last=last, micro_batches=micro_batches, schedule=schedule, stages_per_rank=stages
    )


@slow
def a_plan_of_each_rank_is_what_its_allocator_sees(world: fzero.ranks.Mesh) -> None:
    """It is equal to the byte, whatever is in flight; and 1F1B holds as much for 8 micro-batches as for 4."""
    mesh, opt, peaks = fzero.mesh(dp=1, pp=-1), optim.sgd(0.1), {}
    depth = 2 * mesh.size
    few = (("1f1b", 4), ("1f1b", 8), ("gpipe", 8))
    for schedule, micro_batches in either(few, (*few, ("zb", 4), ("interleaved", 4))):
        loss = gpt_loss_of(micro_batches, schedule)
        step: Any = fzero.shard(make_step(loss, opt), 1, mesh, split=loss.split)
        state = list(step.init(loss.stack(gpt_params(layers=depth), mesh), opt, donate=True))
        step = fzero.jit(step, backend="fx", memory_budget=1e12 if schedule == "gpipe" else None)
        tokens = torch.zeros(2 * micro_batches, 16, dtype=torch.int64)
        planned = step.plan(*state, tokens).added_bytes

        def train(state: Any = state, step: Any = step, tokens: Any = tokens) -> None:
            state[:] = step(*state, tokens)[:2]

        train()
        assert planned == peak_bytes(train), (schedule, micro_batches, world.rank)
        peaks[schedule, micro_batches] = planned
    assert peaks["1f1b", 4] == peaks["1f1b", 8] < peaks["gpipe", 8]


@case
def what_one_pipeline_saves_another_loads(world: fzero.ranks.Mesh) -> None:
    """Each rank writes and reads its own blocks, and any simulation reads them."""
    with folder(world) as path:
        dense = fill({"params": make_params(5), "opt_state": OPT.init(make_params(5))})
        if world.rank == 0:
            fzero.save(path / "dense", dense)
        torch.distributed.barrier()
        before = "dense"
        for i, (pp, name, stage) in enumerate(((2, "1f1b", 3), (2, "interleaved", 1), (1, "zb", 0))):
            loss = make_loss(4, schedule=name, stages_per_rank=NAMED[name], depth=5)
            mesh = fzero.mesh(dp=-1, pp=pp)
            step = fzero.shard(make_step(loss), stage, mesh, split=loss.split)
            like = dict(zip(("params", "opt_state"), step.init(loss.stack(make_params(5), mesh), OPT), strict=True))
            loaded = fzero.load(path / before, like, mesh)
            for part in ("params", "opt_state"):
                assert same_bits(loss.unstack(step.gather(loaded[part]), mesh), dense[part])
            fzero.save(path / str(i), loaded, mesh)
            before = str(i)
            zeros = tree.map(torch.zeros_like, dense)
            assert same_bits(fzero.load(path / before, like=zeros), dense)


@case
def a_rank_reads_and_writes_its_own_blocks(world: fzero.ranks.Mesh) -> None:
    moved = {"read": 0, "written": 0}

    def reading(files: Any, name: str, at: int, views: Any, read: Any = _files.LocalFolder.read_into) -> None:
        moved["read"] += sum(len(v) for v in views)
        read(files, name, at, views)

    def writing(files: Any, name: str, parts: Any, write: Any = _files.LocalFolder.write) -> None:
        def tell() -> Any:
            for part in parts:
                moved["written"] += sum(len(v) for v in part)
                yield part

        write(files, name, tell())

    with folder(world) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files.LocalFolder, "read_into", reading)
        patch.setattr(_files.LocalFolder, "write", writing)
        loss, mesh = make_loss(4), fzero.mesh(dp=-1, pp=2)
        step = fzero.shard(make_step(loss), 3, mesh, split=loss.split)
        params = {"blocks": [{"w": torch.ones(1 << 20)} for _ in range(8)], "table": torch.ones(2)}
        state = step.init(loss.stack(params, mesh), optim.sgd(0.1))
        fzero.save(path, state, mesh)
        fzero.load(path, state, mesh)
        own = step.state_bytes(*state)
        assert own - 8 <= moved["written"] < own + 8192
        assert moved["read"] <= moved["written"] + PAGE_BYTES, "its own file, and a page of another with the table"


@slow
def tools_for_a_step_take_a_pipelined_one(world: fzero.ranks.Mesh) -> None:
    """A non-finite value is named by the block's number; a profile, metrics, and a checkpoint in memory work too."""

    def breaks(p: Any, x: torch.Tensor, index: int) -> torch.Tensor:
        return block(p, x) + (0 * (x - 100).log() if index == 1 else 0)

    mesh, params = mesh_of(world), make_params(5)
    batch = mesh.split(make_batch(8 * dict(mesh.shape)["dp"]), "dp")
    broken = make_loss(4, depth=5, block=breaks)
    step: Any = fzero.shard(make_step(broken), 2, mesh, split=broken.split)
    result = fzero.observe.nonfinite(step)(*step.init(broken.stack(params, mesh), OPT), batch)
    assert result.cause is not None and result.cause.operation == "log" and result.rank == 0  # of the first stage
    params["blocks"][3]["w"][2, 2] = float("nan")
    loss = make_loss(4, depth=5)
    step = fzero.shard(make_step(loss), 3, mesh, split=loss.split)
    result = fzero.observe.nonfinite(fzero.jit(step))(*step.init(loss.stack(params, mesh), OPT), batch)
    assert result.cause is not None and result.cause.leaf == "argument 0, leaf 'blocks.3.w'" and result.rank == 1

    params = make_params(5)
    jitted = fzero.jit(step, backend="fx")
    for program in either((jitted,), (step, jitted)):
        state = step.init(loss.stack(params, mesh), OPT)
        profile = fzero.profile(program, *state, batch)
        assert profile.seconds > 0
        rows: list[Any] = []
        with folder(world) as path, fzero.observe.log(rows.append, every=2, mesh=mesh) as log:
            runs = fzero.checkpoint.checkpoints(path / "disk", mesh, memory=str(path))
            for i in range(4):
                *state, value = program(*state, batch)
                log(i, {"loss": value})
                runs.save_in_memory(i, tuple(state))
            runs.wait()
            torch.distributed.barrier()
            other = make_loss(4, schedule="interleaved", stages_per_rank=2, depth=5)
            to = fzero.shard(make_step(other), 1, mesh, split=other.split)
            like = tuple(to.init(other.stack(params, mesh), OPT))
            restored = fzero.checkpoint.checkpoints(path / "disk", mesh, memory=str(path)).restore(like)
            for one, two in zip(restored, state, strict=True):
                assert same_bits(other.unstack(to.gather(one), mesh), loss.unstack(step.gather(two), mesh))
        assert len(rows) == (2 if mesh.rank == 0 else 0)


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
def efficiency_is_the_formulas(world: fzero.ranks.Mesh) -> None:
    """Of stages that sleep, M / (M + P - 1) for GPipe and 1F1B, within 5%."""
    mesh, seconds, params = fzero.mesh(dp=1, pp=-1), 0.2, make_params(world.size)

    def sleeping(p: Any, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(block(p, x), seconds)  # pyright: ignore[reportReturnType]

    for name in ("gpipe", "1f1b"):
        loss = make_loss(8, schedule=name, block=sleeping)
        step: Any = fzero.shard(make_step(loss), 1, mesh, split=loss.split)
        state = step.init(loss.stack(params, mesh), OPT)
        *state, _ = step(*state, make_batch(8))
        torch.distributed.barrier()
        begin = time.perf_counter()
        *state, _ = step(*state, make_batch(8))
        torch.distributed.barrier()
        efficiency = 8 * 3 * seconds / (time.perf_counter() - begin)
        expected = loss.schedule(mesh).timing().efficiency
        assert abs(efficiency / expected - 1) < 0.05, (name, efficiency, expected)
        assert abs(expected - 8 / (8 + world.size - 1)) < 1e-9


def dies(world: fzero.ranks.Mesh) -> None:
    """Raise on the last rank in the midst of a schedule: the others must not wait for it."""
    mesh = fzero.mesh(dp=1, pp=-1, timeout=60)

    def stops(p: Any, x: torch.Tensor, index: int, batch: Any) -> torch.Tensor:
        if index == mesh.size - 1 and batch["tokens"][0] == make_batch(8)["tokens"][6]:
            raise RuntimeError("planted in a stage")
        return block(p, x)

    train_on(mesh, 1, make_loss(8, block=stops), make_params(mesh.size), 8)


if __name__ == "__main__":
    run({**CASES, "dies": dies})
