"""Run a module with shells in the places of its blocks, to learn what the blocks get and how they differ."""

import enum
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.random import draw_from, key

__all__ = [
    "BlockArguments",
    "Calls",
    "Changed",
    "Form",
    "Handing",
    "HandsOut",
    "OneOf",
    "Reach",
    "Records",
    "Refused",
    "Shell",
    "Stopped",
    "calls_of",
    "choose",
    "same_calls",
]

# Shells in the places of blocks: they hand on what they are given, and it is taken down.


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


# Which torch functions a function calls, and which tensors depend on others: heard from outside, by a mode.


Calls = list[Any]


class _Listening(TorchFunctionMode):
    """Takes down which torch functions are called, with numbers for tensors."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: Calls = []
        self.kept: list[torch.Tensor] = list(known)  # alive, so that no id is used twice
        self.numbers = {id(x): i for i, x in enumerate(self.kept)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, structure = tree.flatten((args, kwargs or {}))
        made, form = tree.flatten(out)
        self.calls.append((func, structure, [self.seen(x) for x in given], form))
        for x in made:
            if isinstance(x, torch.Tensor) and id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.kept)
                self.kept.append(x)
        return out

    def seen(self, x: Any) -> Any:
        """Return a tensor's number; itself for a constant, or for a tensor that nothing is known of."""
        return ("tensor", self.numbers[id(x)]) if isinstance(x, torch.Tensor) and id(x) in self.numbers else x


def calls_of(f: Callable[..., Any], *args: Any) -> Calls | None:
    """List the torch functions that `f(*args)` calls, on stand-ins without memory; None where these do not do."""
    leaves, structure = tree.flatten(args)
    absent = {id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves if isinstance(x, torch.Tensor)}
    stand_ins = [absent.get(id(x), x) for x in leaves]
    listening = _Listening(list(absent.values()))

    def listened() -> None:
        with listening:
            out = f(*tree.unflatten(structure, stand_ins))
        listening.calls.append(listening.seen(out))

    try:
        draw_from(key(0), listened)  # draws of its own: the step's go on as if nothing had been called
    except Exception:
        return None  # data-dependent code, say
    return listening.calls


def same_calls(first: Calls | None, second: Calls | None) -> bool:
    """Return whether two lists of calls are known to be one function."""
    if first is None or second is None:
        return False
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Reach(TorchFunctionMode):
    """Finds which tensors are computed of some."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.kept = list(sources)  # alive, so that no id is used twice
        self.ids = {id(x) for x in self.kept}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(self.holds(x) for x in tree.flatten((args, kwargs or {}))[0]):
            made = tree.tensors(out)
            self.kept += made
            self.ids |= {id(x) for x in made}
        return out

    def holds(self, x: Any) -> bool:
        """Return whether a value is a tensor that is one of them, or computed of one."""
        return isinstance(x, torch.Tensor) and id(x) in self.ids


# Blocks in a program that all ranks run: there a block's number is a tensor, and each rank's block another one.
#
# Blocks that call the same torch functions on the same arguments are of one kind, whatever their attributes. One of
# them runs for all, with the constants and masks of the rank's own. Where kinds differ, each runs, and the rank's is
# chosen.


class OneOf(NamedTuple):
    """The number of a block that only running ranks know.

    Attributes:
        indices: the numbers that it may be.
        which: a place in `indices`: an integer tensor without dimensions, such as `fzero.axes.axis_index("pp")`.
    """

    indices: tuple[int, ...]
    which: torch.Tensor


def select(values: Sequence[torch.Tensor], which: torch.Tensor) -> torch.Tensor:
    """Choose one of some tensors, by a number that is a tensor."""
    if all(x is values[0] for x in values):
        return values[0]
    return torch.stack(list(values)).index_select(0, which.reshape(1)).squeeze(0)


Run = Callable[[int, Any, dict[str, torch.Tensor], torch.Tensor, Any], torch.Tensor]
Seen = dict[Any, Calls | None]


def choose(
    run: Run, seen: Seen, params: Any, constants: Sequence[Any], x: torch.Tensor, given: Sequence[Any], index: OneOf
) -> torch.Tensor:
    """Run the block that `index` means.

    Args:
        run: `(number of a block, params, constants, x, given) -> x`.
        seen: what blocks called, from earlier calls; it is added to.
        params: of this rank's block.
        constants: by block.
        x: what the block before returned.
        given: by block.
        index: the number of this rank's block.
    """
    kinds = _kinds(run, seen, params, constants, x, given, index)
    out: torch.Tensor | None = None
    for members in kinds:
        own = [i if i in members else members[0] for i in index.indices]
        mine = _selected([constants[i] for i in own], index.which), _selected([given[i] for i in own], index.which)
        y = run(members[0], params, mine[0], x, mine[1])
        if out is None:
            out = y
        else:
            is_mine = torch.tensor([i in members for i in index.indices], device=index.which.device)
            out = torch.where(select(list(is_mine), index.which), y, out)
    assert out is not None, "no index is possible"
    return out


def _kinds(
    run: Run, seen: Seen, params: Any, constants: Sequence[Any], x: torch.Tensor, given: Sequence[Any], index: OneOf
) -> list[list[int]]:
    """Return the possible blocks by kind: those of one kind are one function of their arguments."""
    kinds: list[tuple[Calls | None, list[int]]] = []
    for i in sorted(set(index.indices)):
        known = (i, _facts((params, constants[i], x, given[i])))
        if known not in seen:
            seen[known] = calls_of(lambda *args, i=i: run(i, *args), params, constants[i], x, given[i])
        calls = None if seen[known] is None else [known[1], *(seen[known] or [])]
        same = next((members for other, members in kinds if same_calls(other, calls)), None)
        if same is None:
            kinds.append((calls, [i]))
        else:
            same.append(i)
    return [members for _, members in kinds]


def _facts(args: Any) -> Any:
    leaves, structure = tree.flatten(args)
    return structure, tuple([(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves])


def _selected(trees: Sequence[Any], which: torch.Tensor) -> Any:
    """Choose one of some trees of one structure, leaf by leaf."""
    columns = [tree.flatten(t)[0] for t in trees]
    structure = tree.flatten(trees[0])[1]
    leaves = [select(xs, which) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*columns, strict=True)]
    return tree.unflatten(structure, leaves)
