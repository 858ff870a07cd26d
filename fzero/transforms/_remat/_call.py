"""A call of a rematerialised block as data: its tensors, and the derivatives that may be taken of it."""

import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch.levels import is_differentiated, is_mapped_now
from fzero.axes import Axis, Scope, scope_here, within
from fzero.collectives import Exposed
from fzero.sharding import Shard, Slot
from fzero.transforms._gather import gather
from fzero.transforms._remat._guards import Guard, check_captured, check_given
from fzero.transforms._remat._tape import Chosen, Player, RandomTape

__all__ = [
    "Batched",
    "BlockCall",
    "Distinct",
    "Jvp",
    "Map",
    "StandIns",
    "Step",
    "Tuples",
    "Vjp",
    "arguments",
    "call_of",
    "called",
    "result",
    "tracked",
]

# Trees with numbers in the places of their tensors, and the distinct tensors that the numbers stand for.
#
# Tensors travel through the transforms of torch.func, which must see each once; the rest of a tree is constant.


CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum, Slot),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, torch.nn.Module),
    *(torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _At(NamedTuple):
    """Stands for a tensor: its number among the distinct ones."""

    index: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.index]


class _ShardStandIn(NamedTuple):
    """Stands for a `Shard`: its unit, and the numbers of its pieces and of its origin."""

    uid: int
    data: tuple[int, ...]
    origin: tuple[int, ...] | None

    def of(self, tensors: Sequence[torch.Tensor]) -> Shard:
        origin = None if self.origin is None else tuple([tensors[i] for i in self.origin])
        pieces = [tensors[i] for i in self.data]
        return Shard(pieces[0] if len(pieces) == 1 else tuple(pieces), self.uid, origin)


class Distinct:
    """Collects distinct tensors.

    Attributes:
        tensors: those that were numbered, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, x: torch.Tensor) -> int:
        """Return the number of a tensor, a new one if it is new."""
        if id(x) not in self._numbers:
            self._numbers[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._numbers[id(x)]


@dataclass(frozen=True)
class StandIns:
    """A tree without its tensors.

    Attributes:
        leaves: its leaves, with stand-ins for tensors and boxes.
        structure: its structure.
    """

    leaves: tuple[Any, ...]
    structure: Any

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with tensors in the places of their stand-ins."""
        leaves = [x.of(tensors) if isinstance(x, _At | _ShardStandIn) else x for x in self.leaves]
        return tree.unflatten(self.structure, leaves)

    def boxed(self) -> frozenset[int]:
        """Return the numbers of the tensors in boxes."""
        boxes = [x for x in self.leaves if isinstance(x, _ShardStandIn)]
        return frozenset([i for x in boxes for i in (*x.data, *(x.origin or ()))])

    def has_boxes(self) -> bool:
        """Return whether a leaf is a box: also a slot alone, whose shard is elsewhere, for the error that says so."""
        return any(isinstance(x, _ShardStandIn | Slot) for x in self.leaves)


def arguments(args: Any, kwargs: Any, distinct: Distinct) -> StandIns:
    """Take the tensors, and those in boxes, out of the arguments of a call.

    Raises:
        TypeError: if one holds an object that is neither a tensor, a box, nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths((args, kwargs), _is_leaf)
    stand_ins = [
        _stand_in(x, distinct, tree.place("argument", path.split(".", 1)[1]))
        for path, x in zip(paths, leaves, strict=True)
    ]
    return StandIns(tuple(stand_ins), structure)


def result(out: Any, distinct: Distinct) -> StandIns:
    """Take the tensors out of a result, in which a box is a tree like any other.

    Raises:
        TypeError: if it holds an object that is neither a tensor nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths(out)
    stand_ins = [_stand_in(y, distinct, tree.place("result", path)) for path, y in zip(paths, leaves, strict=True)]
    return StandIns(tuple(stand_ins), structure)


def _is_leaf(x: Any) -> bool:
    # some caches are registered as trees, and would be rebuilt: the block would write into the copy
    return isinstance(x, Shard | Slot) or type(x).__name__.endswith("Cache")


def _stand_in(x: Any, distinct: Distinct, where: str) -> Any:
    if isinstance(x, torch.Tensor):
        return _At(distinct.number(x))
    if isinstance(x, Shard):
        origin = None if x.origin is None else tuple([distinct.number(y) for y in x.origin])
        return _ShardStandIn(x.uid, tuple([distinct.number(y) for y in x.parts]), origin)
    if isinstance(x, CONSTANTS):
        return x
    name = type(x).__name__
    advice = (
        "run the model without its cache, use_cache=False"
        if name.endswith("Cache")
        else "pass trees (dicts, lists, tuples) of tensors and constants, and let the block capture constants"
    )
    raise TypeError(
        f"remat: {where} is a {name}, an object that the block, which runs twice, could write into; {advice}"
    )


# A call of a rematerialised block as a function of tensors, which can be run again later, elsewhere.


def called(block: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a block with its boxes gathered."""
    args, kwargs = gather((args, kwargs))
    return block(*args, **kwargs)


@dataclass(frozen=True)
class Casts:
    """Autocast at a call, which a backward pass may run outside of.

    Attributes:
        dtypes: device -> the dtype that autocast has for it.
        enabled: the devices on which it is on.
    """

    dtypes: dict[str, torch.dtype]
    enabled: frozenset[str]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set autocast as it was."""
        with ExitStack() as stack:
            for device, dtype in self.dtypes.items():
                enabled = device in self.enabled
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


def casts_here() -> Casts:
    """Take autocast down."""
    devices = ("cpu", "cuda")
    dtypes = {device: torch.get_autocast_dtype(device) for device in devices}
    return Casts(dtypes, frozenset([device for device in devices if torch.is_autocast_enabled(device)]))


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, without its tensors.

    Attributes:
        block: the function.
        save: which operations' results are kept.
        arguments: its arguments, with stand-ins for tensors.
        differentiated: for each distinct tensor whether it is differentiated.
        scope: the axes that are bound.
        tokens: the number of each of their tokens among the distinct tensors.
        casts: its autocast.
        host: whether what it is given waits in host memory for the backward pass.
    """

    block: Callable[..., Any]
    save: Chosen | None
    arguments: StandIns
    differentiated: tuple[bool, ...]
    scope: Scope | None
    tokens: tuple[int, ...]
    casts: Casts
    host: bool

    @property
    def waiting(self) -> frozenset[int]:
        """The numbers of the tensors that wait on the host: what is differentiated, but for parameters' boxes."""
        if not self.host:
            return frozenset()
        return frozenset([i for i, d in enumerate(self.differentiated) if d]) - self.arguments.boxed()

    def run(
        self, tensors: Sequence[torch.Tensor], guard: Guard, tape: RandomTape | Player
    ) -> tuple[tuple[torch.Tensor, ...], StandIns]:
        """Run the block on its tensors, in the scope and under the casts of its call.

        Returns:
            The distinct tensors of its result, and the result without them.
        """

        def run() -> Any:
            args, kwargs = self.arguments.filled(tensors)
            with guard, tape:
                return called(self.block, args, kwargs) if self.arguments.has_boxes() else self.block(*args, **kwargs)

        with self.casts.again():
            out = run() if self.scope is None else within(self._rebound(self.scope, tensors), run)
        distinct = Distinct()
        found = result(out, distinct)
        return tuple(distinct.tensors), found

    def _rebound(self, scope: Scope, tensors: Sequence[torch.Tensor]) -> Scope:
        """Return the scope with this run's tokens, which the transforms around it may have wrapped."""
        tokens = iter([tensors[i] for i in self.tokens])

        def rebound(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple([a._replace(token=next(tokens)) for a in axes])

        axes = scope.axes._replace(each=rebound(scope.axes.each), joint=rebound(scope.axes.joint))
        return scope._replace(axes=axes)


def call_of(
    block: Callable[..., Any], save: Chosen | None, args: Any, kwargs: Any, host: bool = False
) -> tuple[BlockCall, tuple[torch.Tensor, ...]]:
    """Take a call down: return it, and its distinct tensors, the tokens of the bound axes among them.

    Raises:
        TypeError: if an argument holds an object that is neither a tensor nor a constant.
        ValueError: if the block's closure holds a tensor that is differentiated.
    """
    check_captured(block)
    distinct, scope = Distinct(), scope_here()
    given = arguments(args, kwargs, distinct)
    axes = () if scope is None else (*scope.axes.each, *scope.axes.joint)
    tokens = tuple([distinct.number(a.token) for a in axes])
    differentiated = tuple([is_differentiated(x) for x in distinct.tensors])
    return BlockCall(block, save, given, differentiated, scope, tokens, casts_here(), host), tuple(distinct.tensors)


# Steps of a derivation as data: the vjp of a function of tensors, its jvp, its map over a batch.
#
# Each step makes of a function of a flat list of tensors another one.


Tensors = Sequence[torch.Tensor]
Tuples = Callable[..., tuple[torch.Tensor, ...]]
Batched = tuple[bool, ...]
"""For each output whether it has the batch of a map."""


@dataclass(frozen=True)
class Vjp:
    """Derives `(inputs, cotangents) -> gradients`, of the inputs that want one, for the outputs that have one.

    Attributes:
        inputs: how many there are.
        wanted: those that want a gradient.
        given: the outputs that have one.
        exposed: what to check of the graph, by axis.
    """

    inputs: int
    wanted: tuple[int, ...]
    given: tuple[int, ...]
    exposed: Mapping[str, Exposed] | None = None

    def of(self, f: Tuples, batched: list[Batched]) -> Tuples:
        """Return the vjp of `f`."""

        def pulled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.inputs], self.wanted, xs))
                out = tuple([ys[i] for i in self.given])
                for exposed in (self.exposed or {}).values():
                    results = {1 + i: y for i, y in zip(self.given, out, strict=True)}  # the first is no tensor
                    exposed.check(results, dict(zip(self.wanted, xs, strict=True)))
                return out

            _, pull = torch.func.vjp(partial, *[tensors[i] for i in self.wanted])  # pyright: ignore
            # lets go of the tensors of each operation as soon as it is done, unless this is differentiated again
            return pull(tuple(tensors[self.inputs :]), retain_graph=torch.is_grad_enabled())

        return pulled


@dataclass(frozen=True)
class Jvp:
    """Derives `(inputs, tangents) -> tangents`, of the inputs that have one, and of the outputs that can."""

    inputs: int
    given: tuple[int, ...]
    wanted: tuple[int, ...]

    def of(self, f: Tuples, batched: list[Batched]) -> Tuples:
        """Return the jvp of `f`."""

        def pushed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.inputs], self.given, xs))
                return tuple([ys[i] for i in self.wanted])

            at = tuple([tensors[i] for i in self.given])
            _, tangents = torch.func.jvp(partial, at, tuple(tensors[self.inputs :]))  # pyright: ignore
            return tangents

        return pushed


@dataclass(frozen=True)  # not a NamedTuple: torch.func would take it for a tree, and copy it
class Map:
    """Maps over a batch."""

    dims: tuple[int | None, ...]
    randomness: str

    def of(self, f: Tuples, batched: list[Batched]) -> Tuples:
        """Return `f` mapped over a batch; when it runs, it adds to `batched` which outputs have it."""

        def one(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = f(*xs)
            batched.append(tuple([is_mapped_now(y) for y in ys]))
            return ys

        def mapped(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = torch.vmap(one, in_dims=self.dims, randomness=self.randomness)(*xs)
            # an output without the batch stays so: along an axis it is equal on all ranks
            return tuple([y if has_it else y[0] for y, has_it in zip(ys, batched[-1], strict=True)])

        return mapped


Step = Vjp | Jvp | Map


def tracked(f: Tuples, wanted: Sequence[int], check: bool) -> Tuples:
    """Run `f` within a vjp of its own, so that torch takes composite operations apart in the same way in each run.

    It does that in another way for a tensor that is differentiated, or mapped and not differentiated. Without this, the
    results that are kept in the forward pass might belong to other operations than those of the recomputation, or be
    laid out otherwise.

    Args:
        f: the function.
        wanted: which of its arguments are differentiated.
        check: whether to refuse results that depend on others which require grad.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def partial(*xs: torch.Tensor) -> Any:
            ys = f(*_put(tensors, wanted, xs))
            if check:
                check_given(ys, xs)
            return xs[0], ys

        _, _, outputs = torch.func.vjp(partial, *[tensors[i] for i in wanted], has_aux=True)  # pyright: ignore
        return outputs

    return run


def _put(xs: Tensors, places: Sequence[int], new: Tensors) -> list[torch.Tensor]:
    out = list(xs)
    for i, x in zip(places, new, strict=True):
        out[i] = x
    return out
