"""Parameters on the host: gathered from there, counted there, kept and loaded, and no bit is another."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import Shard, is_box
from fzero.sharding._pieces import spaces
from tests.checkpoint.states import same_bits
from tests.helpers import examples
from tests.optim.offloading import POINTWISE, RATIOS, Way, batches_of, normal, params_of, plain, small_params, train
from tests.zero.helpers import RULES


@examples(0, 8)
@given(
    name=st.sampled_from(["adamw", "momentum", "masters, clip before", "a loss scale around", "averaged parameters"]),
    params=params_of(),
    ratio=RATIOS,
    rule=st.sampled_from([None, *sorted(set(RULES) - {"nothing cut"})]),
    n=st.integers(1, 5),
    micro_batches=st.integers(1, 2),
    update=st.sampled_from(["host", "device"]),
    jit=st.booleans(),
)
@example("masters, clip before", small_params(), 0.37, "one unit", 2, 2, "host", True)
@example("a loss scale around", small_params(), 1.0, None, 3, 1, "host", True)
@example("adamw", small_params(), 0.37, None, 2, 1, "device", True)
def test_parameters_on_the_host_train_bit_for_bit(name, params, ratio, rule, n, micro_batches, update, jit):
    way = Way(3, n, micro_batches, jit, units=rule and RULES[rule])
    result = train(way, POINTWISE[name], params, lambda optimizer: optim.offload(optimizer, ratio, update, params=True))
    assert same_bits(result, train(way, POINTWISE[name], params, plain))


def test_parameters_on_the_host_move_to_the_device_when_gathered():
    """A block at a time, also for the backward pass; between them they are not on the device."""
    blocks, width = 8, 64
    params = {"h": [{"w": normal((width, width), i) / 8} for i in range(blocks)]}

    def loss_of(params: Any, x: Any) -> Any:
        for block in params["h"]:
            x = fzero.remat(lambda p, x: torch.tanh(x @ p["w"]))(block, x)
        return x.square().mean()

    def make_plan(ratio: float, on_host: bool) -> Any:
        optimizer = optim.offload(optim.sgd(0.1, momentum=0.9), ratio, params=on_host)

        def train_step(params: Any, opt_state: Any, x: Any) -> Any:
            value, grads = fzero.value_and_grad(loss_of, gather=False)(params, x)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, value

        step = fzero.shard(train_step, 3, fzero.mesh(dp=2))
        state = step.init(params, optimizer)
        assert {space for x in tree.flatten(state[0], is_box)[0] for space in spaces(x)} == (
            {"host"} if on_host else {"device"}
        )
        return fzero.plan(fzero.jit(step, backend="fx", max_reuse_bytes=0), *state, step.mesh.split(normal((4, width))))

    full, low = make_plan(1.0, False), make_plan(1.0, True)
    shard = width * width * 4 // 2
    up = sum(t.bytes for t in low.transfers if t.kind == "to_device")
    assert up == 2 * blocks * shard
    assert low.peak_of("device") < full.peak_of("device") - (blocks - 2) * shard
    assert set(low.live_of("parameters", "host")) == {blocks * shard} and not any(low.live_of("parameters", "device"))


@examples(14, 100)
@given(params=params_of(), ratio=RATIOS, n=st.integers(1, 4), low=st.booleans())
def test_offloaded_parameters_are_counted_in_host_bytes(params, ratio, n, low):
    step = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=n))
    state = step.init(params, optim.offload(optim.adam(0.1), ratio, params=low))
    expected = {"device": 0, "host": 0}
    for x in tree.flatten(state, is_box)[0]:
        pieces = zip(spaces(x), x.pieces, strict=True) if isinstance(x, Shard) else [("device", x)]
        for space, part in pieces:
            if isinstance(part, torch.Tensor):
                expected[space] += part.nbytes // (n if part.dim() else 1)
    assert {space: step.state_bytes(*state, space=space) for space in expected} == expected
    assert step.state_bytes(*state) == sum(expected.values())
    with pytest.raises(ValueError, match=r"space='disk': expected"):
        step.state_bytes(*state, space="disk")


@pytest.mark.slow
def test_parameters_on_the_host_are_kept_and_loaded():
    row, params = POINTWISE["masters, clip before"], small_params()

    def steps(ratio: Any, on_host: bool, folder: Any, numbers: Any) -> Any:
        optimizer = row.make(lambda p: optim.offload(p, ratio, params=on_host), params)
        step = Way(3, 2).step(optimizer, row)
        state = list(step.init(params, optimizer))
        if folder is not None:
            state = fzero.load(folder, state, mesh=step.mesh)
        for i in numbers:
            *state, _ = step(*state, step.mesh.split(batches_of(12, 4)[i]))
        return step, state

    with tempfile.TemporaryDirectory() as folder:
        step, state = steps(0.5, True, None, range(2))
        fzero.save(folder, state, mesh=step.mesh)
        after = [
            steps(ratio, on_host, folder, range(2, 4)) for ratio, on_host in ((0.3, True), (0.5, False), (1, True))
        ]
    other, expected = steps(0, False, None, range(4))
    for step, state in after:
        assert same_bits(step.gather(state), other.gather(expected))


def test_parameters_on_the_host_need_stage_3_and_one_ratio():
    params, mesh = small_params(), fzero.mesh(dp=2)
    optimizer = optim.offload(optim.sgd(0.1, momentum=0.9), 0.5, params=True)
    for stage in (0, 1, 2):
        with pytest.raises(ValueError, match=r"offload: params=True: no parameter is sharded, .* use stage=3"):
            fzero.shard(lambda p, s: (p, s), stage, mesh).init(params, optimizer)
    row = POINTWISE["momentum"]
    step = Way(3, 2).step(optim.offload(optim.sgd(0.1, momentum=0.9), 0.9, params=True), row)
    low, _ = step.init(params, optimizer)
    _, state = step.init(params, optim.offload(optim.sgd(0.1, momentum=0.9), 0.9))
    with pytest.raises(ValueError, match=r"elements .* on the host, and ratio says .*: give step.init the optimizer"):
        step(low, state, step.mesh.split(batches_of(4)[0]))
