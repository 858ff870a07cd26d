"""The subgraphs that become segments: scalars run before the loops that read them, and a unit's update is one."""

import operator
import shutil
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import optim, tree
from fzero.graph.ir import aten
from fzero.graph.planning._subgraphs import argument_parts, split_into_subgraphs
from fzero.graph.run._program import make_program
from fzero.graph.run._segment import Segment, make_segment
from fzero.nn import linear_cross_entropy
from fzero.transforms import step
from tests.graph.graphs import Builder, skip_compiler
from tests.helpers import cases, either, train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params

FALLING = optim.warmup_cosine(1e-3, 2, 9)
HALF = fzero.Precision(param=torch.bfloat16, grad=torch.bfloat16)
OPTIMIZERS = {
    "sgd": lambda: optim.sgd(FALLING, momentum=0.9),
    "adam": lambda: optim.adam(1e-3),
    "adamw": lambda: optim.adamw(FALLING),
    "adamw, clipped": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)),
    "adamw, hyperparameters as tensors": lambda: optim.inject_hyperparams(optim.adamw)(FALLING),
    "adamw, masked": lambda: optim.masked(optim.adamw(FALLING), lambda params: tree.map(lambda p: p.ndim > 1, params)),
    "lamb": lambda: optim.lamb(FALLING),
    "lion": lambda: optim.lion(FALLING),
    "lion, clipped": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.lion(1e-3)),
    "masters": lambda: optim.master_weights(optim.chain(optim.clip(1.0), optim.adamw(FALLING)), HALF),
}
by_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def make_layer_norm(late: bool) -> Segment | None:
    """Make a segment of a layer norm, one of whose results the schedule took out early or late."""
    graph, x = Graph(), torch.ones(3, 4)
    values = torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)
    nodes = [graph.placeholder("x")]
    nodes[0].meta["val"] = x

    def add(target: Any, args: Any, value: Any) -> Node:
        nodes.append(graph.call_function(target, args))
        nodes[-1].meta["val"] = value
        return nodes[-1]

    norm = add(torch.ops.aten.native_layer_norm.default, (nodes[0], [4], None, None, 1e-5), values)
    last = None if late else add(operator.getitem, (norm, 2), values[2])
    y = add(operator.getitem, (norm, 0), values[0])
    total = add(torch.ops.aten.mul.Tensor, (y, y), values[0])
    last = last or add(operator.getitem, (norm, 2), values[2])
    return make_segment(nodes[1:], [total, last], {nodes[0]: 0}, set(), set())


def test_blocks_that_differ_in_where_a_result_is_taken_out_are_compiled_once():
    early, late = make_layer_norm(False), make_layer_norm(True)
    assert early and late and early.key == late.key
    items = early.graph.find_nodes(op="call_function", target=operator.getitem)
    assert [n.args[1] for n in items] == [0, 2]


def segments_of(f: Any, *args: Any) -> list[Segment]:
    f.plan(*args)
    (entry,) = f._entries.values()
    return [x for x in make_program(entry.best.graph).instructions if isinstance(x, Segment)]


def updating(opt: Any) -> Any:
    return fzero.jit(lambda params, state, grads: step(opt)(params, grads, state), donate=(0, 1))


def arguments(opt: Any, params: Any) -> tuple[Any, Any, Any]:
    state, precision = opt.init(params), getattr(opt, "precision", None)
    params = params if precision is None else precision.cast(params)
    return params, state, tree.map(lambda p: torch.full_like(p, 0.5), params)


def training(opt: Any, stage: int, layers: int) -> tuple[Any, ...]:
    sharded = fzero.shard(train_step_for(gpt_loss, opt), stage, fzero.mesh(dp=2))
    args = (*sharded.init(gpt_params(4, layers, vocab=8, context=4), opt), torch.ones(2, 5, dtype=torch.int64))
    return fzero.jit(sharded), *args[:2], sharded.mesh.split(args[2])


def is_small(node: Node) -> bool:
    return node.meta["val"].dim() == 0


def anew_in_loops(x: Segment) -> list[Node]:
    """List what Inductor would compute in each iteration: a 0-d value of 0-d ones that it need not hand out."""
    outputs = next(n for n in x.graph.nodes if n.op == "output").args[0]
    assert isinstance(outputs, tuple)
    results = []
    for n in x.graph.nodes:
        of_scalars = n.op == "call_function" and n.all_input_nodes and all(map(is_small, [n, *n.all_input_nodes]))
        if of_scalars and n not in outputs and not all(is_small(u) for u in n.users):
            results.append(n)
    return results


@by_optimizer
def test_no_loop_of_an_update_computes_a_scalar_anew(name):
    opt = OPTIMIZERS[name]()
    segments = segments_of(updating(opt), *arguments(opt, {"w": torch.ones(6, 4), "b": torch.ones(4)}))
    large = [x for x in segments if not x.scalars]
    assert large and not [n for x in large for n in anew_in_loops(x)]
    assert not [n for x in large for n in x.graph.nodes if str(n.target).startswith("aten.pow.Scalar")]


@by_optimizer
def test_the_update_of_a_leaf_is_one_segment(name):
    """The places in a chain's state are numbers, as repeated blocks are."""
    opt = OPTIMIZERS[name]()
    segments = segments_of(updating(opt), *arguments(opt, {"w": torch.ones(6, 4)}))
    assert sum(not x.scalars for x in segments) == 1
    assert sum(x.scalars for x in segments) <= 1


def test_chunks_are_compiled_apart_and_once():
    """In one segment Inductor would keep the logits of all chunks: 332 MB for 92, of 268 MB of logits in 8 chunks."""

    def f(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        return torch.func.grad(lambda h, w: linear_cross_entropy(h, w, labels, chunk=4), argnums=(0, 1))(hidden, weight)

    segments = segments_of(fzero.jit(f), torch.ones(6, 3), torch.ones(16, 3), torch.zeros(6, dtype=torch.int64))
    products = [sum(n.target is torch.ops.aten.mm.default for n in x.graph.nodes) for x in segments]
    logits, gradients = 1, 2  # of the hidden values and of the weights
    assert sum(products) == 4 * (logits + logits + gradients) and max(products) <= logits + logits + gradients


def subgraphs_of(b: Builder, results: list[Any]) -> dict[Node, int]:
    subgraphs = split_into_subgraphs(b.done(results).nodes)
    return {n: i for i, subgraph in enumerate(subgraphs) for n in subgraph}


def two_blocks() -> Builder:
    """Two blocks' parameters, and two values more."""
    return Builder(2, [(8,), (8,), (16,), (16,)], [{"block": "a"}, {"block": "b"}, {}, {}], False)


def test_a_gradient_is_scaled_where_its_block_is_updated():
    b = two_blocks()
    x, y, *grads = b.inputs
    g, h = (b.reduce_scatter(b.cast(grad, torch.bfloat16)) for grad in grads)
    scale = b.all_reduce(b(aten.sum.default, b(aten.mul.Tensor, g, h)))
    scaled = b(aten.mul.Tensor, b.cast(g, torch.float32), scale)
    new = b(aten.sub.Tensor, x, scaled)
    other = b(aten.mul.Tensor, b.cast(h, torch.float32), scale)
    newer = b(aten.sub.Tensor, y, other)
    home = subgraphs_of(b, [new, newer])
    assert home[scaled] == home[new] != home[newer] == home[other] == home[other.all_input_nodes[0]]


def test_readers_of_an_argument_run_before_the_operation_that_overwrites_it():
    b = two_blocks()
    x, y, *_ = b.inputs
    twice = b(aten.mul.Tensor, x, 2)
    written = b(aten.copy_.default, x, b(aten.sub.Tensor, x, 1))
    newer = b(aten.sub.Tensor, y, twice)
    home = subgraphs_of(b, [written, newer])
    assert home[twice] == home[written] != home[newer]


def test_the_last_reader_of_a_large_value_is_in_its_segment():
    b = two_blocks()
    x, y, z, _ = b.inputs
    large = b(aten.mm.default, b.fit(z, (8, 2)), b.fit(z, (2, 8)))
    new = b(aten.sub.Tensor, x, 1)
    part = b(aten.add.Tensor, b(aten.slice.Tensor, b.flat(large), 0, 0, 8), 1.0)
    home = subgraphs_of(b, [new, b(aten.mul.Tensor, part, y)])
    assert home[part] == home[new]


TENSORS = "adamw, hyperparameters as tensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,stage", cases([(TENSORS, 2)], [(TENSORS, 0), ("lion, clipped", 0), ("lion, clipped", 2)])
)
def test_scalars_of_all_units_run_at_once(name, stage):
    def counts(layers: int) -> tuple[int, int]:
        segments = segments_of(*training(OPTIMIZERS[name](), stage, layers))
        return sum(x.scalars for x in segments), len({x.key for x in segments})

    assert counts(4) == counts(either(5, 7))


@pytest.mark.parametrize("readers", ["012", "01", "0"])
def test_a_scalar_is_written_after_all_have_read_it(monkeypatch, readers):
    def count_up(params: Any, count: torch.Tensor) -> Any:
        params = {k: {"w": p["w"] * (count if k in readers else 3.0)} for k, p in params.items()}
        return params, count + 1

    def values() -> Any:
        return {str(i): {"w": torch.full((3,), 2.0)} for i in range(3)}, torch.tensor(5.0)

    skip_compiler(monkeypatch)
    expected, count = count_up(*values())
    actual = fzero.jit(count_up, donate=(0, 1))(*values())
    assert actual[1] == count
    assert all(torch.equal(actual[0][k]["w"], expected[k]["w"]) for k in expected)


@by_optimizer
def test_compiled_updates_equal_eager_ones(name, monkeypatch):
    skip_compiler(monkeypatch)
    opt = OPTIMIZERS[name]()
    f = updating(opt)
    eager, fast = [arguments(opt, {"w": torch.arange(24.0).view(6, 4) / 9, "b": torch.ones(4)}) for _ in range(2)]
    for _ in range(3):
        eager = (*step(opt)(eager[0], eager[2], eager[1]), eager[2])
        fast = (*f(*fast), fast[2])
    for x, y in zip(tree.tensors(eager), tree.tensors(fast), strict=True):
        assert torch.equal(x, y)


def test_a_parameter_with_a_master_is_written_and_not_read(monkeypatch):
    skip_compiler(monkeypatch)
    opt = OPTIMIZERS["masters"]()
    f, args = updating(opt), arguments(opt, {"w": torch.tensor([1.0, 1e-9, -7.0])})
    (large,) = [x for x in segments_of(f, *args) if not x.scalars]
    half_inputs = [n for n in large.graph.nodes if n.op == "placeholder" and n.meta["val"].dtype == torch.bfloat16]
    assert sorted([[str(u.target) for u in n.users] for n in half_inputs]) == [
        ["aten._to_copy.default"],
        ["aten.copy_.default"],
    ]
    for _ in range(3):
        args = (*f(*args), args[2])
    assert torch.equal(args[0]["w"], optim.master_params(*args[:2])["w"].bfloat16())


def test_sums_that_are_no_rounded_master_are_left_alone(monkeypatch):
    skip_compiler(monkeypatch)

    def sums(p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> Any:
        of_another = (p + ((r * 1).float() - q.float())).bfloat16()
        of_another_dtype = (p + ((r * 1).float() - p.float())).half()
        twice = torch.add(p, (r * 1).float() - p.float(), alpha=2).bfloat16()
        less = (p + torch.sub((r * 1).float(), p.float(), alpha=2)).bfloat16()
        return of_another, of_another_dtype, twice, less, (p + ((r * 1).float() - p.float()) * 2).bfloat16()

    values = [torch.tensor([x, 1.0]).bfloat16() for x in (2.0, 3.0, 5.0)]
    for actual, expected in zip(fzero.jit(sums)(*values), sums(*values), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")
def test_the_compiled_loop_has_no_power():
    opt = OPTIMIZERS["adamw, clipped"]()
    codes = run_and_get_code(updating(opt), *arguments(opt, {"w": torch.ones(512)}))[1]
    loops = [line for code in codes for line in code.splitlines() if "std::pow" in line]
    assert codes and not loops


def test_equal_parts_of_an_argument_are_arguments_of_segments():
    """Such as micro-batches: the segments of all parts are then equal. A slice without a like is computed inside."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [*[torch.tanh(x[i : i + 2]) for i in (0, 2, 4)], torch.sin(x[:5])]

    graph = make_fx(step, tracing_mode="fake")(torch.ones(6, 3)).graph
    starts = sorted(n.args[2] for n in argument_parts(graph) if n.meta["val"].shape[0] == 2)
    assert starts == [0, 2, 4] and len(argument_parts(graph)) == 3
