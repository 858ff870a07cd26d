"""Trace an init function without memory. Running the graph later computes leaf after leaf."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fzero import _torch, tree
from fzero._notice import warn_once
from fzero.graph import is_random, node_stand_ins
from fzero.ranks import Mesh, check_same_structure
from fzero.zero._tree_source import SourceLeaf

__all__ = ["try_trace"]


@dataclass(frozen=True)
class _TracedInit:
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

    @property
    def values(self) -> Any:
        """The tree, with meta tensors for its leaves."""
        return tree.unflatten(self.structure, self.leaves)

    @property
    def needs_checksums(self) -> bool:
        """Whether the values are compared later: they do not exist before `iter_leaves`."""
        return True

    def check_before(self, label: str, mesh: Mesh) -> None:
        """Compare the tree's structure, shapes and dtypes between ranks."""
        check_same_structure(label, self.values, mesh)

    def iter_leaves(self) -> Iterator[SourceLeaf]:
        """Compute the leaves in the order of the function, random numbers included.

        Yields:
            Each leaf as soon as no operation changes or reads it any more. It does not own its memory, which may be
            part of a larger tensor, or the caller's.
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
            for expired_node in expires.get(n, ()):
                value = env.pop(expired_node, None)
                if expired_node in self._nodes:
                    yield SourceLeaf(self._nodes[expired_node], value, owns_memory=False)
                del value

    def _last_touches(self) -> dict[Node, list[Node]]:
        """Return for each node the values whose memory no later node touches, not even through a view."""
        nodes = [n for n in self._graph.graph.nodes if n.op != "output"]
        touched: dict[int, int] = {}  # storage -> index of the last node that touches it
        last_touches: dict[
            Node, int
        ] = {}  # value, maybe without memory like a random generator -> index of its last use
        for i, n in enumerate(nodes):
            for x in (n, *n.all_input_nodes):
                last_touches[x] = i
                touched.update({_torch.storage_id(v): i for v in node_stand_ins(x)})
        expires: dict[Node, list[Node]] = {}
        for n in nodes:
            last = max([last_touches[n], *[touched[_torch.storage_id(v)] for v in node_stand_ins(n)]])
            expires.setdefault(nodes[last], []).append(n)
        return expires


def try_trace(init: Callable[[], Any]) -> _TracedInit | None:
    """Trace an init function. If that is not possible, print a notice with the reason, and return None."""
    states = random.getstate(), torch.get_rng_state()
    try:
        return _trace_init(init)
    except Exception as error:  # an error of init itself is raised again when init is called
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        name, reason = getattr(init, "__name__", "the init function"), shorten(str(error), 120, placeholder=" ...")
        warn_once(
            f"fzero: {name} cannot be traced, so every rank holds the whole tree while it is sharded: "
            f"{type(error).__name__}: {reason}"
        )
        return None


def _trace_init(init: Callable[[], Any]) -> _TracedInit:
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
    for n, index in nodes.items():
        x = n.meta["val"]
        meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        for i in index:
            leaves[i], devices[i] = meta, x.device
    return _TracedInit(leaves=leaves, devices=devices, structure=structure, _graph=graph, _nodes=nodes)


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
