"""Writes into fresh memory are replaced where they stand; all others by a second trace."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fzero
from fzero import _torch
from fzero.graph.trace._replace_writes import replace_writes
from fzero.graph.trace._writes import writes

X = torch.linspace(-2, 2, 12).reshape(3, 4)


def of_silu(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.func.grad(lambda x: F.silu(x).square().sum())(x)]


def read_between_writes(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    before = y + 1
    again = y.add_(1, alpha=3)
    between = y * before
    y.mul_(between)
    return [y.sin(), again.cos(), between]


def of_itself(x: torch.Tensor) -> list[torch.Tensor]:
    y, z = x + 1, x.clone()
    y.mul_(y)
    z.sub_(y)
    return [y, z.fill_(2.0) + y, z]


def through_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    row = y[0]
    y.add_(1)
    return [row + y]


def into_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    y[0].add_(1)
    return [y]


def of_another_dtype(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.half() * 2
    y.add_(x)
    return [y]


def into_an_item(x: torch.Tensor) -> list[torch.Tensor]:
    low, high = torch.aminmax(x, dim=0)
    low.add_(high)
    return [low, high]


def of_other_places(x: torch.Tensor) -> list[torch.Tensor]:
    """`y.polygamma_(n)` is `polygamma(n, y)`."""
    y = x + 3
    y.polygamma_(1)
    return [y]


SIMPLE = [of_silu, read_between_writes, of_itself]
OTHERS = [through_a_view, into_a_view, of_another_dtype, into_an_item, of_other_places]


def in_place(f: Callable[[torch.Tensor], list[torch.Tensor]]) -> tuple[torch.fx.GraphModule, bool]:
    """Trace a function, replace its writes, and say whether they could be."""
    gm = _torch.trace(f, _torch.stand_ins_like([X]))
    return gm, replace_writes(gm.graph, {n: into for n in gm.graph.nodes if (into := writes(n))})


@pytest.mark.parametrize("f", SIMPLE)
def test_writes_replaced_in_place_give_the_graph_of_a_second_trace(f):
    gm, done = in_place(f)
    gm.graph.lint()
    stand_ins = _torch.stand_ins_like([X])
    twice = _torch.functionalize(_torch.trace(f, stand_ins), stand_ins).graph
    assert done and not any(writes(n) for n in gm.graph.nodes)
    assert [n.format_node() for n in gm.graph.nodes] == [n.format_node() for n in twice.nodes]
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(gm(X), f(X), strict=True))


@pytest.mark.parametrize("f", OTHERS)
def test_writes_that_cannot_be_replaced_are_left_to_a_second_trace(f):
    gm, done = in_place(f)
    before = [n.format_node() for n in _torch.trace(f, _torch.stand_ins_like([X])).graph.nodes]
    assert not done and [n.format_node() for n in gm.graph.nodes] == before


@pytest.mark.parametrize("f", [*SIMPLE, *OTHERS[:-1]])  # torch itself cannot replace the last
def test_a_jitted_function_that_writes_in_place_equals_the_eager_one(f):
    assert all(torch.equal(a, b) for a, b in zip(fzero.jit(f, backend="fx")(X), f(X), strict=True))


def test_stand_ins_of_replaced_writes_have_memory_of_their_own():
    gm, _ = in_place(read_between_writes)
    memory = [_torch.storage_id(n.meta["val"]) for n in gm.graph.nodes if n.op == "call_function"]
    assert len({*memory}) == len(memory)
