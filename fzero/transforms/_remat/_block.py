"""A call of a rematerialised block as a function of tensors, which can be run again later, elsewhere."""

import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero._torch import OpOverload
from fzero._torch.levels import is_differentiated, is_foreign, is_wrapped
from fzero.axes.axis import Axis
from fzero.axes.scope import Scope, scope_here, within
from fzero.layout.boxes import Shard, Slot
from fzero.transforms._gather import gather
from fzero.transforms._remat._tape import Script, Tape

__all__ = ["Block", "Chosen", "called", "check_given"]

Chosen = Callable[[OpOverload], bool]
CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum, Slot),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, torch.nn.Module),
    *(torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _At(NamedTuple):
    """Stands for a tensor among the leaves: its number among the distinct ones."""

    index: int


class _Box(NamedTuple):
    """Stands for a `Shard` among the leaves: its unit, and the numbers of its data and of its origin."""

    uid: int
    data: int
    origin: tuple[int, ...] | None


def called(block: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a block with its boxes gathered."""
    args, kwargs = gather((args, kwargs))
    return block(*args, **kwargs)


def _is_leaf(x: Any) -> bool:
    # some caches are registered as trees, and would be rebuilt: what the block writes into them would be lost
    return isinstance(x, Shard) or type(x).__name__.endswith("Cache")


class Block:
    """A call of a block.

    Attributes:
        tensors: its distinct tensors, and the tokens of the bound axes.
        inputs: how many they are.
        differentiated: which of them are.
        tracked: whether each run is within a transform of its own that differentiates; decided in the first.
        script: what its first run drew and kept, besides tensors.
        kept: how many tensors that was.
    """

    def __init__(self, block: Callable[..., Any], save: Chosen | None, args: Any, kwargs: Any) -> None:
        self.block, self.save = block, save
        self.tensors: list[torch.Tensor] = []
        self.script, self.kept = Script(), 0
        self.scope: Scope | None = scope_here()
        self.casts = _casts()
        self._places: dict[int, int] = {}
        _check_captured(block)
        paths, leaves, self._structure = tree.flatten_with_paths((args, kwargs), _is_leaf)
        self._leaves = [self._stand_in(path, x) for path, x in zip(paths, leaves, strict=True)]
        self._boxed = any(isinstance(x, _Box) for x in self._leaves)
        axes = () if self.scope is None else (*self.scope.axes.each, *self.scope.axes.joint)
        self._tokens = [self._number(a.token) for a in axes]
        self.inputs = len(self.tensors)
        self.differentiated = [is_differentiated(x) for x in self.tensors]
        self.tracked = False
        self._result: Any = None
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def _number(self, x: torch.Tensor) -> int:
        if id(x) not in self._places:
            self._places[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._places[id(x)]

    def _stand_in(self, path: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return _At(self._number(x))
        if isinstance(x, Shard):
            origin = None if x.origin is None else tuple([self._number(y) for y in x.origin])
            return _Box(x.uid, self._number(x.data), origin)
        return _constant(x, tree.place("argument", path.split(".", 1)[1]))

    def run(self, tensors: Sequence[torch.Tensor], tape: Any, first: bool) -> tuple[torch.Tensor, ...]:
        """Run the block on its tensors, in the scope and under the casts of its call; return its distinct tensors."""

        def value(x: Any) -> Any:
            if isinstance(x, _At):
                return tensors[x.index]
            if isinstance(x, _Box):
                origin = None if x.origin is None else tuple([tensors[i] for i in x.origin])
                return Shard(tensors[x.data], x.uid, origin)
            return x

        def run() -> Any:
            args, kwargs = tree.unflatten(self._structure, [value(x) for x in self._leaves])
            guard = _Guard([x for x, d in zip(tensors, self.differentiated, strict=True) if d] if first else None)
            self._made = guard.made
            with guard, tape:
                return called(self.block, args, kwargs) if self._boxed else self.block(*args, **kwargs)

        with self.casts():
            out = run() if self.scope is None else within(self._scope(tensors), run)
        paths, leaves, structure = tree.flatten_with_paths(out)
        distinct: dict[int, int] = {}
        entries, ys = [], []
        for path, y in zip(paths, leaves, strict=True):
            if not isinstance(y, torch.Tensor):
                entries.append(_constant(y, tree.place("result", path)))
                continue
            if id(y) not in distinct:
                distinct[id(y)] = len(ys)
                ys.append(y)
            entries.append(_At(distinct[id(y)]))
        if first:
            self._result = entries, structure
        return tuple(ys)

    def _scope(self, tensors: Sequence[torch.Tensor]) -> Scope:
        assert self.scope is not None
        scope, tokens = self.scope, iter([tensors[i] for i in self._tokens])

        def rebound(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple([a._replace(token=next(tokens)) for a in axes])

        axes = scope.axes._replace(each=rebound(scope.axes.each), joint=rebound(scope.axes.joint))
        return scope._replace(axes=axes)

    def check_escapes(self, results: Sequence[torch.Tensor]) -> None:
        """Refuse what the first run computed of its arguments, and somebody holds who is not handed it."""
        made, self._made = self._made, {}
        known = {id(y) for y in results} | {id(y._base) for y in results}

        def alive() -> list[torch.Tensor]:
            return [x for ref in made.values() if (x := ref()) is not None and id(x) not in known]

        if alive():
            gc.collect()  # what only a cycle holds
            for x in (found := alive()):
                holders = [h for h in gc.get_referrers(x) if h is not found]
                if all(isinstance(h, Tape | types.FrameType) for h in holders):
                    continue  # a block around this one, or torch itself: it is the base of a view, say
                raise ValueError(
                    f"remat: a tensor {_shown(x)} that the block computed of its arguments is held elsewhere than in "
                    "its result: by an attribute, a list, or a hook that collects (output_attentions, "
                    "output_router_logits of transformers). Its gradient would be lost: have the block return it, or "
                    "detach() it"
                )

    def result(self, ys: Sequence[torch.Tensor]) -> Any:
        """Put the block's result together."""
        entries, structure = self._result
        return tree.unflatten(structure, [ys[x.index] if isinstance(x, _At) else x for x in entries])


def _constant(x: Any, where: str) -> Any:
    if isinstance(x, CONSTANTS):
        return x
    name = type(x).__name__
    advice = (
        "run the model without its cache, use_cache=False"
        if name.endswith("Cache")
        else "pass trees (dicts, lists, tuples) of tensors and constants, and let the block capture what it only reads"
    )
    raise TypeError(
        f"remat: {where} is a {name}, an object that the block, which runs twice, could write into; {advice}"
    )


def _casts() -> Callable[[], Any]:
    """Take autocast down, and return a context manager that sets it: the backward pass may run outside it."""
    found = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in ("cpu", "cuda")
    ]

    @contextmanager
    def inherit() -> Iterator[None]:
        with ExitStack() as stack:
            for device, dtype, enabled in found:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield

    return inherit


# ---------------------------------------------------------------- captured tensors


class _Guard(TorchFunctionMode):
    """Refuses tensors that the block was not given and whose gradient, or batch, would be lost.

    The block runs below all transforms that run at its call, on tensors that require no grad.
    """

    def __init__(self, given: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self.strict = given is not None  # the first run: what requires grad comes from outside
        self.given = {id(x) for x in given or ()}
        self.made: dict[int, weakref.ref[torch.Tensor]] = {}  # what is computed of what was given

    def _is_made(self, x: torch.Tensor) -> bool:
        ref = self.made.get(id(x))
        return id(x) in self.given or (ref is not None and ref() is x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in (*args, *kwargs.values()):
            for y in x if isinstance(x, list | tuple) else (x,):
                if isinstance(y, torch.Tensor) and (is_foreign(y) or (self.strict and _requires_grad(y))):
                    raise ValueError(_captured(y))
        out = func(*args, **kwargs)
        if self.strict and func not in _CUTS and any(self._is_made(x) for x in tree.tensors((args, kwargs))):
            for y in tree.tensors(out):
                if y.is_floating_point():
                    self.made[id(y)] = weakref.ref(y)
        return out


_CUTS = (torch.Tensor.detach, torch.detach)  # what is held of these is meant to have no gradient


def _requires_grad(x: torch.Tensor) -> bool:
    return not is_wrapped(x) and x.requires_grad


def check_given(ys: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
    """Refuse results that depend on what requires grad and is not among `own`."""
    known = {id(x) for x in own}
    todo = [y.grad_fn for y in ys if y.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(_captured(leaf))
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        todo += following


def _check_captured(block: Any) -> None:
    """Refuse what can be seen in a function's closure, whether it is used or not."""
    for _ in range(10):
        if isinstance(block, functools.partial):
            held, following = [block.args, block.keywords], block.func
        elif isinstance(block, types.MethodType):
            held, following = [block.__self__], block.__func__
        else:
            cells = getattr(block, "__closure__", None) or ()
            held = [c.cell_contents for c in cells if _filled(c)]
            following = getattr(block, "__wrapped__", None)
        for x in tree.tensors(held):
            if is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled()):
                raise ValueError(_captured(x))
        if following is None:
            return
        block = following


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _shown(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _captured(x: torch.Tensor) -> str:
    return (
        f"remat: the block uses a tensor {_shown(x)} that it was not given as an argument, and that is differentiated, "
        "or differs by rank or example: in the backward pass it would be lost; pass it as an argument"
    )
