"""Borders: what goes from segment to segment lies as it was traced, whatever Inductor makes of its operations."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.fx import Graph, Node

import fzero
from fzero import _torch, optim
from fzero.graph.ir import graph_results, is_input
from fzero.graph.planning._subgraphs import is_alias
from fzero.graph.run import _executable, _program
from fzero.graph.run._backends import LoweringOptions, lower
from fzero.graph.run._executable import Executable, _with_traced_layouts, make_operations_executable
from fzero.graph.run._segment_compiler import compile_graph
from tests.graph.helpers import needs_compiler
from tests.graph.run.helpers import Value, trace_graph
from tests.helpers import examples, train_step_for

B, H, T, D = 2, 2, 6, 4  # what values begin as: samples, heads, tokens, features
Step = Callable[[Value, Value], Value]  # of a value and a parameter [D, D], to a value of as many elements


def attend_by_heads(x: Value, w: Value, **options: Any) -> Value:
    """Attend as models do: projections, each seen as heads, and heads seen as features again."""
    y = x.reshape(B, T, H * D)
    q, k, v = [(y @ a).view(B, T, H, D).transpose(1, 2) for a in (_wide(w), _wide(w.t()), _wide(w + 1))]
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(B, T, H * D)


def _wide(w: Value) -> Value:
    return torch.cat([torch.cat([w, -w], 1), torch.cat([w, w], 1)]) / 4


def attend_by_products(x: Value, w: Value) -> Value:
    """Attend by products and a softmax, as `attn_implementation="eager"` does."""
    y = (x.reshape(B, H, T, D) @ w).transpose(2, 3)
    return (y.transpose(2, 3) @ y).softmax(-1) @ y.transpose(2, 3)


def over_ranks(x: Value, w: Value) -> Value:
    """Attend under vmap: torch has no batching rule, and stacks."""
    q = x.reshape(B, T, H, D).transpose(1, 2).unsqueeze(0)
    return torch.vmap(lambda q: F.scaled_dot_product_attention(q, q @ w, q, is_causal=True))(q)


def backward(f: Step) -> Step:
    """Take the gradient by the value, which has the layouts of a backward pass."""
    return lambda x, w: torch.func.grad(lambda y: (f(y, w) ** 2).sum())(x) / 8 + x


STEPS: dict[str, Step] = {
    "attention": attend_by_heads,
    "causal attention": lambda x, w: attend_by_heads(x, w, is_causal=True),
    "masked attention": lambda x, w: attend_by_heads(x, w, attn_mask=torch.ones(T, T, dtype=torch.bool).tril()),
    "attention by products": attend_by_products,
    "attention over ranks": over_ranks,
    "product": lambda x, w: x.reshape(-1, D) @ w,
    "product of transposes": lambda x, w: (w @ x.reshape(B, -1, D).transpose(1, 2)).transpose(1, 2),
    "heads": lambda x, w: x.reshape(B, T, H, D).transpose(1, 2),
    "permuted": lambda x, w: x.reshape(B, H, T, D).permute(2, 0, 3, 1),
    "copied": lambda x, w: x.reshape(T, -1).t().contiguous(),
    "copied as it lies": lambda x, w: x.reshape(B, H, T, D).transpose(1, 3).clone() + 1,
    "expanded": lambda x, w: (x.reshape(B, 1, -1).expand(B, 3, -1) * 2).mean(1),
    "sliced": lambda x, w: torch.cat([x.reshape(B, H, T, D)[:, :, 2:], x.reshape(B, H, T, D)[:, :, :2]], 2),
    "stacked": lambda x, w: torch.stack([y.t() for y in x.reshape(2, T, -1)], 1),
    "stacked alone": lambda x, w: torch.stack([x.reshape(B, T, H, D).transpose(1, 2)]),
    "every second": lambda x, w: torch.stack([x.reshape(-1, 2)[:, 0] * 1, x.reshape(-1, 2)[:, 1].sin()]),
    "summed": lambda x, w: x - x.transpose(0, -1).sum(0, True).transpose(0, -1),
    "normalised": lambda x, w: F.layer_norm(x.reshape(B, T, H, D).transpose(1, 2), (D,)),
    "convolved": lambda x, w: F.conv1d(x.reshape(B, T, H * D).transpose(1, 2), _wide(w)[:, :D, None], groups=2),
    "of two ways": lambda x, w: x.reshape(B, H, T, D).transpose(1, 3) + x.reshape(B, D, T, H).sin(),
}
STEPS |= {f"{name}, backward": backward(STEPS[name]) for name in STEPS if "attention" in name or "product" in name}


def made_of(names: Sequence[str]) -> Callable[..., list[Value]]:
    """Make a function of a value and a parameter that takes steps one after the other, and returns the last two."""

    def f(x: Value, w: Value) -> list[Value]:
        results = [x]
        for name in names:
            results.append(STEPS[name](results[-1], w))
        return results[-2:]

    return f


def cut_at(places: frozenset[int]) -> Callable[[Iterable[Node]], list[list[Node]]]:
    """Make what cuts a graph into subgraphs before operations of these numbers."""

    def cut(nodes: Iterable[Node]) -> list[list[Node]]:
        subgraphs: list[list[Node]] = [[]]
        count, home = 0, {}
        for n in nodes:
            if n.op != "call_function" or is_alias(n):
                continue
            if "getitem" in str(n.target):  # a tuple does not leave its segment
                home[n] = home[n.all_input_nodes[0]]
                subgraphs[home[n]].append(n)
                continue
            count += 1
            if count in places and subgraphs[-1]:
                subgraphs.append([])
            subgraphs[-1].append(n)
            home[n] = len(subgraphs) - 1
        return [subgraph for subgraph in subgraphs if subgraph]

    return cut


class Watched:
    """Sees, in the place of `_with_traced_layouts`, that what goes in and comes out lies as its stand-ins do."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, runs: Any, graph: Graph, stand_ins: Sequence[Any]) -> Any:
        outputs = [n.meta["val"] for n in graph_results(graph)]

        def run(args: list[Any]) -> Any:
            self.check(args, stand_ins)
            out = runs(args)
            self.check(out, outputs)
            return out

        return run

    def check(self, xs: Sequence[Any], stand_ins: Sequence[Any]) -> None:
        for x, stand_in in zip(xs, stand_ins, strict=True):
            assert (x.shape, x.dtype) == (stand_in.shape, stand_in.dtype)
            assert _torch.have_equal_strides(x, stand_in), (x.stride(), stand_in.stride())
            self.seen += 1


def compile_at(graph: Graph, places: frozenset[int], patch: pytest.MonkeyPatch) -> tuple[Executable, Watched]:
    """Compile a graph that is cut before some operations, with a watch at each border."""
    watched = Watched()
    patch.setattr(_program, "split_into_subgraphs", cut_at(places))
    patch.setattr(_executable, "_with_traced_layouts", watched)
    return lower(graph, "inductor", LoweringOptions(strict=True)), watched


# the stand-ins of attention in float64 have sums in float32 before torch 2.13, which kernels have not
DTYPE, CLOSE = (torch.float64, 1e-9) if torch.__version__ >= "2.13" else (torch.float32, 1e-4)
ATTENTION = ["causal attention, backward", "attention over ranks", "stacked alone", "every second"]


@needs_compiler
@examples(0, 40)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=5),
    places=st.frozensets(st.integers(2, 40), min_size=1, max_size=4),
)
@example(ATTENTION, frozenset({7, 19, 23}))
def test_segments_cut_anywhere_equal_the_operations_one_by_one(names, places):
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=g, dtype=DTYPE) for s in ((B, T, H, D), (D, D))]
    with pytest.MonkeyPatch.context() as patch, _torch.quiet_vmap_fallback():
        graph = trace_graph(made_of(names), args)
        runs, watched = compile_at(graph, places, patch)
        got, expected = runs([*args]), make_operations_executable(graph)([*args])
    assert watched.seen >= len(got) and not runs.uncompiled
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=CLOSE, atol=CLOSE)


# The case that users met.


def project_heads(width: int, heads: int) -> Any:
    def attend(p: Any, x: Value) -> Value:
        q, k, v = [(x @ p[name]).view(*x.shape[:2], heads, -1).transpose(1, 2) for name in "qkv"]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape) @ p["o"]

    def loss_fn(params: Any, x: Value) -> Value:
        for p in params["blocks"]:
            x = x + attend(p, x)
        return (x**2).mean()

    g = torch.Generator().manual_seed(0)
    blocks = [{name: torch.randn(width, width, generator=g) / width**0.5 for name in "qkvo"} for _ in range(2)]
    return loss_fn, {"blocks": blocks}


@needs_compiler
@pytest.mark.slow  # the models of tests/models/test_compiled.py are such
@pytest.mark.parametrize("ranks, stage", [(1, 3), (2, 0)])
def test_separate_projections_and_causal_attention_train_compiled(ranks, stage):
    loss_fn, params = project_heads(64, 2)
    opt = optim.sgd(1e-2)
    mesh = fzero.mesh(dp=ranks)
    step = fzero.shard(train_step_for(loss_fn, opt), stage, mesh)
    batch = torch.randn(2 * ranks, 32, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for backend in ("fx", "inductor"):
        run, state = fzero.jit(step, backend=backend, strict=backend == "inductor"), step.init(params, opt)
        for _ in range(2):
            *state, loss = run(*state, mesh.split(batch))
        losses.append(loss)
    torch.testing.assert_close(*losses)


# Views and copies.


@needs_compiler
def test_a_view_of_an_operand_with_other_strides_runs_as_a_reshape():
    """A stack of one lies in rows; Inductor makes of it a copy that lies as its operand does."""

    def f(x: Value) -> list[Value]:
        return [torch.stack([x.transpose(1, 2)]).view(B, -1) + 1]

    args = [torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(0))]
    graph = trace_graph(f, args)
    stand_ins = [n.meta["val"] for n in graph.nodes if is_input(n)]
    outputs = [n.meta["val"] for n in graph_results(graph)]
    (got,) = compile_graph(graph, stand_ins, outputs, "a segment")([*args])
    torch.testing.assert_close(got, f(*args)[0])


def test_a_kernel_result_with_unexpected_strides_does_not_fail_the_step():
    """oneDNN returns such strides for a convolution's gradients, uncompiled too: a view is a reshape there."""
    graph = trace_graph(lambda x: [x.view(-1) + 1], [torch.ones(2, 3)])
    x = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(make_operations_executable(graph)([x])[0], x.reshape(-1) + 1)


def test_an_argument_with_other_strides_is_copied_at_each_call():
    args = [torch.ones(2, 3), torch.ones(3)]
    graph, strides = trace_graph(lambda x, y: [x + y], args), []

    def runs(args: list[Any]) -> list[Any]:
        strides.append([x.stride() for x in args])
        return [args[0] + args[1]]

    run = _with_traced_layouts(runs, graph, args)
    odd, even = torch.arange(6.0).view(3, 2).t(), torch.ones(3)
    for _ in range(2):
        assert torch.equal(run([odd, even])[0], odd + even)
    assert strides == [[(3, 1), (1,)]] * 2


def test_a_written_argument_keeps_the_traced_layout():
    graph = trace_graph(lambda x: [x.sin()], [torch.ones(2, 3)])
    (x,) = [n for n in graph.nodes if is_input(n)]
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        graph.call_function(torch.ops.aten.copy_.default, (x, x))
    run = _with_traced_layouts(lambda args: args, graph, [x.meta["val"]])
    with pytest.raises(RuntimeError, match="writes into differs from the traced layout"):
        run([torch.ones(3, 2).t()])


@pytest.mark.parametrize(
    "x, y, equal",
    [
        (torch.empty(2, 3), torch.empty(2, 3), True),
        (torch.empty(2, 3), torch.empty(3, 2).t(), False),
        (torch.empty_strided((1, 3), (7, 1)), torch.empty(1, 3), True),
        (torch.empty(0, 3), torch.empty(3, 0).t(), True),
        (torch.empty(()), torch.empty(()), True),
    ],
)
def test_strides_of_dimensions_of_size_one_do_not_count(x, y, equal):
    assert _torch.have_equal_strides(x, y) == equal
