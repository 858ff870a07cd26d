"""Offload changes where the state lies, and no bit of what a step computes: laws over optimizers, ratios, layouts."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import Shard, host_numel, is_box, spaces
from fzero.sharding._spec import _ALIGN
from fzero.testing import stages, world_sizes
from tests.checkpoint.states import same_bits
from tests.helpers import cases, either, examples
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
    normal,
    params_of,
    small_params,
    trained,
)
from tests.zero.helpers import RULES


def plain(optimizer: Any) -> Any:
    return optimizer


def offloading(ratio: Any, update: str = "host") -> Any:
    return lambda optimizer: optim.offload(optimizer, ratio, update)


def check_bitwise(way: Way, row: Row, params: Any, ratio: Any, update: str) -> None:
    """Parameters, state and losses are those of the optimizer without offload, bit for bit."""
    assert same_bits(trained(way, row, params, offloading(ratio, update)), trained(way, row, params, plain))


# ---------------------------------------------------------------- no bit is another

LIFTED = OPTIMIZERS.keys() - {"leafwise"}
layouts = {"stage": stages(), "n": st.integers(0, 5), "micro_batches": st.integers(1, 2)}
units = st.sampled_from([None, *sorted(RULES)])


@examples(1, 30)
@given(name=st.sampled_from(sorted(POINTWISE)), params=params_of(), ratio=RATIOS, rule=units, **layouts)
@example("adamw", small_params(), by_path, None, 3, 3, 1)
@example("masters, clip before", small_params(), 0.37, "one unit", 2, 2, 2)
@example("a mask that is a tree", small_params(), 0.5, "one unit", 1, 2, 1)
def test_updated_on_the_host_it_trains_bit_for_bit(name, params, ratio, rule, stage, n, micro_batches):
    way = Way(stage, n, micro_batches, units=rule and RULES[rule])
    check_bitwise(way, POINTWISE[name], params, ratio, "host")


@examples(1, 16)
@given(name=st.sampled_from(sorted(LIFTED)), params=params_of(), ratio=RATIOS, rule=units, **layouts)
@example("muon", small_params(), 0.37, "one unit", 2, 2, 1)
@example("adafactor", small_params(), 0.37, None, 3, 3, 1)
def test_updated_on_the_device_it_trains_bit_for_bit(name, params, ratio, rule, stage, n, micro_batches):
    way = Way(stage, n, micro_batches, units=rule and RULES[rule])
    check_bitwise(way, OPTIMIZERS[name], params, ratio, "device")


@pytest.mark.parametrize("name", cases([*POINTWISE][::2], POINTWISE))
def test_every_optimizer_updated_on_the_host(name):
    check_bitwise(Way(3, 2, units=RULES["one unit"]), POINTWISE[name], small_params(), 0.37, "host")


@pytest.mark.parametrize("name", cases([*ON_DEVICE_ONLY][::2], ON_DEVICE_ONLY))
def test_every_optimizer_that_reads_leaves_is_updated_on_the_device(name):
    check_bitwise(Way(2, 2), ON_DEVICE_ONLY[name], small_params(), 0.37, "device")


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
def test_more_trees_train_bit_for_bit(name, params, ratio, rule, update, stage, n, micro_batches):
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
def test_in_lockstep_it_trains_bit_for_bit(name, ratio, stage, n):
    way, row = Way(stage, n, simulate="lockstep"), POINTWISE[name]
    expected = trained(way._replace(simulate="vmap"), row, small_params(), offloading(ratio))
    assert same_bits(trained(way, row, small_params(), offloading(ratio)), expected)
    check_bitwise(way, row, small_params(), ratio, "host")


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("stage", [1, 3])
def test_over_some_axes_and_split_along_others_it_trains_bit_for_bit(stage, update):
    params = {"a": normal((8, 40), 1), "b": normal((64, 3), 2)}

    def run(wrap: Any) -> Any:
        optimizer = wrap(optim.adamw(1e-2))
        step = fzero.shard(
            lambda p, s, b: _stepped(optimizer, p, s),
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


def _stepped(optimizer: Any, params: Any, state: Any) -> Any:
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


# ---------------------------------------------------------------- what lies where


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
    assert wanted - 1 <= host < wanted + n * (_ALIGN + len(boxes)), (host, wanted)  # each unit is padded
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
        assert wanted - 1e-6 <= host <= wanted + _ALIGN, (spec, host, wanted)


def test_a_cut_lies_where_both_pieces_begin_on_a_cache_line():
    optimizer = optim.offload(optim.sgd(0.1, momentum=0.9), 0.3)
    step = Way(2, 2, units=RULES["one unit"]).step(optimizer, POINTWISE["sgd"])
    (box,) = list(tree.flatten(step.init({"w": normal((2000,))}, optimizer)[1].momentum, is_box)[0])
    assert [(p.stop - p.start, p.space) for p in box.spec.pieces] == [(680, "device"), (320, "host")]
    assert box.device.type == "cpu" and "320 on the host" in repr(box)


@pytest.mark.parametrize("stage", cases((1, 3), range(4)))
def test_ratio_0_is_the_optimizer_itself(stage):
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
def test_a_state_keeps_its_structure(name, update):
    """From init to update, or a jitted step would be traced twice; at stage 0 and unsharded, too."""
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


# ---------------------------------------------------------------- another ratio


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
    """At another stage and number of ranks, too: the loaded state is, bit for bit, the one that was saved."""
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
    """By `with_offload_ratio`, by a checkpoint, and by cutting the whole state again."""
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
    cut = tuple([other.partition(step.gather(x), like=y) for x, y in zip(state, like, strict=True)])
    assert same_bits(on(other, cut, rest), expected)
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


def test_unsharded_the_ratio_changes_as_well():
    optimizer, params = optim.offload(optim.adam(0.1), 0.5), {"w": normal((300,)), "b": normal((3,))}
    state = optimizer.update(params, optimizer.init(params), params)[1]
    other = optim.offload(optim.adam(0.1), 1)
    expected = optimizer.update(params, state, params)
    got = other.update(params, optim.with_offload_ratio(state, params, 1), params)
    assert same_bits(got[0], expected[0]) and same_bits(fzero.gather(got[1]), fzero.gather(expected[1]))


# ---------------------------------------------------------------- bad input


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
def test_a_rule_that_answers_nonsense_is_refused_with_the_leaf(answer, error):
    optimizer = optim.offload(optim.adam(0.1), lambda path: answer if path == "b" else 0.5)
    with pytest.raises(error, match=r"leaf 'b'.*expected a number from 0 to 1"):
        optimizer.init({"a": torch.ones(3), "b": torch.ones(3)})


@pytest.mark.parametrize("update", ["cpu", "Host", None, 1])
def test_an_unknown_update_is_refused(update):
    with pytest.raises(ValueError, match=r'update=.*: expected "host" or "device"'):
        optim.offload(optim.adam(0.1), 0.5, update)


@pytest.mark.parametrize("name", ON_DEVICE_ONLY)
def test_an_optimizer_that_reads_leaves_is_told_what_to_do(name):
    with pytest.raises(ValueError, match=r'before offload, in a chain, or .*update="device"'):
        ON_DEVICE_ONLY[name].make(offloading(0.5), small_params())


@pytest.mark.parametrize("update", ["host", "device"])
def test_a_loss_scale_goes_around(update):
    inner = optim.dynamic_loss_scale(POINTWISE["masters"].make(plain, {}))
    with pytest.raises(ValueError, match="put the loss scale around offload"):
        optim.offload(inner, 0.5, update)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, optim.adam, None, 3], ids=["a class", "a function", "None", "3"]
)
def test_another_value_than_an_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError):
        optim.offload(optimizer)


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("stage", cases((0, 3), range(4)))
def test_a_state_of_another_ratio_says_how_to_change_it(stage, update):
    row, params = POINTWISE["adamw"], small_params()
    made = Way(stage).step(optimizer := row.make(offloading(0.3, update), params), row).init(params, optimizer)
    step = Way(stage).step(row.make(offloading(0.8, update), params), row)
    with pytest.raises(
        ValueError,
        match=r"offload: leaf '.*mu.*' of the state has \d+ elements .* on the host, .*optim.with_offload_ratio",
    ):
        step(*made, step.mesh.split(batches_of(4)[0]))


def test_a_norm_of_pieces_says_what_to_do():
    """For someone else's optimizer, of which offload cannot know that it reads whole leaves."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        norm = optim.global_norm(grads)
        return tree.map(lambda g: g / norm, grads), state

    row = Row(lambda o, p: o(optim.Optimizer(lambda params: (), update)))
    with pytest.raises(ValueError, match=r"a part lies on the host.*before optim\.offload"):
        trained(Way(2), row, small_params(), offloading(0.5))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_state_of_trees_can_only_be_updated_on_the_host(stage):
    with pytest.raises(ValueError, match=r"as optim\.leafwise makes it.*update=\"device\""):
        trained(Way(stage), POINTWISE["leafwise"], small_params(), offloading(0.5, "device"))


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


# ---------------------------------------------------------------- delay


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
def test_a_delay_is_the_optimizer_given_late_gradients(name, blocks, jit, low, stage, n, micro_batches):
    """Of the units on the host; the others' gradients come at once."""
    low = low and stage == 3
    params = {"h": [{"w": normal((64,), i)} for i in range(3)]}
    row, way = POINTWISE[name], Way(stage, n, micro_batches, jit)
    late = [f"h.{i}.w" for i in range(3)][3 - blocks :]

    def rule(path: str) -> float:
        return float(path in late)

    found = trained(way, row, params, lambda p: optim.offload(p, rule, delay=1, params=low), steps=4)
    expected = trained(
        Way(stage, n, micro_batches), row, params, lambda p: one_late(p, lambda path: path in late), steps=4
    )
    assert same_bits((found[0], found[2]), (expected[0], expected[2]))


def test_a_delayed_state_is_kept_and_loaded_elsewhere():
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


def test_a_delay_says_what_it_cannot():
    with pytest.raises(ValueError, match="offload: delay=2: expected 0, or 1 with"):
        optim.offload(optim.sgd(0.1), delay=2)
    with pytest.raises(ValueError, match="offload: delay=1: expected 0, or 1 with"):
        optim.offload(optim.sgd(0.1), update="device", delay=1)
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
        trained(Way(2, 2), row, small_params(), lambda p: optim.offload(p, 0.5, delay=1))


# ---------------------------------------------------------------- parameters


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
    found = trained(
        way, POINTWISE[name], params, lambda optimizer: optim.offload(optimizer, ratio, update, params=True)
    )
    assert same_bits(found, trained(way, POINTWISE[name], params, plain))


def test_parameters_on_the_host_come_up_when_they_are_gathered():
    """A block at a time, also for the backward pass; between them they are not on the device."""
    blocks, width = 8, 64
    params = {"h": [{"w": normal((width, width), i) / 8} for i in range(blocks)]}

    def loss_of(params: Any, x: Any) -> Any:
        for block in params["h"]:
            x = fzero.remat(lambda p, x: torch.tanh(x @ p["w"]))(block, x)
        return x.square().mean()

    def planned(ratio: float, on_host: bool) -> Any:
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

    kept, low = planned(1.0, False), planned(1.0, True)
    shard = width * width * 4 // 2
    up = sum(t.bytes for t in low.transfers if t.kind == "to_device")
    assert up == 2 * blocks * shard
    assert low.peak_of("device") < kept.peak_of("device") - (blocks - 2) * shard
    assert set(low.live_of("parameters", "host")) == {blocks * shard} and not any(low.live_of("parameters", "device"))


@examples(14, 100)
@given(params=params_of(), ratio=RATIOS, n=st.integers(1, 4), low=st.booleans())
def test_bytes_are_counted_by_memory(params, ratio, n, low):
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
