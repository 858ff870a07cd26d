"""Half precision: dtypes, master weights, loss scale, weighted means. Each law holds at every stage, as unsharded.

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
from tests.helpers import LEAST, cases, either, examples, mlp_batch, mlp_loss, mlp_params
from tests.precision_steps import integers, linear_loss, step_of, token_loss, wide_norm
from tests.tiny_gpt import gpt_block, gpt_loss, gpt_params

HALF = [torch.bfloat16, torch.float16]
MICRO_BATCHES = st.integers(1, 5)


def trained(
    train_step: Any, opt: Any, params: Any, batches: Any, stage: int, mesh: fzero.ranks.Mesh, jit: bool = False
) -> Any:
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init(params, opt)
    run = fzero.jit(step, backend="fx", **LEAST) if jit else step
    for batch in batches:
        *state, _ = run(*state, mesh.split(batch))
    return step.gather(state[0]), step.gather(state[1])


def unsharded(train_step: Any, opt: Any, params: Any, batches: Any) -> Any:
    state = (params if opt.precision is None else opt.precision.cast(params), opt.init(params))
    for batch in batches:
        *state, _ = train_step(*state, batch)
    return tuple(state)


# ---------------------------------------------------------------- precision


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
def test_bit_for_bit_the_unsharded_program(params, half, rule, stage, n, k, seed, jit, gather):
    precision = fzero.Precision(half, full=wide_norm if rule else None)
    opt = optim.static_loss_scale(optim.master_weights(optim.sgd(2.0**-9, momentum=0.5), precision), 16.0)
    loss = linear_loss if gather else lambda p, x: linear_loss(fzero.gather(p), x)
    options: Any = {"reduce": "sum", "micro_batches": k, "precision": precision, "gather": gather}
    train_step = step_of(opt, loss, scaled=True, **options)
    params, batches = integers(params, seed), [torch.randint(-2, 3, (n * k,)).float() for _ in range(3)]
    expected = unsharded(train_step, opt, params, batches)
    got = trained(train_step, opt, params, batches, stage, fzero.mesh(dp=n), jit)
    assert_trees_close(got, expected, rtol=0.0)


@examples(3, 40)
@given(
    reduce=st.sampled_from([torch.float64, torch.float32]),
    stage=stages(),
    n=world_sizes(),
    k=MICRO_BATCHES,
    rule=st.booleans(),
)
def test_equals_unsharded_training(reduce, stage, n, k, rule):
    """In float32 for half precision and float64 for float32, so that little rounds."""
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


@pytest.mark.parametrize("stage,k", cases([(3, 2)], itertools.product(range(4), (1, 2, 3))))
def test_jit_and_lockstep_are_eager_bit_for_bit(stage, k):
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.adamw(1e-2), precision), 64.0, growth_interval=2)
    train_step = step_of(opt, scaled=True, reduce="sum", micro_batches=k, precision=precision)
    params = integers({"a": torch.ones(5, 3), "n": torch.ones(3), "c": torch.ones(())}, 0)
    batches = [torch.randint(-2, 3, (4 * k,)).float() for _ in range(4)]
    eager = trained(train_step, opt, params, batches, stage, fzero.mesh(dp=4))
    jitted = trained(train_step, opt, params, batches, stage, fzero.mesh(dp=4), jit=True)
    lockstep = trained(train_step, opt, params, batches, stage, fzero.mesh(dp=4, simulate="lockstep"))
    assert_trees_close(jitted, eager, rtol=0.0)
    assert_trees_close(lockstep, eager, rtol=0.0)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
def test_inductor_follows_eager():
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


@pytest.mark.parametrize("stage", cases((3,), range(4)))
@pytest.mark.parametrize("k", [2, *[pytest.param(k, marks=pytest.mark.slow) for k in (1, 4)]])
def test_dtypes_on_the_wire(stage, k):
    """Half precision is gathered in half the bytes; sums are in the policy's dtype, and the update's grads too."""
    seen: list[Any] = []
    for reduce, grad in [(torch.float32, None), (torch.float16, torch.float32), (torch.float16, None)]:
        precision = fzero.Precision(torch.float16, reduce=reduce, grad=grad, full=wide_norm)
        opt = optim.master_weights(optim.sgd(0.5), precision)

        def train_step(params: Any, opt_state: Any, batch: Any, opt: Any = opt, precision: Any = precision) -> Any:
            loss, grads = fzero.scaled_value_and_grad(linear_loss, 1.0, micro_batches=k, precision=precision)(
                params, batch
            )
            inner = fzero.value_and_grad(linear_loss, micro_batches=k, precision=precision)(params, batch)[1]
            seen.append({x.dtype for x in tree.tensors(inner)})
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
        assert seen.pop() == {torch.float32, grad or reduce}
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
    given = [16 * psi, 2 * psi + 14 * psi // n, 2 * psi + 14 * psi // n, 16 * psi // n]
    for stage in range(4):
        mesh = fzero.mesh(simulate=True, dp=n)
        step = fzero.shard(train_step, stage=stage, mesh=mesh)
        state = step.init(params, opt)
        count = 8  # bytes of Adam's counter
        assert step.state_bytes(*state) - count == held[stage]
        *state, grads = step(*state, mesh.split(torch.ones(n)))
        assert step.state_bytes(*state) - count == held[stage]
        assert step.state_bytes(*state, grads) - count == given[stage]


def test_full_leaves_have_no_second_copy():
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.master_weights(optim.sgd(0.1), precision)
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    params, state = step.init({"w": torch.ones(4), "n": torch.full((3,), 1 / 3)}, opt)
    assert state.master["n"] is None and state.master["w"].data.dtype == torch.float32
    assert params["n"].data.dtype == torch.float32 and params["w"].data.dtype == torch.bfloat16
    whole = step.gather(optim.master_params(params, state))
    assert_trees_close(whole, {"w": torch.ones(4), "n": torch.full((3,), 1 / 3)}, rtol=0.0)


@pytest.mark.parametrize("stage", cases((1, 3), range(4)))
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
    """After any update: the sum of a rounded value and a difference of rounded values is the new one."""
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


def test_a_master_beyond_the_range_of_half_precision_comes_back():
    opt = optim.master_weights(optim.sgd(1.0), fzero.Precision(torch.float16))
    params = {"w": torch.tensor([60000.0])}
    state, params = opt.init(params), {"w": params["w"].half()}
    seen = []
    for g in (-10000.0, 20000.0):
        updates, state = opt.update({"w": torch.tensor([g])}, state, params)
        params = optim.apply_updates(params, updates)
        seen.append(params["w"].item())
    assert seen == [65504.0, torch.tensor(50000.0).half().item()] and state.master["w"].item() == 50000.0


def test_a_tie_has_the_dtype_of_its_first_place():
    precision, w = fzero.Precision(torch.bfloat16, full=wide_norm), torch.ones(4)
    opt = optim.master_weights(optim.sgd(2.0**-3), precision)
    train_step = step_of(opt, precision=precision, reduce="sum")
    for params in ({"n": w, "o": w}, {"o": w, "n": w}):
        expected = unsharded(train_step, opt, params, [torch.ones(4)])
        for stage in range(4):
            got = trained(train_step, opt, params, [torch.ones(4)], stage, fzero.mesh(dp=2))
            assert_trees_close(got, expected, rtol=0.0)


def test_rules_of_split_leaves_see_them_whole():
    precision = fzero.Precision(torch.bfloat16, full=lambda path, leaf: leaf.numel() <= 6)
    opt, mesh = optim.master_weights(optim.sgd(0.1), precision), fzero.mesh(dp=2, tp=2)
    for stage in range(4):
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


@pytest.mark.parametrize("stage", cases((0, 3), range(4)))
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


def test_split_and_hybrid_units_have_a_precision_too():
    """Tensor parallel leaves, and copies along a replica axis: the policy's dtypes on every collective of a unit."""
    precision = fzero.Precision(torch.bfloat16, full=wide_norm)
    opt = optim.master_weights(optim.sgd(2.0**-9), precision)
    params = integers({"w": torch.ones(4, 6), "n": torch.ones(3), "c": torch.ones(5)}, 0)
    batches = [torch.randint(-2, 3, (8,)).float() for _ in range(3)]
    train_step = step_of(opt, reduce="sum", precision=precision, micro_batches=2)
    expected = unsharded(train_step, opt, params, batches)
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(simulate=simulate, replica=2, shard=2)
        for stage in either((1, 3), range(4)):
            step = fzero.shard(train_step, stage=stage, mesh=mesh, over="shard")
            state = step.init(params, opt)
            with fzero.collectives.record() as log:
                for batch in batches:
                    *state, _ = step(*state, mesh.split(batch))
            assert_trees_close(step.gather(tuple(state)), expected, rtol=0.0)
            assert all(
                (e.dtype == torch.bfloat16) == (e.kind == "all_gather" and e.unit != "n") for e in log.unit_events
            )


@pytest.mark.parametrize("stage", cases((2, 3), range(4)))
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


# ---------------------------------------------------------------- loss scale


WAYS = [(1, 2, 0, "nan"), (4, 1, 1, "inf"), (4, 1, 3, "nan"), (3, 3, 2, "nan"), (3, 3, 3, "inf")]


@pytest.mark.parametrize(
    "n,k,stage,value",
    cases(WAYS, [(*w, s, v) for w in ((1, 2), (4, 1), (3, 3)) for s in range(4) for v in ("inf", "nan")]),
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage, n, k, value):
    """In one sample of one micro-batch of one rank; parameters and state stay bit for bit; then the run goes on."""
    precision = fzero.Precision(torch.float16, full=wide_norm)
    optimizer = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), precision)
    opt = optim.dynamic_loss_scale(optimizer, 64.0, growth_interval=2)
    train_step = step_of(opt, scaled=True, micro_batches=k, precision=precision)
    mesh = fzero.mesh(simulate=True, dp=n)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init({"w": torch.tensor([-0.0, 0.0, 1.0, -2.0, 3.0]), "n": torch.ones(3), "0": torch.ones(())}, opt)
    good = torch.ones(2 * n * k)
    bad = good.clone()
    bad[-2] = float(value)
    before = [x.clone() for x in tree.tensors((state[0], state[1].inner))]
    *state, _ = step(*state, mesh.split(bad))
    after = tree.tensors((state[0], state[1].inner))
    assert all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True) if x.ndim
    )
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True) if not x.ndim)
    assert (state[1].scale, state[1].growth, state[1].skipped) == (32.0, 0, 1)
    for _ in range(2):  # it goes on
        *state, loss = step(*state, mesh.split(good))
    assert (state[1].scale, state[1].growth, state[1].skipped) == (64.0, 0, 1)
    assert loss.isfinite() and not torch.equal(before[0], tree.tensors(state[0])[0])


@pytest.mark.parametrize("stage", cases((1, 3), range(4)))
def test_the_scale_leaves_no_trace(stage):
    """Loss and gradients are the true ones at any power of two, and what follows, clipping, sees no scale."""
    precision = fzero.Precision(torch.bfloat16)
    results = []
    for scale in (1.0, 2.0**20):
        optimizer = optim.chain(optim.clip(0.5), optim.clip_by_global_norm(2.0), optim.sgd(2.0**-3))
        opt = optim.static_loss_scale(optim.master_weights(optimizer, precision), scale)
        train_step = step_of(opt, scaled=True, reduce="sum", precision=precision)
        params, batches = {"w": torch.ones(5, 3), "v": torch.ones(4)}, [torch.ones(4), -torch.ones(4)]
        results.append(trained(train_step, opt, params, batches, stage, fzero.mesh(dp=2)))
        assert_trees_close(results[-1][0], unsharded(train_step, opt, params, batches)[0], rtol=0.0)
    assert_trees_close(results[0][0], results[1][0], rtol=0.0)


def test_small_gradients_survive_in_half_precision_only_with_a_scale(caplog):
    warn_once.cache_clear()
    w = torch.ones(3, dtype=torch.float16)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w.float() * x).mean()

    precision = fzero.Precision(torch.float16)
    x = torch.full((3,), 2.0**-26)
    value, grad = fzero.scaled_value_and_grad(loss, 2.0**12, precision=precision)(w, x)
    assert not caplog.records
    assert value == loss(w, x)
    for _ in range(2):
        _, lost = fzero.value_and_grad(loss, precision=precision)(w, x)
    assert caplog.text.count("gradients in float16 below 6e-8 vanish: scale the loss") == 1
    assert lost.tolist() == [0.0] * 3
    torch.testing.assert_close(grad, x / 3, rtol=1e-3, atol=0)


def test_a_loss_that_would_overflow_if_it_were_scaled_is_itself():
    w = torch.ones(2)
    value, grad = fzero.scaled_value_and_grad(lambda w: w.detach().sum() * 1e36 + w[0], 2.0**12)(w)
    assert value.item() == pytest.approx(2e36) and grad.tolist() == [1, 0]


def test_the_scale_grows_and_has_bounds():
    opt = optim.dynamic_loss_scale(optim.sgd(0.1), 4.0, growth_interval=2, minimum=2.0, maximum=8.0)
    params = {"w": torch.ones(2)}
    state, good, bad = opt.init(params), {"w": torch.ones(2)}, {"w": torch.tensor([1.0, float("nan")])}
    scales = []
    for grads in [good, good, good, good, bad, bad, bad, good, bad, good]:
        _, state = opt.update(grads, state, params)
        scales.append((state.scale.item(), state.growth.item(), state.skipped.item()))
    expected = [(4, 1, 0), (8, 0, 0), (8, 1, 0), (8, 0, 0), (4, 0, 1), (2, 0, 2), (2, 0, 3), (2, 1, 3)]
    assert scales == [*expected, (2, 0, 4), (2, 1, 4)]  # in a row: the good step before a bad one does not count


def test_higher_derivatives_through_a_scale():
    f = lambda w: (w**3).sum()  # noqa: E731
    w = torch.tensor([1.0, 2.0])
    inner = lambda w: fzero.scaled_value_and_grad(f, 8.0)(w)[1].sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(inner)(w), 6 * w)
    torch.testing.assert_close(torch.func.jvp(inner, (w,), (torch.ones(2),))[1], (6 * w).sum())
    value = lambda w: fzero.scaled_value_and_grad(f, 8.0)(w)[0]  # noqa: E731
    torch.testing.assert_close(torch.func.grad(value)(w), 3 * w**2)


@examples(20, 40)
@given(params=trees(), n=world_sizes(), bad=st.booleans(), data=st.data())
def test_all_finite_sees_every_rank(params, n, bad, data):
    leaves = [x for x in tree.tensors(params) if x.numel()]
    if bad and leaves:
        leaf = leaves[data.draw(st.integers(0, len(leaves) - 1))].view(-1)
        leaf[data.draw(st.integers(0, len(leaf) - 1))] = float("nan")
    f = lambda params: optim.all_finite(fzero.partition(params))  # noqa: E731
    assert fzero.mesh(simulate=True, dp=n).spmd(f)(params).item() == (not (bad and leaves))


# ---------------------------------------------------------------- weighted means


@examples(3, 40)
@given(
    stage=stages(), n=world_sizes(), k=MICRO_BATCHES, seed=st.integers(0, 99), scaled=st.booleans(), aux=st.booleans()
)
def test_a_token_weighted_mean_is_exact(stage, n, k, seed, scaled, aux):
    """Whatever the counts of ranks and micro-batches, those without a token among them: one mean over all tokens."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(2):
        batch = mlp_batch(2 * n * k, seed=seed + i)
        mask = (torch.rand(2 * n * k, generator=g) < 0.4).double()
        mask[: 2 * k] = 0.0  # the first rank has none
        mask[-1] = 1.0
        batches.append({**batch, "mask": mask})
    opt = optim.sgd(0.1, momentum=0.9)
    weighted = (lambda p, b: (token_loss(p, b), b["mask"])) if aux else token_loss

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        options: Any = {"reduce": "weighted", "micro_batches": k, "has_aux": aux}
        if scaled:
            value, grads = fzero.scaled_value_and_grad(weighted, 8.0, **options)(params, batch)
        else:
            value, grads = fzero.value_and_grad(weighted, **options)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value[0] if aux else value

    def dense(params: Any, batch: Any) -> torch.Tensor:
        total, count = token_loss(params, batch)
        return total / count

    assert_equivalent(train_step, mlp_params(), opt, batches, (stage,), (n,))
    # and equal to the mean over the whole batch at once
    state = expected = (mlp_params(), opt.init(mlp_params()))
    for batch in batches:
        state = train_step(*state[:2], batch)
        loss, grads = fzero.value_and_grad(dense)(expected[0], batch)
        updates, opt_state = opt.update(grads, expected[1], expected[0])
        expected = (optim.apply_updates(expected[0], updates), opt_state)
        assert_trees_close(state, (*expected, loss))


def test_a_naive_mean_of_means_is_not():
    batch = {**mlp_batch(8), "mask": torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)}

    def naive(params: Any, batch: Any) -> torch.Tensor:
        total, count = token_loss(params, batch)
        return total / count

    mesh = fzero.mesh(dp=2)
    exact = fzero.value_and_grad(naive)(mlp_params(), batch)[0]
    wrong = mesh.spmd(fzero.value_and_grad(naive))(mlp_params(), mesh.split(batch))[0]
    right = mesh.spmd(fzero.value_and_grad(token_loss, reduce="weighted"))(mlp_params(), mesh.split(batch))[0]
    assert abs(wrong - exact) > 0.1
    torch.testing.assert_close(right, exact)


def test_weights_are_any_numbers_of_any_dtype():
    """Fractions, and counts that half precision holds, but not their sum."""
    f = lambda w, b: ((w.sum() * b["x"]).sum(), b["n"].sum())  # noqa: E731
    for n in (torch.full((4,), 0.125), torch.full((4,), 20000.0, dtype=torch.float16)):
        batch = {"x": torch.ones(4), "n": n}
        loss, _ = fzero.value_and_grad(f, reduce="weighted", micro_batches=2)(torch.ones(3), batch)
        torch.testing.assert_close(loss, torch.tensor(3 / n[0].item()))


def test_no_token_at_all_is_no_loss():
    batch = {**mlp_batch(4), "mask": torch.zeros(4, dtype=torch.float64)}
    loss, grads = fzero.value_and_grad(token_loss, reduce="weighted", micro_batches=2)(mlp_params(), batch)
    assert loss == 0 and all((g == 0).all() for g in tree.tensors(grads))


# ---------------------------------------------------------------- batch arithmetic


@settings(max_examples=60)
@given(m=st.integers(1, 9), k=st.integers(1, 9), n=world_sizes())
def test_any_two_give_the_third(m, k, n):
    mesh = fzero.mesh(simulate=True, dp=n)
    expected = fzero.data.BatchPlan(m * k * n, m, k, n)
    assert fzero.data.batch_plan(micro_batch=m, accumulation=k, mesh=mesh) == expected
    assert fzero.data.batch_plan(global_batch=m * k * n, accumulation=k, mesh=mesh) == expected
    assert fzero.data.batch_plan(global_batch=m * k * n, micro_batch=m, mesh=mesh) == expected
    assert fzero.data.batch_plan(global_batch=m * k * n, micro_batch=m, accumulation=k, mesh=mesh) == expected
    assert expected.local_batch * n == expected.global_batch


def test_only_data_parallel_ranks_count():
    """Those along a pipeline's axis share a batch, though it is one of the axes of the mean, and those along tp do."""

    def ranks(axis: Any = None, model_axes: Any = None, **axes: int) -> int:
        plan = fzero.data.batch_plan(
            micro_batch=3, accumulation=5, mesh=fzero.mesh(**axes), axis=axis, model_axes=model_axes
        )
        assert plan.global_batch == 15 * plan.ranks
        return plan.ranks

    assert ranks(dp=2, tp=4) == ranks(dp=2, tp=4, axis="dp") == 2
    assert ranks(dp=2, pp=3, tp=4) == ranks(dp=2, pp=3, axis=("dp", "pp")) == ranks(dp=2, pp=3, axis="dp") == 2
    assert ranks(pp=4) == ranks(pp=4, tp=2) == ranks(pp=4, axis="pp") == 1
    assert ranks(dp=2, tp=4, axis=("dp", "tp")) == 8  # what is said counts
    assert ranks(dp=2, ep=3, tp=4, axis=("dp", "ep")) == 6
    assert (
        ranks(data=2, stage=3, axis=("data", "stage"), model_axes="stage")
        == ranks(data=2, stage=3, model_axes="stage")
        == 2
    )
    assert ranks(dp=2, pp=3, axis=("dp", "pp"), model_axes=()) == 6  # no pipeline, in spite of the name
    with pytest.raises(ValueError, match=r"axes \('a', 'b'\): name the data-parallel ones, axis='a' or \('a', 'b'\)"):
        ranks(a=2, tp=2, b=2)
    with pytest.raises(ValueError, match=r"'stage' is not an axis of"):
        ranks(dp=2, model_axes="stage")


@pytest.mark.parametrize(
    "given,message",
    [
        (
            {"global_batch": 64},
            r"got {'global_batch': 64} and 4 ranks: expected two of global_batch, micro_batch, acc",
        ),
        ({}, "got no sizes and 4 ranks"),
        ({"global_batch": 64, "micro_batch": 0}, "micro_batch=0: expected an int, at least 1"),
        ({"global_batch": 64, "micro_batch": 2.0}, r"micro_batch=2\.0: expected an int"),
        (
            {"global_batch": 64, "micro_batch": 2, "accumulation": 2},
            r"global_batch=64, micro_batch=2, accumulation=2 and 4 data-parallel ranks contradict .* 2 x 2 x 4 = 16",
        ),
        (
            {"global_batch": 50, "micro_batch": 2},
            r"global_batch=50, micro_batch=2 and 4 .* not a multiple of 8, .* 48 and 56",
        ),
        (
            {"global_batch": 3, "accumulation": 2},
            r"not a multiple of 8, so no micro_batch fits; .* batches are 8 and 8",
        ),
    ],
)
def test_contradictions_name_all_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        fzero.data.batch_plan(**given, mesh=fzero.mesh(dp=4))


# ---------------------------------------------------------------- bad input


def test_a_wrong_policy_is_named():
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
    with pytest.raises(ValueError, match="expected each axis once"):
        fzero.data.batch_plan(micro_batch=1, accumulation=1, mesh=fzero.mesh(a=2, b=2), axis=("a", "a"))
    with pytest.raises(ValueError, match="initial=0"):
        optim.static_loss_scale(optim.sgd(0.1), 0)


@pytest.mark.parametrize("stage", cases((0, 3), range(4)))
def test_forgotten_casts_are_found(stage):
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


def test_gradients_are_as_wide_as_the_policy_says():
    """Also wider than the masters, also of leaves that are kept in full; narrower ones are a forgotten precision=."""
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
    with pytest.raises(TypeError, match=r"params leaf 'n' is torch\.int64 \[3\], which has no gradient"):
        opt.init({"w": torch.ones(4), "n": torch.arange(3)})


def test_masters_of_rounded_values_are_noted(caplog):
    warn_once.cache_clear()
    opt = optim.master_weights(optim.sgd(0.1), fzero.Precision(torch.bfloat16))
    opt.init({"w": torch.ones(4)})
    assert not caplog.records
    opt.init({"w": torch.ones(4, dtype=torch.bfloat16)})
    assert "1 leaves ('w', ...) are in half precision already" in caplog.text


def test_master_weights_come_last():
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


def test_what_a_weighted_loss_must_return():
    w = torch.ones(3)
    with pytest.raises(TypeError, match=r"must return \(total, weight\)"):
        fzero.value_and_grad(lambda w: w.sum(), reduce="weighted")(w)
    with pytest.raises(TypeError, match=r"the weight is torch\.float32 \[3\], expected a 0-d tensor"):
        fzero.value_and_grad(lambda w: (w.sum(), w), reduce="weighted")(w)
    with pytest.raises(TypeError, match=r"must return \(\(total, weight\), aux\)"):
        fzero.value_and_grad(lambda w: w.sum(), reduce="weighted", has_aux=True)(w)


def test_every_box_says_its_dtype():
    """The spec's dtype is the parameters', whatever the tree holds."""
    precision = fzero.Precision(torch.bfloat16)
    opt = optim.master_weights(optim.adam(0.1), precision)
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    params, state = step.init({"w": torch.ones(4)}, opt)
    boxes = [x for x in tree.flatten((params, state), is_box)[0] if is_box(x)]
    assert {x.spec.dtype for x in boxes} == {torch.bfloat16} and len({x.spec_id for x in boxes}) == 1
