"""The ratio of offload: a run goes on bit for bit at another one, and a wrong one is refused."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import stages, world_sizes
from tests.checkpoint.states import same_bits
from tests.helpers import ALL_STAGES, cases, examples
from tests.optim.offloading import (
    ON_DEVICE_ONLY,
    OPTIMIZERS,
    POINTWISE,
    Row,
    Way,
    batches_of,
    by_path,
    normal,
    offloading,
    plain,
    small_params,
)


def halfway(way: Way, row: Row, optimizer: Any) -> tuple[fzero.zero.ShardedStep, Any, list[Any]]:
    """Train two steps; return the step, the state, and the batches that are left."""
    step = way.step(optimizer, row)
    state, batches = step.init(small_params(), optimizer)[:2], batches_of(12, 4)
    for batch in batches[:2]:
        state = step(*state, step.mesh.split(batch))[:2]
    return step, state, batches[2:]


def on(step: fzero.zero.ShardedStep, state: Any, batches: list[Any]) -> Any:
    for batch in batches:
        state = step(*state, step.mesh.split(batch))[:2]
    return step.gather(state)


CHANGES = st.sampled_from([(0.3, 0.7), (1, 0), (0, 0.5), (0.37, by_path), (by_path, 1), (0.6, 0.6)])


@pytest.mark.slow
@examples(0, 6)
@given(
    name=st.sampled_from(["adamw", "masters, clip before", "a mask", "muon", "adafactor", "third party"]),
    change=CHANGES,
    before=st.tuples(stages(), st.sampled_from([1, 2, 3])),
    after=st.tuples(stages(), st.sampled_from([1, 2, 3])),
)
@example("adamw", (0.3, 0.7), (2, 2), (2, 2))
@example("masters, clip before", (0.3, 0.7), (3, 3), (1, 2))
@example("adamw", (0.3, 0.7), (0, 1), (3, 2))
def test_a_checkpoint_of_one_ratio_loads_at_another(name, change, before, after):
    """Stage and number of ranks may differ, too: the loaded state is, bit for bit, the one that was saved."""
    row, update = OPTIMIZERS[name], "device" if name in ON_DEVICE_ONLY else "host"
    old, new = (row.make(offloading(ratio, update), small_params()) for ratio in change)
    step, state, _ = halfway(Way(*before), row, old)
    other = Way(*after).step(new, row)
    like = other.init(small_params(), new)[:2]
    with tempfile.TemporaryDirectory() as folder:
        fzero.save(f"{folder}/c", tuple(state), mesh=step.mesh)
        got = fzero.load(f"{folder}/c", tuple(like), mesh=other.mesh)
    assert tree.flatten(got)[1] == tree.flatten(tuple(like))[1]
    assert same_bits(other.gather(got), step.gather(tuple(state)))
    if before == after:
        assert same_bits(other.partition(step.gather(tuple(state)), like=got), got)


@pytest.mark.slow
@examples(0, 5)
@given(
    name=st.sampled_from(["adamw", "masters", "a mask", "muon", "third party", "a loss scale around"]),
    change=CHANGES,
    stage=stages(),
    n=world_sizes(3),
)
@example("adamw", (0.3, 0.7), 0, 2)
@example("adamw", (0.3, 0.7), 2, 2)
def test_training_goes_on_bit_for_bit_at_another_ratio(name, change, stage, n):
    """The ratio changes by `with_offload_ratio`, by a checkpoint, and by splitting the whole state again."""
    row, update, way = OPTIMIZERS[name], "device" if name in ON_DEVICE_ONLY else "host", Way(stage, n)
    old, new, base = (row.make(w, small_params()) for w in (*(offloading(r, update) for r in change), plain))
    step, state, rest = halfway(way, row, base)
    expected = on(step, state, rest)
    step, state, rest = halfway(way, row, old)
    other = way.step(new, row)
    like = other.init(small_params(), new)[:2]
    again = (state[0], optim.with_offload_ratio(state[1], state[0], change[1]))
    assert tree.flatten(again[1])[1] == tree.flatten(like[1])[1]
    assert same_bits(on(other, again, rest), expected)
    sharded = tuple([other.partition(step.gather(x), like=y) for x, y in zip(state, like, strict=True)])
    assert same_bits(on(other, sharded, rest), expected)
    with tempfile.TemporaryDirectory() as folder:
        fzero.save(f"{folder}/c", tuple(state), mesh=step.mesh)
        loaded = fzero.load(f"{folder}/c", tuple(like), mesh=other.mesh)
    assert same_bits(on(other, loaded, rest), expected)


def test_the_state_of_an_optimizer_without_offload_becomes_one_with_it():
    way, row = Way(2), POINTWISE["adamw"]
    step, state, rest = halfway(way, row, row.make(plain, small_params()))
    expected = on(step, state, rest)
    other = way.step(row.make(offloading(0.5), small_params()), row)
    lowered = (state[0], optim.with_offload_ratio(state[1], state[0], 0.5))
    assert same_bits(on(other, lowered, rest), expected)
    lifted = optim.with_offload_ratio(lowered[1], state[0], 0)
    assert same_bits(on(step, (state[0], lifted), rest), expected)


def test_the_offload_ratio_of_an_unsharded_state_can_change():
    optimizer, params = optim.offload(optim.adam(0.1), 0.5), {"w": normal((300,)), "b": normal((3,))}
    state = optimizer.update(params, optimizer.init(params), params)[1]
    other = optim.offload(optim.adam(0.1), 1)
    expected = optimizer.update(params, state, params)
    got = other.update(params, optim.with_offload_ratio(state, params, 1), params)
    assert same_bits(got[0], expected[0]) and same_bits(fzero.gather(got[1]), fzero.gather(expected[1]))


@pytest.mark.parametrize("ratio", [True, False, "0.5", None, [0.5], torch.tensor(0.5)], ids=repr)
def test_a_ratio_of_another_type_is_refused(ratio):
    for f in (lambda: optim.offload(optim.adam(0.1), ratio), lambda: optim.with_offload_ratio((), {}, ratio)):
        with pytest.raises(TypeError, match=r"ratio=.*: expected a number from 0 to 1, or a rule"):
            f()


@pytest.mark.parametrize("ratio", [-0.1, 1.1, 50, float("nan"), float("inf")])
def test_a_ratio_beyond_its_range_is_refused(ratio):
    with pytest.raises(ValueError, match=r"ratio=.*: expected a number from 0 to 1$"):
        optim.offload(optim.adam(0.1), ratio)


@pytest.mark.parametrize("answer,error", [(None, TypeError), (True, TypeError), ("0", TypeError), (2, ValueError)])
def test_a_ratio_rule_with_a_wrong_result_is_refused_with_the_leaf(answer, error):
    optimizer = optim.offload(optim.adam(0.1), lambda path: answer if path == "b" else 0.5)
    with pytest.raises(error, match=r"leaf 'b'.*expected a number from 0 to 1"):
        optimizer.init({"a": torch.ones(3), "b": torch.ones(3)})


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_state_of_another_offload_ratio_is_refused_with_a_remedy(stage, update):
    row, params = POINTWISE["adamw"], small_params()
    made = Way(stage).step(optimizer := row.make(offloading(0.3, update), params), row).init(params, optimizer)
    step = Way(stage).step(row.make(offloading(0.8, update), params), row)
    with pytest.raises(
        ValueError,
        match=r"offload: leaf '.*mu.*' of the state has \d+ elements .* on the host, .*optim.with_offload_ratio",
    ):
        step(*made, step.mesh.split(batches_of(4)[0]))
