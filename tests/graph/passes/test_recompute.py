"""Laws of the pass that computes values again."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given

from fzero import _torch
from fzero.graph.ir import is_cheap
from fzero.graph.ir._ops import is_random, op_name
from fzero.graph.passes import recompute, schedule
from fzero.graph.planning.memory._live_ranges import peak_bytes
from fzero.graph.trace._trace import trace
from tests.graph.graphs import lines, samples
from tests.graph.passes.helpers import members
from tests.helpers import examples


@examples(25, 50)
@given(samples())
def test_recompute_only_adds_cheap_operations_that_draw_nothing(make):
    graph = make().graph
    again = recompute(graph, 1)
    assert members(again) == members(graph)
    before, after = Counter(str(n.target) for n in graph.nodes), Counter(str(n.target) for n in again.nodes)
    assert before <= after
    cheap = {str(n.target) for n in graph.nodes if is_cheap(n) and not is_random(n)}
    assert {*(after - before)} <= cheap


def mlp_step(*params: torch.Tensor) -> list[torch.Tensor]:
    def loss(ws: Any) -> torch.Tensor:
        x = torch.ones(64, 64)
        for i, w in enumerate(ws):
            x = torch.nn.functional.gelu(x @ w)
            x = torch.nn.functional.dropout(x, 0.5) if i == 1 else x
        return x.sum()

    return [w - g for w, g in zip(params, torch.func.grad(loss)(params), strict=True)]


def test_recompute_repeats_activation_functions_and_no_costly_or_random_operations():
    sizes = [torch.ones(64, 64) for _ in range(6)]
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(6)]
    graph = trace(mlp_step, _torch.stand_ins_like(sizes), labels).graph
    again = recompute(graph)
    before, after = (Counter(op_name(n) for n in g.nodes) for g in (graph, again))
    assert after["gelu"] > before["gelu"] == 6
    for name in ("mm", *{op_name(n) for n in graph.nodes if is_random(n)}):
        assert after[name] == before[name] > 0
    assert peak_bytes(schedule(again)) < peak_bytes(schedule(graph))
    assert lines(recompute(graph, 1 << 20)) == lines(graph)


def residual_step(*params: torch.Tensor) -> list[torch.Tensor]:
    """Blocks with a layer norm, whose backward pass makes a gradient used at once and one that is live to the end."""

    def loss(ws: Any) -> torch.Tensor:
        x = torch.ones(256, 64)
        for scale, w, v in zip(ws[1::3], ws[2::3], ws[3::3], strict=True):
            normed = torch.nn.functional.layer_norm(x, [64], scale)
            x = x + torch.nn.functional.gelu(normed @ w) @ v
        return torch.nn.functional.layer_norm(x, [64], ws[0]).square().sum()

    return [w - g for w, g in zip(params, torch.func.grad(loss)(params), strict=True)]


def test_recompute_keeps_no_value_alive_only_to_repeat_a_gradient():
    shapes = [(64,), *[shape for _ in range(6) for shape in ((64,), (64, 256), (256, 64))]]
    sizes = [torch.ones(*shape) for shape in shapes]
    labels = [{"label": str(i), "kind": "parameters", "block": ""} for i in range(len(sizes))]
    graph = trace(residual_step, _torch.stand_ins_like(sizes), labels).graph
    again = recompute(graph)
    before, after = (Counter(op_name(n) for n in g.nodes) for g in (graph, again))
    assert after["gelu"] > before["gelu"] and after["native_layer_norm"] > before["native_layer_norm"]
    assert after["add"] == before["add"] > 6
    assert peak_bytes(schedule(again)) < peak_bytes(schedule(graph))
