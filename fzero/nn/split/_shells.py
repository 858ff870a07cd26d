"""Shells in place of a module's blocks: each returns its input, and its arguments are recorded."""

import enum
from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree

__all__ = [
    "ArgumentRecorder",
    "BlockArguments",
    "BlockHandler",
    "BlockOrderError",
    "DependencyTracker",
    "HandoffError",
    "OutputKind",
    "OutputReplacer",
    "Shell",
    "StopForward",
]


_HANDLER: ContextVar["BlockHandler"] = ContextVar("handler")
_CONSTANTS = (torch.Tensor, int, float, str, torch.dtype, torch.device, type(None))


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

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            raise HandoffError("where it reads more than the first value of a block,")
        return super().__getitem__(index)

    def __len__(self) -> int:
        raise HandoffError("where it asks how many values a block returns,")

    def __iter__(self) -> Any:
        raise HandoffError("where it reads all values of a block,")


class OutputKind(enum.Enum):
    """How a module expects a block's output: as a tensor, a tuple's first value, or a tuple of one."""

    TENSOR = "tensor"
    FIRST = "first"
    ONE = "one"

    def wrap(self, x: Any) -> Any:
        """Wrap a value as this kind."""
        return {OutputKind.TENSOR: x, OutputKind.FIRST: _FirstValueOnly((x,)), OutputKind.ONE: (x,)}[self]


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

    A call is handled by the current `BlockHandler`.
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
        output_kind: how the module expects a block's output.
        x: the value that passes from block to block.
        count: the number of blocks that were called.
    """

    def __init__(self, names: tuple[str, ...], output_kind: OutputKind) -> None:
        self.names, self.output_kind = names, output_kind
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
        return self.output_kind.wrap(self.x)

    def on_block(self, index: int, arguments: BlockArguments) -> None:
        """Record a block's arguments, or replace `self.x`."""
        raise NotImplementedError


class ArgumentRecorder(BlockHandler):
    """Records each block's arguments, and stops the forward pass at the last block.

    Attributes:
        arguments: the arguments of each block.
    """

    def __init__(self, names: tuple[str, ...], output_kind: OutputKind) -> None:
        super().__init__(names, output_kind)
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

    def __init__(self, names: tuple[str, ...], output_kind: OutputKind, value: torch.Tensor) -> None:
        super().__init__(names, output_kind)
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
    elif not isinstance(value, _CONSTANTS):
        raise TypeError(
            f"block {block!r} is given {name}, a {type(value).__name__}: expected tensors and constants. If it is a "
            "cache, set model.config.use_cache = False; caches are for sampling. If it is a mask, use "
            "attn_implementation='sdpa' or 'eager', whose masks are tensors"
        )


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
