"""Plans: true to the allocator, monotone in the stage, made for worlds that are not there."""

import functools
import itertools
import json
import math
import sys
import warnings
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero._format import format_bytes
from fzero.parallel.experts import split_rule
from fzero.testing import assert_trees_close
from tests.graph.helpers import assert_peak_is_the_allocators, entry_of, plan_of
from tests.helpers import ALL_STAGES, LEAST, cases, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.parallel.experts.model import OPT, batch_of, loss_for, params_of
from tests.tiny_gpt import gpt_loss, gpt_params
from tests.zero.helpers import ARRANGEMENTS, parallel_loss, parallel_params

ADAMW = optim.adamw(1e-3)
MODELS = {"A": (256, 4, 4), "B": (512, 8, 1)}  # width, layers, sequences of 128
BOTH = ["A", pytest.param("B", marks=pytest.mark.slow)]


def shape_at(x: torch.Tensor, width: int) -> list[int]:
    """The shape of a parameter of a GPT of width 1, at another width."""
    return [n if n in (256, 128) else n * width for n in x.shape]


@functools.cache
def entry(model: str, stage: int, k: int, world_size: int, backend: str) -> Any:
    """One rank's trace of a GPT's step, from meta tensors."""
    width, layers, batch = MODELS[model]
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=k), stage=stage, mesh=mesh)
    params = tree.map(lambda x: torch.empty(shape_at(x, width), device="meta"), gpt_params(1, layers, 256, 128))
    state = step.init(params, ADAMW)
    tokens = mesh.split(torch.zeros(2 * batch, 129, dtype=torch.long, device="meta"))
    return entry_of(step, *state, tokens, world_size=world_size, backend=backend)


@functools.cache
def make_plan(
    model: str, stage: int, k: int = 1, world_size: int = 2, backend: str = "fx", **options: Any
) -> fzero.graph.Plan:
    """One rank's plan of a GPT's step."""
    return plan_of(entry(model, stage, k, world_size, backend), **options)


BACKENDS = ("fx", "inductor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "k,backend",
    [(2, "fx"), *[pytest.param(k, b, marks=pytest.mark.slow) for k in (1, 4) for b in BACKENDS]],
)
def test_memory_never_grows_with_the_stage(k, backend):
    peaks = [make_plan("A", stage, k, backend=backend).peak_bytes for stage in ALL_STAGES]
    assert peaks == sorted(peaks, reverse=True), peaks
    assert peaks[3] < peaks[2] and peaks[1] < peaks[0]
    assert (peaks[2] < peaks[1]) == (k > 1)


@pytest.mark.slow
def test_memory_of_a_larger_model_never_grows_with_the_stage():
    peaks = [make_plan("B", stage).peak_bytes for stage in ALL_STAGES]
    assert peaks == sorted(peaks, reverse=True), peaks


@pytest.mark.slow
def test_stage_3_adds_little_to_its_arguments():
    """No more than the prototype, whose floor is a block's weights and gradients and the saved activations."""
    assert make_plan("B", 3).added_bytes <= 62e6


def unit_bytes(plan: fzero.graph.Plan) -> int:
    return max(c.bytes for c in plan.collectives)


@pytest.mark.parametrize("stage", cases((3,), (1, 2)))
@pytest.mark.parametrize("model", BOTH)
def test_no_more_than_one_units_gradients_are_alive(model, stage):
    """Whole gradients: of shards there may be more, when a clip waits for all."""
    plan = make_plan(model, stage)
    whole = [
        r for r in plan.ranges if r.kind == "gradients" and not any(r.start == c.position for c in plan.collectives)
    ]
    live = [sum(r.bytes for r in whole if r.start <= i <= r.stop) for i in range(len(plan.operations))]
    one = unit_bytes(plan)
    assert max(live) <= 1.01 * one, (max(live), one)
    assert max(live) > 0.5 * one  # it is they that are counted


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
@pytest.mark.parametrize("model", BOTH)
def test_stage_3_holds_the_prefetched_and_the_current_units(model, prefetch):
    plan = make_plan(model, 3, prefetch=prefetch, bucket_bytes=0, max_reuse_bytes=0)
    gathered = max(plan.live_of("gathered"))
    assert gathered <= (prefetch + 1) * unit_bytes(plan)
    assert gathered > prefetch * unit_bytes(plan)
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    once = make_plan(model, 3, bucket_bytes=0, max_reuse_bytes=math.inf)
    assert len(gathers) > len([c for c in once.collectives if c.kind == "all_gather"])


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_the_plans_peak_is_the_allocators(stage):
    """A simulated world has no collectives to wait for, so every byte is seen."""
    opt = optim.adamw(1e-3)
    step = fzero.jit(
        fzero.shard(train_step_for(gpt_loss, opt), stage=stage, mesh=fzero.mesh(dp=2)), backend="fx", **LEAST
    )
    state = list(step.init(gpt_params(width=64, layers=2), opt))
    tokens = step.mesh.split(torch.randint(37, (8, 17)))
    assert_peak_is_the_allocators(step, state, tokens, 0.02)


@pytest.mark.parametrize("model", BOTH)
def test_a_budget_buys_speed_and_a_small_one_warns(model):
    sparing = make_plan(model, 3)
    generous = make_plan(model, 3, memory_budget=10**10)
    assert generous.seconds < sparing.seconds and generous.peak_bytes > sparing.peak_bytes
    between = make_plan(model, 3, memory_budget=(sparing.peak_bytes + generous.peak_bytes) // 2)
    assert between.peak_bytes <= (sparing.peak_bytes + generous.peak_bytes) // 2
    assert generous.seconds <= between.seconds <= sparing.seconds
    with pytest.warns(UserWarning, match=r"needs [\d,]+ bytes at its peak .* [\d,]+ more than memory_budget=1,000"):
        small = make_plan(model, 3, memory_budget=1000)
    assert small.peak_bytes <= sparing.peak_bytes  # the least that there is


@pytest.mark.slow
@pytest.mark.parametrize("model", BOTH)
def test_where_there_is_room_a_gather_starts_ahead(model):
    ahead, plain = make_plan(model, 3), make_plan(model, 3, prefetch=0)
    assert ahead.settings["prefetch"] == "fitting" and "prefetch fitting" in ahead.details()
    assert ahead.peak_bytes == plain.peak_bytes and ahead.seconds < plain.seconds
    asked = make_plan(model, 3, prefetch="fitting")
    assert (asked.settings, asked.seconds) == (ahead.settings, ahead.seconds)
    assert all(settings["prefetch"] == "fitting" for settings, *_ in asked.rejected)
    everywhere = make_plan(model, 3, prefetch=1)
    budget = make_plan(model, 3, prefetch="fitting", memory_budget=2 * everywhere.peak_bytes)
    assert budget.seconds == min(seconds for _, _, seconds in [("", 0, budget.seconds), *budget.rejected])
    assert budget.seconds <= everywhere.seconds


def test_a_plan_obeys_the_schedule_options():
    plan = make_plan("A", 3, prefetch=1, in_flight=2, bucket_bytes=10**6, max_reuse_bytes=10**9, recompute=False)
    assert plan.settings == {
        "recompute": False,
        "max_reuse_bytes": 10**9,
        "bucket_bytes": 10**6,
        "prefetch": 1,
        "in_flight": 2,
    }
    assert plan.rejected == ()
    assert any(" + " in c.unit for c in plan.collectives)


@pytest.mark.slow
def test_collectives_are_those_that_the_recorder_counts():
    """Without re-gathers and buckets: what the eager step sends, in elements and by unit."""
    for stage in ALL_STAGES:
        mesh = fzero.mesh(dp=4)
        step = fzero.shard(train_step_for(mlp_loss, ADAMW), stage=stage, mesh=mesh)
        args = (*step.init(mlp_params(), ADAMW), mesh.split(mlp_batch(8)))
        with fzero.collectives.record() as log:
            step(*args)
        plan = fzero.plan(fzero.jit(step, backend="fx", **{**LEAST, "max_reuse_bytes": math.inf}), *args)
        eager = sorted((e.kind, e.unit or "(metric)", e.elements, e.bytes) for e in log.events)
        assert sorted((c.kind, c.unit, c.elements, c.bytes) for c in plan.collectives) == eager


@pytest.mark.slow
def test_a_plan_for_more_ranks_than_the_mesh_has():
    few, many = make_plan("A", 3), make_plan("A", 3, world_size=1024)
    assert many.argument_bytes < few.argument_bytes / 100
    assert [c.kind for c in many.collectives] == [c.kind for c in few.collectives]
    assert abs(many.added_bytes / few.added_bytes - 1) < 0.3
    assert not torch.distributed.is_initialized()


def test_an_unsharded_step_is_planned_with_meta_arguments():
    step = train_step_for(mlp_loss, ADAMW)
    params = tree.map(lambda x: x.to("meta"), mlp_params())
    plan = fzero.plan(step, params, ADAMW.init(params), tree.map(lambda x: x.to("meta"), mlp_batch(4)))
    assert plan.collectives == () and plan.flops > 0
    with pytest.raises(ValueError, match="world_size=8: jit\\(train_step\\) has no mesh"):
        fzero.plan(step, params, ADAMW.init(params), mlp_batch(4), world_size=8)
    for n in (0, True, 2.5):
        with pytest.raises(ValueError, match=f"world_size={n}: expected a number of ranks"):
            make_plan("A", 3, world_size=n)


def test_a_rank_program_is_planned_in_another_world():
    mesh = fzero.mesh(dp=2)
    program = mesh.spmd(lambda x: fzero.collectives.psum(x))
    (collective,) = fzero.plan(program, mesh.split(torch.ones(4)), world_size=512).collectives
    assert (collective.kind, collective.bytes) == ("all_reduce", 16)  # there and back


def test_planning_runs_no_kernel():
    f = fzero.jit(lambda x: x + torch.rand(3), backend="fx")
    x, state = torch.ones(3), torch.get_rng_state()
    f.plan(x)
    assert torch.equal(torch.get_rng_state(), state) and f.traces == 1
    f(x)
    assert f.traces == 1  # the call uses the plan's trace


def test_a_plan_reads_plots_and_goes_through_json(tmp_path):
    plan = make_plan("A", 3)
    for expected in ("train_step: peak", "all_gather", "blocks.3", "argument 0, unit 'blocks.0'", "tiny_gpt.py:"):
        assert expected in plan.details()
    assert max(map(len, plan.details().splitlines())) < 140
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's own
        plan.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    fields = json.loads(plan.to_json())
    assert fields["peak_bytes"] == plan.peak_bytes == max(fields["live"])
    assert len(fields["operations"]) == len(plan.operations) and fields["collectives"][0]["kind"] == "all_gather"
    assert plan.peak_bytes == sum(r.bytes for r in plan.alive(plan.peak_at))
    kinds = {r.kind for r in plan.ranges}
    assert kinds == {"parameters", "optimizer state", "inputs", "gathered", "activations", "gradients", "buffers"}
    assert [sum(xs) for xs in zip(*[plan.live_of(k) for k in kinds], strict=True)] == plan.live


def test_a_plan_says_the_answer_first_and_folds_blocks():
    plan = make_plan("A", 3)
    lines = str(plan).splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) < 140
    assert (
        lines[0]
        == f"train_step: peak {format_bytes(plan.peak_bytes)} = 19.9 MB of arguments + {format_bytes(plan.added_bytes)}"
    )
    assert lines[1].startswith("alive at the peak, in the backward pass (aten.mm.default, ")
    kinds = {line.split("B  ")[1].split(",")[0]: line.split("B  ")[0].strip() for line in lines[2:9]}
    alive = {kind: sum(r.bytes for r in plan.alive(plan.peak_at) if r.kind == kind) for kind in kinds}
    assert kinds == {kind: format_bytes(count)[:-1] for kind, count in alive.items()}
    assert sum(alive.values()) == plan.peak_bytes
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    again = [c for c in gathers if plan.operations[c.position].phase == "backward"]
    assert f"forward  {len(gathers) - len(again):>5} x all_gather" in lines[10] and "blocks.*" in lines[10]
    assert f"backward {len(again):>5} x all_gather" in str(plan) and "1 x all_reduce             8 B  (metric)" in str(
        plan
    )


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches,stage", cases([(2, 3)], itertools.product((1, 2), ALL_STAGES)))
def test_operations_are_of_the_forward_or_the_backward_pass_or_of_the_update(stage, micro_batches):
    """The trace tells them apart: the last product of the loss is forward, and the first of a gradient not."""
    plan = make_plan("A", stage, micro_batches)
    of = [o.phase for o in plan.operations]
    products = [o.phase for o in plan.operations if o.target == "aten.mm.default"]
    assert products[0] == "forward" and products[-1] == "backward"
    assert products.count("backward") == 2 * products.count("forward")
    assert {o.phase for o in plan.operations if o.target.startswith(("aten.sqrt", "aten.addcdiv"))} == {"update"}
    sums = [c for c in plan.collectives if c.kind != "all_gather" and c.unit != "(metric)"]
    reductions = [plan.operations[c.position].phase for c in sums]
    assert set(reductions) <= {"backward"} and of[0] == "forward" and of[-1] == "update"


def test_a_plan_shows_itself_in_a_notebook(monkeypatch):
    plan = make_plan("A", 3)
    page = plan._repr_html_()
    assert page.startswith("<pre>train_step: peak") and "data:image/png;base64," in page
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert "img" not in plan._repr_html_()


def test_trace_and_plan_grow_linearly_with_layers_and_not_with_the_world():
    """Counted in operations; benchmarks/jit_compile.py has the seconds."""

    def operations(layers: int, world_size: int) -> int:
        mesh = fzero.mesh(dp=2)
        step = fzero.shard(train_step_for(gpt_loss, ADAMW), stage=3, mesh=mesh)
        params = tree.map(lambda x: x.to("meta"), gpt_params(layers=layers))
        tokens = mesh.split(torch.zeros(4, 17, dtype=torch.long, device="meta"))
        jitted = fzero.jit(step, backend="fx", **LEAST)
        return len(fzero.plan(jitted, *step.init(params, ADAMW), tokens, world_size=world_size).operations)

    a, b, c = operations(2, 2), operations(3, 2), operations(4, 2)
    assert c - b == b - a > 0
    assert abs(operations(2, 4096) - a) < 30  # padding


def test_a_plan_covers_meshes_of_several_axes_and_of_other_sizes():
    """One rank's plan of a mesh with other sizes."""
    step, args = make_arranged("all three", 3)
    plan = fzero.plan(step, *args)
    kinds = [c.kind for c in plan.collectives]
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"} <= set(kinds)
    as_traced = fzero.jit(step, prefetch=0, bucket_bytes=0, max_reuse_bytes=math.inf)
    plan, larger = (fzero.plan(as_traced, *args, world_size={"dp": n}) for n in (2, 64))
    assert sorted(c.kind for c in larger.collectives) == sorted(c.kind for c in plan.collectives)
    assert larger.argument_bytes < plan.argument_bytes
    message = r"world_size: 'ep' splits dimension 0 of leaf '.*' of size 4, and 4 does not divide by 3"
    with pytest.raises(ValueError, match=message):
        fzero.plan(step, *args, world_size={"ep": 3})
    with pytest.raises(ValueError, match=r"world_size=\{'pp': 2\}: expected a number of ranks, at least 1, of axes of"):
        fzero.plan(step, *args, world_size={"pp": 2})
    with pytest.raises(ValueError, match=r"has several axes; say world_size="):
        fzero.plan(step, *args, world_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_plan_for_another_world_size_equals_that_of_such_a_mesh(stage):
    """The axis may split leaves: each rank has another part of the experts then."""

    def of(ranks: int, asked: Any, **axes: int) -> fzero.graph.Plan:
        mesh = fzero.mesh(**axes)
        step = fzero.shard(train_step_for(loss_for(), OPT), stage=stage, mesh=mesh, split=split_rule("experts"))
        batch = mesh.split(batch_of(2 * ranks))
        return fzero.plan(fzero.jit(step, backend="fx"), *step.init(params_of(), OPT), batch, world_size=asked)

    actual, wanted = of(2, {"dp": 8, "ep": 4}, dp=1, ep=2), of(32, None, dp=8, ep=4)
    assert actual.live == wanted.live and actual.collectives == wanted.collectives


def make_arranged(name: str, stage: int) -> Any:
    axes, options = ARRANGEMENTS[name]
    opt, mesh = optim.adam(1e-2), fzero.mesh(**axes)
    step = fzero.shard(train_step_for(parallel_loss, opt), stage=stage, mesh=mesh, **options)
    batch = {name: torch.zeros(8, 5, dtype=torch.float64) for name in "xy"}
    return step, (*step.init(parallel_params(), opt), mesh.split(batch, step.data_axes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["all three", *[pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "tensor parallel")]]
)
def test_memory_never_grows_with_the_stage_on_several_axes(name):
    peaks = []
    for stage in ALL_STAGES:
        step, args = make_arranged(name, stage)
        peaks.append(fzero.plan(fzero.jit(step, backend="fx"), *args).peak_bytes)
    assert peaks == sorted(peaks, reverse=True), peaks


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["experts over dp, the rest over both"], ["hybrid", "tensor parallel"]))
def test_a_jitted_world_of_several_axes_equals_the_eager_one(name):
    step, args = make_arranged(name, 3)
    expected, got = step(*args), fzero.jit(step, backend="fx", donate=())(*args)
    assert_trees_close(got[2], expected[2], rtol=0)
    assert_trees_close(step.gather(got[0]), step.gather(expected[0]), rtol=0)


def test_a_gpus_plan_tells_the_workspace_of_matrix_products(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    x = torch.zeros(4, 4, device="meta")
    assert fzero.plan(lambda x: x @ x, x).workspace_bytes == 0
    assert fzero.plan(lambda x: x + x, x, hardware="cuda").workspace_bytes == 0
    plan = fzero.plan(lambda x: x @ x, x, hardware="cuda")
    assert plan.workspace_bytes == 32 << 20
    assert "workspace of matrix products" in str(plan)
    assert plan.peak_bytes == fzero.plan(lambda x: x @ x, x).peak_bytes
