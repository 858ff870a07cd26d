"""What is particular to one optimizer: masks, averages, hyperparameters in the state, norms of leaves."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero._torch import allocations
from fzero.testing import assert_equivalent, assert_trees_close, trees
from tests.helpers import ALL_STAGES, LEAST, cases, examples, train_step_for
from tests.optim.helpers import (
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
from tests.zero.helpers import loss_of_tree

ONE = [None, lambda path, leaf: "all"]  # unit rules


def biases(params: Any) -> Any:
    return tree.map(lambda p: p.ndim < 2, params)


# Norms of leaves.


def norms_by_hand(params: Any) -> Any:
    return tree.map(lambda x: x.double().square().sum().sqrt(), params)


def gathered_norms(params: Any, n: int, units: Any) -> Any:
    """The norms of a cut tree's leaves, one a leaf again; every element of a leaf must have the same."""
    program = fzero.mesh(dp=n).spmd(lambda t: fzero.gather(optim.leaf_norms(t)))
    norms = program(partition_simulated(params, n, units))
    assert all(x.numel() == 0 or (x == x.flatten()[0]).all() for x in tree.tensors(norms))
    return tree.map(lambda x, p: x.flatten()[0] if x.numel() else torch.zeros((), dtype=p.dtype), norms, params)


@examples(25, 100)
@given(params=trees(), n=st.integers(1, 8), rule=st.integers(0, 2), tie=st.booleans())
def test_leaf_norms_are_the_same_on_shards(params, n, rule, tie):
    params = {**params, "again": params["first"]} if tie else params
    units = [None, lambda path, leaf: "all", lambda path, leaf: None if len(path) % 2 else "odd"][rule]
    expected = norms_by_hand(params)
    assert_trees_close(optim.leaf_norms(params), expected, 1e-14)
    assert_trees_close(gathered_norms(params, n, units), expected, 1e-14)


@pytest.mark.parametrize("value", [1e6, math.inf, math.nan])
@pytest.mark.parametrize("n", SIZES)
def test_padding_never_counts_in_leaf_norms(n, value):
    boxes = poison(partition_simulated(params_of(), n), value)
    norms = fzero.mesh(dp=n).spmd(lambda t: fzero.gather(optim.leaf_norms(t)))(boxes)
    expected = tree.map(lambda x, p: x.expand(p.shape), norms_by_hand(params_of()), params_of())
    assert_trees_close(norms, expected, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_leaf_norms_sum_in_float32_at_least(n, dtype):
    params = {"big": torch.full((300,), 300.0, dtype=dtype), "small": torch.full((5,), 2.0**-13, dtype=dtype)}
    norms = fzero.mesh(dp=n).spmd(lambda t: fzero.gather(optim.leaf_norms(fzero.partition(t, units=ONE[1]))))(params)
    for name, value in (("big", 300 * math.sqrt(300)), ("small", 2.0**-13 * math.sqrt(5))):
        for norm in (optim.leaf_norms(params)[name], norms[name].flatten()[0]):
            torch.testing.assert_close(
                norm, torch.tensor(value), rtol=1e-3 if dtype == torch.bfloat16 else 1e-6, atol=0
            )


@pytest.mark.slow
def test_leaf_norms_lose_no_small_addends():
    """Added one by one, float32 would stop at 2^24 of the 5 x 2^22 ones."""
    norms = fzero.mesh(dp=1).spmd(lambda t: optim.leaf_norms(fzero.partition(t)))({"w": torch.ones(5 * 2**22)})
    torch.testing.assert_close(norms["w"].data[0, 0], torch.tensor(math.sqrt(5) * 2**11), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "opt,numbers", [(optim.lamb(1e-2), 2), (optim.clip_by_block_rms(0.1), 1)], ids=["lamb", "clip_by_block_rms"]
)
def test_leaf_norms_of_the_whole_tree_take_one_psum(opt, numbers):
    """However many units: two numbers a leaf for lamb (the parameter's norm and its step's), one for a clip."""
    mesh, params = fzero.mesh(dp=4), params_of()
    step = fzero.shard(train_step_for(loss_of, opt), 3, mesh)
    state = step.init(params, opt)
    with fzero.collectives.record() as log:
        step(*state, mesh.split(batches_of(1)[0]))
    sizes = [event.elements for event in log.other_events if event.elements > 2]  # without the loss's mean
    assert sizes == [2 * numbers * len(tree.tensors(params))]  # an all_reduce counts twice


@pytest.mark.parametrize("stage", [0, 3])
def test_a_leaf_of_zeros_or_with_a_zero_step_keeps_its_step(stage):
    """A bias that starts at zero would stay there for ever."""
    params = {"zeros": torch.zeros(3), "still": torch.ones(3), "w": torch.full((4,), 2.0)}
    weights = {"zeros": 1.0, "still": 0.0, "w": 1.0}
    opt = optim.chain(optim.scale_by_trust_ratio(), optim.scale_by_learning_rate(1.0))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weights[k] * (p[k] * x.mean()).sum() for k in p]).sum()

    step = fzero.shard(train_step_for(loss, opt), stage, fzero.mesh(dp=2), units=ONE[1])
    new, _, _ = step(*step.init(params, opt), step.mesh.split(torch.ones(2)))
    expected = {"zeros": -torch.ones(3), "still": torch.ones(3), "w": torch.zeros(4)}
    assert_trees_close(step.gather(new), expected, 1e-6)


@pytest.mark.parametrize("units", ONE, ids=["default units", "one unit"])
@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_masked_leaves_pass_through_and_their_state_is_not_touched(stage, units):
    """One shard may hold leaves of both kinds."""
    opt = optim.masked(optim.adam(1e-2), matrices)
    mesh = fzero.mesh(dp=3)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = fzero.value_and_grad(loss_of)(params, batch)
        updates, state = opt.update(grads, state, params)
        rest = tree.map(lambda u, g: u - g, updates, grads)
        return optim.apply_updates(params, updates), state, fzero.gather(rest)

    step = fzero.shard(train_step, stage, mesh, units=units)
    params, state = step.init(params_of(), opt)
    for batch in batches_of(2):
        params, state, rest = step(params, state, mesh.split(batch))
    for moment in (state.mu, state.nu):
        for x in tree.tensors(step.gather(moment)):
            assert x.any() == (x.ndim >= 2)
    for x in tree.tensors(rest):
        assert x.any() == (x.ndim >= 2)


def test_a_masked_optimizer_without_state_starts_without_memory():
    """The parameter groups of a Trainer are such: zeros beside the state would be a second state for a moment."""
    params, mask = {"w": torch.ones(1000), "b": torch.ones(1000)}, {"w": True, "b": False}
    with allocations() as memory:
        optim.masked(optim.scale_by_learning_rate(lambda count: 0.1 / count), mask).init(params)
    assert (memory.peak or 0) < 100


def test_a_masked_optimizer_ignores_nan_in_other_leaves():
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    grads = {"w": torch.ones(2, 2), "b": torch.full((2,), math.nan)}
    opt = optim.masked(optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1)), matrices)

    def update(params: Any, grads: Any) -> Any:
        sharded = [fzero.partition(x, units=lambda path, leaf: "all") for x in (params, grads)]
        return fzero.gather(opt.update(sharded[1], opt.init(sharded[0]), sharded[0])[0])

    for updates in (opt.update(grads, opt.init(params), params)[0], fzero.mesh(dp=2).spmd(update)(params, grads)):
        torch.testing.assert_close(updates["w"], torch.full((2, 2), -0.1))
        assert updates["b"].isnan().all()


def test_a_masked_optimizer_sees_zeros_for_the_other_parameters():
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    opt = optim.masked(optim.params_ema(0.5), matrices)
    _, state = opt.update(params, opt.init(params), params)
    assert state.ema["b"].tolist() == [0, 0] and state.ema["w"].tolist() == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_chained_masked_links_equal_torchs_param_groups(stage):
    """One scale_by_adam, and rates and decays by mask: docs/recipes.md has it for parameter groups."""
    opt = optim.chain(
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1, mask=matrices),
        optim.masked(optim.scale_by_learning_rate(1e-3), matrices),
        optim.masked(optim.scale_by_learning_rate(1e-2), biases),
    )
    params = {"w": normal((4, 3), 0), "b": normal((3,), 1)}
    x = normal((6, 4), 2)

    def loss_fn(params: Any, x: Any) -> torch.Tensor:
        return (x @ params["w"] + params["b"]).square().mean()

    step = fzero.shard(train_step_for(loss_fn, opt), stage, fzero.mesh(dp=2))
    state = step.init(params, opt)
    moments_and_count = [n.numel() for n in tree.tensors(step.gather(state[1]))]
    assert sum(moments_and_count) == 2 * 15 + 1
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    groups = [
        {"params": [leaves["w"]], "lr": 1e-3, "weight_decay": 0.1},
        {"params": [leaves["b"]], "lr": 1e-2, "weight_decay": 0.0},
    ]
    of_torch = torch.optim.AdamW(groups)
    for _ in range(3):
        *state, _ = step(*state, step.mesh.split(x))
        of_torch.zero_grad()
        loss_fn(leaves, x).backward()
        of_torch.step()
    assert_trees_close(step.gather(state[0]), {k: p.detach() for k, p in leaves.items()})


def test_masks_that_are_complements_make_parameter_groups():
    """Two masked optimizers in a chain, each on its leaves: what torch calls parameter groups."""
    opt = optim.chain(
        optim.masked(optim.scale_by_adam(), matrices),
        optim.masked(optim.scale(0.5), biases),
        optim.scale_by_learning_rate(1e-2),
    )
    params, batches = params_of(), batches_of(3)
    grads = tree.map(torch.ones_like, params)
    updates, _ = opt.update(grads, opt.init(params), params)
    for u in tree.tensors(updates):
        torch.testing.assert_close(u, torch.full_like(u, -1e-2 if u.ndim >= 2 else -0.5e-2))
    assert all(x.isfinite().all() for x in tree.tensors(train(opt, params, batches)))


def test_a_mask_of_another_structure_or_split_over_a_tie_names_the_leaf():
    w = torch.ones(2)
    with pytest.raises(ValueError, match="'b'"):
        optim.masked(optim.sgd(0.1), {"w": True}).init({"w": w, "b": torch.ones(2)})
    with pytest.raises(ValueError, match="'a' and 'b' are tied"):
        optim.masked(optim.sgd(0.1), {"a": True, "b": False}).init({"a": w, "b": w})


def test_masked_is_exact_on_shards_if_its_optimizer_is():
    whole = optim.Optimizer(optim.sgd(0.1).init, optim.sgd(0.1).update, exact_on_shards=False)
    assert optim.masked(optim.sgd(0.1), matrices).exact_on_shards is True
    assert optim.masked(whole, matrices).exact_on_shards is False


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_averaged_parameters_equal_torch_averaged_model(stage):
    decay = 0.8
    module = torch.nn.ParameterList([normal((5, 3), 0), normal((3,), 1)])
    theirs = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    theirs.update_parameters(module)  # its first call copies: the initial parameters
    sgd = torch.optim.SGD(module.parameters(), 0.1)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params[0]) + params[1]).square().mean()

    opt, mesh = optim.chain(optim.sgd(0.1), optim.params_ema(decay)), fzero.mesh(dp=3)
    step = fzero.shard(train_step_for(loss, opt), stage, mesh)
    params, state = step.init([p.detach().clone() for p in module], opt)
    for batch in batches_of(5):
        params, state, _ = step(params, state, mesh.split(batch))
        sgd.zero_grad()
        loss(list(module), batch).backward()
        sgd.step()
        theirs.update_parameters(module)
    average = step.gather(state[-1].ema)
    assert_trees_close(average, [p.detach() for p in theirs.module], 1e-12)
    whole = sum(x.numel() for x in average)
    assert step.state_bytes(state[-1].ema) == 8 * (whole if stage == 0 else 5 + 1)  # 15 and 3 elements on 3 ranks


@given(decay=st.floats(0, 0.999), steps=st.integers(1, 5))
def test_a_debiased_average_is_the_weighted_mean_of_all_parameters_so_far(decay, steps):
    records = [{"w": normal((4,), i)} for i in range(steps)]
    weights = torch.tensor([decay ** (steps - 1 - i) for i in range(steps)], dtype=torch.float64)
    expected = (weights / weights.sum()) @ torch.stack([x["w"] for x in records])

    plain, tail = optim.ema(decay), optim.params_ema(decay, debias=True)
    params = {"w": torch.full((4,), 1e6, dtype=torch.float64)}  # forgotten
    state, tail_state, average = plain.init(params), tail.init(params), None
    for x in records:
        average, state = plain.update(x, state)
        updates = tree.map(lambda a, b: a - b, x, params)
        passed, tail_state = tail.update(updates, tail_state, params)
        assert passed is updates
    torch.testing.assert_close(average["w"], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(tail_state.ema["w"], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_average_of_half_precision_parameters_may_be_float32(stage):
    opt = optim.chain(optim.sgd(0.1), optim.params_ema(0.999, accumulator_dtype=torch.float32))
    params, mesh = {"w": torch.ones(5, dtype=torch.bfloat16)}, fzero.mesh(dp=2)
    step = fzero.shard(train_step_for(lambda p, x: (p["w"] * x).mean(), opt), stage, mesh)
    params, state = step.init(params, opt)
    for _ in range(3):
        params, state, _ = step(params, state, mesh.split(torch.ones(4, 5, dtype=torch.bfloat16)))
    average = step.gather(state[-1].ema)["w"]
    assert average.dtype == torch.float32 and (average < 1).all() and (average > 0.9995).all()
    average, state = optim.ema(0.9, accumulator_dtype=torch.float32).update(
        {"w": torch.ones(2, dtype=torch.bfloat16)}, optim.EmaState(torch.tensor(0), {"w": torch.zeros(2)})
    )
    assert (average["w"].dtype, state.ema["w"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "opt",
    [
        optim.params_ema(0.9),
        optim.scale_by_trust_ratio(),
        optim.adafactor(),
        optim.add_decayed_weights(0.1),
        optim.lion(0.1),
    ],
)
def test_an_update_without_the_parameters_that_it_needs_is_refused_with_a_remedy(opt):
    params = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"opt.update\(grads, state, params\)"):
        opt.update(params, opt.init(params))


def test_an_optimizer_without_decay_needs_no_parameters():
    grads = {"w": torch.ones(2)}
    assert optim.add_decayed_weights(0.0).update(grads, ())[0] is grads
    assert optim.lion(0.1, weight_decay=0).update(grads, optim.lion(0.1).init(grads))[0]["w"].tolist() != [0, 0]


# Hyperparameters in the state.


def make_clipped(learning_rate: Any, max_norm: Any, b1: Any = 0.9, weight_decay: Any = 0.0) -> optim.Optimizer:
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.adamw(learning_rate, b1, weight_decay=weight_decay))


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_jitted_step_takes_new_hyperparameters_without_another_trace(stage):
    opt, mesh = optim.inject_hyperparams(make_clipped)(0.1, 1.0), fzero.mesh(dp=2)
    step = fzero.shard(train_step_for(loss_of, opt), stage, mesh)
    jitted = fzero.jit(step, backend="fx", **LEAST)
    params, state = jitted.init(params_of(), opt)
    plain, plain_state = params_of(), make_clipped(0.1, 1.0).init(params_of())
    changes = [{}, {"learning_rate": 0.01, "max_norm": 0.05}, {"b1": 0.5, "weight_decay": 0.3}]
    values = {"learning_rate": 0.1, "max_norm": 1.0}
    for batch, change in zip(batches_of(3), changes, strict=True):
        for name, value in change.items():
            state.hyperparams[name].fill_(value)
        values |= change
        params, state, _ = jitted(params, state, mesh.split(batch))
        # the same with numbers, made anew
        _, grads = fzero.value_and_grad(loss_of)(plain, batch)
        updates, plain_state = make_clipped(**values).update(grads, plain_state, plain)
        plain = optim.apply_updates(plain, updates)
    assert jitted.traces == 1
    assert_trees_close(step.gather(params), plain, 1e-12)
    assert {k: v.item() for k, v in state.hyperparams.items()} == values


def test_a_scheduled_hyperparameter_is_in_the_state_to_read():
    opt = optim.inject_hyperparams(optim.sgd)(optim.linear(0.5, 0.0, 2), momentum=lambda count: 0.25)
    state, grads = opt.init({"w": torch.ones(())}), {"w": torch.ones(())}
    records = []
    for _ in range(3):
        _, state = opt.update(grads, state)
        records.append(state.hyperparams["learning_rate"].item())
    assert records == [0.5, 0.25, 0.0]
    assert state.hyperparams["momentum"].item() == 0.25
    assert {v.dtype for v in state.hyperparams.values()} == {torch.float64}
    assert set(state.hyperparams) == {"learning_rate", "momentum"}  # nesterov is a bool
    assert int(state.count) == int(state.inner_state.count) == 3


def test_a_tensor_is_a_hyperparameter_and_is_copied():
    rate = torch.tensor(0.5)
    state = optim.inject_hyperparams(optim.sgd)(rate).init({})
    rate.fill_(7)
    assert state.hyperparams["learning_rate"].item() == 0.5


def test_any_injected_number_gives_the_numbers_of_the_plain_optimizer():
    params, batches = params_of(), batches_of(3)
    for factory, arguments in [
        (optim.sgd, {"learning_rate": 0.1, "momentum": 0.9}),
        (optim.adam, {"learning_rate": 0.1, "b1": 0.7, "b2": 0.8, "eps": 1e-3}),
        (optim.adagrad, {"learning_rate": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3}),
        (optim.adafactor, {"learning_rate": 0.1, "eps": 1e-3, "weight_decay": 0.2}),
        (optim.lion, {"learning_rate": 0.1, "b1": 0.7, "b2": 0.8, "weight_decay": 0.2}),
        (optim.lamb, {"learning_rate": 0.1, "b1": 0.7, "b2": 0.8, "eps": 1e-3, "weight_decay": 0.2}),
        (optim.clip, {"max_delta": 0.01}),
        (optim.clip_by_block_rms, {"threshold": 0.01}),
        (optim.clip_by_global_norm, {"max_norm": 0.01}),
        (optim.ema, {"decay": 0.3}),
        (optim.params_ema, {"decay": 0.3}),
        (optim.scale, {"factor": -0.3}),
    ]:
        injected, plain = optim.inject_hyperparams(factory)(**arguments), factory(**arguments)
        assert_trees_close(train(injected, params, batches), train(plain, params, batches), 1e-12)
        assert set(injected.init(params).hyperparams) >= set(arguments)


def test_the_number_of_muons_iterations_is_no_tensor_of_the_state():
    params, batches, arguments = params_of(), batches_of(3), {"ns_steps": 3, "fallback": optim.sgd(0.1)}
    injected, plain = optim.inject_hyperparams(optim.muon)(0.1, **arguments), optim.muon(0.1, **arguments)
    assert_trees_close(train(injected, params, batches), train(plain, params, batches), 1e-12)
    hyperparams = injected.init(params).hyperparams
    assert "learning_rate" in hyperparams and "ns_steps" not in hyperparams


def test_the_error_of_inject_hyperparams_names_its_wrong_argument():
    with pytest.raises(ValueError, match=r"static_args=\['masks'\]: expected some of the arguments of .*adamw"):
        optim.inject_hyperparams(optim.adamw, static_args="masks")
    with pytest.raises(ValueError, match=r'\'mask\': its schedule returned .*static_args=\("mask",\)'):
        optim.inject_hyperparams(optim.adamw)(0.1, mask=lambda params: {"w": True})


def test_injected_optimizers_are_exact_on_shards_if_their_optimizer_is():
    def whole(learning_rate: Any) -> optim.Optimizer:
        return optim.Optimizer(optim.sgd(0.1).init, optim.sgd(0.1).update, exact_on_shards=False)

    assert optim.inject_hyperparams(optim.sgd)(0.1).exact_on_shards is True
    assert optim.inject_hyperparams(whole)(0.1).exact_on_shards is False


@examples(10, 20)
@given(
    rate=st.floats(1e-3, 1.5),  # from 1/sqrt(3) on the bound on the rate tells
    decay_rate=st.floats(0.1, 1),
    eps=st.sampled_from([None, 1e-8, 0.1]),
    eps_scale=st.floats(1e-3, 2),
    threshold=st.floats(1, 2),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_any_hyperparameters_equal_torch_adafactor(rate, decay_rate, eps, eps_scale, threshold, decay):
    opt = optim.adafactor(rate, decay_rate, eps, eps_scale, threshold, decay)
    theirs = lambda xs: torch.optim.Adafactor(xs, rate, -decay_rate, (eps, eps_scale), threshold, decay)  # noqa: E731
    params, batches = {**params_of(), "stack": normal((2, 3, 4), 9)}, batches_of(3)

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(params, batch) + torch.tanh(params["stack"] * batch[0, 0]).square().sum()

    assert_trees_close(train(opt, params, batches, loss), train_with_torch(theirs, params, batches, loss=loss), 1e-9)


@pytest.mark.parametrize("n", cases((1, 5), [3]))
@pytest.mark.parametrize("units", ONE, ids=["default units", "one unit"])
def test_adafactor_of_stacked_matrices_is_the_same_on_shards(n, units):
    """The columns of each matrix of a leaf `[.., r, c]` are its own."""
    params = {"stack": normal((2, 3, 4), 0), "b": normal((5,), 1), "deep": normal((2, 1, 2, 3), 2), "s": normal((), 3)}

    opt, batches = optim.adafactor(0.1), [{"x": normal((2 * n,), 10 + i)} for i in range(3)]
    assert_equivalent(train_step_for(loss_of_tree, opt), params, opt, batches, [1, 3], [n], units=units)


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_the_state_of_adafactor_is_sublinear_and_ties_last(stage):
    w = normal((50, 40), 0)
    params = {"a": w, "b": [w, normal((7,), 1)]}
    step = fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(dp=4), units=ONE[1])
    _, state = step.init(params, optim.adafactor())
    assert step.state_bytes(state.rows, state.columns) == 8 * (50 + 40 + 7)
    assert state.rows["a"] is state.rows["b"][0] and state.columns["b"][1] is None


def test_an_element_without_gradient_does_not_move_under_adagrad():
    """In float16 its eps is zero, and 0 / 0 would be nan."""
    params = {"w": torch.ones(2, dtype=torch.float16)}
    opt = optim.adagrad(0.5)
    updates, _ = opt.update({"w": torch.tensor([0.0, 1.0], dtype=torch.float16)}, opt.init(params), params)
    assert updates["w"].tolist() == [0.0, -0.5]
