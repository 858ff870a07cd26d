"""A tree that is made leaf by leaf: its init function is traced without memory, and the graph run later."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fzero import _torch, tree
from fzero.graph.ir import values
from fzero.graph.ops import is_random

__all__ = ["Deferred", "defer"]


@dataclass(frozen=True)
class Deferred:
    """A tree that is yet to be made, by a traced init function.

    Attributes:
        leaves: its leaves, in meta tensors; one object where leaves are tied.
        devices: the device of each.
        structure: its structure.
    """

    leaves: list[Any]
    devices: list[Any]
    structure: Any
    _graph: GraphModule
    _nodes: dict[Node, list[int]]  # the node of each leaf, and the leaf's positions

    def run(self, take: Callable[[list[int], torch.Tensor, bool], None]) -> None:
        """Compute the leaves, in the order of the function, random numbers included.

        Args:
            take: called as soon as nothing will change or read a leaf any more, with its positions, the leaf, and
                False: its memory may be a part of more, or the caller's. What `take` does not copy is freed.
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
            for done in expires.get(n, ()):
                value = env.pop(done, None)
                if done in self._nodes:
                    take(self._nodes[done], value, False)
                del value

    def _last_touches(self) -> dict[Node, list[Node]]:
        """Return for each node the values whose memory it is the last to touch, through whatever view of it."""
        nodes = [n for n in self._graph.graph.nodes if n.op != "output"]
        touched: dict[int, int] = {}  # storage -> when last
        used: dict[Node, int] = {}  # a value without memory, such as a random generator -> when last
        for i, n in enumerate(nodes):
            for x in (n, *n.all_input_nodes):
                used[x] = i
                touched.update({_torch.storage_id(v): i for v in values(x)})
        expires: dict[Node, list[Node]] = {}
        for n in nodes:
            last = max([used[n], *[touched[_torch.storage_id(v)] for v in values(n)]])
            expires.setdefault(nodes[last], []).append(n)
        return expires


@contextmanager
def _watching_seeds() -> Iterator[list[str]]:
    """Watch for traced code that seeds a generator after a traced draw: in the graph all seeds come before draws.

    Yields:
        A list that is filled with the names of the methods that seeded.
    """
    found: list[str] = []
    seeded: list[torch.Generator] = [torch.default_generator]  # kept, so that no other is taken for one of them

    def watch(frame: Any, event: str, called: Any) -> None:
        generator = getattr(called, "__self__", None) if event == "c_call" else None
        if isinstance(generator, torch.Generator) and called.__name__ in ("manual_seed", "seed", "set_state"):
            again = any(g is generator for g in seeded)
            if again and any(is_random(n) for n in _torch.recorded()):
                found.append(called.__name__)
            seeded.append(generator)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(before)


def defer(init: Callable[[], Any]) -> Deferred:
    """Trace an init function, without memory for what it makes.

    Raises:
        DataDependentError: if it reads a tensor's value.
        RuntimeError: if it seeds a random generator that it has drawn from: draws come later than seeds here.
    """
    found: list[Any] = []

    def flat() -> list[torch.Tensor]:
        found[:] = tree.flatten(init())
        return [x for x in found[0] if isinstance(x, torch.Tensor)]

    with _torch.TRACING, _watching_seeds() as reseeded:
        graph = _torch.trace(flat, [])
    if reseeded:
        raise RuntimeError("it seeds a random generator again after drawing from it")
    leaves, structure = found
    output = next(n for n in graph.graph.nodes if n.op == "output")
    positions = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    nodes: dict[Node, list[int]] = {}
    devices: list[Any] = [None] * len(leaves)
    first: dict[int, Node] = {}  # id of a leaf -> its node: a captured tensor has one for each place
    for i, n in zip(positions, output.args[0], strict=True):
        nodes.setdefault(first.setdefault(id(leaves[i]), n), []).append(i)
    for n, at in nodes.items():
        x = n.meta["val"]
        meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        for i in at:
            leaves[i], devices[i] = meta, x.device
    return Deferred(leaves, devices, structure, graph, nodes)
