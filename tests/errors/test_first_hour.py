"""Mistakes of a first hour: what is passed in place of a step, a rule, a mesh or layers is named, with the remedy."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.parallel import experts
from fzero.parallel import tensor as tp
from tests.errors.helpers import PARAMS, TRAIN_STEP, Row, check, init, step_of

OPT: Any = optim.sgd(0.1)
MESH = fzero.mesh(dp=2)


def evaluated(*args: Any) -> Any:
    program = fzero.evaluate(step_of(3), lambda params, batch: {"error": batch.sum(1)})
    return program(*args)


def split_step(rule: Any, axis: str = "tp") -> Any:
    return fzero.shard(TRAIN_STEP, stage=3, mesh=fzero.mesh(**{"dp": 1, axis: 2}), axis="dp", split=rule)


ROWS: dict[str, Row] = {
    "a train step in evaluate": (
        lambda: fzero.evaluate(TRAIN_STEP, len),  # pyright: ignore
        TypeError,
        r"step is \w+: expected the step that fzero\.shard\(train_step",
    ),
    "a train step in predict": (
        lambda: fzero.predict(TRAIN_STEP, len),  # pyright: ignore
        TypeError,
        r"step is \w+: expected the step that fzero\.shard\(train_step",
    ),
    "no rows": (
        lambda: evaluated(init(3)[0], MESH.split(torch.ones(4, 4))),
        TypeError,
        r"evaluate's program takes \(params, \.\.\., batch, rows\)",
    ),
    "no arguments of evaluate's program": (evaluated, TypeError, r"evaluate's program takes \(params"),
    "a function that returns a module": (
        lambda: step_of(3).init(lambda: torch.nn.Linear(2, 2), OPT),
        TypeError,
        r"returned a module, Linear: pass the module itself, step\.init\(module, opt\)",
    ),
    "units of a path alone": (
        lambda: step_of(3, units=lambda path: path),
        TypeError,
        r"units: the rule takes \(path\): expected a function \(path, leaf\)",
    ),
    "over of a path alone": (
        lambda: step_of(3, over=lambda path: "dp"),
        TypeError,
        r"over: the rule takes \(path\): expected a function \(path, leaf\)",
    ),
    "split of a path alone, among several": (
        lambda: step_of(3, split=[experts.split_rule("experts"), lambda path: None]),
        TypeError,
        r"split: the rule takes \(path\): expected a function \(path, leaf\)",
    ),
    "a plan in place of layers": (
        lambda: fzero.nn.functional(torch.nn.Linear(2, 2), tp={"": "colwise"}),  # pyright: ignore
        TypeError,
        r"expected the layers of the module, fzero\.parallel\.tensor\.layers\(module\)",
    ),
    "a number in place of a mesh": (
        lambda: fzero.save("/nowhere", PARAMS, mesh=3),  # pyright: ignore
        TypeError,
        r"mesh=3: expected a mesh, such as fzero\.mesh\(dp=4\)",
    ),
    "a number as a batch": (lambda: MESH.split(torch.ones(())), ValueError, r"batch is a tensor of shape \[\], which"),
    "two trees to gather": (
        lambda: step_of(3).gather(PARAMS, ()),  # pyright: ignore
        TypeError,
        r"positional arguments",
    ),
    "a misspelt name of a leaf that tp splits": (
        lambda: split_step(tp.split_rule({"w": -1, "Bias": 0})).init(
            {"w": torch.ones(4, 4), "bias": torch.ones(4)}, OPT
        ),
        ValueError,
        r"no parameter has the name 'Bias'.*did you mean \"bias\"\?",
    ),
    "a misspelt axis of a rule": (
        lambda: split_step(tp.split_rule({"w": -1}, axis="tpp")).init({"w": torch.ones(4, 4)}, OPT),
        ValueError,
        r"splits leaves over 'tpp', which is not an axis of Mesh.*did you mean \"tp\"\?",
    ),
    "a misspelt name of experts": (
        lambda: split_step(experts.split_rule("expert"), "ep").init({"experts": torch.ones(4, 4)}, OPT),
        ValueError,
        r"no parameter has the name 'expert'.*did you mean \"experts\"\?",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_mistake_of_the_first_hour_is_an_error_with_its_remedy(name):
    check(ROWS[name])


def test_a_name_for_an_axis_that_the_mesh_lacks_is_no_mistake():
    """So one rule serves meshes with and without the axis."""
    step = fzero.shard(TRAIN_STEP, stage=3, mesh=MESH, split=tp.split_rule({"up": -1}))
    step.init({"w": torch.ones(4, 4)}, OPT)


@pytest.mark.parametrize(("split", "ranks"), [(None, 3), (tp.split_rule({"w": -1}), 5)])
def test_an_axis_over_which_nothing_is_split_or_averaged_is_a_notice(split, ranks, caplog):
    step = fzero.shard(TRAIN_STEP, stage=3, mesh=fzero.mesh(dp=1, tp=ranks), axis="dp", split=split)
    step.init({"w": torch.ones(ranks, ranks)}, OPT)
    assert (f"so the {ranks} ranks along 'tp' compute the same" in caplog.text) == (split is None)


def test_a_loss_of_a_wrong_shape_outside_a_step_ends_at_the_users_call():
    with pytest.raises(TypeError, match="must return a 0-d floating-point loss") as caught:
        fzero.value_and_grad(lambda w: w * 2)(torch.ones(3))
    assert len(caught.traceback) == 1
