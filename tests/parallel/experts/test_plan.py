"""A plan calls an exchange of tokens by the layer whose experts they go to."""

from typing import Any

import pytest
import torch

import fzero
from fzero.parallel import experts as moe
from tests.helpers import LEAST, cases, train_step_for
from tests.parallel.experts.model import OPT, batch_of, ffn, params_of

LAYERS = [f"blocks.{i}" for i in range(3)]


def loss_of(capacity: float | None) -> Any:
    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x, extra = torch.tanh(batch["x"] @ params["inp"]), torch.zeros((), dtype=torch.float64)
        for p in params["blocks"]:
            routing = moe.route(x @ p["router"], 2)
            x = x + moe.layer(ffn, p["experts"], x, routing, capacity=capacity)
            extra = extra + moe.balance_loss(routing)
        return (x @ params["head"] - batch["y"]).square().mean() + 0.01 * extra

    return loss_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage,k,capacity",
    cases(
        [(3, 3, 1.0)],
        [(*x, c) for x in ((0, 1), (2, 3), (3, 1), (3, 3)) for c in (1.0, None)],
    ),
)
def test_exchanges_are_called_by_their_layer(stage, k, capacity):
    ends, blocks = params_of(), [params_of(seed=i)["layer"] for i in range(3)]
    mesh, train_step = fzero.mesh(dp=2, ep=2), train_step_for(loss_of(capacity), OPT, micro_batches=k)
    step = fzero.shard(train_step, stage, mesh, split=moe.split_rule("experts"))
    state = step.init({"inp": ends["inp"], "blocks": blocks, "head": ends["head"]}, OPT)
    plan = fzero.plan(fzero.jit(step, backend="fx", **LEAST), *state, mesh.split(batch_of(24)))
    messages = [c for c in plan.collectives if c.kind == "all_to_all"]
    forward = [c.unit for c in messages if plan.operations[c.position].phase == "forward"]
    backward = [c.unit for c in messages if plan.operations[c.position].phase == "backward"]
    there_and_back = len(forward) // 3  # without capacity it sends the experts' numbers, too
    assert forward == [name for name in LAYERS for _ in range(there_and_back)] and there_and_back >= 2
    assert backward == [name for name in reversed(LAYERS) for _ in range(2)]
    assert {c.times for c in messages} == {k}
    assert not [c.unit for c in plan.collectives if c.kind != "all_reduce" and "(metric)" in c.unit]
    assert "all_to_all" in str(plan) and "blocks.*" in str(plan)
    metrics = [c.unit for c in plan.collectives if c.kind == "all_reduce" and "blocks" not in c.unit]
    assert any("(metric)" in unit for unit in metrics)  # the balance loss is of no layer
