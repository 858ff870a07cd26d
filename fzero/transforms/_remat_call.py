"""A call of a rematerialised block as data: its tensors, and the steps that derive its derivatives."""

import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import autocast_kinds
from fzero._torch.levels import is_differentiated, is_mapped
from fzero._torch.types import Tensors
from fzero.axes import Axis, Scope, call_in_scope, current_scope
from fzero.collectives import DeferredCheck
from fzero.sharding import Shard, Slot
from fzero.transforms._remat_guards import Guard, check_captured, check_sources
from fzero.transforms._remat_tape import RandomTape, SaveFilter, TapeReplayer
from fzero.transforms._stage_transforms import gather

__all__ = [
    "BatchFlags",
    "BlockCall",
    "IndexedTree",
    "Jvp",
    "Map",
    "Step",
    "TupleFunction",
    "Vjp",
    "flatten_call",
    "gather_and_call",
    "within_vjp",
]

# Trees with indices in place of tensors, and the list of distinct tensors that they index.
#
# The transforms of torch.func must see each tensor once; the rest of a tree is constant.


_CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum, Slot),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, torch.nn.Module),
    *(torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _TensorIndex(NamedTuple):
    """Stands for a tensor: its index among the distinct tensors."""

    index: int

    def restore(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.index]


class _ShardIndices(NamedTuple):
    """Stands for a `Shard`: the id of its spec, and the indices of its pieces and of its origin."""

    spec_id: int
    data: tuple[int, ...]
    origin: tuple[int, ...] | None

    def restore(self, tensors: Sequence[torch.Tensor]) -> Shard:
        origin = None if self.origin is None else tuple([tensors[i] for i in self.origin])
        pieces = [tensors[i] for i in self.data]
        return Shard(pieces[0] if len(pieces) == 1 else tuple(pieces), self.spec_id, origin)


class _DistinctTensors:
    """Collects distinct tensors, and gives each an index.

    Attributes:
        tensors: the tensors, in the order of their indices.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}

    def index_of(self, x: torch.Tensor) -> int:
        """Return the index of a tensor; a new tensor gets the next index."""
        if id(x) not in self._indices:
            self._indices[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._indices[id(x)]


@dataclass(frozen=True)
class IndexedTree:
    """A tree without its tensors.

    Attributes:
        leaves: the tree's leaves, with indices in place of tensors and boxes.
        structure: the tree's structure.
    """

    leaves: tuple[Any, ...]
    structure: Any

    def restore(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with tensors in place of their indices."""
        leaves = [x.restore(tensors) if isinstance(x, _TensorIndex | _ShardIndices) else x for x in self.leaves]
        return tree.unflatten(self.structure, leaves)

    def boxed_indices(self) -> frozenset[int]:
        """Return the indices of the tensors in boxes."""
        boxes = [x for x in self.leaves if isinstance(x, _ShardIndices)]
        return frozenset([i for x in boxes for i in (*x.data, *(x.origin or ()))])

    def has_boxes(self) -> bool:
        """Return whether a leaf is a box. A slot without its shard counts too, so that gathering it raises an error."""
        return any(isinstance(x, _ShardIndices | Slot) for x in self.leaves)


def _replace_arguments(args: Any, kwargs: Any, distinct: _DistinctTensors) -> IndexedTree:
    """Replace the tensors in a call's arguments, and in their boxes, by indices.

    Raises:
        TypeError: if an argument holds an object that is neither a tensor, a box, nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths((args, kwargs), _is_leaf)
    indexed = [
        _indices_of(x, distinct, tree.leaf_name("argument", path.split(".", 1)[1]))
        for path, x in zip(paths, leaves, strict=True)
    ]
    return IndexedTree(tuple(indexed), structure)


def _replace_result(out: Any, distinct: _DistinctTensors) -> IndexedTree:
    """Replace the tensors in a result by indices; boxes are flattened like other trees.

    Raises:
        TypeError: if the result holds an object that is neither a tensor nor a constant.
    """
    paths, leaves, structure = tree.flatten_with_paths(out)
    indexed = [_indices_of(y, distinct, tree.leaf_name("result", path)) for path, y in zip(paths, leaves, strict=True)]
    return IndexedTree(tuple(indexed), structure)


def _is_leaf(x: Any) -> bool:
    # some caches are registered as pytree nodes, and would be rebuilt: the block would write into the copy
    return isinstance(x, Shard | Slot) or type(x).__name__.endswith("Cache")


def _indices_of(x: Any, distinct: _DistinctTensors, label: str) -> Any:
    """Return what stands for an argument in the saved call; an error for an object that the block could change."""
    if isinstance(x, torch.Tensor):
        return _TensorIndex(distinct.index_of(x))
    if isinstance(x, Shard):
        origin = None if x.origin is None else tuple([distinct.index_of(y) for y in x.origin])
        return _ShardIndices(x.spec_id, tuple([distinct.index_of(y) for y in x.pieces]), origin)
    if isinstance(x, _CONSTANTS):
        return x
    name = type(x).__name__
    advice = (
        "run the model without its cache, use_cache=False"
        if name.endswith("Cache")
        else "pass trees (dicts, lists, tuples) of tensors and constants, and let the block capture constants"
    )
    raise TypeError(
        f"remat: {label} is a {name}, an object that the block could write into each time it runs; {advice}"
    )


# A call of a rematerialised block as a function of tensors, which can run again later in another context.


def gather_and_call(block: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Gather the boxes in a block's arguments, and call the block."""
    args, kwargs = gather((args, kwargs))
    return block(*args, **kwargs)


@dataclass(frozen=True)
class _AutocastState:
    """The autocast settings at a call. A backward pass may run outside the autocast context, and restores them.

    Attributes:
        dtypes: device -> its autocast dtype.
        enabled: the devices whose autocast is enabled.
    """

    dtypes: dict[str, torch.dtype]
    enabled: frozenset[str]

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the autocast settings of the call."""
        with ExitStack() as stack:
            for device, dtype in self.dtypes.items():
                enabled = device in self.enabled
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


def _autocast_state() -> _AutocastState:
    """Return the current autocast settings."""
    devices = autocast_kinds()
    dtypes = {device: torch.get_autocast_dtype(device) for device in devices}
    return _AutocastState(dtypes, frozenset([device for device in devices if torch.is_autocast_enabled(device)]))


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, without its tensors.

    Attributes:
        block: the function.
        save: selects the operations whose results are saved.
        arguments: the arguments, with indices in place of tensors.
        differentiated: for each distinct tensor whether it is differentiated.
        scope: the scope of the call, with its bound axes.
        tokens: the indices of the axes' tokens among the distinct tensors.
        autocast: the autocast settings of the call.
        uses_host: whether saved arguments are offloaded to host memory until the backward pass.
    """

    block: Callable[..., Any]
    save: SaveFilter | None
    arguments: IndexedTree
    differentiated: tuple[bool, ...]
    scope: Scope | None
    tokens: tuple[int, ...]
    autocast: _AutocastState
    uses_host: bool

    @property
    def offload_indices(self) -> frozenset[int]:
        """The indices of the tensors to offload to the host: all differentiated tensors outside boxes."""
        if not self.uses_host:
            return frozenset()
        return frozenset([i for i, d in enumerate(self.differentiated) if d]) - self.arguments.boxed_indices()

    def run(
        self, tensors: Sequence[torch.Tensor], guard: Guard, tape: RandomTape | TapeReplayer
    ) -> tuple[tuple[torch.Tensor, ...], IndexedTree]:
        """Run the block on its tensors, in the scope and under the autocast settings of its call.

        Returns:
            The distinct tensors of the block's result, and the result with indices in place of them.
        """

        def run() -> Any:
            args, kwargs = self.arguments.restore(tensors)
            with guard, tape:
                return (
                    gather_and_call(self.block, args, kwargs)
                    if self.arguments.has_boxes()
                    else self.block(*args, **kwargs)
                )

        with self.autocast.restore():
            out = run() if self.scope is None else call_in_scope(self._rebind(self.scope, tensors), run)
        distinct = _DistinctTensors()
        result = _replace_result(out, distinct)
        return tuple(distinct.tensors), result

    def _rebind(self, scope: Scope, tensors: Sequence[torch.Tensor]) -> Scope:
        """Return the scope with this run's tokens, which outer transforms may have wrapped."""
        tokens = iter([tensors[i] for i in self.tokens])

        def rebind(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple([a._replace(token=next(tokens)) for a in axes])

        axes = scope.axes._replace(each=rebind(scope.axes.each), joint=rebind(scope.axes.joint))
        return scope._replace(axes=axes)


def flatten_call(
    block: Callable[..., Any], save: SaveFilter | None, args: Any, kwargs: Any, uses_host: bool = False
) -> tuple[BlockCall, tuple[torch.Tensor, ...]]:
    """Return a call as data, and its distinct tensors, which include the tokens of the bound axes.

    Raises:
        TypeError: if an argument holds an object that is neither a tensor nor a constant.
        ValueError: if the block's closure holds a tensor that is differentiated.
    """
    check_captured(block)
    distinct, scope = _DistinctTensors(), current_scope()
    arguments = _replace_arguments(args, kwargs, distinct)
    axes = () if scope is None else (*scope.axes.each, *scope.axes.joint)
    tokens = tuple([distinct.index_of(a.token) for a in axes])
    differentiated = tuple([is_differentiated(x) for x in distinct.tensors])
    return BlockCall(
        block=block,
        save=save,
        arguments=arguments,
        differentiated=differentiated,
        scope=scope,
        tokens=tokens,
        autocast=_autocast_state(),
        uses_host=uses_host,
    ), tuple(distinct.tensors)


# The steps of a derivation as data: a vjp, a jvp, or a map over a batch.
#
# Each step turns a function of a flat list of tensors into another.


TupleFunction = Callable[..., tuple[torch.Tensor, ...]]
BatchFlags = tuple[bool, ...]
"""For each output whether it has the batch dimension of a map."""


@dataclass(frozen=True)
class Vjp:
    """Derives `(inputs, cotangents) -> gradients`.

    Attributes:
        num_inputs: the number of inputs.
        wrt: the inputs to differentiate with respect to.
        outputs: the outputs that have a cotangent.
        deferred_checks: the checks of the block's autograd graph, by axis.
    """

    num_inputs: int
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]
    deferred_checks: Mapping[str, DeferredCheck] | None = None

    def of(self, f: TupleFunction, batch_flags: list[BatchFlags]) -> TupleFunction:
        """Return the vjp of `f`."""

        def vjp(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.num_inputs], self.wrt, xs))
                out = tuple([ys[i] for i in self.outputs])
                for deferred in (self.deferred_checks or {}).values():
                    results = {1 + i: y for i, y in zip(self.outputs, out, strict=True)}  # output 0 is not a tensor
                    deferred.check(results, dict(zip(self.wrt, xs, strict=True)))
                return out

            _, vjp_fn = torch.func.vjp(partial, *[tensors[i] for i in self.wrt])  # pyright: ignore
            # frees each operation's residuals once it has run, unless this is differentiated again
            return vjp_fn(tuple(tensors[self.num_inputs :]), retain_graph=torch.is_grad_enabled())

        return vjp


@dataclass(frozen=True)
class Jvp:
    """Derives `(inputs, tangents) -> tangents`.

    Attributes:
        num_inputs: the number of inputs.
        wrt: the inputs that have a tangent.
        outputs: the outputs whose dtype can have a tangent.
    """

    num_inputs: int
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]

    def of(self, f: TupleFunction, batch_flags: list[BatchFlags]) -> TupleFunction:
        """Return the jvp of `f`."""

        def jvp(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.num_inputs], self.wrt, xs))
                return tuple([ys[i] for i in self.outputs])

            primals = tuple([tensors[i] for i in self.wrt])
            _, tangents = torch.func.jvp(partial, primals, tuple(tensors[self.num_inputs :]))  # pyright: ignore
            return tangents

        return jvp


@dataclass(frozen=True)  # not a NamedTuple: torch.func would treat it as a tree, and copy it
class Map:
    """Maps over a batch, with the arguments of `torch.vmap`.

    Attributes:
        dims: the batch dimension of each input; None for an input without the batch.
        randomness: as in `torch.vmap`.
    """

    dims: tuple[int | None, ...]
    randomness: str

    def of(self, f: TupleFunction, batch_flags: list[BatchFlags]) -> TupleFunction:
        """Return `f` mapped over a batch; each run appends to `batch_flags` which outputs have the batch."""

        def one(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = f(*xs)
            batch_flags.append(tuple([is_mapped(y) for y in ys]))
            return ys

        def vmapped(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = torch.vmap(one, in_dims=self.dims, randomness=self.randomness)(*xs)
            # an output without the batch stays without it: along an axis it is equal on all ranks
            return tuple([y if has_batch else y[0] for y, has_batch in zip(ys, batch_flags[-1], strict=True)])

        return vmapped


Step = Vjp | Jvp | Map


def within_vjp(f: TupleFunction, wrt: Sequence[int], check: bool) -> TupleFunction:
    """Run `f` within a vjp of its own, so that torch decomposes composite operations in the same way in each run.

    The decomposition differs for a tensor that is differentiated, or mapped and not differentiated. Otherwise results
    saved in the forward pass might have other strides than the recomputation's results, or belong to other operations.

    Args:
        f: the function.
        wrt: the indices of the differentiated arguments.
        check: whether to refuse results that depend on other tensors that require grad.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def partial(*xs: torch.Tensor) -> Any:
            ys = f(*_put(tensors, wrt, xs))
            if check:
                check_sources(ys, xs)
            return xs[0], ys

        _, _, outputs = torch.func.vjp(partial, *[tensors[i] for i in wrt], has_aux=True)  # pyright: ignore
        return outputs

    return run


def _put(xs: Tensors, indices: Sequence[int], new: Tensors) -> list[torch.Tensor]:
    out = list(xs)
    for i, x in zip(indices, new, strict=True):
        out[i] = x
    return out
