"""Mistakes of a first hour: what is passed in place of a step, a rule, a mesh or layers is named, with the remedy."""

import re
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.axes import axis_if_bound
from fzero.parallel import experts
from fzero.parallel import tensor as tp
from tests.errors.helpers import PARAMS, TRAIN_STEP, Row, check, init, step_of
from tests.helpers import train_step_for

OPT: Any = optim.sgd(0.1)
BFLOAT16 = fzero.Precision(param=torch.bfloat16)
MESH = fzero.mesh(dp=2)


HALF_PARAMS, HALF_OPT = {"w": torch.ones(3, 2)}, optim.master_weights(OPT, BFLOAT16)
TRAIN_HALF = train_step_for(lambda params, x: (x @ params["w"]).float().mean(), HALF_OPT)


def init_half() -> Any:
    return fzero.shard(TRAIN_HALF, 3, MESH).init(HALF_PARAMS, HALF_OPT)


def evaluated(*args: Any) -> Any:
    program = fzero.evaluate(step_of(3), lambda params, batch: {"error": batch.sum(1)})
    return program(*args)


def evaluated_rows(rows: Any) -> Any:
    return evaluated(init(3)[0], MESH.split(torch.ones(8, 4)), rows)


def evaluated_with_weights(result: Any) -> Any:
    program = fzero.evaluate(step_of(3), lambda params, batch: result(batch.sum(1)), weighted=True)
    return program(init(3)[0], MESH.split(torch.ones(8, 4)), 8)


def pipeline(**parts: Any) -> Any:
    usual = {"block": torch.mul, "first": lambda rest, batch: batch, "last": lambda rest, x, batch: x.mean()}
    return fzero.pipeline(micro_batches=2, **(usual | parts))


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
    "rows below 0": (
        lambda: evaluated_rows(-3),
        ValueError,
        r"rows=-3: expected a number of examples of the global ba",
    ),
    "rows beyond the batch": (lambda: evaluated_rows(9), ValueError, r"rows=9: expected .*, an int from 0 to 8$"),
    "a truth value as rows": (lambda: evaluated_rows(True), TypeError, r"the last argument is not a number of rows"),
    "a weighted result without weights": (
        lambda: evaluated_with_weights(lambda x: {"error": x}),
        TypeError,
        r"evaluate\(weighted=True\): <lambda> returns .*: expected a pair \(values, weights\)",
    ),
    "a weighted result of two names": (
        lambda: evaluated_with_weights(lambda x: {"error": x, "tokens": x}),
        TypeError,
        r"evaluate\(weighted=True\): <lambda> returns .*: expected a pair \(values, weights\)",
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
    "a misspelt axis of split layers": (
        lambda: fzero.mesh(dp=2, tp=2).spmd(lambda: axis_if_bound("tpp"))(),
        ValueError,
        r"axis='tpp' is not bound here: the bound axes are 'dp', 'tp'; did you mean 'tp'\?",
    ),
    "arguments of a schedule in another order": (
        lambda: optim.warmup_cosine(100, 1e-3, 1000),  # pyright: ignore[reportArgumentType]
        ValueError,
        "warmup_steps=0.001: expected a number of steps; the order of the arguments is peak, warmup_steps",
    ),
    "an axis of a rule that no mesh has": (
        lambda: split_step(lambda path, leaf: {"ep": 0}).init({"w": torch.ones(4, 4)}, OPT),
        ValueError,
        r"split: the rule gave \{'ep': 0\} for leaf 'w': axis 'ep' is not bound here: the bound axes are 'dp', 'tp'",
    ),
    "an axis of over that no mesh has": (
        lambda: step_of(3, over="dpp").init(PARAMS, OPT),
        ValueError,
        r"over: the rule gave .*'dpp'.* for leaf 'a\.w': axis 'dpp' is not bound here: .*; did you mean 'dp'\?",
    ),
    "replicas along no axis": (
        lambda: fzero.local_sgd.local_steps(step_of(3), every=2),
        ValueError,
        r"over='replica': expected an axis of Mesh.*fzero\.mesh\(replica=2, dp=4\), or pass over='dp'",
    ),
    "masters of masters": (
        lambda: optim.master_weights(optim.master_weights(OPT, BFLOAT16), BFLOAT16),
        ValueError,
        r"master_weights: opt is Optimizer\(master_weights\(sgd\(0.1\), <Precision>\)\), which keeps parameters",
    ),
    "masters that are rounded at random": (
        lambda: optim.stochastic_rounding(optim.master_weights(OPT, BFLOAT16), BFLOAT16, fzero.random.key(0)),
        ValueError,
        r"stochastic_rounding: opt is .*, which keeps parameters by a policy already: wrap the optimizer once",
    ),
    "two loss scales": (
        lambda: optim.dynamic_loss_scale(optim.dynamic_loss_scale(OPT)),
        ValueError,
        r"which has a loss scale already: wrap it once",
    ),
    "names of a mask": (
        lambda: optim.adamw(0.1, mask=["w"]),
        TypeError,
        r"mask is \['w'\]: expected a tree of bools like the parameters, or a function that makes one",
    ),
    "a block of its input first": (
        lambda: pipeline(block=lambda x: x),
        TypeError,
        r"block takes \(x\): expected a function \(p, x\), and index= or batch= if it names them",
    ),
    "a last part without its batch": (
        lambda: pipeline(last=lambda rest, x: x.mean()),
        TypeError,
        r"last takes \(rest, x\): expected a function \(rest, x, batch\)",
    ),
    "a misspelt value of remat in a pipeline": (
        lambda: pipeline(remat="matmul"),
        ValueError,
        r'fzero\.pipeline: remat=\'matmul\': expected True, False, "matmuls".*did you mean "matmuls"',
    ),
    "a count below 1 in DeepSpeed's estimate": (
        lambda: fzero.tuning.deepspeed_zero2(-3, devices_per_host=0),
        ValueError,
        r"num_params=-3: expected an int, at least 1",
    ),
    "no device in DeepSpeed's estimate": (
        lambda: fzero.tuning.deepspeed_zero3(3, 1, devices_per_host=0),
        ValueError,
        r"devices_per_host=0: expected an int, at least 1",
    ),
    "parameters in place of their number": (
        lambda: fzero.tuning.peer_estimates(PARAMS, 1, devices_per_host=1),  # pyright: ignore
        TypeError,
        r"num_params is a dict: expected a number of parameters, fzero\.tree\.numel\(params\)",
    ),
    "epochs of batches": (
        lambda: fzero.data.batches([1, 2], MESH, global_batch=2, epochs=3),
        TypeError,
        r"epochs= is no option of fzero\.data: use a range of steps: data\.steps\(0, epochs \* data\.per_epoch\)",
    ),
    "a misspelt option of a loader": (
        lambda: fzero.data.batches([1, 2], MESH, global_batch=2, num_worker=3),
        TypeError,
        r"num_worker= is an option neither of fzero\.data nor of torch's DataLoader; did you mean num_workers=\?",
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


NOTED: dict[str, tuple[Any, str]] = {
    "a batch of another dtype": (
        lambda: fzero.shard(TRAIN_HALF, 3, MESH)(*init_half(), MESH.split(torch.ones(4, 3))),
        r"Argument 2, is float32, and met bfloat16: .*; cast the batch, x\.to\(torch\.bfloat16\)",
    ),
    "a block whose arguments are swapped": (
        lambda: pipeline(block=lambda x, p: x @ p["w"])({"blocks": [{"w": torch.ones(2, 2)}] * 2}, torch.ones(4, 2)),
        r"fzero\.pipeline calls block\(p, x\): p is a dict of 'w'; x is float32 \[2, 2\]",
    ),
    "a batch size": (
        lambda: fzero.data.batches([1, 2], MESH, batch_size=2),  # pyright: ignore
        r"did you mean global_batch=, not batch_size=\?",
    ),
}


@pytest.mark.parametrize("name", NOTED)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_raw_error_of_the_first_hour_has_a_note(name):
    action, note = NOTED[name]
    with pytest.raises((RuntimeError, TypeError)) as caught:
        action()
    assert any(re.search(note, text) for text in caught.value.__notes__)


def test_a_name_for_an_axis_that_the_mesh_lacks_is_no_mistake():
    """One rule thus serves meshes with and without the axis."""
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
