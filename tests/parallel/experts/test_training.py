"""The law of laws: training with experts on any mesh, at any stage, is dense training of the same batch."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.parallel import experts as moe
from fzero.testing import assert_equivalent, assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases, either, examples, train_step_for
from tests.parallel.experts.model import OPT, batch_of, loss_for, params_of

SPLIT = moe.split_rule("experts")
MESHES = st.sampled_from(
    [
        fzero.mesh(dp=2),
        fzero.mesh(ep=2),
        fzero.mesh(ep=4),
        fzero.mesh(dp=2, ep=2),
        fzero.mesh(ep=2, dp=2),
        fzero.mesh(ep=2, simulate="lockstep"),
        fzero.mesh(dp=2, ep=2, simulate="lockstep"),
    ]
)
CAPACITIES = st.sampled_from([None, 0.25, 0.5, 1.0, 1.25])
BATCHES = [batch_of(seed=i) for i in range(2)]


def check(
    loss_fn: Any, mesh: fzero.ranks.Mesh, stages: Any = (0, 1, 2, 3), k: int = 1, count: int = 4, **options: Any
) -> None:
    train_step = train_step_for(loss_fn, OPT, micro_batches=k)
    options = {"split": SPLIT, **options}
    assert_equivalent(train_step, params_of(count), OPT, BATCHES, stages, meshes=[mesh], **options)


@examples(3, 24)
@given(MESHES, st.integers(0, 3), CAPACITIES, st.integers(1, 4), st.integers(1, 2), st.booleans(), st.booleans())
def test_training_experts_on_any_mesh_equals_dense_training(mesh, stage, capacity, k, micro, sigmoid, remat):
    """It has drops, both losses, a global clip, micro-batches and remat: to 1e-12."""
    over = "sequence" if micro > 1 else "batch"
    more = {"score": "sigmoid", "scale": 2.0, "groups": (2, 2)} if sigmoid else {}
    check(loss_for(k, capacity, over, remat=remat, **more), mesh, (stage,), micro)


@pytest.mark.slow
@examples(3, 4)
@given(st.sampled_from([fzero.mesh(ep=2), fzero.mesh(dp=2, ep=2)]), st.sampled_from([None, 1.0]))
def test_experts_may_outnumber_the_tokens(mesh, capacity):
    check(loss_for(3, capacity), mesh, (1, 3), count=16)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 0.25])
def test_starved_experts_train_on_their_own_ranks(capacity):
    """All tokens go to one rank's expert; the other ranks' experts have none, and with little room most are dropped."""
    bias = torch.tensor([0.0, 0, 9, 0]).double()
    loss = loss_for(1, capacity, score="sigmoid", normalize=False, bias=bias)
    check(loss, fzero.mesh(ep=4, simulate="lockstep"), either((3,), (0, 3)))


def test_a_rank_whose_tokens_are_all_dropped_trains():
    """Its sequences take no position, forward and backward."""

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x, layer = batch["x"] @ params["inp"], params["layer"]
        routing = moe.route(x @ layer["router"], 2)
        experts = torch.where(batch["y"][:, :1, :1] > 50, 4, routing.experts)
        y = moe.layer(lambda p, r, linear: linear(r, p["up"]), layer["experts"], x, routing._replace(experts=experts))
        return (y.sum(-1, keepdim=True) * params["head"].sum() - batch["y"]).square().mean()

    batch = batch_of()
    batch["y"] = batch["y"] + 100 * (torch.arange(8) < 4)[:, None, None]  # those of the first of two ranks
    for mesh in (fzero.mesh(ep=2), fzero.mesh(ep=2, simulate="lockstep")):
        train_step = train_step_for(loss_fn, OPT)
        assert_equivalent(train_step, params_of(), OPT, [batch], (0, 3), meshes=[mesh], split=SPLIT)


@pytest.mark.slow
def test_a_layer_of_tensor_parallel_experts_trains_like_the_unsharded_one():
    """dp x ep x tp: the experts are split over ep, and their hidden units over tp."""

    def tensor_parallel(p: Any, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
        tp = ("tp",) if "tp" in fzero.axes.axis_names() else ()
        h = torch.tanh(linear(fzero.collectives.pvary(rows, tp), p["up"], p["bias"]))
        return fzero.collectives.psum_invariant(linear(h, p["down"]), tp)

    def call(_: Any, *args: Any, **options: Any) -> torch.Tensor:
        return moe.layer(tensor_parallel, *args, **options)

    def split(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        dims_by_axis = SPLIT(path, leaf)
        dims = {"up": 2, "bias": 1, "down": 1}
        return dims_by_axis and {**dims_by_axis, "tp": dims[path.split(".")[-1]]}

    for capacity, stages in ((None, either((3,), (0, 3))), (0.5, (2,))):
        mesh = fzero.mesh(dp=2, ep=2, tp=2)
        check(loss_for(2, capacity, call=call), mesh, stages, axis=("dp", "ep"), split=split)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_experts_in_half_precision_train_as_dense_up_to_rounding(capacity):
    """Routers in float32; bfloat16 differs by its rounding alone."""
    precision = fzero.Precision(torch.bfloat16, reduce=torch.float32, full=lambda path, leaf: "router" in path)
    opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.05)), precision)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = torch.tanh(batch["x"] @ params["inp"])
        layer = params["layer"]
        routing = moe.route(batch["x"].float() @ layer["router"], 2)  # of the inputs: no choice flips by rounding
        y = moe.layer(lambda p, r, linear: linear(r, p["up"][..., :6]), layer["experts"], x, routing, capacity=capacity)
        return ((x + y) @ params["head"] - batch["y"]).float().square().mean() + 0.1 * moe.balance_loss(routing)

    train_step = train_step_for(loss_fn, opt, precision=precision)
    params = tree.map(torch.Tensor.float, params_of())
    batches = [tree.map(torch.Tensor.bfloat16, batch) for batch in BATCHES]
    meshes = [fzero.mesh(dp=2, ep=2)]
    assert_equivalent(train_step, params, opt, batches, either((3,), (0, 3)), meshes=meshes, split=SPLIT, rtol=0.02)


def make_jittered(loss_fn: Any) -> Any:
    key = fzero.random.key(3)
    return lambda params, batch: loss_fn(params, {**batch, "x": moe.jitter(batch["x"], key, 0.1)})


@pytest.mark.slow
def test_router_jitter_does_not_depend_on_the_mesh():
    for mesh in (fzero.mesh(dp=2, ep=2), fzero.mesh(ep=2, simulate="lockstep")):
        check(make_jittered(loss_for(2, 0.5)), mesh, (0, 3))


# Losses and micro-batches.


def test_the_loss_of_sequences_does_not_mind_micro_batches_and_that_of_the_batch_does():
    params, batch = params_of(), BATCHES[0]
    for over, alike in (("sequence", True), ("batch", False)):
        one, four = (fzero.value_and_grad(loss_for(2, 1.0, over), micro_batches=k)(params, batch) for k in (1, 4))
        assert torch.allclose(one[0], four[0], rtol=1e-12) == alike


def test_a_loss_of_the_ranks_own_tokens_is_another_loss():
    """Why the batch's is a mean over ranks first."""

    def own(params: Any, batch: Any) -> torch.Tensor:
        return moe.balance_loss(moe.route(batch["x"] @ params["layer"]["router"], 2), axis=())

    with pytest.raises(AssertionError):
        check(own, fzero.mesh(ep=2), (0,))


def test_gathered_experts_are_the_dense_model():
    mesh = fzero.mesh(dp=2, ep=2)
    loss_fn = loss_for(2, 0.5)
    step = fzero.shard(train_step_for(loss_fn, OPT), stage=3, mesh=mesh, split=SPLIT)
    state = step.init(params_of(), OPT)
    for batch in BATCHES:
        dense = loss_fn(step.gather(state[0]), batch)
        *state, loss = step(*state, mesh.split(batch))
        torch.testing.assert_close(loss, dense, rtol=1e-12, atol=0)


# Jit and plan.


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_a_jitted_step_is_the_eager_one_and_its_plan_counts_what_travels(capacity):
    mesh = fzero.mesh(dp=2, ep=2)
    step = fzero.shard(train_step_for(loss_for(2, capacity), OPT), stage=3, mesh=mesh, split=SPLIT)
    batch = mesh.split(BATCHES[0])
    one = step(*step.init(params_of(), OPT), batch)
    other = fzero.jit(step, backend="fx", **LEAST)(*step.init(params_of(), OPT), batch)
    assert_trees_close([step.gather(x) for x in other], [step.gather(x) for x in one])
    plan = fzero.plan(step, *step.init(params_of(), OPT), batch, world_size={"dp": 8})
    byte_counts = [c.bytes for c in plan.collectives if c.kind == "all_to_all"]
    s, t, k, d, count = 2, 5, 2, 6, 4
    # rows forth and back, and their gradients; a rank sends its positions, or what it could choose; counts once
    rows = count * 2 * s if capacity else 2 * s * t * k
    assert sorted(byte_counts) == [*([] if capacity else [count * 8]), *[rows * d * 8] * 4]


NO_AXIS = ({"ep": 2}, {"dp": 1, "ep": 4}, {"dp": 3})


@pytest.mark.slow
@pytest.mark.parametrize("axes,stage", cases([(NO_AXIS[1], 3)], itertools.product(NO_AXIS, ALL_STAGES)), ids=str)
def test_a_jitted_step_runs_where_experts_are_sharded_over_no_axis(axes, stage):
    mesh = fzero.mesh(**axes)
    step = fzero.shard(train_step_for(loss_for(2, 1.0), OPT), stage=stage, mesh=mesh, split=SPLIT)
    batch = mesh.split(batch_of(12))
    one = step(*step.init(params_of(), OPT), batch)
    other = fzero.jit(step, backend="fx", **LEAST)(*step.init(params_of(), OPT), batch)
    assert_trees_close([step.gather(x) for x in other], [step.gather(x) for x in one])


@pytest.mark.slow
def test_a_jitted_loop_with_remat_and_jitter_trains_as_the_eager_one():
    mesh = fzero.mesh(dp=2, ep=2)
    train_step = train_step_for(make_jittered(loss_for(2, None, "sequence", remat=True)), OPT, micro_batches=4)
    step, batch = fzero.shard(train_step, stage=2, mesh=mesh, split=SPLIT), mesh.split(batch_of(16))
    one = step(*step.init(params_of(), OPT), batch)
    other = fzero.jit(step, backend="fx", **LEAST)(*step.init(params_of(), OPT), batch)
    assert_trees_close([step.gather(x) for x in other], [step.gather(x) for x in one], 1e-11)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_nonfinite_finds_a_nan_that_routing_drops(capacity):
    """A router with a nan: `fzero.observe.nonfinite` names the argument."""
    params = params_of()
    params["layer"]["router"][0, 0] = torch.nan
    mesh = fzero.mesh(ep=2)
    step = fzero.shard(train_step_for(loss_for(2, capacity), OPT), stage=0, mesh=mesh, split=SPLIT)
    result = fzero.observe.nonfinite(step)(*step.init(params, OPT), mesh.split(BATCHES[0]))
    assert "router" in str(result)


@pytest.mark.slow
@settings(max_examples=60)
@given(MESHES, CAPACITIES, st.integers(1, 4), st.sampled_from(["batch", "sequence"]), st.booleans())
def test_experts_train_on_any_mesh_at_all_stages(mesh, capacity, k, over, remat):
    check(loss_for(k, capacity, over, remat=remat), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_inductor_trains_experts_as_an_eager_step_does(capacity):
    mesh = fzero.mesh(dp=2, ep=2)
    step = fzero.shard(train_step_for(loss_for(2, capacity), OPT), stage=3, mesh=mesh, split=SPLIT)
    batch = mesh.split(BATCHES[0])
    one = step(*step.init(params_of(), OPT), batch)
    other = fzero.jit(step, backend="inductor")(*step.init(params_of(), OPT), batch)
    assert_trees_close([step.gather(x) for x in other], [step.gather(x) for x in one], 1e-11)
