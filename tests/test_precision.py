"""Half precision: dtypes and master weights. Each law holds at every stage, as unsharded.

Numbers are small integers and powers of two where bits are compared: then no sum rounds, in whatever order.
"""

import itertools
import shutil
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero._notice import warn_once
from fzero.sharding._boxes import is_box
from fzero.testing import assert_equivalent, assert_trees_close, stages, trees, world_sizes
from tests.helpers import ALL_STAGES, cases, either, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.optim.table import TABLE
from tests.precision_steps import HALF, MICRO_BATCHES, integers, linear_loss, step_of, train, train_unsharded, wide_norm
from tests.tiny_gpt import gpt_block, gpt_loss, gpt_params


@examples(3, 40)
@given(
    params=trees(dtypes=[torch.float32]),
    half=st.sampled_from(HALF),
    rule=st.booleans(),
    stage=stages(),
    n=world_sizes(),
    k=MICRO_BATCHES,
    seed=st.integers(0, 99),
    jit=st.sampled_from([False, False, False, True]),
    gather=st.booleans(),
)
@example({"a": torch.ones(()), "n": [torch.ones(0), torch.ones(7)]}, torch.bfloat16, True, 3, 8, 5, 0, True, False)
def test_a_sharded_step_is_the_unsharded_one_bit_for_bit(params, half, rule, stage, n, k, seed, jit, gather):
    precision = fzero.Precision(half, full=wide_norm if rule else None)
    opt = optim.static_loss_scale(optim.master_weights(optim.sgd(2.0**-9, momentum=0.5), precision), 16.0)
    loss = linear_loss if gather else lambda p, x: linear_loss(fzero.gather(p), x)
    options: Any = {"reduce": "sum", "micro_batches": k, "precision": precision, "gather": gather}
    train_step = step_of(opt, loss, scaled=True, **options)
    params, batches = integers(params, seed), [torch.randint(-2, 3, (n * k,)).float() for _ in range(3)]
    expected = train_unsharded(train_step, opt, params, batches)
    got = train(train_step, opt, params, batches, stage, fzero.mesh(dp=n), jit)
    assert_trees_close(got, expected, rtol=0.0)


@examples(3, 40)
@given(
    reduce=st.sampled_from([torch.float64, torch.float32]),
    stage=stages(),
    n=world_sizes(),
    k=MICRO_BATCHES,
    rule=st.booleans(),
)
def test_training_under_a_precision_policy_equals_unsharded(reduce, stage, n, k, rule):
    """Masters are float32 for half precision and float64 for float32, so that little rounds."""
    precision = fzero.Precision(
        torch.float32, reduce=reduce, grad=torch.float64, master=torch.float64, full=wide_norm if rule else None
    )
    params = mlp_params(torch.float64)
    params["n"] = torch.ones((), dtype=torch.float64)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, eps=1e-3))
    opt = optim.master_weights(optimizer, precision)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return mlp_loss(params, batch) * params["n"].float()

    train_step = step_of(opt, loss, micro_batches=k, precision=precision)
    batches = [mlp_batch(n * k, seed=i, dtype=torch.float32) for i in range(2)]
    assert_equivalent(train_step, params, opt, batches, (stage,), (n,), rtol=2e-5)


WORLDS = ((2, 1), (3, 4), (8, 2))
SOME = [(HALF[0], None, 2, 1), (HALF[1], torch.float32, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "half,reduce,n,k", cases(SOME, [(h, r, *w) for h in HALF for r in (None, torch.float32) for w in WORLDS])
)
def test_half_precision_equals_unsharded_training_roughly(half, reduce, n, k):
    precision = fzero.Precision(half, reduce=reduce or half, full=wide_norm)
    opt = optim.dynamic_loss_scale(
        optim.master_weights(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.05)), precision), 256.0
    )
    train_step = step_of(opt, mlp_loss, scaled=True, micro_batches=k, precision=precision)
    batches = [mlp_batch(2 * n * k, seed=i, dtype=half) for i in range(3)]
    assert_equivalent(train_step, mlp_params(torch.float32), opt, batches, world_sizes=(n,), rtol=0.02)


@pytest.mark.parametrize("stage,k", cases([(3, 2)], itertools.product(ALL_STAGES, (1, 2, 3))))
def test_jit_and_lockstep_are_eager_bit_for_bit(stage, k):
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.adamw(1e-2), precision), 64.0, growth_interval=2)
    train_step = step_of(opt, scaled=True, reduce="sum", micro_batches=k, precision=precision)
    params = integers({"a": torch.ones(5, 3), "n": torch.ones(3), "c": torch.ones(())}, 0)
    batches = [torch.randint(-2, 3, (4 * k,)).float() for _ in range(4)]
    eager = train(train_step, opt, params, batches, stage, fzero.mesh(dp=4))
    jitted = train(train_step, opt, params, batches, stage, fzero.mesh(dp=4), jit=True)
    lockstep = train(train_step, opt, params, batches, stage, fzero.mesh(dp=4, simulate="lockstep"))
    assert_trees_close(jitted, eager, rtol=0.0)
    assert_trees_close(lockstep, eager, rtol=0.0)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
def test_inductor_in_half_precision_trains_as_eager():
    """A GPT in bfloat16 with everything: masters, a loss scale, micro-batches, remat."""
    precision = fzero.Precision(torch.bfloat16)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    opt, block = optim.dynamic_loss_scale(optim.master_weights(optimizer, precision)), fzero.remat(gpt_block)
    train_step = step_of(
        opt,
        lambda p, tokens: gpt_loss(p, tokens, block).float(),
        scaled=True,
        micro_batches=2,
        precision=precision,
    )
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=3, mesh=mesh)
    losses = []
    for run in (step, fzero.jit(step, backend="inductor")):
        state = run.init(gpt_params(), opt)
        for i in range(4):
            tokens = torch.randint(37, (8, 17), generator=torch.Generator().manual_seed(i))
            *state, loss = run(*state, mesh.split(tokens))
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
@pytest.mark.parametrize("k", [2, *[pytest.param(k, marks=pytest.mark.slow) for k in (1, 4)]])
def test_half_precision_halves_the_bytes_on_the_wire(stage, k):
    """Half precision is gathered in half the bytes; sums are in the policy's dtype, and the update's grads too."""
    records: list[Any] = []
    for reduce, grad in [(torch.float32, None), (torch.float16, torch.float32), (torch.float16, None)]:
        precision = fzero.Precision(torch.float16, reduce=reduce, grad=grad, full=wide_norm)
        opt = optim.master_weights(optim.sgd(0.5), precision)

        def train_step(params: Any, opt_state: Any, batch: Any, opt: Any = opt, precision: Any = precision) -> Any:
            loss, grads = fzero.scaled_value_and_grad(linear_loss, 1.0, micro_batches=k, precision=precision)(
                params, batch
            )
            inner = fzero.value_and_grad(linear_loss, micro_batches=k, precision=precision)(params, batch)[1]
            records.append({x.dtype for x in tree.tensors(inner)})
            grads = tree.map(lambda g, d: g.to(d.dtype), grads, inner)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        mesh = fzero.mesh(dp=2)
        step = fzero.shard(train_step, stage=stage, mesh=mesh)
        state = step.init({"w": torch.ones(6), "n": torch.ones(2)}, opt)
        with fzero.collectives.record() as log:
            step(*state, mesh.split(torch.ones(2 * k)))
        for e in log.unit_events:
            gathers = e.kind == "all_gather"
            assert e.dtype == (torch.float32 if e.unit == "n" else torch.float16 if gathers else reduce)
        assert {"reduce_scatter" if stage else "all_reduce"} <= {e.kind for e in log.unit_events}
        assert records.pop() == {torch.float32, grad or reduce}
        # the same on the traced graph: bytes an element
        plan = fzero.plan(fzero.jit(step, backend="fx"), *state, mesh.split(torch.ones(2 * k)))
        widths = {(c.kind, c.unit): c.bytes // c.elements for c in plan.collectives if c.unit in ("w", "n")}
        assert all(
            width == (4 if unit == "n" else 2 if kind == "all_gather" else reduce.itemsize)
            for (kind, unit), width in widths.items()
        )


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("n", cases((1, 8), (2, 4)))
def test_state_bytes_are_the_formulas(half, n):
    """State 14 bytes an element: 14, 2 + 12/N, 2 + 12/N, 14/N; with gradients in half precision ZeRO's table."""
    psi = 64 * 5
    precision = fzero.Precision(half, reduce=half)
    opt = optim.master_weights(optim.scale_by_adam(), precision)  # without a counter: none in float32 either
    params = {"blocks": [{"w": torch.ones(8, 8)} for _ in range(4)], "head": torch.ones(64)}

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        _, grads = fzero.scaled_value_and_grad(linear_loss, 1.0, precision=precision)(params, batch)
        grads = tree.map(lambda g: g.to(half), grads)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, grads

    held = [14 * psi, 2 * psi + 12 * psi // n, 2 * psi + 12 * psi // n, 14 * psi // n]
    formulas = [16 * psi, 2 * psi + 14 * psi // n, 2 * psi + 14 * psi // n, 16 * psi // n]
    for stage in ALL_STAGES:
        mesh = fzero.mesh(simulate=True, dp=n)
        step = fzero.shard(train_step, stage=stage, mesh=mesh)
        state = step.init(params, opt)
        count = 8  # bytes of Adam's counter
        assert step.state_bytes(*state) - count == held[stage]
        *state, grads = step(*state, mesh.split(torch.ones(n)))
        assert step.state_bytes(*state) - count == held[stage]
        assert step.state_bytes(*state, grads) - count == formulas[stage]


def test_leaves_kept_in_full_precision_have_no_second_copy():
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.master_weights(optim.sgd(0.1), precision)
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    params, state = step.init({"w": torch.ones(4), "n": torch.full((3,), 1 / 3)}, opt)
    assert state.master["n"] is None and state.master["w"].data.dtype == torch.float32
    assert params["n"].data.dtype == torch.float32 and params["w"].data.dtype == torch.bfloat16
    whole = step.gather(optim.master_params(params, state))
    assert_trees_close(whole, {"w": torch.ones(4), "n": torch.full((3,), 1 / 3)}, rtol=0.0)


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
@pytest.mark.parametrize("lazy", [False, True])
def test_masters_start_with_all_their_bits(stage, lazy):
    """The parameters are cast after the masters were made, also those that an init function makes leaf by leaf."""
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.master_weights(optim.sgd(0.1), precision)
    make = lambda: {"a": {"w": torch.full((5, 3), 1 / 3), "n": torch.full((3,), 1 / 3)}, "b": torch.full((7,), 1 / 7)}  # noqa: E731
    step = fzero.shard(lambda p, s, x: (p, s), stage=stage, mesh=fzero.mesh(dp=4))
    params, state = step.init(make if lazy else make(), opt)
    assert_trees_close(step.gather(optim.master_params(params, state)), make(), rtol=0.0)
    assert_trees_close(step.gather(params), precision.cast(make()), rtol=0.0)


@settings(max_examples=40)
@given(half=st.sampled_from(HALF), seed=st.integers(0, 999))
def test_parameters_are_the_rounded_masters(half, seed):
    """After any update the sum of a rounded value and a difference of rounded values is the new one."""
    g = torch.Generator().manual_seed(seed)
    precision = fzero.Precision(half)
    opt = optim.master_weights(optim.sgd(1.0), precision)
    params = {"w": torch.randn(500, generator=g)}
    state, params = opt.init(params), precision.cast(params)
    for size in (1e-4, 1e-2, 1.0, 100.0):
        updates, state = opt.update({"w": torch.randn(500, generator=g) * size}, state, params)
        params = optim.apply_updates(params, updates)
        near_zero = state.master["w"].abs() < 1e-3 * size  # there the parameter is within float32's error of it
        assert torch.equal(params["w"][~near_zero], state.master["w"].to(half)[~near_zero])
        torch.testing.assert_close(params["w"].float(), state.master["w"], rtol=2**-8, atol=1e-7 * max(size, 1))


def test_the_optimizer_sees_the_masters():
    """Weight decay and averages are of the masters, not of the rounded parameters."""
    precision, third = fzero.Precision(torch.bfloat16), torch.tensor([1 / 3])
    opt = optim.master_weights(
        optim.chain(optim.add_decayed_weights(0.5), optim.sgd(0.5), optim.params_ema(0.5)), precision
    )
    params = {"w": third}
    state, params = opt.init(params), precision.cast(params)
    _, state = opt.update({"w": torch.zeros(1)}, state, params)
    assert torch.equal(state.master["w"], third + -0.5 * (0.5 * third))


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("name", [*TABLE])
def test_the_state_has_the_dtypes_of_the_unsharded_state(name, stage):
    """An optimizer makes its state from the masters: adafactor's sums took the rounded parameters' dtype."""
    opt = optim.master_weights(TABLE[name].optimizer, fzero.Precision(torch.bfloat16))
    params = {"w": torch.ones(4, 6), "b": torch.ones(6)}
    step = fzero.shard(train_step_for(lambda p, x: p["b"].sum(), opt), stage=stage, mesh=fzero.mesh(dp=2))
    state = step.gather(step.init(params, opt))[1]
    dtypes = tree.map(lambda x: x.dtype, state)
    assert dtypes == tree.map(lambda x: x.dtype, opt.init(params))


def test_a_master_beyond_the_range_of_half_precision_comes_back():
    opt = optim.master_weights(optim.sgd(1.0), fzero.Precision(torch.float16))
    params = {"w": torch.tensor([60000.0])}
    state, params = opt.init(params), {"w": params["w"].half()}
    records = []
    for g in (-10000.0, 20000.0):
        updates, state = opt.update({"w": torch.tensor([g])}, state, params)
        params = optim.apply_updates(params, updates)
        records.append(params["w"].item())
    assert records == [65504.0, torch.tensor(50000.0).half().item()] and state.master["w"].item() == 50000.0


def test_a_tie_has_the_dtype_of_its_first_place():
    precision, w = fzero.Precision(torch.bfloat16, full=wide_norm), torch.ones(4)
    opt = optim.master_weights(optim.sgd(2.0**-3), precision)
    train_step = step_of(opt, precision=precision, reduce="sum")
    for params in ({"n": w, "o": w}, {"o": w, "n": w}):
        expected = train_unsharded(train_step, opt, params, [torch.ones(4)])
        for stage in ALL_STAGES:
            got = train(train_step, opt, params, [torch.ones(4)], stage, fzero.mesh(dp=2))
            assert_trees_close(got, expected, rtol=0.0)


def test_rules_of_split_leaves_see_them_whole():
    precision = fzero.Precision(torch.bfloat16, full=lambda path, leaf: leaf.numel() <= 6)
    opt, mesh = optim.master_weights(optim.sgd(0.1), precision), fzero.mesh(dp=2, tp=2)
    for stage in ALL_STAGES:
        loss = lambda p, x: fzero.collectives.psum_invariant(linear_loss(p, x), "tp")  # noqa: E731
        step = fzero.shard(
            step_of(opt, loss, precision=precision), stage, mesh, "dp", split=lambda path, leaf: {"tp": 1}
        )
        step(*step.init({"w": torch.ones(2, 4)}, opt), mesh.split(torch.ones(4), "dp"))


def test_half_precision_losses_are_summed_in_float32():
    """2048 + 1 is 2048 in float16."""
    w, x = torch.ones(1, dtype=torch.float16), torch.tensor([2048.0, 1.0], dtype=torch.float16)
    precision = fzero.Precision(torch.float16)
    f = lambda w, x: (w * x).sum()  # noqa: E731
    loss, _ = fzero.scaled_value_and_grad(f, 1.0, micro_batches=2, reduce="sum", precision=precision)(w, x)
    assert loss.item() == 2049.0


def test_updates_smaller_than_the_last_bit_add_up():
    precision = fzero.Precision(torch.bfloat16)
    opt = optim.master_weights(optim.sgd(2.0**-12), precision)
    params = {"w": torch.ones(3)}
    state, params = opt.init(params), precision.cast(params)
    for _ in range(32):
        updates, state = opt.update({"w": torch.ones(3)}, state, params)
        params = optim.apply_updates(params, updates)
    assert params["w"].tolist() == [1 - 2.0**-7] * 3


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_ties_stay_tied(stage):
    precision = fzero.Precision(torch.bfloat16)
    opt = optim.master_weights(optim.sgd(2.0**-3), precision)
    w = torch.ones(5)
    step = fzero.shard(step_of(opt, precision=precision, reduce="sum"), stage=stage, mesh=fzero.mesh(dp=2))
    state = step.init({"a": w, "b": w}, opt)
    for _ in range(2):
        *state, _ = step(*state, step.mesh.split(torch.ones(4)))
    whole = step.gather(state[0])
    assert torch.equal(whole["a"], whole["b"]) and not torch.equal(whole["a"].float(), w)


@pytest.mark.slow
def test_split_and_hybrid_units_follow_the_precision_policy():
    """Tensor parallel leaves, and copies along a replica axis: the policy's dtypes on every collective of a unit."""
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.master_weights(optim.sgd(2.0**-9), precision)
    params = integers({"w": torch.ones(4, 6), "n": torch.ones(3), "c": torch.ones(5)}, 0)
    batches = [torch.randint(-2, 3, (8,)).float() for _ in range(3)]
    train_step = step_of(opt, reduce="sum", precision=precision, micro_batches=2)
    expected = train_unsharded(train_step, opt, params, batches)
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(simulate=simulate, replica=2, shard=2)
        for stage in either((1, 3), ALL_STAGES):
            step = fzero.shard(train_step, stage=stage, mesh=mesh, over="shard")
            state = step.init(params, opt)
            with fzero.collectives.record() as log:
                for batch in batches:
                    *state, _ = step(*state, mesh.split(batch))
            assert_trees_close(step.gather(tuple(state)), expected, rtol=0.0)
            assert all(
                (e.dtype == torch.bfloat16) == (e.kind == "all_gather" and e.unit != "n") for e in log.unit_events
            )


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_micro_batches_are_summed_in_the_gradients_dtype(stage):
    """256 + 1 is 256 in bfloat16."""
    precision, mesh = fzero.Precision(torch.bfloat16), fzero.mesh(dp=2)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        grad = fzero.value_and_grad(lambda p, x: p["w"].float().sum() * x.sum(), **options)
        return params, opt_state, grad(params, batch)[1]

    options: Any = {"reduce": "sum", "micro_batches": 2, "precision": precision}
    x, params = torch.tensor([256.0, 1.0, 0.0, 0.0]), {"w": torch.ones(3)}
    step = fzero.shard(train_step, stage, mesh)
    state = step.init(params, optim.master_weights(optim.sgd(0.1), precision))
    assert step.gather(step(*state, mesh.split(x))[2])["w"].tolist() == [257.0] * 3
    assert train_step(precision.cast(params), (), x[:2])[2]["w"].tolist() == [257.0] * 3


def test_the_error_of_a_precision_policy_names_its_wrong_argument():
    with pytest.raises(ValueError, match="master weights in half precision lose every update"):
        fzero.Precision(torch.bfloat16, master=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"param=torch\.float64 is wider than master=torch\.float32: give master=torch.float64"
    ):
        fzero.Precision(torch.float64)
    with pytest.raises(TypeError, match=r"param=torch\.int8: expected a floating-point dtype"):
        fzero.Precision(torch.int8)
    with pytest.raises(TypeError, match="reduce='float32'"):
        fzero.Precision(torch.bfloat16, reduce="float32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"growth_factor=0\.5"):
        optim.dynamic_loss_scale(optim.sgd(0.1), growth_factor=0.5)
    for bad in (0.0, -1.0, float("nan"), torch.ones(2)):
        with pytest.raises(ValueError, match="expected a positive number, or a 0-d tensor"):
            fzero.scaled_value_and_grad(torch.sum, bad)
    with pytest.raises(TypeError, match=r"scale is a LossScaleState, .*pass its scale, opt_state\.scale"):
        fzero.scaled_value_and_grad(torch.sum, optim.dynamic_loss_scale(optim.sgd(0.1)).init({}))
    with pytest.raises(TypeError, match=r"scale is a str, expected a positive number, or a 0-d tensor$"):
        fzero.scaled_value_and_grad(torch.sum, "dynamic")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"precision=torch\.bfloat16: expected a policy"):
        fzero.value_and_grad(torch.sum, precision=torch.bfloat16)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"precision=torch\.bfloat16: expected a policy"):
        optim.master_weights(optim.sgd(0.1), torch.bfloat16)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="names 'a' twice"):
        fzero.data.batch_plan(micro_batch=1, accumulation=1, mesh=fzero.mesh(a=2, b=2), axis=("a", "a"))
    with pytest.raises(ValueError, match="initial=0"):
        optim.static_loss_scale(optim.sgd(0.1), 0)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_forgotten_precision_option_is_refused(stage):
    """A policy that silently did nothing is the classic bug: each place says so, and where."""
    precision = fzero.Precision(torch.bfloat16)
    opt, mesh = optim.master_weights(optim.sgd(0.1), precision), fzero.mesh(dp=2)
    params = {"w": torch.ones(4)}
    plain = fzero.shard(step_of(optim.sgd(0.1), precision=precision), stage=stage, mesh=mesh)
    with pytest.raises(TypeError, match=r"argument 0: leaf 'w' is torch\.float32, and precision= says torch\.bfloat16"):
        plain(*plain.init(params, optim.sgd(0.1)), mesh.split(torch.ones(2)))
    without = fzero.shard(step_of(opt), stage=stage, mesh=mesh)
    with pytest.raises(
        TypeError, match=r"master_weights: grads leaf 'w' is torch\.bfloat16, .*float32; take them with"
    ):
        without(*without.init(params, opt), mesh.split(torch.ones(2)))
    uncast = opt.init(params)
    with pytest.raises(TypeError, match=r"master_weights: params leaf 'w' is torch\.float32"):
        opt.update({"w": torch.ones(4)}, uncast, params)
    with pytest.raises(ValueError, match="needs the parameters"):
        opt.update({"w": torch.ones(4)}, uncast)


def test_gradients_have_the_dtype_of_the_policy():
    """It may be wider than the masters, also for leaves kept in full; a narrower one is a forgotten precision=."""
    precision = fzero.Precision(torch.bfloat16, grad=torch.float64, full=wide_norm)
    assert precision.gradients(torch.bfloat16)[:2] == (torch.float32, torch.float64)
    assert precision.gradients(torch.float32)[:2] == (torch.float32, torch.float64)
    opt, params = optim.master_weights(optim.sgd(0.1), precision), {"w": torch.ones(4), "n": torch.ones(3)}
    state, params = opt.init(params), precision.cast(params)
    loss = lambda p: (p["w"].sum() * p["n"].sum()).float()  # noqa: E731
    _, grads = fzero.value_and_grad(loss, precision=precision)(params)
    assert {x.dtype for x in tree.tensors(grads)} == {torch.float64}
    opt.update(grads, state, params)
    for path in ("w", "n"):
        narrow = {**grads, path: grads[path].float()}
        with pytest.raises(TypeError, match=rf"grads leaf '{path}' is torch\.float32, .*torch\.float64; take them"):
            opt.update(narrow, state, params)


def test_masters_of_integers_are_refused():
    opt = optim.master_weights(optim.sgd(0.1), fzero.Precision(torch.bfloat16))
    with pytest.raises(TypeError, match=r"params leaf 'n' is int64 \[3\], which has no gradient"):
        opt.init({"w": torch.ones(4), "n": torch.arange(3)})


def test_masters_made_from_rounded_parameters_get_a_notice(caplog):
    warn_once.cache_clear()
    opt = optim.master_weights(optim.sgd(0.1), fzero.Precision(torch.bfloat16))
    opt.init({"w": torch.ones(4)})
    assert not caplog.records
    opt.init({"w": torch.ones(4, dtype=torch.bfloat16)})
    assert "1 leaves ('w', ...) are in half precision already" in caplog.text


def test_master_weights_must_be_the_outermost_wrapper():
    opt = optim.master_weights(optim.sgd(0.1), fzero.Precision(torch.bfloat16))
    assert optim.chain(optim.clip(1.0), opt).precision is opt.precision
    with pytest.raises(ValueError, match=r"must be the last link.*: optim.master_weights\(optim.chain"):
        optim.chain(opt, optim.scale(0.5))
    with pytest.raises(ValueError, match="a loss scale goes around the whole chain: a clip before it would hide"):
        optim.chain(optim.clip(1.0), optim.dynamic_loss_scale(optim.sgd(0.1)))
    for wrapped in (opt, optim.static_loss_scale(optim.sgd(0.1), 2.0)):
        with pytest.raises(
            ValueError, match=r"masked: put master_weights, and a loss scale, around masked.*: optim.master_weights"
        ):
            optim.masked(wrapped, {"w": True})
        with pytest.raises(
            ValueError, match=r"leafwise: put master_weights, and a loss scale, around leafwise.*: optim.master_weights"
        ):
            optim.leafwise(wrapped)
    with pytest.raises(ValueError, match="opt_state holds 0 of LossScaleState: expected one; pass the state of an"):
        optim.loss_scale(opt.init({"w": torch.ones(4)}))


def test_every_box_has_the_dtype_of_the_policy():
    """The spec's dtype is the parameters', whatever the tree holds."""
    precision = fzero.Precision(torch.bfloat16)
    opt = optim.master_weights(optim.adam(0.1), precision)
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    params, state = step.init({"w": torch.ones(4)}, opt)
    boxes = [x for x in tree.flatten((params, state), is_box)[0] if is_box(x)]
    assert {x.spec.dtype for x in boxes} == {torch.bfloat16} and len({x.spec_id for x in boxes}) == 1
