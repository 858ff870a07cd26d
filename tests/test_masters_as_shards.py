"""`Precision(shard=)`: float32 shards that are the master weights train as bfloat16 shards beside masters do.

Both programs run at each stage, and all their numbers are equal to the last bit.
"""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.testing import assert_trees_close, stages, trees, world_sizes
from tests.helpers import ALL_STAGES, LEAST, cases, examples
from tests.precision_steps import integers, linear_loss, step_of, wide_norm

HALF = [torch.bfloat16, torch.float16]


def policies(half: torch.dtype = torch.bfloat16, **options: Any) -> list[fzero.Precision]:
    """Return the policy with masters in the state, and with masters as shards."""
    return [fzero.Precision(half, **options), fzero.Precision(half, shard=torch.float32, **options)]


def codes_to_float32(step: Any, precision: fzero.Precision, state: Any) -> Any:
    """Return the rounded parameters, the masters and the inner state, on one process."""
    params, opt_state = state
    masters = optim.loss_scale(opt_state).inner.master
    step.gather((params, masters))  # units are in it as a whole, or not at all
    inner = optim.loss_scale(opt_state).inner.inner
    trees_ = (precision.to_param(params), optim.master_params(params, opt_state), inner)
    return [step.gather(x) for x in trees_]


@pytest.mark.slow
@examples(1, 40)
@given(
    params=trees(dtypes=[torch.float32]),
    half=st.sampled_from(HALF),
    rule=st.booleans(),
    stage=stages(),
    n=world_sizes(),
    k=st.integers(1, 4),
    seed=st.integers(0, 99),
    form=st.sampled_from(["eager", "eager", "jit", "lockstep"]),
    gather=st.booleans(),
)
@example({"a": torch.ones(()), "n": [torch.ones(0), torch.ones(7)]}, torch.bfloat16, True, 3, 8, 3, 0, "eager", False)
@example({"a": torch.ones(9, 3), "n": torch.ones(7)}, torch.bfloat16, True, 3, 4, 2, 0, "jit", True)
@example({"a": torch.ones(9, 3), "n": torch.ones(7)}, torch.float16, False, 1, 2, 3, 0, "lockstep", True)
def test_masters_as_shards_train_as_masters_in_the_state(params, half, rule, stage, n, k, seed, form, gather):
    batches = [torch.randint(-2, 3, (n * k,), generator=torch.Generator().manual_seed(i)).float() for i in range(3)]
    mesh = fzero.mesh(dp=n, simulate="lockstep" if form == "lockstep" else True)
    results = []
    for precision in policies(half, full=wide_norm if rule else None):
        opt = optim.static_loss_scale(optim.master_weights(optim.adamw(1e-2), precision), 16.0)
        loss = linear_loss if gather else lambda p, x: linear_loss(fzero.gather(p), x)
        options: Any = {"reduce": "sum", "micro_batches": k, "precision": precision, "gather": gather}
        step = fzero.shard(step_of(opt, loss, scaled=True, **options), stage=stage, mesh=mesh)
        state = step.init(integers(params, seed), opt)
        run = fzero.jit(step, backend="fx", **LEAST) if form == "jit" else step
        losses = []
        for batch in batches:
            *state, loss_value = run(*state, mesh.split(batch))
            losses.append(loss_value)
        results.append((codes_to_float32(step, precision, state), losses))
    assert_trees_close(results[1], results[0], rtol=0.0)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", cases((4,), (1, 2, 8)))
def test_stage_3_holds_12_bytes_an_element(stage, n):
    """Adam's 8 and a master's 4, between steps. Other stages hold what they held."""
    psi, bytes_of = 64 * 5, []
    for precision in policies():
        opt = optim.master_weights(optim.scale_by_adam(), precision)
        step = fzero.shard(step_of(opt, precision=precision), stage=stage, mesh=fzero.mesh(simulate=True, dp=n))
        state = step.init({"blocks": [{"w": torch.ones(8, 8)} for _ in range(4)], "head": torch.ones(64)}, opt)
        bytes_of.append(step.state_bytes(*state) - 8)  # Adam's counter
    assert bytes_of == ([14 * psi // n, 12 * psi // n] if stage == 3 else [bytes_of[0]] * 2)


@pytest.mark.parametrize("k", cases((2,), (1, 4)))
def test_masters_as_shards_are_gathered_in_half_precision(k):
    (_, precision), mesh = policies(full=wide_norm), fzero.mesh(dp=2)
    opt = optim.master_weights(optim.sgd(0.5), precision)
    step = fzero.shard(step_of(opt, precision=precision, micro_batches=k), stage=3, mesh=mesh)
    state, batch = step.init({"w": torch.ones(6), "n": torch.ones(2)}, opt), mesh.split(torch.ones(2 * k))
    with fzero.collectives.record() as log:
        step(*state, batch)
    gathered = {(e.unit, e.dtype) for e in log.unit_events if e.kind == "all_gather"}
    assert gathered == {("w", torch.bfloat16), ("n", torch.float32)}
    plan = fzero.plan(fzero.jit(step, backend="fx"), *state, batch)
    widths = {(c.unit, c.bytes // c.elements) for c in plan.collectives if c.kind == "all_gather"}
    assert widths == {("w", 2), ("n", 4)}


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 1}])
@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_split_leaves_with_masters_as_shards_train_as_with_masters_in_the_state(stage, axes):
    results = []
    for precision in policies(full=wide_norm):
        mesh, opt = fzero.mesh(**axes), optim.master_weights(optim.sgd(2.0**-5), precision)
        loss = lambda p, x: fzero.collectives.psum_invariant(linear_loss(p, x), "tp")  # noqa: E731
        train_step = step_of(opt, loss, precision=precision, reduce="sum")
        step = fzero.shard(train_step, stage, mesh, "dp", split=lambda path, leaf: {"tp": -1})
        state = step.init(integers({"w": torch.ones(3, 4), "n": torch.ones(2)}, 1), opt)
        for _ in range(2):
            *state, loss_value = step(*state, mesh.split(torch.ones(4), "dp"))
        results.append((step.gather(optim.master_params(*state)), loss_value))
    assert_trees_close(results[1], results[0], rtol=0.0)


@pytest.mark.parametrize("to_shards", [True, False])
def test_a_checkpoint_of_either_kind_of_masters_resumes_as_the_other(tmp_path, to_shards):
    kinds = policies(full=wide_norm)
    first, second = kinds if to_shards else kinds[::-1]
    mesh, results = fzero.mesh(dp=4), {}
    for precision in (first, second):
        opt = optim.static_loss_scale(optim.master_weights(optim.adamw(1e-2), precision), 4.0)
        step = fzero.shard(step_of(opt, scaled=True, reduce="sum", precision=precision), stage=3, mesh=mesh)
        state = step.init(integers({"w": torch.ones(5, 3), "n": torch.ones(3)}, 0), opt)
        if precision is first:
            *state, _ = step(*state, mesh.split(torch.ones(4)))
            fzero.save(tmp_path / "c", tuple(state), mesh).wait()
            loaded = fzero.load(tmp_path / "c", step.init({"w": torch.ones(5, 3), "n": torch.ones(3)}, opt), mesh)
        else:
            with pytest.raises(fzero.errors.CheckpointError, match=r"is of another tree.*master\.w"):
                fzero.load(tmp_path / "c", state, mesh)
            *state, _ = step(*state, mesh.split(torch.ones(4)))
            converted = optim.convert_masters(*loaded, precision)
            assert_trees_close(converted, tuple(state), rtol=0.0)
            state = converted
        *state, _ = step(*state, mesh.split(torch.full((4,), 2.0)))
        results[precision is first] = codes_to_float32(step, precision, state)
    assert_trees_close(results[True], results[False], rtol=0.0)


def test_forward_programs_get_the_parameters_that_were_trained():
    third = {"w": torch.full((4,), 1 / 3)}
    for precision in policies():
        step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
        params, _ = step.init(third, optim.master_weights(optim.sgd(0.1), precision))
        batch = step.mesh.split(torch.ones(2, 4, dtype=torch.bfloat16))
        outputs = fzero.predict(step, lambda p, x: x * p["w"], precision=precision)(params, batch)
        assert torch.equal(outputs, torch.full((2, 4), 1 / 3, dtype=torch.bfloat16))
        by_block = fzero.predict(step, lambda p, x: x * fzero.gather(p["w"]), gather=False, precision=precision)
        assert torch.equal(by_block(params, batch), outputs)
        sums, _ = fzero.evaluate(step, lambda p, x: (x * p["w"]).sum(1), precision=precision)(params, batch, 2)
        assert sums.item() == pytest.approx(8 * outputs[0, 0].item())


def test_an_export_of_masters_as_shards_has_all_bits():
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    params, _ = step.init({"w": torch.full((4,), 1 / 3)}, optim.master_weights(optim.sgd(0.1), policies()[1]))
    assert torch.equal(step.gather(params)["w"], torch.full((4,), 1 / 3))


def test_a_state_with_the_other_kind_of_masters_is_refused():
    full, shards = policies()
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    states = [step.init({"w": torch.ones(4)}, optim.master_weights(optim.sgd(0.1), p)) for p in (full, shards)]
    for (params, _), (_, opt_state), has in [(*states, "no"), (*states[::-1], ", too,")]:
        update = optim.master_weights(optim.sgd(0.1), shards).update
        grads = step.partition({"w": torch.ones(4)})
        with pytest.raises(ValueError, match=rf"leaf 'w' is .*{has}.*another precision\.shard"):
            step.mesh.spmd(lambda g, s, p, update=update: update(g, s, p)[0])(grads, opt_state, params)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda p: fzero.Precision(torch.bfloat16, shard=torch.float64), "shard=torch.float64: expected"),
        (lambda p: optim.offload(optim.master_weights(optim.sgd(0.1), p), 0.5), "offload: .*shard=torch.float32"),
        (lambda p: optim.stochastic_rounding(optim.sgd(0.1), p, fzero.random.key(0)), "stochastic_rounding: .*shard="),
    ],
)
def test_combinations_that_masters_as_shards_cannot_serve_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(policies()[1])
