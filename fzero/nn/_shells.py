"""Shells in the places of blocks: they hand on what they are given, and it is taken down."""

import enum
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch

__all__ = ["BlockArguments", "Changed", "Form", "Handing", "HandsOut", "Records", "Refused", "Shell", "Stopped"]

_HANDING: ContextVar["Handing"] = ContextVar("handing")
CONSTANTS = (torch.Tensor, int, float, str, torch.dtype, torch.device, type(None))


class Stopped(Exception):
    """The forward pass has come to the last block."""


class Changed(Exception):
    """The module changes what its blocks hand on, or takes it in another form."""


class Refused(ValueError):
    """The module calls its blocks in a way that no pipeline does."""


class _First(tuple[Any, ...]):
    """A tuple of which a module reads the first value alone, and does not ask how many there are."""

    def __getitem__(self, at: Any) -> Any:
        if at != 0:
            raise Changed("where it reads more than the first value of a block,")
        return super().__getitem__(at)

    def __len__(self) -> int:
        raise Changed("where it asks how many values a block returns,")

    def __iter__(self) -> Any:
        raise Changed("where it reads all values of a block,")


class Form(enum.Enum):
    """How a module takes what a block returns: as a tensor, as the first value of a tuple, or as a tuple of one."""

    TENSOR = "tensor"
    FIRST = "first"
    ONE = "one"

    def of(self, x: Any) -> Any:
        """Give a value this form."""
        return {Form.TENSOR: x, Form.FIRST: _First((x,)), Form.ONE: (x,)}[self]


class BlockArguments(NamedTuple):
    """What a block is called with besides `x`.

    Attributes:
        name: the name by which the block is given `x`; None where that is its first argument.
        args: further arguments.
        kwargs: those by name.
    """

    name: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, block: Any, x: torch.Tensor) -> Any:
        """Call a block with `x`, and with these."""
        return block(x, *self.args, **self.kwargs) if self.name is None else block(**{self.name: x}, **self.kwargs)


class Shell(torch.nn.Module):
    """What stands in a block's place. It has no parameters; its attributes are the block's, of which modules read.

    It does what the `Handing` of the present call says.
    """

    def __init__(self, index: int, block: torch.nn.Module) -> None:
        super().__init__()
        self.index = index
        self.__dict__["block"] = block  # no child: its parameters are not the shell's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shell":
        """Share the block, of which only attributes are read."""
        return Shell(self.index, self.__dict__["block"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand on."""
        return _HANDING.get().hand(self.index, args, kwargs)


class Handing:
    """What the shells of a call do, within `with`: each hands on what it is given.

    Attributes:
        names: those of the blocks.
        form: what the module expects a block to return.
        x: what is handed on.
        count: how many blocks were called.
    """

    def __init__(self, names: tuple[str, ...], form: Form) -> None:
        self.names, self.form = names, form
        self.x: Any = None
        self.count = 0
        self._tokens: list[Token[Handing]] = []

    def __enter__(self) -> "Handing":
        self._tokens.append(_HANDING.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _HANDING.reset(self._tokens.pop())

    def hand(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the shell of this index does."""
        expected = self.names[self.count] if self.count < len(self.names) else "none"
        if index != self.count:
            raise Refused(
                f"the module calls block {self.names[index]!r} where {expected!r} was to come: a pipeline calls each "
                "block once, in their order"
            )
        self.count += 1
        x, given = _taken(args, kwargs, self.names[index])
        if index and x is not self.x:
            raise Changed(f"between {self.names[index - 1]!r} and {self.names[index]!r}")
        self.x = x
        self.come(index, given)
        return self.form.of(self.x)

    def come(self, index: int, given: BlockArguments) -> None:
        """Take down what a block is given besides, or hand out another value."""
        raise NotImplementedError


class Records(Handing):
    """Takes down what each block is given, and stops at the last one.

    Attributes:
        given: by block.
    """

    def __init__(self, names: tuple[str, ...], form: Form) -> None:
        super().__init__(names, form)
        self.given: list[BlockArguments] = []

    def come(self, index: int, given: BlockArguments) -> None:
        """Take it down."""
        _check_plain(given.args, self.names[index], "an argument")
        for name, value in given.kwargs.items():
            _check_plain(value, self.names[index], name)
        self.given.append(given)
        if index == len(self.names) - 1:
            raise Stopped


class HandsOut(Handing):
    """Hands a value out of the last block."""

    def __init__(self, names: tuple[str, ...], form: Form, value: torch.Tensor) -> None:
        super().__init__(names, form)
        self.value = value

    def come(self, index: int, given: BlockArguments) -> None:
        """Put the value into the place of what the last block is given."""
        if index == len(self.names) - 1:
            self.x = self.value


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any], block: str) -> tuple[Any, BlockArguments]:
    """Take `x` out of a block's arguments: the first one, or the one named "hidden_states", or the first tensor."""
    if args:
        return args[0], BlockArguments(None, args[1:], kwargs)
    names = ["hidden_states", *[name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]]
    name = next((name for name in names if name in kwargs), None)
    if name is None:
        raise ValueError(f"block {block!r} is given no tensor, so there is nothing to hand on from block to block")
    return kwargs[name], BlockArguments(name, (), {key: value for key, value in kwargs.items() if key != name})


def _check_plain(value: Any, block: str, name: str) -> None:
    """Check that what a block is given consists of tensors and constants."""
    if isinstance(value, tuple | list | dict):
        for x in value.values() if isinstance(value, dict) else value:
            _check_plain(x, block, name)
    elif not isinstance(value, CONSTANTS):
        raise TypeError(
            f"block {block!r} is given {name}, a {type(value).__name__}: expected tensors and constants. A cache is "
            "for sampling: set model.config.use_cache = False. Masks are tensors with attn_implementation='sdpa' or "
            "'eager'"
        )
