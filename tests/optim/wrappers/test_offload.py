"""Offload changes where the state lies, and no bit of what a step computes: laws over optimizers, ratios, layouts."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import Shard, is_box
from fzero.sharding._pieces import host_numel, spaces
from fzero.sharding._spec import _ALIGN_ELEMENTS
from fzero.testing import stages, world_sizes
from tests.checkpoint.states import same_bits
from tests.helpers import ALL_STAGES, cases, either, examples
from tests.optim.offloading import (
    BF16,
    ON_DEVICE_ONLY,
    OPTIMIZERS,
    POINTWISE,
    RATIOS,
    Row,
    Way,
    batches_of,
    by_path,
    layouts,
    normal,
    offloading,
    params_of,
    plain,
    small_params,
    train,
)
from tests.zero.helpers import RULES


def check_bitwise(way: Way, row: Row, params: Any, ratio: Any, update: str) -> None:
    """Parameters, state and losses are those of the optimizer without offload, bit for bit."""
    assert same_bits(train(way, row, params, offloading(ratio, update)), train(way, row, params, plain))


LIFTED = OPTIMIZERS.keys() - {"leafwise"}


units = st.sampled_from([None, *sorted(RULES)])


@examples(1, 30)
@given(name=st.sampled_from(sorted(POINTWISE)), params=params_of(), ratio=RATIOS, rule=units, **layouts)
@example("adamw", small_params(), by_path, None, 3, 3, 1)
@example("masters, clip before", small_params(), 0.37, "one unit", 2, 2, 2)
@example("a mask that is a tree", small_params(), 0.5, "one unit", 1, 2, 1)
def test_offload_with_host_updates_trains_bit_for_bit(name, params, ratio, rule, stage, n, micro_batches):
    way = Way(stage, n, micro_batches, units=rule and RULES[rule])
    check_bitwise(way, POINTWISE[name], params, ratio, "host")


@examples(1, 16)
@given(name=st.sampled_from(sorted(LIFTED)), params=params_of(), ratio=RATIOS, rule=units, **layouts)
@example("muon", small_params(), 0.37, "one unit", 2, 2, 1)
@example("adafactor", small_params(), 0.37, None, 3, 3, 1)
def test_offload_with_device_updates_trains_bit_for_bit(name, params, ratio, rule, stage, n, micro_batches):
    way = Way(stage, n, micro_batches, units=rule and RULES[rule])
    check_bitwise(way, OPTIMIZERS[name], params, ratio, "device")


@pytest.mark.parametrize("name", cases([*POINTWISE][::2], POINTWISE))
def test_every_optimizer_is_exact_on_the_host(name):
    check_bitwise(Way(3, 2, units=RULES["one unit"]), POINTWISE[name], small_params(), 0.37, "host")


@pytest.mark.slow
@pytest.mark.parametrize("name", cases([*ON_DEVICE_ONLY][::2], ON_DEVICE_ONLY))
def test_every_optimizer_that_reads_leaves_is_updated_on_the_device(name):
    check_bitwise(Way(2, 2), ON_DEVICE_ONLY[name], small_params(), 0.37, "device")


@pytest.mark.slow
@examples(0, 4)
@given(name=st.sampled_from(sorted(POINTWISE)), ratio=RATIOS, stage=stages(), n=st.integers(0, 3))
@example("masters, clip before", 0.37, 2, 2)
def test_a_jitted_step_with_host_updates_trains_bit_for_bit(name, ratio, stage, n):
    """Traced once: the state is of one structure from the beginning."""
    check_bitwise(Way(stage, n, jit=True), POINTWISE[name], small_params(), ratio, "host")


@examples(0, 3)
@given(name=st.sampled_from(sorted(LIFTED)), ratio=RATIOS, stage=stages(), n=st.integers(0, 3))
@example("masters of lamb", 0.37, 3, 2)
def test_a_jitted_step_with_device_updates_trains_bit_for_bit(name, ratio, stage, n):
    check_bitwise(Way(stage, n, jit=True), OPTIMIZERS[name], small_params(), ratio, "device")


@pytest.mark.slow
@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(LIFTED)),
    params=params_of(),
    ratio=RATIOS,
    rule=units,
    update=st.sampled_from(["host", "device"]),
    **layouts,
)
def test_offload_of_any_tree_trains_bit_for_bit(name, params, ratio, rule, update, stage, n, micro_batches):
    way = Way(stage, n, micro_batches, units=rule and RULES[rule])
    check_bitwise(way, OPTIMIZERS[name], params, ratio, "device" if name in ON_DEVICE_ONLY else update)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(LIFTED)),
    params=params_of(),
    ratio=RATIOS,
    stage=stages(),
    n=st.integers(0, 5),
    k=st.integers(1, 2),
    update=st.sampled_from(["host", "device"]),
)
def test_a_jitted_step_of_any_tree_trains_bit_for_bit(name, params, ratio, stage, n, k, update):
    check_bitwise(
        Way(stage, n, k, True), OPTIMIZERS[name], params, ratio, "device" if name in ON_DEVICE_ONLY else update
    )


@pytest.mark.slow
@examples(0, 4)
@given(name=st.sampled_from(sorted(POINTWISE)), ratio=RATIOS, stage=stages(), n=st.integers(1, 3))
@example("masters, clip before", 0.37, 3, 3)
def test_offload_in_lockstep_trains_bit_for_bit(name, ratio, stage, n):
    way, row = Way(stage, n, simulate="lockstep"), POINTWISE[name]
    expected = train(way._replace(simulate="vmap"), row, small_params(), offloading(ratio))
    assert same_bits(train(way, row, small_params(), offloading(ratio)), expected)
    check_bitwise(way, row, small_params(), ratio, "host")


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("stage", [1, 3])
def test_offload_with_tensor_parallelism_trains_bit_for_bit(stage, update):
    params = {"a": normal((8, 40), 1), "b": normal((64, 3), 2)}

    def run(wrap: Any) -> Any:
        optimizer = wrap(optim.adamw(1e-2))
        step = fzero.shard(
            lambda p, s, b: _run_step(optimizer, p, s),
            stage=stage,
            mesh=fzero.mesh(dp=2, tp=2),
            axis="dp",
            over="dp",
            split=lambda path, x: {"tp": 0},
        )
        state = step.init(params, optimizer)
        for _ in range(2):
            state = step(*state, None)
        return step.gather(state)

    assert same_bits(run(offloading(0.4, update)), run(plain))


def _run_step(optimizer: Any, params: Any, state: Any) -> Any:
    def loss(p: Any, _: Any) -> torch.Tensor:
        return torch.stack([torch.sin(x).sum() for x in tree.tensors(p)]).sum()

    _, grads = fzero.value_and_grad(loss)(params, None)
    updates, state = optimizer.update(grads, state, params)
    return optim.apply_updates(params, updates), state


def test_a_vmap_over_learning_rates_maps_every_piece():
    params, rates = {"w": normal((200,))}, torch.tensor([0.1, 0.2])

    def run(wrap: Any) -> Any:
        optimizer = wrap(optim.sgd(1.0, momentum=0.9))
        return torch.vmap(lambda rate: optimizer.update({"w": params["w"] * rate}, optimizer.init(params), params))(
            rates
        )

    (updates, state), expected = run(offloading(0.5)), run(plain)
    assert torch.equal(updates["w"], expected[0]["w"])
    assert torch.equal(torch.cat(state.momentum["w"].pieces, -1), expected[1].momentum["w"])


def pieces_of(values: Any) -> list[tuple[str, torch.Tensor]]:
    boxes = [x for x in tree.flatten(values, is_box)[0] if isinstance(x, Shard)]
    return [pair for box in boxes for pair in zip(spaces(box), box.pieces, strict=True)]


@examples(8, 30)
@given(params=params_of(), ratio=st.floats(0, 1), stage=st.integers(1, 3), n=world_sizes(5), rule=units)
def test_the_device_keeps_its_share_to_one_grain(params, ratio, stage, n, rule):
    """Of all elements of a rank's shards, the last ones: the end of one unit, and all of those behind it."""
    optimizer = optim.offload(optim.sgd(0.1, momentum=0.9), ratio)
    step = Way(stage, n, units=rule and RULES[rule]).step(optimizer, POINTWISE["sgd"])
    momentum = step.init(params, optimizer)[1].momentum
    boxes = [x for x in tree.flatten(momentum, is_box)[0] if isinstance(x, Shard) and x.spec.numel]
    host = sum([host_numel(x.spec_id) * x.spec.ranks for x in boxes])
    wanted = ratio * sum([x.spec.numel for x in boxes])
    assert wanted - 1 <= host < wanted + n * (_ALIGN_ELEMENTS + len(boxes)), (host, wanted)  # each unit is padded
    order = [space for x in boxes for space in spaces(x)]
    assert order == sorted(order), order  # the device's first
    assert all(p.stop - p.start for x in boxes for p in x.spec.pieces)


@examples(6, 15)
@given(params=params_of(), stage=st.integers(1, 3), n=world_sizes(5), rule=units)
def test_a_rule_is_asked_for_each_leaf_of_a_unit(params, stage, n, rule):
    optimizer = optim.offload(optim.sgd(0.1, momentum=0.9), by_path)
    step = Way(stage, n, units=rule and RULES[rule]).step(optimizer, POINTWISE["sgd"])
    for box in [x for x in tree.flatten(step.init(params, optimizer)[1].momentum, is_box)[0] if isinstance(x, Shard)]:
        spec = box.spec
        share = sum([by_path(path) * size for path, size in zip(spec.paths, spec.sizes, strict=True)])
        wanted = share / max(spec.numel, 1) * spec.shard_numel
        host = sum([p.stop - p.start for p in spec.pieces if p.space == "host"])
        assert wanted - 1e-6 <= host <= wanted + _ALIGN_ELEMENTS, (spec, host, wanted)


def test_a_cut_lies_where_both_pieces_begin_on_a_cache_line():
    optimizer = optim.offload(optim.sgd(0.1, momentum=0.9), 0.3)
    step = Way(2, 2, units=RULES["one unit"]).step(optimizer, POINTWISE["sgd"])
    (box,) = list(tree.flatten(step.init({"w": normal((2000,))}, optimizer)[1].momentum, is_box)[0])
    assert [(p.stop - p.start, p.space) for p in box.spec.pieces] == [(680, "device"), (320, "host")]
    assert box.device.type == "cpu" and "320 on the host" in repr(box)


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_offload_with_ratio_0_is_the_optimizer_itself(stage):
    """No piece lies on the host, and no operation moves anything."""
    row = POINTWISE["adamw"]
    step = Way(stage).step(optimizer := row.make(offloading(0), small_params()), row)
    state = step.init(small_params(), optimizer)
    assert {space for space, _ in pieces_of(state[1])} <= {"device"}
    if stage:
        expected = row.make(plain, small_params())
        assert fzero.sharding.layouts(state[1]) == fzero.sharding.layouts(step.init(small_params(), expected)[1])


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("name", ["adamw", "masters", "a mask", "leafwise", "lamb", "muon", "adafactor"])
def test_an_offloaded_state_keeps_its_structure(name, update):
    """It does so from init to update, or a jitted step would be traced twice; at stage 0 and unsharded, too."""
    if name in (ON_DEVICE_ONLY if update == "host" else ["leafwise"]):
        return
    row, params = OPTIMIZERS[name], small_params()
    optimizer = row.make(offloading(0.4, update), params)
    for stage in either((2,), (0, 2)):
        step = Way(stage).step(optimizer, row)
        state = step.init(params, optimizer)
        new = step(*state, step.mesh.split(batches_of(4)[0]))
        assert tree.flatten(new[1])[1] == tree.flatten(state[1])[1]
    own = optimizer.init(params)
    params = params if row.precision is None else row.precision.cast(params)
    assert tree.flatten(optimizer.update(params, own, params)[1])[1] == tree.flatten(own)[1]


def test_masters_and_moments_lie_together_and_parameters_stay():
    row = POINTWISE["masters"]
    step = Way(3).step(optimizer := row.make(offloading(1), small_params()), row)
    params, state = step.init(small_params(), optimizer)
    assert {space for space, x in pieces_of(state) if x.numel()} == {"host"}
    assert {space for space, _ in pieces_of(params)} == {"device"}
    assert {x.dtype for _, x in pieces_of(state)} == {torch.float32}
    assert {x.dtype for _, x in pieces_of(params)} == {torch.bfloat16}
    masters = optim.master_params(params, state)
    assert {space for space, x in pieces_of(masters) if x.numel()} == {"host"}
    assert same_bits(BF16.cast(step.gather(masters)), step.gather(params))


@pytest.mark.parametrize("update", ["cpu", "Host", None, 1])
def test_an_unknown_update_is_refused(update):
    with pytest.raises(ValueError, match=r'update_on=.*: expected "host" or "device"'):
        optim.offload(optim.adam(0.1), 0.5, update)


@pytest.mark.parametrize("name", ON_DEVICE_ONLY)
def test_a_host_update_of_an_optimizer_that_reads_leaves_is_refused_with_a_remedy(name):
    with pytest.raises(ValueError, match=r'before offload, in a chain, .*or .*update_on="device"'):
        ON_DEVICE_ONLY[name].make(offloading(0.5), small_params())


@pytest.mark.parametrize("update", ["host", "device"])
def test_offload_refuses_an_optimizer_with_a_loss_scale(update):
    inner = optim.dynamic_loss_scale(POINTWISE["masters"].make(plain, {}))
    with pytest.raises(ValueError, match="put the loss scale around offload"):
        optim.offload(inner, 0.5, update)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, optim.adam, None, 3], ids=["a class", "a function", "None", "3"]
)
def test_offload_refuses_a_value_that_is_no_optimizer(optimizer):
    with pytest.raises(TypeError):
        optim.offload(optimizer)


def test_a_norm_of_offloaded_pieces_is_refused_with_a_remedy():
    """The optimizer is someone else's: offload cannot know that it reads whole leaves."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        norm = optim.global_norm(grads)
        return tree.map(lambda g: g / norm, grads), state

    row = Row(lambda o, p: o(optim.Optimizer(lambda params: (), update)))
    with pytest.raises(ValueError, match=r"a part lies on the host.*before optim\.offload"):
        train(Way(2), row, small_params(), offloading(0.5))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_state_of_trees_can_only_be_updated_on_the_host(stage):
    with pytest.raises(ValueError, match=r"as optim\.leafwise makes it.*update_on=\"device\""):
        train(Way(stage), POINTWISE["leafwise"], small_params(), offloading(0.5, "device"))


def test_meta_parameters_are_planned_for():
    """Their state is made of meta tensors in the same pieces, and takes no memory."""
    row = POINTWISE["masters"]
    optimizer = row.make(offloading(0.5), None)
    step = Way(2).step(optimizer, row)
    metas = tree.map(lambda x: x.to("meta"), small_params())
    state = step.init(metas, optimizer)[1]
    real = step.init(small_params(), optimizer)[1]
    assert fzero.sharding.layouts(state) == fzero.sharding.layouts(real)
    assert all(x.is_meta for _, x in pieces_of(state))
