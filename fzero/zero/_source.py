"""Where a tree's leaves come from: a tree, a module, or an init function that is traced and run leaf by leaf."""

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
from fzero._donated import empty
from fzero._notice import notice
from fzero.graph import is_random, values
from fzero.sharding import PerRank, is_box
from fzero.zero._module import initializer, on_meta, trainable

__all__ = ["Deferred", "LeafSupply", "defer", "given", "source_of"]

# Leaves that exist already: given by the caller, who keeps them or gives them up, or made by a function.


@dataclass(frozen=True)
class LeafSupply:
    """A tree whose leaves are at hand, to be handed out once, one after the other.

    Attributes:
        leaves: its leaves, in meta tensors; one object where leaves are tied. Other values are as they were given.
        devices: the device of each; None where there is no tensor.
        structure: its structure, in which a `PerRank` value is a leaf.
        held: the leaves themselves, until they are handed out.
        notes: if the caller gives the leaves up, the message of each for whoever reads it afterwards; else empty.
    """

    leaves: list[Any]
    devices: list[Any]
    structure: Any
    held: list[Any]
    notes: Sequence[str]

    def run(self, take: Callable[[list[int], torch.Tensor, bool], None]) -> None:
        """Hand out the leaves, and forget each.

        Args:
            take: called with each leaf's positions, the leaf, and whether its memory may be kept for the result.
        """
        positions: dict[int, list[int]] = {}  # id of a leaf -> its positions
        for i, x in enumerate(self.leaves):
            if isinstance(x, torch.Tensor):
                positions.setdefault(id(x), []).append(i)
        lie_in = [_torch.storage_id(self.held[at[0]]) for at in positions.values()]
        for at in positions.values():
            x = self.held[at[0]]
            fit = x.is_contiguous() and not x.is_inference()  # to be written into by a jitted step
            alone = lie_in.count(_torch.storage_id(x)) == 1 and x.untyped_storage().nbytes() == x.nbytes
            for i in at:
                self.held[i] = None
            if self.notes and not x.is_meta:
                x = empty(x, self.notes[at[0]])
            take(at, x, bool(self.notes) and fit and alone)
            del x  # before the next one is made


def given(what: str, values: Any, by: str = "") -> LeafSupply:
    """Take a tree apart. Where nobody else holds its leaves, each is freed when it was handed out.

    Args:
        what: what the tree is called in messages.
        values: the tree.
        by: the call by which the caller gives the leaves up, if they do: "step.init(..., donate=True)".

    Raises:
        ValueError: if the tree is cut. Names the first box.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    paths, held, structure = tree.flatten_with_paths(values, is_box)
    leaves: list[Any] = []
    meta: dict[int, torch.Tensor] = {}  # id of a leaf -> its stand-in
    for i, (path, x) in enumerate(zip(paths, held, strict=True)):
        if isinstance(x, PerRank):
            held[i] = tree.map(torch.clone, x)
        else:
            _check_leaf(what, path, x)
        if isinstance(x, torch.Tensor) and id(x) not in meta:
            meta[id(x)] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        leaves.append(meta[id(x)] if isinstance(x, torch.Tensor) else held[i])
    devices = [x.device if isinstance(x, torch.Tensor) else None for x in held]
    notes = [f"{what} leaf {path!r} was donated to {by}" for path in paths] if by else []
    return LeafSupply(leaves, devices, structure, held, notes)


def _check_leaf(what: str, path: str, x: Any) -> None:
    if is_box(x):
        raise ValueError(f"{what} is cut already: leaf {path!r} is {x!r}; gather it with the step that cut it")
    if isinstance(x, torch.nn.Module):
        raise TypeError(
            f"{what} holds a module: give the module itself, or fzero.nn.functional(module).params, a tree of its "
            "parameters"
        )
    if not isinstance(x, torch.Tensor):
        if x is not None:
            raise TypeError(f"{what} leaf {path!r} is {x!r}: expected a tensor; register its class as a pytree node")
        return
    if torch.nn.parameter.is_lazy(x):
        raise TypeError(f"{what} leaf {path!r} is not initialised: run the lazy module once on a batch first")
    if hasattr(type(x), "__tensor_flatten__"):  # torch's protocol of tensors that are made of others
        raise TypeError(
            f"{what} leaf {path!r} is a {type(x).__name__}, a tensor made of others, which cannot be cut: give a plain "
            "tensor (x.full_tensor() of a DTensor)"
        )
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{what} leaf {path!r} is {kind}, and cannot be cut: give a dense tensor, such as x.to_dense()")


# A tree that is made leaf by leaf: its init function is traced without memory, and the graph run later.


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


# Where a tree's leaves come from: a tree, a function that makes one, or a module.


def source_of(what: str, values: Any, one_by_one: bool, by: str = "") -> LeafSupply | Deferred:
    """Return the leaves of a tree, to be had one after the other.

    Args:
        what: what the tree is called in messages.
        values: the tree; or a function without arguments that makes it, or a module, which has its trainable parameters
            or, on the meta device, makes them.
        one_by_one: whether each leaf that a function makes is made only when it is its turn, if the function can be
            traced. Else the function is called now, and each leaf is freed when it had its turn.
        by: the call by which the caller gives the leaves up, if they do.

    Raises:
        ValueError: if a module is partly on the meta device, or the tree is cut. Names the parameter or the leaf.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    if isinstance(values, torch.nn.Module):
        values = initializer(values) if on_meta(values) else trainable(values)
    if not callable(values):
        return given(what, values, by)
    deferred = _deferred(values) if one_by_one else None
    return given(what, values(), by) if deferred is None else deferred


def _deferred(init: Callable[[], Any]) -> Deferred | None:
    """Trace an init function; return None, and say why, if that is not possible."""
    before = random.getstate(), torch.get_rng_state()
    try:
        return defer(init)
    except Exception as error:  # if it is init's own, it comes again when init is called
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        name, reason = getattr(init, "__name__", "the init function"), " ".join(str(error).split())[:120]
        notice(
            f"fzero: {name} cannot be traced ({type(error).__name__}: {reason}), so every rank holds the whole tree "
            "while it is cut"
        )
        return None
