"""Optimizers: torch.optim's numbers, and the same numbers on every layout."""

import itertools
import math
import re
from typing import Any, NamedTuple

import pytest
import torch
import torchopt
import torchopt.transform
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.optim import is_opt_state
from fzero.testing import assert_equivalent, assert_trees_close, trees
from tests.helpers import ALL_STAGES, cases, examples, train_step_for
from tests.optim.helpers import (
    RTOL,
    SIZES,
    batches_of,
    loss_of,
    matrices,
    normal,
    params_of,
    partition_simulated,
    poison,
    train,
    train_with_torch,
)
from tests.optim.pages import whole_optimizers
from tests.optim.table import TABLE, small_params


class Pair(NamedTuple):
    init: Any
    update: Any


@examples(10, 20)
@given(
    rate=st.floats(1e-4, 0.5),
    momentum=st.floats(0.05, 0.99),
    nesterov=st.booleans(),
    b1=st.floats(0, 0.95),
    b2=st.floats(0.5, 0.999),
    eps=st.floats(1e-8, 1e-2),
    decay=st.floats(0, 0.5),
)
def test_any_hyperparameters_equal_torch_optim(rate, momentum, nesterov, b1, b2, eps, decay):
    params, batches = params_of(), batches_of(4)
    for opt, make in [
        (
            optim.sgd(rate, momentum, nesterov),
            lambda xs: torch.optim.SGD(xs, rate, momentum=momentum, nesterov=nesterov),
        ),
        (
            optim.adamw(rate, b1, b2, eps, decay),
            lambda xs: torch.optim.AdamW(xs, rate, (b1, b2), eps, decay),
        ),
    ]:
        assert_trees_close(train(opt, params, batches), train_with_torch(make, params, batches), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", [matrices, matrices(params_of())], ids=["function", "tree of bools"])
def test_decay_mask_equals_torch_param_groups(mask, dtype):
    def make(xs: list[torch.Tensor]) -> Any:
        decayed, rest = [x for x in xs if x.ndim >= 2], [x for x in xs if x.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, 1e-2)

    params, batches = params_of(dtype), batches_of(10, dtype)
    masked = train(optim.adamw(1e-2, weight_decay=0.3, mask=mask), params, batches)
    assert_trees_close(masked, train_with_torch(make, params, batches), RTOL[dtype])
    unmasked = train(optim.adamw(1e-2, weight_decay=0.3), params, batches)
    assert not torch.equal(masked["scale"], unmasked["scale"])


@pytest.mark.parametrize("stage", cases((3,), (1, 2)))
@pytest.mark.parametrize("n", cases((SIZES[0], SIZES[-1]), SIZES))
def test_decay_mask_inside_one_unit_is_the_same_on_shards(n, stage):
    opt = optim.adamw(1e-2, weight_decay=0.3, mask=matrices)
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(), opt, batches_of(3), [stage], [n], units=lambda path, leaf: "all")


def test_decay_mask_of_another_structure_names_the_leaf():
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    opt = optim.adamw(1e-2, mask={"w": True})
    with pytest.raises(ValueError, match="'b'"):
        opt.update(params, opt.init(params), params)


def test_weight_decay_without_parameters_is_refused_with_a_remedy():
    params = {"w": torch.ones(2)}
    opt = optim.adamw(1e-2)
    with pytest.raises(ValueError, match=r"needs the parameters: opt.update\(grads, state, params\)"):
        opt.update(params, opt.init(params))


def test_constant_schedule_equals_the_number_in_float64():
    params, batches = params_of(), batches_of(10)
    for rate in (0.1, 1e-2):
        scheduled = train(optim.sgd(optim.constant(rate)), params, batches)
        assert_trees_close(scheduled, train(optim.sgd(rate), params, batches), 1e-12)


@given(
    peak=st.floats(1e-5, 10),
    warmup=st.integers(0, 20),
    falling=st.integers(1, 20),
    end=st.floats(0, 1),
    t=st.integers(0, 50),
)
def test_warmup_cosine_equals_its_closed_form(peak, warmup, falling, end, t):
    rate = optim.warmup_cosine(peak, warmup, warmup + falling, end)(torch.tensor(t)).item()
    if t < warmup:
        expected = peak * t / warmup
    else:
        expected = end + (peak - end) * (1 + math.cos(math.pi * min((t - warmup) / falling, 1))) / 2
    assert rate == pytest.approx(expected, rel=1e-12, abs=1e-15)


def warmup_factor(t: int) -> float:
    return t / 3 if t < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * min((t - 3) / 5, 1))) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_scheduled_training_equals_torch_lambda_lr(name, dtype):
    schedule = optim.warmup_cosine(0.1, 3, 8, end=0.01)
    opt, make = {
        "sgd": (
            optim.sgd(schedule, momentum=0.9, nesterov=True),
            lambda xs: torch.optim.SGD(xs, 0.1, momentum=0.9, nesterov=True),
        ),
        "adamw": (optim.adamw(schedule), lambda xs: torch.optim.AdamW(xs, 0.1)),
    }[name]
    params, batches = params_of(dtype), batches_of(10, dtype)
    expected = train_with_torch(make, params, batches, warmup_factor)
    assert_trees_close(train(opt, params, batches), expected, RTOL[dtype])


def test_a_hand_written_schedule_is_given_the_number_of_updates_done():
    records = []

    def schedule(count: torch.Tensor) -> torch.Tensor:
        records.append(int(count))
        return 0.1 / (1 + count)

    opt = optim.sgd(schedule)
    state = opt.init({"w": torch.ones(2)})
    for t in range(3):
        updates, state = opt.update({"w": torch.ones(2)}, state)
        torch.testing.assert_close(updates["w"], torch.full((2,), -0.1 / (1 + t)))
    assert records == [0, 1, 2]


def test_a_schedule_that_does_not_end_after_its_warmup_is_refused():
    with pytest.raises(ValueError, match="0 <= warmup_steps < total_steps, given 5 and 5"):
        optim.warmup_cosine(1.0, 5, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.sgd(0.1, 0.9, 0.1), r"nesterov=0\.1: expected True or False"),  # torch's is the dampening
        (lambda: optim.sgd(0.1, 0.9, nesterov="no"), "nesterov='no': expected True or False"),
        (lambda: optim.sgd(0.1, momentum=True), "momentum=True: expected a number >= 0"),
        (lambda: optim.adamw(True), "learning_rate=True: expected a number >= 0"),
        (lambda: fzero.value_and_grad(torch.sum, has_aux="no"), "has_aux='no': expected True or False"),
        (lambda: fzero.remat(torch.sum, save=True), "save=True: expected None"),
        (lambda: fzero.remat(torch.sum, save=False), "save=False: expected None"),
    ],
)
def test_a_bool_is_no_number_and_a_number_no_bool(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ValueError, match="nesterov=True needs momentum"):
        optim.sgd(0.1, nesterov=True)


# Chain, apply_updates, state.


@pytest.mark.parametrize(
    ("opt", "call"),
    [
        (optim.adam(1e-3), "adam(0.001)"),
        (optim.adamw(1e-3, weight_decay=0.1, mask=lambda p: p), "adamw(0.001, weight_decay=0.1, mask=<lambda>)"),
        (optim.lion(optim.linear(0.1, 0.0, 9), moments="int8"), "lion(schedule, moments='int8')"),
        (optim.lamb(torch.tensor(1e-3)), "lamb(<Tensor>)"),
        (optim.sgd(0.1, momentum=0.9), "sgd(0.1, momentum=0.9)"),
        (optim.scale_by_learning_rate(0.1), "scale_by_learning_rate(0.1)"),
        (optim.chain(optim.clip(1.0), optim.adam(1e-3)), "chain(clip(1.0), adam(0.001))"),
        (optim.by_group((optim.adam(1e-3), {"w": True})), "by_group((adam(0.001), <dict>))"),
        (optim.offload(optim.adam(1e-3), 0.5), "offload(adam(0.001), 0.5)"),
        (optim.inject_hyperparams(optim.sgd)(0.1), "inject_hyperparams(sgd)(0.1)"),
        (optim.leafwise(Pair(lambda p: (), lambda g, s, params: (g, s))), "leafwise(<Pair>)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_optimizer_shows_the_call_that_made_it(opt, call):
    assert repr(opt) == f"Optimizer({call})"


@pytest.mark.parametrize("name", whole_optimizers())
def test_an_optimizer_of_a_function_has_its_name(name):
    opt = getattr(optim, name)(0.1)
    assert repr(opt).startswith(f"Optimizer({name}("), f"@optimizer_factory on {name}, below @torch_hints"


def test_the_call_that_made_an_optimizer_changes_nothing_else():
    params = {"w": torch.tensor([1.0, 2.0])}
    adam, adamw = optim.adam(0.1), optim.adamw(0.1, weight_decay=0.0)
    state = adam.init(params)
    assert type(state) is type(adamw.init(params))
    assert torch.equal(adam.update(params, state, params)[0]["w"], adamw.update(params, state, params)[0]["w"])
    assert {hash(adam), hash(adam)} == {hash(adam)} and adam == adam


def test_chain_composes_optimizers():
    params, grads = params_of(), tree.map(lambda x: 3 * x, params_of())
    first, second = optim.clip_by_global_norm(0.5), optim.adamw(0.1)
    updates, state = optim.chain(first, second).update(grads, (first.init(params), second.init(params)), params)
    clipped, _ = first.update(grads, (), params)
    expected, adam_state = second.update(clipped, second.init(params), params)
    assert_trees_close(updates, expected, 0.0)
    assert_trees_close(state, ((), adam_state), 0.0)


def test_chain_is_associative_and_the_empty_chain_its_identity():
    a, b, c = optim.clip_by_global_norm(0.5), optim.sgd(0.3, momentum=0.9), optim.sgd(0.7)
    params, batches = params_of(), batches_of(3)
    flat = train(optim.chain(a, b, c), params, batches)
    for other in (
        optim.chain(a, optim.chain(b, c)),
        optim.chain(optim.chain(a, b), c),
        optim.chain(optim.chain(), a, b, optim.chain(), c),
    ):
        assert_trees_close(train(other, params, batches), flat, 0.0)


def test_chain_is_exact_on_shards_if_all_its_optimizers_are():
    whole = optim.Optimizer(optim.sgd(0.1).init, optim.sgd(0.1).update, exact_on_shards=False)
    assert optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1)).exact_on_shards
    assert not optim.chain(optim.adam(0.1), whole).exact_on_shards


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_bfloat16_parameters_keep_their_dtype_in_a_sharded_step(stage):
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.warmup_cosine(0.1, 1, 9)))
    params, batches = params_of(torch.bfloat16), batches_of(2, torch.bfloat16)
    mesh = fzero.mesh(dp=3)
    step = fzero.shard(train_step_for(loss_of, opt), stage, mesh)
    p, state = step.init(params, opt)
    for batch in batches:
        p, state, loss = step(p, state, mesh.split(batch))
        assert loss.dtype == torch.bfloat16
    assert {x.dtype for x in tree.tensors(step.gather(p))} == {torch.bfloat16}
    assert_trees_close(step.gather(p), train(opt, params, batches), 0.05)


@pytest.mark.parametrize("shape", [(4,), (), (1, 4), (3,), (0,)])
def test_apply_updates_refuses_an_update_of_another_shape(shape):
    params, updates = {"a": {"w": torch.ones(4, 4)}}, {"a": {"w": torch.ones(shape)}}
    with pytest.raises(ValueError, match=rf"leaf 'a.w' is \[4, 4\], and its update is {re.escape(str([*shape]))}"):
        optim.apply_updates(params, updates)


def test_apply_updates_keeps_dtypes_whatever_the_updates_are():
    params = {"half": torch.ones(2, dtype=torch.bfloat16), "single": torch.ones(2)}
    updates = {"half": torch.full((2,), 0.5), "single": torch.full((2,), 0.5, dtype=torch.float64)}
    new = optim.apply_updates(params, updates)
    assert (new["half"].dtype, new["single"].dtype) == (torch.bfloat16, torch.float32)
    assert new["half"].tolist() == new["single"].tolist() == [1.5, 1.5]


def test_apply_updates_keeps_ties():
    w = torch.ones(2)
    u = torch.ones(2)
    new = optim.apply_updates({"a": w, "b": w, "c": w.clone()}, {"a": u, "b": u, "c": u})
    assert new["a"] is new["b"]
    assert new["c"] is not new["a"]


def test_apply_updates_does_not_change_its_arguments():
    params = {"w": torch.ones(2)}
    optim.apply_updates(params, {"w": torch.ones(2)})
    assert params["w"].tolist() == [1, 1]


def test_apply_updates_of_another_structure_names_the_leaf():
    with pytest.raises(ValueError, match="'b'"):
        optim.apply_updates({"w": torch.ones(2), "b": torch.ones(2)}, {"w": torch.ones(2)})


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_state_has_the_layout_of_its_stage(stage):
    params = params_of()
    step = fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(dp=4))
    _, adam = step.init(params, optim.adamw(0.1))
    _, plain = step.init(params, optim.sgd(0.1))
    _, momentum = step.init(params, optim.sgd(0.1, momentum=0.9))
    assert isinstance(adam, optim.AdamState) and isinstance(momentum, optim.SgdState)
    assert plain.momentum is None
    for state in (adam, plain, momentum):  # a counter is replicated at every stage
        assert state.count.dtype == torch.int64 and state.count.ndim == 0
    for moment in (adam.mu, adam.nu, momentum.momentum):
        block = moment["blocks"][0]
        if stage == 0:
            assert block["w"].shape == (5, 5)
        else:
            assert isinstance(block["w"], fzero.sharding.Shard) or isinstance(block["b"], fzero.sharding.Shard)
            assert block["w"].spec.unit == "blocks.0" and block["w"].spec.numel == 30
            assert [x.shape for x in tree.tensors(block)] == [(4, 8)]  # 30 of 32 elements
        assert all(not x.any() for x in tree.tensors(moment))


# Global norms and clipping.


def norm_by_hand(params: Any) -> torch.Tensor:
    leaves = {id(x): x for x in tree.tensors(params)}.values()
    return torch.cat([x.double().flatten() for x in leaves]).norm()


@examples(25, 100)
@given(params=trees(), n=st.sampled_from(SIZES))
def test_global_norm_is_the_same_on_shards(params, n):
    expected = norm_by_hand(params)
    torch.testing.assert_close(optim.global_norm(params), expected)
    sharded = fzero.mesh(dp=n).spmd(optim.global_norm)(partition_simulated(params, n))
    torch.testing.assert_close(sharded, expected, rtol=1e-14, atol=0)


@examples(25, 100)
@given(params=trees(), n=st.sampled_from(SIZES), value=st.sampled_from([1e6, math.inf, math.nan]))
def test_padding_never_counts_in_the_global_norm(params, n, value):
    boxes = poison(partition_simulated(params, n), value)
    sharded = fzero.mesh(dp=n).spmd(optim.global_norm)(boxes)
    torch.testing.assert_close(sharded, norm_by_hand(params), rtol=1e-14, atol=0)


@examples(25, 100)
@given(params=trees(), n=st.sampled_from(SIZES), mask=st.integers(0, 2**8))
def test_replicated_leaves_count_once_in_the_global_norm(params, n, mask):
    def units(path: str, leaf: torch.Tensor) -> str | None:
        return None if mask >> (len(path) % 8) & 1 else path

    boxes = partition_simulated(params, n, units)
    sharded = fzero.mesh(dp=n).spmd(optim.global_norm)(boxes)
    torch.testing.assert_close(sharded, norm_by_hand(params), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "units", [None, lambda path, leaf: None, lambda path, leaf: "all"], ids=["own", "plain", "one"]
)
@pytest.mark.parametrize("n", SIZES)
def test_tied_leaves_count_once_in_the_global_norm(n, units):
    w = normal((7,), 0)
    params = {"a": w, "b": [w, normal((3,), 1)]}
    torch.testing.assert_close(optim.global_norm(params), norm_by_hand(params))
    sharded = fzero.mesh(dp=n).spmd(optim.global_norm)(partition_simulated(params, n, units))
    torch.testing.assert_close(sharded, norm_by_hand(params), rtol=1e-14, atol=0)


@pytest.mark.parametrize("n", SIZES)
def test_global_norm_of_mixed_dtypes_sums_in_float32_at_least(n):
    params = {"h": torch.full((300,), 300.0, dtype=torch.float16), "s": torch.ones(5), "d": normal((4,), 0)}
    for norm in (optim.global_norm(params), fzero.mesh(dp=n).spmd(optim.global_norm)(partition_simulated(params, n))):
        torch.testing.assert_close(norm.double(), norm_by_hand(params), rtol=1e-6, atol=0)


@pytest.mark.parametrize("values", [{}, {"w": None}, {"w": torch.zeros(0)}], ids=["no leaves", "None", "empty"])
def test_the_global_norm_of_an_empty_tree_is_zero(values):
    assert optim.global_norm(values).item() == 0
    assert fzero.mesh(dp=3).spmd(optim.global_norm)(partition_simulated(values, 3)).item() == 0


def test_clipping_leaves_gradients_below_the_limit_unchanged():
    grads = params_of()
    for limit in (norm_by_hand(grads).item() * 1.001, 1e9):
        assert_trees_close(optim.clip_by_global_norm(limit).update(grads, ())[0], grads, 0.0)


@given(grads=trees(), limit=st.floats(1e-3, 1e3))
def test_clipped_gradients_have_the_largest_norm_allowed_and_keep_their_direction(grads, limit):
    norm = norm_by_hand(grads)
    clipped = optim.clip_by_global_norm(limit).update(grads, ())[0]
    assert_trees_close(clipped, tree.map(lambda g: g * min(1, limit / norm), grads), 1e-14)
    assert norm_by_hand(clipped) <= limit * (1 + 1e-12)


def test_clipping_zero_gradients_gives_zeros():
    assert optim.clip_by_global_norm(1.0).update({"w": torch.zeros(3)}, ())[0]["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_norm_that_is_not_positive_is_refused(limit):
    with pytest.raises(ValueError, match=r"max_norm=.*positive"):
        optim.clip_by_global_norm(limit)


def test_clipped_training_equals_torch_clip_grad_norm():
    # torch adds 1e-6 to the norm, so this is as close as the two get
    opt = optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(0.1))
    params, batches = params_of(), batches_of(10)
    expected = train_with_torch(
        lambda xs: torch.optim.SGD(xs, 0.1), params, batches, clip=lambda xs: torch.nn.utils.clip_grad_norm_(xs, 0.05)
    )
    assert_trees_close(train(opt, params, batches), expected, 1e-5)


def not_blocks(path: str, leaf: torch.Tensor) -> str | None:
    return None if path.startswith("blocks") else "rest"


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", cases((SIZES[0], SIZES[-1]), SIZES))
@pytest.mark.parametrize("units", [None, not_blocks], ids=["default units", "replicated leaves"])
def test_clipped_training_is_the_same_on_shards(n, stage, units):
    opt = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(), opt, batches_of(3), [stage], [n], units=units)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", cases((SIZES[0], SIZES[-1]), SIZES))
@pytest.mark.parametrize("units", [None, lambda path, leaf: None if path != "c" else "c"], ids=["cut", "replicated"])
def test_clipped_training_of_tied_leaves_is_the_same_on_shards(n, stage, units):
    w = normal((5, 5), 0)
    params = {"a": w, "b": {"w": w, "v": normal((3,), 1)}, "c": normal((5,), 2)}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ p["a"]) @ p["b"]["w"].T + p["c"]).square().mean() + p["b"]["v"].square().sum()

    opt = optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(0.1, momentum=0.9))
    step = train_step_for(loss, opt)
    assert_equivalent(step, params, opt, batches_of(3), [stage], [n], units=units)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("value", [1e6, math.nan])
def test_poisoned_padding_never_affects_training(stage, value):
    opt = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
    batches, mesh = batches_of(3), fzero.mesh(dp=4)
    step = fzero.shard(train_step_for(loss_of, opt), stage, mesh)
    params, state = step.init(params_of(), opt)
    for batch in batches:
        params, state, _ = step(poison(params, value), poison(state, value), mesh.split(batch))
    assert_trees_close(step.gather(params), train(opt, params_of(), batches), 1e-12)


@pytest.mark.parametrize("name", TABLE)
def test_the_state_of_every_optimizer_counts_as_one(name):
    """It is thus recognised in place of parameters. A state without tensors is an empty tuple, as other trees are."""
    state = TABLE[name].optimizer.init(small_params())
    classes = {type(x) for x in (state, *(state if type(state) is tuple else ()))}
    assert is_opt_state(state) == any(kind.__name__.endswith("State") for kind in classes)
    assert not is_opt_state(small_params())


def test_every_optimizer_that_torch_has_too_is_in_the_torch_hints():
    classes = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    functions = {name: getattr(optim, name.lower()) for name in classes if name.lower() in optim.__all__}
    hinted = {name: f.__name__ for name, f in optim.torch_equivalents().items()}
    assert {name: f.__name__ for name, f in functions.items()} == hinted, "@torch_hints on each of them"


# Optimizers of others.


def rms_init(params: Any) -> Any:
    return tree.map(torch.ones_like, params)


def rms_update(grads: Any, state: Any, params: Any = None) -> Any:
    state = tree.map(lambda g, s: 0.9 * s + 0.1 * g * g, grads, state)
    return tree.map(lambda g, s: -0.01 * g / (s.sqrt() + 1e-3), grads, state), state


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", cases((SIZES[0], SIZES[-1]), SIZES))
def test_a_hand_written_optimizer_is_the_same_on_shards(n, stage):
    opt = Pair(rms_init, rms_update)
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(), opt, batches_of(3), [stage], [n])


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_hand_written_optimizer_in_a_chain_is_the_same_on_shards(stage):
    opt = optim.chain(optim.clip_by_global_norm(0.05), Pair(rms_init, rms_update))
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(), opt, batches_of(3), [stage], [3])


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_an_optimizer_unpacks_as_an_init_update_pair(stage):
    init, update = optim.adamw(1e-2)
    opt = Pair(init, update)
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(), opt, batches_of(2), [stage], [3])


THIRD_PARTY = {
    "sgd": lambda: torchopt.sgd(0.1),
    "own transforms": lambda: torchopt.chain(torchopt.transform.scale_by_adam(), torchopt.transform.scale(-1e-2)),
    "momentum": lambda: optim.leafwise(torchopt.sgd(0.1, momentum=0.9)),
    "adamw": lambda: optim.leafwise(torchopt.adamw(1e-2, weight_decay=0.1)),
    "chain": lambda: optim.leafwise(torchopt.chain(torchopt.adam(1e-2), torchopt.transform.scale(0.5))),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torchopt's addcmul_ under vmap
@pytest.mark.parametrize(
    "name,stage",
    cases(
        [(name, s) for i, name in enumerate(THIRD_PARTY) for s in (3 - i % 2,)],
        itertools.product(THIRD_PARTY, range(4)),
    ),
)
def test_torchopt_is_the_same_on_shards(name, stage):
    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_of)(params, batch)
        options = {} if isinstance(opt, optim.Optimizer) else {"inplace": False}
        updates, state = opt.update(grads, state, params=params, **options)
        return optim.apply_updates(params, updates), state, loss

    opt, batches, expected = THIRD_PARTY[name](), batches_of(3), params_of()
    state = opt.init(expected)
    for batch in batches:
        expected, state, _ = step(expected, state, batch)
    for n in SIZES:
        opt, mesh = THIRD_PARTY[name](), fzero.mesh(dp=n)
        sharded = fzero.shard(step, stage, mesh)
        params, state = sharded.init(params_of(), opt)
        for batch in batches:
            params, state, _ = sharded(params, state, mesh.split(batch))
        assert_trees_close(sharded.gather(params), expected, 1e-12, f"dp={n}")


def test_the_error_of_an_optimizer_that_flattens_trees_advises_leafwise():
    step = fzero.shard(train_step_for(loss_of, None), 2, fzero.mesh(dp=2))
    with pytest.raises(fzero.errors.DiffersByRankError) as caught:
        step.init(params_of(), torchopt.adamw(1e-2))
    assert "optim.leafwise(opt)" in caught.value.__notes__[0]

    def refuse(params: Any) -> Any:
        raise ValueError("the user's own error, in which something differs by rank")

    with pytest.raises(ValueError, match="the user's own error") as caught:
        step.init(params_of(), optim.Optimizer(refuse, optim.sgd(0.1).update, exact_on_shards=True))
    assert not any("leafwise" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_torchopt_in_fzero_chain_is_the_same_on_shards(stage):
    opt = optim.chain(optim.clip_by_global_norm(0.05), torchopt.sgd(0.1))
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(), opt, batches_of(3), [stage], [3])


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_torchopt_in_fzero_step_is_the_same_on_shards(stage):
    opt = torchopt.sgd(0.1)

    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_of)(params, batch)
        return (*fzero.transforms.step(opt)(params, grads, state), loss)

    assert_equivalent(step, params_of(), opt, batches_of(3), [stage], [3])
