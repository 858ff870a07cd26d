"""A pipelined loss trains as the model without a pipeline does: by ticks, by tables, at every stage of ZeRO."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.parallel.schedules import NAMES
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases, either, examples
from tests.parallel.pipeline.model import (
    WIDTH,
    block,
    first,
    last,
    make_batch,
    make_loss,
    make_params,
    make_step,
    train_by_small_gradients,
    train_on,
    train_plainly,
)
from tests.parallel.schedules.named import NAMED
from tests.parallel.schedules.strategies import schedules

SIMULATED = ("vmap", "lockstep")


def one_unit(path: str, leaf: Any) -> str:
    return "all"


simulations = st.sampled_from(["vmap", "lockstep"])


def close(actual: Any, expected: Any) -> None:
    assert_trees_close(actual, expected, 1e-9)


@examples(3, 30)
@given(st.sampled_from(sorted(NAMED)), st.integers(1, 2), st.integers(1, 4), st.integers(0, 3), simulations, st.data())
def test_a_pipeline_trains_as_the_model_without_one(name, dp, pp, stage, simulate, data):
    micro_batches = data.draw(st.integers(1, 4)) * (pp if name == "interleaved" else 1)
    stages, uneven = NAMED[name], data.draw(st.integers(0, 2))
    depth = pp * stages + uneven
    options = {"schedule": name, "stages_per_rank": stages, "depth": depth, "remat": data.draw(st.booleans())}
    loss, size = make_loss(micro_batches, **options), 2 * dp * micro_batches
    params = make_params(depth, tied=data.draw(st.booleans()))
    mesh = fzero.mesh(dp=dp, pp=pp, simulate=simulate)
    gather = data.draw(st.booleans())  # whole parameters, or boxes that each action gathers
    close(train_on(mesh, stage, loss, params, size, gather=gather), train_plainly(loss, params, size))


@examples(3, 40)
@given(schedules(), st.integers(0, 3), st.integers(0, 3))
def test_a_pipeline_of_any_schedule_table_trains_as_unsharded(schedule, extra, stage):
    depth = schedule.stages + extra
    loss = make_loss(schedule.micro_batches, schedule=schedule, depth=depth)
    params, size = make_params(depth), schedule.micro_batches
    mesh = fzero.mesh(pp=schedule.ranks, simulate="lockstep")
    close(train_on(mesh, stage, loss, params, size, steps=1), train_plainly(loss, params, size, steps=1))


@pytest.mark.slow
def test_a_simulated_pipeline_places_stages_as_its_schedule():
    for name, stages in NAMED.items():
        loss = make_loss(4, schedule=name, stages_per_rank=stages, depth=9)
        params = make_params(9)
        close(train_on(fzero.mesh(pp=4), 1, loss, params, 8), train_plainly(loss, params, 8))


def test_a_pipelined_loss_without_a_mesh_is_the_models_loss():
    loss, params, batch = make_loss(2), make_params(3), make_batch(8)
    x = first(params, batch)
    for p in params["blocks"]:
        x = block(p, x)
    total, weight = last(params, x, batch)
    close(loss(params, batch), (total, weight))


@pytest.mark.slow
def test_the_depth_of_a_pipeline_may_be_given_by_stage():
    params = make_params(6)
    for depth in ((1, 2, 3), (3, 0, 3), (0, 0, 6)):
        loss = make_loss(3, depth=depth)
        expected = train_plainly(loss, params, 6)
        for simulate in either(("lockstep",), SIMULATED):
            close(train_on(fzero.mesh(pp=3, simulate=simulate), 2, loss, params, 6), expected)


def test_a_pipelined_mean_needs_no_weight():
    def mean(rest: Any, x: torch.Tensor, batch: Any) -> torch.Tensor:
        return (x @ rest["table"].T).square().mean()

    loss, params = make_loss(2, last=mean), make_params(4)
    whole = mean(params, _through(params, make_batch(8)), make_batch(8))
    expected = train_plainly(loss, params, 8)
    close(expected[1][0], whole)
    for simulate in ("vmap", "lockstep"):
        close(train_on(fzero.mesh(dp=2, pp=2, simulate=simulate), 3, loss, params, 8), expected)


def _through(params: Any, batch: Any) -> torch.Tensor:
    x = first(params, batch)
    for p in params["blocks"]:
        x = block(p, x)
    return x


@pytest.mark.slow
def test_blocks_may_hand_on_a_tree_and_are_handed_their_number_and_the_batch():
    """A mixture's blocks do so: they add to a loss of their own along the way."""

    def begin(rest: Any, batch: Any) -> Any:
        return {"x": first(rest, batch), "loss": torch.zeros((), dtype=torch.float64)}

    def count_index(p: Any, stream: Any, *, index: Any, batch: Any) -> Any:
        x = block(p, stream["x"]) + (index + 1) * batch["weights"][:, None]
        return {"x": x, "loss": stream["loss"] + x.square().sum() * (index + 1)}

    def end(rest: Any, stream: Any, batch: Any) -> Any:
        total, weight = last(rest, stream["x"], batch)
        return total + stream["loss"], weight

    params = make_params(5)
    few = [("1f1b", "vmap"), ("zb", "lockstep")]
    for name, simulate in either(few, [*itertools.product(("1f1b", "zb"), SIMULATED)]):
        loss = make_loss(4, first=begin, block=count_index, last=end, depth=5, schedule=name)
        mesh = fzero.mesh(dp=2, pp=2, simulate=simulate)
        close(train_on(mesh, 3, loss, params, 8), train_plainly(loss, params, 8))


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_parameters_may_be_tuples_and_hold_nothing(simulate):
    params = make_params(4)
    params = {**params, "bias": None, "blocks": tuple([(p["w"], None, p["b"]) for p in params["blocks"]])}
    loss = make_loss(2, block=lambda p, x: x + torch.tanh(x @ p[0] + p[2]))
    result = train_on(fzero.mesh(pp=2, simulate=simulate), 3, loss, params, 4)
    close(result, train_plainly(loss, params, 4))


def dropping(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("simulate,remat", cases([("lockstep", True)], itertools.product(SIMULATED, (False, True))))
def test_masks_drawn_by_a_key_are_those_without_a_pipeline(simulate, remat):
    key, params = fzero.random.key(3), make_params(4)
    loss = make_loss(4, block=dropping, remat=remat)
    result = train_on(fzero.mesh(dp=1, pp=4, simulate=simulate), 2, loss, params, 8, key)
    close(result, train_plainly(loss, params, 8, key))
    assert not torch.allclose(result[1][0], train_plainly(loss, params, 8, fzero.random.key(4))[1][0])
    on_dp = fzero.mesh(dp=2, simulate=simulate)  # ranks along dp draw differently, those along pp alike
    close(
        train_on(fzero.mesh(dp=2, pp=2, simulate=simulate), 2, loss, params, 8, key),
        train_on(on_dp, 2, loss, params, 8, key),
    )


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_each_block_and_each_micro_batch_draws_its_own_mask(simulate):
    def drops(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) * p["b"].exp().mean() ** 0

    def total(rest: Any, x: torch.Tensor, batch: Any) -> Any:
        return (x != 0).to(x.dtype).sum() * rest["scale"] ** 0, batch["weights"].sum()

    params, key = make_params(4), fzero.random.key(0)
    batch = {name: x.repeat(2) for name, x in make_batch(64).items()}  # two equal micro-batches

    def count_left(micro_batches: int, batch: Any) -> float:
        loss = make_loss(micro_batches, block=drops, last=total, depth=4)
        mesh = fzero.mesh(pp=2, simulate=simulate)
        step = fzero.shard(lambda p, s, b: (p, s), 0, mesh, split=loss.split)
        stacked, _ = step.init(loss.stack(params, mesh), optim.sgd(0.1))
        return step.program(lambda p, b: fzero.collectives.psum(loss(p, b, key)[0]))(stacked, batch).item()

    both, one = count_left(2, batch), count_left(1, make_batch(64))
    assert both != 2 * one
    assert 0.02 < both / (128 * WIDTH) < 0.12  # one in sixteen is left by four masks


def test_the_first_function_and_the_first_block_draw_different_masks():
    def ones(rest: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.ones(1024, dtype=torch.float64), 0.5) * rest["scale"] ** 0

    def drops(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    loss = make_loss(1, first=ones, block=drops, last=lambda rest, x, batch: (x != 0).double().mean())
    left, _ = loss(make_params(1), make_batch(4), fzero.random.key(0))
    assert 0.15 < left < 0.35


@pytest.mark.slow
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_accumulation_around_a_pipeline_draws_masks_as_more_micro_batches_do(simulate):
    key, params = fzero.random.key(3), make_params(4)
    expected = train_plainly(make_loss(4, block=dropping), params, 8, key)
    mesh = fzero.mesh(dp=1, pp=2, simulate=simulate)
    around = {"micro_batches": 2, "batch_argnums": 1}
    close(train_on(mesh, 2, make_loss(2, block=dropping), params, 8, key, **around), expected)


def test_a_factor_of_a_pipelined_loss_scales_its_gradients():
    loss, params, batch = make_loss(4), make_params(4), make_batch(8)
    mesh = fzero.mesh(pp=2, simulate="lockstep")
    step = fzero.shard(lambda p, s, b: (p, s), 0, mesh, split=loss.split)
    stacked, _ = step.init(loss.stack(params, mesh), optim.sgd(0.1))

    def triple(params: Any, batch: Any) -> Any:
        total, weight = loss(params, batch)
        return 3 * total, weight

    _, grads = step.program(fzero.value_and_grad(triple, reduce="weighted"))(stacked, batch)
    _, expected = fzero.value_and_grad(loss, reduce="weighted")(params, batch)
    close(loss.unstack(step.gather(grads), mesh), fzero.tree.map(lambda g: 3 * g, expected))


@pytest.mark.slow
def test_half_precision_with_masters_trains_as_without_a_pipeline():
    policy = fzero.Precision(param=torch.bfloat16)
    opt = optim.master_weights(optim.adamw(1e-2), policy)
    loss = make_loss(4)

    def run(mesh: Any, stage: int) -> Any:
        params = make_params(4, torch.float32)
        options = {"precision": policy}
        axes = ("dp", "pp") if mesh else None
        if mesh is None:
            mesh = fzero.mesh(dp=2)
            axes = ("dp",)
        step = fzero.shard(make_step(loss, opt, **options), stage, mesh, axis=axes, split=loss.split)
        state = step.init(loss.stack(params, mesh), opt)
        for i in range(3):
            *state, value = step(*state, mesh.split(make_batch(16, i), "dp"))
        return value, loss.unstack(step.gather(state[0]), mesh)

    expected = run(None, 1)
    for stage, simulate in either(((3, "lockstep"),), [*itertools.product((1, 3), SIMULATED)]):
        actual = run(fzero.mesh(dp=2, pp=2, simulate=simulate), stage)
        assert_trees_close(actual, expected, 3e-2)


@pytest.mark.slow
def test_a_loss_scale_keeps_small_gradients_in_float16():
    """A table makes its gradients before the loss is differentiated: it begins with the scale all the same."""
    expected = train_by_small_gradients(fzero.mesh(dp=1), 2.0**15)
    for simulate in ("vmap", "lockstep"):
        actual = train_by_small_gradients(fzero.mesh(dp=1, pp=2, simulate=simulate), 2.0**15)
        assert_trees_close(actual, expected, 1e-3)
    with pytest.raises(AssertionError):  # without it they vanish
        assert_trees_close(train_by_small_gradients(fzero.mesh(dp=1), 1.0), expected, 0.5)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_unused_values_in_bubbles_add_no_nan(simulate, remat):
    """In a bubble, an idle place, and on other ranks than the last, parts run on values that they were not made for."""

    def root(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x - p["low"]).sqrt() + p["b"].square() / 100 + 4  # from 1.5 to 4.7, 5.1 and 4.4

    def begin(rest: Any, batch: Any) -> torch.Tensor:
        return rest["table"][batch["tokens"]].tanh() / 4 + 1.5

    def end(rest: Any, x: torch.Tensor, batch: Any) -> Any:
        return (4.7 - x).sqrt().sum() * rest["scale"], batch["weights"].sum()

    params = make_params(3)
    for i, p in enumerate(params["blocks"]):
        p["low"] = torch.full((), [1.0, 3.5, 4.95][i], dtype=torch.float64)
    loss = make_loss(2, first=begin, block=root, last=end, depth=(1, 2), remat=remat)
    expected = train_plainly(loss, params, 4)
    assert expected[1][-1].isfinite()
    close(train_on(fzero.mesh(pp=2, simulate=simulate), 1, loss, params, 4), expected)


def test_totals_and_weights_of_half_precision_are_added_up_in_float32():
    """257 tokens are 256 in bfloat16."""

    def count_rows(rest: Any, x: torch.Tensor, batch: Any) -> Any:
        return x.sum() * 0 + 1.0, torch.tensor(257)

    loss, params, batch = make_loss(4, last=count_rows), make_params(4, torch.bfloat16), make_batch(8)
    expected = torch.tensor(4.0), torch.tensor(1028.0)
    close(loss(params, batch), expected)
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(pp=2, simulate=simulate)
        step = fzero.shard(lambda p, s, b: (p, s), 0, mesh, split=loss.split)
        sharded, _ = step.init(loss.stack(params, mesh), optim.sgd(0.1))
        close(step.program(lambda p, b: fzero.collectives.psum(loss(p, b)))(sharded, batch), expected)


@pytest.mark.parametrize(
    "simulate,units", cases([("vmap", None), ("lockstep", one_unit)], itertools.product(SIMULATED, (None, one_unit)))
)
def test_idle_places_of_a_pipeline_count_in_no_norm(simulate, units):
    """Weight decay moves what lies there, and a clip behind it sees a norm of the whole tree."""
    opt = optim.chain(optim.adamw(0.1, weight_decay=0.5), optim.clip_by_global_norm(0.05))
    loss, params = make_loss(2, depth=5), make_params(5)
    expected = train_plainly(loss, params, 8, opt=opt)
    mesh = fzero.mesh(dp=2, pp=2, simulate=simulate)
    for stage in either((0 if units else 3,), (0, 3)):
        step: Any = fzero.shard(make_step(loss, opt), stage, mesh, split=loss.split, units=units)
        state = step.init(loss.stack(params, mesh), opt)
        for i in range(2):
            *state, value = step(*state, mesh.split(make_batch(8, i), "dp"))
        close((loss.unstack(step.gather(state[0]), mesh), value), (expected[0], expected[1][-1]))
        norm = step.program(optim.global_norm)(state[0])
        close(norm, optim.global_norm(expected[0]))


def test_a_pipelined_loss_has_derivatives_of_higher_order():
    loss, params, batch = make_loss(2), make_params(4), make_batch(4)
    mesh = fzero.mesh(pp=2, simulate="lockstep")
    stacked = loss.stack(params, mesh)

    def penalty(params: Any, whole: Any) -> torch.Tensor:
        def total(p: Any) -> torch.Tensor:
            return fzero.collectives.psum(loss(p, batch)[0], "pp") if whole else loss(p, batch)[0]

        grads = torch.func.grad(total)(params)
        return sum((g**2).sum() for g in fzero.tree.tensors(grads["table"]))

    def program(table: torch.Tensor) -> Any:
        mine = fzero.axes.axis_index("pp").item()
        own = {**stacked, "blocks": fzero.tree.map(lambda w: w[mine : mine + 1], stacked["blocks"])}

        def total_of(table: torch.Tensor) -> torch.Tensor:
            def total(t: torch.Tensor) -> torch.Tensor:
                return loss({**own, "table": t}, batch)[0]

            return fzero.collectives.psum(torch.func.grad(total)(table), "pp").square().sum()

        return fzero.collectives.psum(torch.func.grad(total_of)(table), "pp") / fzero.axes.axis_size("pp")

    def dense(table: torch.Tensor) -> torch.Tensor:
        grad = torch.func.grad(lambda t: loss({**params, "table": t}, batch)[0])(table)
        return grad.square().sum()

    close(mesh.spmd(program)(params["table"]), torch.func.grad(dense)(params["table"]))


def test_a_loss_that_is_not_differentiated_runs_forward_only():
    loss, params = make_loss(4), make_params(4)
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(dp=2, pp=2, simulate=simulate)

        def evaluate(params: Any, batch: Any) -> Any:
            return fzero.collectives.psum(loss(fzero.gather(params), batch), ("dp", "pp"))

        step = fzero.shard(evaluate, 3, mesh, axis=("dp", "pp"), split=loss.split)
        sharded, _ = step.init(loss.stack(params, mesh), optim.sgd(0.1))
        with fzero.collectives.record() as log:
            result = step.program(evaluate)(sharded, mesh.split(make_batch(16), "dp"))
        close(result, loss(params, make_batch(16)))
        if simulate == "lockstep":
            assert [e.elements for e in log.events if e.kind == "send"] == [2 * WIDTH] * 8  # 4 micro-batches, forward


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step_whatever_the_micro_batches():
    """Along the axes of data, at every stage of ZeRO; and by each action where parameters are gathered there."""
    params = make_params(4)
    for stage in either((1, 3), ALL_STAGES):
        counts = []
        for micro_batches in either((2, 4), (2, 8)):
            loss = make_loss(micro_batches)
            mesh = fzero.mesh(dp=2, pp=2, simulate="lockstep")
            with fzero.collectives.record() as log:
                train_on(mesh, stage, loss, params, 32, steps=1)
            counts.append(sorted((e.kind, e.axis, e.elements) for e in log.unit_events))
        assert counts[0] == counts[1] and counts[0]


@pytest.mark.slow
def test_residuals_are_freed_as_the_schedule_says(monkeypatch):
    """The most backward passes that a rank holds is what the schedule says is in flight."""
    from fzero.parallel.pipeline._rank_executor import RankExecutor

    for name, stages in NAMED.items():
        loss, most = make_loss(8, schedule=name, stages_per_rank=stages), {}
        forward = RankExecutor._run_forward

        def count_calls(self: Any, *args: Any, forward: Any = forward, most: Any = most) -> Any:
            result = forward(self, *args)
            rank = self.stages.axis.rank
            most[rank] = max(most.get(rank, 0), len(self.vjp_fns))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(RankExecutor, "_run_forward", count_calls)
            mesh = fzero.mesh(pp=4, simulate="lockstep")
            train_on(mesh, 0, loss, make_params(8), 8, steps=1)
        schedule = loss.schedule(4)
        halves = NAMES[name].splits_backward  # eagerly the first half lets go of all
        for rank, result in most.items():
            assert result <= schedule.in_flight(rank) if halves else result == schedule.in_flight(rank)


@pytest.mark.parametrize("simulate", cases(["vmap"], SIMULATED))
def test_optimizers_see_each_block_of_a_pipeline_by_itself(simulate):
    """Its norms, its matrices and vectors: a stacked leaf stands for as many leaves as there are ranks."""

    def matrices(params: Any) -> Any:
        return fzero.tree.map(lambda p: p.ndim >= 2, params)

    few = [
        (3, optim.adamw(1e-2, weight_decay=0.5, mask=matrices)),  # which would decay stacked vectors
        (2, optim.lamb(1e-2)),
        (3, optim.chain(optim.clip_by_block_rms(1e-3), optim.sgd(0.1))),
        (0, optim.masked(optim.sgd(0.1), lambda params: fzero.tree.map(lambda p: p.ndim == 1, params))),
        (1, optim.muon(0.1, fallback=optim.sgd(0.1), ns_dtype=None)),
    ]
    more = [
        (0, optim.sgd(0.1, momentum=0.9)),
        (1, optim.lion(1e-2)),
        (3, optim.muon(0.1, fallback=optim.sgd(0.1), ns_dtype=None)),
    ]
    for stage, opt in either(few[::2], few + more):
        loss, params = make_loss(2, depth=5), make_params(5)
        result = train_on(fzero.mesh(dp=2, pp=2, simulate=simulate), stage, loss, params, 8, opt=opt)
        close(result, train_plainly(loss, params, 8, opt=opt))
