"""Trees that change between steps, and states that a step forgets: each error names the leaf."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero._notice import warn_once
from fzero.testing import assert_trees_close
from tests.errors.helpers import OPT, PARAMS, PIECES, STAGES, TRAIN_STEP, TWO, X, init, loss_of, run, step_of
from tests.helpers import cases, train_step_for

CHANGED = {
    "new leaf": ({**PARAMS, "new": torch.ones(3)}, r"'new'"),
    "lost leaf": ({"a": PARAMS["a"]}, r"'c'"),
    "other shape": ({**PARAMS, "c": torch.ones(6)}, r"'c'"),
    "other dtype": ({**PARAMS, "c": torch.ones(5, dtype=torch.float64)}, r"'c'.*float(32|64)"),
}


@pytest.mark.parametrize("name, stage", [(n, s) for n in CHANGED for s in STAGES if s or not n.startswith("other")])
def test_parameters_that_changed_since_the_state_was_made_are_named(name, stage):
    params, message = CHANGED[name]
    with pytest.raises(ValueError, match=message):
        run(stage, init(stage, params=params)[0], init(stage)[1])


UNLIKE = r"result 0 is not like argument 0 \(parameters\)"
IN_ORDER = "where the new parameters belong: return params, opt_state, loss, in the order of the arguments"
FORGOTTEN = (
    r"train_step takes an optimizer's state \(argument 1, AdamState\), changes the parameters and returns no state: "
    r"return params, opt_state, loss; a function that only reads its state is step.program\(f\)"
)


RESULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "new leaf": (lambda p, s, loss: ({**p, "new": torch.ones(3)}, s, loss), rf"{UNLIKE}.*'new'"),
    "lost leaf": (
        lambda p, s, loss: ({"a": p["a"]}, s, loss),
        rf"{UNLIKE}: trees differ in structure: the old tree has leaf 'c' .*, and the new tree has not",
    ),
    "list": (lambda p, s, loss: (list(p.values()), s, loss), rf"{UNLIKE}.*'a.w'"),
    "number": (lambda p, s, loss: ({**p, "c": 3.0}, s, loss), rf"{UNLIKE}.*'c'"),
    "None": (lambda p, s, loss: ({**p, "c": None}, s, loss), rf"{UNLIKE}.*'c'"),
    "other dtype": (
        lambda p, s, loss: (tree.map(lambda x: x.double(), p), s, loss),
        rf"{UNLIKE}: leaf 'a.w' was float32.*became float64.*apply_updates keeps",
    ),
    "other shape": (
        lambda p, s, loss: (tree.map(lambda x: x[..., None], p), s, loss),
        rf"{UNLIKE}: leaf 'a.w' was float32.*apply_updates keeps",
    ),
    "state first": (lambda p, s, loss: (s, p, loss), rf"result 0 is AdamState, {IN_ORDER}"),
    "loss first": (lambda p, s, loss: (loss, p, s), rf"result 0 is float32 \[\], {IN_ORDER}"),
    "only the loss": (lambda p, s, loss: loss, rf"result 0 is float32 \[\], {IN_ORDER}"),
    "nothing": (lambda p, s, loss: None, "train_step returned None: return the new params, opt_state and loss"),
    "a list": (lambda p, s, loss: [p, s, loss], "train_step returned a list of 3: expected a tuple "),
    "no state": (lambda p, s, loss: (p, loss), FORGOTTEN),
    "no state, in a dict": (lambda p, s, loss: (p, {"loss": loss}), FORGOTTEN),
}


@pytest.mark.parametrize("stage", cases((STAGES[0], STAGES[-1]), STAGES))
@pytest.mark.parametrize("name", RESULTS)
def test_new_parameters_that_are_not_like_the_old_are_named(name, stage):
    change, message = RESULTS[name]
    with pytest.raises(ValueError, match=message):
        run(stage, *init(stage), train_step=lambda *args: change(*TRAIN_STEP(*args)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_state_is_refused_under_jit_and_in_a_chain(stage):
    opt = optim.chain(optim.clip_by_global_norm(1.0), OPT)
    train_step = train_step_for(loss_of, opt)
    step = fzero.shard(lambda p, s, x: train_step(p, s, x)[::2], stage, TWO)
    with pytest.raises(ValueError, match=r"argument 1, \(\(\), AdamState\).*returns no state"):
        fzero.jit(step, backend="fx")(*step.init(PARAMS, opt), PIECES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_only_reads_its_state_need_not_return_it(stage):
    params, state = init(stage)
    params_out, count = run(stage, params, state, train_step=lambda p, s, x: (p, s.count))
    assert_trees_close(step_of(stage).gather(params_out), PARAMS)
    assert count == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_drops_the_optimizers_count_gets_a_notice(stage, caplog):
    warn_once.cache_clear()
    opt = optim.sgd(0.1)
    step = step_of(stage, train_step=lambda p, s, x: train_step_for(loss_of, opt)(p, s, x)[::2])
    for _ in range(2):
        step(*step.init(PARAMS, opt), PIECES)
    (message,) = [r.message for r in caplog.records if "returns no state" in r.message]
    assert "argument 1, SgdState" in message


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_failed_leaves_no_axis_bound(stage):
    with pytest.raises(ValueError, match="differs by rank"):
        run(stage, *init(stage), train_step=lambda p, s, x: (p, s, x.sum()))
    with pytest.raises(ValueError, match="no rank program is running"):
        fzero.axes.axis_index("dp")
    assert fzero.axes.axis_size() == 1
    run(stage, *init(stage))


def test_a_batch_that_was_not_split_gets_a_notice(caplog):
    warn_once.cache_clear()
    for _ in range(2):
        run(2, *init(2), batch=X)
    (message,) = [r.message for r in caplog.records if "every rank computes the same" in r.message]
    assert "mesh.split(batch)" in message and "mesh.local(batch)" in message
