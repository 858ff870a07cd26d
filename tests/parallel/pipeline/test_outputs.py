"""What a pipeline says of each example: for evaluation and prediction, on any mesh, as without a pipeline."""

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero
from tests.helpers import LEAST, cases, either
from tests.parallel.pipeline.model import OPT, make_batch, make_loss, make_params, make_step
from tests.parallel.schedules.named import NAMED

ROWS = make_batch(19)
DATA = [{name: x[i] for name, x in ROWS.items()} for i in range(19)]


def sum_weighted(rest: Any, x: torch.Tensor, batch: Any) -> Any:
    losses = F.cross_entropy(x @ rest["table"].T, batch["targets"], reduction="none")
    return losses * batch["weights"], batch["weights"]


def answers(rest: Any, x: torch.Tensor, batch: Any) -> Any:
    logits = x @ rest["table"].T
    return {"token": logits.argmax(-1), "sure": logits.softmax(-1).amax(-1) > 0.5, "logits": logits}


def made(mesh: fzero.ranks.Mesh, stage: int, loss: fzero.parallel.pipeline.Pipeline, params: Any) -> tuple[Any, Any]:
    step = fzero.shard(make_step(loss), stage, mesh, split=loss.split)
    return step, step.init(loss.stack(params, mesh), OPT)[0]


def check(mesh: fzero.ranks.Mesh, stage: int, name: str, jit: bool = False) -> None:
    """Evaluate and predict 19 examples, 8 at once, and compare with the model without a pipeline."""
    loss, params = make_loss(4, schedule=name, stages_per_rank=NAMED[name], depth=5), make_params(5)
    step, sharded = made(mesh, stage, loss, params)
    programs = [
        fzero.evaluate(step, loss.outputs(sum_weighted), weighted=True),
        fzero.predict(step, loss.outputs(answers)),
    ]
    evaluate, predict = [fzero.jit(p, backend="fx", **LEAST) if jit else p for p in programs]
    batches = list(fzero.data.epoch(DATA, mesh, global_batch=8, axis=step.data_axes))
    actual = fzero.data.mean(evaluate(sharded, batch, rows) for batch, rows in batches)
    total, weight = make_loss(1, depth=5)(params, ROWS)
    assert actual == pytest.approx((total / weight).item(), rel=1e-12)
    expected = make_loss(1, depth=5).outputs(answers)(params, ROWS)
    parts = [fzero.tree.map(lambda x, rows=rows: x[:rows], predict(sharded, batch)) for batch, rows in batches]
    for key, value in expected.items():
        whole = torch.cat([part[key] for part in parts])
        assert whole.dtype == value.dtype
        torch.testing.assert_close(whole, value, rtol=1e-12, atol=1e-12)


SIMULATED = ("vmap", "lockstep")


@pytest.mark.parametrize("name,simulate", cases([("zbv", "lockstep")], itertools.product(NAMED, SIMULATED)))
def test_outputs_of_a_pipeline_equal_those_of_the_model(name, simulate):
    many = ((0, {"dp": 2, "pp": 2}), (3, {"pp": 3, "dp": 2}), (1, {"dp": 1, "pp": 4}), (2, {"dp": 2}))
    first = [*NAMED].index(name) % 4
    for stage, axes in either((many[first], many[first - 1]), many):
        check(fzero.mesh(simulate=simulate, **axes), stage, name)


@pytest.mark.slow
def test_jitted_outputs_of_a_pipeline_equal_the_eager_ones():
    check(fzero.mesh(dp=2, pp=2), 3, "interleaved", jit=True)


def test_a_mesh_of_stages_alone_has_no_axis_of_data():
    loss, params, mesh = make_loss(4), make_params(4), fzero.mesh(pp=2)
    step, sharded = made(mesh, 1, loss, params)
    assert step.data_axes == ()
    sums, weight = fzero.evaluate(step, loss.outputs(sum_weighted), weighted=True)(
        sharded, make_batch(8), torch.tensor(8)
    )
    torch.testing.assert_close((sums, weight), loss(params, make_batch(8)))
    logits = fzero.predict(step, loss.outputs(answers))(sharded, make_batch(8))["logits"]
    torch.testing.assert_close(logits, loss.outputs(answers)(params, make_batch(8))["logits"])


def test_outputs_of_a_pipeline_draw_the_masks_of_training():
    def dropping(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.4)

    loss, params, key = make_loss(4, block=dropping), make_params(4), fzero.random.key(1)
    total, weight = loss(params, make_batch(8), key)
    sums, weights = loss.outputs(sum_weighted)(params, make_batch(8), key)
    torch.testing.assert_close((sums.sum(), weights.sum()), (total, weight))


def test_outputs_of_a_pipeline_keep_no_residuals():
    params = fzero.tree.map(lambda x: x.clone().requires_grad_(), make_params(4))
    assert not make_loss(2).outputs(answers)(params, make_batch(4))["logits"].requires_grad


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_the_error_of_outputs_names_its_wrong_argument(simulate):
    loss, mesh = make_loss(4), fzero.mesh(dp=2, pp=2, simulate=simulate)
    step, sharded = made(mesh, 1, loss, make_params(4))
    batch, rows = mesh.split(make_batch(16), "dp"), torch.tensor(16)
    for said, program in (
        ("for a pipelined loss pass loss.outputs(last)", fzero.evaluate(step, loss)),
        ("for outputs, last(rest, x, batch) must return a tree of tensors [b, ...], for the b examples", None),
    ):
        program = program or fzero.evaluate(step, loss.outputs())
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            program(sharded, batch, rows)
    with pytest.raises(ValueError, match="leaf 'tokens' differs by rank along 'pp'"):
        fzero.evaluate(step, loss.outputs(sum_weighted), weighted=True)(sharded, mesh.split(make_batch(16)), rows)
    with pytest.raises(TypeError, match=r"outputs: last=3: expected a function"):
        loss.outputs(3)  # pyright: ignore[reportArgumentType]
