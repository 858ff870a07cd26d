"""Plans of pipelines: of each rank, what is in flight, and what is said once a step."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero.graph.ir import is_gather, is_wait, wait_start
from fzero.graph.ir._ops import is_random
from fzero.graph.loop._loop_memory import pipeline_seconds
from fzero.graph.loop._rank_schedule import LoopRegion, action_regions
from fzero.graph.loop._split import Residual, split
from tests.helpers import cases, either, examples
from tests.parallel.pipeline.model import OPT, block, make_batch, make_loss, make_params, make_step
from tests.parallel.schedules.named import NAMED


def make_plan(
    name: str, micro_batches: int, rank: Any = 0, stage: int = 1, ranks: int = 4, dp: int = 2, **options: Any
) -> Any:
    depth = 2 * ranks
    own = {key: options.pop(key) for key in ("block", "remat") if key in options}
    jit = {"backend": "fx", **options.pop("jit", {})}
    loss = make_loss(micro_batches, schedule=name, stages_per_rank=NAMED[name], **own)
    mesh = fzero.mesh(dp=dp, pp=ranks)
    step = fzero.shard(make_step(loss, **options), stage, mesh, axis=("dp", "pp"), split=loss.split)
    state = step.init(loss.stack(make_params(depth), mesh), OPT)
    batch = mesh.split(make_batch(16 * micro_batches * dp), "dp")
    return fzero.plan(fzero.jit(step, **jit), *state, batch, rank={"pp": rank} if isinstance(rank, int) else rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", cases([0], [3]))
def test_1f1b_holds_as_much_for_any_number_of_micro_batches_and_gpipe_more_for_each(rank):
    flat = [make_plan("1f1b", m, rank).added_bytes for m in (4, 8, 32)]
    assert flat[0] == flat[1] == flat[2]
    rising = [make_plan("gpipe", m, rank).added_bytes for m in (8, 16, 24)]
    assert rising[2] - rising[1] == rising[1] - rising[0] > 8 * 16 * 2 * 5 * 8  # residuals of 2 blocks, 8 micro-batches


def test_peaks_fall_along_1f1b_as_the_forward_passes_in_flight_do():
    loss = make_loss(8)
    flights = [loss.schedule(4).in_flight(r) for r in range(4)]
    assert flights == [4, 3, 2, 1]
    peaks = [make_plan("1f1b", 8, r).added_bytes for r in range(3)]  # the last has the loss
    assert max(peaks[:2]) > peaks[2]  # the first is sent nothing, and the second holds what it is sent


@pytest.mark.slow
@examples(2, 12)
@given(st.sampled_from(sorted(NAMED)), st.integers(0, 3), st.integers(0, 3))
def test_the_collectives_of_a_pipeline_do_not_grow_with_the_micro_batches(name, stage, rank):
    counts = []
    for micro_batches in (4, 12):
        plan = make_plan(name, micro_batches, rank, stage)
        counts.append([(c.kind, c.bytes, c.times, c.axis) for c in plan.collectives])
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_all_ranks_start_the_same_collectives_in_one_order():
    for stage in either((3,), (0, 3)):
        said = {tuple((c.kind, c.bytes, c.unit) for c in make_plan("zbv", 4, r, stage).collectives) for r in range(4)}
        assert len(said) == 1


@pytest.mark.slow
def test_a_collective_that_nothing_reads_is_left_out():
    """The last stage of a module calls its embedding, whose result nothing reads; its wait fell between two regions."""

    def wasteful(p, x):
        fzero.collectives.psum(x, "dp")
        return block(p, x)

    for rank in (0, 1):
        plain = make_plan("1f1b", 4, rank, ranks=2)
        own = make_plan("1f1b", 4, rank, ranks=2, block=wasteful)
        assert [(c.kind, c.bytes) for c in own.collectives] == [(c.kind, c.bytes) for c in plain.collectives]


@pytest.mark.slow
def test_the_cost_model_counts_the_bubbles_of_a_pipeline():
    """A region takes a second: four micro-batches on two ranks take five times three, less a second.

    The last rank sends the gradient of an activation before it computes that of the weights.
    """
    seconds = pipeline_seconds(loops_of("gpipe", 1), lambda graph: 1.0, lambda size, axis: 0.0)
    assert seconds == pytest.approx(3 * (4 + 2 - 1) - 1)
    slow = pipeline_seconds(loops_of("gpipe", 1), lambda graph: 1.0, lambda size, axis: 0.5)
    assert slow == pytest.approx(14 + 2 * 0.5)  # there and back
    assert make_plan("1f1b", 16, 1).seconds > make_plan("1f1b", 4, 1).seconds


def test_a_plan_of_a_pipeline_is_of_the_given_rank():
    mesh = fzero.mesh(dp=2, pp=2)
    peaks = {r: make_plan("1f1b", 4, r, ranks=2).added_bytes for r in (0, 1)}
    for rank, place in either(((3, 1),), ((0, 0), (1, 1), (2, 0), (3, 1))):  # ranks of dp=2, pp=2
        assert make_plan("1f1b", 4, {"dp": rank // 2, "pp": place}, ranks=2).added_bytes == peaks[place]
    step = fzero.shard(lambda p, s, b: (p, s), 1, mesh)
    params, state = step.init({"w": torch.ones(4)}, OPT)
    for rank in (4, -1, {"pp": 2}, {"tp": 0}):
        with pytest.raises(ValueError, match="expected a rank of dp=2, pp=2, or coordinates along these axes"):
            fzero.plan(step, params, state, None, rank=rank)
    with pytest.raises(ValueError, match=r"rank=1: .*has no mesh"):
        fzero.plan(lambda x: x, torch.ones(2), rank=1)


@pytest.mark.slow
def test_a_plan_of_more_ranks_along_the_data_has_the_same_stages():
    loss, mesh = make_loss(4), fzero.mesh(dp=1, pp=2)
    step = fzero.shard(make_step(loss), 2, mesh, axis=("dp", "pp"), split=loss.split)
    state = step.init(loss.stack(make_params(4), mesh), OPT)
    plans = [fzero.plan(step, *state, mesh.split(make_batch(8), "dp"), world_size={"dp": n}) for n in (1, 64)]
    assert plans[1].argument_bytes < plans[0].argument_bytes
    assert any(o.target == "a pipeline of 4 iterations" for o in plans[0].operations)


def loops_of(name: str, rank: int, **options: Any) -> Any:
    """The loop of a rank's traced step, as it is scheduled."""
    from fzero.graph import _entry
    from fzero.graph.loop._loop import node_loop

    results = []
    before = _entry.make_plan
    try:
        _entry.make_plan = lambda graph, *args: (results.append(graph), before(graph, *args))[1]  # pyright: ignore
        make_plan(name, 4, rank, **{"ranks": 2, "dp": 1, **options})
    finally:
        _entry.make_plan = before
    return next(loop for n in results[0].nodes if (loop := node_loop(n)))


@pytest.mark.parametrize("name,rank", [("1f1b", 0), ("1f1b", 1), ("zbv", 0)])
def test_regions_of_a_pipeline_share_no_storage_that_they_write(name, rank):
    loop = loops_of(name, rank)
    parts = split(loop)
    stages = [s for s, r in enumerate(loop.rank_schedule.schedule.rank_of_stage) if r == rank]
    wanted = [LoopRegion(kind, s) for s in stages for kind in ("FIW" if s else "FW")]
    assert [part.region for part in parts] == wanted
    held: set[Any] = set()
    for part in parts:
        part.graph.lint()
        assert {x for x in part.inputs if isinstance(x, Residual)} <= held
        held |= {x for x in part.outputs if isinstance(x, Residual)}
        assert len(part.inputs) == sum(n.op == "placeholder" for n in part.graph.nodes)
    # each sum is written once an iteration
    writes = [n.args[0].name for part in parts for n in part.graph.nodes if "copy_" in str(n.target)]
    assert len(writes) == len(set(writes)) > 0


def test_a_region_precedes_another_where_every_schedule_runs_it_first():
    said = []
    for name, stages in NAMED.items():
        for row in fzero.parallel.schedules.schedule(name, 2, 6, stages).rows:
            done = [(region, action.micro_batch) for action in row for region in action_regions(action)]
            for (one, m), (other, n) in itertools.combinations(done, 2):
                assert m != n or not other.precedes(one), (name, one, other)
                said += [(one, other)] if m == n and one.precedes(other) else []
    regions = [LoopRegion(kind, stage) for kind in "FIW" for stage in (1, 3)]
    results = {(a.kind, a.stage - b.stage, b.kind) for a in regions for b in regions if (a, b) in said}
    forward = {("F", -2, "F")} | {("F", apart, kind) for apart in (-2, 0, 2) for kind in "IW"}
    assert results == forward | {("I", 2, "I"), ("I", 0, "W"), ("I", 2, "W")}


AHEAD = st.fixed_dictionaries(
    {"prefetch": st.integers(0, 3), "in_flight": st.integers(0, 2), "max_reuse_bytes": st.sampled_from((0, 1 << 30))}
)


@examples(1, 40)
@given(st.sampled_from(("1f1b", "interleaved", "zbv")), st.integers(0, 1), st.integers(1, 3), st.booleans(), AHEAD)
@example("interleaved", 1, 1, False, {"prefetch": 1, "in_flight": 0, "max_reuse_bytes": 0})
def test_each_pass_of_a_stage_gathers_its_parameters_and_frees_them(name, rank, stage, remat, jit):
    """The next of its micro-batch comes later, and may be of another stage: no gather starts ahead for it."""
    loop = loops_of(name, rank, stage=stage, dp=2, gather=False, remat=remat, jit=jit)
    parts = split(loop)
    gathered = {part.region: sum(map(is_gather, part.graph.nodes)) for part in parts}
    assert all(gathered[LoopRegion("F", s)] for s in loop.rank_schedule.stages)
    assert sum(gathered.values()) == sum(map(is_gather, loop.body.nodes))
    names = {n.name for n in loop.body.nodes if is_gather(n) or (is_wait(n) and is_gather(wait_start(n)))}
    assert not names & {x.name for part in parts for x in part.outputs if isinstance(x, Residual)}


@pytest.mark.parametrize("name,jit", [("1f1b", {"memory_budget": 1e12}), ("zb", {})])
def test_a_stage_sends_back_before_its_weights_gradients_if_memory_allows_or_the_schedule_says_so(name, jit):
    """The stage before can thus go on: no product of the first half belongs to a weight."""
    loop = loops_of(name, 1, jit=jit)
    products = {part.region.kind: [n for n in part.graph.nodes if "mm" in str(n.target)] for part in split(loop)}
    assert len(products["I"]) == 3 and len(products["W"]) == 3  # of two blocks and the head
    assert loop.sends_early


@pytest.mark.slow
def test_a_stage_under_remat_recomputes_one_block_at_a_time():
    """Gradients of weights that waited for those of all activations would hold every block that remat computes."""
    wide = {"ranks": 2, "remat": True, "block": wide_block}
    lean, fast = [make_plan("1f1b", 8, 1, jit=jit, **wide) for jit in ({}, {"memory_budget": 1e12})]
    assert "send_early" not in lean.settings and fast.settings["send_early"] is True
    assert lean.peak_bytes < 0.8 * fast.peak_bytes and lean.seconds > fast.seconds
    again = make_plan("1f1b", 8, 1, jit={"memory_budget": lean.peak_bytes}, **wide)
    assert again.peak_bytes <= lean.peak_bytes and "send_early" not in again.settings


def wide_block(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Sixty-four values for each value that a block returns, all of which its weight's gradient reads."""
    wide = torch.tanh(x.repeat(1, 64).unflatten(1, (64, -1)) @ p["w"])
    return x + torch.tanh(wide @ p["w"]).mean(1)


def held(parts: Any) -> list[torch.Tensor]:
    """Return the values that wait for the backward pass, of each micro-batch in flight."""
    from fzero.graph.ir import graph_results, node_stand_ins

    made = [(what, n) for part in parts for what, n in zip(part.outputs, graph_results(part.graph), strict=True)]
    return [node_stand_ins(n)[0] for what, n in made if isinstance(what, Residual)]


def test_a_backward_pass_recomputes_constant_masks_and_keeps_random_ones():
    def add_masked(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.where(torch.ones(5, 5, dtype=torch.bool).tril()[2], x @ p["w"], 0.0)

    def add_dropout(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(x @ p["w"], 0.5)

    def noisy(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.bernoulli(torch.full((5,), 0.5, dtype=x.dtype)) * (x @ p["w"])

    parts = split(loops_of("1f1b", 0, block=add_masked))
    assert not [x for x in held(parts) if x.dtype == torch.bool]
    for random_block in (add_dropout, noisy):
        parts = split(loops_of("1f1b", 0, block=random_block))
        draws = {part.region.kind: sum(is_random(n) for n in part.graph.nodes) for part in parts}
        assert draws == {"F": 2, "W": 0}  # of two blocks
