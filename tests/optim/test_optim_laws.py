"""One table of optimizers, and the laws that each obeys: torch's or optax's numbers, on every layout, jitted too."""

import functools
import inspect
import json
import math
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, testing, tree
from fzero._dtypes import sum_dtype
from fzero.testing import assert_equivalent, assert_trees_close, stages, trees, world_sizes
from tests.helpers import LEAST, cases, either, examples, train_step_for
from tests.mutants import MUTANTS
from tests.optim.helpers import RTOL, batches_of, matrices, normal, params_of, poison, train, train_with_torch
from tests.optim.pages import whole_optimizers
from tests.optim.table import FALLING, TABLE, biases, small_loss, small_params
from tests.zero.helpers import RULES, loss_of_tree

OPTAX = json.loads((pathlib.Path(__file__).parent / "fixtures" / "optax.json").read_text())


# The same, where gradients near zero may not be blown up to a full step: what rounds differently must stay small.
EXACT = {
    **{
        name: row.optimizer
        for name, row in TABLE.items()
        if row.optax != "lamb" and name not in ("masked lamb", "lars")
    },
    "adam": optim.adam(1e-2, eps=1e-3),
    "adamw": optim.adamw(1e-2, eps=1e-3, weight_decay=0.1),
    "lamb": optim.lamb(1e-2, eps=1e-3, weight_decay=0.1),
    "masked lamb": optim.masked(optim.lamb(1e-2, eps=1e-3, weight_decay=0.1, mask=matrices), biases),
}

every = pytest.mark.parametrize("name", TABLE)
# For laws that take long: each has one of every other kind, and in `make test-all` all.
KINDS = ("nesterov", "adamw, masked decay", "adafactor", "adagrad", "lion", "lamb, masked decay", "lars")
KINDS += ("clip_by_block_rms", "clip_by_global_norm", "masked adam", "masked clipping", "frozen leaves")
KINDS += ("injected adamw", "averaged gradients", "averaged parameters, debiased", "muon", "whole", "links")
half, other_half = [pytest.mark.parametrize("name", cases(KINDS[i::2], TABLE)) for i in (0, 1)]


RETURNS = (optim.Optimizer, "Optimizer", "optim.Optimizer")  # an annotation may be a string
# Functions that return an optimizer but need an argument that the laws do not have: which, and where it is tested.
WITHOUT_ROW = {
    "clip_by_expert": "leaves with experts: test_experts.py",
    "dynamic_loss_scale": "another optimizer, in half precision: test_loss_scaling.py",
    "leafwise": "a function of one leaf: test_optim.py",
    "master_weights": "another optimizer, in half precision: test_loss_scaling.py",
    "offload": "another optimizer, in host memory: test_offload.py",
    "stochastic_rounding": "another optimizer, in half precision: test_stochastic_rounding.py",
    "static_loss_scale": "another optimizer, in half precision: test_loss_scaling.py",
}


def test_the_table_has_every_public_optimizer():
    """An optimizer that is not in the table obeys no law."""
    public = {name: getattr(optim, name) for name in optim.__all__}
    functions = {name: f for name, f in public.items() if inspect.isfunction(f)}
    makers = {name for name, f in functions.items() if inspect.signature(f).return_annotation in RETURNS}
    table = pathlib.Path(__file__).with_name("table.py")
    text = table.read_text()
    with_row = {name for name in makers if f"optim.{name}(" in text}
    assert {"adamw", "chain", "scale_by_lion"} <= makers, "no longer found by its annotation"
    missing = sorted(makers - with_row - {*WITHOUT_ROW})
    assert not missing, f"fzero.optim has {missing}: add a row to TABLE in {table}"
    unnamed = sorted({*whole_optimizers()} - {*TABLE})
    assert not unnamed, f"TABLE in {table}: a row with the name of each of {unnamed}"
    assert not {*WITHOUT_ROW} & with_row | {*WITHOUT_ROW} - makers, "WITHOUT_ROW: remove what has a row or is gone"


def test_random_tests_draw_every_optimizer(monkeypatch):
    names, made = whole_optimizers(), set()
    assert {"adamw", "sgd", "muon"} <= {*names}, "no longer found by the first argument"

    def note_calls(make: Any) -> Any:
        @functools.wraps(make)
        def note(*args: Any, **kwargs: Any) -> Any:
            made.add(make.__name__)
            return make(*args, **kwargs)

        return note

    for name in names:
        monkeypatch.setattr(optim, name, note_calls(getattr(optim, name)))
    testing.optimizers()
    assert not {*names} - made, f"optimizers in fzero/testing.py: add {sorted({*names} - made)}"


def test_every_optimizer_has_a_planted_fault():
    planted = {mutant.symbol.split(".")[0] for mutant in MUTANTS if mutant.file.startswith("optim/")}
    missing = sorted({*whole_optimizers()} - planted)
    assert not missing, f"tests/mutants/optim.py: plant a fault in {missing}"


# The numbers of others.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.torch])
def test_ten_steps_of_each_optimizer_equal_torch_optim(name, dtype):
    params, batches = params_of(dtype), batches_of(10, dtype)
    expected = train_with_torch(TABLE[name].torch, params, batches)
    assert_trees_close(train(TABLE[name].optimizer, params, batches), expected, RTOL[dtype])


def count_stored(values: Any, dtype: torch.dtype) -> Any:
    def read(x: Any, like: Any) -> Any:
        if isinstance(like, dict):
            return {k: read(x[k], v) for k, v in like.items()}
        if isinstance(like, list):
            return [read(a, b) for a, b in zip(x, like, strict=True)]
        return None if x is None else torch.tensor(x, dtype=dtype)

    return read(values, {"w": 0, "b": 0, "s": 0, "rest": [0, 0]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.optax])
def test_ten_steps_of_each_optimizer_equal_optax(name, dtype):
    opt, params = TABLE[name].optimizer, count_stored(OPTAX["params"], dtype)
    state = opt.init(params)
    for grads in OPTAX["grads"]:
        updates, state = opt.update(count_stored(grads, dtype), state, params)
        params = optim.apply_updates(params, updates)
    assert_trees_close(params, count_stored(OPTAX["trained"][TABLE[name].optax], dtype), RTOL[dtype])


def test_every_optax_fixture_is_used():
    assert {row.optax for row in TABLE.values() if row.optax} == set(OPTAX["trained"])


SCHEDULES = {
    "constant": optim.constant(0.3),
    "linear": optim.linear(0.3, 0.1, 7),
    "warmup_linear": optim.warmup_linear(0.3, 5, 12, 0.1),
    "warmup_cosine": optim.warmup_cosine(0.3, 5, 12, 0.1),
    "exponential_decay": optim.exponential_decay(0.3, 4, 0.7),
    "exponential_decay, stairs": optim.exponential_decay(0.3, 4, 0.7, staircase=True, end=0.1),
    "exponential_decay, growing": optim.exponential_decay(0.3, 4, 1.3, end=0.8),
    "piecewise_constant": optim.piecewise_constant(0.3, {5: 0.5, 9: 0.1}),
    "join_schedules": optim.join_schedules(
        [optim.linear(0, 1, 5), optim.constant(1.0), optim.exponential_decay(1.0, 3, 0.5)], [5, 9]
    ),
}


@pytest.mark.parametrize("name", OPTAX["values"])
def test_learning_rate_schedules_equal_optax(name):
    values = [SCHEDULES[name](torch.tensor(t)) for t in range(20)]
    assert {(v.dtype, v.ndim) for v in values} == {(torch.float64, 0)}
    assert [v.item() for v in values] == pytest.approx(OPTAX["values"][name], rel=1e-12, abs=1e-15)


# The same on every layout.


@half
def test_every_stage_and_world_size_equals_unsharded_training(name):
    opt = TABLE[name].optimizer
    step = train_step_for(small_loss, opt)
    assert_equivalent(step, small_params(), opt, batches_of(2), world_sizes=either((4,), (1, 4)))


@pytest.mark.parametrize("name", cases(["lars"], TABLE))
@pytest.mark.parametrize("n", [8, 16])
def test_ranks_that_hold_only_padding_train_as_one_rank(name, n):
    """Of a unit of 13 elements, or of one, most of 16 ranks have nothing but padding."""
    opt, batches = TABLE[name].optimizer, [normal((16, 5), 100 + i) for i in range(2)]
    assert_equivalent(train_step_for(small_loss, opt), small_params(), opt, batches, (3,), (n,))


@examples(3, 80)
@given(
    name=st.sampled_from(sorted(EXACT)),
    params=trees(),
    rule=st.sampled_from([None, *sorted(RULES)]),
    tie=st.booleans(),
    stage=stages(),
    n=world_sizes(either(8, 16)),
)
@example("lamb", {"first": torch.ones(()), "rest": [torch.ones(0), {"a": torch.ones(7)}]}, "one unit", True, 3, 8)
@example("masked adam", {"first": torch.ones(5), "rest": [torch.ones(3, 3), None]}, "one unit", True, 1, 4)
def test_every_tree_and_unit_rule_equals_unsharded_training(name, params, rule, tie, stage, n):
    params = tree.map(lambda x: x.double(), params)
    if tie:
        params = {**params, "again": params["first"]}
    opt, batches = EXACT[name], [{"x": torch.linspace(-1, 1 + i, n * 2, dtype=torch.float64)} for i in range(3)]
    step = train_step_for(loss_of_tree, opt)
    assert_equivalent(step, params, opt, batches, (stage,), (n,), units=rule and RULES[rule])


@half
def test_poisoned_padding_never_affects_training(name):
    batches, mesh, opt = batches_of(2), fzero.mesh(dp=4), TABLE[name].optimizer
    step = fzero.shard(train_step_for(small_loss, opt), 3, mesh)
    params, state = step.init(small_params(), opt)
    for batch in batches:
        params, state, _ = step(poison(params, math.nan), poison(state, math.nan), mesh.split(batch))
    assert_trees_close(step.gather(params), train(opt, small_params(), batches, small_loss), 1e-12)


@other_half
def test_a_jitted_step_equals_the_eager_one_bitwise(name):
    opt, mesh, params = TABLE[name].optimizer, fzero.mesh(dp=2), small_params()
    step = fzero.shard(train_step_for(small_loss, opt), 3, mesh, units=RULES["one unit"])
    jitted = fzero.jit(step, backend="fx", **LEAST)
    eager, fast = step.init(params, opt), jitted.init(params, opt)
    for batch in batches_of(2):
        eager, fast = step(*eager[:2], mesh.split(batch)), jitted(*fast[:2], mesh.split(batch))
    assert jitted.traces == 1
    assert_trees_close(fast, eager, 0.0)


# Dtypes, purity, arguments.


@pytest.mark.parametrize("dtype", cases([torch.bfloat16], [torch.float16, torch.float32, torch.float64]), ids=str)
@every
def test_parameters_and_state_keep_their_dtype(name, dtype):
    opt = optim.chain(optim.clip_by_global_norm(0.5), TABLE[name].optimizer)
    params = params_of(dtype)
    state = opt.init(params)
    updates, new_state = opt.update(tree.map(torch.ones_like, params), state, params)
    new = optim.apply_updates(params, updates)
    for before, after in [(params, updates), (params, new), (state, new_state)]:
        assert [x.dtype for x in tree.tensors(before)] == [x.dtype for x in tree.tensors(after)]
    sized = [x.dtype for x in tree.tensors(state) if x.ndim]
    codes = {"8 bits": torch.uint8, "16 bits": torch.bfloat16}.get(name.partition(" in ")[2])
    own = {codes, sum_dtype(dtype)} if codes else {dtype}
    assert set(sized) <= own, "the state of an element has the element's dtype"
    assert {x.dtype for x in tree.tensors(state)} <= {*own, torch.int64, torch.float64}


@other_half
def test_training_in_half_precision_follows_float64(name):
    params = count_stored(OPTAX["params"], torch.bfloat16)
    trained = []
    for dtype in (torch.bfloat16, torch.float64):
        opt, new = TABLE[name].optimizer, tree.map(lambda x, dtype=dtype: x.to(dtype), params)
        state = opt.init(new)
        for grads in OPTAX["grads"][:3]:
            updates, state = opt.update(count_stored(grads, dtype), state, new)
            new = optim.apply_updates(new, updates)
        trained.append(tree.map(lambda x: x.double(), new))
    assert_trees_close(*trained, 0.02)


@every
def test_optimizer_updates_change_none_of_their_arguments(name):
    opt, params = TABLE[name].optimizer, params_of()
    arguments = (tree.map(torch.ones_like, params), opt.init(params), params)
    before = tree.map(torch.clone, arguments)
    opt.update(*arguments)
    assert_trees_close(arguments, before, 0.0)


@every
@pytest.mark.parametrize("stage", cases([2], [0]))
def test_tied_leaves_stay_tied(name, stage):
    w, opt = normal((4, 3), 0), TABLE[name].optimizer
    step = fzero.shard(train_step_for(loss_of_tree, opt), stage, fzero.mesh(dp=2), units=RULES["one unit"])
    state = step.init({"a": w, "b": [w, normal((3,), 1)]}, opt)
    new, state, _ = step(*state, step.mesh.split({"x": torch.ones(2, dtype=torch.float64)}))
    assert new["a"] is new["b"][0]
    for x in tree.tensors(state):
        assert x.numel() < 24, "a tied leaf has one state"


@every
def test_state_shares_no_memory_with_the_parameters(name):
    """A jitted step writes both anew, each in its own memory."""
    params = params_of()
    lent = {x.untyped_storage().data_ptr() for x in tree.tensors(params)}
    state = [x for x in tree.tensors(TABLE[name].optimizer.init(params)) if x.numel()]
    pointers = [x.untyped_storage().data_ptr() for x in state]
    assert not lent & set(pointers) and len(set(pointers)) == len(pointers)


@every
def test_every_optimizer_declares_that_it_runs_on_shards(name):
    assert TABLE[name].optimizer.exact_on_shards is True


BAD = [
    (optim.sgd, {"learning_rate": -0.1}, "learning_rate=-0.1: expected a number >= 0"),
    (optim.sgd, {"learning_rate": math.nan}, "learning_rate=nan: expected a number >= 0"),
    (optim.sgd, {"learning_rate": 0.1, "momentum": -1}, "momentum=-1: expected a number >= 0"),
    (optim.adam, {"learning_rate": "fast"}, "learning_rate='fast': expected a number >= 0"),
    (optim.adam, {"learning_rate": 0.1, "b1": 1.0}, r"b1=1.0: expected a number in \[0, 1\)"),
    (optim.adamw, {"learning_rate": 0.1, "b2": -0.1}, r"b2=-0.1: expected a number in \[0, 1\)"),
    (optim.adamw, {"learning_rate": 0.1, "eps": -1.0}, "eps=-1.0: expected a number >= 0"),
    (optim.adamw, {"learning_rate": 0.1, "weight_decay": -1.0}, "weight_decay=-1.0: expected a number >= 0"),
    (optim.adamw, {"learning_rate": 0.1, "weight_decay": FALLING}, "weight_decay=.*see optim.inject_hyperparams"),
    (optim.scale_by_adam, {"b1": 2}, r"b1=2: expected a number in \[0, 1\)"),
    (optim.scale_by_adam, {"eps": math.inf}, "eps=inf: expected a number >= 0"),
    (optim.adafactor, {"learning_rate": -1}, "learning_rate=-1: expected a number >= 0"),
    (optim.adafactor, {"decay_rate": -0.8}, "decay_rate=-0.8: expected a number >= 0"),
    (optim.adafactor, {"eps": -1}, "eps=-1: expected a number >= 0"),
    (optim.adafactor, {"eps_scale": -1}, "eps_scale=-1: expected a number >= 0"),
    (optim.adafactor, {"clipping_threshold": 0}, "clipping_threshold=0: expected a positive number"),
    (optim.adafactor, {"weight_decay": -1}, "weight_decay=-1: expected a number >= 0"),
    (optim.adagrad, {"learning_rate": -1}, "learning_rate=-1: expected a number >= 0"),
    (optim.adagrad, {"learning_rate": 1, "eps": -1}, "eps=-1: expected a number >= 0"),
    (
        optim.adagrad,
        {"learning_rate": 1, "initial_accumulator_value": -1},
        "initial_accumulator_value=-1: expected a number >= 0",
    ),
    (optim.lion, {"learning_rate": -1}, "learning_rate=-1: expected a number >= 0"),
    (optim.lion, {"learning_rate": 1, "b1": 1}, r"b1=1: expected a number in \[0, 1\)"),
    (optim.scale_by_lion, {"b2": 1}, r"b2=1: expected a number in \[0, 1\)"),
    (optim.lamb, {"learning_rate": -1}, "learning_rate=-1: expected a number >= 0"),
    (optim.lamb, {"learning_rate": 1, "weight_decay": -1}, "weight_decay=-1: expected a number >= 0"),
    (optim.lamb, {"learning_rate": 1, "b2": 1}, r"b2=1: expected a number in \[0, 1\)"),
    (optim.add_decayed_weights, {"weight_decay": None}, "weight_decay=None: expected a number >= 0"),
    (optim.scale_by_learning_rate, {"learning_rate": -1}, "learning_rate=-1: expected a number >= 0"),
    (optim.muon, {"learning_rate": 1, "ns_steps": 2.5}, "ns_steps=2.5: expected the number of iterations, an int"),
    (optim.muon, {"learning_rate": 1, "ns_steps": -1}, "ns_steps=-1: expected the number of iterations"),
    (optim.muon, {"learning_rate": 1, "ns_coefficients": (1, 2)}, r"ns_coefficients=\(1, 2\): expected three numbers"),
    (optim.clip, {"max_delta": 0}, "max_delta=0: expected a positive number"),
    (optim.clip_by_block_rms, {"threshold": -1}, "threshold=-1: expected a positive number"),
    (optim.clip_by_global_norm, {"max_norm": math.nan}, "max_norm=nan: expected a positive number"),
    (optim.ema, {"decay": 1}, r"decay=1: expected a number in \[0, 1\)"),
    (optim.params_ema, {"decay": -0.1}, r"decay=-0.1: expected a number in \[0, 1\)"),
    (optim.inject_hyperparams(optim.adamw), {"learning_rate": 0.1, "b1": 1}, r"b1=1: expected a number in \[0, 1\)"),
    (optim.linear, {"start": 0, "end": 1, "steps": 0}, "steps=0: expected a positive number of updates"),
    (optim.warmup_linear, {"peak": 1, "warmup_steps": 5, "total_steps": 5}, "0 <= warmup_steps < total_steps"),
    (optim.exponential_decay, {"start": 1, "steps": 0, "decay_rate": 0.5}, "steps=0: expected a positive number"),
    (optim.exponential_decay, {"start": 1, "steps": 1, "decay_rate": 0}, "decay_rate=0: expected a positive number"),
    (optim.piecewise_constant, {"start": 1, "boundaries_and_scales": {-1: 1}}, "expected boundaries >= 0"),
    (optim.join_schedules, {"schedules": [FALLING], "boundaries": [3]}, r"boundaries=\[3\]: expected 0 increasing"),
    (optim.join_schedules, {"schedules": [FALLING] * 3, "boundaries": [5, 3]}, "expected 2 increasing numbers"),
]


@pytest.mark.parametrize("make,arguments,message", BAD, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bad_hyperparameter_is_refused_by_name(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
