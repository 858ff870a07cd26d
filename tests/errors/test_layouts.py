"""Layouts that do not meet: each error names the leaf and says how to move it."""

from typing import Any

import pytest

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.errors.helpers import (
    BOXED_STATE,
    BOXES,
    FOUR,
    OPT,
    PARAMS,
    PIECES,
    SHARDED,
    STAGES,
    Row,
    X,
    check,
    init,
    run,
    spmd,
    step_of,
    value_and_grad,
)
from tests.helpers import LEAST

OTHER_MESH = r"was sharded for dp=2, and this mesh has dp=4; gather it with the step that sharded it.*step.partition"


LAYOUTS: dict[str, Row] = {
    "a state sharded for another mesh": (
        lambda: run(2, PARAMS, init(2)[1], FOUR),
        ValueError,
        rf"argument 1, leaf 'mu.a.w' {OTHER_MESH}",
    ),
    "parameters sharded for another mesh": (
        lambda: run(3, init(3)[0], init(3, FOUR)[1], FOUR),
        ValueError,
        rf"argument 0, leaf 'a.w' {OTHER_MESH}",
    ),
    "parameters sharded for another mesh, gathered": (
        lambda: step_of(3, FOUR).gather(BOXES),
        ValueError,
        rf"leaf 'a.w' {OTHER_MESH}",
    ),
    "parameters sharded for another mesh, in a rank program": (
        lambda: FOUR.spmd(fzero.gather)(BOXES),
        ValueError,
        r"is \[2, 4\].*Mesh\(dp=4, simulated\) has 4.*gather parameters and state.*step.partition",
    ),
    "stage 3's parameters at stage 0": (
        lambda: run(0, BOXES, init(0)[1]),
        ValueError,
        r"argument 0 \(parameters\) is sharded, and stage 0 takes it plain: gather it",
    ),
    "stage 3's parameters at stage 2": (
        lambda: run(2, *init(3)),
        ValueError,
        r"argument 0 \(parameters\) is sharded, and stage 2 takes it plain: gather it",
    ),
    "plain parameters at stage 3": (
        lambda: run(3, PARAMS, BOXED_STATE),
        ValueError,
        r"argument 0 \(parameters\) is plain, and stage 3 takes it sharded: params, opt_state = step.init",
    ),
    "plain parameters at stage 3, with a unit rule": (
        lambda: run(3, PARAMS, BOXED_STATE, units=lambda path, leaf: "all"),
        ValueError,
        r"argument 0 \(parameters\) is plain, and stage 3 takes it sharded",
    ),
    "a plain state at stage 2": (lambda: run(2, *init(0)), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "a plain state at stage 3": (lambda: run(3, BOXES, init(0)[1]), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "a sharded state at stage 0": (lambda: run(0, PARAMS, BOXED_STATE), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "stage 1's state at stage 2": (lambda: run(2, *init(1)), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "stage 2's state at stage 1": (lambda: run(1, *init(2)), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "a partition of boxes": (
        lambda: spmd(fzero.partition, BOXES),
        ValueError,
        r"params is sharded already: leaf 'a.w' is Shard\('a', float32 \[3, 2\], .*; gather it with the step",
    ),
    "init with boxes at stage 3": (lambda: step_of(3).init(BOXES, OPT), ValueError, r"sharded already: leaf 'a.w'"),
    "init with boxes at stage 0": (lambda: step_of(0).init(BOXES, OPT), ValueError, r"sharded already: leaf 'a.w'"),
    "reduce_grads= of partition": (
        lambda: spmd(lambda p: fzero.partition(p, reduce_grads="twice"), PARAMS),
        ValueError,
        r"reduce_grads='twice': expected \"each\" or \"once\"",
    ),
    "gather of part of a unit": (
        lambda: step_of(3).gather({"bias": BOXES["a"]["b"]}),
        ValueError,
        r"leaf 'bias' lies in the shard of unit 'a', which is not in this tree; pass a tree that holds whole units",
    ),
    "gradients of part of a unit": (
        lambda: spmd(lambda p: value_and_grad()(p, X)[0], {"bias": BOXES["a"]["b"]}),
        ValueError,
        r"leaf 'bias' lies in the shard of unit 'a', which is not in this tree",
    ),
    "gather outside a rank program": (
        lambda: fzero.gather(BOXES),
        ValueError,
        r"axis 'dp' is not bound here: no rank program is running; .* outside of one step.gather",
    ),
    "value_and_grad of boxes outside a rank program": (
        lambda: value_and_grad()(BOXES, X),
        ValueError,
        r"axis 'dp' is not bound here: no rank program is running",
    ),
    "gather of what has another size": (
        lambda: step_of(3).gather(tree.map(lambda x: x[:, :1], BOXES)),
        ValueError,
        r"Shard\('a', float32 \[3, 2\], 4 of 8 elements, dp=2\) holds a tensor \[1\], and its spec says \[4\]",
    ),
    "gradients of another structure": (
        lambda: spmd(lambda p: fzero.reduce_scatter({"a": p["a"]}, like=fzero.partition(p)), PARAMS),
        ValueError,
        r"leaf 'c'",
    ),
    "gradients of another shape": (
        lambda: spmd(lambda p: fzero.reduce_scatter({**p, "c": X}, like=fzero.partition(p)), PARAMS),
        ValueError,
        r"grads leaf 'c' is \[8, 3\]: expected shape \[5\], as in like",
    ),
    "plain updates to sharded parameters": (
        lambda: spmd(lambda p: optim.apply_updates(fzero.partition(p), p), PARAMS),
        ValueError,
        r"'a\.w'.*Shard\('a'.*float32 \[3, 2\]",
    ),
    "sharded updates to plain parameters": (
        lambda: spmd(lambda p: optim.apply_updates(p, fzero.partition(p)), PARAMS),
        ValueError,
        r"'a\.w'.*Shard\('a'",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wrong_layout_is_refused(name):
    check(LAYOUTS[name])


WHOLE = optim.Optimizer(OPT.init, OPT.update, exact_on_shards=False)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("opt", [WHOLE, optim.chain(optim.clip_by_global_norm(1.0), WHOLE)], ids=["pair", "chain"])
def test_an_optimizer_that_needs_whole_leaves_is_refused_on_shards(opt, stage):
    message = (
        rf"stage={stage} runs the optimizer on flat shards.*exact_on_shards=False.*optim.on_full_leaves.*use stage=0"
    )
    with pytest.raises(ValueError, match=message):
        step_of(stage).init(PARAMS, opt)
    step_of(0).init(PARAMS, opt)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("opt", [OPT, optim.chain(optim.clip_by_global_norm(1.0), OPT)], ids=["pair", "chain"])
def test_parameters_and_state_passed_in_swapped_order_are_named(stage, opt):
    params, state = step_of(stage).init(PARAMS, opt)
    message = r"argument 0 \(parameters\) is the state of an optimizer, .*AdamState.*train_step's order"
    for step in (step_of(stage), fzero.jit(step_of(stage), backend="fx", **LEAST)):
        with pytest.raises(TypeError, match=message):
            step(state, params, PIECES)


def test_a_swapped_state_of_every_optimizer_is_named():
    states = [x for name, x in vars(optim).items() if name.endswith("State") and name in optim.__all__ and x is not Any]
    assert optim.MuonState in states and len(states) > 10
    for kind in states:
        state = kind(*[None] * len(kind._fields))
        with pytest.raises(TypeError, match=rf"is the state of an optimizer, {kind.__name__}: pass the arguments in"):
            step_of(0)(state, PARAMS, PIECES)


def test_the_remedy_for_a_state_of_another_stage_works():
    """The two calls that they name put parameters and state into the stage's layout."""
    zero, three = step_of(0), step_of(3)
    params, state, _ = zero(*zero.init(PARAMS, OPT), PIECES)
    with pytest.raises(ValueError, match=r"takes it sharded: .*of another stage trained, step.partition\(params\)"):
        three(params, state, PIECES)
    sharded = three.partition(params)
    with pytest.raises(
        ValueError, match=r"step.partition\(other.gather\(state\), like=step.init\(params, opt\)\[1\]\)"
    ):
        three(sharded, state, PIECES)
    moved = three.partition(zero.gather(state), like=three.init(params, OPT)[1])
    expected, got = zero(params, state, PIECES), three(sharded, moved, PIECES)
    assert_trees_close(three.gather(got[:2]), tuple(expected[:2]))
