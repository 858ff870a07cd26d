"""What a compiler never stores, and that a plan for it does not count."""

import shutil
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

import fzero
from fzero import optim
from fzero.graph.ir import FUSED, aten
from fzero.graph.passes import mark_fused
from fzero.graph.planning._fused_values import unstored_values
from fzero.graph.planning.memory._live_ranges import live_ranges
from fzero.transforms import step
from tests.graph.graphs import Builder
from tests.memory import peak_bytes

N = 64


def list_stored(graph: Graph) -> list[str]:
    """List the values that a compiler stores: their operations."""
    graph = mark_fused(graph)
    fused = unstored_values(list(graph.nodes))
    assert {r.bytes for r in live_ranges(graph) if r.start >= 0} <= {0, 4, 4 * N}
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function" and n not in fused]


def build(make: Any) -> Graph:
    b = Builder(2, [(N,), (N,), (8, 8)], [{"block": "a"}, {"block": "b"}, {}], False)
    return b.done([make(b, *b.inputs)])


def last(b: Builder, x: Node) -> Node:
    return b(aten.neg.default, x)


STORED = {
    "a chain": (lambda b, x, y, w: last(b, b(aten.tanh.default, b(aten.mul.Tensor, x, 2))), ["neg"]),
    "read twice": (
        lambda b, x, y, w: (lambda z: b(aten.add.Tensor, b(aten.tanh.default, z), z))(b(aten.mul.Tensor, x, 2)),
        ["add"],
    ),
    "a cast and a constant": (
        lambda b, x, y, w: b(
            aten.add.Tensor, b.cast(b.cast(x, torch.bfloat16), torch.float32), b(aten.full.default, [N], 1.0)
        ),
        ["add"],
    ),
    "for a sum": (lambda b, x, y, w: b(aten.sum.default, b(aten.mul.Tensor, x, x)), ["sum"]),
    "before and after a sum": (
        lambda b, x, y, w: (lambda z: b(aten.mul.Tensor, z, b(aten.sum.default, z)))(b(aten.tanh.default, x)),
        ["tanh", "sum", "mul"],
    ),
    "spread": (
        lambda b, x, y, w: b(aten.mul.Tensor, b(aten.slice.Tensor, b(aten.tanh.default, x), 0, 0, 1), y),
        ["slice", "mul"],
    ),
    "for a product": (
        lambda b, x, y, w: b(aten.mm.default, b.fit(b(aten.tanh.default, x), (8, 8)), w),
        ["tanh", "view", "mm"],
    ),
    "a product in between": (
        lambda b, x, y, w: (lambda z: b(aten.add.Tensor, b.flat(b(aten.mm.default, w, w)), z))(b(aten.tanh.default, x)),
        ["tanh", "mm", "view", "add"],
    ),
    "a random value": (lambda b, x, y, w: last(b, b(aten.rand_like.default, x)), ["rand_like", "neg"]),
    "for a collective": (
        lambda b, x, y, w: b.all_reduce(b(aten.tanh.default, x)),
        ["tanh", "all_reduce", "wait_tensor"],
    ),
    "for two blocks": (
        lambda b, x, y, w: (
            lambda z: b(
                aten.add.Tensor,
                b(aten.mm.default, b.fit(b(aten.mul.Tensor, z, x), (8, 8)), w),
                b.fit(b(aten.mul.Tensor, z, y), (8, 8)),
            )
        )(b(aten.tanh.default, x)),
        ["tanh", "mul", "view", "mm", "view", "add"],
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_temporaries_of_one_fused_loop_are_not_stored(name):
    make, expected = STORED[name]
    assert sorted(list_stored(build(make))) == sorted(expected)


def test_results_are_stored_and_scalars_are_not_marked():
    b = Builder(2, [(N,)], [{}], False)
    y = b(aten.tanh.default, b.inputs[0])
    graph = mark_fused(b.done([y, b(aten.mul.Tensor, y, b(aten.mul.Tensor, b(aten.sum.default, y), 2))]))
    assert not [n for n in graph.nodes if FUSED in n.meta]


def arguments(opt: Any) -> tuple[Any, Any, Any]:
    params = {str(i): {"w": torch.ones(512, 512)} for i in range(3)}
    return params, opt.init(params), {k: {"w": p["w"] / 2} for k, p in params.items()}


CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))


def updating(backend: Any) -> Any:
    return fzero.jit(lambda params, state, grads: step(CLIPPED)(params, grads, state), donate=(0, 1), backend=backend)


def test_a_plan_for_inductor_has_no_temporaries_of_an_update():
    args = arguments(CLIPPED)
    one = args[0]["0"]["w"].nbytes
    assert updating("inductor").plan(*args).added_bytes < 200
    assert updating("fx").plan(*args).added_bytes > 2 * one
    assert updating("auto").plan(*args).added_bytes > 2 * one  # which runs operation by operation at first


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")
def test_the_peak_of_a_compiled_update_is_the_plans():
    args, f = [*arguments(CLIPPED)], updating("inductor")
    plan = f.plan(*args)

    def run() -> None:
        args[:2] = f(*args)

    run()  # compiles
    assert abs(peak_bytes(run) - plan.added_bytes) < 10_000
