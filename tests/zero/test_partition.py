"""step.partition: the inverse of step.gather, for parameters and for any state, on every layout."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import is_box
from fzero.testing import stages, trees
from tests.helpers import ALL_STAGES, cases, examples, train_step_for
from tests.optim.table import TABLE, small_loss, small_params
from tests.zero.helpers import ARRANGEMENTS, parallel_loss, parallel_params

HALF = fzero.Precision(param=torch.bfloat16, full=lambda path, leaf: leaf.ndim == 0)
OPTIMIZERS = {
    **{name: row.optimizer for name, row in TABLE.items()},
    "master weights": optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-2)), HALF),
    "loss scale": optim.dynamic_loss_scale(optim.adam(1e-2)),
    "float32 average": optim.chain(optim.sgd(0.1), optim.params_ema(0.9, accumulator_dtype=torch.float64)),
}


def assert_same(got: Any, expected: Any, step: fzero.zero.ShardedStep) -> None:
    """Assert that two trees are sharded alike, and are equal to the last bit where they are not padding."""
    entries, structure = tree.flatten(expected, is_box)
    others, other_structure = tree.flatten(got, is_box)
    assert structure == other_structure
    for x, y in zip(entries, others, strict=True):
        assert type(x) is type(y) and tree.show(x) == tree.show(y)
    assert tree.flatten(got)[1] == tree.flatten(expected)[1]  # the spec_ids of the boxes
    assert_equal(step.gather(got), step.gather(expected))


def assert_equal(got: Any, expected: Any) -> None:
    assert tree.flatten(got)[1] == tree.flatten(expected)[1]
    assert len({id(x) for x in tree.tensors(got)}) == len({id(x) for x in tree.tensors(expected)})  # tied alike
    for x, y in zip(tree.flatten(got)[0], tree.flatten(expected)[0], strict=True):
        assert x is y is None or (x.dtype == y.dtype and torch.equal(x, y)), (x, y)


def assert_inverse(step: fzero.zero.ShardedStep, params: Any, opt_state: Any) -> None:
    """The laws: for parameters without like=, and for any tree with it."""
    whole = step.gather(params)
    assert_same(step.partition(whole), params, step)
    assert_equal(step.gather(step.partition(whole)), whole)
    for x in (params, opt_state, (opt_state, params)):
        assert_same(step.partition(step.gather(x), like=x), x, step)


@pytest.mark.slow
@examples(4, 30)
@given(st.sampled_from(sorted(OPTIMIZERS)), stages(), st.sampled_from([1, 3, 4]), st.booleans())
def test_partition_is_the_inverse_of_gather_for_every_pair(name, stage, n, one_unit):
    opt = OPTIMIZERS[name]
    precision = getattr(opt, "precision", None)
    train_step = train_step_for(small_loss, opt, precision=precision) if precision else train_step_for(small_loss, opt)
    step = fzero.shard(train_step, stage, fzero.mesh(dp=n), units=(lambda path, leaf: "all") if one_unit else None)
    params = tree.map(lambda x: x.float(), small_params())
    params, state = step.init(params, opt)
    if precision is None and name != "loss scale":
        params, state, _ = step(params, state, step.mesh.split(torch.randn(2 * n, 5)))
    assert_inverse(step, params, state)
    with torch.device("meta"):
        abstract = tree.map(lambda x: x.to("meta"), tree.map(lambda x: x.float(), small_params()))
    like = step.init(abstract, opt)
    assert_same(step.partition(step.gather(state), like=like[1]), state, step)


@pytest.mark.slow
@examples(1, 15)
@given(st.sampled_from(sorted(ARRANGEMENTS)), stages(), st.sampled_from(["vmap", "lockstep"]))
def test_partition_inverts_gather_on_any_axes(name, stage, simulate):
    axes, options = ARRANGEMENTS[name]
    opt = optim.chain(optim.adamw(1e-2), optim.params_ema(0.9))
    step = fzero.shard(train_step_for(parallel_loss, opt), stage, fzero.mesh(simulate=simulate, **axes), **options)
    params, state = step.init(parallel_params(), opt)
    batch = {name: torch.randn(24, 5, dtype=torch.float64) for name in "xy"}
    params, state, _ = step(params, state, step.mesh.split(batch, step.data_axes))
    assert_inverse(step, params, state)


@examples(4, 30)
@given(trees(dtypes=[torch.float64, torch.float32, torch.int64]), stages(), st.integers(1, 5), st.booleans())
def test_partition_inverts_gather_for_any_tree(values, stage, n, tie):
    values = {**values, "again": values["first"]} if tie else values
    step = fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(dp=n), units=lambda path, leaf: path[:6] or None)
    params, state = step.init(values, optim.adam(0.1))
    assert_inverse(step, params, state)
    assert_same(step.partition(lambda: values), params, step)
    assert_same(step.partition(tree.map(torch.clone, values), donate=True), params, step)


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_partition_ties_equal_leaves_that_like_has_tied(stage):
    """Of a checkpoint that was loaded leaf by leaf, tied leaves have equal values and are two tensors."""
    w, step = torch.arange(5.0), fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(dp=2))
    params, state = step.init({"a": w, "b": torch.ones(3), "c": w}, optim.adam(0.1))
    loaded = {"a": w.clone(), "b": torch.ones(3), "c": w.clone()}
    assert_same(step.partition(loaded, like=params), params, step)
    loaded["c"] += 1
    with pytest.raises(ValueError, match=r"values leaves 'a' and 'c' are tied in like=, and have different values"):
        step.partition(loaded, like=params)
    whole = step.gather(state)
    assert_same(step.partition(tree.map(torch.clone, whole), like=state), state, step)


def test_partition_copies_per_rank_values():
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(lambda p, s: (p, s), 3, mesh)
    x = {"w": torch.ones(3), "own": mesh.split(torch.arange(4.0)), "none": None}
    for values in (step.partition(x), step.partition(x, like=step.partition(x))):
        assert isinstance(values["own"], fzero.PerRank) and values["none"] is None
        assert torch.equal(values["own"].value, x["own"].value)
        assert values["own"].value.data_ptr() != x["own"].value.data_ptr()
        assert step.gather(values)["w"].tolist() == [1, 1, 1]


def test_state_bytes_needs_no_step():
    for stage in ALL_STAGES:
        step = fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(dp=4))
        with torch.device("meta"):
            abstract = {"w": torch.zeros(100)}
        for values in (step.init({"w": torch.zeros(100)}, optim.adam(0.1)), step.init(abstract, optim.adam(0.1))):
            expected = {0: 1208, 1: 608, 2: 608, 3: 308}[stage]
            assert fzero.zero.state_bytes(values, step.mesh) == step.state_bytes(*values) == expected
    tied = torch.zeros(10)
    assert fzero.zero.state_bytes([tied, tied, {"b": fzero.PerRank(torch.zeros(4, 2))}], fzero.mesh(dp=4)) == 48


def make_parted() -> tuple[fzero.zero.ShardedStep, Any, Any]:
    step = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=2))
    return (step, *step.init({"a": {"w": torch.ones(3, 2), "b": torch.ones(2)}}, optim.adam(0.1)))


def test_a_leaf_that_differs_from_like_is_named():
    step, params, state = make_parted()
    whole = step.gather(params)
    other = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=4))
    rows = [
        (lambda: step.partition(params), "values is sharded already: leaf 'a.w' is Shard"),
        (lambda: step.partition(params, like=params), r"values .*'a.w'.*Shard"),
        (lambda: step.partition({"a": {"w": whole["a"]["w"]}}, like=params), r"values does not match like=: .*'a.b'"),
        (
            lambda: step.partition({"a": {**whole["a"], "b": torch.ones(3)}}, like=params),
            r"values leaf 'a.b' is float32 \[3\]: expected float32 \[2\]",
        ),
        (
            lambda: step.partition(tree.map(lambda x: x.double(), whole), like=params),
            r"values leaf 'a.w' is float64 \[3, 2\]: expected float32 \[3, 2\]",
        ),
        (
            lambda: step.partition({"a": {**whole["a"], "b": None}}, like=params),
            r"values leaf 'a.b' is None: expected .* as in like=",
        ),
        (
            lambda: step.partition(step.gather(state), like=params),
            "values does not match like=: trees differ in structure",
        ),
        (lambda: other.partition(whole, like=params), "leaf 'a.w' was sharded for dp=2, and this mesh has dp=4"),
    ]
    for action, message in rows:
        with pytest.raises(ValueError, match=message):
            action()
