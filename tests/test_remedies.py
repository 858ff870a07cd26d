"""Mistakes that newcomers make first: each error names the remedy for what the user wants."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import fzero
from fzero import optim, tree
from tests.helpers import ALL_STAGES, cases, train_step_for

MESH = fzero.mesh(dp=2)
PARAMS = {"w": torch.ones(4, 3), "v": torch.ones(3)}
BATCH = MESH.split(torch.ones(8, 4))
OPT = optim.adamw(0.1)


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"]).square().mean()


def step_of(stage: int, opt: Any = OPT, loss: Callable[..., Any] = loss_of) -> fzero.zero.ShardedStep:
    return fzero.shard(train_step_for(loss, opt), stage, MESH)


def notes_of(action: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        action()
    return "\n".join(getattr(caught.value, "__notes__", ()))


WITH_GRADIENTS: dict[str, Callable[[Any, Any], Any]] = {
    "a write": lambda params, grads: params["w"].add_(grads["w"], alpha=-0.1),
    "an update by hand": lambda params, grads: params["w"] - 0.1 * grads["w"],
    "a norm": lambda params, grads: sum((g**2).sum() for g in grads.values()),
    "torch's clip": lambda params, grads: torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0),
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_box_in_an_update_names_the_functions_for_boxes(stage, name):
    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        _, grads = fzero.value_and_grad(loss_of)(params, x)
        WITH_GRADIENTS[name](params, grads)
        return params, opt_state

    step = fzero.shard(train_step, stage, MESH)
    message = (
        r"fzero.tree.map\(f, params, grads\), take norms with optim.global_norm, .*#a-box-where-a-tensor-was-meant"
    )
    with pytest.raises((TypeError, AttributeError), match=message):
        step(*step.init(PARAMS, OPT), BATCH)


def test_the_functions_that_the_error_names_compute_on_boxes():
    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        _, grads = fzero.value_and_grad(loss_of)(params, x)
        params = tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, opt_state, optim.global_norm(grads), fzero.gather(grads)

    for stage in ALL_STAGES:
        step = fzero.shard(train_step, stage, MESH)
        params, _, norm, grads = step(*step.init(PARAMS, OPT), BATCH)
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in grads.values()]).norm())
        torch.testing.assert_close(step.gather(params)["w"], PARAMS["w"] - 0.1 * grads["w"])


def test_a_tensor_that_init_took_names_inits_results():
    params = tree.map(torch.clone, PARAMS)
    step_of(0).init(params, OPT, donate=True)
    with pytest.raises(fzero.errors.DonatedError) as caught:
        params["w"].sum()
    assert str(caught.value) == (
        "params leaf 'w' was donated to step.init(..., donate=True): its memory holds the results of that call now. "
        "Continue with its results, as params, opt_state = step.init(..., donate=True); or copy values that you need "
        "before the call, or leave out donate=True; see docs/trouble.md#a-tensor-that-was-donated"
    )


def test_a_tensor_that_a_jitted_step_took_names_the_steps_results():
    step = fzero.jit(step_of(0), backend="fx")
    params, opt_state = step.init(PARAMS, OPT)
    step(params, opt_state, BATCH)
    with pytest.raises(fzero.errors.DonatedError) as caught:
        params["w"].sum()
    message = str(caught.value)
    assert "as params, opt_state, loss = step(params, opt_state, batch); or copy" in message
    assert "or jit with donate=()" in message and "step.init" not in message


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
@pytest.mark.parametrize(
    "used, made, message",
    [
        (OPT, optim.sgd(0.1), "adamw was given SgdState, which has no 'mu': make the state with step.init"),
        (
            optim.scale_by_lion(),
            OPT,
            "scale_by_lion was given AdamState, and updates LionState: make the state with step.init",
        ),
        (
            optim.chain(optim.clip(1.0), optim.scale(1.0), OPT),  # as many links as AdamState has fields
            OPT,
            "chain was given AdamState: expected a tuple of 3 states, one a link",
        ),
        (
            optim.chain(optim.clip(1.0), OPT),
            optim.chain(optim.clip(1.0), optim.scale(2.0), OPT),
            "chain was given a tuple of 3 states: expected a tuple of 2 states, one a link",
        ),
    ],
    ids=["a field is missing", "all fields are there", "no chain", "a longer chain"],
)
def test_the_state_of_another_optimizer_is_named(stage, used, made, message):
    params, opt_state = step_of(stage, made).init(PARAMS, made)
    with pytest.raises(TypeError, match=message):
        step_of(stage, used)(params, opt_state, BATCH)


def test_an_attribute_error_within_an_optimizer_is_not_rewritten():
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return params.nothing, state

    with pytest.raises(AttributeError, match="nothing"):
        optim.Optimizer(OPT.init, update).update(PARAMS, OPT.init(PARAMS), PARAMS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_of_plain_tensors_is_named_as_the_argument(stage):
    step = step_of(stage)
    params, _ = step.init(PARAMS, OPT)
    notes = notes_of(lambda: step(params, OPT.init(PARAMS), BATCH), ValueError)
    assert (
        f"Argument 1 (optimizer state) is plain, and stage {stage} takes it sharded: params, opt_state = step.init("
        in notes
    )


def test_a_sharded_state_at_stage_0_is_named_as_the_argument():
    state = step_of(2).init(PARAMS, OPT)[1]
    notes = notes_of(lambda: step_of(0)(PARAMS, state, BATCH), ValueError)
    assert "Argument 1 (optimizer state) is sharded, and stage 0 takes it plain: " in notes


def test_a_difference_in_sharding_says_how_gradients_are_reduced_only_if_nothing_else_differs():
    states = [step_of(stage).init(PARAMS, OPT)[1] for stage in range(3)]
    for mine, other, is_said in [(2, 0, False), (2, 1, True)]:
        with pytest.raises(ValueError, match=r"sharded differently.*#trees-that-are-sharded-differently") as caught:
            step_of(mine)(PARAMS, states[other], BATCH)
        assert ("gradients reduced" in str(caught.value)) == is_said


def test_parameters_that_differ_by_rank_have_gradients_that_were_not_averaged():
    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = OPT.update(torch.func.grad(loss_of)(params, x), opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    step = fzero.shard(train_step, 0, MESH)
    random_batch = MESH.split(torch.arange(32.0).view(8, 4))
    notes = notes_of(lambda: step(*step.init(PARAMS, OPT), random_batch), fzero.errors.DiffersByRankError)
    assert "gradients were not averaged: take them by fzero.value_and_grad" in notes


def test_a_metric_that_differs_by_rank_is_not_taken_for_a_parameter():
    step = fzero.shard(lambda params, opt_state, x: (params, opt_state, x.sum()), 0, MESH)
    notes = notes_of(lambda: step(*step.init(PARAMS, OPT), BATCH), fzero.errors.DiffersByRankError)
    assert "averaged" not in notes


# Arguments of init.

MODEL = torch.nn.Linear(300, 4)
ROUGH = {"w": numpy.ones((300, 4))}
INIT: dict[str, tuple[Callable[[], Any], str]] = {
    "arguments in the wrong order": (
        lambda: step_of(2).init(OPT, {"w": torch.ones(300, 4)}),
        r"opt is a dict, which has no init: .*step.init takes it after the parameters, step.init\(params, opt\)$",
    ),
    "a generator": (
        lambda: step_of(2).init(MODEL.parameters(), OPT),
        r"params is a generator: pass dict\(model.named_parameters\(\)\), or the module itself$",
    ),
    "a numpy array": (
        lambda: step_of(2).init(ROUGH, OPT),
        r"params leaf 'w' is a numpy.ndarray: expected a tensor; pass torch.as_tensor\(x\) of it$",
    ),
    "a numpy array, in a rank program": (
        lambda: MESH.spmd(fzero.partition)(ROUGH),
        r"params leaf 'w' is a numpy.ndarray: expected a tensor; pass torch.as_tensor\(x\) of it$",
    ),
    "a number": (
        lambda: step_of(2).init({"w": 0.5}, OPT),
        r"params leaf 'w' is 0.5: expected a tensor; pass torch.as_tensor\(x\) of it$",
    ),
    "a string": (
        lambda: step_of(2).init({"w": torch.ones(2), "name": "gpt"}, OPT),
        r"params leaf 'name' is 'gpt': expected a tensor; take it out, and let the step close over it$",
    ),
    "an object of a class": (
        lambda: step_of(2).init({"w": object()}, OPT),
        r"params leaf 'w' is <object object at .*>: expected a tensor; register its class as a pytree node$",
    ),
    "a list of optimizers in a chain": (
        lambda: optim.chain([OPT, OPT]),  # pyright: ignore[reportArgumentType]
        r"opts\[0\] is \[Optimizer\(adamw\(0.1\)\), Optimizer\(adamw\(0.1\)\)\], which has no init: pass "
        r"optimizers one by one, optim.chain\(\*opts\)$",
    ),
    "a batch of numpy": (
        lambda: MESH.split(ROUGH),
        r"batch leaf 'w' is a numpy.ndarray: a value that differs by rank must be a tensor; pass torch.as_tensor\(x\)",
    ),
}


@pytest.mark.parametrize("name", INIT)
def test_an_error_names_a_wrong_argument_without_printing_its_values(name):
    action, message = INIT[name]
    with pytest.raises(TypeError, match=message):
        action()


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_were_split_like_a_batch_are_named(stage):
    message = r"params leaf 'w' is a PerRank: step.init takes full parameters and shards them itself; mesh.split is"
    with pytest.raises(ValueError, match=message):
        step_of(stage).init({"w": MESH.split(torch.arange(8.0))}, OPT)
