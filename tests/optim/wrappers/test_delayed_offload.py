"""Offload with a delay: the optimizer, given late gradients."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import is_box
from tests.checkpoint.states import same_bits
from tests.helpers import examples
from tests.optim.offloading import POINTWISE, Way, batches_of, layouts, normal, small_params, train


def one_late(optimizer: Any, path_is_late: Any) -> optim.Optimizer:
    """An optimizer that is given the gradients of some leaves one step late, and zeros at first."""

    def late(tree_: Any, other: Any) -> Any:
        paths, xs, structure = tree.flatten_with_paths(tree_, is_box)
        ys = tree.flatten(other, is_box)[0]
        return tree.unflatten(structure, [y if path_is_late(p) else x for p, x, y in zip(paths, xs, ys, strict=True)])

    def init(params: Any) -> Any:
        return tree.map(torch.zeros_like, params), optimizer.init(params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        previous, inner = state
        updates, inner = optimizer.update(late(grads, previous), inner, params)
        return updates, (grads, inner)

    return optim.Optimizer(init, update)


@pytest.mark.slow
@examples(0, 12)
@given(
    name=st.sampled_from(["adamw", "momentum", "lion", "a schedule", "clip before"]),
    blocks=st.integers(0, 3),
    jit=st.booleans(),
    low=st.booleans(),
    **layouts,
)
@example("clip before", 2, True, False, 2, 2, 2)
@example("adamw", 2, False, True, 3, 2, 1)
def test_a_delayed_offload_equals_the_optimizer_on_late_gradients(name, blocks, jit, low, stage, n, micro_batches):
    """Of the units on the host; the others' gradients come at once."""
    low = low and stage == 3
    params = {"h": [{"w": normal((64,), i)} for i in range(3)]}
    row, way = POINTWISE[name], Way(stage, n, micro_batches, jit)
    late = [f"h.{i}.w" for i in range(3)][3 - blocks :]

    def rule(path: str) -> float:
        return float(path in late)

    actual = train(way, row, params, lambda p: optim.offload(p, rule, delay=1, params=low), steps=4)
    expected = train(
        Way(stage, n, micro_batches), row, params, lambda p: one_late(p, lambda path: path in late), steps=4
    )
    assert same_bits((actual[0], actual[2]), (expected[0], expected[2]))


def test_a_delayed_state_is_saved_and_loads_at_another_stage():
    """At another stage, on other ranks, training goes on bit for bit."""
    row, params = POINTWISE["masters, clip before"], small_params()

    def steps(way: Way, state: Any, numbers: Any) -> Any:
        optimizer = row.make(lambda p: optim.offload(p, 0.5, delay=1), params)
        step = way.step(optimizer, row)
        state = (
            list(step.init(params, optimizer))
            if state is None
            else fzero.load(state, [*step.init(params, optimizer)], mesh=step.mesh)
        )
        for i in numbers:
            *state, _ = step(*state, step.mesh.split(batches_of(12, 6)[i]))
        return step, state

    with tempfile.TemporaryDirectory() as folder:
        step, state = steps(Way(2, 2), None, range(3))
        fzero.save(folder, state, mesh=step.mesh)
        step, state = steps(Way(3, 2), folder, range(3, 6))
    other, expected = steps(Way(2, 2), None, range(6))
    assert same_bits(step.gather(state[0]), other.gather(expected[0]))


def test_an_offload_with_delay_refuses_a_loss_scale_and_other_wrong_uses():
    with pytest.raises(ValueError, match="offload: delay=2: expected 0, or 1 with"):
        optim.offload(optim.sgd(0.1), delay=2)
    with pytest.raises(ValueError, match="offload: delay=1: expected 0, or 1 with"):
        optim.offload(optim.sgd(0.1), update_on="device", delay=1)
    params = {"a": normal((64,)), "b": normal((64,), 1)}
    half, whole = (optim.offload(optim.sgd(0.1), ratio, delay=1) for ratio in (0.5, 1.0))
    with pytest.raises(
        ValueError, match=r"the state has no gradient for leaf 'a': with delay=1 .*; use that ratio, or make"
    ):
        whole.update(params, optim.with_offload_ratio(half.init(params), params, 1.0), params)
    with pytest.raises(ValueError, match="the state holds a gradient for leaf 'a'"):
        half.update(params, optim.with_offload_ratio(whole.init(params), params, 0.5), params)
    row = POINTWISE["a loss scale around"]
    with pytest.raises(ValueError, match=r"gradient of leaf 'h.1.w' is torch.float32, .* there is no delay"):
        train(Way(2, 2), row, small_params(), lambda p: optim.offload(p, 0.5, delay=1))
