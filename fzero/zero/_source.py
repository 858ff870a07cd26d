"""Sources of a tree's leaves: a tree, a module, or an init function that is traced and run leaf by leaf."""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fzero import _torch, tree
from fzero._donated import donate_memory
from fzero._notice import warn_once
from fzero._torch.types import NamedTensors
from fzero.graph import is_random, stand_ins_of
from fzero.sharding import PerRank, is_box

__all__ = ["LeafSupply", "TracedInit", "initializer", "make_source", "make_supply", "stand_ins"]

# The source of a tree's leaves: a tree, a function that returns one, or a module.


def make_source(label: str, values: Any, lazy: bool, call: str = "") -> "LeafSupply | TracedInit":
    """Return the source of a tree's leaves, which supplies them one after the other.

    Args:
        label: the tree's name in messages.
        values: the tree; or a function without arguments that returns it; or a module. The tree of a module has its
            trainable parameters; a module on the meta device initializes them.
        lazy: whether to trace a function, so that each leaf is computed only when it is needed. Otherwise, or if it
            cannot be traced, the function is called now, and each leaf is freed after its use.
        call: if the caller donates the leaves, the call that does, for messages.

    Raises:
        ValueError: if a module is partly on the meta device, or the tree is sharded. The message names the parameter
            or the leaf.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    if isinstance(values, torch.nn.Module):
        values = initializer(values) if is_on_meta(values) else trainable_params(values)
    if not callable(values):
        return make_supply(label, values, call)
    source = _try_trace(values) if lazy else None
    return make_supply(label, values(), call) if source is None else source


# Leaves that exist already. The caller keeps or donates them, or a function has returned them.


@dataclass(frozen=True)
class LeafSupply:
    """A tree whose leaves exist. `run` passes each leaf on once, one after the other, and drops it.

    Attributes:
        leaves: meta tensors like the leaves; tied leaves are one object. Values that are no tensors are unchanged.
        devices: the device of each leaf; None for a value that is no tensor.
        structure: the tree's structure, in which a `PerRank` value is a leaf.
        tensors: the leaves themselves, until `run` passes them on.
        notes: if the caller donates the leaves, an error message for each, for later reads; else empty.
    """

    leaves: list[Any]
    devices: list[Any]
    structure: Any
    tensors: list[Any]
    notes: Sequence[str]

    def run(self) -> Iterator[tuple[list[int], torch.Tensor, bool]]:
        """Drop each leaf as it is passed on.

        Yields:
            A leaf's positions, the leaf, and whether the result may keep the leaf's memory.
        """
        positions: dict[int, list[int]] = {}  # id of a leaf -> its positions
        for i, x in enumerate(self.leaves):
            if isinstance(x, torch.Tensor):
                positions.setdefault(id(x), []).append(i)
        storages = [_torch.storage_id(self.tensors[at[0]]) for at in positions.values()]
        for at in positions.values():
            x = self.tensors[at[0]]
            is_writable = x.is_contiguous() and not x.is_inference()  # a jitted step can write into it
            owns_storage = storages.count(_torch.storage_id(x)) == 1 and x.untyped_storage().nbytes() == x.nbytes
            for i in at:
                self.tensors[i] = None
            if self.notes and not x.is_meta:
                x = donate_memory(x, self.notes[at[0]])
            yield at, x, bool(self.notes) and is_writable and owns_storage
            del x  # before the next leaf is copied


def make_supply(label: str, values: Any, call: str = "") -> LeafSupply:
    """Flatten a tree into a supply of its leaves. A leaf is freed after its use, unless someone else holds it.

    Args:
        label: the tree's name in messages.
        values: the tree.
        call: if the caller donates the leaves, the call that does, for messages: "step.init(..., donate=True)".

    Raises:
        ValueError: if the tree is sharded. The message names the first box.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    paths, tensors, structure = tree.flatten_with_paths(values, is_box)
    leaves: list[Any] = []
    meta: dict[int, torch.Tensor] = {}  # id of a leaf -> its stand-in
    for i, (path, x) in enumerate(zip(paths, tensors, strict=True)):
        if isinstance(x, PerRank):
            tensors[i] = tree.map(torch.clone, x)
        else:
            _check_leaf(label, path, x)
        if isinstance(x, torch.Tensor) and id(x) not in meta:
            meta[id(x)] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        leaves.append(meta[id(x)] if isinstance(x, torch.Tensor) else tensors[i])
    devices = [x.device if isinstance(x, torch.Tensor) else None for x in tensors]
    notes = [f"{label} leaf {path!r} was donated to {call}" for path in paths] if call else []
    return LeafSupply(leaves, devices, structure, tensors, notes)


def _check_leaf(label: str, path: str, x: Any) -> None:
    if is_box(x):
        raise ValueError(f"{label} is sharded already: leaf {path!r} is {x!r}; gather it with the step that sharded it")
    if isinstance(x, torch.nn.Module):
        raise TypeError(
            f"{label} holds a module: pass the module itself, or fzero.nn.functional(module).params, a tree of its "
            "parameters"
        )
    if not isinstance(x, torch.Tensor):
        if x is not None:
            raise TypeError(tree.not_a_tensor(label, path, x))
        return
    if torch.nn.parameter.is_lazy(x):
        raise TypeError(f"{label} leaf {path!r} is not initialised: run the lazy module once on a batch first")
    if hasattr(type(x), "__tensor_flatten__"):  # torch's protocol for tensor subclasses that wrap tensors
        raise TypeError(
            f"{label} leaf {path!r} is a {type(x).__name__}, a tensor that wraps tensors, and cannot be sharded: pass "
            "a plain tensor (x.full_tensor() of a DTensor)"
        )
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        raise TypeError(
            f"{label} leaf {path!r} is {kind}, and cannot be sharded: pass a dense tensor, such as x.to_dense()"
        )


# A tree whose init function is traced without memory. Running the graph later computes leaf after leaf.


@dataclass(frozen=True)
class TracedInit:
    """A tree that does not exist yet: a traced init function will compute it.

    Attributes:
        leaves: meta tensors like the leaves; tied leaves are one object.
        devices: the device of each leaf.
        structure: the tree's structure.
    """

    leaves: list[Any]
    devices: list[Any]
    structure: Any
    _graph: GraphModule
    _nodes: dict[Node, list[int]]  # the node that computes a leaf -> the leaf's positions

    def run(self) -> Iterator[tuple[list[int], torch.Tensor, bool]]:
        """Compute the leaves in the order of the function, random numbers included.

        Yields:
            A leaf's positions, the leaf, and False, as soon as no operation changes or reads the leaf any more. False:
            its memory may be part of a larger tensor, or the caller's, so it must be copied.
        """
        expires = self._last_touches()
        env: dict[Node, Any] = {}
        for n in self._graph.graph.nodes:
            if n.op == "get_attr":
                env[n] = getattr(self._graph, str(n.target))
            elif n.op == "call_function":
                args, kwargs = map_arg((n.args, n.kwargs), lambda a: env[a])  # pyright: ignore
                env[n] = n.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
                del args, kwargs
            for expired in expires.get(n, ()):
                value = env.pop(expired, None)
                if expired in self._nodes:
                    yield self._nodes[expired], value, False
                del value

    def _last_touches(self) -> dict[Node, list[Node]]:
        """Return for each node the values whose memory no later node touches, not even through a view."""
        nodes = [n for n in self._graph.graph.nodes if n.op != "output"]
        touched: dict[int, int] = {}  # storage -> index of the last node that touches it
        used: dict[Node, int] = {}  # value, maybe without memory like a random generator -> index of its last use
        for i, n in enumerate(nodes):
            for x in (n, *n.all_input_nodes):
                used[x] = i
                touched.update({_torch.storage_id(v): i for v in stand_ins_of(x)})
        expires: dict[Node, list[Node]] = {}
        for n in nodes:
            last = max([used[n], *[touched[_torch.storage_id(v)] for v in stand_ins_of(n)]])
            expires.setdefault(nodes[last], []).append(n)
        return expires


def _try_trace(init: Callable[[], Any]) -> TracedInit | None:
    """Trace an init function. If that is not possible, print a notice with the reason, and return None."""
    states = random.getstate(), torch.get_rng_state()
    try:
        return trace_init(init)
    except Exception as error:  # an error of init itself is raised again when init is called
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        name, reason = getattr(init, "__name__", "the init function"), " ".join(str(error).split())[:120]
        warn_once(
            f"fzero: {name} cannot be traced ({type(error).__name__}: {reason}), so every rank holds the whole tree "
            "while it is sharded"
        )
        return None


def trace_init(init: Callable[[], Any]) -> TracedInit:
    """Trace an init function, without memory for its results.

    Raises:
        DataDependentError: if it reads a tensor's value.
        RuntimeError: if it seeds a random generator after drawing from it: the graph runs all draws after the seeds.
    """
    leaves: list[Any] = []
    structure: Any = None  # a trace returns tensors only

    def flat() -> list[torch.Tensor]:
        nonlocal leaves, structure
        leaves, structure = tree.flatten(init())
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    with _torch.TRACING, _watch_seeds() as methods:
        graph = _torch.trace(flat, [])
    if methods:
        raise RuntimeError("it seeds a random generator again after drawing from it")
    output = next(n for n in graph.graph.nodes if n.op == "output")
    positions = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    nodes: dict[Node, list[int]] = {}
    devices: list[Any] = [None] * len(leaves)
    first: dict[int, Node] = {}  # id of a leaf -> its first node: a captured tensor has a node for each path
    for i, n in zip(positions, output.args[0], strict=True):
        nodes.setdefault(first.setdefault(id(leaves[i]), n), []).append(i)
    for n, at in nodes.items():
        x = n.meta["val"]
        meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        for i in at:
            leaves[i], devices[i] = meta, x.device
    return TracedInit(leaves, devices, structure, graph, nodes)


@contextmanager
def _watch_seeds() -> Iterator[list[str]]:
    """Detect traced code that seeds a generator after a traced draw: the graph runs all seeds before the draws.

    Yields:
        A list, which receives the name of each method that seeds a generator again.
    """
    methods: list[str] = []
    # holds the generators, so that a new one cannot have the identity of an old one
    generators: list[torch.Generator] = [torch.default_generator]

    previous: Any = sys.getprofile()

    def watch(frame: Any, event: str, function: Any) -> None:
        if callable(previous):
            previous(frame, event, function)
        generator = getattr(function, "__self__", None) if event == "c_call" else None
        if isinstance(generator, torch.Generator) and function.__name__ in ("manual_seed", "seed", "set_state"):
            is_reseed = any(g is generator for g in generators)
            if is_reseed and any(is_random(n) for n in _torch.recorded_nodes()):
                methods.append(function.__name__)
            generators.append(generator)

    sys.setprofile(watch)
    try:
        yield methods
    finally:
        sys.setprofile(previous if callable(previous) else None)
        restart = getattr(previous, "enable", None)  # of cProfile, which up to Python 3.11 cannot be called
        if restart is not None:
            restart()


# Parameters of modules: take a module's parameters, or initialize those of a module on the meta device.


def copy_to_meta(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters and buffers are meta tensors; tied tensors stay tied."""
    return copy.deepcopy(module, stand_ins(module))


def stand_ins(module: torch.nn.Module) -> dict[int, Any]:
    """Map the id of each parameter and buffer of a module to a meta tensor like it."""
    result: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    for p in module.parameters():
        result[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return result


def trainable_params(module: torch.nn.Module) -> NamedTensors:
    """Return a module's trainable parameters by name, not copied; a tied parameter has one name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def is_on_meta(module: torch.nn.Module) -> bool:
    """Return whether a module's trainable parameters are on the meta device, and must be initialized.

    Raises:
        ValueError: if some parameters are on the meta device and some have values. The message names one of each.
    """
    params = trainable_params(module)
    absent = [name for name, p in params.items() if p.is_meta]
    present = [name for name, p in params.items() if not p.is_meta]
    if absent and present:
        raise ValueError(
            f"the module is partly on the meta device: {absent[0]!r} has no values, and {present[0]!r} has. step.init "
            "keeps all weights of a module, or draws all if it has none: load or fill "
            f'{absent[0]!r} first, or move the module to the meta device, module.to("meta"), to draw all weights anew'
        )
    return bool(absent)


def initializer(
    module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None = None, device: torch.device | str = "cpu"
) -> Callable[[], NamedTensors]:
    """Make an init function for a module that was built on the meta device, for `step.init`.

    The init function allocates each submodule's own parameters and lets the submodule fill them, in the order of the
    submodules. It does not repeat anything else that a constructor does. If that matters, give `step.init` an init
    function that calls the constructor.

    Args:
        module: a module built under `with torch.device("meta"):`; it stays as it is.
        init: fills the parameters of a submodule in place; by default its `reset_parameters()`. For a model of
            transformers pass its `_init_weights`.
        device: where the new parameters are drawn. On the CPU the values are the same for every mesh; `mesh.device` is
            faster where that is an accelerator.

    Returns:
        A function without arguments that returns the trainable parameters by name, as `functional` names them.

    Raises:
        ValueError: when called, if a submodule has parameters of its own and no `reset_parameters`. The message names
            the submodule.

    Example:
        >>> with torch.device("meta"):
        ...     module = torch.nn.Linear(3, 2)
        >>> {name: p.shape for name, p in initializer(module)().items()}
        {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}
    """

    def make() -> NamedTensors:
        params: dict[int, torch.nn.Parameter] = {}  # id of a meta parameter -> its replacement
        clone = copy_to_meta(module)
        for name, m in clone.named_modules():
            own_params = dict(m.named_parameters(recurse=False))
            tied = [params[id(p)] for p in own_params.values() if id(p) in params]
            for key, p in own_params.items():
                if id(p) not in params:
                    params[id(p)] = torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                m._parameters[key] = params[id(p)]
            if len(tied) < len(own_params):
                old_values = [p.detach().clone() for p in tied]
                _initialize_submodule(name, m, init)
                for p, values in zip(tied, old_values, strict=True):  # the first submodule's values stay
                    p.detach().copy_(values)
        return {name: p.detach() for name, p in clone.named_parameters() if p.requires_grad}

    return make


def _initialize_submodule(name: str, module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None) -> None:
    fill = init or getattr(type(module), "reset_parameters", None)
    if fill is None:
        parameters = ", ".join([key for key, _ in module.named_parameters(recurse=False)])
        raise ValueError(
            f"submodule {name!r} ({type(module).__name__}) has parameters of its own ({parameters}) and no "
            "reset_parameters: pass init=, a function that fills a submodule's parameters, or build the module in an "
            "init function: step.init(lambda: fzero.nn.functional(Model()).params, opt)"
        )
    with torch.no_grad():
        fill(module)
