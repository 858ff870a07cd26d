"""Run a module with shells in place of its blocks, to record the blocks' arguments and to find equal blocks."""

import enum
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.random import call_with_key, key

__all__ = [
    "ArgumentRecorder",
    "BlockArguments",
    "BlockHandler",
    "BlockOrderError",
    "Calls",
    "DependencyTracker",
    "DynamicIndex",
    "HandoffError",
    "OutputForm",
    "OutputReplacer",
    "Shell",
    "StopForward",
    "record_calls",
    "run_dynamic_block",
    "same_calls",
]

# Shells in place of blocks: each returns its input, and its arguments are recorded.


_HANDLER: ContextVar["BlockHandler"] = ContextVar("handler")
CONSTANTS = (torch.Tensor, int, float, str, torch.dtype, torch.device, type(None))


class StopForward(Exception):
    """Raised at the last block to end the forward pass early."""


class HandoffError(Exception):
    """Raised where the module changes a block's output before the next block, or reads it in another form."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} the module changes the value between blocks, or takes more than one tensor from a block. A "
            "pipeline passes on one tensor, unchanged: have forward give each block's output to the next block as it "
            "is, and move other computation into the blocks or after the last one"
        )


class BlockOrderError(ValueError):
    """Raised where the module calls its blocks in an order that no pipeline can run."""


class _FirstValueOnly(tuple[Any, ...]):
    """A tuple from which a module may read the first value only; asking for its length or for more is an error."""

    def __getitem__(self, at: Any) -> Any:
        if at != 0:
            raise HandoffError("where it reads more than the first value of a block,")
        return super().__getitem__(at)

    def __len__(self) -> int:
        raise HandoffError("where it asks how many values a block returns,")

    def __iter__(self) -> Any:
        raise HandoffError("where it reads all values of a block,")


class OutputForm(enum.Enum):
    """The form in which a module expects a block's output: a tensor, a tuple's first value, or a tuple of one."""

    TENSOR = "tensor"
    FIRST = "first"
    ONE = "one"

    def wrap(self, x: Any) -> Any:
        """Wrap a value in this form."""
        return {OutputForm.TENSOR: x, OutputForm.FIRST: _FirstValueOnly((x,)), OutputForm.ONE: (x,)}[self]


class BlockArguments(NamedTuple):
    """The arguments of a block besides `x`.

    Attributes:
        name: the keyword under which the block receives `x`; None if `x` is its first positional argument.
        args: the other positional arguments.
        kwargs: the other keyword arguments.
    """

    name: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, block: Any, x: torch.Tensor) -> Any:
        """Call a block with `x` and these arguments."""
        return block(x, *self.args, **self.kwargs) if self.name is None else block(**{self.name: x}, **self.kwargs)


class Shell(torch.nn.Module):
    """A stand-in for a block, without parameters. Its other attributes are the block's, since modules read those.

    A call does what the current `BlockHandler` does.
    """

    def __init__(self, index: int, block: torch.nn.Module) -> None:
        super().__init__()
        self.index = index
        self.__dict__["block"] = block  # not a child module, so that its parameters are not the shell's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shell":
        """Return a shell that shares the block, of which only attributes are read."""
        return Shell(self.index, self.__dict__["block"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call to the current `BlockHandler`."""
        return _HANDLER.get().call(self.index, args, kwargs)


class BlockHandler:
    """The behaviour of all shells within a `with` block: each returns its input.

    Attributes:
        names: the names of the blocks.
        form: the form in which the module expects a block's output.
        x: the value that passes from block to block.
        count: the number of blocks that were called.
    """

    def __init__(self, names: tuple[str, ...], form: OutputForm) -> None:
        self.names, self.form = names, form
        self.x: Any = None
        self.count = 0
        self._tokens: list[Token[BlockHandler]] = []

    def __enter__(self) -> "BlockHandler":
        self._tokens.append(_HANDLER.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _HANDLER.reset(self._tokens.pop())

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of the shell with this index."""
        expected = self.names[self.count] if self.count < len(self.names) else "none"
        if index != self.count:
            raise BlockOrderError(
                f"the module calls block {self.names[index]!r} where {expected!r} was expected: have forward call each "
                "block once, in order, as a pipeline does"
            )
        self.count += 1
        x, arguments = _split_arguments(args, kwargs, self.names[index])
        if index and x is not self.x:
            raise HandoffError(f"between {self.names[index - 1]!r} and {self.names[index]!r}")
        self.x = x
        self.on_block(index, arguments)
        return self.form.wrap(self.x)

    def on_block(self, index: int, arguments: BlockArguments) -> None:
        """Record a block's arguments, or replace `self.x`."""
        raise NotImplementedError


class ArgumentRecorder(BlockHandler):
    """Records each block's arguments, and stops the forward pass at the last block.

    Attributes:
        arguments: the arguments of each block.
    """

    def __init__(self, names: tuple[str, ...], form: OutputForm) -> None:
        super().__init__(names, form)
        self.arguments: list[BlockArguments] = []

    def on_block(self, index: int, arguments: BlockArguments) -> None:
        """Record the arguments."""
        _check_plain(arguments.args, self.names[index], "an argument")
        for name, value in arguments.kwargs.items():
            _check_plain(value, self.names[index], name)
        self.arguments.append(arguments)
        if index == len(self.names) - 1:
            raise StopForward


class OutputReplacer(BlockHandler):
    """Replaces the output of the last block by a given value."""

    def __init__(self, names: tuple[str, ...], form: OutputForm, value: torch.Tensor) -> None:
        super().__init__(names, form)
        self.value = value

    def on_block(self, index: int, arguments: BlockArguments) -> None:
        """Replace the last block's output."""
        if index == len(self.names) - 1:
            self.x = self.value


def _split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], block: str) -> tuple[Any, BlockArguments]:
    """Separate `x` from a block's other arguments: `x` is the first one, "hidden_states", or the first tensor."""
    if args:
        return args[0], BlockArguments(None, args[1:], kwargs)
    names = ["hidden_states", *[name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]]
    name = next((name for name in names if name in kwargs), None)
    if name is None:
        raise ValueError(
            f"block {block!r} is called without a tensor, so no value passes from block to block: pass the "
            "previous block's output as its first argument, or by keyword"
        )
    return kwargs[name], BlockArguments(name, (), {key: value for key, value in kwargs.items() if key != name})


def _check_plain(value: Any, block: str, name: str) -> None:
    """Check that an argument of a block consists of tensors and constants."""
    if isinstance(value, tuple | list | dict):
        for x in value.values() if isinstance(value, dict) else value:
            _check_plain(x, block, name)
    elif not isinstance(value, CONSTANTS):
        raise TypeError(
            f"block {block!r} is given {name}, a {type(value).__name__}: expected tensors and constants. If it is a "
            "cache, set model.config.use_cache = False; caches are for sampling. If it is a mask, use "
            "attn_implementation='sdpa' or 'eager', whose masks are tensors"
        )


# Torch-function modes that record a function's calls, and that track which tensors depend on others.


Calls = list[Any]


class _CallRecorder(TorchFunctionMode):
    """Records the calls of torch functions, with numbers in place of tensors."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: Calls = []
        self.tensors: list[torch.Tensor] = list(inputs)  # kept alive, so that no id is used twice
        self.numbers = {id(x): i for i, x in enumerate(self.tensors)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves, structure = tree.flatten((args, kwargs or {}))
        outputs, out_structure = tree.flatten(out)
        self.calls.append((func, structure, [self.label(x) for x in leaves], out_structure))
        for x in outputs:
            if isinstance(x, torch.Tensor) and id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.tensors)
                self.tensors.append(x)
        return out

    def label(self, x: Any) -> Any:
        """Return a tensor's number; a constant or an unknown tensor is returned itself."""
        return ("tensor", self.numbers[id(x)]) if isinstance(x, torch.Tensor) and id(x) in self.numbers else x


def record_calls(f: Callable[..., Any], *args: Any) -> Calls | None:
    """List the torch functions that `f(*args)` calls, run on meta tensors; None if it does not run on those."""
    leaves, structure = tree.flatten(args)
    meta_tensors = {
        id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves if isinstance(x, torch.Tensor)
    }
    stand_ins = [meta_tensors.get(id(x), x) for x in leaves]
    recorder = _CallRecorder(list(meta_tensors.values()))

    def record() -> None:
        with recorder:
            out = f(*tree.unflatten(structure, stand_ins))
        recorder.calls.append(recorder.label(out))

    try:
        call_with_key(key(0), record)  # draws from a key of its own, so that the step's draws stay the same
    except Exception:
        return None  # such as data-dependent code
    return recorder.calls


def same_calls(first: Calls | None, second: Calls | None) -> bool:
    """Return whether two lists of calls certainly belong to one function."""
    if first is None or second is None:
        return False
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class DependencyTracker(TorchFunctionMode):
    """Tracks which tensors are computed from some source tensors."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(sources)  # kept alive, so that no id is used twice
        self.ids = {id(x) for x in self.tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(self.holds(x) for x in tree.flatten((args, kwargs or {}))[0]):
            outputs = tree.tensors(out)
            self.tensors += outputs
            self.ids |= {id(x) for x in outputs}
        return out

    def holds(self, x: Any) -> bool:
        """Return whether a value is one of the sources, or a tensor computed from one."""
        return isinstance(x, torch.Tensor) and id(x) in self.ids


# Blocks in a program that all ranks run. There the index of the rank's block is a tensor, which differs by rank.
#
# Blocks that call the same torch functions on the same arguments are of one kind, even if their attributes differ.
# One block of each kind runs, with the constants and masks of the rank's own block. If there are several kinds, all of
# them run, and each rank selects the output of its own.


class DynamicIndex(NamedTuple):
    """The index of a block that is known only while ranks run.

    Attributes:
        indices: the numbers that the index may be.
        position: a position in `indices`: a 0-d integer tensor, such as `fzero.axes.axis_index("pp")`.
    """

    indices: tuple[int, ...]
    position: torch.Tensor


def select(values: Sequence[torch.Tensor], position: torch.Tensor) -> torch.Tensor:
    """Return `values[position]`, where `position` is a tensor."""
    if all(x is values[0] for x in values):
        return values[0]
    return torch.stack(list(values)).index_select(0, position.reshape(1)).squeeze(0)


Run = Callable[[int, Any, dict[str, torch.Tensor], torch.Tensor, Any], torch.Tensor]
CallCache = dict[Any, Calls | None]


def run_dynamic_block(
    run: Run,
    cache: CallCache,
    params: Any,
    constants: Sequence[Any],
    x: torch.Tensor,
    arguments: Sequence[Any],
    index: DynamicIndex,
) -> torch.Tensor:
    """Run the block with number `index`.

    Args:
        run: `(number of a block, params, constants, x, arguments) -> x`.
        cache: the calls of blocks that earlier runs recorded. New ones are added.
        params: the parameters of this rank's block.
        constants: the constants of each block.
        x: the output of the previous block.
        arguments: the other arguments of each block.
        index: the number of this rank's block.
    """
    kinds = _kinds(run, cache, params, constants, x, arguments, index)
    out: torch.Tensor | None = None
    for members in kinds:
        indices = [i if i in members else members[0] for i in index.indices]
        inputs = (
            _select_tree([constants[i] for i in indices], index.position),
            _select_tree([arguments[i] for i in indices], index.position),
        )
        y = run(members[0], params, inputs[0], x, inputs[1])
        if out is None:
            out = y
        else:
            is_mine = torch.tensor([i in members for i in index.indices], device=index.position.device)
            out = torch.where(select(list(is_mine), index.position), y, out)
    assert out is not None, "no index is possible"
    return out


def _kinds(
    run: Run,
    cache: CallCache,
    params: Any,
    constants: Sequence[Any],
    x: torch.Tensor,
    arguments: Sequence[Any],
    index: DynamicIndex,
) -> list[list[int]]:
    """Group the possible blocks by kind. Blocks of one kind are the same function of their arguments."""
    kinds: list[tuple[Calls | None, list[int]]] = []
    for i in sorted(set(index.indices)):
        cache_key = (i, _signature((params, constants[i], x, arguments[i])))
        if cache_key not in cache:
            cache[cache_key] = record_calls(lambda *args, i=i: run(i, *args), params, constants[i], x, arguments[i])
        calls = None if cache[cache_key] is None else [cache_key[1], *(cache[cache_key] or [])]
        same = next((members for kind_calls, members in kinds if same_calls(kind_calls, calls)), None)
        if same is None:
            kinds.append((calls, [i]))
        else:
            same.append(i)
    return [members for _, members in kinds]


def _signature(args: Any) -> Any:
    leaves, structure = tree.flatten(args)
    return structure, tuple([(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves])


def _select_tree(trees: Sequence[Any], position: torch.Tensor) -> Any:
    """Select one of several trees of equal structure, leaf by leaf."""
    columns = [tree.flatten(t)[0] for t in trees]
    structure = tree.flatten(trees[0])[1]
    leaves = [select(xs, position) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*columns, strict=True)]
    return tree.unflatten(structure, leaves)
