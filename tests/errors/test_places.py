"""What stands in another's place: keywords of a step, a scheduler as a rate, a mask of another tree, swapped trees."""

from typing import Any

import pytest
import torch

import fzero
from fzero import data, optim
from tests.errors.helpers import TWO, Row, X, check

MODULE = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
MODEL = fzero.nn.functional(MODULE)
PLAIN = fzero.nn.functional(torch.nn.Linear(3, 2))
OPT = optim.adamw(0.1)
NESTED = {"lin": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}}
TORCH_OPT = torch.optim.SGD(MODULE.parameters(), lr=0.1)
LAMBDA_LR: Any = torch.optim.lr_scheduler.LambdaLR(TORCH_OPT, lambda count: 1.0)
COSINE_LR: Any = torch.optim.lr_scheduler.CosineAnnealingLR
HALF_MASK = {"weight": True}
ANY: Any = None


def step_of_loss(loss: Any) -> fzero.zero.ShardedStep:
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss)(params, batch)
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return fzero.shard(train_step, 3, TWO)


def train(loss: Any, params: Any, batch: Any = X, jit: bool = False) -> Any:
    """Run one step with a loss that reads a wrong key."""
    step = step_of_loss(loss)
    return (fzero.jit(step, backend="fx") if jit else step)(*step.init(params, OPT), TWO.split(batch))


def called_by_keyword(jit: bool) -> Any:
    step = step_of_loss(lambda params, x: (x @ params["weight"].T).mean())
    params, opt_state = step.init(PLAIN.params, OPT)
    return (fzero.jit(step) if jit else step)(params=params, opt_state=opt_state, batch=TWO.split(X))


BY_KEYWORD = (
    r"the step was called with 0 positional arguments, and with params, opt_state, batch by keyword: pass the "
    r"parameters by position, step\(params, opt_state, batch\)$"
)
ROWS: dict[str, Row] = {
    "a step by keyword": (lambda: called_by_keyword(False), ValueError, BY_KEYWORD),
    "a jitted step by keyword": (lambda: called_by_keyword(True), ValueError, BY_KEYWORD),
    "a scheduler of torch as the rate": (
        lambda: optim.adamw(LAMBDA_LR),
        ValueError,
        r"learning_rate is a torch\.optim\.lr_scheduler\.LambdaLR, which writes rates .*: expected .* a schedule",
    ),
    "the class of a scheduler as the rate": (
        lambda: optim.sgd(COSINE_LR),
        ValueError,
        r"CosineAnnealingLR, .* such as optim\.warmup_cosine\(peak, 0, total_steps\)$",
    ),
    "an optimizer of torch as the rate": (
        lambda: optim.lion(TORCH_OPT),  # pyright: ignore
        ValueError,
        r"learning_rate is a torch\.optim\.sgd\.SGD, which writes rates into an optimizer of torch",
    ),
    "the name of a schedule as the rate": (
        lambda: optim.adamw("cosine"),  # pyright: ignore
        ValueError,
        r"learning_rate='cosine': expected .* such as optim\.warmup_cosine\(peak, warmup_steps, total_steps\)$",
    ),
    "a mask that lacks a leaf": (
        lambda: optim.adamw(0.1, mask=HALF_MASK).init(PLAIN.params),
        ValueError,
        r"params has leaf 'bias' \(float32 \[2\]\), and the mask has not",
    ),
    "a mask that lacks a leaf, of a chain": (
        lambda: optim.lamb(0.1, mask=HALF_MASK).init(PLAIN.params),
        ValueError,
        r"params has leaf 'bias' .*, and the mask has not",
    ),
    "a mask that lacks a leaf, of adafactor": (
        lambda: optim.adafactor(0.1, mask=HALF_MASK).init(PLAIN.params),
        ValueError,
        r"params has leaf 'bias' .*, and the mask has not",
    ),
    "a mask that lacks a leaf, in a step": (
        lambda: step_of_loss(ANY).init(PLAIN.params, optim.adamw(0.1, mask=HALF_MASK)),
        ValueError,
        r"params has leaf 'bias' .*, and the mask has not",
    ),
    "buffers before the parameters": (
        lambda: MODEL.apply(MODEL.buffers, MODEL.params, X),
        TypeError,
        r"params are the buffers, and buffers the parameters: apply\(params, buffers, \*inputs\)$",
    ),
    "no buffers before the parameters": (
        lambda: PLAIN.apply(PLAIN.buffers, PLAIN.params, X),
        TypeError,
        r"params are the buffers, and buffers the parameters",
    ),
    "no buffers in a call": (
        lambda: PLAIN.apply(PLAIN.params, X),  # pyright: ignore
        TypeError,
        r"buffers is a Tensor: expected a dict of tensors by name, .* in the call apply\(params, buffers, \*inputs\)$",
    ),
    "init of a functional": (
        lambda: step_of_loss(ANY).init(MODEL, OPT),
        TypeError,
        r"params leaf 'apply' is a .*Apply: expected a tensor; of apply, params, buffers = .* pass params$",
    ),
    "an optimizer's init of a functional": (
        lambda: OPT.init(MODEL),
        TypeError,
        r"params leaf '0' is a .*Apply: expected a tensor; of apply, params, buffers = .* pass params$",
    ),
    "a mesh before the data set": (
        lambda: data.batches(TWO, X, global_batch=2),  # pyright: ignore
        TypeError,
        r"dataset is a Mesh: the data set comes first, data\.batches\(dataset, mesh, global_batch=32\)$",
    ),
    "a loader in place of the data set": (
        lambda: data.batches(torch.utils.data.DataLoader([1, 2]), TWO, global_batch=2),  # pyright: ignore
        TypeError,
        r"dataset is a DataLoader: pass its data set, loader\.dataset",
    ),
    "a mesh before the batches": (
        lambda: data.prefetch(TWO, [X]),  # pyright: ignore
        TypeError,
        r"mesh is a list: expected a mesh, as in fzero\.data\.prefetch\(batches, mesh\)$",
    ),
    "an optimizer in the place of parameters": (
        lambda: optim.apply_updates(OPT, PLAIN.params),
        TypeError,
        r"apply_updates was given an optimizer as params: optim\.apply_updates\(params, updates\)",
    ),
    "masks before optimizers": (
        lambda: optim.by_group((lambda params: params, OPT)),  # pyright: ignore
        TypeError,
        r"an optimizer is in the place of a mask: expected pairs \(opt, mask\), in this order$",
    ),
    "a tree before the step of a checkpoint": (
        lambda: fzero.checkpoint.checkpoints("/nowhere").save({"w": X}, 3),  # pyright: ignore
        ValueError,
        r"expected the number of the step, as in checkpoints\.save\(step, values\), an int from 0",
    ),
    "a class in place of a module": (
        lambda: fzero.nn.functional(torch.nn.Linear),  # pyright: ignore
        TypeError,
        r"module is a type: expected a torch\.nn\.Module; call the class, fzero\.nn\.functional\(Linear\(\.\.\.\)\)$",
    ),
    "a reduction in the place of an axis": (
        lambda: fzero.collectives.psum(X, torch.distributed.ReduceOp.SUM),  # pyright: ignore
        TypeError,
        r"axis=.*: expected the name of an axis, or a tuple of names$",
    ),
    "the shape of a mesh": (
        lambda: fzero.mesh(shape=(2, 2)),  # pyright: ignore
        TypeError,
        r"shape=\(2, 2\): expected an int, .*; each axis has a name of its own, fzero\.mesh\(dp=2, tp=2\)$",
    ),
    "a misspelt axis of a step": (
        lambda: fzero.shard(lambda *args: args, 3, TWO, axis="dpp"),
        ValueError,
        r"'dpp' is not an axis of Mesh\(dp=2, simulated\); did you mean \"dp\"\?$",
    ),
    "a name as the number of a batch": (
        lambda: data.batches([1, 2], TWO, global_batch=2)["a"],  # pyright: ignore
        TypeError,
        r"batch 'a': expected the number of a batch, an int of 0 or more$",
    ),
    "the text of a number as the peak": (
        lambda: optim.warmup_cosine("1e-3", 10, 100),  # pyright: ignore
        ValueError,
        r"peak='1e-3': expected a number$",
    ),
    "the text of a number as steps": (
        lambda: optim.linear(0.0, 1.0, steps="10"),  # pyright: ignore
        ValueError,
        r"steps='10': expected a number$",
    ),
    "the text of a number as the end of a schedule": (
        lambda: optim.linear(0.0, "1", steps=10),  # pyright: ignore
        ValueError,
        r"end='1': expected a number$",
    ),
    "an axis before the batch": (
        lambda: TWO.split("dp", X),  # pyright: ignore
        TypeError,
        r"axis=float32 \[8, 3\]: expected the name of an axis of Mesh",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_value_in_the_place_of_another_is_named(case):
    check(ROWS[case])


KEYS: dict[str, tuple[Any, str]] = {
    "a flat name of nested parameters": (
        lambda: train(lambda params, x: (x @ params["lin.weight"].T).mean(), NESTED),
        "Argument 0 (parameters) is nested: read ['lin']['weight'], and not ['lin.weight']",
    ),
    "a nested name of flat parameters": (
        lambda: train(lambda params, x: (x @ params["lin"]["weight"].T).mean(), {"lin.weight": torch.ones(2, 3)}),
        "Argument 0 (parameters) is a flat dict: read ['lin.weight']",
    ),
    "a flat name of parameters in a list": (
        lambda: train(lambda params, x: (x @ params["blocks.0.w"].T).mean(), {"blocks": [{"w": torch.ones(2, 3)}]}),
        "Argument 0 (parameters) is nested: read ['blocks'][0]['w'], and not ['blocks.0.w']",
    ),
    "a key that lies further down": (
        lambda: train(lambda params, x: (x @ params["w"].T).mean(), {"blocks": [{"w": torch.ones(2, 3)}]}),
        "Argument 0 (parameters) has 'w' further down: read ['blocks'][0]['w']",
    ),
    "the end of a flat name": (
        lambda: train(lambda params, x: (x @ params["weight"].T).mean(), {"lin.weight": torch.ones(2, 3)}),
        "Argument 0 (parameters) has no key 'weight'; did you mean 'lin.weight'?",
    ),
    "a key of the parameters, read from the batch": (
        lambda: train(lambda params, x: x["weight"].mean(), PLAIN.params, {"inputs": X}),
        "Argument 2 (batch) has the keys 'inputs'",
    ),
    "a misspelt parameter": (
        lambda: train(lambda params, x: params["wieght"].mean(), PLAIN.params),
        "Argument 0 (parameters) has no key 'wieght'; did you mean 'weight'?",
    ),
    "a misspelt parameter of a jitted step": (
        lambda: train(lambda params, x: params["wieght"].mean(), PLAIN.params, jit=True),
        "Argument 0 (parameters) has no key 'wieght'; did you mean 'weight'?",
    ),
    "a misspelt key of the batch": (
        lambda: train(lambda params, x: x["input"].mean(), PLAIN.params, {"inputs": X}),
        "Argument 2 (batch) has no key 'input'; did you mean 'inputs'?",
    ),
    "a key as an attribute": (
        lambda: train(lambda params, x: x.inputs.mean(), PLAIN.params, {"inputs": X}),
        "Argument 2 (batch) is a dict: read ['inputs']",
    ),
    "a key that is near none": (
        lambda: train(lambda params, x: x["labels"].mean(), PLAIN.params, {"inputs": X}),
        "Argument 2 (batch) has the keys 'inputs'",
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_key_that_is_not_there_is_answered_with_the_keys_of_the_arguments(case):
    action, note = KEYS[case]
    with pytest.raises((KeyError, AttributeError)) as caught:
        action()
    assert note in caught.value.__notes__


@pytest.mark.parametrize("read", [lambda own: own["weight"], lambda own: own.weight])
def test_a_key_that_the_arguments_have_is_missing_in_a_dict_of_the_user(read):
    """So the arguments' own key is no remedy."""
    with pytest.raises((KeyError, AttributeError)) as caught:
        train(lambda params, x: params["weight"].mean() * read({"scale": 1.0}), PLAIN.params)
    assert not [note for note in caught.value.__notes__ if "(parameters)" in note]


def test_an_error_without_a_key_gets_no_note_on_keys():
    with pytest.raises(KeyError) as caught:
        train(lambda params, x: {}[3], PLAIN.params)
    assert not any(note.startswith("Argument") for note in caught.value.__notes__)
