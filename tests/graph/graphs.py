"""Random flat graphs of aten operations and functional collectives, and a world of equal ranks to run them in."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from fzero._torch import buffer_view, c10d, stand_ins_like
from fzero.graph.ir import GATHER_INTO, graph_results, is_collective, is_input
from fzero.graph.run import _auto_backend, _backends

aten: Any = torch.ops.aten
D = 4  # columns of every matrix in a random graph
LARGEST = 6 * D


class Sample(NamedTuple):
    """A graph, how to make its arguments, and what may be donated to it."""

    graph: Graph
    shapes: list[tuple[int, ...]]
    n: int
    pairs: list[tuple[int, int]]
    donated: list[int]

    def args(self) -> list[torch.Tensor]:
        return arguments(self.shapes)


def arguments(shapes: Sequence[tuple[int, ...]], beside: Sequence[int] = ()) -> list[torch.Tensor]:
    """Make arguments of these shapes, of which those at the positions `beside` lie side by side."""
    g = torch.Generator().manual_seed(0)
    results = [torch.randn(shape, generator=g) for shape in shapes]
    if beside:
        buffer, at = torch.cat([results[i].flatten() for i in beside]), 0
        for i in beside:
            results[i] = buffer_view(buffer, at, shapes[i])
            at += results[i].numel()
    return results


class Builder:
    """Makes a graph operation by operation, running each on stand_in tensors."""

    def __init__(
        self,
        n: int,
        shapes: Sequence[tuple[int, ...]],
        labels: Sequence[dict[str, str]],
        rename: bool,
        beside: Sequence[int] = (),
    ):
        self.n, self.graph, self.collectives = n, Graph(), 0
        self.inputs = []
        if rename:  # the same graph with other names, at other addresses
            self.junk = [self.graph.placeholder("t"), *[self.graph.call_function(aten.mm.default, ()) for _ in "abc"]]
            for node in reversed(self.junk):
                self.graph.erase_node(node)
        for i, (stand_in, label) in enumerate(zip(stand_ins_like(arguments(shapes, beside)), labels, strict=True)):
            node = self.graph.placeholder(f"arg{i}")
            node.meta = {"val": stand_in, **label}
            self.inputs.append(node)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.graph.call_function(op, args, kwargs)
        inputs, named = map_arg((args, kwargs), lambda a: a.meta["val"])
        with self.inputs[0].meta["val"].fake_mode:
            node.meta = {"val": op(*inputs, **named)}
        if is_collective(node):
            node.meta["unit"] = f"unit {self.collectives}"
            self.collectives += 1
        return node

    def shape(self, x: Node) -> list[int]:
        return list(x.meta["val"].shape)

    def numel(self, x: Node) -> int:
        return x.meta["val"].numel()

    def flat(self, x: Node, length: int | None = None) -> Node:
        """Lay a value out in one dimension, cut or padded to a length."""
        if not x.meta["val"].is_contiguous():
            x = self(aten.clone.default, x, memory_format=torch.contiguous_format)
        if len(self.shape(x)) != 1:
            x = self(aten.view.default, x, [self.numel(x)])
        if length is not None and self.numel(x) > length:
            x = self(aten.slice.Tensor, x, 0, 0, length)
        if length is not None and self.numel(x) < length:
            x = self(aten.constant_pad_nd.default, x, [0, length - self.numel(x)])
        return x

    def fit(self, x: Node, shape: Sequence[int]) -> Node:
        if self.shape(x) == list(shape):
            return x
        x = self.flat(x, torch.Size(shape).numel())
        return x if len(shape) == 1 else self(aten.view.default, x, list(shape))

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype == dtype else self(aten._to_copy.default, x, dtype=dtype)

    def wait(self, x: Node) -> Node:
        return self(c10d.wait_tensor.default, x)

    def gather(self, x: Node, group: str = "g") -> Node:
        return self.wait(self(c10d.all_gather_into_tensor.default, x, self.n, group))

    def reduce_scatter(self, x: Node, group: str = "g") -> Node:
        return self.wait(self(c10d.reduce_scatter_tensor.default, x, "sum", self.n, group))

    def all_reduce(self, x: Node, group: str = "g") -> Node:
        return self.wait(self(c10d.all_reduce.default, x, "sum", group))

    def done(self, results: Sequence[Node | None]) -> Graph:
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph


class Spec(NamedTuple):
    n: int
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[str, int, int, bool], ...]
    results: tuple[int | None, ...]
    donate: tuple[bool, ...]
    donated: tuple[bool, ...]


def _gather(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    x = b.flat(x, min(b.numel(x), LARGEST // b.n))
    return [b.cast(b.gather(b.cast(x, torch.bfloat16), "g"), torch.float32) if flag else b.gather(x)]


def _gather_of_another_group(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    return [b.gather(b.flat(x, min(b.numel(x), LARGEST // b.n)), "h" if flag else "g")]


def _mm(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    rows = min(max(b.numel(x) // D, 1), 4)
    y = b.fit(y, (D, D))
    return [b(aten.mm.default, b.fit(x, (rows, D)), b(aten.t.default, y) if flag else y)]


def _pointwise(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    return [b(aten.mul.Tensor if flag else aten.add.Tensor, x, b.fit(y, b.shape(x)))]


def _tanh(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    return [b(aten.tanh.default, x)]


def _update(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    x = b.inputs[b.numel(x) % len(b.inputs)]
    decayed = b(aten.mul.Tensor, x, 0.9) if flag else x
    return [b(aten.add.Tensor, decayed, b.fit(y, b.shape(x)))]


def _reduce_scatter(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    packed = b(aten.cat.default, [b.flat(x), b.flat(y)]) if flag else b.flat(x)
    packed = b.flat(packed, -(-b.numel(packed) // b.n) * b.n)
    return [b.reduce_scatter(packed)]


def _all_reduce(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    return [b.all_reduce(b(aten.clone.default, x) if flag else x)]


def _clip(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    """Half-precision values, scaled by the norm of their wide copies."""
    halves = [b.cast(z, torch.bfloat16) for z in ([x, y] if flag else [x])]
    wide = [b.cast(z, torch.float32) for z in halves]
    norm = b.all_reduce(b(aten.sum.default, b(aten.mul.Tensor, wide[0], wide[-1] if len(wide) == 1 else wide[0])))
    return [b(aten.mul.Tensor, z, norm) for z in wide]


def _var_mean(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    both = b(aten.var_mean.correction, b.fit(x, (2, D)), [0], correction=0)
    return [b(operator.getitem, both, i) for i in ((0, 1) if flag else (1,))]


def _unbind(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    rows = b(aten.unbind.int, b.fit(x, (2, D)))
    return [b(operator.getitem, rows, i) for i in ((1, 0) if flag else (1,))]


def _layer_norm(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    result = b(aten.native_layer_norm.default, b.fit(x, (2, D)), [D], b.fit(y, (D,)) if flag else None, None, 1e-5)
    return [b(operator.getitem, result, i) for i in ((0, 2) if flag else (0,))]


def _view(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    if len(b.shape(x)) == 2 and flag:
        return [b(aten.t.default, x)]
    return [b(aten.slice.Tensor, x, 0, b.shape(x)[0] // 2, 2**63 - 1)]


def _full(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    return [b(aten.full.default, b.shape(x), 0.5) if flag else b(aten.zeros_like.default, x)]


def _offload(b: Builder, x: Node, y: Node, flag: bool) -> list[Node]:
    """A value that is scaled by a number, goes to the host, is computed with there, and comes back."""
    norm = b(aten.sum.default, b(aten.mul.Tensor, y, 0.01))
    scaled = b(aten.mul.Tensor, x, norm) if flag else b(aten.mul.Tensor, norm, x)
    below = b(torch.ops.fzero.to_host.default, b.flat(scaled))
    both = b(aten.add.Tensor, b(aten.mul.Tensor, below, 0.5), below)
    return [b(torch.ops.fzero.to_device.default, both, torch.device("cpu"))]


STEPS: dict[str, Callable[[Builder, Node, Node, bool], list[Node]]] = {
    f.__name__: f
    for f in (_gather, _gather_of_another_group, _mm, _pointwise, _tanh, _update, _reduce_scatter, _all_reduce)
} | {f.__name__: f for f in (_clip, _var_mean, _unbind, _layer_norm, _view, _full, _offload)}
LOCAL = sorted({*STEPS} - {"_gather", "_gather_of_another_group", "_reduce_scatter", "_all_reduce", "_clip"})
# what steps do most: gather, work, reduce, update
COMMON = ["_gather", "_gather", "_gather", "_mm", "_mm", "_mm", "_reduce_scatter", "_all_reduce", "_update", "_update"]


def build(spec: Spec, rename: bool = False) -> Sample:
    """Make the graph that a spec describes. Step `i` reads inputs (below) and earlier values (counted from the end)."""
    kinds = ("parameters", "optimizer state", "inputs")
    labels = [
        {"label": f"argument {i}", "kind": kinds[i % 3], "block": ("", "a", "b")[i % 3]}
        for i in range(len(spec.shapes))
    ]
    b = Builder(spec.n, spec.shapes, labels, rename)
    pool: list[Node] = list(b.inputs)
    for name, i, j, flag in spec.steps:
        result = STEPS[name](b, pool[i % len(pool)], pool[j % len(pool)], flag)
        pool += [x for x in result if b.numel(x)]
    results = [None if i is None else pool[i % len(pool)] for i in spec.results]
    graph = b.done(results)
    pairs: list[tuple[int, int]] = []
    for i, (x, wanted) in enumerate(zip(results, spec.donate, strict=True)):
        free = [j for j in range(len(b.inputs)) if j not in {k for _, k in pairs}]
        fitting = [j for j in free if x is not None and spec.shapes[j] == tuple(b.shape(x))]
        if wanted and fitting and x.meta["val"].dtype == torch.float32:
            pairs.append((i, fitting[0]))
    donated = sorted({j for _, j in pairs} | {j for j, wanted in enumerate(spec.donated) if wanted})
    return Sample(graph, list(spec.shapes), spec.n, pairs, donated)


@st.composite
def specs(draw: Any, local: bool = False) -> Spec:
    n = draw(st.integers(1, 3))
    shape = st.sampled_from([(D,), (6,), (2 * D,), (D * D,), (D, D), (2, D)])
    shapes = tuple(draw(st.lists(shape, min_size=1, max_size=6)))
    names = st.sampled_from(LOCAL if local else [*STEPS, *COMMON])
    count = draw(st.integers(1, 14))
    first = st.integers(0, len(shapes) - 1)
    operand = st.one_of(first, st.integers(-6, -1), st.integers(0, 40))
    steps = tuple(draw(st.tuples(names, operand, operand, st.booleans())) for _ in range(count))
    results = tuple(draw(st.lists(st.one_of(operand, st.integers(-8, -1), st.none()), min_size=1, max_size=6)))
    donate = tuple(draw(st.booleans()) for _ in results)
    donated = tuple(draw(st.booleans()) for _ in shapes)
    return Spec(n, shapes, steps, results, donate, donated)


# Steps of training.


class Chain(NamedTuple):
    """A chain of linear layers: forward, backward, reductions and updates, as a traced step of a ZeRO stage."""

    n: int
    widths: tuple[int, ...]
    rows: int
    stage: int
    cast: bool  # to bfloat16 before a gather
    hoist: bool  # all gathers come first, as traced code has them where parameters are unpacked before use
    at_the_end: bool  # reductions and updates follow the backward pass
    leaf_first: bool  # a layer's own gradient comes before the one that goes on
    norm: bool  # layer norms between layers, that only pass gradients on
    sam: bool  # a second forward and backward at perturbed parameters


def build_chain(c: Chain, rename: bool = False) -> Sample:
    layers = list(zip(c.widths, c.widths[1:], strict=False))
    sizes = [-(-i * o // c.n) for i, o in layers]
    shapes: list[tuple[int, ...]] = [(s,) for s in sizes] if c.stage == 3 else list(layers)
    shapes += [(s,) if c.stage else layer for s, layer in zip(sizes, layers, strict=True)]
    shapes += [(c.rows, c.widths[0])]
    labels = [
        {"label": f"argument {i}", "kind": kind, "block": f"block {layer}"}
        for i, (kind, layer) in enumerate((k, j) for k in ("parameters", "optimizer state") for j in range(len(layers)))
    ]
    labels.append({"label": "argument x", "kind": "inputs", "block": ""})
    b = Builder(c.n, shapes, labels, rename)
    count = len(layers)
    params, moments, x = b.inputs[:count], b.inputs[count : 2 * count], b.inputs[-1]

    def weight(i: int, p: Node) -> Node:
        if c.stage < 3:
            return p
        full = b.gather(b.cast(p, torch.bfloat16) if c.cast else p)
        return b.fit(full, layers[i])

    def cast_weight(w: Node) -> Node:
        return b.cast(w, torch.float32)

    def reduce_gradient(i: int, grad: Node) -> Node:
        grad = b(aten.div.Tensor, grad, float(c.n))
        return b.reduce_scatter(b.flat(grad, sizes[i] * c.n)) if c.stage else b.all_reduce(grad)

    def update_leaf(i: int, grad: Node) -> tuple[Node, Node]:
        moment = b(aten.add.Tensor, b(aten.mul.Tensor, moments[i], 0.9), grad)
        own = params[i] if c.stage in (0, 3) else b.flat(b.flat(params[i], sizes[i] * c.n), sizes[i])
        new = b(aten.sub.Tensor, b(aten.mul.Tensor, own, 0.99), b(aten.mul.Tensor, moment, 0.1))
        return (new if c.stage in (0, 3) else b.fit(b.gather(new), layers[i])), moment

    def differentiate(ps: list[Node], use: Callable[[int, Node], Any]) -> tuple[Node, dict[int, Any]]:
        """Run forward and backward; `use` is given each layer's gradient."""
        weights = {i: weight(i, ps[i]) for i in range(count)} if c.hoist else {}
        acts, inner = [x], [x]
        for i in range(count):
            weights.setdefault(i, None)
            weights[i] = weights[i] or weight(i, ps[i])
            acts.append(b(aten.tanh.default, b(aten.mm.default, inner[-1], cast_weight(weights[i]))))
            norm = c.norm and i + 1 < count
            actual = b(aten.native_layer_norm.default, acts[-1], [c.widths[i + 1]], None, None, 1e-5) if norm else None
            inner.append(b(operator.getitem, actual, 0) if norm else acts[-1])
        loss = b(aten.sum.default, inner[-1])
        grad = b(aten.ones_like.default, acts[-1])
        out, grads = {}, {}
        for i in reversed(range(count)):
            pre = b(aten.tanh_backward.default, grad, acts[i + 1])

            def own(i: int = i, pre: Node = pre) -> None:
                grads[i] = b(aten.mm.default, b(aten.t.default, inner[i]), pre)

            if c.leaf_first:
                own()
            if i:
                grad = b(aten.mm.default, pre, b(aten.t.default, cast_weight(weights[i])))
            if not c.leaf_first:
                own()
            if not c.at_the_end:
                out[i] = use(i, grads[i])
        for i, g in grads.items():
            out[i] = out[i] if i in out else use(i, g)
        return loss, out

    if c.sam:
        _, first = differentiate(list(params), reduce_gradient)
        ps = [b(aten.add.Tensor, p, b.fit(first[i], b.shape(p))) for i, p in enumerate(params)]
    else:
        ps = list(params)
    loss, out = differentiate(ps, lambda i, g: update_leaf(i, reduce_gradient(i, g)))
    results = [out[i][0] for i in range(count)] + [out[i][1] for i in range(count)] + [b.all_reduce(loss)]
    pairs = [(i, i) for i in range(2 * count)]
    return Sample(b.done(results), shapes, c.n, pairs, list(range(2 * count)))


@st.composite
def chains(draw: Any, stages: Sequence[int] = (0, 1, 3), sam: bool = True) -> Chain:
    width = st.sampled_from([2, 3, 4, 6, 8])
    if draw(st.booleans()):  # blocks of one shape
        widths = (draw(width),) * draw(st.integers(2, 5))
    else:
        widths = tuple(draw(st.lists(width, min_size=2, max_size=5)))
    flags = [draw(st.booleans()) for _ in range(5)]
    stage, rows = draw(st.sampled_from(list(stages))), draw(st.integers(2, 9))
    return Chain(draw(st.integers(2, 4)), widths, rows, stage, *flags, sam=sam and draw(st.booleans()))


@st.composite
def samples(draw: Any) -> Callable[..., Sample]:
    """A function of whether to rename, to the same sample each time."""
    if draw(st.integers(0, 3)):
        spec = draw(specs())
        return lambda rename=False: build(spec, rename)
    chain = draw(chains())
    return lambda rename=False: build_chain(chain, rename)


class World:
    """Collectives of `n` ranks that hold the same. As on a device, a result is garbage until it is waited for.

    `late` collectives read their operands no sooner than at the wait, others at once; real ones, any time between.
    """

    def __init__(self, n: int, late: bool) -> None:
        self.n, self.late = n, late
        self.flying: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor], Sequence[torch.Tensor]]] = {}

    def start(
        self, f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, held: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        buffer = f(x).clone().fill_(torch.nan)
        value = None if self.late else f(x).clone()
        self.flying[buffer.data_ptr()] = (buffer, (lambda: f(x)) if value is None else (lambda: value), [x, *held])
        return buffer

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() in self.flying:
            x.copy_(self.flying.pop(x.data_ptr())[1]())
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.n)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.n)[: len(x) // self.n]

    def all_reduce(self, x: torch.Tensor, op: str, group: str, held: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        total = x * self.n  # torch's own copies the operand before it starts
        return self.start(lambda _: total, x, held)

    def all_reduce_(self, x: torch.Tensor, op: str, group: str, held: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        total = x * self.n
        self.flying[x.data_ptr()] = (x.fill_(torch.nan), lambda: total, [x, *held])
        return x

    def gather_into(self, x: torch.Tensor, n: int, g: str, leaves: Sequence[torch.Tensor], at: Sequence[int]) -> Any:
        early, own = None if self.late else self.gathered(x), x.clone()
        for leaf, a in zip(leaves, at, strict=True):

            def value(a: int = a, leaf: torch.Tensor = leaf) -> torch.Tensor:
                return (self.gathered(x) if early is None else early)[a : a + leaf.numel()].view(leaf.shape)

            self.flying[leaf.data_ptr()] = (leaf.fill_(torch.nan), value, [x])
        if any(x.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() for leaf in leaves):
            x.copy_(own)  # it lies where it belongs, and no message writes there
        return list(leaves)

    def targets(self) -> dict[Any, Callable[..., Any]]:
        return {
            c10d.wait_tensor.default: self.wait,
            c10d.all_gather_into_tensor.default: lambda x, n, g: self.start(self.gathered, x),
            c10d.all_gather_into_tensor_coalesced.default: lambda xs, n, g: [
                self.start(self.gathered, x, xs) for x in xs
            ],
            GATHER_INTO: self.gather_into,
            c10d.reduce_scatter_tensor.default: lambda x, op, n, g: self.start(self.scattered, x),
            c10d.reduce_scatter_tensor_coalesced.default: lambda xs, op, n, g: [
                self.start(self.scattered, x, xs) for x in xs
            ],
            c10d.all_reduce.default: self.all_reduce,
            c10d.all_reduce_.default: self.all_reduce_,
            c10d.all_reduce_coalesced_.default: lambda xs, op, g: [self.all_reduce_(x, op, g, xs) for x in xs],
            c10d.all_reduce_coalesced.default: lambda xs, op, g: [self.all_reduce(x, op, g, xs) for x in xs],
        }


class Runner(Interpreter):
    """Runs a graph in a world."""

    def __init__(self, graph: Graph, world: World) -> None:
        super().__init__(GraphModule({}, graph))
        self.targets = world.targets()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.targets.get(target, target)(*args, **kwargs)


def run(graph: Graph, args: Sequence[torch.Tensor], n: int, late: bool = False) -> list[Any]:
    return list(Runner(graph, World(n, late)).run(*args))


def copy_to_world(graph: Graph, world: World) -> Graph:
    """Copy a graph with a world's functions for its collectives."""
    out, targets = Graph(), world.targets()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = out.node_copy(node, copies.__getitem__)
        if node.op == "call_function":
            copies[node].target = targets.get(node.target, node.target)
    return out


def bits(x: torch.Tensor | None) -> Any:
    """Describe a result to the last bit."""
    return None if x is None else (x.dtype, tuple(x.shape), x.contiguous().view(-1).view(torch.uint8).tolist())


def measure(graph: Graph, args: Sequence[torch.Tensor], n: int) -> list[int]:
    """Run a graph, each value let go after its last use; returns the bytes that were alive at each node."""
    world, env, totals = World(n, late=True), {}, []
    targets, inputs = world.targets(), iter(args)
    nodes = list(graph.nodes)
    last = {a: i for i, node in enumerate(nodes) for a in node.all_input_nodes}
    for i, node in enumerate(nodes):
        if is_input(node):
            env[node] = next(inputs)
        elif node.op == "call_function":
            a, k = map_arg((node.args, node.kwargs), env.__getitem__)
            before = dict(world.flying)
            env[node] = targets.get(node.target, node.target)(*a, **k)
        sizes: dict[int, int] = {}
        flying = [x for _, _, xs in (before | world.flying).values() for x in xs] if node.op == "call_function" else []
        for value in [*env.values(), *flying]:
            for x in [value] if isinstance(value, torch.Tensor) else value:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        totals.append(sum(sizes.values()))
        for a in [*node.all_input_nodes, node]:
            if not is_input(a) and last.get(a, i) == i:
                env.pop(a, None)
    return totals


def snapshot(graph: Graph) -> Any:
    return [(n, n.op, n.name, n.target, n.args, dict(n.kwargs), dict(n.meta), list(n.users)) for n in graph.nodes]


def lines(graph: Graph) -> list[Any]:
    """Describe a graph up to names."""
    number = {n: i for i, n in enumerate(graph.nodes)}
    return [
        (n.op, str(n.target) if n.op == "call_function" else "", repr(map_arg((n.args, n.kwargs), _Place(number))))
        for n in graph.nodes
    ]


class _Place:
    def __init__(self, number: dict[Node, int]) -> None:
        self.number = number

    def __call__(self, node: Node) -> Any:
        return (self.number[node],)


def reverse_users(graph: Graph) -> Graph:
    """Copy a graph so that each node lists its users in the opposite order."""
    copy, copies = Graph(), {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    args = {node: (node.args, node.kwargs) for node in copy.nodes if not is_input(node)}
    for node in args:
        node.args, node.kwargs = (), {}
    for node in reversed(args):
        node.args, node.kwargs = args[node]
    assert len(graph_results(copy)) == len(graph_results(graph))
    return copy


def skip_compiler(patch: pytest.MonkeyPatch) -> None:
    """Have segments run as they are, in Inductor's place."""
    patch.setattr(_backends, "is_compiled", lambda code: True)
    patch.setattr(_auto_backend, "is_compiled", lambda code: True)
    patch.setattr(
        _backends,
        "compile_all",
        lambda codes, _: [(c, run_boxed(GraphModule({}, c.graph), c.stand_ins)) for c in codes],
    )


def run_boxed(gm: Any, stand_ins: Any) -> Any:
    """Run a segment's operations one by one in Inductor's place, on arguments like those it was compiled for."""

    def call(args: list[Any]) -> Any:
        mine = tuple(args)
        args.clear()
        assert [(x.shape, x.stride(), x.dtype) for x in mine] == [(x.shape, x.stride(), x.dtype) for x in stand_ins]
        return gm.forward(*mine)

    return call
